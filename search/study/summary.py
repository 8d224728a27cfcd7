"""What a study came to: counts, the best trial, and the time that pruning saved."""

from __future__ import annotations

from dataclasses import dataclass, field

from optuna.trial import FrozenTrial, TrialState

from hpsearch.search.study.ranking import front_of, in_bounds
from hpsearch.search.study.rungs import seconds_run
from hpsearch.search.study.study import StoredStudy
from hpsearch.storage.attributes import INFEASIBLE, TRACKING


@dataclass(frozen=True)
class Summary:
    """The counts of a study's trials, its best trial, and the time pruning saved."""

    complete: int
    pruned: int
    infeasible: int  # diverged or too large: PRUNED in Optuna, counted apart
    failed: int
    running: int
    waiting: int
    front: tuple[FrozenTrial, ...] = field(repr=False)  # that none dominates; of one metric the best
    out_of_bounds: int  # COMPLETE ones that break a constraint
    epochs_run: int
    epochs_saved: int
    untracked: int  # trials of which something did not reach MLflow
    seconds_saved: float  # at each pruned trial's own pace per epoch

    @property
    def best(self) -> FrozenTrial | None:
        """The best COMPLETE trial within all bounds; of several metrics the best by the first."""
        return self.front[0] if self.front else None

    @property
    def finished(self) -> int:
        """What the budget has spent."""
        return self.complete + self.pruned + self.infeasible + self.failed


def summarise(study: StoredStudy) -> Summary:
    """Return the summary of a study as it stands."""
    trials = study.trials()
    by_state = {state: [t for t in trials if t.state == state] for state in TrialState}
    infeasible = [t for t in by_state[TrialState.PRUNED] if t.user_attrs.get(INFEASIBLE)]
    pruned = [t for t in by_state[TrialState.PRUNED] if not t.user_attrs.get(INFEASIBLE)]
    ran = seconds_run(study, pruned)
    saved_epochs, saved_seconds = 0, 0.0
    for trial in pruned:
        done = len(trial.intermediate_values)
        if done and trial._trial_id in ran:
            left = study.spec.epochs - done
            saved_epochs += left
            saved_seconds += ran[trial._trial_id] / done * left
    return Summary(
        complete=len(by_state[TrialState.COMPLETE]),
        pruned=len(pruned),
        infeasible=len(infeasible),
        failed=len(by_state[TrialState.FAIL]),
        running=len(by_state[TrialState.RUNNING]),
        waiting=len(by_state[TrialState.WAITING]),
        front=tuple(front_of(trials, study.spec.maximized)),
        out_of_bounds=sum(not in_bounds(t) for t in by_state[TrialState.COMPLETE]),
        epochs_run=sum(len(t.intermediate_values) for t in trials),
        epochs_saved=saved_epochs,
        untracked=sum(TRACKING in t.user_attrs for t in trials),
        seconds_saved=saved_seconds,
    )


def format_value(value: object) -> str:
    """Return a parameter's value for a table: floats with four digits that count."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def format_seconds(seconds: float) -> str:
    """Return a length of time for a person: ``42 s``, ``3.5 min``, ``2.1 h``."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


def study_page(dashboard_url: str, study_id: int) -> str:
    """Return the study's page in the Optuna dashboard."""
    return f"{dashboard_url.rstrip('/')}/dashboard/studies/{study_id}"
