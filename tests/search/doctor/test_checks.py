"""The checks of the machine, and failures of a check itself."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from importlib import metadata
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch
from rich.text import Text

from hpsearch.search.doctor.checks import (
    Checker,
    Finding,
    check_artifacts,
    check_cores,
    check_free_space,
    check_gpus,
    check_home,
    check_tracking,
    check_versions,
    read_direct_dependencies,
    warn_undetected_gpus,
)
from hpsearch.search.doctor.doctor import format_finding
from hpsearch.storage.embedded.stack import StackInfo
from hpsearch.storage.mlflow.artifacts import remove_probe, write_probe
from hpsearch.storage.mlflow.client import Tracking


def test_a_failing_check_is_reported_in_one_line_without_passwords() -> None:
    url = "postgresql://u:geheim@h/d"

    def breaks() -> Finding:
        raise RuntimeError(f"cannot use\n{url} with geheim")

    checker = Checker([url])
    a = checker.run("a", breaks)
    b, c = checker.run("b", lambda: Finding("ok", "b"), "a"), checker.run("c", lambda: Finding("ok", "c"), "b")
    d = checker.run("d", lambda: Finding("ok", "d"))
    assert [each.check for each in (a, b, c, d)] == ["a", "b", "c", "d"]
    assert a.status == "failed"
    assert a.found == "RuntimeError: cannot use postgresql://u:***@h/d with ***"
    assert (b.status, b.found) == (c.status, c.found) == ("skipped", "not run, because the check 'a' failed")
    assert (d.status, d.found) == ("ok", "d")


def test_a_long_line_is_wrapped_below_its_text() -> None:
    finding = Finding("failed", "user 'u' lacks INSERT on a table", "GRANT INSERT ON a_table TO u", check="rights")
    assert format_finding(finding, None).plain == (
        "failed   rights       user 'u' lacks INSERT on a table: GRANT INSERT ON a_table TO u"
    )
    folded = format_finding(finding, 60)
    assert isinstance(folded, Text)
    assert folded.plain.splitlines() == [
        "failed   rights       user 'u' lacks INSERT on a table:",
        "                      GRANT INSERT ON a_table TO u",
    ]


def test_a_disk_that_fills_up_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_home(tmp_path).status == "ok"
    monkeypatch.setattr("hpsearch.search.doctor.checks.LOW_FREE_BYTES", 10**18)
    disk = check_free_space(tmp_path)
    assert disk.status == "warning"
    assert "HPSEARCH_HOME" in disk.remedy
    monkeypatch.setattr("hpsearch.search.doctor.checks.MIN_FREE_BYTES", 10**18)
    assert check_free_space(tmp_path).status == "failed"
    assert list(tmp_path.iterdir()) == []


def test_a_home_without_write_access_is_reported() -> None:
    home = check_home(Path("/proc"))
    assert home.status == "failed"
    assert "/proc is not writable" in home.found


def test_different_versions_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constraints = tmp_path / "constraints.txt"
    monkeypatch.setattr("hpsearch.search.doctor.checks.CONSTRAINTS", constraints)
    assert "not compared with constraints.txt" in check_versions().found
    pins = {name: str(there).partition("+")[0] for name, there in read_direct_dependencies().items()}
    assert {"torch", "psycopg2-binary", "rich"} <= pins.keys()
    assert "pytest" not in pins
    constraints.write_text("# a comment\n" + "".join(f"{name}=={pin}\n" for name, pin in pins.items()))
    assert check_versions().status == "ok"  # for any build of torch
    constraints.write_text("Rich==0.0.1\nnumpy==" + version("numpy"))
    versions = check_versions()
    assert versions.status == "warning"
    assert versions.found.endswith(f": rich {version('rich')} (pinned 0.0.1)")


def test_gpus_that_torch_does_not_detect_cause_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf 'NVIDIA H200\\nNVIDIA H200\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert check_cores().status == "ok"
    found = check_gpus()
    assert found.status == "warning"
    assert "2 GPUs (NVIDIA H200)" in found.found
    assert "unset the variable" in found.remedy
    program.write_text("#!/bin/sh\nexit 9\n")  # the driver is not loaded
    assert check_gpus().status == "ok"


@pytest.mark.parametrize(("cuda", "word"), [(None, "HPSEARCH_TORCH_BACKEND"), ("13.0", "CUDA 13.0")])
def test_the_remedy_for_undetected_gpus_depends_on_the_build_of_torch(
    cuda, word, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert word in warn_undetected_gpus(["NVIDIA H200"]).remedy


def test_the_artifact_check_uses_the_server_and_leaves_no_files(stack: StackInfo) -> None:
    tracking = Tracking(stack.tracking_uri)
    place = write_probe(tracking)
    folder = stack.home / "artifacts" / place.partition(":/")[2].lstrip("/")
    assert [file.name for file in folder.rglob("*.*")] == ["hpsearch-probe.txt"]
    remove_probe(tracking, place)
    assert not folder.exists()


class _HealthAlone(http.server.BaseHTTPRequestHandler):
    """A server that is healthy, and rejects artifacts."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path in ("/health", "/version") else 500)
        self.end_headers()
        self.wfile.write({"/health": b"OK", "/version": b"2.9.1"}.get(self.path, b"no space left"))

    do_POST = do_PUT = do_GET  # noqa: N815 the names are http.server's

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def healthy() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _HealthAlone) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_server_of_another_series_that_rejects_artifacts_is_reported(healthy: str) -> None:
    mlflow, artifacts = check_tracking(healthy), check_artifacts(healthy)
    assert mlflow.status == "warning"
    assert "MLflow 2.9.1" in mlflow.found
    assert artifacts.status == "failed"
    assert artifacts.found.startswith("test file not written to the artifact store: ")
    assert "--artifacts-destination" in artifacts.remedy


def test_doctor_checks_a_server_without_the_mlflow_server_package(
    healthy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the distribution mlflow-skinny."""

    def installed(name: str) -> str:
        if name == "mlflow":
            raise PackageNotFoundError(name)
        return metadata.version(name)

    monkeypatch.setattr("hpsearch.search.doctor.checks.version", installed)
    assert check_tracking(healthy).status == "warning"
