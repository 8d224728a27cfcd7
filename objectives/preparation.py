"""What an objective prepares once on a machine: the folder that it fills, and who waits for it."""

from __future__ import annotations

import hashlib
import inspect
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from hpsearch.objectives.errors import users_code


def prepared_folder(name: str, cls: type, prepare: Callable[[Path], None]) -> Path:
    """The folder that `prepare` filled on this machine; filled now, where it was not.

    It is in `prepared` of $HPSEARCH_HOME, else of the user's cache, by the objective's name and its source.

    Args:
        name: of the objective.
        cls: its class, whose source stands for what is prepared.
        prepare: fills an empty folder. Others wait meanwhile, and start over where it was killed.

    Raises:
        ObjectiveError: it failed.
    """
    import platformdirs
    from filelock import FileLock

    home = os.environ.get("HPSEARCH_HOME") or platformdirs.user_cache_dir("hpsearch")
    folder = Path(home).expanduser() / "prepared" / f"{name}-{_source_digest(cls)}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            unfinished = folder.with_name(f"{folder.name}.unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            with users_code(f"{cls.__name__}.prepare"):
                prepare(unfinished)
            unfinished.rename(folder)
    return folder


def _source_digest(cls: type) -> str:
    try:
        source = inspect.getsource(inspect.getmodule(cls) or cls)
    except (TypeError, OSError):  # a class made in a console has none
        source = cls.__qualname__
    return hashlib.sha256(source.encode()).hexdigest()[:12]
