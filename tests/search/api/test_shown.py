"""The view of a run in a notebook and in a file, and its signal handling."""

from __future__ import annotations

import contextlib
import html
import io
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from hpsearch.search.console import PlainConsole
from hpsearch.search.fleet.fleet import Fleet
from hpsearch.search.process.signals import raise_interrupt, restore_handlers, stop_on_signals
from hpsearch.search.run.live import LiveView
from hpsearch.search.spec.spec import FinalistsOf
from hpsearch.search.worker.options import WorkerOptions
from hpsearch.storage.trials.history import Progress, RunningTrial
from tests.factories import spec_of

RUNNING = RunningTrial(number=3, worker="elsewhere:1", step=1, value=0.75)


def progress(complete: int) -> Progress:
    return Progress(budget=4, complete=complete, best_value=0.9, best_number=1, running=[RUNNING])


def view(console: Console, folder: Path) -> LiveView:
    return LiveView(console, spec_of(name="median"), Fleet("s", WorkerOptions(), workers=1, log_dir=folder, gpus=[]))


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Record a notebook's output: for each display all its updates, as HTML."""
    shown: list[list[str]] = []

    def display(thing: Any, **_: object) -> SimpleNamespace:
        drawn = [draw(thing)]
        shown.append(drawn)
        return SimpleNamespace(update=lambda other: drawn.append(draw(other)))

    module = ModuleType("IPython.display")
    module.display = display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return shown


def draw(thing: Any) -> str:
    """Return the representation that IPython displays."""
    return str(thing._repr_mimebundle_((), ())["text/html"])


def test_runs_of_finalists_have_no_best_trial(tmp_path: Path) -> None:
    """Their numbers are not those of the trials in the search."""
    output = io.StringIO()
    of = FinalistsOf(study="s", study_id=1, top=1, trials=[7], seeds=[1, 2])
    spec = spec_of(name="none").model_copy(update={"finalists_of": of})
    fleet = Fleet("s", WorkerOptions(), workers=1, log_dir=tmp_path, gpus=[])
    with LiveView(Console(file=output, width=200), spec, fleet) as shown:
        shown.update(progress(complete=1))
    assert "1/4 trials: 1 complete" in output.getvalue()
    assert "best" not in output.getvalue()


def test_a_terminal_that_is_not_read_does_not_stop_the_search(tmp_path: Path) -> None:
    """As after Ctrl-S, or in a pipe to a pager."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    size = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            size += os.write(write_end, b"x" * 1000)
    os.set_blocking(write_end, True)
    output = os.fdopen(write_end, "w", buffering=1)  # closing it would wait for the reader
    with view(Console(file=output, width=200), tmp_path) as shown:
        shown.update(progress(complete=1))  # would never return
        shown.update(progress(complete=2))
    while size > 0:
        size -= len(os.read(read_end, size))
    with os.fdopen(read_end) as rest:
        assert "1/4 trials: 1 complete" in rest.readline()
    output.close()


def test_a_notebook_view_is_updated_in_place(cells: list[list[str]], tmp_path: Path) -> None:
    with view(Console(force_jupyter=True, width=100), tmp_path) as shown:
        shown.update(progress(complete=1))
        shown.update(progress(complete=2))
    ((begin, first, second, end),) = cells
    assert "1/4 trials" in first
    assert "2/4 trials" in second
    assert "best accuracy 0.9 (trial 1)" in " ".join(second.split())
    assert "elsewhere:1" in second
    assert begin == end
    assert "trials" not in end


def test_texts_of_workers_are_no_markup_in_a_notebook(cells: list[list[str]], tmp_path: Path) -> None:
    worker = """[link=x"><img/src="x"/onerror=alert(1)>]w[/link]\x1b[31m<script>"""
    running = RunningTrial(number=3, worker=worker, step=1, value=0.75)
    with view(PlainConsole(force_jupyter=True, width=200), tmp_path) as shown:
        shown.update(Progress(budget=4, running=[running]))
    page = cells[0][1]
    assert html.escape(worker).replace("\x1b", "\\x1b") in page
    assert "<a" not in page


def test_progress_in_a_file_is_a_line(tmp_path: Path) -> None:
    file = io.StringIO()
    with view(Console(file=file, width=100), tmp_path) as shown:
        shown.update(progress(complete=4))
    assert "4/4 trials: 4 complete" in file.getvalue()


def test_signals_are_handled_only_during_a_run_and_in_the_main_thread() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises(KeyboardInterrupt), restore_handlers():  # noqa: PT012 both, within it
        stop = stop_on_signals(kill=raise_interrupt)
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(number)
        assert stop.is_set()
        signal.raise_signal(signal.SIGINT)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before

    def elsewhere() -> object:
        with restore_handlers():
            stop_on_signals(kill=raise_interrupt)
            return signal.getsignal(signal.SIGTERM)

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(elsewhere).result() is before[0]
