"""The settings of additional trackers: their values and the errors for invalid ones."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, BeforeValidator, ValidationError

from hpsearch.search.errors import SearchError
from hpsearch.search.finalists import choose
from hpsearch.search.spec.spec import FinalistsOf, StudySpec, _resolve_folder, parse_spec
from hpsearch.search.tracking.tracker import OPTIONAL_TRACKERS, check_trackers
from hpsearch.storage.errors import StorageError
from tests.factories import BASE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tensorboard": ""}, "--tensorboard '' is not usable (the name is empty); give a folder"),
        (
            {"tensorboard": "s3://b"},
            "--tensorboard 's3://b' is not usable (object stores cannot append to files); give",
        ),
        ({"tensorboard": 5}, "--tensorboard must be a valid string, not 5"),
        ({"wandb": "a/b/c"}, "--wandb 'a/b/c' is not a project; give PROJECT or ENTITY/PROJECT, such as me/wine"),
        ({"wandb": ""}, "--wandb '' is not a project; give PROJECT or ENTITY/PROJECT, such as me/wine"),
        ({"wandb": "a b"}, "--wandb 'a b' is not a project; give PROJECT or ENTITY/PROJECT, such as me/wine"),
    ],
)
def test_mistakes_are_errors_of_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SearchError) as error:
        parse_spec({**BASE, **change})
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_a_folder_is_stored_as_an_absolute_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    assert parse_spec({**BASE, "tensorboard": "a/../runs"}).tensorboard == str(tmp_path / "runs")
    assert parse_spec({**BASE, "tensorboard": "~/runs"}).tensorboard == str(tmp_path / "me" / "runs")
    assert parse_spec({**BASE, "tensorboard": Path("runs")}).tensorboard == str(tmp_path / "runs")
    stored = parse_spec({**BASE, "tensorboard": "runs"}).model_dump()
    monkeypatch.chdir("/")
    assert parse_spec(stored).model_dump() == stored


@pytest.mark.parametrize("refit", [None, 3])
def test_finalists_and_a_refit_have_the_trackers_of_their_search(refit: int | None) -> None:
    searched = parse_spec({**BASE, "tensorboard": "/runs", "wandb": "me/wine"})
    of = FinalistsOf(study="s", study_id=1, top=1, trials=[0], seeds=[5], refit=refit)
    made = choose._make_spec(searched, of, 1)
    assert (made.tensorboard, made.wandb) == ("/runs", "me/wine")


@pytest.mark.parametrize(("setting", "value"), [("tensorboard", "/runs"), ("wandb", "me/wine")])
def test_a_missing_package_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch, setting: str, value: str) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(StorageError) as error:
        check_trackers(parse_spec({**BASE, setting: value}))
    assert str(error.value) == (
        f"--{setting} {value}: the package {setting} is not installed; on all machines, run "
        f"./hpsearch add {setting} (or: pip install 'hpsearch[{setting}]')"
    )


class OtherTracker(BaseModel):
    """A spec with an additional folder setting."""

    csv: Annotated[str | None, BeforeValidator(_resolve_folder)] = None


def test_a_wrong_folder_is_named_by_its_setting() -> None:
    with pytest.raises(ValidationError, match="csv 's3://runs' is not usable"):
        OtherTracker(csv="s3://runs")


def test_every_tracker_has_a_setting_with_its_name() -> None:
    assert {tracker.name for tracker in OPTIONAL_TRACKERS} <= StudySpec.model_fields.keys()


def test_without_tracker_settings_nothing_is_checked() -> None:
    check_trackers(parse_spec(BASE))
