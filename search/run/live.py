"""The live view of a run: progress of the study, and one line per worker."""

from __future__ import annotations

import math
import sys
import threading
import time
from _thread import start_new_thread
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime

from optuna.exceptions import StorageInternalError
from optuna.trial import FrozenTrial
from rich.console import Console, Group, RenderableType
from rich.live import Live
from sqlalchemy.exc import DBAPIError

from hpsearch.search.console import can_redraw, format_score, format_sparkline, plain_table
from hpsearch.search.fleet.fleet import Fleet
from hpsearch.search.report.top import (
    EpochRate,
    format_best,
    format_counts,
    format_rate,
    make_event_table,
    render_progress,
)
from hpsearch.search.report.trial_table import make_trial_table
from hpsearch.search.run.notebook_cell import NotebookCell
from hpsearch.search.spec.spec import StudySpec
from hpsearch.search.study.study import StoredStudy
from hpsearch.search.study.summary import format_seconds
from hpsearch.search.tracking.study_run import list_best_values
from hpsearch.search.worker.identity import worker_name
from hpsearch.storage.trials.history import Progress, RunningTrial
from hpsearch.storage.trials.worker_registry import AttemptEnd, read_attempt_ends

# Minimum seconds between two lines without a terminal: after a trial has ended, after another change, without a change.
_FINISHED_SECONDS, _CHANGED_SECONDS, _UNCHANGED_SECONDS = 2.0, 10.0, 60.0
_REDRAW_SECONDS = 0.9  # of the view, unless a trial has finished; drawing takes more time than reading the progress

_BEST_ROWS, _END_ROWS = 5, 8  # maximum of best trials and of recent ends on a terminal
_MIN_ROWS = 2  # a table with fewer rows is omitted
_COURSE_WIDTH = 40  # in characters
_WRITE_SECONDS = 1.0  # maximum wait for the terminal or pipe
_LAST_WRITE_SECONDS = 10.0  # maximum wait for them at the end of the view
_RESERVED_LINES = 11  # lines of the view without workers, best trials and recent ends; the counts may wrap


class LiveView:
    """View of the progress of a run. It is redrawn on a terminal or in a notebook; elsewhere it prints lines.

    Args:
        console: console of the view.
        spec: spec of the study.
        fleet: fleet whose workers are shown.
        study: study whose best trials and recent ends are shown; None shows none.
    """

    def __init__(self, console: Console, spec: StudySpec, fleet: Fleet, study: StoredStudy | None = None) -> None:
        self._console = console
        self._study = study
        self._best: list[FrozenTrial] = []
        self._ends: list[AttemptEnd] = []
        self._best_values: list[float] = []  # after each complete trial
        self._spec = spec
        self._fleet = fleet
        self._begin = time.monotonic()
        self._rate = EpochRate()
        self._epochs_per_second: float | None = None
        self._first: Progress | None = None
        self._live = _make_display(console)
        self._printed, self._printed_at, self._finished = "", -math.inf, -1
        self._ended = -1, -1  # numbers of ended and of paused trials
        self._is_outage = False
        self._is_output_closed = False
        self._has_written = threading.Event()  # whether the last output is complete
        self._has_written.set()
        self._lines: list[str] = []  # of `print_line`, not yet printed

    def __enter__(self) -> LiveView:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._has_written.wait(_LAST_WRITE_SECONDS)
            self._write(self._live.stop)

    def update(self, progress: Progress, *, is_outage: bool = False) -> None:
        """Show the progress; print a line when the database becomes unavailable."""
        if is_outage and not self._is_outage:
            self.print_line("the database is unavailable; waiting for it")
        self._is_outage = is_outage
        self._show(progress)

    def print_line(self, text: str) -> None:
        """Print a line above the view."""
        self._lines.append(text)
        self._write(lambda: None)

    def _write(self, write: Callable[[], object]) -> None:
        """Write to the output; return after a second if its terminal or pipe is not read, as after Ctrl-S."""
        if not self._has_written.is_set():
            return
        errors = list[BaseException]()
        self._has_written.clear()

        def try_to_write() -> None:
            try:
                while self._lines:
                    self._console.print(self._lines.pop(0), style="yellow")
                write()
            except OSError:
                self._is_output_closed = True
            except BaseException as error:  # the calling thread raises it
                errors.append(error)
            finally:
                self._has_written.set()

        if isinstance(self._live, NotebookCell):  # shows only what this thread displays
            try_to_write()
        else:
            try:
                start_new_thread(try_to_write, ())  # Thread.start waits forever for a thread that gets no memory
            except RuntimeError:  # no thread can be started
                self._has_written.set()
            self._has_written.wait(_WRITE_SECONDS)
        if errors:
            raise errors[0]

    def _show(self, progress: Progress) -> None:
        if self._is_output_closed:
            return
        now = time.monotonic()
        self._first = self._first or progress
        self._epochs_per_second = self._rate.add(now, progress.epochs)
        if self._live:
            if progress.finished == self._finished and now - self._printed_at < _REDRAW_SECONDS:
                return
            self._printed_at = now
            self._read_trials(progress)
            view, live = self.render(progress), self._live
            self._write(lambda: live.update(view, refresh=True))
            return
        counts = "; ".join(filter(None, [format_counts(progress), self._format_best(progress)]))
        if progress.finished != self._finished:
            wait = _FINISHED_SECONDS if progress.finished_fraction < 1 else 0.0
        else:
            wait = _CHANGED_SECONDS if counts != self._printed else _UNCHANGED_SECONDS
        if now - self._printed_at > wait:
            self._printed, self._printed_at, self._finished = counts, now, progress.finished
            line = f"{counts}; {format_rate(self._epochs_per_second, self._eta(progress))}"
            self._write(lambda: self._console.print(line))

    def _read_trials(self, progress: Progress) -> None:
        """Read the best trials and the recent ends again after a trial has ended or paused."""
        ended = progress.finished, progress.paused
        if self._study is None or ended == self._ended or self._is_outage:
            return
        with suppress(DBAPIError, StorageInternalError):  # the next update tries again
            self._best = self._study.best_trials()[:_BEST_ROWS]
            self._best_values = [value for _, value in list_best_values(self._study) if math.isfinite(value)]
            self._ends = read_attempt_ends(self._study.engine, self._study.study_id, retry_seconds=0.0)
            self._finished, self._ended = progress.finished, ended

    def _format_best(self, progress: Progress) -> str:
        if self._spec.finalists_of is not None:
            return ""  # the runs are compared when all have ended
        several = f", first of {len(self._spec.direction_by_metric)} metrics" if self._spec.is_multi_objective else ""
        return format_best(progress, self._spec.metric, several)

    def _eta(self, progress: Progress) -> float | None:
        """Return the estimated seconds until the budget is spent, at the average rate of this run; None if unknown."""
        assert self._first is not None
        done = progress.trained_fraction
        spent = done - self._first.trained_fraction
        if spent <= 0 or (done >= 1 and progress.finished_fraction < 1):  # the end depends on promotions
            return None
        return (time.monotonic() - self._begin) / spent * max(1 - done, 0.0)

    def render(self, progress: Progress) -> RenderableType:
        """Return the view as a rich renderable."""
        details = [("  objective ", "dim"), (self._spec.objective, ""), ("  elapsed ", "dim")]
        details.append((format_seconds(time.monotonic() - self._begin), ""))
        rate = format_rate(self._epochs_per_second, self._eta(progress))
        lines = ["; ".join(filter(None, [self._format_best(progress), rate])), format_counts(progress)]
        lines += self._format_course()
        numbers = ("trial", "epoch", self._spec.metric)
        workers = plain_table("worker", "state", *numbers, right=numbers, header_style="dim")
        by_worker = {running.worker: running for running in progress.running}
        own = [worker_name(slot.pids[-1]) if slot.pids else "" for slot in self._fleet.slots]
        for slot, name in zip(self._fleet.slots, own, strict=True):
            workers.add_row(str(slot.index), slot.state, *self._cells(by_worker.get(name) if slot.process else None))
        for running in progress.running:
            if running.worker not in own:
                workers.add_row(running.worker, "elsewhere", *self._cells(running))
        head = render_progress(self._spec.name, details, progress, lines)
        return Group(*head, workers, *self._render_trials(workers.row_count))

    def _format_course(self) -> list[str]:
        """Return a line with the course of the best value; an empty list if it has not changed yet."""
        if self._spec.is_multi_objective or self._spec.finalists_of is not None:
            return []
        course = format_sparkline(self._best_values, _COURSE_WIDTH) if self._console.encoding.startswith("utf") else ""
        return [f"best value after each complete trial {course}"] if course else []

    def _render_trials(self, n_workers: int) -> list[RenderableType]:
        """Return the tables of the best trials and of the recent ends, as far as the terminal has lines for them."""
        room = self._console.height - _RESERVED_LINES - n_workers
        parts: list[RenderableType] = []
        if self._best and self._spec.finalists_of is None and room >= 2 + _MIN_ROWS:
            shown = self._best[: min(_BEST_ROWS, room - 2)]
            parts += ["", make_trial_table(self._spec, shown, width=self._console.width)]
            room -= len(shown) + 2
        if self._ends and room >= 2 + _MIN_ROWS:
            shown_ends = self._ends[: min(_END_ROWS, room - 2)]
            parts += ["", make_event_table(shown_ends, datetime.now(UTC), self._console.width)]
        return parts

    def _cells(self, running: RunningTrial | None) -> tuple[str, str, str]:
        if running is None:
            return "", "", ""
        epoch = f"{0 if running.step is None else running.step + 1}/{self._spec.epochs}"
        value = format_score(running.value, "")
        return f"{running.number}", epoch, value


def _make_display(console: Console) -> Live | NotebookCell | None:
    """Return a view for the terminal or notebook; None if the output is neither."""
    notebook = sys.modules.get("IPython.display") if console.is_jupyter else None  # not a dependency
    if notebook is not None:
        return NotebookCell(notebook.display, console)
    return Live(console=console, auto_refresh=False, transient=True) if can_redraw(console) else None
