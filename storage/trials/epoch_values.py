"""What trials of several metrics came to after each epoch: Optuna's table has one number for an epoch."""

from __future__ import annotations

from collections import defaultdict

import sqlalchemy as sa

from hpsearch.storage.database.statements import Database

_VALUES = sa.text("""
    SELECT trial_id, step, metrics FROM hpsearch_epoch_values JOIN trials USING (trial_id) WHERE study_id = :study
     ORDER BY trial_id, step
""")


def read_epoch_values(engine: sa.Engine, study_id: int) -> dict[int, dict[int, list[float]]]:
    """Return the values of all metrics that are optimised, by the trial's id and the epoch (from 0).

    Args:
        engine: of the study's database.
        study_id: the study.
    """
    found: dict[int, dict[int, list[float]]] = defaultdict(dict)
    for row in Database(engine).rows(_VALUES, {"study": study_id}):
        found[row.trial_id][row.step] = row.metrics
    return dict(found)
