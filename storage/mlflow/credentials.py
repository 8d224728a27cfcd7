"""Which tracking servers may receive this process's credentials.

The address of a tracking server may come from a study, and every worker's database role can write it. MLflow's client
sends its credentials to any address. So hpsearch opens an address that the user has not configured only if this process
has no credentials.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from hpsearch.storage.errors import StorageError
from hpsearch.storage.web.token import AUTH_NAME, is_embedded

# Variables that MLflow's client reads, each of which makes it send a secret or a signature.
_VARIABLES = tuple(f"MLFLOW_TRACKING_{name}" for name in ("USERNAME", "PASSWORD", "TOKEN", "AUTH", "AWS_SIGV4"))
_HARMLESS = (None, "", AUTH_NAME)  # this AUTH sends tokens of embedded servers, and only to them
_FILE = "~/.mlflow/credentials"  # read by MLflow's client too

# The HTTP client sends credentials in ~/.netrc to the hosts of redirects, and of URLs for direct downloads and uploads.
# A server that the user has not configured could choose its own host, or one that only this machine can reach.
_SETTINGS_FOR_UNCONFIGURED_SERVERS = {
    "MLFLOW_TRACKING_AUTH": AUTH_NAME,  # with an empty value, the HTTP client would send those in ~/.netrc
    "MLFLOW_ALLOW_HTTP_REDIRECTS": "false",
    "MLFLOW_ENABLE_PROXY_MULTIPART_DOWNLOAD": "false",
    "MLFLOW_ENABLE_PROXY_MULTIPART_UPLOAD": "false",
}

_configured: set[str] = set()
_user_settings: dict[str, str | None] = {}  # values of these variables before hpsearch changed them


class CredentialsWithheldError(StorageError):
    """Tracking server that only a study names, so that this process's credentials are not sent to it."""


def allow_credentials(uri: str) -> None:
    """Allow this process to send its credentials to a tracking server that the user has configured."""
    _configured.add(_normalize(uri))


def is_configured(uri: str) -> bool:
    """Return whether the user has configured the address of a tracking server."""
    return _normalize(uri) in _configured


def is_trusted_uri(uri: str) -> bool:
    """Return whether a tracking server may name folders of this machine: the user's own, not the embedded one."""
    return is_configured(uri) and not is_embedded(uri)


def check_credentials(uri: str) -> None:
    """Check that this process may send its credentials, if it has any, to a tracking server.

    Raises:
        CredentialsWithheldError: the process has credentials, and the user has not configured this address.
    """
    if not is_configured(uri) and (source := find_credentials()) is not None:
        raise CredentialsWithheldError(
            f"tracking server {uri} is named only by the study, so the credentials in {source} are not sent to it; "
            f"to send them, set --tracking-uri {shlex.quote(uri)} or HPSEARCH_TRACKING_URI"
        )


def restrict_client(uri: str) -> None:
    """Set the variables of MLflow's client for a server that the user has not configured; otherwise restore them."""
    if is_configured(uri):
        restore_client()
        return
    for name, value in _SETTINGS_FOR_UNCONFIGURED_SERVERS.items():
        _user_settings.setdefault(name, os.environ.get(name))
        os.environ[name] = value


def restore_client() -> None:
    """Restore the user's values of the variables that `restrict_client` changed."""
    for name, before in _user_settings.items():
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
    _user_settings.clear()


def find_credentials() -> str | None:
    """Return the variable or the file that contains the credentials; None if there are none."""
    if (variable := next((name for name in _VARIABLES if os.environ.get(name) not in _HARMLESS), None)) is not None:
        return variable
    return _FILE if Path(os.path.expanduser(_FILE)).exists() else None  # noqa: PTH111 unlike Path's, it raises nothing


def _normalize(uri: str) -> str:
    return uri.strip().rstrip("/")
