"""The table of the packages."""

from __future__ import annotations

import inspect
import re

from docs.packages import PACKAGES, ROOT, find_package_imports, list_modules
from docs.tools.markdown import table


def make_packages_table() -> str:
    """Return a row per package: name, description, and the packages of the same folder that it imports."""
    known, imports = list_modules(), find_package_imports()
    rows = []
    for name in PACKAGES:
        path = known[name].relative_to(ROOT)
        text = inspect.cleandoc(re.search(r'"""(.*?)"""', known[name].read_text(), re.DOTALL)[1])  # type: ignore[index]
        folder = name.split(".")[0]
        targets = [t for t in PACKAGES if t in imports[name] and t.split(".")[0] == folder and t != folder]
        names = ", ".join(t.removeprefix("objectives.training.").removeprefix(f"{folder}.") for t in targets)
        location = path.parent if path.name == "__init__.py" else path
        rows.append((f"[`{name}`](../{location})", text.partition("\n\n")[0], names))
    return table(("package", "content", "imports"), rows)
