"""What settings that are asked for have otherwise than the stored ones."""

from __future__ import annotations

from typing import Any


def differences(stored: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Return a line for each setting of `wanted` that `stored` has otherwise: ``"n_trials: 24 -> 50"``."""
    lines = []
    for key in sorted(wanted):
        before, after = stored.get(key), wanted[key]
        # Options of the same sampler or pruner.
        if isinstance(before, dict) and isinstance(after, dict) and "name" in after and before["name"] == after["name"]:
            lines += [f"{key}.{line}" for line in differences(before, after)]
        elif before != after or (key == "directions" and before and list(before) != list(after)):  # the order matters
            lines.append(f"{key}: {_told(before)} -> {_told(after)}")
    return lines


def _told(value: Any) -> str:
    if isinstance(value, dict) and "name" not in value:
        return ", ".join(f"{metric} {said}" for metric, said in value.items())
    return repr(value)
