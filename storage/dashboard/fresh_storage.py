"""The studies as the dashboard reads them: what is noted of a trial after its end is seen too, and its constraints."""

from __future__ import annotations

from collections.abc import Container

from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from hpsearch.storage.dashboard.feasible import in_older_form, is_feasible
from hpsearch.storage.mlflow.artifacts import PREFIX
from hpsearch.storage.study_storage import PostgresStorage

_LISTED = """
    SELECT DISTINCT trial_id FROM trial_system_attributes
     WHERE trial_id = ANY(:trials) AND starts_with(key, :prefix)
"""


class DashboardStorage(PostgresStorage):
    """Reads a finished trial once more when its files have reached MLflow.

    To other processes a finished trial is final, and they keep it for good; files arrive in the background, later.
    """

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        trials = super().get_all_trials(study_id, deepcopy=False, states=states)
        lacking = [trial._trial_id for trial in trials if trial.state.is_finished() and not _lists_files(trial)]
        found = self._database.rows(_LISTED, {"trials": lacking, "prefix": PREFIX}) if lacking else []
        for row in found:
            self.read_again(row.trial_id)
        if found or deepcopy:
            trials = super().get_all_trials(study_id, deepcopy=deepcopy, states=states)
        return [in_older_form(trial) for trial in trials]

    def get_best_trial(self, study_id: int) -> FrozenTrial:
        best = super().get_best_trial(study_id)
        if is_feasible(best):
            return best
        complete = self.get_all_trials(study_id, deepcopy=False, states=[TrialState.COMPLETE])
        within = [trial for trial in complete if is_feasible(trial) and trial.value is not None]
        maximize = self.get_study_directions(study_id)[0] == StudyDirection.MAXIMIZE
        return min(within, key=lambda trial: (-1 if maximize else 1) * (trial.value or 0.0), default=best)


def _lists_files(trial: FrozenTrial) -> bool:
    return any(key.startswith(PREFIX) for key in trial.system_attrs)
