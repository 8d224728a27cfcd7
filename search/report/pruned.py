"""Why trials were pruned, summed up by the epoch that they were judged at."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from hpsearch.search.study.study import StoredStudy
from hpsearch.storage.attributes import PRUNING


def pruned_by_epoch(study: StoredStudy) -> list[dict[str, str]]:
    """Return a row for each epoch, from 1, at which trials were pruned: how many, the cut-offs, the peers."""
    records: dict[tuple[int, int | None], list[dict[str, Any]]] = defaultdict(list)
    for trial in study.trials():
        record = trial.user_attrs.get(PRUNING)
        if record is not None and "epoch" in record and trial.state.is_finished():
            records[record["epoch"], record.get("rung")].append(record)
    return [
        {
            "epoch": str(epoch + 1),
            "rung": "" if rung is None else str(rung),
            "trials": str(len(found)),
            "values": _span([r.get("value") for r in found], ".4f"),
            "cutoffs": _span([r.get("cutoff") for r in found], ".4f"),
            "peers": _span([r.get("peers") for r in found], "d"),
        }
        for (epoch, rung), found in sorted(records.items(), key=lambda item: (item[0][0], item[0][1] or 0))
    ]


def _span(values: Sequence[object], form: str) -> str:
    """Return ``0.91 to 0.95``; what is no finite number (those are written as text) is left out."""
    numbers = sorted(v for v in values if isinstance(v, int | float))
    if not numbers:
        return ""
    low, high = (format(number, form) for number in (numbers[0], numbers[-1]))
    return low if low == high else f"{low} to {high}"
