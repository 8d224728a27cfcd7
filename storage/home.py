"""The home folder: data of the embedded stack, run folders and logs."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from hpsearch.storage.errors import StorageError, check_encodable, format_os_error

HOME_VARIABLE = "HPSEARCH_HOME"
STATE_FILE = "stack.json"  # in the home folder, written by storage.embedded
# The folders of a home, except that of Postgres. A private folder also protects its files, whose modes depend on the
# umask. A umask for the whole process would also change the files of the user's code, and those on shared volumes.
# None has the name of a system folder, which would become private if someone gives / or /var as the home.
FOLDERS = ("artifacts", "checkpoints", "logs", "mlflow-tmp", "outbox", "prepared", "reports", "runs", "wandb")
STUDY_FOLDERS = ("logs", "outbox", "runs")  # have a folder for each study
_REMEDY = f"set {HOME_VARIABLE} to a folder that you may write to"


def prepare_home(value: str | None = None) -> Path:
    """Return the home folder, and create it if it is missing.

    The folder is `value` if given, else $HPSEARCH_HOME, else the user's data directory (for root: /var/lib/hpsearch).
    A new home has mode 0700; root's has 0711, because Postgres refuses to run as root, and the unprivileged user that
    runs Postgres needs access to the data directory in the home. The folders in the home have mode 0700, also those of
    an existing home.

    Raises:
        StorageError: the folder cannot be created or written, is not a folder, or belongs to another user.
    """
    home, setting = resolve_home(value), _name_setting(value)
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            home.mkdir(mode=0o700)
            if os.geteuid() == 0:
                _open_for_passage(home)
    except (OSError, ValueError) as error:
        cause = format_os_error(error)
        raise StorageError(
            f"{setting} {str(home)!r} cannot be created ({cause}); set {setting} to a folder that you may write to"
        ) from None
    if not home.is_dir():
        raise StorageError(f"{setting} {str(home)!r} is not a folder; set {setting} to a folder that you may write to")
    check_writable(home)
    try:
        for name in FOLDERS:
            _ensure_private(home / name)
    except OSError as error:
        cause = format_os_error(error)
        raise StorageError(
            f"{setting} {str(home)!r}: {name!r} cannot be a private folder ({cause}); "
            f"set {setting} to a folder that you may write to"
        ) from None
    remember_home(home)
    return home


def find_home(value: str | None = None) -> Path:
    """Return the home folder like `prepare_home`, but do not create it; it may be missing.

    Raises:
        StorageError: see `prepare_home`.
    """
    home = resolve_home(value)
    try:
        home.lstat()
    except FileNotFoundError:
        return home
    except (OSError, ValueError):
        pass  # `prepare_home` raises the error with its remedy
    return prepare_home(value)


def _open_for_passage(folder: Path) -> None:
    """Let all users enter a new folder, but not a link by which another user has replaced it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_uid == os.geteuid():
            os.fchmod(descriptor, 0o711)
    finally:
        os.close(descriptor)


def _name_setting(value: str | None) -> str:
    """Return the setting that a home comes from, for messages."""
    return "--home" if value and value != os.environ.get(HOME_VARIABLE) else HOME_VARIABLE


def _ensure_private(folder: Path) -> None:
    """Create a folder with mode 0700, or remove the permissions of other users."""
    is_link = folder.is_symlink()  # it leads to a folder that the user chose
    if not is_link:
        folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    has_access = is_link or os.access(folder, os.R_OK | os.W_OK | os.X_OK)
    if status.st_uid not in get_trusted_owners() or not has_access:
        raise PermissionError(errno.EACCES, f"it belongs to uid {status.st_uid}, and a home belongs to one user")
    if not is_link and status.st_uid == os.geteuid() and status.st_mode & 0o077:
        folder.chmod(0o700)


def get_trusted_owners() -> set[int]:
    """Return the user ids that may own a home and the files in it: this user, and root, for mounted volumes."""
    return {0, os.geteuid()}


def read_own_text(path: Path) -> str:
    """Return the content of a file in a home (UTF-8).

    Raises:
        OSError: the file cannot be read, or it or a link at its path belongs to another user.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would block
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    with os.fdopen(descriptor, encoding="utf-8") as file:
        for status in (path.lstat(), os.fstat(descriptor)):
            if status.st_uid not in get_trusted_owners():
                raise PermissionError(errno.EACCES, f"it belongs to uid {status.st_uid}", str(path))
        return file.read()


_known: set[Path] = set()


def remember_home(home: Path) -> None:
    """Let `find_known_homes` return a home folder."""
    _known.add(home)


def find_known_homes() -> list[Path]:
    """Return the default home folder and the home folders that this process uses.

    Raises:
        StorageError: $HPSEARCH_HOME names an unknown user.
    """
    return [*_known, *({resolve_home(None)} - _known)]


def check_writable(home: Path) -> None:
    """Check that this user may write to `home` and owns the stack in it; the home may also belong to root.

    Raises:
        StorageError: the home or its stack belongs to another user, or the user may not write to the home.
    """
    for status in (home.lstat(), home.stat()):  # a link and its target
        if status.st_uid not in get_trusted_owners():
            raise _make_owner_error(home, status.st_uid)
    if not os.access(home, os.R_OK | os.W_OK | os.X_OK):
        raise StorageError(f"{HOME_VARIABLE} {str(home)!r} is not writable for this user; {_REMEDY}")
    state = home / STATE_FILE
    if os.path.lexists(state) and (owner := state.lstat().st_uid) != os.geteuid():
        raise _make_owner_error(home, owner)


def _make_owner_error(home: Path, owner: int) -> StorageError:
    return StorageError(f"{HOME_VARIABLE} {str(home)!r} belongs to uid {owner}; run as that user, or {_REMEDY}")


def resolve_home(value: str | None = None) -> Path:
    """Return the path of the home folder, without creating it; see `prepare_home`.

    Raises:
        StorageError: the path names an unknown user, or is a URL; or no path is given, and the user has no home folder.
    """
    setting = _name_setting(value)
    if value is not None and not isinstance(value, (str, os.PathLike)):
        raise StorageError(f"{setting} {value!r} is not a path; give text")
    if chosen := os.fspath(value or os.environ.get(HOME_VARIABLE, "")):
        if "://" in chosen:
            raise StorageError(f"{setting} {chosen!r} is a URL; set {setting} to a folder of this machine")
        check_encodable(chosen, setting)
        try:
            path = Path(chosen).expanduser().absolute()
        except RuntimeError:  # ~USER with an unknown user
            raise StorageError(
                f"{setting} {chosen!r} names an unknown user; set {setting} to a folder that you may write to"
            ) from None
        if {"\r", "\n"} & set(str(path)):  # of which Postgres accepts none
            raise StorageError(
                f"{setting} {str(path)!r} contains a line end; use a path without one, for example in the .env file"
            )
        return path
    if os.geteuid() == 0:
        return Path("/var/lib/hpsearch")
    import platformdirs

    try:
        return platformdirs.user_data_path("hpsearch", appauthor=False)
    except RuntimeError:
        raise StorageError(f"uid {os.geteuid()} has no home folder; {_REMEDY}") from None
