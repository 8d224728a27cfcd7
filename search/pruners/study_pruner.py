"""Pruning decisions of a study, by the study's pruner and the stored values of the other trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from optuna.trial import FrozenTrial, TrialState

from hpsearch.objectives.model_metric_names import MODEL_METRICS
from hpsearch.search.pruners.base_and_halving import Decision, OtherTrials, PruningContext, RungValue
from hpsearch.search.pruners.pbt import PBT
from hpsearch.search.spec.spec import StudySpec
from hpsearch.storage.rungs.rungs import Rungs
from hpsearch.storage.study_storage.reading import get_rung_key, read_rung_values
from hpsearch.storage.study_storage.storage import PostgresStorage
from hpsearch.storage.trials.history import read_fold_values


def make_rungs(spec: StudySpec) -> Rungs | None:
    """Return the rungs at which trials of a study pause; None if trials do not pause."""
    schedule = spec.pruner.get_rung_schedule(spec.epochs)
    if schedule is None:
        return None
    return Rungs(
        spec.pruner.name,
        schedule.epochs,
        spec.epochs,
        schedule.reduction_factor,
        spec.maximize,
        min_complete=schedule.min_complete,
        maximize_each=spec.maximize_each if spec.is_multi_objective else (),
        decide=partial(spec.pruner.choose_copies, spec.seed) if isinstance(spec.pruner, PBT) else None,
    )


class StudyPruner:
    """Pruning decisions for the trials of one study.

    Args:
        spec: spec of the study.
        storage: storage of the study.
        study_id: id of the study.
        max_age: age in seconds up to which the result of the last query for finished trials is used again, so that
            short epochs do not cause a query each.
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
        objective_values: Sequence[float] = (),
    ) -> Decision:
        """Return the decision on a trial after its last reported epoch; safe to repeat.

        Args:
            trial: the trial; only its number and the values that it has recorded at rungs are used.
            values: values of the metric by epoch, from 0.
            reported: values of objectives and constrained metrics in the last epoch, by name; None for no values.
            objective_values: in multi-objective studies, values of all objectives at the best epoch so far.
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
            objective_values=objective_values,
            maximize_each=spec.maximize_each if spec.is_multi_objective else (),
        )
        if spec.pruner.can_prune and (lines := self._find_final_violations(case.reported)):
            return case.prune(f"out of bounds: {', '.join(lines)}; training cannot change this", value=case.value)
        return spec.pruner.decide(case, self._make_peers(trial))

    def _find_final_violations(self, reported: Mapping[str, float]) -> list[str]:
        """Return the violated constraints on metrics that training does not change, such as model size and speed."""
        constant = {name for name in reported if name in MODEL_METRICS and MODEL_METRICS[name].is_constant}
        found = [(bound, reported[bound.metric]) for bound in self._spec.constraint_bounds if bound.metric in constant]
        return [bound.format_violation(value) for bound, value in found if bound.violation(value) > 0]

    def _make_peers(self, trial: FrozenTrial) -> OtherTrials:
        return StoredOtherTrials(self._storage, self._study_id, trial, self._max_age)


@dataclass(frozen=True)
class StoredOtherTrials:
    """Implementation of `OtherTrials` on the study storage.

    Values at rungs are stored in the same trial attributes as in Optuna, so that Optuna's pruners can read them.
    """

    storage: PostgresStorage
    study_id: int
    trial: FrozenTrial
    max_age: float

    def get_finished_trials(self) -> list[FrozenTrial]:
        """Return the COMPLETE trials of the study."""
        if self.max_age > 0:
            return self.storage.get_finished_trials(self.study_id, (TrialState.COMPLETE,), max_age=self.max_age)
        return self.storage.get_all_trials(self.study_id, deepcopy=False, states=(TrialState.COMPLETE,))

    def count_reached_rungs(self) -> int:
        """Return the number of rungs at which the evaluated trial has recorded a value."""
        rung = 0
        while get_rung_key(rung) in self.trial.system_attrs:
            rung += 1
        return rung

    def record_rung_value(self, rung: int, value: RungValue) -> None:
        """Record the evaluated trial's value at a rung; in a multi-objective study, the values of all objectives."""
        self.storage.set_trial_system_attr(self.trial._trial_id, get_rung_key(rung), value)

    def read_rung_values(self, rung: int) -> list[tuple[int, RungValue]]:
        """Return (number, value) of each other trial, in any state, that has recorded a value at a rung."""
        found = read_rung_values(self.storage.engine, self.study_id, rung)
        return [(number, value) for number, value in found if number != self.trial.number]

    def read_fold_values(self, epoch: int, trial: FrozenTrial | None = None) -> list[float]:
        """Return the values of the metric in each fold at an epoch; without `trial`, those of the evaluated trial."""
        return read_fold_values(self.storage.engine, (trial or self.trial)._trial_id).get(epoch, [])


__all__ = ["Decision", "StudyPruner", "make_rungs"]
