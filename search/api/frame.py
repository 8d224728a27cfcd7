"""A study's trials as a table of pandas."""

from __future__ import annotations

import pandas as pd

from hpsearch.search.report.trial import why_waiting
from hpsearch.search.study.front import broken_bounds
from hpsearch.search.study.ranking import first_value
from hpsearch.search.study.study import StoredStudy
from hpsearch.storage.attributes import INFEASIBLE, REASON, WORKER


def trials_frame(study: StoredStudy) -> pd.DataFrame:
    """Return a row for each trial: what it was given, what it scored, and why it ended as it did.

    Of several metrics `value` is that of the first, and each has a column, as Optuna names it: ``values_accuracy``.
    Where there are constraints, `out_of_bounds` has those that the trial breaks.
    """
    trials, waiting, spec = study.trials(), why_waiting(study), study.spec
    params = sorted({name for trial in trials for name in trial.params})
    names = list(spec.ways) if spec.several else []
    columns = [
        "number",
        "state",
        "value",
        *(f"values_{name}" for name in names),
        *(f"params_{name}" for name in params),
    ]
    columns += ["epochs", "duration", "worker", "reason", *(["out_of_bounds"] if spec.constraints else [])]
    rows = [
        {
            "number": trial.number,
            "state": "INFEASIBLE" if trial.user_attrs.get(INFEASIBLE) else trial.state.name,
            "value": first_value(trial),
            **{f"values_{name}": value for name, value in zip(names, trial.values or [], strict=False)},
            **{f"params_{name}": value for name, value in trial.params.items()},
            "epochs": len(trial.intermediate_values),
            "duration": trial.duration,
            "worker": trial.user_attrs.get(WORKER, ""),
            "reason": waiting.get(trial.number) or trial.user_attrs.get(REASON, ""),
            "out_of_bounds": "; ".join(broken_bounds(spec, trial)),
        }
        for trial in trials
    ]
    return pd.DataFrame(rows, columns=columns)
