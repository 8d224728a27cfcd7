"""URLs of services: normalisation of database URLs, and removal of passwords from messages."""

from __future__ import annotations

import re
from typing import TypedDict
from urllib.parse import quote, unquote, urlsplit

from hpsearch.redaction import redact
from hpsearch.storage.errors import StorageError

DRIVER = "postgresql+psycopg2"

_POSTGRES = re.compile(r"postgres(?:ql)?(?:\+\w+)?://")


class Addresses(TypedDict, total=False):
    """Locations of studies, runs and checkpoints.

    None means the location that is stored with the study, or else the location of the embedded stack.

    Attributes:
        storage_url: Postgres URL of the studies.
        tracking_uri: URL of the MLflow server.
        checkpoint_url: folder or fsspec URL of the checkpoints.
        home: folder of the embedded stack, run folders and logs.
    """

    storage_url: str | None
    tracking_uri: str | None
    checkpoint_url: str | None
    home: str | None


def normalise_url(url: str, *, setting: str = "--storage-url") -> str:
    """Return the URL in the form that SQLAlchemy and psycopg2 need.

    `postgres://` and `postgresql://` become `postgresql+psycopg2://`, because SQLAlchemy 2.1 and later select another
    driver for URLs without a driver name.

    Raises:
        StorageError: the URL is not a Postgres URL, cannot be parsed, or contains no database name.
    """
    example = "give postgresql://USER@HOST:5432/DATABASE, and the password in PGPASSWORD"
    if not isinstance(url, str):
        raise StorageError(f"{setting} {url!r} is not text; {example}")
    url = url.strip()
    if not url:
        raise StorageError(f"{setting} is empty; {example}, or omit the setting to use the embedded Postgres")
    if not _POSTGRES.match(url):
        raise StorageError(f"{setting} {redact(url)!r} is not a Postgres URL; {example}")
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        parsed = make_url(url)
        if "@" in (parsed.database or ""):
            raise ValueError("the password is cut at its @")
    except (ArgumentError, ValueError):
        # `from None`: the text of the cause contains the password.
        raise StorageError(
            f"{setting} {redact(url)!r} cannot be parsed; {example}, with @ : / % in the password written as %40 etc."
        ) from None
    if not parsed.database and "dbname" not in parsed.query and "service" not in parsed.query:
        raise StorageError(f"{setting} {redact(url)!r} contains no database name; {example}")
    return parsed.set(drivername=DRIVER).render_as_string(hide_password=False)


def redact_password(text: str, url: str) -> str:
    """Return `text` without the password of `url`; for messages that may quote parts of the URL."""
    password = urlsplit(url).password or ""
    for secret in {password, unquote(password)} - {""}:
        text = text.replace(secret, "***")
    return redact(text)


def build_url(*, user: str, password: str, host: str, port: int, database: str, query: str = "") -> str:
    """Return a database URL in the form of `normalise_url`; the query string `query` is appended unchanged.

    `host` is a name, an address, or the absolute path of the folder with the server's socket.
    """
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if host.startswith("/"):
        address, query = "", f"host={quote(host)}&port={port}{'&' if query else ''}{query}"
    suffix = f"?{query}" if query else ""
    return f"{DRIVER}://{quote(user, safe='')}:{quote(password, safe='')}@{address}/{database}{suffix}"
