"""What a failed connection means, said in one line.

libpq gives a failed connection no error code, so its text is read: libpq's own, Postgres' or PgBouncer's.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hpsearch.storage.database.retry import may_pass
from hpsearch.storage.errors import AwayError, StorageError
from hpsearch.storage.urls import redact

if TYPE_CHECKING:
    from sqlalchemy.engine import URL

# A name that is misspelt; one that cannot be looked up now is another thing.
_UNKNOWN = re.compile("name or service not known|nodename nor servname", re.IGNORECASE)

# The first pattern found in the text decides.
_MEANINGS = (
    (
        "could not translate host name|name or service not known|nodename nor servname",
        "the host {host!r} is not known: check its spelling and the network",
    ),
    (
        'database ".*" does not exist|no such database',
        "there is no database {database!r} on {where}: create it, or correct the name in the URL",
    ),
    (
        'role ".*" does not exist',
        "there is no user {user!r} on {where}: create it, or correct the URL",
    ),
    (
        "password authentication failed|no password supplied|authentication failed|no such user",
        "Postgres at {where} refused the password of user {user!r}: correct the URL",
    ),
    (
        r"no pg_hba\.conf entry",
        "Postgres at {where} does not let user {user!r} in from here: allow it in pg_hba.conf",
    ),
    (
        "permission denied for database",
        "user {user!r} may not connect to database {database!r}: GRANT CONNECT ON DATABASE {database} TO {user}",
    ),
    (
        "too many clients|remaining connection slots|too many connections",
        "Postgres at {where} has no free connection: raise max_connections or start fewer workers",
    ),
    (
        "server closed the connection unexpectedly|expected authentication request|connection reset by peer"
        "|invalid response to ssl negotiation|unsupported frontend protocol",
        "what answers at {where} is not a Postgres server: check host and port",
    ),
    (
        "timeout expired|timed out",
        "{where} does not answer in time: check host and port, firewalls, and that it is a Postgres server",
    ),
    (
        "connection refused|no route to host|network is unreachable|no such file or directory",
        "nothing listens at {where}: check host and port, and that Postgres runs there",
    ),
)


def connection_error(error: Exception, url: URL, *, setting: str) -> StorageError:
    """Return the error for the user that says why `url` could not be connected to: `AwayError` where that may pass.

    Args:
        error: What psycopg2 or SQLAlchemy raised.
        url: The parsed URL.
        setting: Where the user gave the URL.
    """
    text = redact(" ".join(str(getattr(error, "orig", None) or error).split()))
    meaning = next((said for pattern, said in _MEANINGS if re.search(pattern, text, re.IGNORECASE)), None)
    said = (meaning or "cannot connect: {text}").format(
        where=f"{url.host or 'the local socket'}:{url.port or 5432}",
        host=url.host,
        user=url.username,
        database=url.database,
        text=text,
    )
    kind = AwayError if may_pass(text) and not _UNKNOWN.search(text) else StorageError
    return kind(f"{setting} {redact(url.render_as_string())}: {said}")
