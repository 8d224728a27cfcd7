"""What a user can mend: each error is one line that names the setting, the value and the remedy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.errors import nearest as name_nearest
from hpsearch.storage.errors import StorageError


class SearchError(Exception):
    """A request the service refuses; the message is one line for the user."""


USER_ERRORS = (SearchError, StorageError, ObjectiveError)


@contextmanager
def as_search_error(prefix: str = "", kind: type[Exception] = ValueError) -> Iterator[None]:
    """Raise errors of a kind as a SearchError with the same message after a prefix."""
    try:
        yield
    except kind as error:
        raise SearchError(f"{prefix}{error}") from None


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the known names closest to `name`, else the list of all of them."""
    return f"; {name_nearest(name, sorted(known))}"
