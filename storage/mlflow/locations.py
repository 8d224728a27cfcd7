"""Which artifact locations of a tracking server may be used, because a server can name any folder of this machine.

The address of the server may come from a study, and every worker's database role can write it. MLflow's client reads
and writes the location of a run itself if the location is a path or a `file:` URL. The embedded server never names such
a location.
"""

from __future__ import annotations

import re
import shlex
from typing import Any
from urllib.parse import SplitResult, urlsplit

from hpsearch.storage.errors import StorageError
from hpsearch.storage.hdfs_library import HDFS_SCHEMES, load_hdfs_library
from hpsearch.storage.mlflow.credentials import find_credentials, is_configured, is_trusted_uri
from hpsearch.storage.web.token import find_token

_REMOTE = ("s3", "r2", "b2", "gs", "wasbs", "abfs", "abfss", "hdfs", "viewfs")
# Schemes with the store's host in the location. MLflow sends the credentials of the process to this host.
_AZURE = r"core\.(windows\.net|chinacloudapi\.cn|usgovcloudapi\.net)"
_STORE_HOSTS = {
    "wasbs": rf"[\w$-]+@[\w-]+\.blob\.{_AZURE}",
    "abfs": rf"[\w$%-]+@([\w-]+(\.privatelink)?\.dfs\.{_AZURE}|[\w-]+\.z\d+\.dfs\.storage\.azure\.net"
    r"|([\w-]+-)?onelake\.dfs\.fabric\.microsoft\.com)(:443)?",
    "r2": r"[\w.-]+@\w+(\.(eu|fedramp))?\.r2\.cloudflarestorage\.com",
    "b2": r"[\w.-]+@s3\.[\w-]+\.backblazeb2\.com",
}
_STORE_HOSTS["abfss"] = _STORE_HOSTS["abfs"]
_REFERENCES = {"runs", "models"}  # MLflow resolves them to other locations, which are then checked
_PROXIED = ("mlflow-artifacts", "http", "https")
_SCHEMES = (*_REMOTE, *_PROXIED)
_ID = re.compile(r"(m-)?[0-9a-f]{32}")
# MLflow stores each artifact in the folder of a run, model or trace: 7/0123456789abcdef0123456789abcdef/artifacts/x.
ARTIFACT_PATH = re.compile(r"(^|/)(m-|tr-)?[0-9a-f]{32}/artifacts/.")
OWNER_PATH = re.compile(r"(^|/)(m-|tr-)?[0-9a-f]{32}(/|$)")  # the folder of a run, model or trace, or a path below it

_restricted: set[str] = set()  # addresses of tracking servers


class LocationRejectedError(StorageError):
    """Artifact location that the tracking server must not name."""


def check_id(owner_id: str) -> str:
    """Return the id of a run or a logged model, which becomes a part of paths.

    Raises:
        LocationRejectedError: the id has another format than MLflow's.
    """
    if not _ID.fullmatch(owner_id):
        raise LocationRejectedError(f"{owner_id!r} is not the id of an MLflow run or model; check the tracking server")
    return owner_id


def check_removable(location: str, uri: str) -> None:
    """Check that files may be deleted at a location, which must not be a folder of this machine.

    Args:
        location: the artifact location that the tracking server returned.
        uri: the address of the tracking server.

    Raises:
        LocationRejectedError: the location is a local folder or on another server, has a query or a fragment, is an
            object store that a server names which the user has not configured, or is at an unknown host.
    """
    parts = _split(location)
    if parts.scheme in _PROXIED and _is_at_server(parts, uri) and ".." not in location.split("/"):
        return
    if parts.scheme not in _REMOTE or ".." in location.split("/"):
        raise LocationRejectedError(
            f"artifact location {location} of {uri} is not a remote store, so it is not used; "
            "start the MLflow server with --artifacts-destination"
        )
    if not is_configured(uri) and find_token(uri) is None:  # neither configured nor a running embedded server
        raise LocationRejectedError(
            f"artifact location {location} of {uri} is not used, because only the study names this MLflow server; if "
            f"you trust it, give --tracking-uri {shlex.quote(uri)}"
        )
    _check_store(parts, location, uri)


def _check_store(parts: SplitResult, location: str, uri: str) -> None:
    """Reject an object store at an unknown host, to which MLflow would send the credentials of this process."""
    if parts.scheme in _STORE_HOSTS and not is_in_known_store(location):
        raise LocationRejectedError(
            f"artifact location {location} of {uri} is at an unknown host, which would receive the credentials of "
            "this process; check the tracking server, or move the artifacts to a host of this kind of store"
        )


def is_in_known_store(location: str) -> bool:
    """Return whether a location is in a remote store that is not an MLflow server, at a host of this kind of store."""
    parts = _split(location)
    hosts = _STORE_HOSTS.get(parts.scheme, ".*")
    return parts.scheme in _REMOTE and re.fullmatch(hosts, parts.netloc, re.ASCII | re.IGNORECASE) is not None


def _split(location: str) -> SplitResult:
    """Return the parts of a location; an invalid one has no parts.

    MLflow's clients of object stores ignore a query or a fragment, and with it the folders in it.

    Raises:
        LocationRejectedError: the location has a query or a fragment.
    """
    if "?" in location or "#" in location:
        raise LocationRejectedError(f"artifact location {location} contains '?' or '#'; move the artifacts")
    return _parse(location)


def _parse(location: str) -> SplitResult:
    try:
        return urlsplit(location)
    except ValueError:  # an invalid host
        return urlsplit("")


def _is_at_server(parts: SplitResult, uri: str) -> bool:
    """Return whether requests for a proxied location go to the tracking server."""
    server = urlsplit(uri)
    if not parts.netloc:  # MLflow inserts the host of the server, but only for this scheme
        return parts.scheme == "mlflow-artifacts" and not parts.path.startswith("//")
    is_same = parts.netloc == server.netloc and parts.scheme in {"mlflow-artifacts", server.scheme}
    return is_same and not parts.path.startswith("//")


def check_location(location: str, uri: str) -> None:
    """Check that files may be read and written at a location; a trusted server may name local folders.

    MLflow's client sends the credentials of the tracking server to the host of a proxied location.

    Raises:
        LocationRejectedError: the server is not trusted, and the location is local or on another server; the location
            is proxied by another server, and this process has credentials; or it is in a store at an unknown host.
    """
    if not is_trusted_uri(uri):
        check_removable(location, uri)
        return
    parts = _parse(location)  # in lower case and without spaces before it, as MLflow reads the scheme
    if parts.scheme in _SCHEMES:
        parts = _split(location)
    _check_store(parts, location, uri)
    if parts.scheme in _PROXIED and not _is_at_server(parts, uri) and (source := find_credentials()) is not None:
        raise LocationRejectedError(
            f"artifact location {location} is on another server than {uri}, so the credentials in {source} are not "
            "sent to it; move the artifacts, or unset the credentials"
        )


def restrict_artifact_locations(uri: str) -> None:
    """Let MLflow's client of a tracking server check the locations of runs and models; see `check_location`."""
    from mlflow.store.artifact import artifact_repository_registry as registry

    if not _restricted:
        for scheme, create in registry.get_registered_artifact_repositories().items():
            registry._artifact_repository_registry.register(scheme, _check_before(create))
    _restricted.add(uri.rstrip("/"))


def _check_before(create: Any) -> Any:
    """Return a factory of artifact repositories that checks the location, if a restricted server named it."""

    def create_checked(artifact_uri: str, tracking_uri: str | None = None, registry_uri: str | None = None) -> Any:
        if tracking_uri is not None and (uri := tracking_uri.rstrip("/")) in _restricted:
            if (parts := _parse(artifact_uri)).scheme not in _REFERENCES:
                check_location(artifact_uri, uri)
            elif parts.netloc:  # MLflow would use the user's login for Databricks
                named = f"artifact location {artifact_uri} of {uri}"
                raise LocationRejectedError(f"{named} refers to a model on another server; register it at {uri}")
        if _parse(artifact_uri).scheme in HDFS_SCHEMES:
            load_hdfs_library()
        return create(artifact_uri, tracking_uri=tracking_uri, registry_uri=registry_uri)

    return create_checked
