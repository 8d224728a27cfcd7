"""Evaluations on the test set, one per study.

The row is committed before the test data is read, and a database trigger rejects changes, so that no program can
evaluate twice. Only the scores are filled in later, once.
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
class TestEvaluation:
    """Evaluation of a trial's model on the test set of the trial's study.

    Attributes:
        trial_number: number of the trial.
        model_sha256: SHA-256 of the file with the evaluated weights.
        opened_at: time of the first access to the test set, by the database clock.
        opened_by: user and host that started the evaluation.
        scores: loss and metrics on the test set; None until they are written.
        finalists: name of the study of finalists by which the trial was chosen; None if there were no finalists.
        refit: name of the study with the evaluated refit; None if the trial's own model was evaluated.
    """

    trial_number: int
    model_sha256: str
    opened_at: datetime
    opened_by: str
    scores: dict[str, float] | None
    finalists: str | None = None
    refit: str | None = None

    @property
    def description(self) -> str:
        """Time, user and model: ``on 2026-05-01 at 12:00 UTC by ann@host for trial 7``."""
        when = self.opened_at.astimezone(UTC)
        return f"on {when:%Y-%m-%d} at {when:%H:%M} UTC by {self.opened_by} for {self.model_description}"

    @property
    def model_description(self) -> str:
        """Evaluated model: ``trial 7``, or ``the refit of trial 7``."""
        return f"{'' if self.refit is None else 'the refit of '}trial {self.trial_number}"


class AlreadyEvaluatedError(StorageError):
    """Test set on which a model was evaluated before."""

    def __init__(self, evaluation: TestEvaluation) -> None:
        super().__init__(f"the test set was evaluated {evaluation.description}; it can be evaluated only once")
        self.evaluation = evaluation


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


def read_test_evaluation(engine: sa.Engine, study_id: int) -> TestEvaluation | None:
    """Return the evaluation on a study's test set; None if the test set was not evaluated."""
    rows = Database(engine).fetch_rows(_READ, {"study": study_id})
    return TestEvaluation(**{**rows[0]._mapping, "scores": _restore_nan(rows[0].scores)}) if rows else None


def record_test_evaluation(
    engine: sa.Engine,
    study_id: int,
    *,
    trial_number: int,
    model_sha256: str,
    opened_by: str,
    finalists: str | None,
    refit: str | None = None,
) -> TestEvaluation:
    """Commit the record of an evaluation; the caller reads the test data only afterwards.

    If the same trial and weights have a record without scores, this record is returned: the process that wrote it has
    probably died, and no scores were revealed.

    Args:
        engine: engine of the study's database.
        study_id: id of the study.
        trial_number: number of the trial.
        model_sha256: SHA-256 of the file with the weights.
        opened_by: user and host.
        finalists: name of the study of finalists by which the trial was chosen; None if there are no finalists.
        refit: name of the study with the evaluated refit; None to evaluate the trial's own model.

    Raises:
        AlreadyEvaluatedError: the test set was evaluated for another trial or other weights, or has scores.
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
    Database(engine).fetch_rows(_OPEN, arguments)
    if (evaluation := read_test_evaluation(engine, study_id)) is None:
        raise StorageError("the study was deleted")
    is_same = (evaluation.trial_number, evaluation.model_sha256) == (trial_number, model_sha256)
    if evaluation.scores is not None or not is_same:
        raise AlreadyEvaluatedError(evaluation)
    return evaluation


def write_scores(engine: sa.Engine, study_id: int, made: TestEvaluation, scores: Mapping[str, float]) -> TestEvaluation:
    """Write the scores of an evaluation, which must have none, and return the stored evaluation.

    Raises:
        AlreadyEvaluatedError: another process has written the scores.
        StorageError: the study was deleted.
    """
    arguments = {
        "study": study_id,
        "trial": made.trial_number,
        "sha256": made.model_sha256,
        "scores": json.dumps({name: value if math.isfinite(value) else None for name, value in scores.items()}),
    }
    filled = Database(engine).fetch_rows(_FILL, arguments)
    if (found := read_test_evaluation(engine, study_id)) is None:
        raise StorageError("the study was deleted")
    if not filled:
        raise AlreadyEvaluatedError(found)
    return found


def _restore_nan(scores: dict[str, float | None] | None) -> dict[str, float] | None:
    """Return scores with NaN for None: JSON has no NaN, which is the score of a class without samples."""
    if scores is None:
        return None
    return {name: math.nan if value is None else value for name, value in scores.items()}
