"""Early termination of a study, as stored in its attributes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import sqlalchemy as sa

from hpsearch.kill_points import kill_point
from hpsearch.storage.attributes import EARLY_TERMINATION, EXPECTED_GAIN
from hpsearch.storage.database.statements import Database
from hpsearch.storage.errors import StorageError
from hpsearch.storage.study_storage.studies import set_attrs_in
from hpsearch.storage.trials.claim_sql import LOCK_STUDY, SELECT_CANDIDATES


@dataclass(frozen=True)
class EarlyStop:
    """Early termination of a study, whose remaining budget is not used.

    Attributes:
        gain: expected improvement of the best value by the remaining budget, in units of the metric.
        threshold: expected gain below which the study is terminated (`--min-expected-gain`).
        started: number of trials that were started before the early termination.
        budget: the budget in trials.
    """

    gain: float
    threshold: float
    started: int
    budget: int

    @property
    def reason(self) -> str:
        """Message for users with the expected gain and the threshold."""
        limit = f"--min-expected-gain {self.threshold:g}"
        return f"the expected gain of the remaining budget, {self.gain:.2g}, was below {limit}"

    @classmethod
    def from_attrs(cls, attrs: Mapping[str, Any]) -> EarlyStop | None:
        """Return the early termination that is stored in a study's user attributes; None if none is stored.

        Raises:
            StorageError: the stored attribute is damaged.
        """
        stored = attrs.get(EARLY_TERMINATION)
        try:
            return None if stored is None else cls(**stored)
        except TypeError:
            raise StorageError(f"the attribute {EARLY_TERMINATION!r} is damaged; restore a backup") from None


_CANCEL_EARLY_STOP = sa.text("""
    UPDATE study_user_attributes SET value_json = 'null'
     WHERE study_id = :study AND key = :stop AND value_json <> 'null'
""")


# Trials that ended since the last forecast, such as those pruned at a rung, must not trigger another forecast at once.
_UPDATE_ESTIMATE = sa.text("""
    UPDATE study_user_attributes SET value_json = jsonb_set(value_json::jsonb, '{ended}', to_jsonb(
        (SELECT count(*) FROM trials WHERE study_id = :study AND state IN ('COMPLETE', 'PRUNED', 'FAIL'))))::text
     WHERE study_id = :study AND key = :gain
""")


@kill_point("stop early")
def stop_early(
    engine: sa.Engine, study_id: int, *, gain: float, threshold: float, estimate: Mapping[str, Any]
) -> EarlyStop | None:
    """Terminate a study early, so that no further trials are started.

    The estimate is stored in the same transaction. If this worker dies before the commit, another worker computes the
    estimate again.

    Args:
        engine: engine of the study's database.
        study_id: id of the study.
        gain: expected gain of the remaining budget.
        threshold: expected gain below which the study is terminated.
        estimate: the estimate to store with the study (`EXPECTED_GAIN`).

    Returns:
        The stored early termination. None if nothing was stored: the study was already terminated early, has no budget
        left, has enqueued trials, or was deleted.
    """

    def stop_once(connection: sa.Connection, _repeated: bool) -> EarlyStop | None:
        study = connection.execute(LOCK_STUDY, {"study": study_id}).one_or_none()
        if study is None:
            return None
        trials = connection.execute(SELECT_CANDIDATES, {"study": study_id, "n_trials": study.n_trials}).one()
        started = trials.total - trials.enqueued
        if trials.enqueued or started >= trials.opens:
            return None
        stop = EarlyStop(gain, threshold, started, study.n_trials)
        set_attrs_in(connection, study_id, {EARLY_TERMINATION: asdict(stop), EXPECTED_GAIN: dict(estimate)})
        return stop

    return Database(engine).run_transaction(stop_once)


def cancel_early_stop(connection: sa.Connection, study_id: int) -> bool:
    """Cancel the early termination of a study; return False if the study was not terminated early."""
    if connection.execute(_CANCEL_EARLY_STOP, {"study": study_id, "stop": EARLY_TERMINATION}).rowcount != 1:
        return False
    connection.execute(_UPDATE_ESTIMATE, {"study": study_id, "gain": EXPECTED_GAIN})
    return True
