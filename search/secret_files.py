"""Secrets in files: the variable NAME_FILE is the path of a file that contains the value of the variable NAME.

`docker inspect` shows the environment of a container, but not the files in /run/secrets. Kubernetes mounts a Secret as
a folder, whose path is in HPSEARCH_SECRETS_FOLDER. Each file in it has the name of a variable.
"""

from __future__ import annotations

import errno
import os
import re
import select
import time
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
    "MLFLOW_TRACKING_TOKEN",
    "HPSEARCH_WEB_TOKEN",
    "WANDB_API_KEY",
    "AWS_SECRET_ACCESS_KEY",
)


FOLDER_VARIABLE = "HPSEARCH_SECRETS_FOLDER"


def read_secret_files(environment: MutableMapping[str, str] | None = None) -> None:
    """Set variables from files, and remove the variables that name the files.

    These are the `SECRET_VARIABLES`, and all variables that have a file in the folder $HPSEARCH_SECRETS_FOLDER.

    Args:
        environment: environment to read and change; None selects the environment of this process.

    Raises:
        SearchError: a variable is also set directly, or its file or the folder cannot be read, or a file is empty.
    """
    environment = os.environ if environment is None else environment
    if folder := environment.get(FOLDER_VARIABLE):
        for name, path in _list_variables(folder).items():
            _read_secret(environment, name, FOLDER_VARIABLE, path)
        del environment[FOLDER_VARIABLE]
    for name in SECRET_VARIABLES:
        setting = f"{name}_FILE"
        if file := environment.get(setting):
            _read_secret(environment, name, setting, file)
            del environment[setting]


def _list_variables(folder: str) -> dict[str, str]:
    """Return the paths of the files in a folder that have names of variables, by name."""
    try:
        names = sorted(path.name for path in Path(folder).iterdir())
    except OSError as error:
        raise SearchError(f"{FOLDER_VARIABLE} {folder!r} cannot be read ({error.strerror}); give a folder") from None
    return {name: str(Path(folder, name)) for name in names if re.fullmatch(r"[A-Z][A-Z0-9_]*", name)}


_MAX_SECONDS = 10.0  # to wait for the program that writes to a pipe, such as that of `<(...)` in a shell
_MAX_BYTES = 1_000_000


def _read_file(path: str) -> bytes:
    """Return the content of a file or pipe.

    Raises:
        OSError: the file cannot be read, is too large, or is a pipe to which no program writes.
    """
    found, end = b"", time.monotonic() + _MAX_SECONDS
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    try:
        while len(found) <= _MAX_BYTES:
            if not poller.poll(1000 * max(end - time.monotonic(), 0)):
                raise OSError(errno.ETIMEDOUT, f"no program has written to this pipe within {_MAX_SECONDS:.0f} s")
            if not (part := os.read(descriptor, _MAX_BYTES)):
                return found
            found += part
    finally:
        os.close(descriptor)
    raise OSError(errno.EFBIG, f"more than {_MAX_BYTES} bytes")


def _read_secret(environment: MutableMapping[str, str], name: str, setting: str, path: str) -> None:
    """Set a variable to the content of a file; `setting` is the variable that led to the file."""
    if environment.get(name):
        raise SearchError(f"{setting} {path!r} and {name} are both set; unset one of them")
    try:
        secret = _read_file(path).decode().strip()
    except OSError as error:
        raise SearchError(f"{setting} {path!r} cannot be read ({error.strerror}); give a readable file") from None
    except UnicodeDecodeError:
        raise SearchError(f"{setting} {path!r} is not a text file; set it to a file that contains {name}") from None
    if not secret or "\0" in secret:
        fault = "contains a zero byte" if secret else "is empty"
        raise SearchError(f"{setting} {path!r} {fault}; write {name} into it")
    environment[name] = secret
