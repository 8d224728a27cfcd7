"""Enqueued configurations run first, once, and within the budget, even if workers are killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from optuna.trial import TrialState

from tests.e2e.support import CHEAP, Cli

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("search")]

STARTED = f"{CHEAP}:Started"


@pytest.mark.soak
def test_the_default_and_enqueued_configurations_run_first_also_in_an_extension(cli: Cli, tmp_path: Path) -> None:
    file, deaths = tmp_path / "mine.csv", tmp_path / "deaths"
    deaths.mkdir()
    file.write_text("lr,width,kind\n0.5,8,a\n0.02,,\n")
    command = ("run", STARTED, "--name", "given", "--trials", "5", "--enqueue", str(file), "--workers", "2")
    cli(*command, "--pruner", "none", DEATHS=str(deaths))
    found = cli.study("given").trials
    assert {t.state for t in found} == {TrialState.COMPLETE}
    assert len(found) == 5
    assert found[0].params == {"lr": 0.1, "width": 24, "kind": "b"}
    assert found[1].params == {"lr": 0.5, "width": 8, "kind": "a"}
    assert found[2].params["lr"] == 0.02
    assert list(deaths.iterdir())
    shown = cli("show", "given")
    assert "default configuration\n" in shown
    assert "mine.csv, line 2\n" in shown
    assert "origin  default" in cli("show", "given", "--trial", "0")
    assert "the budget is spent" in cli(*command), "what is there is not enqueued again"
    file.write_text("lr,width,kind\n0.5,8,a\n0.02,,\n0.03,24,b\n")
    output = cli("extend", "given", "--trials", "+1", "--enqueue", str(file))
    assert "study given: budget changed from 5 to 6 trials" in output
    assert f"enqueued 1 new configuration from {file}" in output
    cli("run", STARTED, "--name", "given", "--workers", "1")
    found = cli.study("given").trials
    assert len(found) == 6
    assert found[5].params == {"lr": 0.03, "width": 24, "kind": "b"}


def test_a_search_without_a_default_configuration_and_with_an_invalid_file(cli: Cli, tmp_path: Path) -> None:
    cli("run", STARTED, "--name", "no.default", "--no-default-first", "--trials", "2", "--workers", "0")
    assert cli.study("no.default").trials == []
    file = tmp_path / "wrong.csv"
    file.write_text("lr\n0.1\n7\n")
    refused = cli("run", STARTED, "--name", "wrong.file", "--enqueue", str(file), code=2)
    assert f"--enqueue {file}: line 3: parameter 'lr' must be in [0.01, 1.0], not 7" in refused
    assert "wrong.file" not in cli("studies")
