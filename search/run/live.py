"""The live view of a run: progress of the study, and one line per worker."""

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
from hpsearch.search.report.top import EpochRate, format_counts, format_rate, render_progress
from hpsearch.search.spec.spec import StudySpec
from hpsearch.search.study.summary import format_seconds
from hpsearch.search.worker.identity import worker_name
from hpsearch.storage.trials.history import Progress, RunningTrial

# Minimum seconds between two lines without a terminal: after a trial has ended, after another change, without a change.
_FINISHED_SECONDS, _CHANGED_SECONDS, _UNCHANGED_SECONDS = 2.0, 10.0, 60.0


class LiveView:
    """View of the progress of a run. It is redrawn on a terminal or in a notebook; elsewhere it prints lines."""

    def __init__(self, console: Console, spec: StudySpec, fleet: Fleet) -> None:
        self._console = console
        self._spec = spec
        self._fleet = fleet
        self._begin = time.monotonic()
        self._rate = EpochRate()
        self._epochs_per_second: float | None = None
        self._first: Progress | None = None
        self._live = _make_display(console)
        self._printed, self._printed_at, self._finished = "", -math.inf, -1
        self._is_outage = False
        self._is_output_closed = False

    def __enter__(self) -> LiveView:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            with suppress(OSError):
                self._live.stop()

    def update(self, progress: Progress, *, is_outage: bool = False) -> None:
        """Show the progress; print a line when the database becomes unavailable."""
        if is_outage and not self._is_outage:
            self.print_line("the database is unavailable; waiting for it")
        self._is_outage = is_outage
        try:
            self._show(progress)
        except OSError:
            self._is_output_closed = True  # the search continues without its terminal or pipe

    def print_line(self, text: str) -> None:
        """Print a line above the view."""
        try:
            self._console.print(text, style="yellow")
        except OSError:
            self._is_output_closed = True

    def _show(self, progress: Progress) -> None:
        if self._is_output_closed:
            return
        now = time.monotonic()
        self._first = self._first or progress
        self._epochs_per_second = self._rate.add(now, progress.epochs)
        if self._live:
            self._live.update(self.render(progress), refresh=True)
            return
        counts = self._counts(progress)
        if progress.finished != self._finished:
            wait = _FINISHED_SECONDS if progress.finished_fraction < 1 else 0.0
        else:
            wait = _CHANGED_SECONDS if counts != self._printed else _UNCHANGED_SECONDS
        if now - self._printed_at > wait:
            self._printed, self._printed_at, self._finished = counts, now, progress.finished
            self._console.print(f"{counts}; {format_rate(self._epochs_per_second, self._eta(progress))}")

    def _counts(self, progress: Progress) -> str:
        if self._spec.finalists_of is not None:
            return format_counts(progress, None)  # the runs are compared when all have ended
        several = f", first of {len(self._spec.direction_by_metric)} metrics" if self._spec.is_multi_objective else ""
        return format_counts(progress, self._spec.metric, several)

    def _eta(self, progress: Progress) -> float | None:
        """Return the estimated seconds until the budget is spent, at the average rate of this run; None if unknown."""
        assert self._first is not None
        spent = progress.finished_fraction - self._first.finished_fraction
        if spent <= 0:
            return None
        return (time.monotonic() - self._begin) / spent * (1 - progress.finished_fraction)

    def render(self, progress: Progress) -> RenderableType:
        """Return the view as a rich renderable."""
        details = [("  objective ", "dim"), (self._spec.objective, ""), ("  elapsed ", "dim")]
        details.append((format_seconds(time.monotonic() - self._begin), ""))
        rate = format_rate(self._epochs_per_second, self._eta(progress))
        numbers = ("trial", "epoch", self._spec.metric)
        workers = plain_table("worker", "state", *numbers, right=numbers, header_style="dim")
        by_worker = {running.worker: running for running in progress.running}
        own = [worker_name(slot.pids[-1]) if slot.pids else "" for slot in self._fleet.slots]
        for slot, name in zip(self._fleet.slots, own, strict=True):
            workers.add_row(str(slot.index), slot.state, *self._cells(by_worker.get(name) if slot.process else None))
        for running in progress.running:
            if running.worker not in own:
                workers.add_row(running.worker, "elsewhere", *self._cells(running))
        return Group(*render_progress(self._spec.name, details, progress, self._counts(progress), rate), workers)

    def _cells(self, running: RunningTrial | None) -> tuple[str, str, str]:
        if running is None:
            return "", "", ""
        epoch = f"{0 if running.step is None else running.step + 1}/{self._spec.epochs}"
        value = "" if running.value is None else f"{running.value:.4f}"
        return f"{running.number}", epoch, value


class _NotebookCell:
    """A redrawn view in a notebook. Rich's own notebook view needs ipywidgets, which few users have."""

    def __init__(self, display: Callable[..., Any]) -> None:
        self._display = display
        self._handle: Any = None

    def start(self) -> None:
        """Show an empty view."""
        self._handle = self._display(Text(""), display_id=True)

    def update(self, view: RenderableType, *, refresh: bool) -> None:  # noqa: ARG002 as rich's Live has it
        """Redraw the view."""
        page = Table.grid()  # unlike a group, a table can be shown in a notebook
        page.add_row(view)
        self._handle.update(page)

    def stop(self) -> None:
        """Clear the view. The result is printed afterwards, and replaces the view."""
        self._handle.update(Text(""))


def _make_display(console: Console) -> Live | _NotebookCell | None:
    """Return a view for the terminal or notebook; None if the output is neither."""
    notebook = sys.modules.get("IPython.display") if console.is_jupyter else None  # not a dependency
    if notebook is not None:
        return _NotebookCell(notebook.display)
    return Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
