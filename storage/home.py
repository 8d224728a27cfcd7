"""The home folder: data of the embedded stack, run folders and logs."""

from __future__ import annotations

import os
from pathlib import Path

from hpsearch.storage.errors import StorageError, format_os_error

HOME_VARIABLE = "HPSEARCH_HOME"
_REMEDY = f"set {HOME_VARIABLE} to a folder that you may write to"


def prepare_home(value: str | None = None) -> Path:
    """Return the home folder, and create it if it is missing.

    The folder is `value` if given, else $HPSEARCH_HOME, else the user's data directory (for root: /var/lib/hpsearch).
    A new folder has mode 0700. Root's folder has mode 0711: Postgres refuses to run as root, and the unprivileged user
    that runs Postgres needs access to the data directory, which is in the home folder.

    Raises:
        StorageError: the folder cannot be created or written, or is not a folder.
    """
    home = _resolve_home(value)
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        if not home.exists():
            home.mkdir(exist_ok=True)
            home.chmod(0o711 if os.geteuid() == 0 else 0o700)
    except (OSError, ValueError) as error:
        cause = format_os_error(error)
        raise StorageError(f"{HOME_VARIABLE} {str(home)!r} cannot be created ({cause}); {_REMEDY}") from None
    if not home.is_dir():
        raise StorageError(f"{HOME_VARIABLE} {str(home)!r} is not a folder; {_REMEDY}")
    check_writable(home)
    return home


def check_writable(home: Path) -> None:
    """Check that this user may write to `home`, and owns the stack in it; raises StorageError otherwise."""
    if not os.access(home, os.R_OK | os.W_OK | os.X_OK):
        raise StorageError(f"{HOME_VARIABLE} {str(home)!r} is not writable for this user; {_REMEDY}")
    state = home / "stack.json"
    if state.exists() and state.stat().st_uid != os.geteuid():
        raise StorageError(
            f"{HOME_VARIABLE} {str(home)!r} belongs to uid {state.stat().st_uid}; run as that user, or {_REMEDY}"
        )


def make_private_folder(path: Path) -> Path:
    """Create the folder `path` and its missing parents with mode 0700, and return `path`."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path


def _resolve_home(value: str | None) -> Path:
    if chosen := value or os.environ.get(HOME_VARIABLE):
        try:
            return Path(chosen).expanduser().absolute()
        except RuntimeError:  # ~USER with an unknown user
            raise StorageError(f"{HOME_VARIABLE} {chosen!r} names an unknown user; {_REMEDY}") from None
    if os.geteuid() == 0:
        return Path("/var/lib/hpsearch")
    import platformdirs

    return platformdirs.user_data_path("hpsearch", appauthor=False)
