"""The training loop: torch and a small session protocol, nothing of the service."""

from objectives.training.config import TrainConfig
from objectives.training.data import Dataset, Splits
from objectives.training.evaluate import evaluate
from objectives.training.guards import DeviceMemoryError, NonFiniteError
from objectives.training.metrics import Metrics
from objectives.training.preprocess import Standardize
from objectives.training.records import EpochRecord
from objectives.training.result import FitResult
from objectives.training.session import LocalSession, Session, Verdict, promotable
from objectives.training.trainer import Trainer

__all__ = [
    "Dataset",
    "DeviceMemoryError",
    "EpochRecord",
    "FitResult",
    "LocalSession",
    "Metrics",
    "NonFiniteError",
    "Session",
    "Splits",
    "Standardize",
    "TrainConfig",
    "Trainer",
    "Verdict",
    "evaluate",
    "promotable",
]
