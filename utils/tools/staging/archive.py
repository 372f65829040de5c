"""Pack the packages of an environment into one uncompressed tar, once for each content."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ...host.trust import make_folders, open_owned
from . import Archive, StagingError
from .index import find_key
from .kept import SYSTEM, cleanup_at_signals, locked, remove_leftovers
from .packages import Environment, Member, members_of, name_of

CHUNK_BYTES = 1 << 20
_LINE_SECONDS = 10.0  # seconds between two lines of progress
_OLD_SECONDS = 24 * 3600.0  # seconds: no launch still reads an unused archive of other content
_READING_SECONDS = 3600.0  # seconds: nodes of a launch that began before a change may still read it
_TYPES = {"file": tarfile.REGTYPE, "link": tarfile.SYMTYPE, "folder": tarfile.DIRTYPE}


class Record(NamedTuple):
    """A folder's record of one archive. for_all: made by `ddpkit stage pack`."""

    archive: Archive
    environment: Environment
    for_all: bool
    owner: int
    used: float  # last use by a launch of the owner, in seconds since 1970


def line_of(info: tarfile.TarInfo) -> bytes:
    """Return a member's part of the hash over the list of members."""
    return f"{info.name} {info.size} {int(info.mtime)} {info.linkname}\n".encode(
        errors="surrogateescape"
    )


def owners_of(prefix: str) -> set[int]:
    """Return the users whose archives are trusted: root, this user, the environment's owner."""
    return {0, os.geteuid(), os.stat(prefix).st_uid}


def get_archive(
    environment: Environment, note: Callable[[str], None], *, for_all: bool = False
) -> Archive:
    """Return the archive of an environment; pack it where none is kept. Raises StagingError.

    note: prints a line of progress. for_all: other users read the archive, and leave no trace of
    that. So it is kept for as long as it matches its environment, and lies beside it.
    """
    folders = cache_folders(environment.prefix)
    if for_all:
        folders = folders[:-1]
    owners = owners_of(environment.prefix)
    key = find_key(environment, folders, owners)
    for folder in folders:
        kept = _kept(folder, key, owners)
        if kept is not None:
            if for_all and not kept.for_all:
                _write_record(folder, kept.archive, environment, for_all)
            return kept.archive
    problem = f"{environment.prefix} belongs to the system, and holds no archives"
    for folder in folders:
        try:
            make_folders(folder)
            with contextlib.ExitStack() as stack:
                with contextlib.suppress(OSError):  # without locks, each launch packs for itself
                    stack.enter_context(locked(folder, key))
                    if kept := _kept(folder, key, owners):  # another launch has packed it meanwhile
                        return kept.archive
                    remove_leftovers(folder, key)
                stack.enter_context(cleanup_at_signals())
                return _pack(environment, key, folder, note, for_all)
        except OSError as error:
            problem = f"{folder} cannot hold the archive ({error.strerror or error})"
    if for_all:
        raise StagingError(
            f"{problem}. Expected an environment of its own, and space there. Run this command as "
            "its owner, or as root"
        )
    raise StagingError(f"{problem}. Expected space for it there. Make some, or set XDG_CACHE_HOME")


def cache_folders(prefix: str = "") -> list[str]:
    """Return the folders for archives: one beside the environment, then the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    own = os.path.join(cache, "ddpkit", "stage")
    return [own] if prefix in ("", *SYSTEM) else [os.path.join(prefix, ".ddpkit-stage"), own]


def _kept(folder: str, key: str, owners: set[int]) -> Record | None:
    """Return a kept archive, and record its use; None if there is no usable one."""
    record = _read_record(folder, key, owners)
    if record is not None:
        with contextlib.suppress(OSError):  # another user's archive
            os.utime(record.archive.path)
    return record


def _read_record(folder: str, key: str, owners: set[int]) -> Record | None:
    """Return the record of an archive; None if the archive has changed since."""
    try:
        with open(open_owned(os.path.join(folder, f"{key}.json"), owners)) as file:
            found: dict[str, Any] = json.load(file)
        archive = Archive(**{**found["archive"], "path": os.path.join(folder, f"{key}.tar")})
        with open(open_owned(archive.path, owners), "rb") as tar:
            status = os.fstat(tar.fileno())
        if archive.key != key or status.st_size != archive.size:
            return None
        environment = Environment(**found["environment"])
        return Record(archive, environment, found["for_all"], status.st_uid, status.st_mtime)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _write_record(folder: str, archive: Archive, environment: Environment, for_all: bool) -> None:
    found = {
        "archive": archive._asdict(),
        "environment": environment._asdict(),
        "for_all": for_all,
    }
    descriptor, temporary = tempfile.mkstemp(prefix=".json-", dir=folder)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(found, file)
        os.fchmod(descriptor, 0o644)
    os.replace(temporary, os.path.join(folder, f"{archive.key}.json"))


def records_in(folder: str, owners: set[int]) -> Iterator[Record]:
    """Yield the complete archives in a folder that belong to these users."""
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(folder)):
            key, _, kind = name.partition(".")
            if kind == "json" and (record := _read_record(folder, key, owners)):
                yield record


def fits(record: Record, current: Environment | None = None) -> bool:
    """Whether launches may still use an archive; True if that cannot be told.

    current: an environment as it is now, possibly the archive's.
    """
    environment = record.environment
    if current is not None and current.prefix == environment.prefix:
        if current.version != environment.version:
            return False
    folder = os.path.dirname(record.archive.path)
    try:
        return find_key(environment, [folder], owners_of(environment.prefix)) == record.archive.key
    except FileNotFoundError:
        return False
    except (OSError, StagingError):
        return True


def remove_archives(
    folder: str, note: Callable[[str], None], current: Environment | None = None
) -> None:
    """Remove this user's archives in a folder that no longer fit their environment.

    note: called with a line for each. current: see fits(). Raises OSError if one cannot be
    removed.
    """
    owners = owners_of(current.prefix) if current else {os.geteuid()}
    for record in list(records_in(folder, owners)):
        key, path = record.archive.key, record.archive.path
        if record.owner != os.geteuid() or fits(record, current):
            continue
        if record.used > time.time() - _READING_SECONDS:
            note(f"kept {path}: a launch has used it within the last hour")
            continue
        try:
            with locked(folder, key, wait=False):
                for kind in ("json", "tar", "lock"):
                    os.unlink(os.path.join(folder, f"{key}.{kind}"))
        except BlockingIOError:
            note(f"kept {path}: a launch packs it")
            continue
        size = record.archive.size / 1e6
        note(f"removed {path}, {size:.0f} MB: {record.archive.prefix} has changed since")


def _pack(
    environment: Environment, key: str, folder: str, note: Callable[[str], None], for_all: bool
) -> Archive:
    _remove_old(folder, environment)
    start = shown = time.monotonic()
    note(f"staging: packing {', '.join(source for source, _ in environment.staged)}")
    with tempfile.TemporaryDirectory(prefix=f".{key}-", dir=folder) as temporary:
        digest, count = hashlib.sha256(), 0
        with open(f"{temporary}/tar", "wb", buffering=CHUNK_BYTES) as file:
            with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as tar:
                tar.copybufsize = CHUNK_BYTES  # type: ignore[attr-defined]
                for member in members_of(environment):
                    digest.update(line_of(_add(tar, member)))
                    count += member.kind != "folder"
                    if time.monotonic() - shown > _LINE_SECONDS:
                        shown = time.monotonic()
                        note(f"staging: {count} files, {file.tell() / 1e6:.0f} MB so far")
                    tar.members.clear()  # type: ignore[attr-defined]  # it would hold all of them
            file.flush()
            size = file.tell()
        archive = Archive(
            key, os.path.join(folder, f"{key}.tar"), size, count, digest.hexdigest(),
            environment.prefix, environment.also,
        )  # fmt: skip
        os.chmod(f"{temporary}/tar", 0o644)
        os.replace(f"{temporary}/tar", archive.path)
    _write_record(folder, archive, environment, for_all)
    seconds = time.monotonic() - start
    note(f"staging: packed {count} files, {size / 1e6:.0f} MB, in {seconds:.1f} s: {archive.path}")
    return archive


def _add(tar: tarfile.TarFile, member: Member) -> tarfile.TarInfo:
    info = tarfile.TarInfo(member.name)
    info.type, info.mode = _TYPES[member.kind], member.mode
    if member.kind != "folder":  # a folder's time changes when Python compiles a module in it
        info.mtime = member.mtime_ns // 10**9  # whole seconds, as compiled modules record them
    if member.kind == "link":
        info.linkname = member.text
        tar.addfile(info)
    elif member.kind == "file" and not member.text:
        info.size = member.size
        with open(member.source, "rb") as source:
            tar.addfile(info, source)
    else:
        text = member.text.encode()
        info.size = len(text)
        tar.addfile(info, io.BytesIO(text))
    return info


def _remove_old(folder: str, current: Environment) -> None:
    """Remove archives that no launch has used for a while, except one for all that still fits."""
    oldest = time.time() - _OLD_SECONDS
    kept = set()
    for record in records_in(folder, owners_of(current.prefix)):
        if record.for_all and fits(record, current):
            key, index = record.archive.key, name_of(record.environment)
            kept |= {f"{key}.tar", f"{key}.json", f"{index}.index"}
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.name not in kept and entry.stat(follow_symlinks=False).st_mtime < oldest:
                    shutil.rmtree(entry.path) if entry.is_dir() else os.unlink(entry.path)
