"""A model that was changed in MLflow, or that can execute code, is rejected before it is loaded."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import optuna
import pytest
import torch
import yaml
from optuna.trial import create_trial
from torch import nn

from hpsearch import load_model, load_objective
from hpsearch.search.errors import SearchError
from hpsearch.search.promotion.promote import promote
from hpsearch.search.promotion.sandbox import run_isolated
from hpsearch.search.promotion.serve_check import ServeCheckResult, serve_check
from hpsearch.storage.attributes import MODEL_SHA256, RUN_ID
from hpsearch.storage.files import compute_folder_sha256
from hpsearch.storage.journals.journal_records import Model
from hpsearch.storage.mlflow.model import ensure_model
from hpsearch.storage.mlflow.run_links import RunLinks
from hpsearch.storage.records.promotions import read_model_sha256
from tests.search.promotion.support import Tracked

TRIAL = 4  # the trial with the exported model, the best one


@pytest.fixture
def own_model(own_tracked: Tracked, _exported: Path, tmp_path: Path) -> str:
    """Add a trial with an exported model, as a worker does, and return the id of the model."""
    suggested = optuna.create_study().ask()
    load_objective("digits").configure(suggested)
    parent = str(own_tracked.stored.attrs[RUN_ID])
    run_id = own_tracked.tracking.create_trial_run(own_tracked.name, TRIAL, parent=parent, tags={})
    made = create_trial(
        value=0.95, params=suggested.params, distributions=suggested.distributions, user_attrs={RUN_ID: run_id}
    )
    optuna.load_study(study_name=own_tracked.name, storage=own_tracked.storage).add_trial(made)
    folder = Path(shutil.copytree(_exported, tmp_path / "%20"))  # MLflow decodes paths
    record = Model(name="own", step=0, at=0.0, metrics={}, params={"x" * 300: 1}, tags={})
    trial = own_tracked.stored.trials()[TRIAL]
    links = RunLinks(own_tracked.storage.engine)
    return ensure_model(own_tracked.tracking, links, trial._trial_id, run_id, record, folder)


def check(tracked: Tracked, *, allow_code: bool = False) -> ServeCheckResult:
    return serve_check(tracked.storage, tracked.tracking, f"{tracked.name}@champion", allow_code=allow_code)


def load(tracked: Tracked) -> nn.Module:
    url = tracked.storage.engine.url.render_as_string(hide_password=False)
    return load_model(f"{tracked.name}@champion", storage_url=url, tracking_uri=tracked.tracking.uri)


def poison(folder: Path, marker: Path) -> Path:
    """Return the files that add code to a model: the code writes a file when the model is loaded."""
    metadata = yaml.safe_load((folder / "MLmodel").read_text())
    metadata["flavors"]["python_function"] |= {"loader_module": "poison", "code": "code"}
    target = folder.parent / "poison"
    (target / "code").mkdir(parents=True)
    (target / "MLmodel").write_text(yaml.safe_dump(metadata))
    (target / "code" / "poison.py").write_text(f"open({str(marker)!r}, 'w').write('executed')\n")
    return target


@pytest.mark.soak
def test_code_that_another_client_adds_to_a_promoted_model_is_not_loaded(
    own_tracked: Tracked, own_model: str, exported: Path, tmp_path: Path
) -> None:
    """Row 1 of the audit: a client of MLflow overwrites the files of the champion."""
    promote(own_tracked.stored, own_tracked.tracking)
    marker = tmp_path / "marker"
    own_tracked.client.log_model_artifacts(own_model, str(poison(exported, marker)))
    with pytest.raises(SearchError, match=rf"^\S+@champion: the files of model {own_model} in MLflow were changed"):
        check(own_tracked)
    with pytest.raises(SearchError, match="were changed"):
        load(own_tracked)
    with pytest.raises(SearchError, match="were changed"):  # the option accepts code, but no changed files
        check(own_tracked, allow_code=True)
    assert not marker.exists()


def test_a_verified_model_is_loaded_also_in_a_folder_that_contains_its_address(
    own_tracked: Tracked, own_model: str, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models:" / own_model).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    promote(own_tracked.stored, own_tracked.tracking)
    assert own_tracked.version("champion").source == f"models:/{own_model}"
    inputs = torch.randn(3, 1, 8, 8)
    expected = torch.export.load(exported / "data" / "model.pt2").module()(inputs)
    assert torch.equal(load(own_tracked)(inputs), expected)


def test_a_model_that_was_changed_before_its_promotion_is_not_promoted(
    own_tracked: Tracked, own_model: str, exported: Path, tmp_path: Path
) -> None:
    own_tracked.client.log_model_artifacts(own_model, str(poison(exported, tmp_path / "marker")))
    with pytest.raises(SearchError, match=rf"^trial {TRIAL}: the files of model {own_model} in MLflow were changed"):
        promote(own_tracked.stored, own_tracked.tracking)
    assert own_tracked.promotions() == []


def test_the_digest_of_the_files_is_recorded_with_the_trial_and_the_promotion(
    own_tracked: Tracked, own_model: str, tmp_path: Path
) -> None:
    digest = compute_folder_sha256(tmp_path / "%20")
    with own_tracked.storage.engine.connect() as connection:
        assert read_model_sha256(connection, own_model) == digest
    promote(own_tracked.stored, own_tracked.tracking)
    (promotion,) = own_tracked.promotions()
    assert (promotion.evidence["model_id"], promotion.evidence["model_sha256"]) == (own_model, digest)
    version = own_tracked.version("champion")
    assert version.tags["hpsearch.model_sha256"] == digest
    assert f"sha256 {digest}" in version.description
    shell = "cd $0 && find * -type f | LC_ALL=C sort | xargs sha256sum | sha256sum"
    said = subprocess.run(["sh", "-c", shell, tmp_path / "%20"], capture_output=True, text=True, check=True).stdout
    assert said.split()[0] == digest


@pytest.mark.soak
def test_the_digest_of_the_promotion_is_valid_if_a_worker_changes_its_own(own_tracked: Tracked, own_model: str) -> None:
    promote(own_tracked.stored, own_tracked.tracking)
    trial_id = own_tracked.stored.trials()[TRIAL]._trial_id
    RunLinks(own_tracked.storage.engine).set_attr_of_trials([trial_id], MODEL_SHA256, {own_model: "0" * 64})  # type: ignore[arg-type]
    assert check(own_tracked).recomputed_value is not None


def test_a_model_without_digest_is_checked_but_its_code_is_not_loaded(
    own_tracked: Tracked, own_model: str, exported: Path, tmp_path: Path
) -> None:
    """Earlier versions of hpsearch recorded no digest, and users may register other models of a trial's run."""
    trial_id = own_tracked.stored.trials()[TRIAL]._trial_id
    RunLinks(own_tracked.storage.engine).remove_attr_of_trials([trial_id], MODEL_SHA256)
    client = own_tracked.client
    client.create_registered_model(own_tracked.name)
    run_id = own_tracked.run_of(TRIAL)
    client.create_model_version(own_tracked.name, f"models:/{own_model}", run_id=run_id, model_id=own_model)
    client.set_registered_model_alias(own_tracked.name, "champion", "1")
    assert isinstance(load(own_tracked), nn.Module)
    marker = tmp_path / "marker"
    client.log_model_artifacts(own_model, str(poison(exported, marker)))
    with pytest.raises(SearchError, match=r"code: 'code' in the flavor python_function, .* --allow-code"):
        check(own_tracked)
    assert not marker.exists()


@pytest.mark.soak
def test_a_model_with_code_is_loaded_with_the_option(
    own_tracked: Tracked, own_model: str, exported: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The code sees no credentials of the user."""
    trial_id = own_tracked.stored.trials()[TRIAL]._trial_id
    RunLinks(own_tracked.storage.engine).remove_attr_of_trials([trial_id], MODEL_SHA256)
    files = poison(exported, tmp_path / "marker")
    code = "import os; raise SystemExit('variables: ' + ' '.join(sorted(os.environ)))"
    (files / "code" / "poison.py").write_text(code)
    own_tracked.client.log_model_artifacts(own_model, str(files))
    promote(own_tracked.stored, own_tracked.tracking)
    secrets = ("PGPASSWORD", "HPSEARCH_STORAGE_URL", "MLFLOW_TRACKING_PASSWORD", "AWS_SECRET_ACCESS_KEY", "OPENAI_KEY")
    for name in secrets:
        monkeypatch.setenv(name, "secret")
    error = check(own_tracked, allow_code=True).mismatch
    assert "variables: " in error
    assert "PATH" in error
    assert not [name for name in secrets if name in error]


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_bubblewrap_hides_files_and_network(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("password")
    folder = tmp_path / "work"
    folder.mkdir()
    code = f"""
import os, socket
print(os.path.exists({str(secret)!r}), os.path.exists("/etc/passwd"), len(socket.if_nameindex()))
open({str(folder / "result")!r}, "w").write("written")
"""
    done = run_isolated(
        [sys.executable, "-I", "-c", code], folder=folder, readable=[], variables={}, timeout_seconds=60
    )
    assert (done.stdout, done.stderr) == ("False False 1\n", "")
    assert (folder / "result").read_text() == "written"


def test_bubblewrap_that_cannot_start_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program = tmp_path / "bin" / "bwrap"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    folder = tmp_path / "work"
    folder.mkdir()
    command = [sys.executable, "-I", "-c", "print('ran')"]
    done = run_isolated(command, folder=folder, readable=[], variables={}, timeout_seconds=60)
    assert done.stdout == "ran\n"
    assert "bubblewrap cannot start (bwrap: No permissions to create new namespace)" in caplog.text
