"""What is recorded of trials: attempts, progress, epoch values and finalist sets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

import sqlalchemy as sa

from hpsearch.storage.attributes import BROKEN, GIVEN_UP, SPEC
from hpsearch.storage.database.retry import PATIENCE
from hpsearch.storage.database.statements import Database
from hpsearch.storage.trials.budget import Spending, done


@dataclass(frozen=True)
class AttemptRecord:
    """One attempt at a trial: who made it, when, and how it ended; both are None while it is live.

    `device` is what its worker trained on, such as "2 x cuda"; None where the register does not know the worker.
    """

    number: int
    worker: str
    started_at: datetime
    ended_at: datetime | None
    outcome: str | None
    device: str | None

    @property
    def seconds(self) -> float:
        """The duration; 0 while the attempt is live."""
        return 0.0 if self.ended_at is None else (self.ended_at - self.started_at).total_seconds()


TIMES = " x "  # in the device of a worker that trains each trial on several


_ATTEMPTS = sa.text("""
    SELECT a.trial_id, a.attempt AS number, a.worker, a.started_at, a.ended_at, a.outcome,
           (SELECT w.device FROM hpsearch_workers w WHERE w.study_id = t.study_id AND w.name = a.worker
             ORDER BY w.seen_at DESC LIMIT 1) AS device
      FROM hpsearch_attempts a JOIN trials t USING (trial_id)
     WHERE a.trial_id = ANY(CAST(:trials AS int[])) ORDER BY a.trial_id, a.attempt
""")


@dataclass(frozen=True)
class Stretch:
    """For how long a trial was run without a break: from its worker's claim to the last epoch that it reported.

    Attributes:
        number: of the trial.
        started_at, until: when; `until` of a live attempt that has reported nothing is now.
        rung: at which it was paused then; None where it was not.
    """

    number: int
    started_at: datetime
    until: datetime
    rung: int | None


# Who went on from a rung without a pause has reached a later one when its attempt ends.
_STRETCHES = sa.text("""
    SELECT t.number, a.started_at, coalesce(a.reported_at, a.ended_at, clock_timestamp()) AS until,
           CASE WHEN a.outcome = 'paused' THEN (SELECT max(r.rung) FROM hpsearch_rungs r
             WHERE r.trial_id = a.trial_id AND r.reached_at <= a.ended_at) END AS rung
      FROM trials t JOIN hpsearch_attempts a USING (trial_id)
     WHERE t.study_id = :study ORDER BY t.number, a.attempt
""")


_DEVICES = sa.text("""
    SELECT t.number, w.device
      FROM trials t JOIN hpsearch_attempts a USING (trial_id)
      JOIN LATERAL (SELECT device FROM hpsearch_workers w WHERE w.study_id = t.study_id AND w.name = a.worker
                     ORDER BY w.seen_at DESC LIMIT 1) w ON true
     WHERE t.study_id = :study
       AND EXISTS (SELECT FROM hpsearch_workers WHERE study_id = :study AND strpos(device, :times) > 0)
     ORDER BY t.number, a.attempt
""")


def read_attempts(engine: sa.Engine, trial_ids: Sequence[int]) -> dict[int, list[AttemptRecord]]:
    """Return the attempts at each of these trials that has any, by trial id, the first one first."""
    found: dict[int, list[AttemptRecord]] = {}
    for row in Database(engine).rows(_ATTEMPTS, {"trials": list(trial_ids)}) if trial_ids else ():
        values = dict(row._mapping)
        found.setdefault(values.pop("trial_id"), []).append(AttemptRecord(**values))
    return found


def read_stretches(engine: sa.Engine, study_id: int) -> list[Stretch]:
    """Return when the trials of a study were run, by number and attempt."""
    return [Stretch(**row._mapping) for row in Database(engine).rows(_STRETCHES, {"study": study_id})]


def read_devices(engine: sa.Engine, study_id: int) -> dict[int, list[str]]:
    """Return the devices of the attempts at each trial of a study, the first attempt's first: trial number to devices.

    Nothing of a study whose workers have one device each, which costs one look at the register.
    """
    found: dict[int, list[str]] = {}
    for row in Database(engine).rows(_DEVICES, {"study": study_id, "times": TIMES}):
        found.setdefault(row.number, []).append(row.device)
    return found


@dataclass(frozen=True)
class Running:
    """A trial that runs now; `step` is its last reported epoch, counted from 0."""

    number: int
    worker: str
    step: int | None
    value: float | None


@dataclass(frozen=True)
class Progress:
    """The budget, trials by state, epochs reported in all, the best COMPLETE trial, and what runs now."""

    budget: int
    given_up: int | None = None  # trials that were begun when the rest of the budget was given up
    complete: int = 0
    pruned: int = 0
    fail: int = 0
    waiting: int = 0
    paused: int = 0  # at a rung
    epochs: int = 0
    best_number: int | None = None
    best_value: float | None = None
    running: list[Running] = field(default_factory=list)
    spending: Spending | None = None  # where there is a budget in epochs or seconds

    @property
    def finished(self) -> int:
        """COMPLETE, PRUNED and FAIL together: what the budget has spent."""
        return self.complete + self.pruned + self.fail

    @property
    def done(self) -> str:
        """How much of the budgets is spent, for a person."""
        return done(self.finished, self.budget, self.spending)

    @property
    def early(self) -> str:
        """What follows that, where the rest of the budget was given up."""
        return "" if self.given_up is None else ", stopped early"

    @property
    def share(self) -> float:
        """How much of what the study is to run has ended, from 0 to 1: of the budget of which most is spent."""
        last = self.budget if self.given_up is None else min(self.budget, self.given_up)
        trials = self.finished / last if last else 1.0
        return max(trials, 0.0 if self.spending is None else self.spending.share)

    @property
    def with_result(self) -> int:
        """COMPLETE and PRUNED together: trials that came to something."""
        return self.complete + self.pruned


_COUNTS = sa.text("""
    SELECT (SELECT (value_json::jsonb ->> 'n_trials')::int FROM study_user_attributes
             WHERE study_id = :study AND key = :spec) AS budget,
           (SELECT (value_json::jsonb ->> 'started')::int FROM study_user_attributes
             WHERE study_id = :study AND key = :given_up) AS given_up,
           count(*) FILTER (WHERE state = 'COMPLETE') AS complete,
           count(*) FILTER (WHERE state = 'PRUNED') AS pruned,
           count(*) FILTER (WHERE state = 'FAIL') AS fail,
           count(*) FILTER (WHERE state = 'WAITING') AS waiting,
           (SELECT count(*) FROM hpsearch_rungs r JOIN trials t USING (trial_id)
             WHERE r.study_id = :study AND r.promoted_at IS NULL AND r.retired_at IS NULL
               AND t.state = 'WAITING') AS paused,
           (SELECT count(*) FROM trial_intermediate_values v JOIN trials t USING (trial_id)
             WHERE t.study_id = :study) AS epochs,
           (SELECT to_jsonb(s) - 'study_id' FROM hpsearch_spending s WHERE study_id = :study) AS spending
      FROM trials WHERE study_id = :study
""")

# By the first metric, where there are several.
_BEST = f"""
    SELECT t.number AS best_number, v.value AS best_value FROM trials t JOIN trial_values v USING (trial_id)
     WHERE t.study_id = :study AND t.state = 'COMPLETE' AND v.value_type = 'FINITE' AND v.objective = 0
       AND NOT EXISTS (SELECT FROM trial_user_attributes a WHERE a.trial_id = t.trial_id AND a.key = '{BROKEN}')
     ORDER BY v.value {{order}}, t.number LIMIT 1
"""  # noqa: S608 the part is a constant
_BEST_OF = {"maximize": sa.text(_BEST.format(order="DESC")), "minimize": sa.text(_BEST.format(order="ASC"))}

_RUNNING = sa.text("""
    SELECT t.number, coalesce(a.worker, 'elsewhere') AS worker, v.step, v.intermediate_value AS value
      FROM trials t
      LEFT JOIN hpsearch_attempts a ON a.trial_id = t.trial_id AND a.ended_at IS NULL
      LEFT JOIN LATERAL (SELECT step, intermediate_value FROM trial_intermediate_values i
                          WHERE i.trial_id = t.trial_id ORDER BY step DESC LIMIT 1) v ON true
     WHERE t.study_id = :study AND t.state = 'RUNNING'
     ORDER BY t.number
""")


def read_progress(engine: sa.Engine, study_id: int, direction: str, *, patience: float = PATIENCE) -> Progress:
    """Return where the study stands.

    Args:
        engine: of the study's database.
        study_id: the study.
        direction: ``maximize`` or ``minimize``.
        patience: seconds to wait for a database that is away.
    """
    database = Database(engine, patience)
    [row] = database.rows(_COUNTS, {"study": study_id, "spec": SPEC, "given_up": GIVEN_UP})
    counts = {**row._mapping, "budget": row.budget or 0, "waiting": row.waiting - row.paused}
    spending = counts.pop("spending")
    best = [best._mapping for best in database.rows(_BEST_OF[direction], {"study": study_id})]
    return Progress(
        **counts,
        **(best[0] if best else {}),
        spending=None if spending is None else Spending(**spending),
        running=[Running(**running._mapping) for running in database.rows(_RUNNING, {"study": study_id})],
    )


_VALUES = sa.text("""
    SELECT trial_id, step, metrics FROM hpsearch_epoch_values JOIN trials USING (trial_id) WHERE study_id = :study
     ORDER BY trial_id, step
""")


def read_epoch_values(engine: sa.Engine, study_id: int) -> dict[int, dict[int, list[float]]]:
    """Return the values of all metrics that are optimised, by the trial's id and the epoch (from 0)."""
    found: dict[int, dict[int, list[float]]] = defaultdict(dict)
    for row in Database(engine).rows(_VALUES, {"study": study_id}):
        found[row.trial_id][row.step] = row.metrics
    return dict(found)


# In the order of a CASE: another attribute may hold a NaN, which Postgres takes for no JSON.
_SETS = sa.text("""
    SELECT study_name, value_json::jsonb -> 'finalists_of' ->> 'refit' IS NOT NULL AS is_refit
      FROM studies JOIN study_user_attributes USING (study_id)
     WHERE CASE WHEN key = :spec THEN (value_json::jsonb -> 'finalists_of' ->> 'study_id')::int = :study END
     ORDER BY study_id
""")


def finalist_studies(engine: sa.Engine, study_id: int) -> list[str]:
    """Return the names of the studies that hold finalists of a study, the first one made first."""
    return _names(engine, study_id, refits=False)


def refit_studies(engine: sa.Engine, study_id: int) -> list[str]:
    """Return the names of the studies that hold refits of a study's winners, the first one made first."""
    return _names(engine, study_id, refits=True)


def _names(engine: sa.Engine, study_id: int, *, refits: bool) -> list[str]:
    rows = Database(engine).rows(_SETS, {"spec": SPEC, "study": study_id})
    return [row.study_name for row in rows if row.is_refit == refits]
