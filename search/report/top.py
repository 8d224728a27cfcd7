"""The live table of `hpsearch top`."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hpsearch.search.spec.multi_objective import Direction
from hpsearch.search.study.study import StoredStudy
from hpsearch.search.study.summary import format_seconds
from hpsearch.storage.attributes import STOPPED
from hpsearch.storage.database.statements import Database
from hpsearch.storage.trials.history import Progress, read_progress
from hpsearch.storage.trials.register import Event, WorkerRow, read_events, read_workers

_OF_SEVERAL = ("directions", "front")
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

    @property
    def best(self) -> str | None:
        """The best so far, for a person; None before there is one."""
        found = self.progress
        if found.best_value is None:
            return None
        best = f"{self.metric} {found.best_value:.6g} (trial {found.best_number})"
        return f"{best}, {len(self.front)} on the front" if self.front else best

    @property
    def present(self) -> list[WorkerRow]:
        """The workers that are there."""
        return [worker for worker in self.workers if worker.state in {"running", "idle"}]

    def to_json(self) -> str:
        """The same for scripts: times as ISO 8601, numbers that are not finite as null."""
        fields = {key: value for key, value in asdict(self).items() if self.directions or key not in _OF_SEVERAL}
        return json.dumps(_plain(fields), indent=2)


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


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, datetime):
        return value.isoformat()
    return None if isinstance(value, float) and not math.isfinite(value) else value


_STATES = {"running": "green", "idle": "yellow", "lost": "red", "left": "dim"}
_OUTCOMES = {"complete": "green", "pruned": "yellow", "infeasible": "yellow", "lost": "red", "failed": "red"}
_RESERVED = 11  # lines above and between the tables
_NARROW = ("worker", "state", "trial", "epoch", "done", "lease", "seen")
_WIDE = 100  # columns, from which on there is room for more


class Pace:
    """Epochs per second between looks, over the last of them."""

    _WINDOW = 20.0  # seconds

    def __init__(self) -> None:
        self._looks: list[tuple[datetime, int]] = []

    def of(self, standing: Standing) -> float | None:
        """Return it, with this look; None at the first."""
        self._looks.append((standing.at, standing.progress.epochs))
        while len(self._looks) > 2 and (standing.at - self._looks[0][0]).total_seconds() > self._WINDOW:
            self._looks.pop(0)
        (t0, e0), (t1, e1) = self._looks[0], self._looks[-1]
        seconds = (t1 - t0).total_seconds()
        return (e1 - e0) / seconds if seconds > 0 else None


def render(standing: Standing, pace: float | None, *, width: int = 120, height: int = 40) -> RenderableType:
    """Return the view, in about so many lines; a narrow one leaves out what is known elsewhere."""
    room = max(height - _RESERVED, 6)
    shown = min(len(standing.workers), max(room * 2 // 3, 3))
    workers = _workers(standing, shown, _NARROW if width < _WIDE else (*_NARROW, "engine", "device"))
    events = _events(standing, max(room - shown, 3), width)
    there = len(standing.present)
    heading = Text(f"{there} workers there, {len(standing.workers) - there} gone", style="dim")
    return Group(
        _title(standing), _bar(standing), _counts(standing), _reached(standing, pace), "", heading, workers, "", events
    )


def _title(standing: Standing) -> Text:
    title = Text.assemble(("study ", "dim"), (standing.study, "bold"))
    if standing.stopped:
        title.append(f"  stopped: {standing.stopped}", "red")
    title.append(f"  {standing.at:%Y-%m-%d %H:%M:%S %Z}", "dim")
    return title


def _bar(standing: Standing) -> Table:
    bar = Table.grid()  # a bar alone does not end its line
    bar.add_row(ProgressBar(total=1, completed=standing.progress.share, width=60))
    return bar


def _counts(standing: Standing) -> Text:
    progress = standing.progress
    paused = f", {progress.paused} paused" if progress.paused else ""
    return Text(
        f"{progress.done}{progress.early}: {progress.complete} complete, {progress.pruned} pruned, "
        f"{progress.fail} failed, {len(progress.running)} running, {progress.waiting} waiting{paused}; "
        f"best {standing.best or 'none yet'}"
    )


def _reached(standing: Standing, pace: float | None) -> Text:
    rungs = ", ".join(f"{mark}: {count}" for mark, count in standing.reached.items())
    told = [f"trials that reached epoch {rungs}"]
    told += [] if pace is None else [f"{pace:.1f} epochs/s"]
    told += [f"ETA {'-' if standing.eta is None else format_seconds(standing.eta)}"]
    return Text("; ".join(told), style="dim")


def _workers(standing: Standing, most: int, columns: tuple[str, ...]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        right = column in {"trial", "epoch", "done", "lease"}
        table.add_column(column, justify="right" if right else "left", no_wrap=column != "state")
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
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("ended", "trial", "how", "why"):
        table.add_column(column, justify="right" if column == "trial" else "left", no_wrap=True)
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
