"""Secrets in files: the variable NAME_FILE names a file that contains the value of the variable NAME.

`docker inspect` shows the environment of a container, but not the files in /run/secrets.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

from hpsearch.search.errors import SearchError

SECRET_VARIABLES = (
    "PGPASSWORD",  # read by libpq if the URL has no password
    "HPSEARCH_STORAGE_URL",
    "HPSEARCH_OWNER_URL",
    "HPSEARCH_ADMIN_URL",
    "HPSEARCH_OWNER_PASSWORD",
    "HPSEARCH_WORKER_PASSWORD",
    "MLFLOW_DB_PASSWORD",
    "MLFLOW_BACKEND_STORE_URI",
    "MLFLOW_TRACKING_PASSWORD",
    "WANDB_API_KEY",
    "AWS_SECRET_ACCESS_KEY",
)


def read_secret_files(environment: MutableMapping[str, str] | None = None) -> None:
    """Set each of the `SECRET_VARIABLES` from its file, and remove the NAME_FILE variables.

    Args:
        environment: environment to read and change; None selects the environment of this process.

    Raises:
        SearchError: a variable is also set directly, or its file cannot be read or is empty.
    """
    environment = os.environ if environment is None else environment
    for name in SECRET_VARIABLES:
        setting = f"{name}_FILE"
        if not (path := environment.get(setting)):
            continue
        if environment.get(name):
            raise SearchError(f"{setting} {path!r} and {name} are both set; unset one of them")
        try:
            secret = Path(path).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise SearchError(f"{setting} {path!r} cannot be read ({error.strerror}); give a readable file") from None
        except UnicodeDecodeError:
            raise SearchError(f"{setting} {path!r} is not a text file; set it to a file that contains {name}") from None
        if not secret or "\0" in secret:
            fault = "contains a zero byte" if secret else "is empty"
            raise SearchError(f"{setting} {path!r} {fault}; write {name} into it")
        environment[name] = secret
        del environment[setting]
