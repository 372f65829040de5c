"""Keep a copy of the packages on a node: made once, kept for later jobs, removed when it is old.

Copies lie below ddpkit-stage-UID, a folder that only its owner can enter. Each copy has a folder
KEY; a file KEY.lock (kept.py) with the result of its last check; and KEY.used, which each rank that
uses the copy locks. The folder gets its name only when the copy is complete.

Each rank loads this module. Parts that a kept copy does not need are in other modules.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from ...host.trust import make_folder, may_trust
from . import IN_MEMORY, Archive, StagingError
from .kept import add_links, locked
from .marker import MARKER, is_complete, write_marker


class Prepared(NamedTuple):
    """A copy that a rank can use. made_in: seconds it took to make; 0 for a kept copy."""

    path: str
    made_in: float


class _State(NamedTuple):
    """The first rank's result for a copy, read by the other ranks of the start on the node."""

    start: str = ""
    problem: str = ""
    made_in: float = 0.0


def candidates(stage_dir: str, environ: Mapping[str, str]) -> list[str]:
    """Return the folders of a node that may hold copies, in order of preference."""
    if stage_dir:
        return [os.path.expandvars(os.path.expanduser(stage_dir))]
    return [environ.get("TMPDIR") or "/tmp", "/dev/shm"]


def is_kept(key: str, folders: Sequence[str]) -> bool:
    """Whether one of these folders holds a copy that was complete."""
    return any(os.path.exists(os.path.join(root_of(each), key, MARKER)) for each in folders)


def prepare(
    archive: Archive,
    source: str,
    folders: Sequence[str],
    start: str,
    check: Callable[[str], None] = lambda copy: None,
) -> Prepared:
    """Return the copy on this node; make it if there is none. Raises StagingError.

    The first rank of a start checks or makes it; the others wait for the result. This process, and
    the program that it becomes, keep the copy from being removed.

    source: path of the archive on this node, or "" for archive.path. start: id of this start of
    the ranks; after a restart the copy is checked again. check: called with the path of a complete
    copy; raises StagingError if it cannot be used.
    """
    problems = []
    for folder in folders:
        try:
            root = open_root(folder)
            with locked(root, archive.key) as state:
                return _prepare_in(root, archive, source, start, state, check)
        except (OSError, StagingError) as error:
            problems.append(f"{folder}: {getattr(error, 'strerror', None) or error}")
    raise StagingError("; ".join(problems))


def _prepare_in(
    root: str,
    archive: Archive,
    source: str,
    start: str,
    state: int,
    check: Callable[[str], None],
) -> Prepared:
    """Check or make the copy, under its lock. state: descriptor of the locked file."""
    copy = os.path.join(root, archive.key)
    known = _read_state(state)
    if known.start != start:
        known = _State(start)
        try:
            if os.fstatvfs(state).f_flag & os.ST_NOEXEC:
                raise StagingError("it is mounted noexec: no library can be loaded from it")
            if not is_complete(copy):
                began = time.monotonic()
                from .unpack import make

                make(root, copy, archive, source)
                known = known._replace(made_in=time.monotonic() - began)
            with suppress(OSError):  # the disk may be full
                if add_links(copy, archive.prefix):
                    write_marker(copy)
            os.utime(os.path.join(copy, MARKER))
            check(copy)
        except (OSError, StagingError) as error:
            known = known._replace(problem=getattr(error, "strerror", None) or str(error))
        with suppress(OSError):  # the disk may be full
            os.ftruncate(state, 0)
            os.pwrite(state, "\0".join(map(str, known)).encode(), 0)
        if any("." not in name and name != archive.key for name in os.listdir(root)):
            from .room import remove_old

            remove_old(root, archive.key)
    if known.problem:
        raise StagingError(known.problem)
    used = os.open(os.path.join(root, f"{archive.key}.used"), os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(used, fcntl.LOCK_SH)
    os.set_inheritable(used, True)
    return Prepared(copy, known.made_in)


def root_of(folder: str) -> str:
    """Return the folder of this user's copies in a folder of the node."""
    return os.path.join(folder, f"ddpkit-stage-{os.geteuid()}")


def open_root(folder: str, *, make: bool = True) -> str:
    """Return the folder of this user's copies. Raises OSError, or StagingError if it is not safe.

    Nobody else can replace a folder in its path, so the path still leads to the checked folder.

    make: whether to make it if there is none.
    """
    above, name = os.path.realpath(folder), os.path.basename(root_of(folder))
    parent = may_trust(above, "name another folder with --stage-dir", is_parent=True)
    root = f"{above.rstrip('/')}/{name}"
    try:
        if make:
            with suppress(FileExistsError):
                make_folder(name, 0o700, dir_fd=parent)
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
    finally:
        os.close(parent)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise StagingError(f"{root} belongs to another user, or is no folder")
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise StagingError(f"other users may enter {root} (mode {status.st_mode & 0o777:o})")
    return root


def _read_state(descriptor: int) -> _State:
    try:
        start, problem, made_in = os.pread(descriptor, 1 << 16, 0).decode().split("\0")
        return _State(start, problem, float(made_in))
    except ValueError:
        return _State()


_LAST_RANK_SECONDS = 1.0  # seconds for other ranks of the node, and workers of this one, to end
_POLL_SECONDS = 0.05


def remove_from_memory(environ: Mapping[str, str]) -> None:
    """Remove copies in memory that no rank uses any more, because other jobs need the memory.

    The process that has started ranks on a node calls this after their end. The last such process
    removes the copy.

    environ: variables of a rank.
    """
    if not environ.get(IN_MEMORY):
        return
    from .room import copies_in, is_in_memory, remove_copy  # not needed by a rank

    limit = time.monotonic() + _LAST_RANK_SECONDS
    for folder in candidates("", environ):
        with suppress(OSError, StagingError):
            root = open_root(folder, make=False)
            for _, key in copies_in(root) if is_in_memory(root) else ():
                while not remove_copy(root, key) and time.monotonic() < limit:
                    time.sleep(_POLL_SECONDS)
