"""A damaged attribute of a study affects this study only."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest
import sqlalchemy as sa
from optuna.distributions import FloatDistribution

from hpsearch.search.api.studies import delete_study, list_studies
from hpsearch.search.cli import run_command
from hpsearch.search.finalists.refit import get_chosen_epochs
from hpsearch.search.finalists.winner import read_run_score
from hpsearch.search.spec.spec import parse_spec
from hpsearch.search.study.study import load_study
from hpsearch.search.study.summary import format_folds
from hpsearch.storage.attributes import (
    EARLY_TERMINATION,
    FOLDER_NAME,
    FOLDS_ERROR,
    LEAKS,
    REASON,
    RESPLIT_SCORE,
    RUN_ID,
    SPEC,
    TRACKING,
    VAL_SAMPLES,
)
from hpsearch.storage.mlflow.run_links import RunLinks
from hpsearch.storage.study_storage.storage import PostgresStorage
from tests.factories import spec_of
from tests.search.study.untrusted.support import TOKEN, make_study, read_error

LR = FloatDistribution(0.0, 1.0)


@pytest.mark.parametrize("key", [SPEC, FOLDER_NAME, EARLY_TERMINATION])
@pytest.mark.parametrize(
    "text", ['{"version": 1, "na', "[" * 5000, '{"finalists_of": {', "[" * 100_000 + "]" * 100_000]
)
def test_a_damaged_study_can_be_listed_and_deleted(
    home: Path, storage: PostgresStorage, owner_url: str, capsys: pytest.CaptureFixture[str], key: str, text: str
) -> None:
    damaged = make_study(storage, **{FOLDER_NAME: f"s-{TOKEN}"})
    other = optuna.create_study(study_name="q", storage=storage)._study_id
    storage.set_study_user_attr(other, SPEC, spec_of(name="none").model_dump() | {"name": "q"})
    storage.set_study_user_attr(other, FOLDER_NAME, f"q-{TOKEN}")
    kept = home / "runs" / f"s-{TOKEN}"
    kept.mkdir(parents=True)
    engine = sa.create_engine(owner_url)
    with engine.begin() as connection:
        connection.execute(
            sa.text(
                "INSERT INTO study_user_attributes (study_id, key, value_json) VALUES (:study, :key, :text) "
                "ON CONFLICT (study_id, key) DO UPDATE SET value_json = excluded.value_json"
            ),
            {"study": damaged, "key": key, "text": text},
        )
    engine.dispose()
    assert [(row.name, row.is_damaged) for row in list_studies()] == [("q", False), ("s", True)]
    assert load_study(storage, "q").folder == f"q-{TOKEN}"
    assert run_command(["show", "q"]) == 0
    for command in (["show", "s"], ["report", "s"], ["stop", "s"], ["worker", "--study", "s"]):
        assert run_command(command) == 2
        error = read_error(capsys)
        assert f"the settings of study 's' in the database are damaged (attribute '{key}')" in error
        assert "hpsearch delete s" in error
    assert delete_study("q") == ["q"]
    assert run_command(["delete", "s", "--yes"]) == 0
    assert "deleted study s" in capsys.readouterr().out
    assert kept.is_dir(), "the folder's name may be damaged"
    assert list_studies() == []


@pytest.mark.parametrize(
    ("spec", "fault"),
    [
        ({}, "--name is not set"),
        ([1], "the stored settings are not an object, but list"),
        (spec_of().model_dump() | {"name": "s", "later": 1}, "unknown setting 'later'"),
    ],
)
def test_a_study_with_invalid_settings_can_be_deleted(
    home: Path, storage: PostgresStorage, capsys: pytest.CaptureFixture[str], spec: object, fault: str
) -> None:
    study = optuna.create_study(study_name="s", storage=storage)._study_id
    storage.set_study_user_attr(study, SPEC, spec)
    assert run_command(["show", "s"]) == 2
    assert f"in the database are damaged (attribute 'hpsearch:spec': {fault}" in read_error(capsys)
    assert run_command(["delete", "s", "--yes"]) == 0
    assert list_studies() == []


@pytest.mark.parametrize(
    ("key", "value"),
    [*((LEAKS, value) for value in (None, [1], "x", -1)), (VAL_SAMPLES, [1]), (VAL_SAMPLES, "x"), (RUN_ID, [1])],
)
def test_an_attribute_of_another_type_is_ignored(
    home: Path, storage: PostgresStorage, capsys: pytest.CaptureFixture[str], key: str, value: object
) -> None:
    make_study(storage, **{key: value})
    for command in (["show", "s"], ["report", "s"], ["gc", "--yes"], ["delete", "s", "--yes"]):
        assert run_command(command) == 0, read_error(capsys)


def test_a_report_shows_a_reason_of_another_type(
    home: Path, storage: PostgresStorage, capsys: pytest.CaptureFixture[str]
) -> None:
    study = make_study(storage, **{VAL_SAMPLES: 0})
    storage.import_trials(study, [optuna.trial.create_trial(value=0.25, user_attrs={REASON: [1]})])
    for command in (["show", "s"], ["report", "s"]):
        assert run_command(command) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("evidence", "promoted_at"), [("[]", "2026-01-01"), ("null", "2026-01-01"), ("{}", "0044-03-15 BC")]
)
def test_a_damaged_promotion_is_left_out(
    home: Path, storage: PostgresStorage, capsys: pytest.CaptureFixture[str], evidence: str, promoted_at: str
) -> None:
    study = make_study(storage)
    with storage.engine.begin() as connection:
        statement = sa.text("""
            INSERT INTO hpsearch_promotions
                (study_id, trial_number, model_name, version, alias, promoted_by, promoted_at, evidence)
            VALUES (:study, 0, 'm', 1, 'champion', 'x', CAST(:at AS timestamptz), CAST(:evidence AS jsonb))
        """)
        connection.execute(statement, {"study": study, "at": promoted_at, "evidence": evidence})
    assert [row.name for row in list_studies()] == ["s"]
    assert run_command(["show", "s"]) == 0


@pytest.mark.parametrize("record", ["x", [], {}, {"sizes": "x"}, {"sizes": [1, 2, [3]], "epochs": [[0], 1]}])
def test_a_damaged_record_of_a_run_is_left_out(record: object) -> None:
    run = optuna.trial.create_trial(
        value=0.5, user_attrs={RESPLIT_SCORE: record, FOLDS_ERROR: record}, intermediate_values={0: 0.4, 1: 0.5}
    )
    spec = parse_spec(spec_of(name="none").model_dump())
    assert read_run_score(0.5, run.user_attrs[RESPLIT_SCORE]) is None
    assert format_folds(spec, run) == ""
    assert get_chosen_epochs(run, maximize=True) == [1]


@pytest.mark.parametrize("text", ["{}", "[]", "null", "{", '{"name": "CategoricalDistribution", "attributes": {}}'])
def test_a_trial_with_a_damaged_parameter_lacks_it(home: Path, storage: PostgresStorage, text: str) -> None:
    study = make_study(storage)
    trials = [optuna.trial.create_trial(value=v, params={"lr": v}, distributions={"lr": LR}) for v in (0.25, 0.5)]
    storage.import_trials(study, trials)
    with storage.engine.begin() as connection:
        statement = "UPDATE trial_params SET distribution_json = :text WHERE param_value = 0.25"
        connection.execute(sa.text(statement), {"text": text})
    fresh = load_study(storage, "s")
    assert [trial.params for trial in fresh.trials()][-2:] == [{}, {"lr": 0.5}]
    assert [storage.get_trial(trial._trial_id).params for trial in fresh.trials()][-2:] == [{}, {"lr": 0.5}]
    for command in (["show", "s"], ["export", "s"], ["gc", "--yes"], ["delete", "s", "--yes"]):
        assert run_command(command) == 0


def test_attributes_that_are_not_json_do_not_hide_pending_trials(storage: PostgresStorage) -> None:
    study = make_study(storage)
    attrs = {"a": float("nan"), TRACKING: "pending: on its way", "z": float("inf")}
    number = storage.import_trials(study, [optuna.trial.create_trial(value=0.5, user_attrs=attrs)])
    assert RunLinks(storage.engine).list_pending_trials(study) == set(number)
