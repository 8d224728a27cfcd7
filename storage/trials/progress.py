"""Where a study stands, in two small queries however long its history is."""

from __future__ import annotations

from dataclasses import dataclass, field

import sqlalchemy as sa

from hpsearch.storage.attributes import BROKEN, GIVEN_UP, SPEC
from hpsearch.storage.database.retry import PATIENCE
from hpsearch.storage.database.statements import Database
from hpsearch.storage.trials.spending import Spending, done


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
    SELECT t.number, v.value FROM trials t JOIN trial_values v USING (trial_id)
     WHERE t.study_id = :study AND t.state = 'COMPLETE' AND v.value_type = 'FINITE' AND v.objective = 0
       AND NOT EXISTS (SELECT FROM trial_user_attributes a WHERE a.trial_id = t.trial_id AND a.key = '{BROKEN}')
     ORDER BY v.value {{order}}, t.number LIMIT 1
"""  # noqa: S608 the part is a constant
_BEST_OF = {"maximize": sa.text(_BEST.format(order="DESC")), "minimize": sa.text(_BEST.format(order="ASC"))}

_RUNNING = sa.text("""
    SELECT t.number, a.worker, v.step, v.intermediate_value AS value
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
    [counts] = database.rows(_COUNTS, {"study": study_id, "spec": SPEC, "given_up": GIVEN_UP})
    best = next(iter(database.rows(_BEST_OF[direction], {"study": study_id})), None)
    running = database.rows(_RUNNING, {"study": study_id})
    return Progress(
        budget=counts.budget or 0,
        given_up=counts.given_up,
        complete=counts.complete,
        pruned=counts.pruned,
        fail=counts.fail,
        waiting=counts.waiting - counts.paused,
        paused=counts.paused,
        epochs=counts.epochs,
        best_number=best.number if best else None,
        best_value=best.value if best else None,
        spending=None if counts.spending is None else Spending(**counts.spending),
        running=[Running(r.number, r.worker or "elsewhere", r.step, r.value) for r in running],
    )
