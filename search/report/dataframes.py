"""The trials and the epochs of a study as DataFrames."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from hpsearch.search.report.trials import find_waiting_reasons
from hpsearch.search.study.ranking import get_first_value
from hpsearch.search.study.study import StoredStudy
from hpsearch.search.study.summary import list_violations
from hpsearch.storage.attributes import INFEASIBLE, REASON, WORKER
from hpsearch.storage.trials.history import read_epoch_values


def make_trials_dataframe(study: StoredStudy) -> pd.DataFrame:
    """Return a DataFrame with one row per trial: parameters, value, and the reason why the trial ended or waits.

    In a multi-objective study, the column `value` has the first metric, and each metric has its own column, such as
    ``values_accuracy``. In a study with constraints, the column `out_of_bounds` lists the violated constraints.
    """
    trials, waiting, spec = study.trials(), find_waiting_reasons(study), study.spec
    names = list(spec.direction_by_metric) if spec.is_multi_objective else []
    params = sorted({name for trial in trials for name in trial.params})
    columns: dict[str, list[Any]] = {
        "number": [trial.number for trial in trials],
        "state": ["INFEASIBLE" if trial.user_attrs.get(INFEASIBLE) else trial.state.name for trial in trials],
        "value": [get_first_value(trial) for trial in trials],
    }
    for place, name in enumerate(names):
        columns[f"values_{name}"] = [trial.values[place] if trial.values else math.nan for trial in trials]
    for name in params:
        columns[f"params_{name}"] = [trial.params.get(name, math.nan) for trial in trials]
    columns["epochs"] = [len(trial.intermediate_values) for trial in trials]
    columns["duration"] = [trial.duration for trial in trials]
    columns["worker"] = [trial.user_attrs.get(WORKER, "") for trial in trials]
    columns["reason"] = [waiting.get(trial.number) or trial.user_attrs.get(REASON, "") for trial in trials]
    if spec.constraints:
        columns["out_of_bounds"] = ["; ".join(list_violations(spec, trial)) for trial in trials]
    return pd.DataFrame(columns)


def make_epochs_dataframe(study: StoredStudy) -> pd.DataFrame:
    """Return a DataFrame with one row per trial and reported epoch: number, epoch (from 1), and a value per metric."""
    spec = study.spec
    names = list(spec.direction_by_metric) if spec.is_multi_objective else [spec.metric]
    others = read_epoch_values(study.engine, study.study_id) if spec.is_multi_objective else {}
    rows = [
        (trial.number, step + 1, value, *others.get(trial._trial_id, {}).get(step, [])[1:])
        for trial in study.trials()
        for step, value in sorted(trial.intermediate_values.items())
    ]
    return pd.DataFrame(rows, columns=["number", "epoch", *(f"val_{name}" for name in names)])
