"""The pruner `wilcoxon` compares folds of a trial with those of the best trial, by the rules of Optuna's pruner."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Sequence
from statistics import fmean

import optuna
import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st
from optuna.pruners import WilcoxonPruner
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from hpsearch.search.pruners.study_pruner import Decision, StoredOtherTrials, StudyPruner
from hpsearch.search.pruners.wilcoxon import compute_p_value
from hpsearch.search.spec.spec import StudySpec, parse_spec
from hpsearch.storage.attributes import VIOLATIONS
from hpsearch.storage.study_storage.storage import open_storage
from hpsearch.storage.trials.claim_results import Claim
from hpsearch.storage.trials.claims import Claims
from hpsearch.storage.trials.finishing import Outcome
from tests.factories import BASE
from tests.storage.trials.support import budget, take

Curve = list[list[float]]  # values by epoch and fold

BEST = [0.91, 0.92, 0.93, 0.94, 0.95]
WORSE = [value - 0.01 * place for place, value in enumerate(BEST, start=1)]  # in all folds
MIXED = [0.97, *WORSE[1:]]  # the mean is worse, but not all folds are


def folded(direction: str = "maximize", folds: int = 5, **pruner: object) -> StudySpec:
    pruner = {"n_warmup_steps": 0, "name": "wilcoxon", **pruner}
    return parse_spec({**BASE, "direction": direction, "folds": folds, "pruner": pruner})


class Search:
    """A study on Postgres, whose trials report the values of folds as workers do."""

    def __init__(self, url: str, spec: StudySpec) -> None:
        self.spec, self.storage = spec, open_storage(url, application_name="test")
        direction = StudyDirection.MAXIMIZE if spec.maximize else StudyDirection.MINIMIZE
        self.study_id = self.storage.create_new_study([direction], spec.name)
        budget(self.storage, self.study_id, n_trials=20)
        self.claims = Claims(self.storage.engine, self.study_id, worker="w")
        self.pruner = StudyPruner(spec, self.storage, self.study_id)

    def report(self, claim: Claim, *epochs: Sequence[float]) -> Decision:
        start = len(self.storage.get_trial(claim.trial_id).intermediate_values)
        for step, folds in enumerate(epochs, start):
            self.claims.report(claim, step, fmean(folds), folds=folds)
        return self.decide(claim)

    def decide(self, claim: Claim) -> Decision:
        trial = self.storage.get_trial(claim.trial_id)
        return self.pruner(trial, trial.intermediate_values)

    def complete(self, *epochs: Sequence[float], **attrs: object) -> Claim:
        claim, means = take(self.claims), [fmean(folds) for folds in epochs]
        self.report(claim, *epochs)
        value = max(means) if self.spec.maximize else min(means)
        self.claims.finish_attempt(claim, Outcome.COMPLETE, value=value, attrs=attrs)
        return claim


def test_a_trial_that_is_worse_in_all_folds_is_pruned_with_a_reason(database_url: str) -> None:
    search = Search(database_url, folded())
    search.complete([0.5] * 5)
    search.complete(BEST)
    decision = search.report(take(search.claims), WORSE)
    assert decision.reason == (
        "wilcoxon pruner at epoch 1 of 12: best accuracy 0.9 is below 0.93 of trial 1, beyond chance on 5 folds "
        "(p = 0.031)"
    )
    record = {"pruner": "wilcoxon", "epoch": 0, "value": fmean(WORSE), "cutoff": fmean(BEST), "peers": 1}
    assert decision.to_record() == record
    assert not search.report(take(search.claims), MIXED).prune


def test_a_lower_value_is_better_with_minimize(database_url: str) -> None:
    search = Search(database_url, folded("minimize"))
    search.complete(WORSE)
    assert "accuracy 0.93 is above 0.9 of trial 0" in search.report(take(search.claims), BEST).reason
    assert not search.report(take(search.claims), [value - 0.05 for value in WORSE]).prune


def test_each_trial_is_compared_at_its_best_epoch_so_far(database_url: str) -> None:
    search = Search(database_url, folded(n_warmup_steps=1))
    search.complete(WORSE, BEST, [0.99] * 5)
    claim = take(search.claims)
    assert not search.report(claim, [0.1] * 5).prune, "within the warm-up"
    assert not search.report(claim, MIXED).prune
    assert search.report(claim, MIXED).prune, "the reference has reached 0.99"
    other = take(search.claims)
    assert not search.report(other, [0.95] * 5, [0.1] * 5).prune, "the bad epoch is not its best"


def test_trials_without_a_comparison_continue(database_url: str) -> None:
    search = Search(database_url, folded())
    first = take(search.claims)
    assert not search.report(first, WORSE).prune, "no trial is complete"
    search.complete([0.99] * 5, **{VIOLATIONS: ["model_mb 12 is not <= 10"]})
    assert not search.decide(first).prune, "a trial that violates a constraint is no reference"
    search.complete(BEST)
    assert search.decide(first).prune
    for folds in ([math.nan, *WORSE[1:]], [-math.inf, *WORSE[1:]]):
        claim = take(search.claims)
        search.claims.report(claim, 0, fmean(folds), folds=folds)
        assert not search.decide(claim).prune
    study = optuna.load_study(study_name=search.spec.name, storage=search.storage)
    study.add_trial(create_trial(value=1.0, intermediate_values={0: 1.0}))
    assert not search.decide(first).prune, "a trial that was added with Optuna has no folds"


def test_any_worker_decides_the_same_from_the_database(database_url: str) -> None:
    search = Search(database_url, folded())
    search.complete(BEST)
    claim = take(search.claims)
    decision = search.report(claim, WORSE)
    elsewhere = StudyPruner(search.spec, open_storage(database_url, application_name="other"), search.study_id)
    trial = search.storage.get_trial(claim.trial_id)
    assert elsewhere(trial, trial.intermediate_values) == search.decide(claim) == decision


def test_a_trial_that_is_not_worse_needs_no_fold_values(database_url: str) -> None:
    search = Search(database_url, folded(n_warmup_steps=1))
    search.complete(WORSE, WORSE)
    said: list[str] = []
    sa.event.listen(search.storage.engine, "before_cursor_execute", lambda *arguments: said.append(arguments[2]))
    assert not search.report(take(search.claims), BEST).prune
    assert not [statement for statement in said if "SELECT step, folds" in statement]


class InMemory(StoredOtherTrials):
    """Fold values of trials in memory, by trial number and epoch."""

    curves: Sequence[Curve]

    def read_fold_values(self, epoch: int, trial: FrozenTrial | None = None) -> list[float]:
        return self.curves[(trial or self.trial).number][epoch]


def by_optuna(spec: StudySpec, curves: Sequence[Curve]) -> bool:
    """Return the decision of Optuna's pruner on a study in which the folds are the steps."""
    sign = 1 if spec.maximize else -1
    last = len(curves[-1])

    def best_so_far(curve: Curve) -> dict[int, float]:
        return dict(enumerate(max(curve[:last], key=lambda folds: sign * fmean(folds))))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pruner = WilcoxonPruner(p_threshold=spec.pruner.options["p_threshold"])
        study = optuna.create_study(direction=spec.direction, pruner=pruner)
        for curve in curves[:-1]:
            value = sign * max(sign * fmean(folds) for folds in curve)
            study.add_trial(create_trial(value=value, intermediate_values=best_so_far(curve)))
        trial = study.ask()
        for fold, value in best_so_far(curves[-1]).items():
            trial.report(value, fold)
        return trial.should_prune()


# Multiples of 1/16 have exact means, and cause ties and differences of zero.
numbers = st.integers(0, 16).map(lambda number: number / 16)


@given(
    st.integers(2, 8).flatmap(
        lambda folds: st.lists(
            st.lists(st.lists(numbers, min_size=folds, max_size=folds), min_size=4, max_size=4), min_size=1, max_size=4
        )
    ),
    st.integers(1, 4),
    st.sampled_from(["maximize", "minimize"]),
    st.sampled_from([0.3, 0.5, 0.9]),
)
def test_the_decision_is_that_of_optuna_with_folds_as_steps(curves, epochs, direction, threshold) -> None:
    curves = [*curves[:-1], curves[-1][:epochs]]
    spec = folded(direction, folds=len(curves[0][0]), p_threshold=threshold)
    study = optuna.create_study(direction=direction)
    for curve in curves[:-1]:
        means = [fmean(folds) for folds in curve]
        value = max(means) if spec.maximize else min(means)
        study.add_trial(create_trial(value=value, intermediate_values=dict(enumerate(means))))
    trial = study.ask()
    for epoch, folds in enumerate(curves[-1]):
        trial.report(fmean(folds), epoch)
    frozen = study._storage.get_trial(trial._trial_id)

    class Pruner(StudyPruner):
        def _make_peers(self, trial: FrozenTrial) -> StoredOtherTrials:
            peers = InMemory(self._storage, self._study_id, trial, 0.0)
            object.__setattr__(peers, "curves", curves)
            return peers

    decision = Pruner(spec, study._storage, study._study_id)(frozen, frozen.intermediate_values)
    assert decision.prune == by_optuna(spec, curves)


def test_p_values() -> None:
    assert compute_p_value([1.0, 2.0, 3.0, 4.0, 5.0]) == 1 / 32
    assert compute_p_value([1.0] * 5) == 1 / 32, "ties keep the test exact"
    assert compute_p_value([0.0] * 5) > 0.5
    assert math.isnan(compute_p_value([1.0, math.nan]))
    rng = random.Random(0)
    found = [compute_p_value([rng.gauss(0, 1) for _ in range(5)]) < 0.05 for _ in range(2000)]
    assert fmean(found) == pytest.approx(1 / 32, abs=0.012), "the rate of wrong decisions of one test"


def test_equal_trials_are_compared_with_the_first(database_url: str) -> None:
    search = Search(database_url, folded())
    first = search.complete(BEST)
    search.complete(BEST)
    assert f"of trial {first.number}," in search.report(take(search.claims), WORSE).reason
    assert [trial.state for trial in search.storage.get_all_trials(search.study_id)][:2] == [TrialState.COMPLETE] * 2
