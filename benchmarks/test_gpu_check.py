"""The GPU checks run on CPU ranks, so that a fault of the checks themselves appears before they meet a GPU."""

import pytest

from benchmarks.gpu_check import run_checks
from benchmarks.gpu_runs import Machine


@pytest.mark.timeout(600)
def test_checks_of_ranks_pass_on_a_cpu():
    rows = list(run_checks(Machine("cpu", 2, 300), ["script", "ranks", "hang"]))
    assert len(rows) == 15
    assert [str(row) for row in rows if not row.passed] == []
