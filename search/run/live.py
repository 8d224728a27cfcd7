"""The live view of a run: where the study stands, and a line per worker."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hpsearch.search.console import plain_table
from hpsearch.search.fleet.fleet import Fleet
from hpsearch.search.spec.spec import StudySpec
from hpsearch.search.worker.identity import worker_name
from hpsearch.storage.trials.history import Progress, Running

_WINDOW = 20.0  # seconds over which the epoch rate is taken
_PLAIN_EVERY = 10.0  # seconds between lines where there is no terminal
_PLAIN_UNCHANGED = 60.0  # and while nothing changes


class LiveView:
    """Shows progress on a terminal or in a notebook as a view that is redrawn, elsewhere as a line now and then."""

    def __init__(self, console: Console, spec: StudySpec, fleet: Fleet) -> None:
        self._console = console
        self._spec = spec
        self._fleet = fleet
        self._begin = time.monotonic()
        self._samples: deque[tuple[float, int]] = deque()
        self._first: Progress | None = None
        self._live = _place(console)
        self._printed = (0.0, -1)
        self._told, self._told_at = "", 0.0
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
        self._samples.append((now, progress.epochs))
        while len(self._samples) > 2 and now - self._samples[0][0] > _WINDOW:
            self._samples.popleft()
        if self._live:
            self._live.update(self.render(progress), refresh=True)
            return
        printed_at, finished = self._printed
        if (
            progress.finished != finished and (progress.share >= 1 or now - printed_at > 2)
        ) or now - printed_at > _PLAIN_EVERY:
            self._plain(progress, now)

    def _plain(self, progress: Progress, now: float) -> None:
        counts = self._counts(progress)
        if counts != self._told or now - self._told_at > _PLAIN_UNCHANGED:
            self._told, self._told_at = counts, now
            self._console.print(f"{counts}  {self._pace(progress)}")
        self._printed = (now, progress.finished)

    def _counts(self, progress: Progress) -> str:
        paused = f", {progress.paused} paused" if progress.paused else ""
        best = ""
        if progress.best_value is not None:
            of = f", first of {len(self._spec.ways)} metrics" if self._spec.several else ""
            best = f", best {self._spec.metric} {progress.best_value:.4f} (trial {progress.best_number}{of})"
        return (
            f"{progress.done}{progress.early}: {progress.complete} done, {progress.pruned} pruned, "
            f"{progress.fail} failed, {len(progress.running)} running{paused}{best}"
        )

    def _pace(self, progress: Progress) -> str:
        (t0, e0), (t1, e1) = self._samples[0], self._samples[-1]
        rate = (e1 - e0) / (t1 - t0) if t1 > t0 else 0.0
        eta = self._eta(progress)
        return f"{rate:.1f} epochs/s, ETA {_clock(eta) if eta is not None else '-'}"

    def _eta(self, progress: Progress) -> float | None:
        """Return the seconds left, by the pace of this run's trials so far."""
        assert self._first is not None
        spent = progress.share - self._first.share
        if spent <= 0:
            return None
        return (time.monotonic() - self._begin) / spent * (1 - progress.share)

    def render(self, progress: Progress) -> RenderableType:
        """Return the view as something rich can draw."""
        elapsed = _clock(time.monotonic() - self._begin)
        title = Text.assemble(
            ("study ", "dim"), (self._spec.name, "bold"), ("  objective ", "dim"), self._spec.objective,
            ("  elapsed ", "dim"), elapsed,
        )  # fmt: skip
        bar = Table.grid()  # a bar alone does not end its line
        bar.add_row(ProgressBar(total=1, completed=progress.share, width=60))
        numbers = ("trial", "epoch", self._spec.metric)
        workers = plain_table("worker", "state", *numbers, right=numbers, header_style="dim")
        shown: set[int] = set()
        for slot in self._fleet.slots:
            name = worker_name(slot.pids[-1]) if slot.pids else ""
            mine = next((r for r in progress.running if r.worker == name), None)
            if mine:
                shown.add(mine.number)
            cells = self._cells(mine) if mine and slot.process else ("", "", "")
            workers.add_row(f"{slot.index}", slot.state, *cells)
        for other in progress.running:
            if other.number not in shown:
                workers.add_row(other.worker, "elsewhere", *self._cells(other))
        return Group(title, bar, Text(self._counts(progress)), Text(self._pace(progress), style="dim"), workers)

    def _cells(self, running: Running) -> tuple[str, str, str]:
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


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
