"""Secrets as files: NAME_FILE names a file whose content stands for the environment variable NAME.

What stands in a container's environment is shown to whoever may inspect it, and a file of /run/secrets is not.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

from hpsearch.search.errors import SearchError

NAMES = (
    "PGPASSWORD",  # libpq's own, for a URL without a password
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
    """Set each of `NAMES` from its file, where one is named; what this process starts gets the value alone.

    Args:
        environment: to read from and to write to; this process's by default.

    Raises:
        SearchError: a name is given twice, or its file cannot be read or is empty.
    """
    environment = os.environ if environment is None else environment
    for name in NAMES:
        setting = f"{name}_FILE"
        if not (path := environment.get(setting)):
            continue
        if environment.get(name):
            raise SearchError(f"{setting} {path!r} is given and so is {name}: leave one of them out")
        try:
            secret = Path(path).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise SearchError(
                f"{setting} {path!r} cannot be read ({error.strerror}): name a file of this user's"
            ) from None
        except UnicodeDecodeError:
            raise SearchError(f"{setting} {path!r} is no text: name the file that holds {name}") from None
        if not secret or "\0" in secret:
            raise SearchError(
                f"{setting} {path!r} holds {'a zero byte' if secret else 'nothing'}: write {name} into it"
            )
        environment[name] = secret
        del environment[setting]
