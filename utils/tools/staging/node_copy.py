"""The copy of the packages on a node: made once, kept for later jobs, removed when it is old.

Below a folder that only its owner can enter, ddpkit-stage-UID, each copy has the folder KEY, the
file KEY.lock, locked by the process that makes or checks it, and KEY.used, locked by each rank that
uses it. A copy has its name only once it is complete.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from .archive import CHUNK_BYTES, Archive, line_of
from .packages import StagingError

_MARKER = ".ddpkit-complete"  # its time: when a launch has last used the copy
_COUNTED = ("lib", "packages", "also")
_OLD_SECONDS = 7 * 24 * 3600.0
_SHARE = 0.5  # of the disk: what all copies may use
_SPARE_BYTES = 64 << 20  # besides the files themselves: for their inodes, and for caches
_BLOCK_BYTES = 4096
_START_SECONDS = 60.0


class Prepared(NamedTuple):
    """A copy that a rank can use. made_in: seconds; 0 for a kept one."""

    path: str
    made_in: float


class _State(NamedTuple):
    """What a launch has found about a copy, for its other ranks on the node."""

    launch: str = ""
    problem: str = ""
    made_in: float = 0.0


def candidates(stage_dir: str, environ: Mapping[str, str]) -> list[str]:
    """Return the folders of a node that may hold copies, the preferred first."""
    if stage_dir:
        return [os.path.expandvars(os.path.expanduser(stage_dir))]
    return [environ.get("TMPDIR") or "/tmp", "/dev/shm"]


def is_kept(key: str, folders: Sequence[str]) -> bool:
    """Return whether one of these folders holds a copy that was complete."""
    return any(os.path.exists(os.path.join(_name(each), key, _MARKER)) for each in folders)


def prepare(archive: Archive, source: str, folders: Sequence[str], launch: str) -> Prepared:
    """Return the copy on this node; make it where there is none. Raises StagingError.

    The first rank of a launch checks or makes it, the others wait for the result. This process, and
    the program that it becomes, keep the copy from being removed.

    source: the archive on this node, or "" for archive.path. launch: its id.
    """
    problems = []
    for folder in folders:
        try:
            root = _open_root(folder)
            with _locked(os.path.join(root, f"{archive.key}.lock")) as state:
                return _prepare_in(root, archive, source, launch, state)
        except (OSError, StagingError, tarfile.TarError) as error:
            problems.append(f"{folder}: {getattr(error, 'strerror', None) or error}")
    raise StagingError("; ".join(problems))


def _prepare_in(root: str, archive: Archive, source: str, launch: str, state: int) -> Prepared:
    """Check or make the copy, under its lock. state: the file that is locked."""
    copy = os.path.join(root, archive.key)
    known = _read_state(state)
    if known.launch != launch:
        known = _State(launch)
        try:
            if not _is_complete(copy):
                start = time.monotonic()
                _make(root, copy, archive, source)
                known = known._replace(made_in=time.monotonic() - start)
            os.utime(os.path.join(copy, _MARKER))
        except (OSError, StagingError, tarfile.TarError) as error:
            known = known._replace(problem=getattr(error, "strerror", None) or str(error))
        with suppress(OSError):  # the disk is full
            os.ftruncate(state, 0)
            os.pwrite(state, json.dumps(known._asdict()).encode(), 0)
        _remove_old(root, copy)
    if known.problem:
        raise StagingError(known.problem)
    used = os.open(os.path.join(root, f"{archive.key}.used"), os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(used, fcntl.LOCK_SH)
    os.set_inheritable(used, True)
    return Prepared(copy, known.made_in)


def _name(folder: str) -> str:
    return os.path.join(folder, f"ddpkit-stage-{os.geteuid()}")


def _open_root(folder: str) -> str:
    """Return the folder of this user's copies. StagingError for one that is not safe to use."""
    root = os.path.realpath(folder) + "/" + os.path.basename(_name(folder))
    with suppress(FileExistsError):
        os.mkdir(root, 0o700)
    status = os.lstat(root)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise StagingError(f"{root} belongs to another user, or is no folder")
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise StagingError(f"other users may enter {root} (mode {status.st_mode & 0o777:o})")
    return root


@contextmanager
def _locked(path: str) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def _read_state(descriptor: int) -> _State:
    try:
        return _State(**json.loads(os.pread(descriptor, 1 << 16, 0)))
    except (ValueError, TypeError):
        return _State()


def _is_complete(copy: str) -> bool:
    """Return whether a copy has as many files as it was made with: a node may clean its /tmp."""
    try:
        with open(os.path.join(copy, _MARKER), encoding="ascii") as file:
            kept = json.load(file)
    except (OSError, ValueError):
        return False
    return all(_count(os.path.join(copy, name)) >= count for name, count in kept.items())


def _count(folder: str) -> int:
    """Count files and links below a folder, but not the modules that Python has compiled."""
    total = 0
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                total += 1
            elif entry.name != "__pycache__":
                total += _count(entry.path)
    return total


def _make(root: str, copy: str, archive: Archive, source: str) -> None:
    """Unpack the archive, check it, and give the copy its name."""
    for name in os.listdir(root):  # left by a process that was killed; the lock is ours
        if name.startswith(f"{archive.key}-"):
            shutil.rmtree(os.path.join(root, name), ignore_errors=True)
    with open(source or archive.path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size != archive.size:
            raise StagingError(f"{file.name} has {size} bytes instead of {archive.size}: torn")
        _make_room(root, archive)
        temporary = tempfile.mkdtemp(prefix=f"{archive.key}-", dir=root)
        try:
            _unpack(file.fileno(), temporary, archive)
            _move_paths(os.path.join(temporary, "lib"), moved_folders(copy, archive))
            kept = {name: _count(os.path.join(temporary, name)) for name in _COUNTED}
            with open(os.path.join(temporary, _MARKER), "w", encoding="ascii") as marker:
                json.dump(kept, marker)
            if os.path.exists(copy):  # it has lost files
                os.rename(copy, f"{temporary}-lost")
            os.rename(temporary, copy)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        shutil.rmtree(f"{temporary}-lost", ignore_errors=True)
    _check_start(copy)


def _unpack(descriptor: int, folder: str, archive: Archive) -> None:
    digest, count = hashlib.sha256(), 0
    with tarfile.open(fileobj=os.fdopen(os.dup(descriptor), "rb", CHUNK_BYTES), mode="r:") as tar:
        while (info := tar.next()) is not None:
            tar.members.clear()  # type: ignore[attr-defined]  # it would hold all of them
            if info.name.startswith("/") or ".." in info.name.split("/"):
                raise StagingError(f"{archive.path} holds {info.name}, which leads out of it")
            path = os.path.join(folder, info.name)
            digest.update(line_of(info))
            if info.isdir():
                os.mkdir(path, 0o755)
            elif info.issym():
                os.symlink(info.linkname, path)
            else:
                _write(path, descriptor, info)
            count += not info.isdir()
    if digest.hexdigest() != archive.members:
        with suppress(OSError):  # the next launch packs it again
            os.unlink(archive.path)
        raise StagingError(f"{archive.path} does not hold what was packed: torn, now removed")


def moved_folders(copy: str, archive: Archive) -> dict[str, str]:
    """Return each folder of --stage-also, and where it is in a copy."""
    return {folder: f"{copy}/also/{number}" for number, folder in enumerate(archive.also)}


def _move_paths(library: str, moved: Mapping[str, str]) -> None:
    """Let editable packages lead to the staged folders: .pth files, and finders of setuptools."""
    for file in (*glob.glob(f"{library}/*/*/*.pth"), *glob.glob(f"{library}/*/*/__editable__*.py")):
        with open(file, encoding="utf-8", errors="surrogateescape") as opened:
            text = opened.read()
        changed = text
        for folder, staged in moved.items():
            parts = re.split(rf"{re.escape(folder)}(?=[/'\"\n]|$)", changed)
            changed = staged.join(parts)
        if changed != text:
            with open(file, "w", encoding="utf-8", errors="surrogateescape") as opened:
                opened.write(changed)


def _write(path: str, source: int, info: tarfile.TarInfo) -> None:
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, info.mode)
    try:
        offset, left = info.offset_data, info.size
        while left:
            sent = os.sendfile(target, source, offset, left)
            if not sent:
                raise StagingError(f"the archive ends within {info.name}: torn")
            offset, left = offset + sent, left - sent
        os.utime(target, (info.mtime, info.mtime))
    finally:
        os.close(target)


def _check_start(copy: str) -> None:
    """Raise StagingError where Python does not start from the copy, as with noexec."""
    python = os.path.join(copy, "bin", "python")
    words = [python, "-I", "-c", "import sys; print(sys.prefix)"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=_START_SECONDS)
    if done.stdout.strip().split("\n")[-1] != copy:
        shutil.rmtree(copy, ignore_errors=True)
        problem = (done.stderr.strip().splitlines() or [f"its prefix is {done.stdout.strip()}"])[-1]
        raise StagingError(f"{python} does not start as expected ({problem})")


# Room on the disk ---------------------------------------------------------------------------------


def _make_room(root: str, archive: Archive) -> None:
    """Remove unused copies until there is room for another. StagingError where there is none."""
    needed = archive.size + archive.files * _BLOCK_BYTES // 2 + _SPARE_BYTES
    for _, key in [(0.0, ""), *_others(root, archive.key)]:
        if key:
            _remove(root, key)
        free = shutil.disk_usage(root).free
        if free >= needed:
            return
    raise StagingError(f"{free / 1e6:.0f} MB are free, and {needed / 1e6:.0f} MB are needed")


def _remove_old(root: str, copy: str) -> None:
    """Remove copies that were not used for long, then the oldest beyond their share of the disk."""
    others = _others(root, os.path.basename(copy))
    for used, key in list(others):
        if used < time.time() - _OLD_SECONDS:
            _remove(root, key)
            others.remove((used, key))
    if not others:
        return
    disk = shutil.disk_usage(root)
    while others and disk.used > _SHARE * disk.total and len(others) > 1:
        _remove(root, others.pop(0)[1])
        disk = shutil.disk_usage(root)


def _others(root: str, key: str) -> list[tuple[float, str]]:
    """Return when each other copy was used, and its key, the oldest first."""
    found = []
    for name in os.listdir(root):
        marker = os.path.join(root, name, _MARKER)
        if name != key and os.path.isdir(os.path.join(root, name)) and "-" not in name:
            used = os.stat(marker).st_mtime if os.path.exists(marker) else 0.0
            found.append((used, name))
    return sorted(found)


def _remove(root: str, key: str) -> None:
    """Remove a copy that no rank uses."""
    with suppress(OSError):
        used = os.open(os.path.join(root, f"{key}.used"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(used, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(os.path.join(root, key), os.path.join(root, f"{key}-removed"))
            shutil.rmtree(os.path.join(root, f"{key}-removed"), ignore_errors=True)
            for end in ("used", "lock"):
                os.unlink(os.path.join(root, f"{key}.{end}"))
        finally:
            os.close(used)
