"""Conversion of metric names of other libraries."""

from __future__ import annotations

from collections.abc import Mapping


def remove_prefixes(metrics: Mapping[str, float], part: str) -> dict[str, float]:
    """Remove the prefixes `PART_` and `PART/`, such as `val_`, from metric names; replace any other `/` by `_`."""
    plain = [(name.replace("/", "_"), value) for name, value in metrics.items()]
    return {name.removeprefix(f"{part}_") or name: value for name, value in plain}
