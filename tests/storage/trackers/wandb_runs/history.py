"""The history of a run, read from its offline file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpsearch.storage.trackers.wandb_runs.process_main import read_records


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a run's history, each with its step as `_step`."""
    for record in read_records(path):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            row = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}
            assert row.get("_step", record.history.step.num) == record.history.step.num
            yield {**row, "_step": record.history.step.num}
