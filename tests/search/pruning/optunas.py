"""Optuna's pruners that correspond to those of hpsearch."""

from __future__ import annotations

import warnings

from optuna import pruners
from optuna.exceptions import ExperimentalWarning

from hpsearch.search.pruners import PrunerSpec
from hpsearch.search.pruners.stopping import Patient

TWINS = {
    "median": pruners.MedianPruner,
    "percentile": pruners.PercentilePruner,
    "threshold": pruners.ThresholdPruner,
    "successive_halving": pruners.SuccessiveHalvingPruner,
    "hyperband": pruners.HyperbandPruner,
    "none": pruners.NopPruner,
}


def optunas_pruner(spec: PrunerSpec) -> pruners.BasePruner:
    """Return Optuna's pruner with the options of ours."""
    if isinstance(spec, Patient):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            wrapped = None if spec.wrapped is None else optunas_pruner(spec.wrapped)
            return pruners.PatientPruner(wrapped, spec.patience, spec.min_delta)
    return TWINS[spec.name](**spec.model_dump(exclude={"name", "metric"}))
