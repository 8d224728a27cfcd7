"""The live table of `hpsearch top`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from pydantic import TypeAdapter
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hpsearch.search.console import plain_table
from hpsearch.search.spec.multi_objective import Direction
from hpsearch.search.study.study import StoredStudy
from hpsearch.search.study.summary import format_seconds
from hpsearch.storage.attributes import STOPPED
from hpsearch.storage.database.statements import Database
from hpsearch.storage.trials.history import Progress, read_progress
from hpsearch.storage.trials.register import Event, WorkerRow, read_events, read_workers

_ENDS = 20  # of trials, by which the rest of a study's time is told


@dataclass(frozen=True)
class Standing:
    """A study at a moment.

    Attributes:
        study, metric, direction, epochs: of its spec.
        stopped: who stopped it, and when.
        progress: its counts, its best trial, what runs.
        workers: all that the register has, those that are there first.
        events: how the last attempts ended, the newest first.
        reached: epochs, and how many trials got that far.
        eta: seconds to the end of the budget by the last ends; None while nothing can be told.
        at: the database's clock.
        directions: of several metrics, each with its own; None where there is one.
        front: number and values of the trials that no other dominates, of several metrics.
    """

    study: str
    metric: str
    direction: str
    epochs: int
    stopped: str | None
    progress: Progress
    workers: list[WorkerRow]
    events: list[Event]
    reached: dict[int, int]
    eta: float | None
    at: datetime
    directions: dict[str, Direction] | None = None
    front: list[dict[str, Any]] | None = None

    def to_json(self) -> str:
        """The same for scripts: times as ISO 8601, numbers that are not finite as null."""
        only_several = set() if self.directions else {"directions", "front"}
        return TypeAdapter(Standing).dump_json(self, indent=2, exclude=only_several).decode()


def read_standing(study: StoredStudy) -> Standing:
    """Read where a study stands now."""
    spec = study.spec
    [(at,)] = Database(study.engine).rows(sa.text("SELECT clock_timestamp()"), {})
    progress = read_progress(study.engine, study.study_id, spec.direction)
    events = read_events(study.engine, study.study_id)
    return Standing(
        study=spec.name,
        metric=spec.metric,
        direction=spec.direction,
        epochs=spec.epochs,
        stopped=study.attrs.get(STOPPED),
        progress=progress,
        workers=read_workers(study.engine, study.study_id),
        events=events,
        reached=_count_rungs_reached(study),
        eta=_eta(study, progress, at),
        at=at,
        directions=spec.directions,
        front=_front(study) if spec.several else None,
    )


def _front(study: StoredStudy) -> list[dict[str, Any]]:
    return [
        {"trial": trial.number, "values": dict(zip(study.spec.ways, trial.values, strict=True))}
        for trial in study.front()
    ]


_LENGTHS = sa.text("""
    SELECT max(i.step) + 1 AS epochs FROM trials t JOIN trial_intermediate_values i USING (trial_id)
     WHERE t.study_id = :study GROUP BY t.trial_id
""")


def _count_rungs_reached(study: StoredStudy) -> dict[int, int]:
    """How many trials got to the first epoch, the last, and halvings between."""
    lengths = [row.epochs for row in Database(study.engine).rows(_LENGTHS, {"study": study.study_id})]
    total = study.spec.epochs
    marks = sorted({1, total, *(total // 2**power for power in range(1, int(math.log2(total)) + 1))})
    return {mark: sum(length >= mark for length in lengths) for mark in marks}


# Those that ended together at a moment are told apart by nothing: the first only begins the time.
_PACE = sa.text("""
    SELECT count(*) - 1 AS ends, extract(epoch FROM :at - min(ended)) AS seconds FROM (
        SELECT max(a.ended_at) AS ended FROM trials t JOIN hpsearch_attempts a USING (trial_id)
         WHERE t.study_id = :study AND t.state IN ('COMPLETE', 'PRUNED', 'FAIL')
         GROUP BY t.trial_id ORDER BY ended DESC LIMIT :limit) last
""")


def _eta(study: StoredStudy, progress: Progress, at: datetime) -> float | None:
    if progress.share >= 1:
        return 0.0
    [row] = Database(study.engine).rows(_PACE, {"study": study.study_id, "at": at, "limit": _ENDS + 1})
    if not progress.running or row.ends < 1 or not row.seconds:
        return None
    # At the pace of the last ends, by the budget of which most is spent.
    left = progress.finished / progress.share * (1 - progress.share) if progress.share else progress.budget
    return float(row.seconds) / int(row.ends) * left


_STATES = {"running": "green", "idle": "yellow", "lost": "red", "left": "dim"}
_OUTCOMES = {"complete": "green", "pruned": "yellow", "infeasible": "yellow", "lost": "red", "failed": "red"}
_RESERVED = 11  # lines above and between the tables
_NARROW = ("worker", "state", "trial", "epoch", "done", "lease", "seen")
_WIDE = 100  # columns, from which on there is room for more


class Pace:
    """The rate of epochs over the last seconds."""

    _WINDOW = 20.0  # seconds

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def add(self, seconds: float, epochs: int) -> float | None:
        """Add a sample and return the epochs per second; None after the first sample.

        Args:
            seconds: of a clock.
            epochs: reported in the study by then.
        """
        self._samples.append((seconds, epochs))
        while len(self._samples) > 2 and seconds - self._samples[0][0] > self._WINDOW:
            self._samples.popleft()
        begin, before = self._samples[0]
        return (epochs - before) / (seconds - begin) if seconds > begin else None


def format_counts(progress: Progress, metric: str, best_suffix: str = "") -> str:
    """Return ``12/50 trials: 8 complete, 4 pruned, 0 failed, 2 running, 0 waiting; best accuracy 0.9 (trial 3)``."""
    paused = f", {progress.paused} paused" if progress.paused else ""
    best = "none yet"
    if progress.best_value is not None:
        best = f"{metric} {progress.best_value:.6g} (trial {progress.best_number}){best_suffix}"
    return (
        f"{progress.done}{progress.early}: {progress.complete} complete, {progress.pruned} pruned, "
        f"{progress.fail} failed, {len(progress.running)} running, {progress.waiting} waiting{paused}; best {best}"
    )


def format_pace(pace: float | None, eta_seconds: float | None) -> str:
    """Return ``12.5 epochs/s, ETA 3.5 min``."""
    rate = "" if pace is None else f"{pace:.1f} epochs/s, "
    return f"{rate}ETA {'-' if eta_seconds is None else format_seconds(eta_seconds)}"


def draw_progress(
    study: str, details: Sequence[tuple[str, str]], progress: Progress, counts: str, pace: str
) -> list[RenderableType]:
    """Return the lines above the tables: title, bar, counts and pace.

    Args:
        study: its name.
        details: what follows it in the title: texts with their styles.
        progress: of the study.
        counts: by `format_counts`.
        pace: by `format_pace`, and what else is known of the pace.
    """
    bar = Table.grid()  # a bar alone does not end its line
    bar.add_row(ProgressBar(total=1, completed=progress.share, width=60))
    title = Text.assemble(("study ", "dim"), (study, "bold"), *details)
    return [title, bar, Text(counts), Text(pace, style="dim")]


def render(standing: Standing, pace: float | None, *, width: int = 120, height: int = 40) -> RenderableType:
    """Return the view, in about so many lines; a narrow one leaves out what is known elsewhere."""
    room = max(height - _RESERVED, 6)
    shown = min(len(standing.workers), max(room * 2 // 3, 3))
    details = [(f"  stopped: {standing.stopped}", "red")] if standing.stopped else []
    details.append((f"  {standing.at:%Y-%m-%d %H:%M:%S %Z}", "dim"))
    front = f", {len(standing.front)} on the front" if standing.front else ""
    counts = format_counts(standing.progress, standing.metric, front)
    rungs = ", ".join(f"{mark}: {count}" for mark, count in standing.reached.items())
    reached = f"trials that reached epoch {rungs}; {format_pace(pace, standing.eta)}"
    there = sum(worker.state in {"running", "idle"} for worker in standing.workers)
    return Group(
        *draw_progress(standing.study, details, standing.progress, counts, reached),
        "",
        Text(f"{there} workers there, {len(standing.workers) - there} gone", style="dim"),
        _workers(standing, shown, _NARROW if width < _WIDE else (*_NARROW, "engine", "device")),
        "",
        _events(standing, max(room - shown, 3), width),
    )


def _workers(standing: Standing, most: int, columns: tuple[str, ...]) -> Table:
    numbers = ("trial", "epoch", "done", "lease")
    table = plain_table(*columns, right=numbers, wrap=("state",), header_style="dim")
    for worker in standing.workers[:most]:
        cells = _cells(standing, worker)
        table.add_row(*(cells[column] for column in columns))
    if (hidden := len(standing.workers) - most) > 0:
        table.add_row(f"and {hidden} more")
    return table


def _cells(standing: Standing, worker: WorkerRow) -> dict[str, Text | str]:
    of = worker.identity
    state = Text(worker.state, style=_STATES[worker.state])
    if worker.left_as:
        state.append(f": {worker.left_as}", "dim")
    seen = max((standing.at - worker.seen_at).total_seconds(), 0.0)
    return {
        "worker": of.name,
        "state": state,
        "trial": "" if worker.trial is None else str(worker.trial),
        "epoch": "" if worker.epoch is None else f"{worker.epoch}/{standing.epochs}",
        "done": str(worker.trials),
        "lease": "" if worker.lease_left is None else f"{worker.lease_left:.0f} s",
        "seen": f"{format_seconds(seen)} ago",
        "engine": " ".join(part for part in (of.engine, of.job) if part),
        "device": of.device,
    }


def _events(standing: Standing, most: int, width: int) -> Table:
    table = plain_table("ended", "trial", "how", "why", right=("trial",), wrap=(), header_style="dim")
    events = standing.events[:most]
    hows = [Text(event.outcome, style=_OUTCOMES.get(event.outcome.partition(",")[0], "dim")) for event in events]
    # Cut here: a table that is too wide leaves out whole columns.
    room = width - sum(len(f"{word}  ") for word in ("99.9 min ago", "trial", max(map(str, hows), key=len, default="")))
    for event, how in zip(events, hows, strict=True):
        ago = format_seconds(max((standing.at - event.at).total_seconds(), 0.0))
        why = Text(" ".join((event.reason or f"by {event.worker}").split()))
        why.truncate(max(room - 2, 20), overflow="ellipsis")
        table.add_row(f"{ago} ago", str(event.trial), how, why)
    return table
