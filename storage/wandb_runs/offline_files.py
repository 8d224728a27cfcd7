"""What stands in the files of runs that Weights & Biases keeps on this machine, in its offline mode above all.

The package has no reader of them for Python: they are logs in LevelDB's format, of `wandb_internal_pb2.Record`. A file
whose process died ends in the middle of a record.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HEADER, _BLOCK = 7, 32768
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def records(path: Path) -> Iterator[Any]:
    """Yield the records of a run's file, up to where it is torn."""
    from wandb.proto.wandb_internal_pb2 import Record

    for data in _chunks(path.read_bytes()):
        yield Record.FromString(data)


def _chunks(data: bytes) -> Iterator[bytes]:
    """Yield what LevelDB calls records, put together from their parts."""
    at, parts = _HEADER, b""  # the file begins with a header of its own, of the same size
    while at + _HEADER <= len(data):
        if _BLOCK - at % _BLOCK < _HEADER:  # the rest of a block that has no room for a part
            at += _BLOCK - at % _BLOCK
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        part = data[at + _HEADER : at + _HEADER + size]
        if kind not in {_FULL, _FIRST, _MIDDLE, _LAST} or len(part) < size:
            return
        at += _HEADER + size
        parts = part if kind in {_FULL, _FIRST} else parts + part
        if kind in {_FULL, _LAST}:
            yield parts
            parts = b""


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a run's history, each with its step as `_step`."""
    for record in records(path):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            row = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}
            yield {"_step": record.history.step.num, **row}


def steps_of(folder: Path, run: str) -> set[int]:
    """Return the steps of a run that files have which wait for `wandb sync`."""
    return {int(row["_step"]) for path in folder.glob(f"offline-run-*/run-{run}.wandb") for row in rows(path)}
