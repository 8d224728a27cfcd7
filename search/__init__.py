"""The service: study definition, worker loop, fleets, report, Python API and command line.

``from search import Study`` is all that a notebook or a program needs; what is large is loaded when it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from objectives.errors import ObjectiveError
    from search.api.study import Study
    from search.errors import SearchError
    from storage.errors import StorageError

__all__ = ["ObjectiveError", "SearchError", "StorageError", "Study"]

_MODULES = {
    "ObjectiveError": "objectives.errors",
    "SearchError": "search.errors",
    "StorageError": "storage.errors",
    "Study": "search.api.study",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
