"""Where a study stands at a moment: its counts, its workers, what ended last, and when it will be over."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from hpsearch.search.spec.several import Direction
from hpsearch.search.study.study import StoredStudy
from hpsearch.storage.attributes import STOPPED
from hpsearch.storage.database.statements import Database
from hpsearch.storage.trials.progress import Progress, read_progress
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
        reached=_reached(study),
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


def _reached(study: StoredStudy) -> dict[int, int]:
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
