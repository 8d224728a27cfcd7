"""Queries on stored trials: attempts, progress, epoch values and finalist studies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

import sqlalchemy as sa

from hpsearch.storage.attributes import EARLY_TERMINATION, FOLDER_NAME, INFEASIBLE, SPEC, VIOLATIONS, decode_attr
from hpsearch.storage.database.retry import RETRY_SECONDS
from hpsearch.storage.database.statements import Database
from hpsearch.storage.files import normalize_case
from hpsearch.storage.trials.budget import Spending, format_progress
from hpsearch.storage.trials.claim_sql import OUTCOME_OR_CAUSE


@dataclass(frozen=True)
class AttemptRecord:
    """One attempt of a trial.

    Attributes:
        number: number of the attempt, from 1.
        worker: name of the worker.
        started_at, ended_at: times by the database's clock; `ended_at` is None while the attempt is live.
        outcome: value of the attempt's `Outcome`, or the cause of its loss; None while the attempt is live.
        device: device of the worker, such as "2 x cuda"; None if the worker is not registered.
    """

    number: int
    worker: str
    started_at: datetime
    ended_at: datetime | None
    outcome: str | None
    device: str | None

    @property
    def seconds(self) -> float:
        """Duration of the attempt in seconds; 0 while the attempt is live."""
        return 0.0 if self.ended_at is None else (self.ended_at - self.started_at).total_seconds()


DEVICE_COUNT_SEPARATOR = " x "  # in "2 x cuda"


_ATTEMPTS = sa.text(f"""
    SELECT a.trial_id, a.attempt AS number, a.worker, a.started_at, a.ended_at, {OUTCOME_OR_CAUSE} AS outcome,
           (SELECT w.device FROM hpsearch_workers w WHERE w.study_id = t.study_id AND w.name = a.worker
             ORDER BY w.seen_at DESC LIMIT 1) AS device
      FROM hpsearch_attempts a JOIN trials t USING (trial_id)
     WHERE a.trial_id = ANY(CAST(:trials AS int[])) ORDER BY a.trial_id, a.attempt
""")  # noqa: S608 the part is a constant


@dataclass(frozen=True)
class RunInterval:
    """Period in which a trial ran without a break: from the claim to the last reported epoch.

    Attributes:
        number: number of the trial.
        started_at, ended_at: start and end of the period; for a live attempt without a report, `ended_at` is the
            current time.
        rung: rung at which the trial was paused at the end of the period; None if the trial was not paused.
    """

    number: int
    started_at: datetime
    ended_at: datetime
    rung: int | None


# `max(r.rung)`: an attempt that was promoted at a rung without a pause may have reached several rungs.
_RUN_INTERVALS = sa.text("""
    SELECT t.number, a.started_at, coalesce(a.reported_at, a.ended_at, clock_timestamp()) AS ended_at,
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
    """Return the attempts of each of these trials in order, by trial id; trials without attempts are omitted."""
    found: dict[int, list[AttemptRecord]] = {}
    for row in Database(engine).fetch_rows(_ATTEMPTS, {"trials": list(trial_ids)}) if trial_ids else ():
        values = dict(row._mapping)
        found.setdefault(values.pop("trial_id"), []).append(AttemptRecord(**values))
    return found


def read_run_intervals(engine: sa.Engine, study_id: int) -> list[RunInterval]:
    """Return the run intervals of all trials of a study, by number and attempt."""
    return [RunInterval(**row._mapping) for row in Database(engine).fetch_rows(_RUN_INTERVALS, {"study": study_id})]


def read_devices(engine: sa.Engine, study_id: int) -> dict[int, list[str]]:
    """Return the devices of each trial's attempts, in the order of the attempts, by trial number.

    The result is empty if no worker of the study uses several devices.
    """
    found: dict[int, list[str]] = {}
    for row in Database(engine).fetch_rows(_DEVICES, {"study": study_id, "times": DEVICE_COUNT_SEPARATOR}):
        found.setdefault(row.number, []).append(row.device)
    return found


@dataclass(frozen=True)
class RunningTrial:
    """A trial in state RUNNING.

    Attributes:
        number: number of the trial.
        worker: name of the worker.
        step: last reported epoch, from 0; None before the first report.
        value: value of the last reported epoch; None before the first report.
    """

    number: int
    worker: str
    step: int | None
    value: float | None


@dataclass(frozen=True)
class LeadingTrial:
    """The unfinished trial with the best reported value.

    Attributes:
        number: number of the trial.
        epoch: epoch of the value, from 1.
        value: the value.
    """

    number: int
    epoch: int
    value: float


@dataclass(frozen=True)
class Progress:
    """Progress of a study: its budgets, numbers of trials by state, reported epochs, best trial and running trials."""

    budget: int
    stopped_after: int | None = None  # number of trials that were started before early termination
    complete: int = 0
    pruned: int = 0
    infeasible: int = 0  # PRUNED in Optuna, but not counted in `pruned`
    fail: int = 0
    waiting: int = 0
    paused: int = 0  # waiting trials that are paused at a rung
    epochs: int = 0
    best_number: int | None = None
    best_value: float | None = None
    leading: LeadingTrial | None = None  # only while no trial is COMPLETE
    running: list[RunningTrial] = field(default_factory=list)
    spending: Spending | None = None  # None without a budget in epochs or seconds

    @property
    def finished(self) -> int:
        """Number of COMPLETE, PRUNED and FAIL trials."""
        return self.complete + self.pruned + self.infeasible + self.fail

    @property
    def summary(self) -> str:
        """Spent amounts and budgets as text: ``12/50 trials, 120/2000 epochs``."""
        return format_progress(self.finished, self.budget, self.spending)

    @property
    def early_stop_note(self) -> str:
        """Text to append to `summary` if the study was terminated early, else an empty text."""
        return "" if self.stopped_after is None else ", stopped early"

    @property
    def finished_fraction(self) -> float:
        """Finished fraction of the study: the largest spent fraction of its budgets."""
        return self._compute_fraction(self.finished)

    @property
    def trained_fraction(self) -> float:
        """Like `finished_fraction`, but paused trials count too, because most of them do not resume."""
        return self._compute_fraction(self.finished + self.paused)

    def _compute_fraction(self, trials: int) -> float:
        last = self.budget if self.stopped_after is None else min(self.budget, self.stopped_after)
        return max(trials / last if last else 1.0, 0.0 if self.spending is None else self.spending.spent_fraction)

    @property
    def is_done(self) -> bool:
        """Whether a budget is spent and no trial is running."""
        return self.finished_fraction >= 1 and not self.running

    @property
    def trials_with_result(self) -> int:
        """Number of COMPLETE and PRUNED trials."""
        return self.complete + self.pruned + self.infeasible


_COUNTS = sa.text(f"""
    SELECT (SELECT (value_json::jsonb ->> 'n_trials')::int FROM study_user_attributes
             WHERE study_id = :study AND key = :spec) AS budget,
           (SELECT (value_json::jsonb ->> 'started')::int FROM study_user_attributes
             WHERE study_id = :study AND key = :early_termination) AS stopped_after,
           count(*) FILTER (WHERE state = 'COMPLETE') AS complete,
           count(*) FILTER (WHERE state = 'PRUNED' AND NOT is_infeasible) AS pruned,
           count(*) FILTER (WHERE state = 'PRUNED' AND is_infeasible) AS infeasible,
           count(*) FILTER (WHERE state = 'FAIL') AS fail,
           count(*) FILTER (WHERE state = 'WAITING') AS waiting,
           (SELECT count(*) FROM hpsearch_rungs r JOIN trials t USING (trial_id)
             WHERE r.study_id = :study AND r.promoted_at IS NULL AND r.retired_at IS NULL
               AND t.state = 'WAITING') AS paused,
           (SELECT count(*) FROM trial_intermediate_values v JOIN trials t USING (trial_id)
             WHERE t.study_id = :study) AS epochs,
           (SELECT to_jsonb(s) - 'study_id' FROM hpsearch_spending s WHERE study_id = :study) AS spending
      FROM trials t CROSS JOIN LATERAL (
             SELECT t.state = 'PRUNED' AND EXISTS (
                 SELECT FROM trial_user_attributes a WHERE a.trial_id = t.trial_id AND a.key = '{INFEASIBLE}'
             ) AS is_infeasible
           ) AS kind
     WHERE study_id = :study
""")  # noqa: S608 the part is a constant

# In a multi-objective study, the best trial is chosen by the first metric.
_BEST = f"""
    SELECT t.number AS best_number, v.value AS best_value FROM trials t JOIN trial_values v USING (trial_id)
     WHERE t.study_id = :study AND t.state = 'COMPLETE' AND v.value_type = 'FINITE' AND v.objective = 0
       AND NOT EXISTS (SELECT FROM trial_user_attributes a WHERE a.trial_id = t.trial_id AND a.key = '{VIOLATIONS}')
     ORDER BY v.value {{order}}, t.number LIMIT 1
"""  # noqa: S608 the part is a constant
_BEST_OF = {"maximize": sa.text(_BEST.format(order="DESC")), "minimize": sa.text(_BEST.format(order="ASC"))}

_LEADING = """
    SELECT t.number, CAST(i.step AS bigint) + 1 AS epoch, i.intermediate_value AS value
      FROM trials t JOIN trial_intermediate_values i USING (trial_id)
     WHERE t.study_id = :study AND t.state IN ('RUNNING', 'WAITING') AND i.intermediate_value_type = 'FINITE'
     ORDER BY i.intermediate_value {order}, t.number LIMIT 1
"""
_LEADING_OF = {"maximize": sa.text(_LEADING.format(order="DESC")), "minimize": sa.text(_LEADING.format(order="ASC"))}

_RUNNING = sa.text("""
    SELECT t.number, coalesce(a.worker, 'elsewhere') AS worker, v.step, v.intermediate_value AS value
      FROM trials t
      LEFT JOIN hpsearch_attempts a ON a.trial_id = t.trial_id AND a.ended_at IS NULL
      LEFT JOIN LATERAL (SELECT step, intermediate_value FROM trial_intermediate_values i
                          WHERE i.trial_id = t.trial_id ORDER BY step DESC LIMIT 1) v ON true
     WHERE t.study_id = :study AND t.state = 'RUNNING'
     ORDER BY t.number
""")


def read_progress(engine: sa.Engine, study_id: int, direction: str, retry_seconds: float = RETRY_SECONDS) -> Progress:
    """Return the progress of a study.

    Args:
        engine: engine of the study's database.
        study_id: id of the study.
        direction: ``maximize`` or ``minimize``.
        retry_seconds: longest time in seconds to retry while the database is unavailable.
    """
    database = Database(engine, retry_seconds)
    [row] = database.fetch_rows(_COUNTS, {"study": study_id, "spec": SPEC, "early_termination": EARLY_TERMINATION})
    counts = {**row._mapping, "budget": row.budget or 0, "waiting": row.waiting - row.paused}
    spending = counts.pop("spending")
    best = [best._mapping for best in database.fetch_rows(_BEST_OF[direction], {"study": study_id})]
    leading = [] if best else database.fetch_rows(_LEADING_OF[direction], {"study": study_id})
    return Progress(
        **counts,
        **(best[0] if best else {}),
        leading=LeadingTrial(**leading[0]._mapping) if leading else None,
        spending=None if spending is None else Spending(**spending),
        running=[RunningTrial(**running._mapping) for running in database.fetch_rows(_RUNNING, {"study": study_id})],
    )


_VALUES = sa.text("""
    SELECT trial_id, step, metrics FROM hpsearch_epoch_values JOIN trials USING (trial_id)
     WHERE study_id = :study AND metrics IS NOT NULL
     ORDER BY trial_id, step
""")


def read_epoch_values(engine: sa.Engine, study_id: int) -> dict[int, dict[int, list[float]]]:
    """Return the values of all objectives of each reported epoch, by trial id and epoch (from 0)."""
    found: dict[int, dict[int, list[float]]] = defaultdict(dict)
    for row in Database(engine).fetch_rows(_VALUES, {"study": study_id}):
        found[row.trial_id][row.step] = row.metrics
    return dict(found)


_FOLDS = sa.text("""
    SELECT step, folds FROM hpsearch_epoch_values WHERE trial_id = :trial AND folds IS NOT NULL ORDER BY step
""")


def read_fold_values(engine: sa.Engine, trial_id: int) -> dict[int, list[float]]:
    """Return the values of the metric in each fold of a trial, by epoch (from 0); empty for a trial without folds."""
    return {row.step: row.folds for row in Database(engine).fetch_rows(_FOLDS, {"trial": trial_id})}


# Specs are decoded in Python: a damaged spec, which Postgres rejects as JSON, must affect its own study only.
_SELECT_FINALIST_STUDIES = sa.text(r"""
    SELECT study_name, value_json FROM studies JOIN study_user_attributes USING (study_id)
     WHERE key = :spec AND value_json ~ '"finalists_of"\s*:\s*\{' ORDER BY study_id
""")


def read_finalist_studies(engine: sa.Engine, study_id: int) -> list[str]:
    """Return the names of the studies that contain the finalists of a study, in order of creation."""
    return _read_names(engine, study_id, refits=False)


def read_refit_studies(engine: sa.Engine, study_id: int) -> list[str]:
    """Return the names of the studies that contain the refits of a study's winners, in order of creation."""
    return _read_names(engine, study_id, refits=True)


def _read_names(engine: sa.Engine, study_id: int, *, refits: bool) -> list[str]:
    found = []
    for row in Database(engine).fetch_rows(_SELECT_FINALIST_STUDIES, {"spec": SPEC}):
        spec = decode_attr(row.value_json)
        of = spec.get("finalists_of") if isinstance(spec, dict) else None
        if isinstance(of, dict) and of.get("study_id") == study_id and (of.get("refit") is not None) == refits:
            found.append(row.study_name)
    return found


_SELECT_OTHER_FOLDERS = "SELECT value_json FROM study_user_attributes WHERE key = :key AND study_id <> :study"


def has_other_owner(engine: sa.Engine, study_id: int, folder: str) -> bool:
    """Return whether another study has stored the name of a folder, in upper or lower case, as its own."""
    rows = Database(engine).fetch_rows(_SELECT_OTHER_FOLDERS, {"key": FOLDER_NAME, "study": study_id})
    return any(normalize_case(str(decode_attr(row.value_json))) == normalize_case(folder) for row in rows)
