"""The rungs of successive halving: one query for the values that trials of a study have noted at one of them."""

from __future__ import annotations

import json

import sqlalchemy as sa

from hpsearch.storage.database.statements import Database

_PREFIX = "completed_rung_"

# Trials in every state: a pruned one sets the cut-off as much as one that runs.
_VALUES = sa.text("""
    SELECT t.number, a.value_json FROM trials t JOIN trial_system_attributes a USING (trial_id)
     WHERE t.study_id = :study AND a.key = :key
""")


def rung_key(rung: int) -> str:
    """Return the trial system attribute in which Optuna, too, keeps the value at a rung (from 0)."""
    return f"{_PREFIX}{rung}"


def read_rung(engine: sa.Engine, study_id: int, rung: int) -> list[tuple[int, float | list[float]]]:
    """Return (trial number, value, or those of several metrics) of all trials at a rung, in no particular order."""
    rows = Database(engine).rows(_VALUES, {"study": study_id, "key": rung_key(rung)})
    return [(row.number, json.loads(row.value_json)) for row in rows]
