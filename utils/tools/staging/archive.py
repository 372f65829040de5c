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
from collections.abc import Callable

from ...host.trust import make_folders, open_owned
from . import Archive, StagingError
from .index import find_key
from .kept import cleanup_at_signals, locked, remove_leftovers
from .packages import Environment, Member, members_of

CHUNK_BYTES = 1 << 20
_LINE_SECONDS = 10.0  # between two lines of progress
_OLD_SECONDS = 24 * 3600.0  # an archive of another content, which no launch reads any more
_TYPES = {"file": tarfile.REGTYPE, "link": tarfile.SYMTYPE, "folder": tarfile.DIRTYPE}


def line_of(info: tarfile.TarInfo) -> bytes:
    """Return what a member adds to the hash over the list of members."""
    return f"{info.name} {info.size} {int(info.mtime)} {info.linkname}\n".encode(
        errors="surrogateescape"
    )


def owners_of(prefix: str) -> set[int]:
    """Return the users whose archives of an environment are used: its owner's are as good as it."""
    return {0, os.geteuid(), os.stat(prefix).st_uid}


def get_archive(environment: Environment, note: Callable[[str], None]) -> Archive:
    """Return the archive of an environment; pack it where none is kept. Raises StagingError.

    note: prints a line of progress.
    """
    folders = _cache_folders(environment)
    owners = owners_of(environment.prefix)
    key = find_key(environment, folders, owners)
    for folder in folders:
        kept = _kept(folder, key, owners)
        if kept is not None:
            return kept
    problem = ""
    for folder in folders:
        try:
            make_folders(folder)
            with contextlib.ExitStack() as stack:
                with contextlib.suppress(OSError):  # without locks, each launch packs for itself
                    stack.enter_context(locked(folder, key))
                    if kept := _kept(folder, key, owners):  # packed by another launch meanwhile
                        return kept
                    remove_leftovers(folder, key)
                stack.enter_context(cleanup_at_signals())
                return _pack(environment, key, folder, note)
        except OSError as error:
            problem = f"{folder} cannot hold the archive ({error.strerror or error})"
    raise StagingError(f"{problem}. Expected space for it there. Make some, or set XDG_CACHE_HOME")


def _cache_folders(environment: Environment) -> list[str]:
    """Return where archives are kept: beside the environment, else in the cache of the user."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    own = os.path.join(cache, "ddpkit", "stage")
    beside = os.path.join(environment.prefix, ".ddpkit-stage")
    is_system = environment.prefix in ("/", "/usr", "/usr/local")
    return [own] if is_system else [beside, own]


def _kept(folder: str, key: str, owners: set[int]) -> Archive | None:
    """Return a kept archive; None where there is none, or it is not as it was written."""
    try:
        with open(open_owned(os.path.join(folder, f"{key}.json"), owners)) as file:
            found = Archive(**{**json.load(file), "path": os.path.join(folder, f"{key}.tar")})
        with open(open_owned(found.path, owners), "rb") as tar:
            if found.key != key or os.fstat(tar.fileno()).st_size != found.size:
                return None
        with contextlib.suppress(OSError):  # of another user
            os.utime(found.path)
        return found
    except (OSError, ValueError, TypeError):
        return None


def _pack(environment: Environment, key: str, folder: str, note: Callable[[str], None]) -> Archive:
    _remove_old(folder)
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
        with open(f"{temporary}/json", "w", encoding="utf-8") as text:
            json.dump(archive._asdict(), text)
        for name in ("tar", "json"):
            os.chmod(f"{temporary}/{name}", 0o644)
            os.replace(f"{temporary}/{name}", os.path.join(folder, f"{key}.{name}"))
    seconds = time.monotonic() - start
    note(f"staging: packed {count} files, {size / 1e6:.0f} MB, in {seconds:.1f} s: {archive.path}")
    return archive


def _add(tar: tarfile.TarFile, member: Member) -> tarfile.TarInfo:
    info = tarfile.TarInfo(member.name)
    info.type, info.mode = _TYPES[member.kind], member.mode
    if member.kind != "folder":  # one changes its time when Python compiles a module in it
        info.mtime = member.mtime_ns // 10**9  # the second, which compiled modules record
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


def _remove_old(folder: str) -> None:
    """Remove archives that no launch has used for a while."""
    oldest = time.time() - _OLD_SECONDS
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.stat(follow_symlinks=False).st_mtime < oldest:
                    shutil.rmtree(entry.path) if entry.is_dir() else os.unlink(entry.path)
