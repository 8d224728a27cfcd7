"""Each study overfits one batch before its first trial, once, and says what came of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.support import Cli, Search

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("search")]

BLIND = "tests.e2e.blind:Blind"


def test_a_search_keeps_its_smoke_test(search: Search, cli: Cli) -> None:
    told = search.study.user_attrs["hpsearch:smoke"]
    assert re.fullmatch(r"passed: one batch of 32 samples fitted, loss \S+ -> 0\.00\d+", told)
    files = {file.path for file in search.client.list_artifacts(search.parent)}
    assert {"smoke.json", "smoke.png"} <= files
    assert "smoke test" not in search.output
    page = Path(re.search(r"report: +(\S+)", search.output)[1]).read_text()
    assert "Smoke test passed: one batch of 32 samples fitted" in page


def test_a_model_that_cannot_fit_a_batch_is_told_and_the_test_is_not_run_again(cli: Cli) -> None:
    first = cli("run", BLIND, "--name", "blind", "--workers", "0")
    warning = r"warning: smoke test failed: the loss of one batch is \S+ after 1000 steps and should be below 0.01; "
    assert re.search(warning + r"look closer with: \S+ smoke tests\.e2e\.blind:Blind", first)
    study = cli.study("blind")
    study.set_user_attr("hpsearch:smoke", "failed: as it was found the first time")
    again = cli("run", BLIND, "--name", "blind", "--workers", "0")
    assert "warning: smoke test failed: as it was found the first time; look closer" in again
