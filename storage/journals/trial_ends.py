"""What the study's database says of the trial of a journal whose process has died."""

from __future__ import annotations

import sqlalchemy as sa

from hpsearch.storage.attributes import INFEASIBLE, REASON
from hpsearch.storage.database.statements import Database
from hpsearch.storage.journals.journal import Journal
from hpsearch.storage.journals.reader import NotYetError
from hpsearch.storage.trials.outcome import Ended, Outcome

_PATIENCE = 10.0  # seconds to wait for the database


class TrialEnds:
    """Who has the last word on a trial, and how it ended.

    Args:
        engine: the database of the study.
    """

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._database = Database(engine, _PATIENCE)

    def superseded(self, trial_id: int, attempt: int) -> bool:
        """Whether a later attempt has the trial, and with it the last word on its run."""
        return bool(self._database.rows(_LATER, {"trial": trial_id, "attempt": attempt})[0].later)

    def outlived(self, journal: Journal) -> bool:
        """Whether a later attempt has reported all of the trial again, so that this dead one has nothing to add.

        Raises:
            NotYetError: a later attempt is at it, and may yet die before it does.
        """
        if not self.superseded(journal.head.trial, journal.head.attempt):
            return False
        ended = self.ended(journal.head.trial)
        if ended is None:
            raise NotYetError
        return ended.outcome is not Outcome.FAILED

    def ended(self, trial_id: int) -> Ended | None:
        """Return how a trial ended; None while it runs or waits, or when it is gone."""
        arguments = {"trial": trial_id, "infeasible": INFEASIBLE, "reason": REASON}
        for row in self._database.rows(_ENDED, arguments):
            return Ended(Outcome.of_trial(row.state, infeasible=bool(row.infeasible)), row.reason or "")
        return None


_LATER = sa.text("""
    SELECT EXISTS (SELECT FROM hpsearch_attempts WHERE trial_id = :trial AND attempt > :attempt) AS later
""")
_ENDED = sa.text("""
    SELECT t.state, reason.value_json::jsonb #>> '{}' AS reason, infeasible.value_json = 'true' AS infeasible
      FROM trials t
      LEFT JOIN trial_user_attributes reason ON reason.trial_id = t.trial_id AND reason.key = :reason
      LEFT JOIN trial_user_attributes infeasible
             ON infeasible.trial_id = t.trial_id AND infeasible.key = :infeasible
     WHERE t.trial_id = :trial AND t.state NOT IN ('RUNNING', 'WAITING')
""")
