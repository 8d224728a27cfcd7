"""Texts of errors, names and signals of a worker."""

from __future__ import annotations

import platform

import pytest
import torch

from docs.packages import ROOT
from hpsearch.search.worker.attempt import _as_text
from hpsearch.search.worker.identity import worker_name
from hpsearch.search.worker.lifecycle import _find_excess_of_threads
from hpsearch.storage.trials import process_identity


@pytest.mark.parametrize(
    ("message", "text"),
    [("nul\0byte", "nulbyte"), ("half \ud800 a character", "half \\ud800 a character"), ("ü 中\n", "ü 中\n")],
)
def test_exception_texts_are_made_valid_for_files_and_databases(message: str, text: str) -> None:
    assert _as_text(message) == text
    assert text.encode()


def test_the_name_of_a_worker_is_text_for_every_host_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "node", lambda: "h\udcff x")
    assert worker_name(1).startswith("h? x:1-")


def test_workers_of_two_containers_have_different_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though host and process number are the same."""
    names = set()
    for machine in ("boot/pid:[1]", "boot/pid:[2]"):
        monkeypatch.setattr(process_identity, "get_machine_prefix", lambda machine=machine: machine)
        assert worker_name(1) == worker_name(1)
        names.add(worker_name(1))
    assert len(names) == 2
    assert {name.rpartition("-")[0].rpartition(":")[2] for name in names} == {"1"}


def test_a_worker_warns_if_several_on_the_machine_use_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    warning = _find_excess_of_threads(3)
    assert warning is not None
    assert "3 workers on this machine may use 8 threads" in warning
    assert "OMP_NUM_THREADS=2" in warning
    assert _find_excess_of_threads(1) is None
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert _find_excess_of_threads(3) is None


def test_sigusr1_is_not_used() -> None:
    sources = [path for folder in ("storage", "objectives", "search") for path in (ROOT / folder).rglob("*.py")]
    assert sources
    assert not [path for path in sources if "SIGUSR" in path.read_text()]
