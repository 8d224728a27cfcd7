"""Load a registered model, after its files were verified."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Unpack, cast

from hpsearch.objectives.private_folders import open_temporary_folder
from hpsearch.search.errors import SearchError
from hpsearch.search.promotion.model_files import fetch_model, remove_ids
from hpsearch.search.promotion.serve_check import find_version
from hpsearch.search.services import find_services
from hpsearch.storage.mlflow.model import read_export_failure
from hpsearch.storage.mlflow.registry import Registry
from hpsearch.storage.study_storage.storage import open_storage
from hpsearch.storage.urls import Addresses

if TYPE_CHECKING:
    from torch import nn


def load_model(model: str, *, allow_code: bool = False, **where: Unpack[Addresses]) -> nn.Module:
    """Load a registered model for inference, after its files were verified.

    `mlflow.pytorch.load_model` loads the same model without verification.

    Args:
        model: `NAME@ALIAS`, such as `digits@champion`, or `NAME/VERSION`.
        allow_code: whether to load a model whose files can execute code.
        where: addresses of the services; see `Study.open`.

    Raises:
        SearchError: the version does not exist, its files in MLflow were changed or can execute code, or the model was
            not exported.
        StorageError: MLflow or the database is unavailable.
    """
    import mlflow.pytorch

    services = find_services(where)
    if services.tracking_uri is None:
        raise SearchError("tracking_uri is missing; give the URL of the MLflow server that has the model")
    tracking = services.open_tracking()
    storage = open_storage(services.storage_url, application_name="hpsearch load-model")
    version = find_version(Registry(tracking.client), model)
    with open_temporary_folder() as folder:
        files = fetch_model(storage.engine, tracking, version, folder, name=model, allow_code=allow_code)
        if reason := read_export_failure(tracking.client, version.model_id):
            raise SearchError(
                f"{model}: the model could not be exported ({reason}); its description in MLflow has the code that "
                "loads its checkpoint"
            )
        remove_ids(files)
        with _forbid_pickles(is_active=not allow_code):
            return cast("nn.Module", mlflow.pytorch.load_model(str(files)))


@contextmanager
def _forbid_pickles(*, is_active: bool) -> Iterator[None]:
    """Return a context in which MLflow loads no pickled model: a second check of the files."""
    name, before = "MLFLOW_ALLOW_PICKLE_DESERIALIZATION", os.environ.get("MLFLOW_ALLOW_PICKLE_DESERIALIZATION")
    if is_active:
        os.environ[name] = "false"
    try:
        yield
    finally:
        if is_active:
            os.environ.pop(name)
            if before is not None:
                os.environ[name] = before
