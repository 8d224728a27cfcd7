"""Openings of sealed test sets: one for each study, kept by the database.

A row is written before the test data is looked at, and a trigger keeps it as it is: nobody opens a study's test set
twice, with whatever program. Only the scores are filled in later, once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

import sqlalchemy as sa

from hpsearch.storage.database.statements import Database
from hpsearch.storage.errors import StorageError


@dataclass(frozen=True)
class Opening:
    """The opening of a study's test set.

    Attributes:
        trial_number: for which trial of the study.
        model_sha256: of the file of weights that was scored.
        opened_at: by the database's clock.
        opened_by: user and host.
        scores: loss and metrics on the test split; None while whoever opened it has not written them.
        finalists: name of the study whose finalists made the choice; None: the choice was not confirmed by any.
        refit: name of the study that holds the refit which was scored; None: the trial's own model was.
    """

    trial_number: int
    model_sha256: str
    opened_at: datetime
    opened_by: str
    scores: dict[str, float] | None
    finalists: str | None = None
    refit: str | None = None

    @property
    def told(self) -> str:
        """When, by whom and for which trial: ``on 2026-05-01 at 12:00 UTC by ann@host for trial 7``."""
        when = self.opened_at.astimezone(UTC)
        return f"on {when:%Y-%m-%d} at {when:%H:%M} UTC by {self.opened_by} for {self.subject}"

    @property
    def subject(self) -> str:
        """Whose model was scored: ``trial 7``, or ``the refit of trial 7``."""
        return f"{'' if self.refit is None else 'the refit of '}trial {self.trial_number}"


class AlreadyOpenError(StorageError):
    """The test set was opened before."""

    def __init__(self, opening: Opening) -> None:
        super().__init__(f"the test set was opened {opening.told}, and it opens once")
        self.opening = opening


_READ = sa.text("""
    SELECT trial_number, model_sha256, opened_at, opened_by, scores, finalists, refit
      FROM hpsearch_test_openings WHERE study_id = :study
""")

_OPEN = sa.text("""
    INSERT INTO hpsearch_test_openings (study_id, trial_number, model_sha256, opened_by, finalists, refit)
    SELECT study_id, :trial, :sha256, :by, :finalists, :refit FROM studies WHERE study_id = :study
    ON CONFLICT (study_id) DO NOTHING RETURNING study_id
""")

_FILL = sa.text("""
    UPDATE hpsearch_test_openings SET scores = CAST(:scores AS jsonb)
     WHERE study_id = :study AND trial_number = :trial AND model_sha256 = :sha256 AND scores IS NULL RETURNING study_id
""")


def read_opening(engine: sa.Engine, study_id: int) -> Opening | None:
    """Return the opening of a study's test set, or None while it is sealed."""
    rows = Database(engine).rows(_READ, {"study": study_id})
    return Opening(**{**rows[0]._mapping, "scores": _from_json(rows[0].scores)}) if rows else None


def open_test_set(
    engine: sa.Engine,
    study_id: int,
    *,
    trial_number: int,
    model_sha256: str,
    opened_by: str,
    finalists: str | None,
    refit: str | None = None,
) -> Opening:
    """Write, and commit, that a study's test set is opened; look at the data only when this has returned.

    An opening without scores, for the same trial and the same weights, is taken up: nothing new is to be learnt from
    it, and whoever made it may have died.

    Args:
        engine: of the study's database.
        study_id: the study.
        trial_number: the trial whose weights are scored.
        model_sha256: of the file that holds them.
        opened_by: for a person to read.
        finalists: name of the study whose finalists made the choice, or None.
        refit: name of the study that holds the refit whose weights they are, or None.

    Raises:
        AlreadyOpenError: it was opened for another trial or other weights, or it has its scores.
        StorageError: the study was deleted.
    """
    arguments = {
        "study": study_id,
        "trial": trial_number,
        "sha256": model_sha256,
        "by": opened_by,
        "finalists": finalists,
        "refit": refit,
    }
    Database(engine).rows(_OPEN, arguments)
    opening = read_opening(engine, study_id)
    if opening is None:
        raise StorageError("the study was deleted")
    if opening.scores is not None or (opening.trial_number, opening.model_sha256) != (trial_number, model_sha256):
        raise AlreadyOpenError(opening)
    return opening


def write_scores(engine: sa.Engine, study_id: int, opening: Opening, scores: Mapping[str, float]) -> Opening:
    """Fill in the scores of an opening, once, and return it.

    Raises:
        AlreadyOpenError: somebody else was faster.
        StorageError: the study was deleted.
    """
    arguments = {
        "study": study_id,
        "trial": opening.trial_number,
        "sha256": opening.model_sha256,
        "scores": json.dumps({name: value if math.isfinite(value) else None for name, value in scores.items()}),
    }
    filled = Database(engine).rows(_FILL, arguments)
    found = read_opening(engine, study_id)
    if found is None:
        raise StorageError("the study was deleted")
    if not filled:
        raise AlreadyOpenError(found)
    return found


def _from_json(scores: dict[str, float | None] | None) -> dict[str, float] | None:
    """JSON has no NaN: a score that is not finite, such as that of a class nobody has, is kept as null."""
    if scores is None:
        return None
    return {name: math.nan if value is None else value for name, value in scores.items()}
