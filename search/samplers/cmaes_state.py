"""Loading of the state of CMA-ES, which Optuna stores as a pickle in the system attributes of trials.

Anyone who can write to the database, or the author of a backup, can store another pickle. A pickle runs code, and even
a forged dtype of NumPy corrupts the memory. So the pickle creates only records of its calls here, and the optimizer is
built from the checked records.
"""

from __future__ import annotations

import io
import pickle
from typing import Any, ClassVar

from hpsearch.search.errors import SearchError


def load_state(state: str, trial_number: int) -> Any:
    """Return the optimizer, an object of the package cmaes, from its state.

    Args:
        state: pickle of the optimizer, in hexadecimal.
        trial_number: number of the trial that has the state, for the message.

    Raises:
        SearchError: the pickle is damaged, or contains other types.
    """
    try:
        record = _RecordUnpickler(io.BytesIO(bytes.fromhex(state))).load()
        if not isinstance(record, _OptimizerRecord):
            raise TypeError(f"a value of the type {type(record).__name__} is no optimizer")
        return record.build()
    except Exception as error:  # a damaged pickle can raise any exception
        raise SearchError(
            f"trial {trial_number}: the stored state of the sampler cmaes is rejected ({error}); "
            "as the database owner, delete the system attributes of this trial whose names begin with 'cma'"
        ) from None


class _Record:
    """Record of a call in the pickle."""

    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def build(self) -> Any:
        """Return the value that the call would return."""
        raise NotImplementedError


class _DtypeRecord(_Record):
    def build(self) -> Any:
        import numpy as np

        name = self.arguments[0]
        if name not in {"f8", "i8", "b1"}:
            raise ValueError(f"the dtype {name!r} is not allowed")
        return np.dtype(name).newbyteorder("<")  # of each machine on which torch runs


class _ArrayRecord(_Record):
    def build(self) -> Any:
        import numpy as np

        _version, shape, dtype, is_fortran, data = self.state
        return np.frombuffer(data, _build_value(dtype)).reshape(shape, order="F" if is_fortran else "C").copy()


class _ScalarRecord(_Record):
    def build(self) -> Any:
        import numpy as np

        dtype, data = self.arguments
        return np.frombuffer(data, _build_value(dtype))[0]


class _OptimizerRecord(_Record):
    name: ClassVar[str]

    def build(self) -> Any:
        import cmaes

        optimizer = object.__new__(getattr(cmaes, self.name))
        state = {str(key): _build_value(value) for key, value in self.state.items()}
        if hasattr(optimizer, "__setstate__"):
            optimizer.__setstate__(state)
        else:
            vars(optimizer).update(state)
        return optimizer


class _CMARecord(_OptimizerRecord):
    name = "CMA"


class _SepCMARecord(_OptimizerRecord):
    name = "SepCMA"


class _CMAwMRecord(_OptimizerRecord):
    name = "CMAwM"


class _NameRecord(_Record):
    """Record of a class that is an argument of another call."""


_RECORDS: dict[tuple[str, str], type[_Record]] = {
    ("cmaes._cma", "CMA"): _CMARecord,
    ("cmaes._sepcma", "SepCMA"): _SepCMARecord,
    ("cmaes._cmawm", "CMAwM"): _CMAwMRecord,
    ("numpy", "ndarray"): _NameRecord,
    ("numpy", "dtype"): _DtypeRecord,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _ArrayRecord for core in ("_core", "core")},
    **{(f"numpy.{core}.multiarray", "scalar"): _ScalarRecord for core in ("_core", "core")},
}


class _RecordUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type[_Record]:
        if (module, name) not in _RECORDS:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed")
        return _RECORDS[module, name]


def _build_value(value: Any) -> Any:
    if isinstance(value, _Record):
        return value.build()
    if value is None or isinstance(value, (bool, int, float)):
        return value
    raise ValueError(f"a value of the type {type(value).__name__} is not allowed")
