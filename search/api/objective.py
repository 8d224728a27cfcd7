"""An objective as a notebook names it: a reference, or the class itself, which workers have to find in a file."""

from __future__ import annotations

import inspect
import sys

from hpsearch.objectives.base import BaseObjective
from hpsearch.objectives.loading import BUILTIN
from hpsearch.search.errors import SearchError


def reference_of(objective: str | type[BaseObjective]) -> str:
    """Return the reference by which workers load an objective.

    Args:
        objective: a reference, which is returned; or a class of a file or an installed module.

    Raises:
        SearchError: the class is of a notebook's cell or a running script, where no worker finds it.
    """
    if isinstance(objective, str):
        return objective
    name, module = objective.__name__, objective.__module__
    if module == "__main__" or getattr(sys.modules.get(module), name, None) is not objective:
        file = f"{name.lower()}.py"
        raise SearchError(
            f"class {name} is defined in {module}, where no worker finds it: write it to a file (in a notebook: a "
            f"cell that begins with %%writefile {file}) and give {file!r}"
        )
    reference = f"{module}:{name}"
    if "." in module:
        return {known: short for short, known in BUILTIN.items()}.get(reference, reference)
    return f"{inspect.getsourcefile(objective)}:{name}"  # good from any folder
