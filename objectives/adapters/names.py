"""What other libraries call a metric, and what a trial calls it."""

from __future__ import annotations

from collections.abc import Mapping


def bare_names(metrics: Mapping[str, float], part: str) -> dict[str, float]:
    """Name `PART_NAME` and `PART/NAME` of a part of the data, such as `val`, as NAME; any other `/` becomes `_`."""
    plain = [(name.replace("/", "_"), value) for name, value in metrics.items()]
    return {name.removeprefix(f"{part}_") or name: value for name, value in plain}
