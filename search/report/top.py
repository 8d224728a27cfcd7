"""The view of a study that is redrawn: counts, workers with their leases, and what ended last."""

from __future__ import annotations

from datetime import datetime

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hpsearch.search.report.standing import Standing
from hpsearch.search.study.summary import format_seconds
from hpsearch.storage.trials.register import WorkerRow

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
