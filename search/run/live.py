"""The live view of a run: where the study stands, and a line per worker."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hpsearch.search.console import plain_table
from hpsearch.search.fleet.fleet import Fleet
from hpsearch.search.report.top import Pace, draw_progress, format_counts, format_pace
from hpsearch.search.spec.spec import StudySpec
from hpsearch.search.study.summary import format_seconds
from hpsearch.search.worker.identity import worker_name
from hpsearch.storage.trials.history import Progress, Running

# Least seconds between two lines without a terminal: when trials have ended, when other counts changed, and otherwise.
_PLAIN_FINISHED, _PLAIN_EVERY, _PLAIN_UNCHANGED = 2.0, 10.0, 60.0


class LiveView:
    """Shows progress on a terminal or in a notebook as a view that is redrawn, elsewhere as a line now and then."""

    def __init__(self, console: Console, spec: StudySpec, fleet: Fleet) -> None:
        self._console = console
        self._spec = spec
        self._fleet = fleet
        self._begin = time.monotonic()
        self._pace = Pace()
        self._rate: float | None = None
        self._first: Progress | None = None
        self._live = _place(console)
        self._printed, self._printed_at, self._finished = "", -math.inf, -1
        self._away = False
        self._deaf = False

    def __enter__(self) -> LiveView:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            with suppress(OSError):
                self._live.stop()

    def update(self, progress: Progress, *, away: bool = False) -> None:
        """Show `progress`, and whether the database is away."""
        if away and not self._away:
            self.say("the database does not answer; waiting for it")
        self._away = away
        try:
            self._show(progress)
        except OSError:
            self._deaf = True  # the terminal was closed, or the reader of the pipe went away: the search goes on

    def say(self, what: str) -> None:
        """Print a line above the view."""
        try:
            self._console.print(what, style="yellow")
        except OSError:
            self._deaf = True

    def _show(self, progress: Progress) -> None:
        if self._deaf:
            return
        now = time.monotonic()
        self._first = self._first or progress
        self._rate = self._pace.add(now, progress.epochs)
        if self._live:
            self._live.update(self.render(progress), refresh=True)
            return
        counts = self._counts(progress)
        if progress.finished != self._finished:
            wait = _PLAIN_FINISHED if progress.share < 1 else 0.0
        else:
            wait = _PLAIN_EVERY if counts != self._printed else _PLAIN_UNCHANGED
        if now - self._printed_at > wait:
            self._printed, self._printed_at, self._finished = counts, now, progress.finished
            self._console.print(f"{counts}; {format_pace(self._rate, self._eta(progress))}")

    def _counts(self, progress: Progress) -> str:
        several = f", first of {len(self._spec.ways)} metrics" if self._spec.several else ""
        return format_counts(progress, self._spec.metric, several)

    def _eta(self, progress: Progress) -> float | None:
        """Return the seconds left, by the pace of this run's trials so far."""
        assert self._first is not None
        spent = progress.share - self._first.share
        if spent <= 0:
            return None
        return (time.monotonic() - self._begin) / spent * (1 - progress.share)

    def render(self, progress: Progress) -> RenderableType:
        """Return the view as something rich can draw."""
        details = [("  objective ", "dim"), (self._spec.objective, ""), ("  elapsed ", "dim")]
        details.append((format_seconds(time.monotonic() - self._begin), ""))
        pace = format_pace(self._rate, self._eta(progress))
        numbers = ("trial", "epoch", self._spec.metric)
        workers = plain_table("worker", "state", *numbers, right=numbers, header_style="dim")
        by_worker = {running.worker: running for running in progress.running}
        own = [worker_name(slot.pids[-1]) if slot.pids else "" for slot in self._fleet.slots]
        for slot, name in zip(self._fleet.slots, own, strict=True):
            workers.add_row(str(slot.index), slot.state, *self._cells(by_worker.get(name) if slot.process else None))
        for running in progress.running:
            if running.worker not in own:
                workers.add_row(running.worker, "elsewhere", *self._cells(running))
        return Group(*draw_progress(self._spec.name, details, progress, self._counts(progress), pace), workers)

    def _cells(self, running: Running | None) -> tuple[str, str, str]:
        if running is None:
            return "", "", ""
        epoch = f"{0 if running.step is None else running.step + 1}/{self._spec.epochs}"
        value = "" if running.value is None else f"{running.value:.4f}"
        return f"{running.number}", epoch, value


class _Cell:
    """A place in a notebook's output that is drawn over; rich's own needs ipywidgets there, which few have."""

    def __init__(self, display: Callable[..., Any]) -> None:
        self._display = display
        self._handle: Any = None

    def start(self) -> None:
        """Take the place."""
        self._handle = self._display(Text(""), display_id=True)

    def update(self, view: RenderableType, *, refresh: bool) -> None:  # noqa: ARG002 as rich's Live has it
        """Draw over what is there."""
        page = Table.grid()  # unlike a group it knows how to be shown in a notebook
        page.add_row(view)
        self._handle.update(page)

    def stop(self) -> None:
        """Leave nothing: what came of it is printed below."""
        self._handle.update(Text(""))


def _place(console: Console) -> Live | _Cell | None:
    """Return where the view is redrawn: a terminal, a notebook's cell, or nowhere."""
    notebook = sys.modules.get("IPython.display") if console.is_jupyter else None  # there without being a dependency
    if notebook is not None:
        return _Cell(notebook.display)
    return Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
