"""What a backup is of, and where it is put back: the embedded stack, or services of one's own."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hpsearch.storage.embedded import stack
from hpsearch.storage.embedded.state import FILE
from hpsearch.storage.errors import StorageError
from hpsearch.storage.home import VARIABLE, home_dir
from hpsearch.storage.urls import normalise

OWNER_URL = "HPSEARCH_OWNER_URL"
MLFLOW_URL = "MLFLOW_BACKEND_STORE_URI"
_WORKERS_URL = "HPSEARCH_STORAGE_URL"


@dataclass(frozen=True)
class Places:
    """Where things are kept.

    Attributes:
        home: the home folder, with the checkpoints of studies that name no other place.
        embedded: whether the services are those of the home folder.
        studies_url: the database of the studies, as its owner.
        mlflow_url: MLflow's database; None where it is left out.
        artifacts: the folder or URL of MLflow's artifacts; None where it is left out.
    """

    home: Path
    embedded: bool
    studies_url: str
    mlflow_url: str | None
    artifacts: str | None

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.home / "checkpoints"

    @property
    def artifacts_folder(self) -> Path | None:
        """The folder of MLflow's artifacts; None where they are left out, or in a store that is no folder."""
        path = (self.artifacts or "://").removeprefix("file://")
        return None if "://" in path else Path(path)

    @property
    def studies_setting(self) -> str:
        """What says where the studies are, for messages."""
        return "the embedded Postgres" if self.embedded else OWNER_URL

    @property
    def mlflow_setting(self) -> str:
        """What says where MLflow's database is, for messages."""
        return "the embedded Postgres" if self.embedded else MLFLOW_URL


def own_places(home: Path, owner_url: str, *, artifacts: str | None, studies_only: bool) -> Places:
    """Return the places of one's own services.

    Raises:
        StorageError: MLflow's database is not named, though it is wanted.
    """
    studies = normalise(owner_url, setting=OWNER_URL)
    if studies_only:
        return Places(home, False, studies, None, None)
    if not (given := os.environ.get(MLFLOW_URL)):
        raise StorageError(
            f"{MLFLOW_URL} is not set: it names MLflow's database, as 'serve mlflow' has it; or leave that out with "
            "--studies-only"
        )
    return Places(home, False, studies, normalise(given, setting=MLFLOW_URL), artifacts)


def embedded_places(home: Path, *, studies_only: bool) -> Places:
    """Return the places of the embedded stack of a home folder, which was started."""
    databases = stack.databases(home)
    mlflow = None if studies_only else databases.mlflow_url
    return Places(home, True, databases.owner_url, mlflow, None if studies_only else str(home / "artifacts"))


def chosen_home(home: str | None) -> Path:
    """Return the home folder, created where it is missing."""
    return home_dir(home).resolve()


def has_stack(home: Path) -> bool:
    """Whether a stack was ever started there."""
    return (home / FILE).exists()


def check_choice(owner_url: str | None, artifacts: str | None, *, home: Path, must_exist: bool) -> None:
    """Refuse what would take other services than the user means.

    Raises:
        StorageError: workers use services of one's own, whose owner is not named; or nothing was ever kept here.
    """
    if owner_url is not None:
        return
    if os.environ.get(_WORKERS_URL):
        raise StorageError(
            f"{_WORKERS_URL} is set and {OWNER_URL} is not: set it to the same database, as its owner, and {MLFLOW_URL}"
        )
    if artifacts is not None:
        raise StorageError(
            f"--artifacts {artifacts!r} is for services of your own, and {OWNER_URL} is not set: "
            "the embedded ones have their own folder"
        )
    if must_exist and not has_stack(home):
        raise StorageError(
            f"{VARIABLE} {str(home)!r} holds no services, and so nothing to back up: set it, or give --home"
        )
