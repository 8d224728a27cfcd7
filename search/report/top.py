"""The live table of `hpsearch top`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any

import sqlalchemy as sa
from pydantic import Field, TypeAdapter
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hpsearch.search.console import format_number, plain_table, shorten_line
from hpsearch.search.report.trial_table import shorten_reason
from hpsearch.search.spec.multi_objective import Direction
from hpsearch.search.study.study import StoredStudy
from hpsearch.search.study.summary import format_seconds
from hpsearch.storage.attributes import WANTED_WORKERS
from hpsearch.storage.database.statements import Database
from hpsearch.storage.display import escape_line
from hpsearch.storage.trials.history import Progress, read_progress
from hpsearch.storage.trials.lost_attempts import LossCause
from hpsearch.storage.trials.worker_registry import (
    AttemptEnd,
    WorkerRow,
    read_attempt_ends,
    read_loss_counts,
    read_workers,
)

_ETA_ENDS = 20  # number of ended trials from which the rate for the ETA is computed


@dataclass(frozen=True)
class StudyStatus:
    """Snapshot of a study's status.

    Attributes:
        study, metric, direction, epochs: settings of the spec.
        stopped: user and time of a stop request; None if the study was not stopped.
        progress: counts, best trial and running trials.
        workers: all registered workers, active ones first.
        wanted_workers: number of workers that the study should have; 0 if unknown.
        losses: number of attempts without a result, by outcome or cause of the loss.
        events: the attempts that ended last, newest first.
        trial_counts: number of trials that reached an epoch, by epoch.
        eta: estimated seconds until the budget is spent; None while too few trials have ended.
        at: time of the snapshot, by the database's clock.
        directions: direction of each metric in a multi-objective study; None in a single-objective study.
        front: number and values of the trials on the Pareto front; None in a single-objective study.
    """

    study: str
    metric: str
    direction: str
    epochs: int
    stopped: str | None
    progress: Progress
    workers: list[WorkerRow]
    events: list[AttemptEnd]
    trial_counts: Annotated[dict[int, int], Field(serialization_alias="reached")]
    eta: float | None
    at: datetime
    directions: dict[str, Direction] | None = None
    front: list[dict[str, Any]] | None = None
    wanted_workers: int = 0
    losses: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the status as JSON, with times as ISO 8601 and non-finite numbers as null."""
        only_several = set() if self.directions else {"directions", "front"}
        return TypeAdapter(StudyStatus).dump_json(self, indent=2, by_alias=True, exclude=only_several).decode()


def read_status(study: StoredStudy) -> StudyStatus:
    """Read the current status of a study."""
    spec = study.spec
    [(at,)] = Database(study.engine).fetch_rows(sa.text("SELECT clock_timestamp()"), {})
    progress = read_progress(study.engine, study.study_id, spec.direction)
    return StudyStatus(
        study=spec.name,
        metric=spec.metric,
        direction=spec.direction,
        epochs=spec.epochs,
        stopped=study.stopped,
        progress=progress,
        workers=read_workers(study.engine, study.study_id),
        events=read_attempt_ends(study.engine, study.study_id),
        trial_counts=_count_rungs_reached(study),
        eta=_estimate_seconds_left(study, progress, at),
        at=at,
        directions=spec.directions,
        front=_list_front(study) if spec.is_multi_objective else None,
        wanted_workers=wanted if isinstance(wanted := study.attrs.get(WANTED_WORKERS), int) else 0,
        losses=read_loss_counts(study.engine, study.study_id),
    )


def _list_front(study: StoredStudy) -> list[dict[str, Any]]:
    names = study.spec.direction_by_metric
    return [{"trial": t.number, "values": dict(zip(names, t.values, strict=True))} for t in study.front()]


_EPOCHS_PER_TRIAL = sa.text("""
    SELECT max(i.step) + 1 AS epochs FROM trials t JOIN trial_intermediate_values i USING (trial_id)
     WHERE t.study_id = :study GROUP BY t.trial_id
""")


def _count_rungs_reached(study: StoredStudy) -> dict[int, int]:
    """Return the number of trials that reached epoch 1, and epochs N, N/2, N/4 and so on, with N the last epoch."""
    lengths = [row.epochs for row in Database(study.engine).fetch_rows(_EPOCHS_PER_TRIAL, {"study": study.study_id})]
    total = study.spec.epochs
    marks = sorted({1, total, *(total // 2**power for power in range(1, int(math.log2(total)) + 1))})
    return {mark: sum(length >= mark for length in lengths) for mark in marks}


# The first of these ends is the start of the period, and does not count.
_RECENT_ENDS = sa.text("""
    SELECT count(*) - 1 AS ends, extract(epoch FROM :at - min(ended)) AS seconds FROM (
        SELECT min(a.ended_at) AS ended FROM trials t JOIN hpsearch_attempts a USING (trial_id)
         WHERE t.study_id = :study AND t.state <> 'RUNNING' AND a.ended_at IS NOT NULL
         GROUP BY t.trial_id ORDER BY ended DESC LIMIT :limit) last
""")


def _estimate_seconds_left(study: StoredStudy, progress: Progress, at: datetime) -> float | None:
    if progress.finished_fraction >= 1:
        return 0.0
    if (done := progress.trained_fraction) >= 1:  # the end depends on promotions
        return None
    [row] = Database(study.engine).fetch_rows(_RECENT_ENDS, {"study": study.study_id, "at": at, "limit": _ETA_ENDS + 1})
    if not progress.running or row.ends < 1 or not row.seconds:
        return None
    # The rate of the last ends, applied to the budget that will be spent first.
    left = (progress.finished + progress.paused) / done * (1 - done) if done else progress.budget
    return float(row.seconds) / int(row.ends) * left


_STATES = {"running": "green", "idle": "yellow", "lost": "red", "left": "dim"}
_LABELS = {"left": "exited"}  # words that differ from the state
_OUTCOMES = {"complete": "green", "pruned": "yellow", "infeasible": "yellow", "lost": "red", "failed": "red"}
_OUTCOMES |= {cause.value: "red" for cause in LossCause}
_TALL_HEIGHT = 30  # in lines; a lower view shows fewer trials
_RESERVED_LINES = 12  # number of lines above and between the tables
_NARROW_COLUMNS = ("worker", "state", "trial", "epoch", "done", "lease", "seen")
_WIDE_WIDTH = 100  # in characters; a narrower view shows only the narrow columns


class EpochRate:
    """Moving average of the number of epochs per second."""

    _WINDOW_SECONDS = 20.0

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def add(self, seconds: float, epochs: int) -> float | None:
        """Add a sample and return the current epochs per second; None after the first sample.

        Args:
            seconds: time of a monotonic clock.
            epochs: number of epochs reported in the study so far.
        """
        self._samples.append((seconds, epochs))
        while len(self._samples) > 2 and seconds - self._samples[0][0] > self._WINDOW_SECONDS:
            self._samples.popleft()
        begin, before = self._samples[0]
        return (epochs - before) / (seconds - begin) if seconds > begin else None


def format_counts(progress: Progress) -> str:
    """Return the counts of trials: ``12/50 trials: 8 complete, 4 pruned, 0 failed, 2 running, 0 waiting``."""
    infeasible = f"{progress.infeasible} infeasible, " if progress.infeasible else ""
    paused = f", {progress.paused} paused" if progress.paused else ""
    return (
        f"{progress.summary}{progress.early_stop_note}: {progress.complete} complete, {progress.pruned} pruned, "
        f"{infeasible}{progress.fail} failed, {len(progress.running)} running, {progress.waiting} waiting{paused}"
    )


def format_best(progress: Progress, metric: str, suffix: str = "") -> str:
    """Return the best trial as text: ``best accuracy 0.9 (trial 3)``, or the best unfinished one."""
    if progress.best_value is None and (first := progress.leading) is not None:
        return f"best so far {metric} {format_number(first.value, 6)} (trial {first.number}, epoch {first.epoch})"
    if progress.best_value is None:
        return "best none yet"
    return f"best {metric} {format_number(progress.best_value, 6)} (trial {progress.best_number}){suffix}"


def format_rate(epochs_per_second: float | None, eta_seconds: float | None) -> str:
    """Return the rate and the remaining time as text: ``12.5 epochs/s, ETA 3.5 min``."""
    rate = "" if epochs_per_second is None else f"{epochs_per_second:.1f} epochs/s, "
    return f"{rate}ETA {'-' if eta_seconds is None else format_seconds(eta_seconds)}"


def render_progress(
    study: str, details: Sequence[tuple[str, str]], progress: Progress, lines: Sequence[str]
) -> list[RenderableType]:
    """Return the lines above the tables: title, progress bar, and the given lines, which wrap in a narrow terminal.

    Args:
        study: name of the study.
        details: (text, rich style) of the parts of the title after the name.
        progress: progress of the study.
        lines: further lines, most important first.
    """
    bar = Table.grid()  # a progress bar has no line break
    bar.add_row(ProgressBar(total=1, completed=progress.finished_fraction, width=60))
    texts = [Text.assemble(("study ", "dim"), (study, "bold"), *details)]
    texts += [Text(line, style="dim" if place else "") for place, line in enumerate(lines)]
    for text in texts:
        text.no_wrap, text.overflow = False, "fold"  # a console that prints long lines as they are would cut them
    return [texts[0], bar, *texts[1:]]


def count_best_rows(height: int) -> int:
    """Return the number of best trials that a view of `height` lines shows."""
    return 3 if height < _TALL_HEIGHT else 5


def render_status(
    status: StudyStatus,
    epochs_per_second: float | None,
    *,
    width: int = 120,
    height: int = 40,
    best: Table | None = None,
) -> RenderableType:
    """Return the view of `hpsearch top`.

    Args:
        status: status of the study.
        epochs_per_second: epochs per second of the study; None if unknown.
        width: width in characters; a narrow view omits the less important columns.
        height: approximate height in lines.
        best: table of the best trials; None omits it.
    """
    room = max(height - _RESERVED_LINES - (0 if best is None else best.row_count + 2), 6)
    shown = min(len(status.workers), max(room * 2 // 3, 3))
    details = [(f"  stopped: {status.stopped}", "red")] if status.stopped else []
    details.append((f"  {status.at:%Y-%m-%d %H:%M:%S %Z}", "dim"))
    front = f", {len(status.front)} on the Pareto front" if status.front else ""
    first = f"{format_best(status.progress, status.metric, front)}; {format_rate(epochs_per_second, status.eta)}"
    rungs = ", ".join(f"epoch {mark}: {count}" for mark, count in status.trial_counts.items())
    lines = (first, format_counts(status.progress), f"trials that reached {rungs}")
    active = sum(worker.state in {"running", "idle"} for worker in status.workers)
    return Group(
        *render_progress(status.study, details, status.progress, lines),
        *(() if best is None or not best.row_count else ("", best)),
        "",
        _format_workers(active, len(status.workers) - active, status),
        _make_worker_table(status, shown, (*_NARROW_COLUMNS, *(("engine", "device") if width >= _WIDE_WIDTH else ()))),
        "",
        make_event_table(status.events[: max(room - shown, 3)], status.at, width),
    )


def _format_workers(active: int, ended: int, status: StudyStatus) -> Text:
    of_wanted = f" of {wanted} wanted" if (wanted := status.wanted_workers) else ""
    losses = ", ".join(f"{count} {kind}" for kind, count in status.losses.items())
    return Text(
        f"{active}{of_wanted} active workers, {ended} exited or lost{losses and f'; attempts: {losses}'}",
        style="red" if active < wanted else "dim",
    )


def _make_worker_table(status: StudyStatus, limit: int, columns: tuple[str, ...]) -> Table:
    numbers = ("trial", "epoch", "done", "lease")
    table = plain_table(*columns, right=numbers, wrap=("state",), header_style="dim")
    for worker in status.workers[:limit]:
        cells = _make_worker_cells(status, worker)
        table.add_row(*(cells[column] for column in columns))
    if (hidden := len(status.workers) - limit) > 0:
        table.add_row(f"and {hidden} more")
    return table


def _make_worker_cells(status: StudyStatus, worker: WorkerRow) -> dict[str, Text | str]:
    identity = worker.identity
    state = Text(_LABELS.get(worker.state, worker.state), style=_STATES[worker.state])
    if worker.left_as:
        state.append(f": {escape_line(worker.left_as)}", "dim")
    seen = max((status.at - worker.seen_at).total_seconds(), 0.0)
    return {
        "worker": identity.name,
        "state": state,
        "trial": "" if worker.trial is None else str(worker.trial),
        "epoch": "" if worker.epoch is None else f"{worker.epoch}/{status.epochs}",
        "done": str(worker.trials),
        "lease": "" if worker.lease_left is None else f"{worker.lease_left:.0f} s",
        "seen": f"{format_seconds(seen)} ago",
        "engine": " ".join(part for part in (identity.engine, identity.job) if part),
        "device": identity.device,
    }


def make_event_table(events: Sequence[AttemptEnd], at: datetime, width: int) -> Table:
    """Return the table of ended attempts, with short reasons.

    Args:
        events: the attempts.
        at: current time, by the database's clock.
        width: width in characters.
    """
    table = plain_table("ended", "trial", "outcome", "reason", right=("trial",), wrap=(), header_style="dim")
    outcomes = [
        Text(escape_line(event.outcome), style=_OUTCOMES.get(event.outcome.partition(",")[0], "dim"))
        for event in events
    ]
    # Shortened here, because rich omits columns of tables that are too wide.
    longest = max("outcome", *map(str, outcomes), key=len)
    room = width - sum(len(f"{word}  ") for word in ("99.9 min ago", "trial", longest, ""))
    for event, outcome in zip(events, outcomes, strict=True):
        ago = format_seconds(max((at - event.at).total_seconds(), 0.0))
        why = shorten_reason(event.reason or f"by {event.worker}")
        table.add_row(f"{ago} ago", str(event.trial), outcome, shorten_line(why, room if room >= 20 else len(why)))
    return table
