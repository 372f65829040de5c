"""Check that every host can use the folders for checkpoints and for temporary files.

A host writes, syncs, reads and renames a few files in each folder, and removes them again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypedDict

from ....host import process
from ....host.trust import open_private
from ..check import Check, Exchange, Finding, Level, RankPlace, Ranks, Reported
from ..networking import names_of
from .limits import size_of

LARGE_FILE_BYTES = 1 << 20
VISIBLE_SECONDS = 1.5  # network file systems show a new file a little later
MIN_FREE_BYTES = {"checkpoints": 2 << 30, "working": 256 << 20, "temporary": 64 << 20}
MIN_FREE_FILES = 1000

_UNFINISHED, _LARGE, _MARK = "large.new", "large", "mark"
_SMALL = tuple(f"small-{i}" for i in range(8))
_LOCAL = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "ramfs", "overlay", "f2fs")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_HOST_FAULTS = (errno.ENOSPC, errno.EROFS, errno.EIO)  # errors of a local disk
_NAMES = {
    "checkpoints": "the checkpoint folder",
    "working": "the working folder",
    "temporary": "the folder for temporary files",
}


class Folder(TypedDict):
    """A host's result for one folder.

    purpose: a key of _NAMES. problem: "", or the error, such as "Read-only file system";
    code: its errno, or 0. seconds: duration of the use; None if it failed.
    file_system: its type, such as "nfs4"; "" if unknown. shared: whether the first host's file
    is visible; None if that does not matter.
    """

    purpose: str
    path: str
    problem: str
    code: int
    seconds: float | None
    free_bytes: int | None
    free_files: int | None
    file_system: str
    shared: bool | None


@dataclass(frozen=True)
class StorageFacts:
    """The results of one host: the same folders on all hosts, in the same order."""

    folders: list[Folder]


class StorageCheck(Check[StorageFacts]):
    """Write to and read from the folders of a training, on every host."""

    name = "storage"
    per = "host"
    quick = True
    seconds = 25.0  # a busy parallel file system may need ten seconds for a file
    facts = StorageFacts

    def __init__(self, checkpoints: str | None = None) -> None:
        """checkpoints: folder that all hosts write to, or will make; None: the working folder."""
        self._folders = [("working", os.curdir)]
        if checkpoints is not None:
            self._folders = [("checkpoints", checkpoints)]
        self._folders.append(("temporary", os.environ.get("TMPDIR") or "/tmp"))

    def collect(self, ranks: Ranks) -> Exchange[StorageFacts]:
        # All hosts use the same names, so that each can look for another's files.
        [token, *_] = yield f"{os.getpid()}-{os.urandom(6).hex()}"
        trials = [_Trial(purpose, path, str(token), ranks.me) for purpose, path in self._folders]
        try:
            for trial in trials:
                trial.measure()
            yield True
            for trial in trials:
                trial.look_for_first_host()
            yield True
        finally:
            for trial in trials:
                trial.remove_files()
        return StorageFacts([trial.found for trial in trials])

    def conclude(self, reported: Sequence[Reported[StorageFacts]]) -> Iterator[Finding]:
        findings: list[Finding] = []
        columns = zip(*(report.facts.folders for report in reported), strict=True)
        for column in columns:
            of_host = {
                report.place.host: folder for report, folder in zip(reported, column, strict=True)
            }
            findings += _conclude_on_folder(_with_missing(of_host))
        yield from findings
        if reported and not findings:
            yield Finding(Level.GOOD, _summary([report.facts for report in reported]))


# On each host -------------------------------------------------------------------------------------


class _Trial:
    """One host's use of one folder.

    All hosts write below .doctor-TOKEN, which only this user may enter, through its descriptor.
    Another user who may write into the folder cannot lead them to files elsewhere.
    """

    def __init__(self, purpose: str, path: str, token: str, me: RankPlace) -> None:
        self._me, self._name = me, f".doctor-{token}"
        self._above = self._shared = self._own = -1  # descriptors: folder, .doctor-TOKEN, host's
        self.found = Folder(
            purpose=purpose,
            path="",
            problem="",
            code=0,
            seconds=None,
            free_bytes=None,
            free_files=None,
            file_system="",
            shared=None,
        )
        self._use(os.path.abspath(os.path.expanduser(path)))

    def _use(self, path: str) -> None:
        self._path = path
        self.found["path"], self.found["file_system"] = path, _file_system(path)

    def measure(self) -> None:
        """Use the folder, and record the first problem."""
        if self.found["purpose"] == "checkpoints":
            self._use(_existing(self._path))
        try:
            self._use_files()
        except OSError as error:
            self.found["problem"] = error.strerror or str(error)
            self.found["code"] = error.errno or 0
        with contextlib.suppress(OSError):
            space = os.statvfs(self._path)
            self.found["free_bytes"] = space.f_bavail * space.f_frsize
            self.found["free_files"] = space.f_favail if space.f_files else None
            if self.found["code"] == errno.ENOSPC:
                self.found["problem"] += _reason_of_no_space(space)

    def look_for_first_host(self) -> None:
        """Look for the first host's file, if all hosts have to share the folder."""
        if self.found["purpose"] != "checkpoints" or self.found["problem"]:
            return
        deadline = time.monotonic() + VISIBLE_SECONDS
        while not self._sees_first_host() and time.monotonic() < deadline:
            time.sleep(0.1)
        self.found["shared"] = self._sees_first_host()

    def _sees_first_host(self) -> bool:
        with contextlib.suppress(OSError):
            os.stat(f"0/{_MARK}", dir_fd=self._shared)
            return True
        return False

    def remove_files(self) -> None:
        """Remove this host's files; the first host also removes what others have left."""
        with contextlib.suppress(OSError):
            everyone = os.listdir(self._shared) if self._me.node == 0 and self._shared >= 0 else []
            for node in [str(self._me.node), *filter(str.isdecimal, everyone)]:
                _remove_files(node, self._shared)
        with contextlib.suppress(OSError):
            os.rmdir(self._name, dir_fd=self._above)
        for descriptor in {self._above, self._shared, self._own} - {-1}:
            os.close(descriptor)

    def _use_files(self) -> None:
        """Write, sync, rename, read and remove files."""
        remedy = "run the check again"
        self._above = os.open(self._path, os.O_DIRECTORY | getattr(os, "O_PATH", 0))
        self._shared = open_private(self._name, self._above, remedy)
        self._own = own = open_private(str(self._me.node), self._shared, remedy)
        began = time.perf_counter()
        content = os.urandom(1 << 10)
        _write(_UNFINISHED, own, content * (LARGE_FILE_BYTES >> 10), sync=True)
        os.replace(_UNFINISHED, _LARGE, src_dir_fd=own, dst_dir_fd=own)
        if _read(_LARGE, own)[: 1 << 10] != content:
            raise OSError(errno.EIO, "the content read differs from the content written")
        os.unlink(_LARGE, dir_fd=own)
        for name in _SMALL:
            _write(name, own, content)
        for name in _SMALL:
            os.stat(name, dir_fd=own)
            os.unlink(name, dir_fd=own)
        self.found["seconds"] = time.perf_counter() - began
        _write(_MARK, own, b"")


def _remove_files(node: str, shared: int) -> None:
    """Remove a host's folder, and in it only files of this check."""
    with contextlib.suppress(OSError):
        own = os.open(node, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=shared)
        try:
            for name in {_UNFINISHED, _LARGE, *_SMALL, _MARK} & {*os.listdir(own)}:
                os.unlink(name, dir_fd=own)
        finally:
            os.close(own)
        os.rmdir(node, dir_fd=shared)


def _reason_of_no_space(space: os.statvfs_result) -> str:
    """Return why nothing can be written, as far as blocks and inodes show that."""
    if space.f_files and not space.f_favail:
        return ", because all inodes are in use: too many files"
    free = space.f_bavail * space.f_frsize
    if free > 16 * LARGE_FILE_BYTES:
        return (
            f", though {size_of(free)} of its blocks are free: a quota of the user, group or "
            "project, also of the number of files, or one full disk of several"
        )
    return ""


def _existing(path: str) -> str:
    """Return the folder, or the nearest existing one above, in which a training would make it."""
    while not os.path.isdir(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    return path


def _write(name: str, folder: int, content: bytes, sync: bool = False) -> None:
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600, dir_fd=folder)
    with open(descriptor, "wb", buffering=0) as file:
        view = memoryview(content)
        while view:
            view = view[file.write(view) :]
        if sync:
            os.fsync(file.fileno())


def _read(name: str, folder: int) -> bytes:
    """Read a file from the disk instead of the cache, if the file system supports it."""
    with open(os.open(name, os.O_RDONLY, dir_fd=folder), "rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return file.read()


def _file_system(path: str) -> str:
    """Return the type of the file system that a path is on, without touching the path."""
    above = [
        mount for mount in process.mounts() if path == mount.folder or _is_above(mount.folder, path)
    ]
    # The newest of the deepest ones: it hides the others.
    return max(reversed(above), key=lambda mount: len(mount.folder)).file_system if above else ""


# On rank 0 ----------------------------------------------------------------------------------------


def _is_above(folder: str, path: str) -> bool:
    return folder != path and path.startswith(folder.rstrip("/") + "/")


def _with_missing(of_host: dict[str, Folder]) -> dict[str, Folder]:
    """Return the same folders, with a problem if a host lacks one that other hosts have."""
    path = max((folder["path"] for folder in of_host.values()), key=len)
    code = errno.ENOENT
    return {
        host: {**folder, "path": path, "code": code, "problem": os.strerror(code)}
        if folder["purpose"] == "checkpoints" and _is_above(folder["path"], path)
        else folder
        for host, folder in of_host.items()
    }


def _conclude_on_folder(of_host: dict[str, Folder]) -> Iterator[Finding]:
    """Yield findings about one folder. of_host: host -> its result."""
    failed = {host: folder for host, folder in of_host.items() if folder["problem"]}
    if failed:
        yield from _conclude_on_failures(failed, of_host)
    used = {host: folder for host, folder in of_host.items() if host not in failed}
    if not used:
        return
    yield from _conclude_on_sharing(used)
    yield from _conclude_on_space(used)


def _conclude_on_failures(
    failed: dict[str, Folder], of_host: dict[str, Folder]
) -> Iterator[Finding]:
    able = len(of_host) - len(failed)
    for problem in dict.fromkeys(folder["problem"] for folder in failed.values()):
        hosts = [host for host, folder in failed.items() if folder["problem"] == problem]
        folder = failed[hosts[0]]
        purpose, code = folder["purpose"], folder["code"]
        if purpose == "working" and not able and code not in _FULL:
            continue  # some centres mount home read-only on compute nodes
        # Many programs use /tmp if TMPDIR is missing.
        is_hint = purpose == "temporary" and code == errno.ENOENT
        others = f"; {able} other host{'s' * (able > 1)} can" if able else ""
        yield Finding(
            Level.WARNING if is_hint else Level.BAD,
            f"{names_of(hosts)} cannot write in {_describe(folder)}: {problem}{others}. "
            f"Expected a folder that every host can write in",
            _remedy(folder, bool(able)),
            hosts=tuple(hosts),
            exclude=not is_hint and _is_fault_of_host(folder, len(of_host), able),
        )


def _is_fault_of_host(folder: Folder, hosts: int, able: int) -> bool:
    """Whether the host caused a failure, not the path or a shared file system."""
    is_local = folder["file_system"] in _LOCAL
    if folder["code"] in _FULL and not is_local:
        return False
    if folder["code"] == errno.EPERM:  # another user has taken the name of the check's folder
        return False
    return able > 0 or (hosts == 1 and is_local and folder["code"] in _HOST_FAULTS)


def _remedy(folder: Folder, others_can: bool) -> str:
    purpose, code = folder["purpose"], folder["code"]
    if code in _FULL:
        return (
            "Remove files there, or use another folder. See: df -h (blocks); df -i (inodes); "
            "quota -s; lfs quota -h -u $USER; lfs df -h"
        )
    if purpose == "temporary":
        return "Create the folder on each host, or unset TMPDIR in the job script"
    if others_can and code != errno.EPERM:
        return f"Exclude the hosts, and report them. See there: mount; ls -ld {folder['path']}"
    return f"Check the path and its permissions, or give another folder with --{purpose}"


def _conclude_on_sharing(used: dict[str, Folder]) -> Iterator[Finding]:
    writer = next(iter(used))
    apart = [host for host, folder in used.items() if folder["shared"] is False]
    if apart and writer not in apart:  # otherwise the first host could not write
        folder = used[apart[0]]
        yield Finding(
            Level.WARNING,
            f"{names_of(apart)} does not see files that {writer} has written to "
            f"{_describe(folder)}. Expected one folder that all hosts share",
            "Write checkpoints to a shared file system, and name that folder with --checkpoints",
            hosts=tuple(apart),
        )


def _conclude_on_space(used: dict[str, Folder]) -> Iterator[Finding]:
    for host, folder in used.items():
        least = MIN_FREE_BYTES.get(folder["purpose"])
        if least is None:
            return
        free, files = folder["free_bytes"], folder["free_files"]
        found = ""
        if free is not None and free < least:
            found = f"{size_of(free)} free, expected at least {size_of(least)}"
        elif files is not None and files < MIN_FREE_FILES:
            found = f"room for {files} more files, expected at least {MIN_FREE_FILES}"
        if not found:
            continue
        same = [
            other
            for other, its in used.items()
            if (its["free_bytes"] or 0) >> 24 == (free or 0) >> 24
        ]
        if same[0] == host:  # report a file system once
            yield Finding(
                Level.WARNING,
                f"{_describe(folder)} has {found}, on {names_of(same)}",
                "Remove files there, or use another folder. See: df -h; df -i",
                hosts=tuple(same),
            )


def _summary(facts: Sequence[StorageFacts]) -> str:
    """Return a summary for hosts without problems."""
    parts = []
    for column in zip(*(facts_of_host.folders for facts_of_host in facts), strict=True):
        used = [folder for folder in column if not folder["problem"]]
        seconds = [folder["seconds"] for folder in used if folder["seconds"] is not None]
        free = [folder["free_bytes"] for folder in used if folder["free_bytes"] is not None]
        if seconds and free:
            parts.append(
                f"{used[0]['path']} in at most {max(seconds):.2f} s, {size_of(min(free))} free"
            )
    return f"Files were written, read and removed: {'; '.join(parts)}"


def _describe(folder: Folder) -> str:
    kind = f" ({folder['file_system']})" if folder["file_system"] else ""
    return f"{_NAMES[folder['purpose']]} {folder['path']}{kind}"
