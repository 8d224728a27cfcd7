"""Modules that are found by lying in a package: a file more needs no edit elsewhere."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from types import ModuleType


def load_modules(package: str, path: Iterable[str]) -> dict[str, ModuleType]:
    """Import every module of a package, and return them by their names there, in the order of these.

    Args:
        package: its dotted name.
        path: its `__path__`.
    """
    names = sorted(found.name for found in pkgutil.iter_modules(path))
    return {name: importlib.import_module(f"{package}.{name}") for name in names}
