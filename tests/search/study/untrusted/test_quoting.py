"""Stored addresses and file names are quoted in suggested commands."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.loading import load_objective
from hpsearch.search.cli import run_command
from hpsearch.storage.attributes import CHECKPOINT_URL, FOLDER_NAME
from hpsearch.storage.mlflow import credentials
from hpsearch.storage.study_storage.storage import PostgresStorage
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


def test_a_stored_objective_file_is_quoted_in_the_remedy() -> None:
    with pytest.raises(ObjectiveError) as raised:
        load_objective("/srv/$(touch evil).py:A")
    assert copy_option(str(raised.value), "hpsearch init") == "$(touch evil).py"
