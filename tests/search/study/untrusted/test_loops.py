"""Others cannot choose the checkpoints that a custom training loop of the victim loads, and may unpickle."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import sqlalchemy as sa

from hpsearch.objectives.base_objective import BaseObjective
from hpsearch.objectives.loading import load_objective
from hpsearch.search.cli import run_command
from hpsearch.search.errors import SearchError
from hpsearch.search.study.checkpoints import check_checkpoint_url, open_checkpoints
from hpsearch.search.study.create import create_or_join
from hpsearch.search.study.study import load_study
from hpsearch.search.study.trust import read_code, record_trust
from hpsearch.search.worker.context import WorkerContext
from hpsearch.search.worker.options import WorkerOptions
from hpsearch.storage.attributes import CHECKPOINT_URL, RESTORED, RESTORED_CHECKPOINTS, SPEC
from hpsearch.storage.study_storage.storage import PostgresStorage
from tests.factories import spec_of
from tests.search.study.untrusted.support import make_study

_LOOP = """
def main(trial):
    trial.suggest_float("lr", 0.1, 1.0)
    for epoch in trial.epochs():
        trial.report({"loss": 0.5})


main.metric, main.direction = "loss", "maximize"
"""
_ELSEWHERE = "/attacker/checkpoints"


@pytest.fixture
def reference(home: Path) -> str:
    """Return the reference of a custom training loop, which the victim has confirmed."""
    file = home.with_name("loop.py")
    file.write_text(_LOOP)
    reference = f"{file}:main"
    record_trust(reference, read_code(reference))
    return reference


def make_study_of(storage: PostgresStorage, reference: str, **attrs: object) -> int:
    spec = {**spec_of(name="none").model_dump(), "objective": reference, "metric": "loss"}
    return make_study(storage, **{SPEC: spec, **attrs})


def start_worker(database_url: str) -> None:
    options = WorkerOptions(storage_url=database_url, tracking_uri="http://127.0.0.1:1")
    WorkerContext("s", options, threading.Event())


def test_checkpoints_of_a_restored_custom_loop_need_a_confirmation(
    storage: PostgresStorage, reference: str, database_url: str, home: Path
) -> None:
    make_study_of(storage, reference, **{RESTORED: True, RESTORED_CHECKPOINTS: True})
    study, objective = load_study(storage, "s"), load_objective(reference)
    study.check_restored(objective)  # without checkpoints
    with storage.engine.begin() as connection:
        pointer = "INSERT INTO hpsearch_checkpoints VALUES (:trial, 0, 1, 's-1/0000/0000-1.pt', repeat('0', 64), 1)"
        connection.execute(sa.text(pointer), {"trial": study.trials()[0]._trial_id})
    message = "restored from a backup and uses the files in its checkpoints; if you trust this, confirm it"
    with pytest.raises(SearchError, match=message):
        create_or_join(storage, {"objective": reference, "name": "s"}, objective, inspect=lambda *_: {})
    with pytest.raises(SearchError, match=message):
        start_worker(database_url)
    study.check_restored()  # for commands that do not train
    assert study.attrs[RESTORED]
    assert open_checkpoints(study, home, None).confirmation

    assert run_command(["trust", "s", "--yes"]) == 0
    study.check_restored(objective)
    assert open_checkpoints(study, home, None).confirmation is None


def test_a_command_loads_checkpoints_of_a_custom_loop_only_from_a_configured_address(
    storage: PostgresStorage, reference: str, database_url: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker's role can store the address in a study without one, or create a study of this name with it."""
    study_id = make_study_of(storage, reference)
    study, loop = load_study(storage, "s"), load_objective(reference)
    assert open_checkpoints(study, home, None).confirmation is None
    check_checkpoint_url(study, loop, home, None)
    storage.set_study_user_attr(study_id, CHECKPOINT_URL, _ELSEWHERE)
    message = f"an address that only the database names.* add --checkpoint-url {_ELSEWHERE}"
    with pytest.raises(SearchError, match=message):
        check_checkpoint_url(study, loop, home, None)
    assert open_checkpoints(study, home, None).confirmation
    monkeypatch.setenv("HPSEARCH_FLEET_STUDY", f"s/{study_id}")
    with pytest.raises(SearchError, match=message):
        start_worker(database_url)
    check_checkpoint_url(study, loop, home, _ELSEWHERE)
    assert open_checkpoints(study, home, _ELSEWHERE).confirmation is None


@pytest.mark.parametrize("named", ["digits", "gan"])
def test_built_in_objectives_load_checkpoints_from_the_stored_address(
    storage: PostgresStorage, home: Path, named: str
) -> None:
    make_study_of(storage, named, **{CHECKPOINT_URL: _ELSEWHERE, RESTORED: True})
    objective: BaseObjective = load_objective(named)
    check_checkpoint_url(load_study(storage, "s"), objective, home, None)
