"""What other libraries call a metric, and what a trial calls it."""

from __future__ import annotations

from collections.abc import Mapping


def bare_names(metrics: Mapping[str, float], part: str) -> dict[str, float]:
    """`PART_NAME` and `PART/NAME` as NAME, and any other `/` as `_`.

    Args:
        metrics: numbers by name.
        part: of the data, such as `val`.
    """
    return {_bare(name, part): value for name, value in metrics.items()}


def _bare(name: str, part: str) -> str:
    name = name.replace("/", "_")
    return name.removeprefix(f"{part}_") or name
