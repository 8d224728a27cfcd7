"""Addresses of services; database URLs have one spelling inside and no password outside."""

from __future__ import annotations

import re
from typing import TypedDict
from urllib.parse import quote, unquote, urlsplit

from hpsearch.storage.errors import StorageError

DRIVER = "postgresql+psycopg2"

_POSTGRES = re.compile(r"postgres(?:ql)?(?:\+\w+)?://")
_PASSWORD = re.compile(r"(://[^:/@?]*):.*@", re.DOTALL)
_PASSWORD_IN_QUERY = re.compile(r"([?&](?:ssl)?password=)[^&]*", re.IGNORECASE)


class Addresses(TypedDict, total=False):
    """Where studies, runs and checkpoints are kept; None is the study's own, or the embedded stack's.

    Attributes:
        storage_url: Postgres of the studies.
        tracking_uri: MLflow server.
        checkpoint_url: folder or fsspec URL of the checkpoints.
        home: folder of the embedded stack, run directories and logs.
    """

    storage_url: str | None
    tracking_uri: str | None
    checkpoint_url: str | None
    home: str | None


def normalise(url: str, *, setting: str = "--storage-url") -> str:
    """Return the URL as SQLAlchemy and psycopg2 need it.

    `postgres://` and `postgresql://` become `postgresql+psycopg2://`: since SQLAlchemy 2.1 the bare form means
    another driver.

    Raises:
        StorageError: The URL is not one of Postgres, cannot be read, or names no database.
    """
    url = url.strip()
    example = "give postgresql://USER:PASSWORD@HOST:5432/DATABASE"
    if not url:
        raise StorageError(f"{setting} is empty: {example}, or leave it out to use the embedded Postgres")
    if not _POSTGRES.match(url):
        raise StorageError(f"{setting} {redact(url)!r} is not a Postgres URL: {example}")
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        parsed = make_url(url)
        if "@" in (parsed.database or ""):
            raise ValueError("the password was cut at its @")
    except (ArgumentError, ValueError):
        # `from None`: the text of the cause holds the URL with its password.
        raise StorageError(
            f"{setting} {redact(url)!r} cannot be read: {example}, with @ : / % in the password written as %40 "
            "and so on"
        ) from None
    if not parsed.database and "dbname" not in parsed.query and "service" not in parsed.query:
        raise StorageError(f"{setting} {redact(url)!r} names no database: {example}")
    return parsed.set(drivername=DRIVER).render_as_string(hide_password=False)


def redact(url: str) -> str:
    """Return the URL (or any text with one in it) without passwords, for messages and logs."""
    return _PASSWORD_IN_QUERY.sub(r"\1***", _PASSWORD.sub(r"\1:***@", url))


def without_secret(text: str, url: str) -> str:
    """Return `text`, which may quote `url` or a part of it, without the password of `url`."""
    password = urlsplit(url).password or ""
    for secret in {password, unquote(password)} - {""}:
        text = text.replace(secret, "***")
    return redact(text)


def build(*, user: str, password: str, host: str, port: int, database: str, query: str = "") -> str:
    """Return a normalised URL from its parts; `query` is appended as it is."""
    where = f"[{host}]" if ":" in host else host
    suffix = f"?{query}" if query else ""
    return f"{DRIVER}://{quote(user, safe='')}:{quote(password, safe='')}@{where}:{port}/{database}{suffix}"
