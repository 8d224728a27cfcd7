"""Hyperparameter search for PyTorch: Optuna workers share a Postgres study and log to MLflow.

Every public name is imported from here, as in ``from hpsearch import Study``. A name loads its module on first use, so
``import hpsearch`` is cheap.
"""

from __future__ import annotations

import importlib
import sys
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpsearch.objectives.base_objective import BaseObjective as BaseObjective
    from hpsearch.objectives.custom_loop.loop_objective import LoopObjective as LoopObjective
    from hpsearch.objectives.errors import ObjectiveError as ObjectiveError
    from hpsearch.objectives.loading import load_objective as load_objective
    from hpsearch.objectives.loading import objective_reference as objective_reference
    from hpsearch.objectives.loading import source_hash as source_hash
    from hpsearch.objectives.objective import Objective as Objective
    from hpsearch.objectives.references import BUILTIN as BUILTIN
    from hpsearch.objectives.training.config import TrainConfig as TrainConfig
    from hpsearch.objectives.training.data.dataset import Batch as Batch
    from hpsearch.objectives.training.data.dataset import Dataset as Dataset
    from hpsearch.objectives.training.data.preprocess import Standardize as Standardize
    from hpsearch.objectives.training.data.samplers import LengthGroupedSampler as LengthGroupedSampler
    from hpsearch.objectives.training.data.samples import fingerprint_files as fingerprint_files
    from hpsearch.objectives.training.data.samples import pad_collate as pad_collate
    from hpsearch.objectives.training.data.split_rows import Blocks as Blocks
    from hpsearch.objectives.training.data.splits import Splits as Splits
    from hpsearch.objectives.training.evaluation.evaluate import evaluate as evaluate
    from hpsearch.objectives.training.evaluation.metrics import Metrics as Metrics
    from hpsearch.objectives.training.evaluation.metrics import classification as classification
    from hpsearch.objectives.training.evaluation.step import Step as Step
    from hpsearch.objectives.training.loop.guards import DeviceMemoryError as DeviceMemoryError
    from hpsearch.objectives.training.loop.guards import NonFiniteError as NonFiniteError
    from hpsearch.objectives.training.reproducibility.checkpoint import promotable as promotable
    from hpsearch.objectives.training.reproducibility.metrics_file import EpochRecord as EpochRecord
    from hpsearch.objectives.training.result import FitResult as FitResult
    from hpsearch.objectives.training.session import LocalSession as LocalSession
    from hpsearch.objectives.training.session import Session as Session
    from hpsearch.objectives.training.session import Verdict as Verdict
    from hpsearch.objectives.training.trainer import Trainer as Trainer
    from hpsearch.search.api.model import load_model as load_model
    from hpsearch.search.api.studies import delete_study as delete_study
    from hpsearch.search.api.studies import list_studies as list_studies
    from hpsearch.search.api.study import Study as Study
    from hpsearch.search.errors import SearchError as SearchError
    from hpsearch.storage.errors import StorageError as StorageError

_NAMES_BY_MODULE = {
    "objectives.errors": ("ObjectiveError",),
    "objectives.loading": ("BUILTIN", "load_objective", "objective_reference", "source_hash"),
    "objectives.base_objective": ("BaseObjective",),
    "objectives.objective": ("Objective",),
    "objectives.custom_loop.loop_objective": ("LoopObjective",),
    "objectives.training.config": ("TrainConfig",),
    "objectives.training.data.dataset": ("Batch", "Dataset"),
    "objectives.training.data.split_rows": ("Blocks",),
    "objectives.training.data.preprocess": ("Standardize",),
    "objectives.training.data.samplers": ("LengthGroupedSampler",),
    "objectives.training.data.samples": ("fingerprint_files", "pad_collate"),
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
    "search.api.model": ("load_model",),
    "search.api.studies": ("delete_study", "list_studies"),
    "search.api.study": ("Study",),
    "search.errors": ("SearchError",),
    "storage.errors": ("StorageError",),
}
MODULE_BY_NAME = {name: f"{__name__}.{module}" for module, names in _NAMES_BY_MODULE.items() for name in names}
__all__ = list(MODULE_BY_NAME)


def __getattr__(name: str) -> object:
    if name in MODULE_BY_NAME:
        return getattr(importlib.import_module(MODULE_BY_NAME[name]), name)
    from hpsearch.objectives.errors import suggest_names

    error = ImportError if _is_from_import(sys._getframe(1)) else AttributeError
    raise error(f"module {__name__!r} has no attribute {name!r}; {suggest_names(name, list(MODULE_BY_NAME))}")


def _is_from_import(frame: FrameType) -> bool:
    """Return whether a frame runs `from ... import`, where Python replaces the message of an AttributeError."""
    import dis

    return dis.opname[frame.f_code.co_code[frame.f_lasti]] == "IMPORT_FROM"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
