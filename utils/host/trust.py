"""Check that a file or folder the kit has found belongs to this user, and stays so.

The functions return a descriptor of the checked file, which is used from then on: a name can be
given to another file at any time, a descriptor cannot.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection
from contextlib import suppress

from . import process

_MOST_LINKS = 40  # Linux follows as many links in one path
_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | getattr(os, "O_PATH", 0)
# O_NONBLOCK: a FIFO in the place of the file must not make the process wait.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class NotTrusted(PermissionError):
    """Another user owns a file, or can replace it. The message is one sentence."""

    def __init__(self, path: str, reason: str, remedy: str) -> None:
        super().__init__(errno.EPERM, f"{path} is not used, because {reason}; {remedy}")

    def __str__(self) -> str:
        return str(self.strerror)


def may_trust(path: str | os.PathLike[str], remedy: str, *, is_parent: bool = False) -> int:
    """Return an open descriptor of a file or folder that only this user and root can change.

    Each folder above it is checked as well, and each folder that a link leads to: another user may
    neither own it, nor write into it without the sticky bit. Below a folder that nobody else may
    enter, write permissions do not matter.

    remedy: what the user can do, such as "name another folder with --folder". is_parent: the path
    is a folder in which the caller makes its own. It may be like /tmp, which all may write into
    and which has the sticky bit. Its descriptor serves only as dir_fd.
    Raises NotTrusted, and OSError if the path cannot be opened.
    """
    text = os.path.join(os.getcwd(), path)
    names = _names(text)
    is_closed, links, place = False, 0, "/"
    folder = os.open("/", _FOLDER)
    try:
        while names:
            is_closed = _check_above(text, place, os.fstat(folder), remedy, is_closed)
            name = names.pop()
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if stat.S_ISLNK(found.st_mode):
                _check_owner(text, os.path.join(place, name), found, remedy, is_above=True)
                links += 1
                if links > _MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), text)
                target = os.readlink(name, dir_fd=folder)
                names += _names(target)
                if target.startswith("/"):
                    name, place, is_closed = "/", "/", False
                else:
                    continue
            elif name == "..":
                is_closed = False
            is_last = not names and not stat.S_ISLNK(found.st_mode)
            flags = _FILE if is_last and not is_parent else _FOLDER
            opened = os.open(name, flags, dir_fd=folder)
            os.close(folder)
            folder, place = opened, os.path.normpath(os.path.join(place, name))
        found = os.fstat(folder)
        _check_owner(text, place, found, remedy)
        _check_writers(text, place, found, remedy, is_closed, may_be_sticky=is_parent)
    except BaseException:
        os.close(folder)
        raise
    return folder


def make_folder(path: str | os.PathLike[str], mode: int, *, dir_fd: int | None = None) -> None:
    """Make a folder with exactly this mode; FileExistsError if it exists.

    An inherited setgid bit stays: file systems use it to count what a group stores.
    """
    os.mkdir(path, mode & 0o700, dir_fd=dir_fd)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=dir_fd)
    try:
        os.fchmod(descriptor, mode | os.fstat(descriptor).st_mode & stat.S_ISGID)
    finally:
        os.close(descriptor)


def make_folders(path: str | os.PathLike[str], mode: int = 0o755) -> None:
    """Make a folder and its missing parents with exactly this mode."""
    text = os.fspath(path)
    if not os.path.isdir(text):
        above = os.path.dirname(text.rstrip("/"))
        if above:
            make_folders(above, mode)
        with suppress(FileExistsError):
            make_folder(text, mode)


def open_private(name: str, dir_fd: int, remedy: str) -> int:
    """Open or make a folder that only this user may enter; return its descriptor.

    As dir_fd, it is private to this user, even if others may write into the parent folder.
    Raises NotTrusted if another user has made it first, and OSError.
    """
    with suppress(FileExistsError):
        make_folder(name, 0o700, dir_fd=dir_fd)
    opened = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=dir_fd)
    found = os.fstat(opened)
    problem = ""
    if found.st_uid != os.geteuid():
        problem = f"another user owns {_describe(name, found)}"
    elif found.st_mode & 0o077:
        problem = f"other users may enter {_describe(name, found)}"
    if problem:
        os.close(opened)
        raise NotTrusted(name, problem, remedy)
    return opened


def open_owned(
    path: str | os.PathLike[str], owners: Collection[int], remedy: str = "remove it"
) -> int:
    """Return an open descriptor of a file that one of these users owns and nobody else can write.

    The folders above are not checked: their other files are used in any case.
    Raises NotTrusted, and OSError if the path cannot be opened.
    """
    text = os.fspath(path)
    opened = os.open(text, _FILE)
    found = os.fstat(opened)
    problem = ""
    if not stat.S_ISREG(found.st_mode) or found.st_uid not in owners:
        problem = f"another user owns {_describe(text, found)}, or it is no file"
    elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        problem = f"other users may write {_describe(text, found)}"
    if problem:
        os.close(opened)
        raise NotTrusted(text, problem, remedy)
    return opened


def _names(path: str) -> list[str]:
    """Return the parts of a path in reverse order."""
    return [name for name in reversed(path.split("/")) if name not in ("", ".")]


def _check_above(
    path: str, place: str, found: os.stat_result, remedy: str, is_closed: bool
) -> bool:
    """Check a parent folder; return whether others cannot enter it or one above it."""
    _check_owner(path, place, found, remedy, is_above=True)
    _check_writers(path, place, found, remedy, is_closed, may_be_sticky=True)
    return is_closed or not found.st_mode & (stat.S_IXGRP | stat.S_IXOTH)


def _check_writers(
    path: str,
    place: str,
    found: os.stat_result,
    remedy: str,
    is_closed: bool,
    *,
    may_be_sticky: bool,
) -> None:
    writers = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)  # the group's bits include an ACL
    is_sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
    if not writers or is_closed or (is_sticky and may_be_sticky):
        return
    if writers & stat.S_IWOTH or not _is_private_group(found.st_gid):
        raise NotTrusted(path, f"other users may write {_describe(place, found)}", remedy)


def _check_owner(
    path: str, place: str, found: os.stat_result, remedy: str, *, is_above: bool = False
) -> None:
    if found.st_uid in (0, os.geteuid()) or (is_above and found.st_uid == _root_in_container()):
        return
    raise NotTrusted(path, f"another user owns {_describe(place, found)}", remedy)


def _root_in_container() -> int:
    """Return the id shown for root in this user namespace: 0, or the id of all unmapped users.

    Containers started by a user, as by Apptainer, map no other user: / and /home are "nobody's".
    """
    mapped = process.read("/proc/self/uid_map").splitlines()
    if not mapped or any(line.split()[0] == b"0" for line in mapped):
        return 0
    return int(process.read("/proc/sys/kernel/overflowuid") or 0)


def _describe(place: str, found: os.stat_result) -> str:
    import pwd  # Unix only, like grp

    try:
        owner = pwd.getpwuid(found.st_uid).pw_name
    except KeyError:
        owner = str(found.st_uid)
    return f"{place} (owner {owner}, mode {stat.S_IMODE(found.st_mode):04o})"


def _is_private_group(group_id: int) -> bool:
    """Whether a group is private to this user: it has the user's name (pam_umask(8), "usergroups").

    If users have such groups, their umask is often 002.
    """
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(group_id)
    except KeyError:
        return False
    is_named_alike = user.pw_gid == group_id and user.pw_name == group.gr_name
    return user.pw_uid != 0 and is_named_alike and not {*group.gr_mem} - {user.pw_name}
