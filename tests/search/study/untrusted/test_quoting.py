"""Stored addresses and file names are quoted in suggested commands."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.loading import load_objective
from hpsearch.search.cli import run_command
from hpsearch.storage.attributes import CHECKPOINT_URL, FOLDER_NAME, SPEC
from hpsearch.storage.mlflow import credentials
from hpsearch.storage.mlflow.locations import LocationRejectedError, check_removable
from hpsearch.storage.study_storage.storage import PostgresStorage
from tests.factories import spec_of
from tests.search.study.untrusted.support import TOKEN, make_study, read_error

HOSTILE = "http://127.0.0.1:1/$(touch evil);`touch evil`"


def copy_option(text: str, option: str) -> str:
    """Return the value of an option in a printed command, as a shell reads it."""
    return shlex.split(text.partition(f"{option} ")[2])[0]


@pytest.mark.parametrize("url", ["/srv/x; touch evil", "s3://bucket/$(touch evil)", "/srv/'`touch evil`"])
def test_a_stored_checkpoint_address_is_quoted_in_the_remedy(
    home: Path, storage: PostgresStorage, capsys: pytest.CaptureFixture[str], url: str
) -> None:
    make_study(storage, **{FOLDER_NAME: f"s-{TOKEN}", CHECKPOINT_URL: url})
    assert run_command(["delete", "s", "--yes"]) == 2
    assert copy_option(read_error(capsys), "add --checkpoint-url") == url


def test_a_stored_address_of_mlflow_is_quoted_in_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "geheim")
    with pytest.raises(credentials.CredentialsWithheldError) as raised:
        credentials.check_credentials(HOSTILE)
    assert copy_option(str(raised.value), "set --tracking-uri") == HOSTILE


def test_a_stored_address_of_mlflow_is_quoted_in_the_remedy_for_an_artifact_location() -> None:
    with pytest.raises(LocationRejectedError) as raised:
        check_removable("s3://bucket/artifacts", HOSTILE)
    assert copy_option(str(raised.value), "give --tracking-uri") == HOSTILE


def test_a_stored_objective_cannot_be_an_option_of_a_suggested_command(
    home: Path, storage: PostgresStorage, capsys: pytest.CaptureFixture[str]
) -> None:
    make_study(storage, **{SPEC: spec_of(name="none").model_dump() | {"name": "s", "objective": "--spec=/tmp/x.toml"}})
    assert run_command(["show", "s"]) == 2
    assert "(attribute 'hpsearch:spec': OBJECTIVE '--spec=" in read_error(capsys)


def test_a_stored_objective_file_is_quoted_in_the_remedy() -> None:
    with pytest.raises(ObjectiveError) as raised:
        load_objective("/srv/$(touch evil).py:A")
    assert copy_option(str(raised.value), "hpsearch init") == "/srv/$(touch evil).py"
