"""The rooms, as a table."""

from __future__ import annotations

import inspect
import re

from docs.rooms import ROOMS, ROOT, modules, room_arrows
from docs.tools.markdown import table


def rooms() -> str:
    """Every room: what it holds and what it imports of its own package."""
    known, arrows = modules(), room_arrows()
    rows = []
    for room in ROOMS:
        path = known[room].relative_to(ROOT)
        words = inspect.cleandoc(re.search(r'"""(.*?)"""', known[room].read_text(), re.DOTALL)[1])  # type: ignore[index]
        package = room.split(".")[0]
        targets = [t for t in ROOMS if t in arrows[room] and t.split(".")[0] == package and t != package]
        names = ", ".join(t.removeprefix("objectives.training.").removeprefix(f"{package}.") for t in targets)
        folder = path.parent if path.name == "__init__.py" else path
        rows.append((f"[`{room}`](../{folder})", words.partition("\n\n")[0], names))
    return table(("room", "what it holds", "imports"), rows)
