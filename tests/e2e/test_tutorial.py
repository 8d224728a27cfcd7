"""Every command of the tutorial and of the README is run: here as written, or by another test named here."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

import pytest

from docs.packages import ROOT
from tests.docs.pages import commands, names_in
from tests.e2e.support import Cli

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("tutorial")]

TUTORIAL, README = ROOT / "docs" / "tutorial.md", ROOT / "README.md"

# Commands that would stop the shared services, install, wait for input or take minutes, with the tests that run them.
ELSEWHERE = {
    "./hpsearch run digits": (
        "tests/e2e/test_search.py::test_the_budget_is_spent_exactly",
        "tests/wrapper/test_wrapper.py::test_the_first_call_installs_and_later_calls_only_run",
    ),
    "./hpsearch test": (
        "tests/wrapper/test_wrapper.py::test_extras_are_installed_for_their_commands_and_a_moved_clone_reinstalls",
    ),
    "./hpsearch down": (
        "tests/storage/embedded/test_stack.py::test_down_stops_all_services_also_without_the_state_file",
    ),
}


@pytest.mark.timeout(900)  # seventeen commands, one after the other
@pytest.mark.soak
def test_the_commands_of_the_tutorial_print_the_quoted_output(cli: Cli, tmp_path: Path) -> None:
    """Run all commands in their order; each prints a text that the tutorial quotes."""
    here = dataclasses.replace(cli, cwd=tmp_path)
    said = {}
    for words in commands(TUTORIAL):
        if (line := shlex.join(words)) not in ELSEWHERE:
            said[line] = here(*words[1:])
    study = cli.study("wine")
    assert [trial.number for trial in study.trials] == list(range(10)), "eight, and two more"
    assert all(trial.state.is_finished() for trial in study.trials)
    expected = {
        "init": "wrote wine.py",
        "objective": "weight_decay",
        "smoke": "",
        "run": "best: trial ",
        "studies": "wine",
        "show": "trial",
        "report": "wine.html",
        "extend": "study wine: budget changed from 8 to 10 trials",
        "stop": "stopped study wine",
        "start": "started study wine",
        "worker": "exits with code 0",
        "finalists": "seed",
        "evaluate-test": "test accuracy",
        "promote": "models:/wine@champion (version 1)",
        "serve-check": "score reproduced in a process without the code of hpsearch and the objective",
        "gc": "freed",
    }
    for line, output in said.items():
        assert expected[line.split()[1]] in output, line


def test_the_tutorial_quotes_the_tested_notebook_script() -> None:
    code = (ROOT / "docs" / "notebook.py").read_text().split('"""', 2)[2].strip()
    assert f"```python\n{code}\n```" in TUTORIAL.read_text()


def test_each_command_of_the_readme_is_tested() -> None:
    run = {shlex.join(words) for words in commands(TUTORIAL)} | set(ELSEWHERE)
    assert sorted({shlex.join(words) for words in commands(README)} - run) == []


def test_the_commands_of_the_readme_are_in_the_order_of_the_tutorial() -> None:
    """In another order, such as a larger budget without a worker that spends it, a later command fails."""
    order = [shlex.join(words) for words in commands(TUTORIAL)]
    places = [order.index(line) for words in commands(README) if (line := shlex.join(words)) in order]
    assert places == sorted(places)


def test_commands_that_other_tests_run_are_still_in_the_pages() -> None:
    written = {shlex.join(words) for page in (TUTORIAL, README) for words in commands(page)}
    assert sorted(set(ELSEWHERE) - written) == []
    named = [name.split("::") for names in ELSEWHERE.values() for name in names]
    assert [(path, name) for path, name in named if name not in names_in(path)] == []
