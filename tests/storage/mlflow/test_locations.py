"""Artifact locations that a tracking server of an attacker names."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpsearch.storage.errors import StorageError
from hpsearch.storage.mlflow import credentials
from hpsearch.storage.mlflow.artifacts import write_probe
from hpsearch.storage.mlflow.client import Tracking
from hpsearch.storage.mlflow.disk_usage import RunDiskUsage, RunStorage
from hpsearch.storage.mlflow.locations import check_location, check_removable
from hpsearch.storage.mlflow.model import download_model

URI = "http://127.0.0.1:9"  # no server
RUN, MODEL = "0" * 32, "m-" + "0" * 32


@pytest.fixture(params=[False, True], ids=["from the study", "configured"])
def is_configured(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(credentials, "_configured", {URI} if request.param else set[str]())
    return bool(request.param)


@pytest.fixture
def tracking(is_configured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tracking:
    tracking, location = Tracking(URI), str(tmp_path / RUN)
    run = SimpleNamespace(info=SimpleNamespace(artifact_uri=location))
    answers: dict[str, Any] = {
        "get_run": run,
        "get_experiment_by_name": None,
        "get_experiment": SimpleNamespace(artifact_location=location),
        "set_tag": None,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(tracking.client, name, lambda *_, answer=answer: answer)
    return tracking


def test_local_files_are_never_removed(tracking: Tracking, tmp_path: Path) -> None:
    kept = tmp_path / RUN / "checkpoints" / "mine"
    kept.parent.mkdir(parents=True)
    kept.touch()
    with pytest.raises(StorageError, match=f"artifact location {tmp_path}.* is not a remote store"):
        RunStorage(tracking).remove(RunDiskUsage(RUN, None, 0, 4))
    assert kept.exists()


def test_the_probe_is_written_to_local_folders_of_configured_servers_only(
    tracking: Tracking, is_configured: bool, tmp_path: Path
) -> None:
    if is_configured:
        assert Path(write_probe(tracking)).is_dir()
        return
    with pytest.raises(StorageError, match="is not a remote store"):
        write_probe(tracking)
    assert not (tmp_path / RUN).exists()


def test_artifacts_are_not_written_to_local_folders(
    tracking: Tracking, is_configured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow's client itself selects the location."""
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    file = tmp_path / "file"
    file.write_text("x")
    if is_configured:
        get_artifact_repository(f"{tmp_path}/out", tracking_uri=tracking.uri).log_artifact(str(file))
        return
    for location in (f"{tmp_path}/out", f"file://{tmp_path}/out", f"FILE:{tmp_path}/out"):
        with pytest.raises(StorageError, match="is not a remote store"):
            get_artifact_repository(location, tracking_uri=f"{tracking.uri}/")
    get_artifact_repository(f"{tmp_path}/own", tracking_uri=str(tmp_path)).log_artifact(str(file))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("location", "is_allowed"),
    [
        ("mlflow-artifacts:/1/a", True),
        ("mlflow-artifacts://127.0.0.1:9/1/a", True),
        ("http://127.0.0.1:9/a", True),
        ("http://127.0.0.1:8/a", False),
        ("https://127.0.0.1:9/a", False),
        ("mlflow-artifacts://127.0.0.1:8/1/a", False),
        ("mlflow-artifacts:////127.0.0.1:8/1/a", False),
        ("mlflow-artifacts://elsewhere/a", False),
        ("https://elsewhere/a", False),
        ("http://elsewhere\\@127.0.0.1:9/a", False),
        ("mlflow-artifacts://user@127.0.0.1:9/a", False),
        ("http://[", False),
        ("http://", False),
        ("http:///mlflow-artifacts/artifacts", False),
        ("file:///a", False),
        ("/a", False),
        ("a", False),
        ("models:/m-1", False),
        ("mlflow-artifacts:/1/../a", False),
    ],
)
@pytest.mark.usefixtures("is_configured")
def test_locations(location: str, *, is_allowed: bool) -> None:
    checks = [check_removable] if credentials.is_configured(URI) else [check_removable, check_location]
    for check in checks:
        if is_allowed:
            check(location, URI)
            continue
        with pytest.raises(StorageError, match="is not a remote store"):
            check(location, URI)


@pytest.mark.parametrize("location", ["models://@databricks/private/3", "runs://profile@databricks/1/a"])
def test_no_login_for_another_server_is_used_for_a_reference(tracking: Tracking, location: str) -> None:
    """MLflow takes it from the user's variables and files."""
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    with pytest.raises(StorageError, match="on another server"):
        get_artifact_repository(location, tracking_uri=tracking.uri)


@pytest.mark.parametrize(
    "location",
    [
        "abfss://c@account.evil.example/a",
        "abfss://c@evil.example:443/account.dfs.core.windows.net/a",
        r"wasbs://c@[2001:db8::1]\.blob.core.windows.net/a",
        "wasbs://c@evil.example/a",
        "r2://c@evil.example/a",
        "b2://c@evil.example/a",
    ],
)
def test_credentials_of_stores_are_sent_to_known_hosts_only(location: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another client of a shared server can create an experiment with any location."""
    monkeypatch.setattr(credentials, "_configured", {URI})
    for check in (check_location, check_removable):
        with pytest.raises(StorageError, match="is at an unknown host, which would receive the credentials"):
            check(location, URI)


@pytest.mark.parametrize(
    "location",
    [
        "s3://bucket/a",
        "gs://bucket/a",
        "abfss://c@account.dfs.core.windows.net/a",
        "abfss://c@account.privatelink.dfs.core.windows.net/a",
        "abfss://My%20space@westus-onelake.dfs.fabric.microsoft.com/a",
        "wasbs://c@account.blob.core.windows.net/a",
    ],
)
def test_object_stores_are_those_of_configured_servers(
    location: str, *, is_configured: bool, tracking: Tracking
) -> None:
    """This process has their credentials, and the server may name any bucket."""
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    if is_configured:
        check_removable(location, URI)
        check_location(location, URI)
        return
    with pytest.raises(StorageError, match=f"only the study names this MLflow server.*--tracking-uri {URI}"):
        check_removable(location, URI)
    with pytest.raises(StorageError, match="only the study names this MLflow server"):
        get_artifact_repository(location, tracking_uri=tracking.uri)


@pytest.mark.parametrize("location", ["s3://bucket?", f"s3://bucket/all#/{RUN}/artifacts", "mlflow-artifacts:/1?/a"])
@pytest.mark.usefixtures("is_configured")
def test_a_location_has_no_part_that_clients_of_stores_ignore(location: str) -> None:
    for check in (check_removable, check_location):
        with pytest.raises(StorageError, match=r"contains '\?' or '#'"):
            check(location, URI)


@pytest.mark.parametrize("model_id", ["../m-1", "/etc", "..", MODEL + "/..", MODEL.upper()])
def test_ids_with_other_characters_are_rejected(model_id: str, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="is not the id of an MLflow run or model"):
        download_model(model_id, tmp_path, tracking_uri=URI)


def test_credentials_are_sent_to_the_configured_server_only(
    tracking: Tracking, is_configured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client of the server can create an experiment whose artifacts are on another server."""
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    other = "mlflow-artifacts://127.0.0.1:8/1/a"
    if is_configured:
        get_artifact_repository(other, tracking_uri=tracking.uri)
        monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret")
        fault = "is on another server .* so the credentials in MLFLOW_TRACKING_TOKEN are not sent"
    else:
        fault = "is not a remote store"
    for location in (other, "mlflow-artifacts:////127.0.0.1:8/1/a", "http://127.0.0.1:8/a", " HTTP://127.0.0.1:8/a"):
        with pytest.raises(StorageError, match=fault):
            get_artifact_repository(location, tracking_uri=tracking.uri)
    assert get_artifact_repository("mlflow-artifacts:/1/a", tracking_uri=tracking.uri)
