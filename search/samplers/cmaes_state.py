"""Loading of the state of CMA-ES, which Optuna stores as a pickle in the system attributes of trials.

Anyone who can write to the database, or the author of a backup, can store another pickle, which could run code.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

from hpsearch.search.errors import SearchError

_TYPES = {
    *(("cmaes._cma", "CMA"), ("cmaes._sepcma", "SepCMA"), ("cmaes._cmawm", "CMAwM")),
    *(("numpy", "ndarray"), ("numpy", "dtype")),
    *((f"numpy.{core}.multiarray", name) for core in ("_core", "core") for name in ("_reconstruct", "scalar")),
}


class _StateUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _TYPES:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed")
        return super().find_class(module, name)


def load_state(state: str, trial_number: int) -> Any:
    """Return the optimizer, an object of the package cmaes, from its state.

    Args:
        state: pickle of the optimizer, in hexadecimal.
        trial_number: number of the trial that has the state, for the message.

    Raises:
        SearchError: the text is not the state of an optimizer.
    """
    try:
        return _StateUnpickler(io.BytesIO(bytes.fromhex(state))).load()
    except Exception as error:  # a damaged pickle can raise any exception
        raise SearchError(
            f"trial {trial_number}: the stored state of the sampler cmaes is rejected ({error}); "
            "as the database owner, delete the system attributes of this trial whose names begin with 'cma'"
        ) from None
