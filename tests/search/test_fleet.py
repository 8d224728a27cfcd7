"""A fleet's workers: started again when they die, until that leads nowhere."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from search import fleet as fleets
from search.fleet import MAX_DEATHS, Fleet


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    """One worker, which aborts as soon as it is started."""
    monkeypatch.setattr(fleets, "_LONGEST_PAUSE", 0.0)
    made = Fleet("study", workers=1, environment={}, log_dir=tmp_path, gpus=[])
    made._command = [sys.executable, "-S", "-c", "import os; os.abort()"]
    return made


def test_an_objective_that_kills_its_process_is_given_up_before_the_budget_is_burnt(fleet: Fleet) -> None:
    fleet.start()
    while fleet.poll(0):
        time.sleep(0.01)
    assert len(fleet.slots[0].pids) == MAX_DEATHS
    assert fleet.slots[0].exit_code == -6


def test_a_trial_with_a_result_forgives_the_deaths_before_it(fleet: Fleet) -> None:
    fleet.start()
    with_result = 0
    while fleet.poll(with_result):
        with_result = min(len(fleet.slots[0].pids) // 2, 3)  # one after every second start, three in all
        time.sleep(0.01)
    assert len(fleet.slots[0].pids) > MAX_DEATHS
