"""Folders on this machine that only this user can write to: prepared data, compiled code, temporary folders."""

from __future__ import annotations

import atexit
import errno
import multiprocessing
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import util
from pathlib import Path

from hpsearch.changeable_paths import find_changeable_part
from hpsearch.objectives.errors import ObjectiveError

_COMPILER_CACHE = "TORCHINDUCTOR_CACHE_DIR"  # torch's variable; importing torch's compiler sets it
_PRECOMPILE_HEADERS = "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"  # torch reads it when its compiler is imported


def open_private_folder(name: str) -> Path:
    """Return the folder `name` in $HPSEARCH_HOME, or in the user's cache folder if this variable is not set.

    The folder is created with mode 0700 if it is missing.

    Raises:
        ObjectiveError: the folder or the one that contains it belongs to another user, or the user has no home folder.
        OSError: the folder cannot be created.
    """
    import platformdirs

    try:
        home = Path(os.environ.get("HPSEARCH_HOME") or platformdirs.user_cache_dir("hpsearch")).expanduser().absolute()
    except RuntimeError:
        raise ObjectiveError(
            f"uid {os.geteuid()} has no home folder; set HPSEARCH_HOME to a folder that you may write to"
        ) from None
    home.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        home.mkdir(mode=0o711 if os.geteuid() == 0 else 0o700)  # of root: Postgres needs access to its folder there
    folder = home / name
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    for path in (home, folder):
        for status in (path.lstat(), path.stat()):  # a link and its target
            if status.st_uid not in (0, os.geteuid()):
                raise ObjectiveError(
                    f"{str(path)!r} belongs to uid {status.st_uid}; set HPSEARCH_HOME to a folder of your own"
                )
    if folder.stat().st_uid == os.geteuid():
        folder.chmod(0o700)
    return folder


def find_safe_temporary_folder() -> Path:
    """Return a parent folder for temporary folders, in which other users cannot rename entries.

    If they could, they could replace even a private folder by one of their own. This is the temporary folder of the
    system if it is private or has the sticky bit, as /tmp has. Otherwise it is a folder from `open_private_folder`.

    Raises:
        ObjectiveError: the private folder belongs to another user, or cannot be created.
        OSError: there is no temporary folder.
    """
    made = tempfile.mkdtemp(prefix="hpsearch-")
    try:
        is_replaceable = find_changeable_part(Path(made).absolute(), as_folder=True) is not None
    finally:
        with suppress(OSError):
            os.rmdir(made)  # noqa: PTH106 not its content, because it may be another folder by now
    parent = Path(tempfile.gettempdir())
    if not is_replaceable:
        return parent
    try:
        return open_private_folder("tmp")
    except OSError as error:
        raise ObjectiveError(
            f"other users can rename files in the temporary folder {str(parent)!r}, and {str(error.filename)!r} cannot "
            f"be written ({error.strerror}); set TMPDIR to a folder that only you can write to"
        ) from None


_LONGEST_PARENT_OF_SOCKETS = 107 - len("/pymp-xxxxxxxx/listener-xxxxxxxx")  # bytes
_temporary_folders: dict[Path, int] = {}  # ids of the processes that opened them


@contextmanager
def open_temporary_folder() -> Iterator[Path]:
    """Yield a temporary folder in which other users cannot replace files, and remove it at the end.

    Raises:
        ObjectiveError: see `find_safe_temporary_folder`.
        OSError: the folder cannot be created.
    """
    with tempfile.TemporaryDirectory(prefix="hpsearch-", dir=find_safe_temporary_folder()) as name:
        folder = Path(name)
        _temporary_folders[folder] = os.getpid()
        try:
            yield folder
        finally:
            _temporary_folders.pop(folder, None)


def make_socket_folder() -> str:
    """Return the path of multiprocessing's folder of sockets; create the folder if necessary.

    Processes that this process forks share the folder. Otherwise each one creates a folder, which remains if the
    process is killed. Another user who could replace the folder would receive what the processes send.

    Raises:
        ObjectiveError: see `find_safe_temporary_folder`.
        OSError: the folder cannot be created or was replaced, or its path is too long for sockets.
    """
    config = multiprocessing.process.current_process()._config  # type: ignore[attr-defined]  # private
    if config.get("tempdir") is None:
        parent = find_safe_temporary_folder()
        if len(os.fsencode(parent)) > _LONGEST_PARENT_OF_SOCKETS:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), str(parent))
        folder = tempfile.mkdtemp(prefix="pymp-", dir=parent)
        config["tempdir"] = folder
        _temporary_folders[Path(folder)] = os.getpid()
        # As multiprocessing does, but it would fail if the folder was deleted.
        util.Finalize(None, shutil.rmtree, (folder,), {"ignore_errors": True}, exitpriority=-100)
    folder = util.get_temp_dir()
    status = Path(folder).lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o700:
        # A program that cleans /tmp may have removed it, and another user created it again.
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), folder)
    return folder


def remove_temporary_folders() -> None:
    """Remove the open temporary folders of this process, which a signal ends without cleanup."""
    for folder, pid in list(_temporary_folders.items()):
        if pid == os.getpid():
            shutil.rmtree(folder, ignore_errors=True)


def use_private_compiler_cache() -> None:
    """Let torch cache compiled code in a private folder, unless the user has chosen a folder.

    Torch's default is a folder with a predictable name in the temporary folder. Another user can create it first, and
    torch executes the code in it. Torch keeps precompiled headers there even if another folder is chosen, so they are
    turned off.

    Raises:
        ObjectiveError: the private folder belongs to another user, or the chosen folder cannot be created.
    """
    os.environ[_PRECOMPILE_HEADERS] = "0"
    if (config := sys.modules.get("torch._inductor.config")) is not None:
        config.cpp_cache_precompile_headers = False  # type: ignore[attr-defined]
    default = str(Path(tempfile.gettempdir()) / "torchinductor_")
    chosen = os.environ.get(_COMPILER_CACHE) or default
    if not chosen.startswith(default):
        try:
            Path(chosen).mkdir(parents=True, exist_ok=True)  # as torch does
        except (OSError, ValueError) as error:  # ValueError: a null character
            reason = getattr(error, "strerror", None) or error
            raise ObjectiveError(
                f"{_COMPILER_CACHE} {chosen!r} cannot be created ({reason}); set it to a folder that you may write to, "
                "or unset it"
            ) from None
        return
    try:
        folder = open_private_folder("compiled")
    except OSError:  # such as a home that cannot be written
        folder = Path(tempfile.mkdtemp(prefix="hpsearch-compiled-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ[_COMPILER_CACHE] = str(folder)
    os.environ.setdefault("QUACK_CACHE_DIR", str(folder / "quack"))  # kernels of torch for GPUs
