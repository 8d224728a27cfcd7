"""The study's pruner: asks it about a trial, with the data of the other trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from optuna.trial import FrozenTrial, TrialState

from hpsearch.objectives.model_metrics import MODEL_METRICS
from hpsearch.search.pruners.base import Decision, Noted, OtherTrials, PruningContext
from hpsearch.search.spec.spec import StudySpec
from hpsearch.storage.rungs.rungs import Rungs
from hpsearch.storage.study_storage.reading import get_rung_key, read_rung_values
from hpsearch.storage.study_storage.storage import PostgresStorage


def make_rungs(spec: StudySpec) -> Rungs | None:
    """Return the rungs at which trials of a study wait; None where they do not."""
    promotion = spec.pruner.promotion(spec.epochs)
    if promotion is None:
        return None
    return Rungs(
        spec.pruner.name,
        promotion.epochs,
        spec.epochs,
        promotion.factor,
        spec.maximize,
        min_complete=promotion.complete,
        maximize_each=spec.maximized if spec.is_multi_objective else (),
    )


class StudyPruner:
    """Decides about trials of one study as its pruner would.

    Args:
        spec: the study's.
        storage: where its trials are kept.
        study_id: the study's number there.
        max_age: how many seconds ago it may have been read which trials have finished: with epochs shorter than that
            they are not asked for at each.
    """

    def __init__(self, spec: StudySpec, storage: PostgresStorage, study_id: int, *, max_age: float = 0.0) -> None:
        self._max_age = max_age
        self._spec = spec
        self._storage = storage
        self._study_id = study_id

    def __call__(
        self,
        trial: FrozenTrial,
        values: Mapping[int, float],
        *,
        reported: Mapping[str, float] | None = None,
        vector: Sequence[float] = (),
    ) -> Decision:
        """Decide about a trial after its last reported epoch, as often as one likes.

        Args:
            trial: with the rungs that it has noted; its values are not read.
            values: its metric by epoch.
            reported: all metrics that the study asks for, of the last epoch.
            vector: what the trial comes to so far, of all metrics that are optimised.
        """
        spec = self._spec
        if not values:
            return Decision(prune=False, pruner=spec.pruner.name)
        case = PruningContext(
            pruner=spec.pruner.name,
            study=spec.name,
            number=trial.number,
            metric=spec.metric,
            maximize=spec.maximize,
            epochs=spec.epochs,
            values=values,
            reported=reported or {},
            vector=vector,
            maximized=spec.maximized if spec.is_multi_objective else (),
        )
        if spec.pruner.prunes and (lines := self._never_in_bounds(case.reported)):
            return case.prune(f"out of bounds: {', '.join(lines)}, which no more training changes", value=case.last)
        return spec.pruner.judge(case, self._peers(trial))

    def _never_in_bounds(self, reported: Mapping[str, float]) -> list[str]:
        """The constraints that a trial breaks by what stays as it is: its size, and how fast it is."""
        settled = {name for name in reported if name in MODEL_METRICS and MODEL_METRICS[name].is_constant}
        broken = [bound for bound in self._spec.bounds if bound.metric in settled]
        return [
            bound.format_violation(reported[bound.metric])
            for bound in broken
            if bound.violation(reported[bound.metric]) > 0
        ]

    def _peers(self, trial: FrozenTrial) -> OtherTrials:
        return StoredOtherTrials(self._storage, self._study_id, trial, self._max_age)


@dataclass(frozen=True)
class StoredOtherTrials:
    """The other trials; rungs as Optuna keeps them, in system attributes, so that its own pruner could go on."""

    storage: PostgresStorage
    study_id: int
    trial: FrozenTrial
    max_age: float

    def finished(self) -> list[FrozenTrial]:
        """Return the COMPLETE trials."""
        if self.max_age > 0:
            return self.storage.get_finished_trials(self.study_id, (TrialState.COMPLETE,), max_age=self.max_age)
        return self.storage.get_all_trials(self.study_id, deepcopy=False, states=(TrialState.COMPLETE,))

    def reached(self) -> int:
        """Return how many rungs the trial has noted a value at."""
        rung = 0
        while get_rung_key(rung) in self.trial.system_attrs:
            rung += 1
        return rung

    def note(self, rung: int, value: Noted) -> None:
        """Note the trial's value at a rung, or those of several metrics."""
        self.storage.set_trial_system_attr(self.trial._trial_id, get_rung_key(rung), value)

    def at_rung(self, rung: int) -> list[tuple[int, Noted]]:
        """Return number and value of all other trials at a rung."""
        found = read_rung_values(self.storage.engine, self.study_id, rung)
        return [(number, value) for number, value in found if number != self.trial.number]


__all__ = ["Decision", "StudyPruner", "make_rungs"]
