"""The folder where the embedded stack, the runs and the logs live."""

from __future__ import annotations

import os
from pathlib import Path

from hpsearch.storage.errors import StorageError, reason

VARIABLE = "HPSEARCH_HOME"
_REMEDY = f"set {VARIABLE} to a folder that you may write to"


def home_dir(value: str | None = None) -> Path:
    """Return the home folder, created where it is missing.

    It is `value`, else $HPSEARCH_HOME, else the user's data directory (for root: /var/lib/hpsearch). A new one is open
    to its owner alone; root's lets others pass through it, not look into it, because Postgres refuses to run as root
    and needs a way to its own folder.

    Raises:
        StorageError: It cannot be created, is no folder, or cannot be written.
    """
    home = _choose(value)
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        if not home.exists():
            home.mkdir(exist_ok=True)
            home.chmod(0o711 if os.geteuid() == 0 else 0o700)
    except (OSError, ValueError) as error:
        raise StorageError(f"{VARIABLE} {str(home)!r} cannot be created ({reason(error)}): {_REMEDY}") from None
    if not home.is_dir():
        raise StorageError(f"{VARIABLE} {str(home)!r} is not a folder: {_REMEDY}")
    check_writable(home)
    return home


def check_writable(home: Path) -> None:
    """Raise StorageError unless this user may write to `home` and what is kept there is this user's."""
    if not os.access(home, os.R_OK | os.W_OK | os.X_OK):
        raise StorageError(f"{VARIABLE} {str(home)!r} is not writable for this user: {_REMEDY}")
    state = home / "stack.json"
    if state.exists() and state.stat().st_uid != os.geteuid():
        raise StorageError(
            f"{VARIABLE} {str(home)!r} belongs to another user (uid {state.stat().st_uid}): "
            f"run as that user, or {_REMEDY}"
        )


def private_folder(path: Path) -> Path:
    """Create `path` (and missing parents) for its owner alone and return it."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path


def _choose(value: str | None) -> Path:
    chosen = value or os.environ.get(VARIABLE)
    if chosen:
        try:
            return Path(chosen).expanduser().absolute()
        except RuntimeError:  # ~somebody who does not exist
            raise StorageError(f"{VARIABLE} {chosen!r} names an unknown user: {_REMEDY}") from None
    if os.geteuid() == 0:
        return Path("/var/lib/hpsearch")
    import platformdirs

    return platformdirs.user_data_path("hpsearch", appauthor=False)
