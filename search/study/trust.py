"""Which objective files a command may import: every worker's database role can write the reference in a study."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpsearch.objectives.loading import BUILTIN, is_file_reference, locate_source, locate_sources
from hpsearch.search.console import format_command
from hpsearch.search.errors import SearchError
from hpsearch.storage.attributes import RESTORED, SOURCE_SHA256
from hpsearch.storage.files import compute_sha256, write_private
from hpsearch.storage.home import prepare_home, read_own_text, resolve_home

_RELATIVE = "its path is not absolute"
_RESTORED = "the study was restored from a backup"
_MISSING = "its file is not on this machine"
_INSTALLED = {"site-packages", "dist-packages"}

_RECORD = "trusted-objectives.json"  # hash by path of the files that the user has named or confirmed


def check_source(name: str, reference: str, attrs: Mapping[str, Any], *, allow_changed: bool = False) -> None:
    """Check, without importing it, that the code of a study's objective may be imported.

    Built-in objectives and files that the user has named or confirmed may be imported. Another file may be imported if
    it belongs to the user and has the hash of the study's creation. The packages of a module must belong to the user
    too, unless they are installed.

    Args:
        name: name of the study.
        reference: stored reference of the objective.
        attrs: user attributes of the study.
        allow_changed: whether to accept any file that is at the stored reference. A worker does this, because starting
            a worker is a request to run the study's code. A restored study still needs a confirmation, and a missing
            file is rejected.

    Raises:
        SearchError: the user has to confirm the code.
    """
    reason = find_distrust(reference, attrs)
    if reason is None or (allow_changed and reason not in (_RESTORED, _RELATIVE, _MISSING)):
        return
    if reason == _MISSING:
        raise SearchError(
            f"the objective {reference} of study {name!r} is not imported, because {reason}; copy the file to this "
            "place, or run hpsearch in the folder of its module"
        )
    raise SearchError(
        f"the objective {reference} of study {name!r} is not imported, because {reason}; if you trust this "
        f"code, confirm it with: {format_command('trust', name)}"
    )


def find_distrust(reference: str, attrs: Mapping[str, Any]) -> str | None:
    """Return why the user has to confirm the code of a study's objective; None if it may be imported."""
    if reference in BUILTIN:
        return None
    if is_file_reference(reference) and not reference.startswith("/"):
        return _RELATIVE
    sources = locate_sources(reference)
    digest = compute_sha256(sources[-1]) if sources else None
    if sources and _read_record().get(str(sources[-1])) == digest:
        return None
    if attrs.get(RESTORED):
        return _RESTORED
    if not sources:
        return _MISSING
    if attrs.get(SOURCE_SHA256) != digest:
        return "its code has changed since the study was created"
    for source in sources:
        if not is_file_reference(reference) and _INSTALLED.intersection(source.parts):
            continue
        if source.stat().st_uid not in {os.geteuid(), 0}:
            return "the file belongs to another user"
        if any((folder / "stack.json").exists() for folder in source.parents):
            return "the file is in a home folder of hpsearch"
    return None


def trust_reference(reference: str) -> Path | None:
    """Record the current code at a reference as trusted on this machine, and return its file; None if there is none.

    The record is in the folder of $HPSEARCH_HOME or, without this variable, in the user's data folder.

    Raises:
        StorageError: the folder cannot be written.
    """
    if reference in BUILTIN or (source := locate_source(reference)) is None:
        return None
    record = _read_record()
    if record.get(str(source)) != (digest := compute_sha256(source)):
        write_private(prepare_home() / _RECORD, json.dumps({**record, str(source): digest}, indent=2))
    return source


def _read_record() -> dict[str, str]:
    try:
        found = json.loads(read_own_text(resolve_home() / _RECORD))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
