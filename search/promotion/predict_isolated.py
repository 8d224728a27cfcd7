"""Predict with a registered model in a process without this project's code.

``serve-check`` runs this file by its path, with ``python -I``:
``predict_isolated.py MODEL INPUTS OUTPUTS.pt SEED BLOCKED...``. MODEL is the folder of a model in MLflow's format,
INPUTS a folder with one .npz file of tensors per batch. The process cannot import the packages that the arguments
BLOCKED name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

SINGLE_INPUT_KEY = "="  # name in the .npz file of a batch that is a single tensor
MAX_ROWS = 256  # approximate number of rows per request to the model


class ImportBlocker(MetaPathFinder):
    """Import hook that rejects packages even if they are installed, because a model server may not have them."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = set(packages)

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:  # noqa: ARG002 importlib's interface
        """Raise ModuleNotFoundError for a blocked package; return None for others, which the next finders import."""
        if name.partition(".")[0] in self._packages:
            raise ModuleNotFoundError(f"the model imports {name}, which a model server may lack", name=name)
        return None


def main() -> None:
    """Load the model and write its predictions to the output file."""
    folder, inputs, outputs, seed, *blocked = sys.argv[1:]
    sys.meta_path.insert(0, ImportBlocker(blocked))
    import mlflow
    import numpy as np
    import torch

    files = sorted(Path(inputs).glob("*.npz"))
    with np.load(files[0]) as first:
        has_single_input = list(first) == [SINGLE_INPUT_KEY]
    signature = mlflow.models.get_model_info(folder).signature
    predict = (
        load_single_input_predictor(folder)
        if has_single_input and signature is not None and signature.outputs is not None
        else load_multi_input_predictor(folder)
    )
    predictions = []
    torch.manual_seed(int(seed))  # the seed of the evaluation in training, for models that use random numbers
    for file in files:
        with np.load(file) as parts:
            predictions.append(predict([parts[name] for name in parts]))
    torch.save(predictions, outputs)


def load_single_input_predictor(folder: str) -> Callable[[list[Any]], Any]:
    """Return a function that predicts with ``mlflow.pyfunc`` from a single array, as MLflow's model server does."""
    import mlflow
    import numpy as np
    import torch

    # With warnings, MLflow checks the requirements, and this check imports each name in the file.
    model = mlflow.pyfunc.load_model(folder, suppress_warnings=True)

    def predict(arrays: list[Any]) -> Any:
        # Parts of similar size, because an exported model may require at least two rows.
        parts = np.array_split(arrays[0], max(-(-len(arrays[0]) // MAX_ROWS), 1))
        return torch.from_numpy(np.concatenate([np.asarray(model.predict(part)) for part in parts]))

    return predict


def load_multi_input_predictor(folder: str) -> Callable[[list[Any]], Any]:
    """Return a function that predicts from a list of arrays, for models with several inputs or outputs.

    ``mlflow.pyfunc`` does not support these models.
    """
    import mlflow.pytorch
    import torch

    model = mlflow.pytorch.load_model(folder)

    def predict(arrays: list[Any]) -> Any:
        with torch.no_grad():
            return model(*map(torch.from_numpy, arrays))

    return predict


if __name__ == "__main__":
    main()
