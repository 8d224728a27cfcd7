"""The files of a registered model: their download, and their verification before they are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sqlalchemy as sa
import yaml

from hpsearch.objectives.private_folders import use_private_compiler_cache
from hpsearch.search.errors import SearchError
from hpsearch.search.promotion.exported_program import find_unsafe_part
from hpsearch.search.promotion.generated_code import find_unsafe_code
from hpsearch.search.promotion.plain_copy import replace_by_plain_copy
from hpsearch.storage.files import compute_folder_sha256
from hpsearch.storage.mlflow.client import Tracking
from hpsearch.storage.mlflow.health import mlflow_request
from hpsearch.storage.mlflow.model import CHECKPOINT_FILE, download_model
from hpsearch.storage.mlflow.registry import Version
from hpsearch.storage.records.promotions import read_model_sha256

_PROGRAM = "data/model.pt2"
_PROGRAM_FILES = {
    *("MLmodel", "conda.yaml", "python_env.yaml", "requirements.txt"),
    *("input_example.json", "serving_input_example.json", _PROGRAM),
}
_CHECKPOINT_FILES = {"MLmodel", CHECKPOINT_FILE}
# The only values with which MLflow imports no module but its own for PyTorch.
_PYFUNC = {"data": "data", "loader_module": "mlflow.pytorch", "pickle_module_name": "mlflow.pytorch.pickle_module"}
_PYTORCH = {"code": None, "model_data": "data"}
_PLAIN_KEYS = {"config", "env", "python_version", "pytorch_version"}


def fetch_model(
    engine: sa.Engine, tracking: Tracking, version: Version, folder: Path, *, name: str, allow_code: bool
) -> Path:
    """Download the model of a version to a new folder in `folder`, verify its files, and return the new folder.

    Args:
        engine: engine of the database with the recorded digests.
        tracking: client of the MLflow server.
        version: the version.
        folder: existing folder.
        name: name of the model in messages.
        allow_code: whether to accept files that can execute code when they are loaded.

    Raises:
        SearchError: the version has no logged model, or its files differ from the recorded digest or can execute code.
        StorageError: MLflow is unavailable or rejects the request.
    """
    if version.model_id is None:
        raise SearchError(f"{name}: the version has no logged model; register the model of the trial's run")
    files, _ = download_verified(engine, tracking, version.model_id, folder, name=name)
    if not allow_code and (part := find_code(files) or _find_code_of_program(files)):
        raise SearchError(
            f"{name}: the model has {part}, which can execute code when it is loaded; add --allow-code "
            "(allow_code=True) if you trust the author of the model"
        )
    return files


def remove_ids(folder: Path) -> None:
    """Remove the ids of a model from its metadata, because MLflow asks the server about models with ids."""
    file = folder / "MLmodel"
    metadata = yaml.safe_load(file.read_text(encoding="utf-8"))
    file.write_text(yaml.safe_dump({**metadata, "model_id": None, "run_id": None}), encoding="utf-8")


def download_verified(
    engine: sa.Engine, tracking: Tracking, model_id: str, folder: Path, *, name: str
) -> tuple[Path, str]:
    """Download a model to a new folder in `folder`; return the new folder and the digest of the files.

    Raises:
        SearchError: the files differ from the recorded digest.
        StorageError: MLflow is unavailable or rejects the request.
    """
    use_private_compiler_cache()  # torch's compiler is imported with exported models
    with mlflow_request(f"download model {model_id}"):
        files = download_model(model_id, folder, tracking_uri=tracking.uri)
    found = compute_folder_sha256(files)
    with engine.connect() as connection:
        recorded = read_model_sha256(connection, model_id)
    if recorded not in {None, found}:
        raise SearchError(
            f"{name}: the files of model {model_id} in MLflow were changed (SHA-256 {found[:12]}, recorded "
            f"{str(recorded)[:12]}); restore the files, or delete this model in MLflow and promote its trial again"
        )
    return files, found


def find_code(folder: Path) -> str:
    """Return a description of the first part of a model that can execute code; empty if there is none."""
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    try:
        flavors: dict[str, Any] = yaml.safe_load((folder / "MLmodel").read_text(encoding="utf-8"))["flavors"]
        kinds = {str(name): dict(flavor) for name, flavor in flavors.items()}
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError, AttributeError):
        return "no readable file MLmodel"
    if kinds.keys() == {"hpsearch"}:
        return _find_other(names, _CHECKPOINT_FILES)
    if kinds.keys() not in ({"pytorch"}, {"python_function", "pytorch"}):  # pyfunc has no models with several inputs
        return f"the flavors {', '.join(sorted(kinds))}"
    for flavor, plain in (("python_function", _PYFUNC), ("pytorch", _PYTORCH)):
        for key, value in kinds.get(flavor, {}).items():
            if key not in _PLAIN_KEYS and (key not in plain or value != plain[key]):
                return f"{key}: {str(value)[:80]!r} in the flavor {flavor}"
    if other := _find_other(names, _PROGRAM_FILES):
        return other
    part = find_unsafe_part(folder / _PROGRAM)
    return f"{part} in {_PROGRAM}" if part else ""


def _find_code_of_program(folder: Path) -> str:
    """Replace a checked program by a plain copy, and return a description of the code that torch generates from it.

    The text is empty if the code does nothing but compute.
    """
    program = folder / _PROGRAM
    if not program.exists():  # a checkpoint
        return ""
    try:
        replace_by_plain_copy(program)
    except Exception as error:  # the readers raise errors of many types for damaged files
        return f"an unreadable program ({type(error).__name__})"
    part = find_unsafe_part(program) or find_unsafe_code(program)
    return f"{part} in {_PROGRAM}" if part else ""


def _find_other(names: set[str], expected: set[str]) -> str:
    return next((f"the file {name[:80]!r}" for name in sorted(names - expected)), "")
