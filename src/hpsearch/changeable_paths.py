"""Which paths other users of the machine can change."""

from __future__ import annotations

import grp
import os
import pwd
import re
import stat
from pathlib import Path

_MAX_LINKS = 40  # as in Linux


def find_changeable_part(path: Path, *, as_folder: bool = False) -> Path | None:
    """Return the first part of an absolute path that another user can change or replace; None if there is none.

    Parts are the file, its folders up to the root, and links with their targets. They must belong to the user or root,
    and others must not have write permission, unless a folder is sticky as /tmp is and does not contain the file
    itself. The user's private group does not count as others, unless the file has an access control list. Links in
    /proc lead to files that a process has open, such as a file that a server receives from another user.

    Args:
        path: the path, which exists.
        as_folder: whether the path is a folder to write to. Then others may add files next to it, and cannot change
            what is below a folder that they cannot search.
    """
    current, names, links = Path(path.anchor), list(path.parts[1:]), 0
    is_closed = False  # whether others cannot reach the current folder
    if _can_others_change(current, current.lstat(), is_sticky_safe=True):
        return current
    while names:
        is_closed = is_closed or (as_folder and not _can_others_search(current, current.lstat()))
        # After `..` or a link, this can be a folder that passed as a part in the middle of the path.
        if len(names) == 1 and not as_folder and _can_others_change(current, current.lstat(), is_sticky_safe=False):
            return current
        name = names.pop(0)
        if name == "..":
            current, is_closed = current.parent, False
            continue
        part = current / name
        try:
            status = part.lstat()
        except OSError:  # replaced meanwhile
            return part
        if stat.S_ISLNK(status.st_mode):
            links += 1
            if (status.st_uid not in {os.geteuid(), 0} and not is_closed) or links > _MAX_LINKS:
                return part
            if not as_folder and _is_in_proc(part, status):
                return part
            target = part.readlink()
            is_closed = is_closed and not target.is_absolute()
            names = [*target.parts[1:], *names] if target.is_absolute() else [*target.parts, *names]
            current = Path(target.anchor) if target.is_absolute() else current
            continue
        is_closed = is_closed and not _is_mount_point(part)  # its file system may also be mounted at an open path
        if not is_closed and _can_others_change(part, status, is_sticky_safe=bool(names)):
            return part
        current = part
    return None


def _is_in_proc(path: Path, status: os.stat_result) -> bool:
    try:
        return path.is_relative_to("/proc") or status.st_dev == Path("/proc").stat().st_dev
    except OSError:  # macOS
        return False


def _is_mount_point(path: Path) -> bool:
    try:
        lines = Path("/proc/self/mountinfo").read_bytes().split(b"\n")[:-1]
    except OSError:  # no Linux
        return path.is_mount()
    escaped = re.sub(rb"[ \t\n\\]", lambda match: b"\\%03o" % match[0][0], os.fsencode(path))
    return escaped in (line.split(b" ")[4] for line in lines)  # also those of bind mounts


def _can_others_change(path: Path, status: os.stat_result, *, is_sticky_safe: bool) -> bool:
    if status.st_uid not in {os.geteuid(), 0}:
        return True
    if is_sticky_safe and stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX:
        return False
    # With an access control list, the bits of the group are the maximum of the users and groups in the list.
    is_group_open = status.st_mode & stat.S_IWGRP and (not _is_private_group(status.st_gid) or _has_acl(path))
    return bool(status.st_mode & stat.S_IWOTH or is_group_open)


def _can_others_search(folder: Path, status: os.stat_result) -> bool:
    if status.st_uid not in {os.geteuid(), 0} or status.st_mode & stat.S_IXOTH:
        return True
    return bool(status.st_mode & stat.S_IXGRP and (not _is_private_group(status.st_gid) or _has_acl(folder)))


def _has_acl(path: Path) -> bool:
    try:
        return bool(os.getxattr(path, "system.posix_acl_access"))
    except (OSError, AttributeError):  # no list, a file system without lists, or no Linux
        return False


def _is_private_group(gid: int) -> bool:
    """Return whether a group has the name of the user, is the user's first group, and has no other members."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    if group.gr_name != user.pw_name:  # before all users are listed, which takes long with a directory service
        return False
    members = {*group.gr_mem, *(other.pw_name for other in pwd.getpwall() if other.pw_gid == gid)}
    return members == {user.pw_name}
