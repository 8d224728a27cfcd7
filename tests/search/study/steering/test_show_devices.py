"""The devices of trials in `show` and in the report."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpsearch.search.report import write_report
from hpsearch.search.study.device_summary import summarize_throughput
from hpsearch.search.study.study import StoredStudy
from hpsearch.storage.study_storage.storage import PostgresStorage
from hpsearch.storage.trials.claims import Claims
from hpsearch.storage.trials.finishing import Outcome
from hpsearch.storage.trials.worker_registry import WorkerIdentity, WorkerRegistration
from tests.search.study.steering.support import Say, take

HOST = "ip-172-31-22-11.eu-central-1"


def worker(stored: StoredStudy, pid: int, device: str) -> Claims:
    """Return the claims of a worker that trains on `device`."""
    identity = WorkerIdentity(f"{HOST}:{pid}", HOST, pid, None, None, device, "1")
    WorkerRegistration(stored.engine, stored.study_id, identity).register()
    return Claims(stored.engine, stored.study_id, worker=identity.name)


def epoch(rate: float, **more: float) -> dict[str, float]:
    return {"val_loss": 0.5, "samples_per_second_per_device": rate, **more}


def train(claims: Claims, *epochs: dict[str, float]) -> None:
    claims.finish_attempt(take(claims), Outcome.COMPLETE, value=0.5, attrs=summarize_throughput(list(epochs)))


def pages(say: Say, stored: StoredStudy, folder: Path) -> list[str]:
    """Return the study's output in the terminal and in its report."""
    return [say("show", "s"), write_report(stored, folder / "report.html", dashboard_url=None).read_text()]


def test_show_has_a_line_for_trials_on_several_devices(say: Say, stored: StoredStudy, tmp_path: Path) -> None:
    two = worker(stored, 1, "2 x cpu")
    train(two, epoch(1.0), epoch(10000.0, scaling_efficiency=0.5), epoch(50000.0))  # the first one is slow
    train(two, epoch(20000.0, scaling_efficiency=0.75))
    for page in pages(say, stored, tmp_path):
        assert "2 x cpu; 15000 samples per second per device; scaling efficiency 0.62" in page
        assert "resumed on" not in page


def test_show_names_trials_resumed_on_another_number_of_devices(
    say: Say, stored: StoredStudy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = worker(stored, 1, "2 x cpu")
    for _ in range(2):
        two.finish_attempt(take(two), Outcome.RELEASED)
    train(worker(stored, 2, "cuda:1"))
    train(two)
    for page in pages(say, stored, tmp_path):
        assert "cuda (1 trial), 2 x cpu (1 trial); trial 0 was resumed on other devices (2 x cpu" in page
        assert "(2 x cpu, then cuda)" in page
        assert "trial 1 was" not in page
        assert "samples per second" not in page
        assert "efficiency" not in page
    monkeypatch.setenv("COLUMNS", "80")
    shown = say("show", "s", "--trial", "0")
    assert max(map(len, shown.splitlines())) <= 80
    assert re.search(r"2 x cpu +\d{4}-\d\d-\d\d \d\d:\d\d:\d\d +0 s +released$", shown, re.MULTILINE), shown


@pytest.mark.parametrize("devices", [("cpu",), ("cuda:0", "cuda:1")])
def test_show_of_single_device_trials_does_not_mention_devices(
    say: Say, stored: StoredStudy, storage: PostgresStorage, tmp_path: Path, devices: tuple[str, ...]
) -> None:
    for number, device in enumerate(devices):
        train(worker(stored, number, device), {"val_loss": 0.5, "samples_per_second": 100.0})
    for page in pages(say, stored, tmp_path):
        assert "evices" not in page
    assert "device" not in say("show", "s", "--trial", "0")
