"""What all statements on trials share: how they are numbered, how values are kept, and who may write."""

from __future__ import annotations

import math

from hpsearch.storage.database.statements import Database
from hpsearch.storage.errors import ClaimLostError

# Everybody who makes trials, Optuna's RDBStorage included, holds the study's row while it numbers and inserts them. So
# ids and numbers of a study rise together, and the highest number + 1, found in the index, is the count that RDBStorage
# takes.
NEXT_NUMBER = "(SELECT coalesce(max(number) + 1, 0) FROM trials WHERE study_id = :study_id)"

# The fence: of a trial `t` that somebody has claimed, only its live attempt `a` may write, and only while it runs.
MAY_WRITE = """
    t.trial_id = :trial_id AND a.trial_id = t.trial_id AND a.attempt = :attempt AND a.ended_at IS NULL
    AND t.state = 'RUNNING'
"""

_WHY = """
    SELECT t.number, t.state, a.attempt, a.ended_at, last.attempt AS last, last.worker
      FROM trials t
      LEFT JOIN hpsearch_attempts a ON a.trial_id = t.trial_id AND a.attempt = :attempt
      LEFT JOIN LATERAL (SELECT attempt, worker FROM hpsearch_attempts o WHERE o.trial_id = t.trial_id
                          ORDER BY attempt DESC LIMIT 1) last ON true
     WHERE t.trial_id = :trial_id
"""


def claim_lost(database: Database, trial_id: int, attempt: int) -> ClaimLostError:
    """Return what says why an attempt may write nothing: ``trial 7 was taken over by ...``."""
    rows = database.rows(_WHY, {"trial_id": trial_id, "attempt": attempt})
    if not rows:
        return ClaimLostError(f"the trial with id {trial_id} was deleted with its study")
    trial = rows[0]
    if trial.last is not None and trial.last > attempt:
        why = f"was taken over by {trial.worker} (attempt {trial.last})"
    elif trial.attempt is None:
        why = f"never had an attempt {attempt}"
    elif trial.ended_at is not None:
        why = "was taken from this worker, which seemed dead"
    else:
        why = f"was set to {trial.state} from outside"
    return ClaimLostError(f"trial {trial.number} {why}")


def store(value: float, *, nan: bool = False) -> tuple[float | None, str]:
    """Return a value and its type as Optuna keeps them: infinities, and NaN where it has a type, as NULL."""
    if math.isinf(value):
        return None, "INF_POS" if value > 0 else "INF_NEG"
    if nan and math.isnan(value):
        return None, "NAN"
    return float(value), "FINITE"


_SPECIAL = {"INF_POS": math.inf, "INF_NEG": -math.inf, "NAN": math.nan}


def restore(value: float | None, kind: str) -> float:
    """Undo `store`."""
    return value if value is not None else _SPECIAL[kind]
