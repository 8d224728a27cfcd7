"""Predicts with a model of the registry in a process that has none of this project's code.

Run by its path, with ``python -I``; it imports nothing of ours, and lets nobody else do so:
``predict_alone.py URI INPUTS.npy OUTPUTS.npy REFUSED...``
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

ROWS = 256  # in one request, about


class Refusing(MetaPathFinder):
    """Refuses to import some packages, installed or not: a model that needs them cannot be served without them."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = set(packages)

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:  # noqa: ARG002 importlib's interface
        """Find nothing, and refuse what is to be refused."""
        if name.partition(".")[0] in self._packages:
            raise ModuleNotFoundError(f"the model needs {name}, which is not there where it is served", name=name)
        return None


def main() -> None:
    """Load the model and write what it predicts."""
    uri, inputs, outputs, *refused = sys.argv[1:]
    sys.meta_path.insert(0, Refusing(refused))
    import mlflow
    import numpy as np

    model = mlflow.pyfunc.load_model(uri)
    x = np.load(inputs, mmap_mode="r")
    # No part of a single row, unless there is one row in all: an exported model may take two at least.
    parts = np.array_split(x, max(-(-len(x) // ROWS), 1))
    np.save(outputs, np.concatenate([np.asarray(model.predict(np.ascontiguousarray(part))) for part in parts]))


if __name__ == "__main__":
    main()
