"""Optuna's samplers on a study of two metrics with trials in every state."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import optuna
import pytest
from optuna.samplers import BaseSampler, NSGAIIISampler, NSGAIISampler, RandomSampler
from optuna.samplers._tpe.sampler import _split_trials
from optuna.trial import FrozenTrial, TrialState, create_trial

from hpsearch.search.samplers.bohb import EqualEpochsGPSampler, EqualEpochsTPESampler
from hpsearch.search.samplers.equal_epochs import EqualEpochsView
from hpsearch.search.samplers.known_trials import SamplerStudyView, make_sampler_study_view
from hpsearch.storage.attributes import INFEASIBLE, VALUES
from tests.factories import X

DIRECTIONS = ("maximize", "minimize")
COMPLETE, PRUNED, WAITING, RUNNING = TrialState.COMPLETE, TrialState.PRUNED, TrialState.WAITING, TrialState.RUNNING

Kept = dict[int, dict[int, list[float]]]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield


class Made:
    """A study of two metrics; only `kept` has the values of the second one."""

    def __init__(self) -> None:
        self.study, self.kept = optuna.create_study(directions=DIRECTIONS), Kept()

    def add(
        self,
        state: TrialState,
        values: Sequence[Sequence[float]],
        *,
        breaks: float | None = None,
        x: float = 0.5,
        diverged: bool = False,
    ) -> int:
        number = len(self.study.trials)
        best = max(values, key=lambda each: each[0], default=None)
        self.study.add_trial(
            create_trial(
                state=state,
                values=best if state == COMPLETE else None,
                params={"x": x},
                distributions={"x": X},
                intermediate_values={step: first for step, (first, _) in enumerate(values)},
                constraints=None if breaks is None else {"latency": breaks},
                user_attrs={INFEASIBLE: "diverged"} if diverged else {},
            )
        )
        trial_id = self.study.trials[number]._trial_id
        self.kept[trial_id] = {step: list(each) for step, each in enumerate(values)}
        return number

    def sampled(self) -> SamplerStudyView:
        return make_sampler_study_view(self.study, lambda: self.kept)

    def tpe_order(self, least: int) -> list[int]:
        """Return the numbers of trials in the order in which TPE counts them as good."""
        study: Any = EqualEpochsView(self.sampled(), least)
        trials = study._get_trials(deepcopy=False, states=(COMPLETE, PRUNED, RUNNING))
        found: list[int] = []
        for count in range(1, len(trials) + 1):
            good, _ = _split_trials(study, trials, count)
            found += [t.number for t in good if t.number not in found]
        return found


def whole() -> Made:
    """Create trials in every state, with and without a violated constraint."""
    made = Made()
    for number in range(12):
        x = number / 12
        made.add(COMPLETE, [(x, x * x), (x + 0.1, x * x)], breaks=-1.0, x=x)
        made.add(PRUNED, [(x, x * x)], x=x)
        made.add(WAITING, [(x, x)], x=x)
        made.add(RUNNING, [(x, x)], x=x)
    made.add(COMPLETE, [(9.0, 0.0), (9.0, 0.0)], breaks=0.5, x=0.9)
    made.add(PRUNED, [], x=0.9)
    made.add(PRUNED, [(math.nan, 0.0)], x=0.9, diverged=True)
    return made


SAMPLERS: dict[str, Callable[[], BaseSampler]] = {
    "tpe": lambda: EqualEpochsTPESampler(seed=1, multivariate=True, group=True, constant_liar=True),
    "tpe, each parameter alone": lambda: EqualEpochsTPESampler(seed=1, constant_liar=False),
    "gp": lambda: EqualEpochsGPSampler(seed=1, n_startup_trials=5),
    "nsga2": lambda: NSGAIISampler(seed=1, population_size=4),
    "nsga3": lambda: NSGAIIISampler(seed=1, population_size=4),
    "random": lambda: RandomSampler(seed=1),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_multi_objective_samplers_accept_trials_in_every_state(name: str) -> None:
    made = whole()
    study = made.sampled()
    study.sampler = SAMPLERS[name]()
    for _ in range(3):
        trial = optuna.Trial(study, study._storage.create_new_trial(study._study_id))
        assert 0.0 <= trial.suggest_float("x", 0.0, 1.0) <= 1.0
        trial.set_constraint("latency", -1.0)  # Optuna's GP needs one of each complete trial
        made.study.tell(trial.number, [0.5, 0.5])


def test_tpe_compares_all_metrics_after_the_same_epoch() -> None:
    made = Made()
    poor = made.add(COMPLETE, [(0.1, 9.0), (0.2, 9.0), (0.95, 0.5)])  # the last epoch is not compared
    early = made.add(PRUNED, [(9.0, 0.0)])
    accurate = made.add(WAITING, [(0.8, 2.0), (0.9, 2.0)])
    fast = made.add(PRUNED, [(0.6, 1.0), (0.1, 0.0)])  # has the values of its best epoch
    dominated = made.add(RUNNING, [(0.4, 3.0), (0.5, 3.0), (1.0, 0.1)])
    diverged = made.add(PRUNED, [(0.9, 0.0), (math.nan, 0.0)], diverged=True)
    order = made.tpe_order(4)
    assert set(order[:2]) == {accurate, fast}
    assert order[2:] == [dominated, poor, diverged]
    assert early not in order


def test_tpe_ranks_infeasible_trials_last() -> None:
    made = Made()
    poor = made.add(COMPLETE, [(0.2, 9.0)], breaks=-1.0)
    breaks_much, breaks_little = (made.add(COMPLETE, [(9.0, 0.0)], breaks=much) for much in (2.0, 1e-9))
    pruned_and_breaks = made.add(PRUNED, [(0.9, 0.0)], breaks=1.0)
    assert made.tpe_order(4) == [poor, breaks_little, pruned_and_breaks, breaks_much]


def test_only_copies_of_trials_have_values() -> None:
    made = whole()
    study = made.sampled()
    shown = study.get_trials(deepcopy=False, states=(COMPLETE, PRUNED, RUNNING))
    assert shown[0].system_attrs[VALUES] == {"0": [0.0, 0.0], "1": [0.1, 0.0]}
    assert not any(VALUES in t.system_attrs for t in made.study.trials)


def test_the_first_metric_decides_if_only_it_is_known() -> None:
    made = Made()
    numbers = [made.add(PRUNED, [(first, 0.0)]) for first in (0.2, 0.9, 0.5)]
    made.kept.clear()
    assert made.tpe_order(2) == [numbers[place] for place in (1, 2, 0)]


def test_trials_of_one_metric_are_not_copied() -> None:
    study = optuna.create_study(direction="maximize")
    kind = {"params": {"x": 0.5}, "distributions": {"x": X}, "intermediate_values": {0: 1.0}}
    study.add_trial(create_trial(state=PRUNED, **kind))
    shown: list[FrozenTrial] = make_sampler_study_view(study, lambda: {0: {0: [1.0]}}).get_trials(
        deepcopy=False, states=(PRUNED,)
    )
    assert shown[0].system_attrs == {}
