"""Progress lines in a log."""

from __future__ import annotations

import io
import logging
import math
import os
import pty
import sys
import time
from pathlib import Path

import pytest

from hpsearch.search.api import opening
from hpsearch.search.console import (
    PlainConsole,
    format_change,
    format_difference,
    format_score,
    format_sparkline,
    log_to_stderr,
    plain_table,
    prefix_output,
    shorten_line,
    show_slow_steps,
    show_steps,
)


def test_a_log_has_only_the_first_and_the_last_of_equal_steps() -> None:
    output = io.StringIO()
    with show_steps(PlainConsole(file=output)) as show_step:
        show_step("opening the study")
        for done in range(21):
            show_step(f"sending 21 trials to MLflow: {done} done")
    lines = ["opening the study", "sending 21 trials to MLflow: 0 done", "sending 21 trials to MLflow: 20 done"]
    assert output.getvalue().splitlines() == lines


def test_commands_print_the_steps_of_a_slow_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(_where, progress):
        progress("starting Postgres")
        progress("starting MLflow (about 10 s)")
        time.sleep(0.2)
        progress("starting the Optuna dashboard")
        raise InterruptedError

    monkeypatch.setattr(opening, "find_services", start)
    monkeypatch.setattr(opening, "show_slow_steps", lambda: show_slow_steps(after_seconds=0.1))
    with pytest.raises(InterruptedError):
        opening.list_studies({})
    time.sleep(0.2)
    assert capsys.readouterr() == ("", "starting MLflow (about 10 s)\n")


@pytest.mark.parametrize(("columns", "width"), [("0", 80), ("x", 80), ("1", 40), ("60", 60)])
def test_a_table_is_visible_with_any_value_of_columns(
    monkeypatch: pytest.MonkeyPatch, columns: str, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("TERM", "xterm")
    controller, terminal = pty.openpty()
    with os.fdopen(terminal, "w") as output:
        monkeypatch.setattr("sys.stdout", output)
        console = PlainConsole()
        table = plain_table("study", "objective", "trials")
        table.add_row("a", "digits", "1/2")
        console.print(table)
        assert console.width == width
        assert b"digits" in os.read(controller, 10_000)
    os.close(controller)


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (38, ["trial  value   reason", "   11  0.9444  worse than the median", "    2"]),
        (37, ["trial 11, value 0.9444", "  reason worse than the median", "trial 2"]),
        (24, ["trial 11, value 0.9444", "  reason worse than the", "  median", "trial 2"]),
    ],
)
def test_a_table_is_a_list_where_its_cells_would_be_cut(width: int, lines: list[str]) -> None:
    console = PlainConsole(file=io.StringIO())
    console.width = width
    table = plain_table("trial", "value", "reason", right=("trial",), wrap=())
    table.add_row("11", "0.9444", "worse than the median")
    table.add_row("2", "", "")
    with console.capture() as capture:
        console.print(table)
    assert capture.get().splitlines() == lines


def test_a_line_feed_in_a_cell_makes_no_row() -> None:
    table, console = plain_table("study", "best"), PlainConsole(width=60)
    table.add_row("a\nb  0.99", "0.5")
    with console.capture() as capture:
        console.print(table)
    assert [line.split() for line in capture.get().splitlines()] == [["study", "best"], ["a\\nb", "0.99", "0.5"]]


def test_a_line_is_shortened_at_a_space() -> None:
    assert shorten_line("0.8861 <\n0.9444", 15) == "0.8861 < 0.9444"
    assert shorten_line("0.8861 < 0.9444", 14) == "0.8861 < …"
    assert shorten_line("OutOfMemoryError", 8) == "OutOfM …"


@pytest.mark.parametrize(
    ("values", "width", "course"),
    [
        ([], 8, ""),
        ([0.5, 0.5], 8, ""),
        ([0.0, 0.5, 1.0], 8, "▁▅█"),
        ([3.0, 1.0], 8, "█▁"),
        (list(range(100)), 4, "▁▃▆█"),
    ],
)
def test_a_course_of_values_is_a_line_of_bars(values: list[float], width: int, course: str) -> None:
    assert format_sparkline(values, width) == course


def test_lines_of_a_rank_begin_with_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = io.BytesIO(), io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out))
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(err))
    prefix_output(3)
    print("epoch", 1, end="")
    print(" begins\n\nthird")
    assert print("no line feed", end="", flush=True) is None
    print("[rank3]: from PyTorch\nlast", file=sys.stderr)
    assert sys.stdout.write("") == 0
    assert out.getvalue().decode() == "[rank3]: epoch 1 begins\n[rank3]: \n[rank3]: third\n[rank3]: no line feed"
    assert err.getvalue().decode() == "[rank3]: from PyTorch\n[rank3]: last\n"


def test_steps_are_lines_on_a_terminal_that_cannot_redraw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")  # as in Emacs
    output = io.StringIO()
    with show_steps(PlainConsole(file=output, force_terminal=True)) as show_step:
        show_step("loading")
    assert output.getvalue() == "loading\n"


@pytest.mark.parametrize(
    ("value", "score", "difference"),
    [
        (0.98, "0.9800", "0.9800"),
        (-12.34567, "-12.3457", "-12.3457"),
        (0.0004123, "0.0004123", "0.00041"),
        (3.21e-5, "3.21e-05", "3.2e-05"),
        (0.0, "0.0000", "0.0000"),
        (1e308, "1e+308", "1e+308"),
        (math.inf, "inf", "inf"),
        (None, "-", "-"),
    ],
)
def test_small_and_huge_values_are_readable(value: float | None, score: str, difference: str) -> None:
    assert (format_score(value), format_difference(value)) == (score, difference)


def test_changes_have_a_sign() -> None:
    assert [format_change(value) for value in (0.5, -2e-5, 0.0, None)] == ["+0.5000", "-2e-05", "+0.0000", "-"]


def test_a_handler_that_raises_errors_ends_no_worker() -> None:
    found = list[logging.LogRecord]()

    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record)
            raise RuntimeError(record.getMessage())

    logger = logging.getLogger("hpsearch.tests.broken_handler")
    handler = Broken()
    logger.addHandler(handler)
    with pytest.raises(RuntimeError, match="before"):
        logger.error("before")
    log_to_stderr(logging.INFO)
    logger.error("after")
    factory = logging.getLogRecordFactory()
    logging.setLogRecordFactory(lambda *_, **__: 1 / 0)
    try:
        logger.error("with %s", "a broken factory")
    finally:
        logging.setLogRecordFactory(factory)
    logger.removeHandler(handler)
    assert [record.getMessage() for record in found] == ["before", "after", "with a broken factory"]
    assert {Path(record.pathname).name for record in found} == {"test_console.py"}
