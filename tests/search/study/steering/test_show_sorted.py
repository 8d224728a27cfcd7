"""Order and columns of the trials in `show`."""

from __future__ import annotations

import re

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution
from optuna.trial import create_trial

from tests.search.study.steering.support import Say

CHOICES = CategoricalDistribution([8, "wide", 16])


@pytest.fixture(autouse=True)
def searched(study: optuna.Study, monkeypatch: pytest.MonkeyPatch) -> None:
    """Add three trials; the last one has no width."""
    monkeypatch.setenv("COLUMNS", "80")
    for value, lr, width in ((0.5, 0.1, "wide"), (0.7, 0.01, 16), (0.6, 1.0, None)):
        params = {"lr": lr} if width is None else {"lr": lr, "width": width}
        distributions = {"lr": FloatDistribution(0.001, 10), "width": CHOICES}
        used = {name: distributions[name] for name in params}
        study.add_trial(create_trial(value=value, params=params, distributions=used))


def numbers(shown: str) -> list[int]:
    return [int(number) for number in re.findall(r"^ +(\d) +complete", shown, re.MULTILINE)]


@pytest.mark.parametrize(
    ("key", "order"),
    [
        ("lr", [1, 0, 2]),
        ("-lr", [2, 0, 1]),
        ("accuracy", [0, 2, 1]),
        ("-trial", [2, 1, 0]),
        ("width", [1, 0, 2]),
        ("-width", [0, 1, 2]),
    ],
)
def test_trials_are_sorted_by_a_column(say: Say, key: str, order: list[int]) -> None:
    assert numbers(say("show", "s", "--sort", key)) == order


def test_only_the_given_parameters_are_columns(say: Say) -> None:
    shown = say("show", "s", "--columns", "width")
    assert numbers(shown) == [1, 2, 0]
    assert re.search(r"^trial +state +epochs +value +width *$", shown, re.MULTILINE)
    assert re.search(r"value +width +lr", say("show", "s", "--columns", "width,lr"))


@pytest.mark.parametrize("options", [("--sort", "lrr"), ("--columns", "width,lrr")])
def test_an_unknown_column_is_an_error(say: Say, options: tuple[str, str]) -> None:
    message = say("show", "s", *options, code=2)
    assert f"{options[0]} " in message
    assert "did you mean 'lr'?" in message


def test_parameters_with_the_names_of_other_columns_have_columns_of_their_own(study: optuna.Study, say: Say) -> None:
    names = ("epochs", "value", "trial")
    for value, number in ((0.1, 30), (0.2, 10)):
        params = dict.fromkeys(names, number)
        distributions = {name: CategoricalDistribution([10, 30]) for name in names}
        study.add_trial(create_trial(value=value, params=params, distributions=distributions))
    shown = say("show", "s", "--columns", ",".join(names), "--sort", "params_epochs")
    assert numbers(shown)[:2] == [4, 3]
    assert re.search(r"^trial +state +epochs +value +params_epochs +params_value +params_trial *$", shown, re.MULTILINE)
    assert re.search(r"^ +4 +complete +0 +0.2 +10 +10 +10 *$", shown, re.MULTILINE)
