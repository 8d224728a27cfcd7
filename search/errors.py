"""What a user can mend: each error is one line that names the setting, the value and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from hpsearch.objectives.errors import ObjectiveError
from hpsearch.storage.errors import StorageError


class SearchError(Exception):
    """A request the service refuses; the message is one line for the user."""


USER_ERRORS = (SearchError, StorageError, ObjectiveError)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the known names closest to `name`, else the list of all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if close:
        return "; did you mean " + " or ".join(repr(c) for c in close) + "?"
    return "; known: " + ", ".join(names)
