"""Each study overfits one batch before its first trial, once, and reports the result."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.support import BROKEN, Cli, Search

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("search")]


def test_a_search_stores_the_result_of_its_smoke_test(search: Search, cli: Cli) -> None:
    result = search.study.user_attrs["hpsearch:smoke"]
    assert re.fullmatch(r"passed: one batch of 32 samples fitted, loss \S+ -> 0\.00\d+", result)
    files = {file.path for file in search.client.list_artifacts(search.parent)}
    assert {"smoke.json", "smoke.png"} <= files
    assert "smoke test failed" not in search.output
    page = Path(re.search(r"report: +(\S+)", search.output)[1]).read_text()
    assert "Smoke test passed: one batch of 32 samples fitted" in page


def test_a_failed_smoke_test_is_logged_and_not_repeated(cli: Cli) -> None:
    arguments = ("run", BROKEN, "--name", "unfit", "--workers", "0")
    warning = r"warning: smoke test of a random configuration failed: .* is (inf|nan) at epoch .*; test the default "
    warning += r"configuration with \S+ smoke \S+broken\.py"
    assert re.search(warning, cli(*arguments, BREAK=""))
    study = cli.study("unfit")
    study.set_user_attr("hpsearch:smoke", "failed: as it was found the first time")
    again = cli(*arguments, BREAK="")
    assert "configuration failed: as it was found the first time; test the default" in again
