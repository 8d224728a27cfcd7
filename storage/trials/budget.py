"""Budgets of a study: the spent amounts, and changes of the budgets."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from hpsearch.storage.attributes import SPEC
from hpsearch.storage.database.fencing import FENCING
from hpsearch.storage.database.statements import Database
from hpsearch.storage.errors import StorageError
from hpsearch.storage.study_storage.studies import set_attrs_in
from hpsearch.storage.trials.claim_sql import LOCK_STUDY, SELECT_CANDIDATES


@dataclass(frozen=True)
class Spending:
    """Budgets of a study in epochs and seconds, and the spent amounts.

    Attributes:
        budget_epochs, budget_seconds: the budgets; None means unlimited.
        epochs: number of epochs that all trials have reported; an epoch that a trial repeats counts once.
        seconds: sum of the training times of all attempts, each up to the last report of the attempt.
    """

    budget_epochs: int | None
    budget_seconds: float | None
    epochs: int
    seconds: float

    @property
    def is_exhausted(self) -> bool:
        """Whether one of the budgets is spent."""
        return self.spent_fraction >= 1

    @property
    def spent_fraction(self) -> float:
        """Spent fraction of the budget; with budgets in epochs and in seconds, the larger of the two fractions."""
        return min(max(spent / budget for spent, budget, _ in self._units()), 1.0)

    @property
    def summary(self) -> str:
        """Spent amounts and budgets as text: ``120/2000 epochs, 35/7200 s``."""
        return ", ".join(f"{spent:.0f}/{budget:.12g} {unit}" for spent, budget, unit in self._units())

    @property
    def exhausted_reason(self) -> str:
        """Message for users with the budget that is spent."""
        budget, unit = next((b, unit) for spent, b, unit in self._units() if spent >= b)
        return f"the budget of {budget:.12g} {unit} was spent"

    @property
    def epochs_left(self) -> int | None:
        """The rest of the budget in epochs; None if it is unlimited."""
        return None if self.budget_epochs is None else self.budget_epochs - self.epochs

    def has_budget_for_epoch(self, running: int) -> bool:
        """Return whether another epoch can start while each of `running` trials trains an epoch."""
        return not self.is_exhausted and (self.budget_epochs is None or self.epochs + running < self.budget_epochs)

    def _units(self) -> Iterator[tuple[float, float, str]]:
        if self.budget_epochs is not None:
            yield self.epochs, self.budget_epochs, "epochs"
        if self.budget_seconds is not None:
            yield self.seconds, self.budget_seconds, "s"


UNBOUNDED_TRIALS = 1_000_000  # `n_trials` of a study that has a budget in epochs or seconds only


def format_progress(finished: int, n_trials: int, spending: Spending | None) -> str:
    """Return the spent amounts and the budgets of a study as text: ``12/50 trials, 120/2000 epochs``."""
    if spending is None:
        return f"{finished}/{n_trials} trials"
    if n_trials < UNBOUNDED_TRIALS:
        return f"{finished}/{n_trials} trials, {spending.summary}"
    return f"{finished} {'trial' if finished == 1 else 'trials'}, {spending.summary}"


_INSERT = sa.text("""
    INSERT INTO hpsearch_spending (study_id, budget_epochs, budget_seconds) VALUES (:study, :epochs, :seconds)
    ON CONFLICT (study_id) DO NOTHING
""")

_SELECT = sa.text("""
    SELECT budget_epochs, budget_seconds, epochs, seconds FROM hpsearch_spending WHERE study_id = :study
""")

_UPDATE_BUDGETS = sa.text("""
    UPDATE hpsearch_spending SET budget_epochs = :epochs, budget_seconds = :seconds
     WHERE study_id = :study AND (epochs < :epochs) IS NOT FALSE AND (seconds < :seconds) IS NOT FALSE
""")


# Parts of the statement that reports an epoch: they count the epoch, and the time since the attempt's claim or last
# report. The UPDATE waits for concurrent reports and evaluates its condition again, so no epoch beyond the budget is
# counted. An epoch that was reported before is not counted again.
COUNT_SPENDING = f"""
    live AS (
        UPDATE hpsearch_attempts a
           SET expires_at = clock_timestamp() + :lease * interval '1 second', reported_at = clock_timestamp()
          FROM trials t, hpsearch_attempts was
         WHERE {FENCING} AND was.trial_id = a.trial_id AND was.attempt = a.attempt
        RETURNING a.trial_id, a.attempt,
                  extract(epoch FROM a.reported_at - coalesce(was.reported_at, was.started_at)) AS seconds
    ), known AS (
        SELECT FROM trial_intermediate_values WHERE trial_id = :trial_id AND step = :step
    ), paid AS (
        UPDATE hpsearch_spending s
           SET epochs = s.epochs + (NOT EXISTS (SELECT FROM known))::int, seconds = s.seconds + live.seconds
          FROM live
         WHERE s.study_id = :study AND ((s.epochs < s.budget_epochs) IS NOT FALSE OR EXISTS (SELECT FROM known))
        RETURNING s.budget_epochs, s.budget_seconds, s.epochs, s.seconds
    )
"""  # noqa: S608 the part is a constant


def create_spending(connection: sa.Connection, study_id: int, *, epochs: int | None, seconds: float | None) -> None:
    """Store the budgets of a study in epochs and seconds, unless such budgets are stored already."""
    connection.execute(_INSERT, {"study": study_id, "epochs": epochs, "seconds": seconds})


def read_spending(engine: sa.Engine, study_id: int) -> Spending | None:
    """Return the budgets and the spent amounts of a study; None if it has no budget in epochs or seconds."""
    return next((Spending(**row._mapping) for row in Database(engine).fetch_rows(_SELECT, {"study": study_id})), None)


def read_spending_in_transaction(connection: sa.Connection, study_id: int) -> Spending:
    """Return the budgets and the spent amounts, read in an open transaction.

    The study must have a budget in epochs or seconds.
    """
    return Spending(**connection.execute(_SELECT, {"study": study_id}).one()._mapping)


def change_budgets(connection: sa.Connection, study_id: int, *, epochs: int | None, seconds: float | None) -> bool:
    """Change the budgets in epochs and seconds.

    Returns:
        False if a new budget is already spent; nothing was written then.
    """
    return connection.execute(_UPDATE_BUDGETS, {"study": study_id, "epochs": epochs, "seconds": seconds}).rowcount == 1


def change_spec(
    engine: sa.Engine,
    study_id: int,
    change: Callable[[dict[str, Any], int], dict[str, Any]],
    *,
    then: Callable[[sa.Connection, dict[str, Any]], object] = lambda *_: None,
) -> dict[str, Any]:
    """Replace the stored spec of a study, and return the new spec.

    The transaction holds the lock that every claim acquires, so that no trial is claimed during the change.

    Args:
        engine: engine of the study's database.
        study_id: id of the study.
        change: function that returns the new spec, given the old spec and the number of started trials; if it raises
            an exception, the transaction is rolled back.
        then: function that is called in the same transaction, with the connection and the new spec.

    Raises:
        StorageError: the study was deleted.
    """
    with engine.begin() as connection:
        study = connection.execute(LOCK_STUDY, {"study": study_id}).one_or_none()
        if study is None:
            raise StorageError("the study was deleted")
        trials = connection.execute(SELECT_CANDIDATES, {"study": study_id, "n_trials": study.n_trials}).one()
        spec = change(json.loads(study.spec), trials.total - trials.enqueued)
        set_attrs_in(connection, study_id, {SPEC: spec})
        then(connection, spec)
    return spec
