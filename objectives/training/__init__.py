"""The training loop: torch and a small session protocol, nothing of the service."""

from objectives.training.config import TrainConfig
from objectives.training.data.dataset import Batch, Dataset
from objectives.training.data.division import Blocks
from objectives.training.data.preprocess import Standardize
from objectives.training.data.samplers import ByLength
from objectives.training.data.samples import fingerprint_files, padded
from objectives.training.data.splits import Splits
from objectives.training.evaluation.evaluate import evaluate
from objectives.training.evaluation.metrics import Metrics, classification
from objectives.training.evaluation.step import Step
from objectives.training.loop.guards import DeviceMemoryError, NonFiniteError
from objectives.training.reproducibility.metrics_file import EpochRecord
from objectives.training.result import FitResult
from objectives.training.session import LocalSession, Session, Verdict, promotable
from objectives.training.trainer import Trainer

__all__ = [
    "Batch",
    "Blocks",
    "ByLength",
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
    "Step",
    "TrainConfig",
    "Trainer",
    "Verdict",
    "classification",
    "evaluate",
    "fingerprint_files",
    "padded",
    "promotable",
]
