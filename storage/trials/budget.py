"""The budgets of a study: spend, extend, and give up the rest."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import sqlalchemy as sa

from hpsearch.kill_points import kill_point
from hpsearch.storage.attributes import FORESEEN, GIVEN_UP, SPEC
from hpsearch.storage.database.statements import Database
from hpsearch.storage.errors import StorageError
from hpsearch.storage.study_storage.studies import set_attrs_by
from hpsearch.storage.trials.claim_sql import CHOICE, STUDY


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


def change_spec(
    engine: sa.Engine,
    study_id: int,
    change: Callable[[dict[str, Any], int], dict[str, Any]],
    *,
    then: Callable[[sa.Connection, dict[str, Any]], object] = lambda *_: None,
) -> dict[str, Any]:
    """Replace a study's stored spec while no trial is handed out, and return the new one.

    Args:
        engine: of the study's database.
        study_id: the study.
        change: is given the spec and how many trials were started, and returns the spec to store; what it raises
            leaves everything as it was.
        then: is called with the new spec in the same transaction.

    Raises:
        StorageError: there is no such study any more.
    """
    with engine.begin() as connection:
        study = connection.execute(STUDY, {"study": study_id}).one_or_none()
        if study is None:
            raise StorageError("the study was deleted")
        trials = connection.execute(CHOICE, {"study": study_id, "n_trials": study.n_trials}).one()
        spec = change(json.loads(study.spec), trials.total - trials.enqueued)
        set_attrs_by(connection, study_id, {SPEC: spec})
        then(connection, spec)
    return spec


@dataclass(frozen=True)
class GivenUp:
    """That the rest of a study's budget was given up.

    Attributes:
        gain: that was expected of it, in the metric's unit.
        threshold: below which the study was to stop.
        started: trials by then.
        budget: of trials.
    """

    gain: float
    threshold: float
    started: int
    budget: int

    @property
    def why(self) -> str:
        """For a person to read."""
        return f"the rest of the budget was expected to gain {self.gain:.2g} (< {self.threshold:g})"

    @classmethod
    def of(cls, attrs: Mapping[str, Any]) -> GivenUp | None:
        """What a study's user attributes say; None while nothing was given up."""
        told = attrs.get(GIVEN_UP)
        return None if told is None else cls(**told)


_TAKE_UP = sa.text("""
    UPDATE study_user_attributes SET value_json = 'null'
     WHERE study_id = :study AND key = :given_up AND value_json <> 'null'
""")

# What ended since the rest was judged, as all who waited at a rung did, is no reason to judge it again.
_JUDGED_NOW = sa.text("""
    UPDATE study_user_attributes SET value_json = jsonb_set(value_json::jsonb, '{ended}', to_jsonb(
        (SELECT count(*) FROM trials WHERE study_id = :study AND state IN ('COMPLETE', 'PRUNED', 'FAIL'))))::text
     WHERE study_id = :study AND key = :foreseen
""")


@kill_point("stop early")
def give_up(
    engine: sa.Engine, study_id: int, *, gain: float, threshold: float, foreseen: Mapping[str, Any]
) -> GivenUp | None:
    """Give the rest of a study's budget up.

    When it was judged is written with it: who dies before leaves the judgement to the next, and nobody believes that it
    was made, and the study goes on.

    Returns:
        What was written; None where it was given up before, nothing is left of it, or enqueued trials are to be run.
    """

    def once(connection: sa.Connection, _repeated: bool) -> GivenUp | None:
        study = connection.execute(STUDY, {"study": study_id}).one_or_none()
        if study is None:
            return None
        trials = connection.execute(CHOICE, {"study": study_id, "n_trials": study.n_trials}).one()
        started = trials.total - trials.enqueued
        if trials.enqueued or started >= trials.opens:
            return None
        told = GivenUp(gain, threshold, started, study.n_trials)
        set_attrs_by(connection, study_id, {GIVEN_UP: asdict(told), FORESEEN: dict(foreseen)})
        return told

    return Database(engine).transaction(once)


def take_up(connection: sa.Connection, study_id: int) -> bool:
    """Let a study go on with what it had given up; return whether it had."""
    if connection.execute(_TAKE_UP, {"study": study_id, "given_up": GIVEN_UP}).rowcount != 1:
        return False
    connection.execute(_JUDGED_NOW, {"study": study_id, "foreseen": FORESEEN})
    return True
