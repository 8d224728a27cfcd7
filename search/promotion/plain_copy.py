"""A copy of an exported program, written by this process, for torch to load instead of a file of someone else.

The static check and torch must see the same content. Their readers differ for crafted files: for names that occur twice
in a JSON object, escapes in JSON within JSON, and members of archives. In the copy, all of these are unambiguous.
"""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import torch

from hpsearch.search.promotion.exported_program import is_nested_json, is_node, open_archive, parse_json

_ROOT = "model"  # the folder in the archive


def replace_by_plain_copy(path: Path) -> None:
    """Replace a `.pt2` file by a copy with the same program, weights and example inputs.

    The copy has no metadata of nodes, which are texts of messages and names of functions that torch would look up.

    Raises:
        Exception: the file is damaged.
    """
    reader, temporary = open_archive(path), path.with_suffix(".tmp")
    with zipfile.ZipFile(temporary, "w") as archive:
        for name in reader.get_file_names():
            archive.writestr(f"{_ROOT}/{name}", _make_plain(name, reader.read_bytes(name)))
    temporary.replace(path)


def _make_plain(name: str, content: bytes) -> bytes:
    if name.endswith(".json"):
        return json.dumps(_simplify(parse_json(content))).encode()
    if name.startswith("data/sample_inputs/"):
        inputs = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        torch.save(inputs, file := io.BytesIO())
        return file.getvalue()
    return content


def _simplify(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        simple = {name: _simplify(item, name) for name, item in value.items()}
        return simple | {"metadata": {}} if is_node(value) else simple
    if isinstance(value, list):
        return [_simplify(item, key) for item in value]
    return json.dumps(_simplify(parse_json(value), key)) if is_nested_json(value, key) else value
