"""A study of an earlier version continues. The repository contains a dump of that version's database."""

from __future__ import annotations

from pathlib import Path

import psycopg2
import pytest

from hpsearch import load_objective
from hpsearch.search.cli import run_command
from hpsearch.search.samplers.suggest import derive_training_seed, suggest
from hpsearch.search.study.study import load_study
from hpsearch.storage.database.migrate import migrate
from hpsearch.storage.study_storage.storage import PostgresStorage, open_storage
from hpsearch.storage.trials.claim_results import Claim
from hpsearch.storage.trials.claims import Claims

DUMP = Path(__file__).with_name("database-0.1.0.sql")


@pytest.fixture
def url(empty_database_url: str) -> str:
    connection = psycopg2.connect(empty_database_url.replace("+psycopg2", ""))
    with connection, connection.cursor() as cursor:
        cursor.execute(DUMP.read_text())
        # Leases expire only while the server is up, and the uptime of the test server may be shorter than these leases.
        cursor.execute("UPDATE hpsearch_attempts SET lease = 0")
    connection.close()
    migrate(empty_database_url)
    return empty_database_url


@pytest.fixture
def storage(url: str) -> PostgresStorage:
    return open_storage(url, application_name="test")


def claimed(storage: PostgresStorage, name: str) -> Claim:
    claim = Claims(storage.engine, load_study(storage, name).study_id, worker="host:1").claim()
    assert isinstance(claim, Claim)
    return claim


def test_results_of_an_earlier_version_are_shown(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["studies"], ["show", "kept"], ["show", "cut", "--trial", "0"]):
        assert run_command([*arguments, "--storage-url", url]) == 0
    said = capsys.readouterr().out
    for line in (
        "kept.finalists (finalists)",
        "study kept: 8 of 8 trials (8 complete, 0 pruned, 0 failed)",
        "best: trial 7, val auroc 0.9905",
        "winner: trial 0, val auroc 0.9869 on 1 new seed, standard deviation unknown (0.9902 in the search)",
        "test set: auroc 0.9838, evaluated on 2026-11-22 at 03:29 UTC by ann@host for trial 0",
        "kept@champion",
        "auroc 0.878808 is below the threshold 0.985",
    ):
        assert line in said, said


def test_a_lost_trial_of_an_earlier_version_resumes_from_its_checkpoint(
    storage: PostgresStorage,
) -> None:
    study = load_study(storage, "halfway")
    before = storage.get_trial(storage.get_all_trials(study.study_id)[1]._trial_id)
    claim = claimed(storage, "halfway")
    assert (claim.number, claim.attempt) == (1, 2)
    assert study.folder == "halfway-3-0b711598", "where its checkpoints are"
    with storage.hold_trial(claim.trial_id, claim.attempt):
        config, _ = suggest(load_objective("breast_cancer"), study.open(), claim, study.spec)
    assert config.lr == before.params["lr"]
    assert len(storage.get_trial(claim.trial_id).intermediate_values) == 19, "the epochs up to its last checkpoint"


def test_a_study_of_an_earlier_version_can_be_extended(url: str, storage: PostgresStorage) -> None:
    assert run_command(["extend", "cut", "--trials", "+1", "--storage-url", url]) == 0
    claim = claimed(storage, "cut")
    assert (claim.number, claim.attempt) == (3, 1)


def test_seeds_equal_those_of_the_earlier_version(storage: PostgresStorage) -> None:
    seed = derive_training_seed(load_study(storage, "kept").spec, 0)
    assert seed == 247054594, "as in the evidence of its promotion"
