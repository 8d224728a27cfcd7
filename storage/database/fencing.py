"""Fencing: the condition of every write that the attempt owns the trial, and the error if it does not."""

from __future__ import annotations

from hpsearch.storage.database.statements import Database
from hpsearch.storage.errors import ClaimLostError

# Fencing: only the live attempt `a` of a claimed trial `t` may write, and only while the trial is RUNNING.
FENCING = """
    t.trial_id = :trial_id AND a.trial_id = t.trial_id AND a.attempt = :attempt AND a.ended_at IS NULL
    AND t.state = 'RUNNING'
"""


_CLAIM_STATE = """
    SELECT t.number, t.state, a.attempt, a.ended_at, last.attempt AS last, last.worker
      FROM trials t
      LEFT JOIN hpsearch_attempts a ON a.trial_id = t.trial_id AND a.attempt = :attempt
      LEFT JOIN LATERAL (SELECT attempt, worker FROM hpsearch_attempts o WHERE o.trial_id = t.trial_id
                          ORDER BY attempt DESC LIMIT 1) last ON true
     WHERE t.trial_id = :trial_id
"""


def make_claim_lost_error(database: Database, trial_id: int, attempt: int) -> ClaimLostError:
    """Return an error with the reason why an attempt may not write its trial: ``trial 7 was taken over by ...``."""
    rows = database.fetch_rows(_CLAIM_STATE, {"trial_id": trial_id, "attempt": attempt})
    if not rows:
        return ClaimLostError(f"the trial with id {trial_id} was deleted with its study")
    trial = rows[0]
    if trial.last is not None and trial.last > attempt:
        why = f"was taken over by {trial.worker} (attempt {trial.last})"
    elif trial.attempt is None:
        why = f"never had an attempt {attempt}"
    elif trial.ended_at is not None:
        why = "was taken from this worker, whose lease expired"
    else:
        why = f"was set to {trial.state} by another program"
    return ClaimLostError(f"trial {trial.number} {why}")
