"""The study spec: valid settings, and the errors for invalid ones."""

from __future__ import annotations

from typing import Any

import optuna
import pytest

from hpsearch.search.errors import SearchError
from hpsearch.search.pruners.hyperband_and_asha import choose_bracket, compute_bracket_shares
from hpsearch.search.samplers import SamplerSpec
from hpsearch.search.samplers.suggest import derive_seed, make_sampler
from hpsearch.search.spec.resolve import list_differences
from hpsearch.search.spec.spec import Settings, StudySpec, parse_spec, parse_stored_spec
from hpsearch.storage.urls import Addresses
from tests.factories import BASE


def test_defaults_are_stored() -> None:
    dumped = parse_spec(BASE | {"epochs": 27}).model_dump()
    assert dumped["version"] == 1
    assert dumped["sampler"] == {
        "name": "freeze_thaw",
        "n_startup_trials": 10,
        "random_fraction": 0.3,
        "near_default_fraction": 0.5,
    }
    assert dumped["pruner"] == {"name": "asha", "min_resource": 3, "reduction_factor": 3, "min_complete": 3}
    assert parse_spec(dumped) == parse_spec(BASE | {"epochs": 27})


@pytest.mark.parametrize(
    ("epochs", "sampler", "pruner", "expected"),
    [
        (4, None, None, ("freeze_thaw", "asha")),
        (3, None, None, ("tpe", "median")),
        (20, "tpe", None, ("tpe", "asha")),
        (20, "gp", None, ("gp", "asha")),
        (20, "cmaes", None, ("cmaes", "median")),
        (20, None, "none", ("freeze_thaw", "none")),
        (20, "brute_force", None, ("brute_force", "median")),
        (20, None, "median", ("freeze_thaw", "median")),
        (2, "random", None, ("random", "median")),
    ],
)
def test_default_sampler_and_pruner(
    epochs: int, sampler: str | None, pruner: str | None, expected: tuple[str, str]
) -> None:
    chosen = {key: {"name": name} for key, name in (("sampler", sampler), ("pruner", pruner)) if name}
    spec = parse_spec(BASE | {"epochs": epochs} | chosen)
    assert (spec.sampler.name, spec.pruner.name) == expected


@pytest.mark.parametrize(("epochs", "first"), [(4, 1), (13, 1), (14, 2), (27, 3), (52, 3), (64, 4), (100, 4)])
def test_the_first_rung_of_asha_is_after_a_ninth_of_the_epochs_or_their_cube_root(epochs: int, first: int) -> None:
    schedule = parse_spec(BASE | {"epochs": epochs}).pruner.get_rung_schedule(epochs)
    assert schedule is not None
    assert schedule.epochs[0] == first


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n_trials": 0}, ["--trials", "0", "at least 1"]),
        ({"n_trials": "many"}, ["--trials", "'many'", "integer"]),
        ({"epochs": -1}, ["epochs", "-1"]),
        ({"epochs": 2.5}, ["epochs", "2.5", "integer"]),
        ({"direction": "up"}, ["direction", "'up'", "maximize"]),
        ({"name": "a/b"}, ["name", "'a/b'", "letters"]),
        ({"name": "../x"}, ["name", "letters"]),
        ({"name": "x" * 101}, ["name", "100"]),
        ({"seed": -1}, ["seed", "-1"]),
        ({"retries": -1}, ["retries", "-1"]),
        ({"timeout": float("inf")}, ["--timeout", "inf"]),
        ({"retries": 10**20}, ["--retries", "1000"]),
        ({"sampler": 5}, ["sampler is 5", "name"]),
        ({"pruner": {"name": "threshold", "lower": float("nan")}}, ["pruner.lower", "nan"]),
        ({1: 2}, ["'1'"]),
        ({"timeout": 0}, ["timeout", "0", "above 0"]),
        ({"budget_epochs": 0}, ["--budget-epochs", "0", "at least 1"]),
        ({"budget_epochs": -5}, ["--budget-epochs", "-5", "at least 1"]),
        ({"budget_epochs": 2.5}, ["--budget-epochs", "2.5", "integer"]),
        ({"budget_seconds": 0}, ["--budget-seconds", "0", "above 0"]),
        ({"budget_seconds": -1.5}, ["--budget-seconds", "-1.5", "above 0"]),
        ({"budget_seconds": float("nan")}, ["--budget-seconds", "nan"]),
        ({"budget_seconds": float("inf")}, ["--budget-seconds", "inf"]),
        ({"budget_seconds": True}, ["--budget-seconds", "true", "number"]),
        ({"min_expected_gain": False}, ["--min-expected-gain", "false", "number"]),
        ({"timeout": True}, ["--timeout", "true", "number"]),
        ({"retry_on": "lost"}, ["retry_on", "'lost'", '["lost", "memory"]']),
        ({"retry_on": ["lots"]}, ["retry_on", "'lots'", "'memory'"]),
        ({"trails": 3}, ["'trails'", "did you mean"]),
        ({"version": 9}, ["version", "9", "version 1"]),
        ({"sampler": {"name": "tpee"}}, ["sampler", "'tpee'", "'tpe'"]),
        ({"sampler": {"name": "tpe", "n_startup": 3}}, ["sampler.n_startup", "'n_startup_trials'"]),
        ({"sampler": {"name": "random", "x": 3}}, ["sampler.x", "no such option; remove sampler.x"]),
        ({"sampler": {"name": "tpe", "n_startup_trials": "auto"}}, ["sampler.n_startup_trials", "'auto'", "integer"]),
        ({"pruner": {"name": "hyperband", "max_resource": "auto"}}, ["pruner.max_resource", "'auto'", "integer"]),
        ({"sampler": {"name": "grid"}}, ["sampler.search_space is not set"]),
        ({"sampler": {"name": "grid", "search_space": {"lr": 0.1}}}, ["sampler.search_space", "table of lists"]),
        ({"sampler": {"name": "grid", "search_space": {}}}, ["sampler.search_space", "{}", "table of lists"]),
        ({"sampler": {"name": "optunahub", "package": "samplers/a", "ref": "main"}}, ["sampler.ref", "'main'", "40"]),
        ({"sampler": {"name": "grid", "search_space": {"lr": []}}}, ["sampler.search_space", "lr has no value"]),
        ({"sampler": {"name": "grid", "search_space": {"lr": [1, 1.0]}}}, ["sampler.search_space", "1.0 twice"]),
        ({"sampler": {"name": "grid", "search_space": {"lr": [0.1, 0.2]}}}, ["--trials 24", "2 configurations"]),
        (
            {"sampler": {"name": "grid", "search_space": {c: list(range(9)) for c in "abcdef"}}},
            ["531441 points", "100000"],
        ),
        ({"sampler": {"name": "nsga2"}}, ["population_size 50", "24 trials", "lower the option"]),
        ({"sampler": {"name": "nsga3", "population_size": 1}}, ["sampler.population_size must be at least 2, not 1"]),
        ({"sampler": {"name": "cmaes", "popsize": 10**9}}, ["sampler.popsize must be at most 100000, not 1000000000"]),
        (
            {"sampler": {"name": "cmaes", "with_margin": True, "lr_adapt": True}},
            ["with_margin and lr_adapt", "choose one"],
        ),
        ({"sampler": {"name": "cmaes", "popsize": 3}}, ["sampler.popsize must be at least 4, not 3"]),
        ({"sampler": {"name": "brute_force", "configurations": 5}}, ["--trials 24", "5 configurations"]),
        ({"pruner": {"name": "medan"}}, ["pruner", "'medan'", "'median'"]),
        ({"pruner": {"name": "wilcoxon"}}, ["--pruner wilcoxon", "add --folds", "median"]),
        ({"pruner": {"name": "patient", "wrapped": {"name": "wilcoxon"}}}, ["--pruner wilcoxon", "add --folds"]),
        ({"pruner": {"name": "wilcoxon"}, "folds": 3}, ["pruner.p_threshold 0.1", "above 0.125", "3 folds"]),
        *(
            ({"pruner": {"name": "wilcoxon", "p_threshold": p}, "folds": 5}, ["pruner.p_threshold must be", str(p)])
            for p in (0.0, 1.0, -0.1, 1.5)
        ),
        ({"pruner": {"name": "wilcoxon", "n_warmup_steps": -1}, "folds": 5}, ["pruner.n_warmup_steps", "at least 0"]),
        ({"pruner": {"name": "patient", "patience": -1}}, ["pruner.patience must be at least 0, not -1"]),
        ({"pruner": {"name": "patient", "min_delta": -0.1}}, ["pruner.min_delta must be at least 0, not -0.1"]),
        ({"pruner": {"name": "patient", "wrapped": {"name": "medan"}}}, ["pruner.wrapped", "'medan'", "'median'"]),
        (
            {"pruner": {"name": "patient", "wrapped": {"name": "asha"}}},
            ["pruner", "asha, which pauses", "wrap another"],
        ),
        (
            {"pruner": {"name": "patient", "wrapped": {"name": "successive_halving", "min_resource": 99}}},
            ["min_resource 99", "epochs 12"],
        ),
        ({"pruner": {"name": "threshold"}}, ["lower or upper"]),
        ({"pruner": {"name": "threshold", "lower": 2, "upper": 1}}, ["lower=2", "upper=1"]),
        ({"pruner": {"name": "hyperband", "min_resource": 3, "max_resource": 2}}, ["max_resource 2", "min_resource 3"]),
        ({"pruner": {"name": "successive_halving", "min_resource": 99}}, ["min_resource 99", "epochs 12"]),
        (
            {"pruner": {"name": "asha", "min_resource": 12}},
            ["min_resource 12", "epochs 12", "lower pruner.min_resource"],
        ),
        ({"sampler": {"name": "freeze_thaw", "random_fraction": True}}, ["sampler.random_fraction", "true", "number"]),
        ({"sampler": {"name": "freeze_thaw", "random_fraction": 1.5}}, ["sampler.random_fraction", "1.5", "at most 1"]),
        ({"pruner": {"name": "asha", "min_complete": 0}}, ["pruner.min_complete must be at least 1, not 0"]),
        ({"pruner": {"name": "asha", "reduction_factor": 1}}, ["pruner.reduction_factor must be at least 2, not 1"]),
        ({"objective": 3}, ["OBJECTIVE", "3", "string"]),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(SearchError) as caught:
        parse_spec({**BASE, **change})
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_former_names_are_read_from_storage_and_rejected_elsewhere() -> None:
    sampler = {"name": "freeze_thaw", "n_startup_trials": 5, "near_default_fraction": 0.0}  # the option is new
    named = {"min_expected_gain": 0.01, "sampler": sampler}
    former = {"stop_when": 0.01, "sampler": {"name": "curves", "n_startup_trials": 5}}
    assert parse_stored_spec({**BASE, **former}) == parse_spec({**BASE, **named})
    assert parse_stored_spec(parse_spec({**BASE, **named}).model_dump()) == parse_spec({**BASE, **named})
    with pytest.raises(SearchError, match="'stop_when' in the study spec; it is now 'min_expected_gain'"):
        parse_spec({**BASE, "stop_when": 0.01})
    with pytest.raises(SearchError, match="unknown sampler 'curves'; it is now 'freeze_thaw'"):
        parse_spec({**BASE, "sampler": {"name": "curves"}})


def test_a_missing_setting_is_named() -> None:
    with pytest.raises(SearchError, match="metric is not set"):
        parse_spec({key: value for key, value in BASE.items() if key != "metric"})


def test_hyperband_stores_its_maximum_resource() -> None:
    spec = parse_spec({**BASE, "pruner": {"name": "hyperband"}})
    assert spec.model_dump()["pruner"]["max_resource"] == 12


# The required options of samplers for 24 trials of `x`.
NEEDED: dict[str, dict[str, Any]] = {
    "grid": {"search_space": {"x": [number / 24 for number in range(24)]}},
    "nsga2": {"population_size": 10},
    "nsga3": {"population_size": 10},
}


def test_a_wrapped_pruner_is_stored_with_options_and_can_be_given_by_name() -> None:
    spec = parse_spec({**BASE, "pruner": {"name": "patient", "wrapped": "hyperband"}})
    dumped = spec.model_dump()["pruner"]
    assert (dumped["patience"], dumped["min_delta"]) == (3, 0.0)
    assert (dumped["wrapped"]["name"], dumped["wrapped"]["max_resource"]) == ("hyperband", 12)
    assert parse_spec(spec.model_dump()) == spec


@pytest.mark.parametrize(
    "name", [name for name in SamplerSpec.registry if name != "optunahub"]
)  # needs a download; it has a separate test
def test_every_sampler_suggests(name: str) -> None:
    spec = parse_spec({**BASE, "sampler": {"name": name, **NEEDED.get(name, {})}})
    step = 1 / 128 if name == "brute_force" else None

    def first_values(seed: int) -> list[float]:
        study = optuna.create_study()
        values = []
        for number in range(3):
            study.sampler = make_sampler(spec.sampler, study_seed=seed, trial_number=number, epochs=1)
            trial = study.ask()
            values.append(trial.suggest_float("x", 0, 1, step=step))
            study.tell(trial, values[-1])
        return values

    assert first_values(1) == first_values(1)
    assert len(set(first_values(1))) == 3, "trials must not repeat each other's start-up points"
    assert first_values(1) != first_values(2)


def test_derived_seeds_differ_and_are_stable() -> None:
    seeds = {derive_seed(0, "trial", number) for number in range(1000)}
    assert len(seeds) == 1000
    assert derive_seed(0, "trial", 7) == 681317022


def test_differences_name_each_setting() -> None:
    stored = parse_spec(BASE).model_dump()
    wanted = StudySpec.model_validate({**stored, "n_trials": 50, "sampler": {"name": "random"}}).model_dump()
    lines = list_differences(stored, wanted)
    assert "n_trials: 24 -> 50" in lines
    assert any(line.startswith("sampler: ") for line in lines)
    assert list_differences(stored, stored) == []


@pytest.mark.parametrize(
    ("options", "rungs"),
    [({}, (1, 3, 9)), ({"min_resource": 2, "reduction_factor": 2}, (2, 4, 8)), ({"min_resource": 11}, (11,))],
)
def test_trials_pause_at_rungs_below_the_last_epoch(options: dict[str, int], rungs: tuple[int, ...]) -> None:
    schedule = parse_spec({**BASE, "pruner": {"name": "asha", **options}}).pruner.get_rung_schedule(12)
    assert schedule is not None
    assert schedule.epochs == rungs


def test_a_trial_of_one_epoch_is_never_paused() -> None:
    assert parse_spec({**BASE, "epochs": 1, "pruner": {"name": "asha"}}).pruner.get_rung_schedule(1) is None
    with pytest.raises(SearchError, match="min_resource 2 is not below --epochs 1"):
        parse_spec({**BASE, "epochs": 1, "pruner": {"name": "asha", "min_resource": 2}})


def test_the_sampler_knows_the_hyperband_brackets_before_any_decision() -> None:
    """It must use only the trials of its bracket, and hpsearch's pruner does not call Optuna's."""
    pruner = parse_spec({**BASE, "pruner": {"name": "hyperband"}}).pruner.build()
    study = optuna.create_study(study_name="night", pruner=pruner)
    for _ in range(30):
        study.tell(study.ask(), 0.0)
    trial = study.ask()
    frozen = study._storage.get_trial(trial._trial_id)
    seen = optuna.pruners._filter_study(study, frozen).get_trials(deepcopy=False)
    parts = compute_bracket_shares(1, 12, 3)
    bracket = choose_bracket("night", trial.number, parts)
    assert [t.number for t in seen] == [n for n in range(31) if choose_bracket("night", n, parts) == bracket]
    assert len(seen) < 31


def test_a_program_has_a_keyword_for_each_setting() -> None:
    settable = StudySpec.model_fields.keys() - {"version", "objective", "finalists_of"}
    assert set(Settings.__annotations__) == settable | set(Addresses.__annotations__)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"metric": ""}, "--metric must have at least 1 character, not ''"),
        ({"n_trials": 0}, "--trials must be at least 1, not 0"),
        ({"epochs": 1_000_001}, "--epochs must be at most 1000000, not 1000001"),
        ({"timeout": 0}, "--timeout must be above 0, not 0"),
        ({"seed": 2**31}, "--seed must be below 2147483648, not 2147483648"),
        ({"seed": 1 << 20_000}, "--seed has an integer with thousands of digits; give a smaller one"),
        (
            {"sampler": {"name": "tpe", "n_startup_trials": 1 << 20_000}},
            "--sampler has an integer with thousands of digits; give a smaller one",
        ),
        ({"epochs": "x"}, "--epochs must be a valid integer, not 'x'"),
        ({"timeout": "x"}, "--timeout must be a valid number, not 'x'"),
        ({"timeout": float("nan")}, "--timeout must be a finite number, not nan"),
        ({"default_first": 1}, "--default-first must be a valid boolean, not 1"),
        ({"objective": ["digits"]}, "OBJECTIVE must be a valid string, not ['digits']"),
        ({"metric": 1}, "--metric must be a valid string, not 1"),
        ({"models": "x"}, "--models must be 'top', 'complete', 'all' or 'none', not 'x'"),
        ({"sampler": {"name": "tpe", "multivariate": "x"}}, "sampler.multivariate must be a valid boolean, not 'x'"),
        ({"pruner": {"name": "percentile", "percentile": 101}}, "pruner.percentile must be at most 100, not 101"),
    ],
)
def test_each_constraint_is_described_in_a_sentence(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(SearchError) as error:
        parse_spec({**BASE, **settings})
    assert str(error.value) == said


def test_a_list_that_is_too_short_is_an_error_in_a_sentence() -> None:
    of = {"study": "s", "study_id": 1, "top": 1, "trials": [], "seeds": [1]}
    with pytest.raises(SearchError, match=r"^finalists_of.trials must have at least 1 item, not \[\]$"):
        parse_spec({**BASE, "finalists_of": of})


@pytest.mark.parametrize("stored", [None, "text", [1]])
def test_stored_settings_that_are_no_object_are_an_error(stored: object) -> None:
    with pytest.raises(SearchError, match="the stored settings are not an object"):
        parse_stored_spec(stored)
