"""Hyperparameter search for PyTorch: Optuna workers share a Postgres study and log to MLflow.

Every public name is imported from here, as in ``from hpsearch import Study``. A name loads its module on first use, so
``import hpsearch`` is cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpsearch.objectives.errors import ObjectiveError
    from hpsearch.objectives.loading import BUILTIN, load_objective, objective_reference, source_hash
    from hpsearch.objectives.objective import BaseObjective, Objective
    from hpsearch.objectives.own_loop.loop_objective import LoopObjective
    from hpsearch.objectives.training.config import TrainConfig
    from hpsearch.objectives.training.data.dataset import Batch, Dataset
    from hpsearch.objectives.training.data.division import Blocks
    from hpsearch.objectives.training.data.preprocess import Standardize
    from hpsearch.objectives.training.data.samplers import ByLength
    from hpsearch.objectives.training.data.samples import fingerprint_files, padded
    from hpsearch.objectives.training.data.splits import Splits
    from hpsearch.objectives.training.evaluation.evaluate import evaluate
    from hpsearch.objectives.training.evaluation.metrics import Metrics, classification
    from hpsearch.objectives.training.evaluation.step import Step
    from hpsearch.objectives.training.loop.guards import DeviceMemoryError, NonFiniteError
    from hpsearch.objectives.training.reproducibility.checkpoint import promotable
    from hpsearch.objectives.training.reproducibility.metrics_file import EpochRecord
    from hpsearch.objectives.training.result import FitResult
    from hpsearch.objectives.training.session import LocalSession, Session, Verdict
    from hpsearch.objectives.training.trainer import Trainer
    from hpsearch.search.api.study import Study, delete_study, list_studies
    from hpsearch.search.errors import SearchError
    from hpsearch.storage.errors import StorageError

__all__ = [
    "BUILTIN",
    "BaseObjective",
    "Batch",
    "Blocks",
    "ByLength",
    "Dataset",
    "DeviceMemoryError",
    "EpochRecord",
    "FitResult",
    "LocalSession",
    "LoopObjective",
    "Metrics",
    "NonFiniteError",
    "Objective",
    "ObjectiveError",
    "SearchError",
    "Session",
    "Splits",
    "Standardize",
    "Step",
    "StorageError",
    "Study",
    "TrainConfig",
    "Trainer",
    "Verdict",
    "classification",
    "delete_study",
    "evaluate",
    "fingerprint_files",
    "list_studies",
    "load_objective",
    "objective_reference",
    "padded",
    "promotable",
    "source_hash",
]

_NAMES_BY_MODULE = {
    "objectives.errors": ("ObjectiveError",),
    "objectives.loading": ("BUILTIN", "load_objective", "objective_reference", "source_hash"),
    "objectives.objective": ("BaseObjective", "Objective"),
    "objectives.own_loop.loop_objective": ("LoopObjective",),
    "objectives.training.config": ("TrainConfig",),
    "objectives.training.data.dataset": ("Batch", "Dataset"),
    "objectives.training.data.division": ("Blocks",),
    "objectives.training.data.preprocess": ("Standardize",),
    "objectives.training.data.samplers": ("ByLength",),
    "objectives.training.data.samples": ("fingerprint_files", "padded"),
    "objectives.training.data.splits": ("Splits",),
    "objectives.training.evaluation.evaluate": ("evaluate",),
    "objectives.training.evaluation.metrics": ("Metrics", "classification"),
    "objectives.training.evaluation.step": ("Step",),
    "objectives.training.loop.guards": ("DeviceMemoryError", "NonFiniteError"),
    "objectives.training.reproducibility.checkpoint": ("promotable",),
    "objectives.training.reproducibility.metrics_file": ("EpochRecord",),
    "objectives.training.result": ("FitResult",),
    "objectives.training.session": ("LocalSession", "Session", "Verdict"),
    "objectives.training.trainer": ("Trainer",),
    "search.api.study": ("Study", "delete_study", "list_studies"),
    "search.errors": ("SearchError",),
    "storage.errors": ("StorageError",),
}
MODULES = {name: f"{__name__}.{module}" for module, names in _NAMES_BY_MODULE.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
