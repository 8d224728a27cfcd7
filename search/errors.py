"""Errors that a user can fix: each message is one line with the setting, its value and the remedy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.objectives.errors import suggest_names as format_hint
from hpsearch.storage.errors import StorageError


class SearchError(Exception):
    """An error that the user can correct. The message is one line."""


USER_ERRORS = (SearchError, StorageError, ObjectiveError)


@contextmanager
def as_search_error(prefix: str = "", kind: type[Exception] = ValueError) -> Iterator[None]:
    """Convert exceptions of type `kind` to a SearchError with the message ``PREFIX MESSAGE``."""
    try:
        yield
    except kind as error:
        raise SearchError(f"{prefix}{error}") from None


def suggest_names(name: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown name: the most similar known name, else a list of the known names."""
    return f"; {format_hint(name, sorted(known))}"
