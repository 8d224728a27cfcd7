"""What reads the journals of a study beside MLflow: what its spec says."""

from __future__ import annotations

from pathlib import Path

from hpsearch.search.errors import SearchError
from hpsearch.search.spec.spec import StudySpec
from hpsearch.search.study.study import StoredStudy
from hpsearch.storage.journals.reader import Reader
from hpsearch.storage.journals.trial_ends import TrialEnds
from hpsearch.storage.tensorboard.reader import TensorBoard, check_folder
from hpsearch.storage.tensorboard.reader import is_installed as has_tensorboard
from hpsearch.storage.wandb_runs.account import check_account
from hpsearch.storage.wandb_runs.reader import WandbRuns
from hpsearch.storage.wandb_runs.reader import is_installed as has_wandb


def check_readers(spec: StudySpec) -> None:
    """Refuse a study whose readers cannot be told anything from here, before it is created or joined.

    Raises:
        SearchError: a package is missing.
        StorageError: a folder cannot be written, or a key is missing.
    """
    if spec.tensorboard is not None:
        if not has_tensorboard():
            raise SearchError(
                f"--tensorboard {spec.tensorboard}: the package tensorboard is not installed: {_install('tensorboard')}"
            )
        check_folder(Path(spec.tensorboard))
    if spec.wandb is not None:
        if not has_wandb():
            raise SearchError(f"--wandb {spec.wandb}: the package wandb is not installed: {_install('wandb')}")
        check_account(spec.wandb)


def readers_of(study: StoredStudy, home: Path) -> list[Reader]:
    """Return the readers of a study beside MLflow; what they keep on this machine is in its `home`."""
    spec, readers = study.spec, list[Reader]()
    if spec.tensorboard is not None:
        readers.append(TensorBoard(Path(spec.tensorboard), spec.name, study.folder, TrialEnds(study.engine)))
    if spec.wandb is not None:
        folder = home / "wandb" / study.folder
        readers.append(WandbRuns(spec.wandb, spec.name, study.folder, folder, TrialEnds(study.engine)))
    return readers


def _install(extra: str) -> str:
    return f"./hpsearch add {extra} (or: pip install 'hpsearch[{extra}]') on all machines"
