"""The rest of a study's budget is given up, once, under the lock that every claim takes; and taken up again.

No trial is begun afterwards; those that were begun, or were enqueued, end as they would. The spec stays as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import sqlalchemy as sa

from hpsearch.storage.attributes import FORESEEN, GIVEN_UP, SPEC
from hpsearch.storage.database.locks import UNLESS_FROZEN
from hpsearch.storage.database.statements import Database


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


_LOCKED = sa.text(f"""
    {UNLESS_FROZEN}
    SELECT (spec.value_json::jsonb ->> 'n_trials')::int AS budget FROM studies s
      JOIN study_user_attributes spec ON spec.study_id = s.study_id AND spec.key = :spec
     WHERE s.study_id = :study FOR UPDATE OF s, spec
""")  # noqa: S608 the parts are constants

# After the lock, in a statement of its own: the one that waits for a lock sees what was before it waited.
_AT = sa.text("""
    SELECT count(*) FILTER (WHERE state <> 'WAITING' OR started) AS started,
           count(*) FILTER (WHERE state = 'WAITING' AND NOT started) AS enqueued,
           EXISTS (SELECT FROM study_user_attributes
                    WHERE study_id = :study AND key = :given_up AND value_json <> 'null') AS given_up
      FROM (SELECT state, EXISTS (SELECT FROM hpsearch_attempts a WHERE a.trial_id = t.trial_id) AS started
              FROM trials t WHERE study_id = :study) t
""")

_WRITE = sa.text("""
    INSERT INTO study_user_attributes (study_id, key, value_json)
    VALUES (:study, :given_up, :value), (:study, :foreseen, :judged)
    ON CONFLICT (study_id, key) DO UPDATE SET value_json = excluded.value_json
""")

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


def give_up(
    engine: sa.Engine, study_id: int, *, gain: float, threshold: float, foreseen: Mapping[str, Any]
) -> GivenUp | None:
    """Give the rest of a study's budget up.

    When it was judged is written with it: who dies before leaves the judgement to the next, and nobody believes that it
    was made, and the study goes on.

    Args:
        engine: of the study's database.
        study_id: the study.
        gain: that is expected of the rest.
        threshold: below which it is to stop.
        foreseen: what the study keeps of this judgement.

    Returns:
        What was written; None where it was given up before, nothing is left of it, or enqueued trials are to be run.
    """

    def once(connection: sa.Connection, _repeated: bool) -> GivenUp | None:
        words = {"study": study_id, "given_up": GIVEN_UP}
        study = connection.execute(_LOCKED, {"study": study_id, "spec": SPEC}).one_or_none()
        at = connection.execute(_AT, words).one()
        if study is None or at.given_up or at.enqueued or at.started >= study.budget:
            return None
        told = GivenUp(gain, threshold, at.started, study.budget)
        judged = {"foreseen": FORESEEN, "judged": json.dumps(dict(foreseen))}
        connection.execute(_WRITE, {**words, **judged, "value": json.dumps(asdict(told))})
        return told

    return Database(engine).transaction(once)


def take_up(connection: sa.Connection, study_id: int) -> bool:
    """Let a study go on with what it had given up; return whether it had."""
    if connection.execute(_TAKE_UP, {"study": study_id, "given_up": GIVEN_UP}).rowcount != 1:
        return False
    connection.execute(_JUDGED_NOW, {"study": study_id, "foreseen": FORESEEN})
    return True
