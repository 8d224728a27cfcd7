"""Budgets in epochs and in seconds, and what a study has spent of them: one row, which each report writes.

The row is locked while an epoch is counted, so that no report goes past the budget in epochs, whoever else reports at
the same moment. A study without such a budget has no row, and its reports ask for none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import sqlalchemy as sa

from hpsearch.storage.database.statements import Database


@dataclass(frozen=True)
class Spending:
    """What a study may spend, and has spent; a budget of None bounds nothing.

    Attributes:
        budget_epochs, budget_seconds: the budgets.
        epochs: reported by all trials, each once.
        seconds: of training, up to the last report of each attempt.
    """

    budget_epochs: int | None
    budget_seconds: float | None
    epochs: int
    seconds: float

    @property
    def over(self) -> bool:
        """Whether nothing is left of one of them."""
        return self.share >= 1

    @property
    def share(self) -> float:
        """How much of the budget is spent, from 0 to 1: of the one of which more is."""
        return min(max(spent / budget for spent, budget, _ in self._units()), 1.0)

    @property
    def spent(self) -> str:
        """Return it for a person: ``120/2000 epochs, 35/7200 s``."""
        return ", ".join(f"{spent:.0f}/{budget:.12g} {unit}" for spent, budget, unit in self._units())

    @property
    def why(self) -> str:
        """Say which of them is over."""
        budget, unit = next((b, unit) for spent, b, unit in self._units() if spent >= b)
        return f"the budget of {budget:.12g} {unit} was spent"

    def room(self, running: int) -> bool:
        """Whether an epoch more may be begun beside those of so many running trials."""
        return not self.over and (self.budget_epochs is None or self.epochs + running < self.budget_epochs)

    def _units(self) -> Iterator[tuple[float, float, str]]:
        if self.budget_epochs is not None:
            yield self.epochs, self.budget_epochs, "epochs"
        if self.budget_seconds is not None:
            yield self.seconds, self.budget_seconds, "s"


UNBOUNDED = 1_000_000  # trials: what the spec of a study has that is bounded by epochs or seconds alone


def done(finished: int, n_trials: int, spending: Spending | None) -> str:
    """Return for a person how much of its budgets a study has spent: ``12/50 trials, 120/2000 epochs``."""
    if spending is None:
        return f"{finished}/{n_trials} trials"
    if n_trials < UNBOUNDED:
        return f"{finished}/{n_trials} trials, {spending.spent}"
    return f"{finished} {'trial' if finished == 1 else 'trials'}, {spending.spent}"


_OPEN = sa.text("""
    INSERT INTO hpsearch_spending (study_id, budget_epochs, budget_seconds) VALUES (:study, :epochs, :seconds)
    ON CONFLICT (study_id) DO NOTHING
""")

_READ = sa.text("""
    SELECT budget_epochs, budget_seconds, epochs, seconds FROM hpsearch_spending WHERE study_id = :study
""")

_CHANGE = sa.text("""
    UPDATE hpsearch_spending SET budget_epochs = :epochs, budget_seconds = :seconds
     WHERE study_id = :study AND (epochs < :epochs) IS NOT FALSE AND (seconds < :seconds) IS NOT FALSE
""")


def open_spending(connection: sa.Connection, study_id: int, *, epochs: int | None, seconds: float | None) -> None:
    """Give a study budgets in epochs or seconds, once."""
    connection.execute(_OPEN, {"study": study_id, "epochs": epochs, "seconds": seconds})


def read_spending(engine: sa.Engine, study_id: int) -> Spending | None:
    """Return what a study has spent; None where it has no budget in epochs or seconds."""
    return next((Spending(**row._mapping) for row in Database(engine).rows(_READ, {"study": study_id})), None)


def spending_in(connection: sa.Connection, study_id: int) -> Spending:
    """Return what a study that has such a budget has spent."""
    return Spending(**connection.execute(_READ, {"study": study_id}).one()._mapping)


def change_budgets(connection: sa.Connection, study_id: int, *, epochs: int | None, seconds: float | None) -> bool:
    """Change the budgets; return whether they are above what is spent, else nothing is written."""
    return connection.execute(_CHANGE, {"study": study_id, "epochs": epochs, "seconds": seconds}).rowcount == 1
