"""A study's trials as a table of pandas."""

from __future__ import annotations

import pandas as pd

from search.report.trial import why_waiting
from search.study.ranking import first_value
from search.study.study import StoredStudy
from storage.attributes import INFEASIBLE, REASON, WORKER


def trials_frame(study: StoredStudy) -> pd.DataFrame:
    """Return a row for each trial: what it was given, what it scored, and why it ended as it did."""
    trials, waiting = study.trials(), why_waiting(study)
    params = sorted({name for trial in trials for name in trial.params})
    columns = ["number", "state", "value", *(f"params_{name}" for name in params)]
    columns += ["epochs", "duration", "worker", "reason"]
    rows = [
        {
            "number": trial.number,
            "state": "INFEASIBLE" if trial.user_attrs.get(INFEASIBLE) else trial.state.name,
            "value": first_value(trial),
            **{f"params_{name}": value for name, value in trial.params.items()},
            "epochs": len(trial.intermediate_values),
            "duration": trial.duration,
            "worker": trial.user_attrs.get(WORKER, ""),
            "reason": waiting.get(trial.number) or trial.user_attrs.get(REASON, ""),
        }
        for trial in trials
    ]
    return pd.DataFrame(rows, columns=columns)
