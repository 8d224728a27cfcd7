"""The pruner `pbt`: which trials copy which, how parameters change, and which settings it rejects."""

from __future__ import annotations

import random

import pytest
from optuna.distributions import FloatDistribution, IntDistribution

from hpsearch.search.errors import SearchError
from hpsearch.search.pruners.pbt import PBT, perturb
from hpsearch.search.spec.spec import StudySpec, parse_spec
from hpsearch.storage.rungs.generations import Member

LR, SIZE = FloatDistribution(1e-4, 1e-1, log=True), IntDistribution(8, 64, step=8)


def member(number: int, loss: float, *, has_checkpoint: bool = True) -> Member:
    return Member(number, loss, {"lr": 1e-2, "size": 16, "kind": "a"}, {"lr": LR, "size": SIZE}, has_checkpoint)


def spec(**settings: object) -> StudySpec:
    values = {"name": "s", "objective": "x", "metric": "loss", "direction": "minimize", "n_trials": 8, "epochs": 40}
    pruner = {"name": "pbt", **settings.pop("options", {})}  # type: ignore[dict-item]
    return parse_spec({**values, "pruner": pruner, **settings})


def test_the_worst_quarter_copies_the_best_quarter_and_perturbs_only_what_may_change() -> None:
    members = [member(number, loss=float(number)) for number in range(8)]
    copies = PBT(parameters=["lr"]).choose_copies(3, 0, members)
    assert {copy.child for copy in copies} == {6, 7}
    assert {copy.parent for copy in copies} <= {0, 1}
    assert all(
        copy.params["size"] == 16 and copy.params["kind"] == "a" and copy.params["lr"] != 1e-2 for copy in copies
    )
    assert PBT(parameters=["lr"]).choose_copies(3, 0, members[::-1]) == copies, "the order of the rows has no effect"
    assert PBT(parameters=["lr"]).choose_copies(3, 1, members) != copies
    assert PBT(parameters=["lr"]).choose_copies(3, 0, members[:3]) == [], "a quarter of three is less than one"


def test_only_members_with_a_stored_checkpoint_are_copied() -> None:
    members = [member(number, float(number), has_checkpoint=number != 0) for number in range(8)]
    assert {copy.parent for copy in PBT().choose_copies(0, 0, members)} == {1}
    without = [member(number, float(number), has_checkpoint=number > 1) for number in range(8)]
    assert PBT().choose_copies(0, 0, without) == []


@pytest.mark.parametrize(
    ("value", "distribution"),
    [(1e-2, LR), (1e-1, LR), (0.0, FloatDistribution(0.0, 1.0)), (0.25, FloatDistribution(0, 1, step=0.25)), (16, SIZE),
     (2, IntDistribution(1, 4)), (1, IntDistribution(1, 1000, log=True))],
)  # fmt: skip
def test_a_perturbed_value_is_in_the_range_and_on_the_grid(value: float, distribution: FloatDistribution) -> None:
    generator = random.Random(0)
    values = [perturb(value, distribution, generator) for _ in range(200)]
    assert all(distribution._contains(distribution.to_internal_repr(each)) for each in values)
    assert {type(each) for each in values} == {int if isinstance(distribution, IntDistribution) else float}
    assert len(set(values)) > 2
    if isinstance(distribution, FloatDistribution) and distribution.step is None and distribution.low < value:
        near = [each for each in values if min(abs(each - 0.8 * value), abs(each - min(1.2 * value, 0.1))) < 1e-12]
        assert 0.6 < len(near) / len(values) < 0.9, "three quarters are multiplied"


def test_the_generations_are_a_tenth_of_the_epochs_by_default() -> None:
    assert spec().pruner.options == {"interval": 4, "quantile": 0.25, "parameters": None}
    assert spec().sampler.name == "random"
    schedule = spec(options={"interval": 15}).pruner.get_rung_schedule(40)
    assert schedule is not None
    assert schedule.epochs == (15, 30)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_trials": 3}, "--trials 3 is below 4, the smallest population of --pruner pbt; raise --trials"),
        ({"options": {"quantile": 0.1}}, "pruner.quantile 0.1 of --trials 8 is less than one trial"),
        ({"options": {"quantile": 0.7}}, "pruner.quantile must be less than or equal to 0.5|at most 0.5"),
        ({"options": {"interval": 40}}, "pruner.interval 40 is not below --epochs 40"),
        ({"epochs": 1}, "raise --epochs"),
        ({"budget_epochs": 100}, "--budget-epochs is not available with --pruner pbt; remove --budget-epochs"),
        ({"timeout": 100}, "--timeout is not available"),
        ({"folds": 5}, "--folds is not available"),
        ({"sampler": {"name": "tpe"}}, "--sampler tpe is not available with --pruner pbt"),
        ({"directions": {"loss": "minimize", "model_mb": "minimize"}}, "--pruner pbt supports a single metric"),
    ],
)
def test_other_settings_are_rejected(settings: dict[str, object], message: str) -> None:
    with pytest.raises(SearchError, match=message) as caught:
        spec(**settings)
    assert "\n" not in str(caught.value)
