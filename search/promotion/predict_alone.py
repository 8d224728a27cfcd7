"""Predicts with a model of the registry in a process that has none of this project's code.

Run by its path, with ``python -I``; it imports nothing of ours, and lets nobody else do so:
``predict_alone.py URI INPUTS OUTPUTS.pt SEED REFUSED...``; INPUTS is a folder of batches, each an .npz of its tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

SINGLE_INPUT_KEY = "="  # what a batch that is one tensor is called
MAX_ROWS = 256  # in one request, about


class ImportBlocker(MetaPathFinder):
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
    uri, inputs, outputs, seed, *refused = sys.argv[1:]
    sys.meta_path.insert(0, ImportBlocker(refused))
    import mlflow
    import numpy as np
    import torch

    files = sorted(Path(inputs).glob("*.npz"))
    with np.load(files[0]) as first:
        alone = list(first) == [SINGLE_INPUT_KEY]
    told = mlflow.models.get_model_info(uri).signature
    predict = (
        load_single_input_predictor(uri)
        if alone and told is not None and told.outputs is not None
        else load_multi_input_predictor(uri)
    )
    predictions = []
    torch.manual_seed(int(seed))  # a model may draw at random, as it did when it was judged
    for file in files:
        with np.load(file) as parts:
            predictions.append(predict([parts[name] for name in parts]))
    torch.save(predictions, outputs)


def load_single_input_predictor(uri: str) -> Callable[[list[Any]], Any]:
    """Return what predicts from one array, as a service does that knows MLflow alone."""
    import mlflow
    import numpy as np
    import torch

    model = mlflow.pyfunc.load_model(uri)

    def predict(arrays: list[Any]) -> Any:
        # No part of a single row, unless there is one row in all: an exported model may take two at least.
        parts = np.array_split(arrays[0], max(-(-len(arrays[0]) // MAX_ROWS), 1))
        return torch.from_numpy(np.concatenate([np.asarray(model.predict(part)) for part in parts]))

    return predict


def load_multi_input_predictor(uri: str) -> Callable[[list[Any]], Any]:
    """Return what takes several arrays, in their order, or gives several outputs: torch does, MLflow's own way not."""
    import mlflow.pytorch
    import torch

    model = mlflow.pytorch.load_model(uri)

    def predict(arrays: list[Any]) -> Any:
        with torch.no_grad():
            return model(*map(torch.from_numpy, arrays))

    return predict


if __name__ == "__main__":
    main()
