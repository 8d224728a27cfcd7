"""The pruners decide like those of Optuna, except at ties by rounding, on studies from hypothesis."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import optuna
from hypothesis import given
from hypothesis import strategies as st
from optuna.trial import FrozenTrial, TrialState, create_trial

from hpsearch.search.pruners.stopping import TIE_TOLERANCE
from hpsearch.search.pruners.study_pruner import Decision, StoredOtherTrials, StudyPruner
from hpsearch.search.spec.spec import StudySpec, parse_spec
from tests.search.pruning.optunas import optunas_pruner

EPOCHS = 12
# Few distinct numbers cause ties, at the cutoff and elsewhere.
values = st.one_of(
    st.integers(-2, 3).map(float),
    st.sampled_from([math.nan, math.inf, -math.inf, 0.1, 1e-300]),
    st.floats(-10, 10),
)
curves = st.one_of(  # some with gaps
    st.lists(values, max_size=EPOCHS).map(lambda numbers: dict(enumerate(numbers))),
    st.dictionaries(st.integers(0, EPOCHS - 1), values, max_size=EPOCHS),
)
directions = st.sampled_from(["maximize", "minimize"])

stopping = st.fixed_dictionaries(
    {
        "n_startup_trials": st.integers(0, 4),
        "n_warmup_steps": st.integers(0, 3),
        "interval_steps": st.integers(1, 5),
        "n_min_trials": st.integers(1, 4),
    }
)
medians = stopping.map(lambda options: {"name": "median", **options})
percentiles = st.tuples(stopping, st.one_of(st.floats(0, 100), st.sampled_from([0.0, 25.0, 50.0, 100.0]))).map(
    lambda pair: {"name": "percentile", **pair[0], "percentile": pair[1]}
)
thresholds = st.tuples(
    st.integers(0, 6), st.integers(1, 5), st.none() | st.integers(-2, 1), st.none() | st.integers(1, 3)
).filter(lambda t: t[2] is not None or t[3] is not None)
halvings = st.fixed_dictionaries(
    {
        "name": st.just("successive_halving"),
        "min_resource": st.integers(1, 3),
        "reduction_factor": st.integers(2, 4),
        "min_early_stopping_rate": st.integers(0, 2),
        "bootstrap_count": st.integers(0, 3),
    }
)
hyperbands = st.fixed_dictionaries(
    {
        "name": st.just("hyperband"),
        "min_resource": st.integers(1, 3),
        "max_resource": st.none() | st.integers(3, 300),
        "reduction_factor": st.integers(2, 4),
        "bootstrap_count": st.integers(0, 3),
    }
)


def patient(wrapped: st.SearchStrategy[object]) -> st.SearchStrategy[dict[str, object]]:
    options = {"patience": st.integers(0, 4), "min_delta": st.sampled_from([0.0, 0.1, 1.0]), "wrapped": wrapped}
    return st.fixed_dictionaries({"name": st.just("patient"), **options})


def spec_of(pruner: dict[str, object], direction: str) -> StudySpec:
    return parse_spec(
        {
            "name": "s",
            "objective": "digits",
            "metric": "m",
            "direction": direction,
            "n_trials": 9,
            "epochs": EPOCHS,
            "pruner": pruner,
        }
    )


def study_of(spec: StudySpec, history: list[dict[int, float]]) -> optuna.Study:
    study = optuna.create_study(study_name="s", direction=spec.direction, pruner=optunas_pruner(spec.pruner))
    for curve in history:
        study.add_trial(create_trial(value=0.0, intermediate_values=curve))
    return study


@contextmanager
def without_numpys_warnings() -> Iterator[None]:
    """Ignore warnings: Optuna computes the best and the percentile of NaN only."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def optunas(pruner: optuna.pruners.BasePruner, study: optuna.Study, trial: FrozenTrial) -> bool:
    with without_numpys_warnings():
        return pruner.prune(study, trial)


def is_tied_by_rounding(decision: Decision) -> bool:
    """Whether a value differs from an interpolated percentile only by rounding, where Optuna prunes and we do not."""
    if decision.pruner not in ("median", "percentile") or decision.cutoff is None or decision.value is None:
        return False
    return math.isclose(decision.value, decision.cutoff, rel_tol=TIE_TOLERANCE)


def check_against_finished(pruner: dict[str, object], direction: str, history, curve: dict[int, float]) -> None:
    """Report `curve` epoch by epoch to a study that has finished `history`."""
    spec = spec_of(pruner, direction)
    study = study_of(spec, history)
    judge = StudyPruner(spec, study._storage, study._study_id)
    trial = study.ask()
    for step in sorted(curve):
        trial.report(curve[step], step)
        frozen = study._storage.get_trial(trial._trial_id)
        decision = judge(frozen, frozen.intermediate_values)
        by_optuna = optunas(study.pruner, study, frozen)
        assert decision.prune == (by_optuna and not is_tied_by_rounding(decision)), decision
        assert bool(decision.reason) == decision.prune


@given(st.one_of(medians, percentiles), directions, st.lists(curves, max_size=6), curves)
def test_median_and_percentile(pruner, direction, history, curve) -> None:
    check_against_finished(pruner, direction, history, curve)


@given(thresholds, directions, curves)
def test_threshold(options, direction, curve) -> None:
    names = ("n_warmup_steps", "interval_steps", "lower", "upper")
    check_against_finished({"name": "threshold", **dict(zip(names, options, strict=True))}, direction, [], curve)


@given(patient(st.one_of(st.none(), medians, percentiles)), directions, st.lists(curves, max_size=6), curves)
def test_patient(pruner, direction, history, curve) -> None:
    check_against_finished(pruner, direction, history, curve)


@given(directions, st.lists(curves, max_size=3), curves)
def test_none_never_prunes(direction, history, curve) -> None:
    check_against_finished({"name": "none"}, direction, history, curve)


def test_a_trial_without_a_value_continues() -> None:
    for name in ("median", "percentile", "successive_halving", "hyperband", "none"):
        check_against_finished({"name": name}, "maximize", [{0: 1.0}], {})


class JudgeInMemory(StudyPruner):
    """Reads the rungs from Optuna's storage in memory instead of Postgres, and writes none, because Optuna does."""

    def __call__(self, trial: FrozenTrial, values: Mapping[int, float], **named: Any) -> Decision:
        self.noted: dict[str, float] = {}
        return super().__call__(trial, values, **named)

    def _make_peers(self, trial: FrozenTrial) -> StoredOtherTrials:
        return _InMemory(self._storage, self._study_id, trial, 0.0, self.noted)


@dataclass(frozen=True)
class _InMemory(StoredOtherTrials):
    noted: dict[str, float]

    def record_rung_value(self, rung: int, value: float) -> None:
        self.noted[f"completed_rung_{rung}"] = value

    def read_rung_values(self, rung: int) -> list[tuple[int, float]]:
        key = f"completed_rung_{rung}"
        trials = self.storage.get_all_trials(self.study_id)
        return [
            (t.number, t.system_attrs[key]) for t in trials if key in t.system_attrs and t.number != self.trial.number
        ]


@given(
    st.one_of(halvings, hyperbands, patient(st.one_of(halvings, hyperbands))),
    directions,
    st.lists(curves, min_size=1, max_size=12),
    st.sampled_from(["in turn", "together"]),
    st.booleans(),
)
def test_successive_halving_and_hyperband(pruner, direction, history, order, heeded) -> None:
    """Trials run one after another or in parallel, and stop at the pruner's verdicts or continue regardless."""
    spec = spec_of(pruner, direction)
    study = study_of(spec, [])
    judge = JudgeInMemory(spec, study._storage, study._study_id)
    trials = [study.ask() for _ in history]
    steps = [(n, step) for n, curve in enumerate(history) for step in sorted(curve)]
    if order == "together":
        steps.sort(key=lambda pair: pair[1])
    ended: set[int] = set()
    for number, step in steps:
        if number in ended:
            continue
        trial = trials[number]
        trial.report(history[number][step], step)
        before = study._storage.get_trial(trial._trial_id)
        decision = judge(before, before.intermediate_values)
        assert decision.prune == optunas(study.pruner, study, before), decision
        written = study._storage.get_trial(trial._trial_id).system_attrs
        assert judge.noted == {k: v for k, v in written.items() if k not in before.system_attrs}
        if decision.prune and heeded:
            ended.add(number)
            study.tell(trial, state=TrialState.PRUNED)
