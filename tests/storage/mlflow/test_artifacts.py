"""The MLflow artifacts of a trial in the Optuna dashboard, and requests for other files."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from pathlib import Path

import optuna
import pytest
from optuna.artifacts import get_all_artifact_meta
from optuna.artifacts.exceptions import ArtifactNotFound
from optuna.trial import create_trial

from hpsearch.storage.embedded.stack import StackInfo
from hpsearch.storage.errors import StorageError
from hpsearch.storage.mlflow.artifacts import (
    ATTR_PREFIX,
    DASHBOARD_ARTIFACTS,
    MlflowArtifactStore,
    make_artifact_attrs,
    make_artifact_id,
)
from hpsearch.storage.mlflow.client import Tracking
from hpsearch.storage.mlflow.run_links import RunLinks
from hpsearch.storage.study_storage.storage import open_storage
from tests.web import open_url

RUN = "0123456789abcdef" * 2


@pytest.fixture(scope="module")
def tracking(stack: StackInfo) -> Tracking:
    return Tracking(stack.tracking_uri)


def log(tracking: Tracking, folder: Path, **files: bytes) -> str:
    run_id = str(tracking.client.create_run(tracking.experiment_id).info.run_id)
    for name, content in files.items():
        path = folder / name.replace("_", ".")
        path.write_bytes(content)
        tracking.client.log_artifact(run_id, str(path))
    return run_id


def test_the_dashboard_lists_the_artifacts_of_the_run(stack: StackInfo, tracking: Tracking, tmp_path: Path) -> None:
    run_id = log(tracking, tmp_path, curves_png=b"\x89PNG", report_md=b"# report")
    storage = open_storage(stack.storage_url, application_name="test")
    study = optuna.create_study(study_name="with artifacts", storage=storage)
    attrs = make_artifact_attrs(run_id, ["curves.png", "report.md", "train.log"])
    study.add_trial(create_trial(value=1.0, system_attrs=attrs))
    trial = study.trials[0]
    assert [meta.filename for meta in get_all_artifact_meta(trial, storage=storage)] == ["curves.png", "report.md"]

    here = f"{stack.dashboard_url}/artifacts/{study._study_id}/{trial._trial_id}"
    with open_url(f"{stack.dashboard_url}/api/studies/{study._study_id}") as reply:
        listed = json.load(reply)["trials"][0]["artifacts"]
    shown = {}
    for meta in listed:
        with open_url(f"{here}/{meta['artifact_id']}") as reply:
            shown[meta["filename"]] = (reply.headers["Content-Type"], reply.read())
    assert shown == {
        "curves.png": ("image/png", b"\x89PNG"),
        "report.md": ("text/plain; charset=utf-8", b"# report"),
    }
    with pytest.raises(urllib.error.HTTPError) as refused:
        open_url(f"{here}/{make_artifact_id(run_id, 'train.log')}")
    assert refused.value.code == 404, "only what the trial lists is given out"

    request = urllib.request.Request(f"{stack.dashboard_url}/api/studies/{study._study_id}", method="DELETE")
    with open_url(request) as reply:
        assert reply.status == 204, "artifacts that cannot be removed do not keep a study from being deleted"
    assert {f.path for f in tracking.client.list_artifacts(run_id)} == {"curves.png", "report.md"}


def test_the_dashboard_serves_no_artifact_as_a_script(stack: StackInfo, tracking: Tracking, tmp_path: Path) -> None:
    """HTML that a worker hides in a plot could load it, as from the page's own origin."""
    run_id = log(tracking, tmp_path, evil_js=b"alert(1)")
    storage = open_storage(stack.storage_url, application_name="test")
    study = optuna.create_study(study_name="with a script", storage=storage)
    artifact = make_artifact_id(run_id, "evil.js")
    meta = {"artifact_id": artifact, "filename": "evil.js", "mimetype": "text/javascript", "encoding": None}
    study.add_trial(create_trial(value=1.0, system_attrs={f"{ATTR_PREFIX}{artifact}": json.dumps(meta)}))
    for folder in ("artifacts", "%ffartifacts", "/artifacts"):  # Bottle ignores the byte that is not UTF-8
        here = f"{stack.dashboard_url}/{folder}/{study._study_id}/{study.trials[0]._trial_id}/{artifact}"
        with open_url(here) as reply:
            headers = reply.headers
            assert reply.read() == b"alert(1)"
        assert headers["Content-Type"] == "application/octet-stream"
        assert headers["Content-Disposition"] == "attachment"
        assert headers["Content-Security-Policy"].startswith("sandbox;")
        assert headers["X-Content-Type-Options"] == "nosniff"


def test_files_that_arrive_after_the_end_of_the_trial_are_listed(stack: StackInfo) -> None:
    storage = open_storage(stack.storage_url, application_name="test")
    study = optuna.create_study(study_name="late files", storage=storage)
    study.add_trial(create_trial(value=1.0))
    page = f"{stack.dashboard_url}/api/studies/{study._study_id}"

    def listed() -> list[str]:
        with open_url(page) as reply:
            return [meta["filename"] for meta in json.load(reply)["trials"][0]["artifacts"]]

    assert listed() == []
    with RunLinks(storage.engine).lock_run(study.trials[0]._trial_id) as book:
        book.set_system_attrs(make_artifact_attrs(RUN, ["curves.png"]))
    while not listed():
        time.sleep(0.2)  # it caches its replies for two seconds
    assert listed() == ["curves.png"]
    storage.delete_study(study._study_id)


def test_only_viewable_files_of_safe_types_are_listed() -> None:
    attrs = make_artifact_attrs(RUN, [*DASHBOARD_ARTIFACTS, "evil.html", "best.pt"])
    metas = [json.loads(value) for value in attrs.values()]
    assert [meta["filename"] for meta in metas] == list(DASHBOARD_ARTIFACTS)
    assert {meta["mimetype"] for meta in metas} == {"image/png", "text/plain; charset=utf-8"}
    assert all(f"artifacts:{meta['artifact_id']}" in attrs for meta in metas)


@pytest.mark.parametrize(
    "artifact_id",
    [
        make_artifact_id(RUN, "../other/secret"),
        make_artifact_id(RUN, "a/../../secret"),
        make_artifact_id(RUN, "/etc/passwd"),
        make_artifact_id(RUN, "..\\secret"),
        RUN,
        f"{RUN}-",
        f"{RUN}-ff",  # no UTF-8
        f"{RUN}-abc",
        "../../etc/passwd",
    ],
)
def test_requests_outside_of_the_artifacts_of_the_run_are_rejected(artifact_id: str) -> None:
    def nobody() -> None:
        raise AssertionError("MLflow was asked")

    with pytest.raises(ArtifactNotFound) as error:
        MlflowArtifactStore(nobody).open_reader(artifact_id)  # type: ignore[arg-type]
    assert "MLflow was asked" not in str(error.value)


def test_missing_artifacts_are_not_found(tracking: Tracking, tmp_path: Path) -> None:
    run_id = log(tracking, tmp_path, curves_png=b"x")
    artifacts = MlflowArtifactStore(lambda: tracking.client)
    with artifacts.open_reader(make_artifact_id(run_id, "curves.png")) as file:
        assert file.read() == b"x"
    for missing in (make_artifact_id(run_id, "report.md"), make_artifact_id(RUN, "curves.png")):
        with pytest.raises(ArtifactNotFound):
            artifacts.open_reader(missing)
    with pytest.raises(PermissionError, match="read-only"):
        artifacts.write("x", file)


def test_the_registry_is_that_of_the_tracking_server(stack: StackInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", "http://127.0.0.1:9")
    assert Tracking(stack.tracking_uri).client.search_registered_models("name = 'none'") == []


def test_an_invalid_variable_of_mlflow_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "soon")
    with pytest.raises(StorageError, match=r"^MLFLOW_HTTP_REQUEST_TIMEOUT 'soon' is invalid; correct or unset"):
        Tracking("http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "0")
    with pytest.raises(
        StorageError, match=r"^MLFLOW_HTTP_REQUEST_TIMEOUT must be in \[1, 2147483647\], not 0; correct"
    ):
        Tracking("http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "11")
    with pytest.raises(StorageError, match=r"^MLFLOW_HTTP_REQUEST_MAX_RETRIES must be in \[0, 10\], not 11; correct"):
        Tracking("http://127.0.0.1:9")
