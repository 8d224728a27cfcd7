"""The pruner of a study: from its spec and its storage to a decision about one trial.

Optuna's pruners read all trials, running ones with all their values, at each epoch of each trial. The same verdicts
need only the finished trials, which the storage keeps in memory, or the values at one rung, which are one query.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from optuna.trial import FrozenTrial, TrialState

from search.pruning import percentile, threshold
from search.pruning.brackets import bracket_of, shares
from search.pruning.decision import Case, Decision
from search.pruning.halving import Halving
from search.spec.spec import Hyperband, Median, NoPruning, Percentile, StudySpec, SuccessiveHalving, Threshold
from storage.study_storage import PostgresStorage
from storage.study_storage.opening import engine_of
from storage.study_storage.rungs import read_rung, rung_key


class Judge:
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

    def __call__(self, trial: FrozenTrial) -> Decision:
        """Decide about a trial after its last reported epoch, as often as one likes."""
        pruner = self._spec.pruner
        if not trial.intermediate_values:
            return Decision(prune=False, pruner=pruner.name)
        case = Case(
            pruner.name,
            self._spec.metric,
            maximize=self._spec.direction == "maximize",
            epochs=self._spec.epochs,
            values=trial.intermediate_values,
        )
        match pruner:
            case Median() | Percentile():
                return percentile.judge(case, pruner, self._finished)
            case Threshold():
                return threshold.judge(case, pruner)
            case SuccessiveHalving() | Hyperband():
                return self._halving(case, trial)
            case NoPruning():
                return case.on()

    def _halving(self, case: Case, trial: FrozenTrial) -> Decision:
        halving = halving_of(self._spec, trial.number)
        if halving is None:
            return case.on()
        return halving.judge(case, _StoredRungs(self._storage, self._study_id, trial, self._is_peer(halving.bracket)))

    def _is_peer(self, bracket: int | None) -> Callable[[int], bool]:
        if bracket is None:
            return lambda _: True
        parts = _parts(self._spec)
        return lambda number: bracket_of(self._spec.name, number, parts) == bracket

    def _finished(self) -> list[FrozenTrial]:
        if self._max_age > 0:
            return self._storage.finished_trials(self._study_id, (TrialState.COMPLETE,), max_age=self._max_age)
        return self._storage.get_all_trials(self._study_id, deepcopy=False, states=(TrialState.COMPLETE,))


def halving_of(spec: StudySpec, number: int) -> Halving | None:
    """Return the successive halving that a trial goes through, None where the study's pruner is no such one."""
    pruner = spec.pruner
    if isinstance(pruner, SuccessiveHalving):
        return Halving(**pruner.model_dump(exclude={"name"}))
    if not isinstance(pruner, Hyperband) or not (parts := _parts(spec)):
        return None
    bracket = bracket_of(spec.name, number, parts)
    return Halving(pruner.min_resource, pruner.reduction_factor, bracket, pruner.bootstrap_count, bracket)


def _parts(spec: StudySpec) -> tuple[int, ...]:
    pruner = spec.pruner
    assert isinstance(pruner, Hyperband)
    return shares(pruner.min_resource, pruner.max_resource or spec.epochs, pruner.reduction_factor)


@dataclass(frozen=True)
class _StoredRungs:
    """The rungs as Optuna keeps them, in system attributes, so that its own pruner could go on with them."""

    storage: PostgresStorage
    study_id: int
    trial: FrozenTrial
    is_peer: Callable[[int], bool]  # by a trial's number

    def reached(self) -> int:
        rung = 0
        while rung_key(rung) in self.trial.system_attrs:
            rung += 1
        return rung

    def note(self, rung: int, value: float) -> None:
        self.storage.set_trial_system_attr(self.trial._trial_id, rung_key(rung), value)

    def others(self, rung: int) -> list[float]:
        found = read_rung(engine_of(self.storage), self.study_id, rung)
        return [value for number, value in found if number != self.trial.number and self.is_peer(number)]
