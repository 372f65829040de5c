"""Make the copy of the packages on a node: unpack the archive, and check the result."""

from __future__ import annotations

import glob
import hashlib
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress

from ...host.trust import open_owned
from . import PACKAGES, RECEIVED, Archive, StagingError
from .archive import CHUNK_BYTES, line_of, owners_of
from .kept import cleanup_at_signals, remove_leftovers
from .marker import moved_folders, write_marker
from .room import make_room

_START_SECONDS = 60.0
_OLD_SECONDS = 3600.0  # seconds; a launch reads an archive as soon as it was sent


def make(root: str, copy: str, archive: Archive, source: str) -> None:
    """Unpack the archive, check it, and give the copy its name. Raises StagingError, OSError."""
    with cleanup_at_signals():
        try:
            _make(root, copy, archive, source)
        except tarfile.TarError as error:
            raise StagingError(f"{source or archive.path}: {error}") from None


def _make(root: str, copy: str, archive: Archive, source: str) -> None:
    remove_leftovers(root, archive.key)
    _remove_received(os.path.dirname(root))
    # A sent archive belongs to the user; a kept one may belong to the environment's owner.
    owners = {os.geteuid()} if source else owners_of(archive.prefix)
    with open(open_owned(source or archive.path, owners), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size != archive.size:
            raise StagingError(
                f"{source or archive.path} has {size} bytes instead of {archive.size}: torn"
            )
        make_room(root, archive)
        temporary = tempfile.mkdtemp(prefix=f"{archive.key}-", dir=root)
        try:
            _unpack(file.fileno(), temporary, archive)
            _move_paths(temporary, moved_folders(copy, archive))
            write_marker(temporary)
            if os.path.exists(copy):  # it has lost files
                os.rename(copy, f"{temporary}-lost")
            os.rename(temporary, copy)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        shutil.rmtree(f"{temporary}-lost", ignore_errors=True)
    _check_start(copy)


def _remove_received(folder: str) -> None:
    """Remove archives that were sent to this node for launches that have been killed."""
    oldest = time.time() - _OLD_SECONDS
    for path in glob.glob(f"{glob.escape(folder)}/{RECEIVED.format('*')}"):
        with suppress(OSError):
            status = os.lstat(path)
            if status.st_uid == os.geteuid() and status.st_mtime < oldest:
                os.unlink(path)


def _unpack(descriptor: int, folder: str, archive: Archive) -> None:
    digest, count, folders = hashlib.sha256(), 0, {""}
    with tarfile.open(fileobj=os.fdopen(os.dup(descriptor), "rb", CHUNK_BYTES), mode="r:") as tar:
        while (info := tar.next()) is not None:
            tar.members.clear()  # type: ignore[attr-defined]  # it would hold all of them
            if info.name.startswith("/") or ".." in info.name.split("/"):
                raise StagingError(f"{archive.path} holds {info.name}, which leads out of it")
            if os.path.dirname(info.name) not in folders:
                raise StagingError(
                    f"{archive.path} holds {info.name}, and above it no folder, but perhaps a link"
                )
            path = os.path.join(folder, info.name)
            digest.update(line_of(info))
            if info.isdir():
                os.mkdir(path, 0o755)
                folders.add(info.name)
            elif info.issym():
                os.symlink(info.linkname, path)
            else:
                _write(path, descriptor, info)
            count += not info.isdir()
    if digest.hexdigest() != archive.members:
        with suppress(OSError):  # the next launch packs it again
            os.unlink(archive.path)
        raise StagingError(f"{archive.path} does not hold what was packed: torn, now removed")


def _move_paths(copy: str, moved: Mapping[str, str]) -> None:
    """Redirect editable packages to the staged folders, in code of .pth files and of finders."""
    files = [
        file
        for folder in ("lib/*/site-packages", f"{PACKAGES}/*")
        for pattern in ("*.pth", "__editable__*.py")
        for file in glob.glob(f"{glob.escape(copy)}/{folder}/{pattern}")
    ]
    for file in files:
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
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, info.mode & 0o777)
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
    """Raise StagingError if Python does not start from the copy, as on a noexec file system."""
    python = os.path.join(copy, "bin", "python")
    words = [python, "-I", "-c", "import sys; print(sys.prefix)"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=_START_SECONDS)
    if done.stdout.strip().split("\n")[-1] != copy:
        shutil.rmtree(copy, ignore_errors=True)
        problem = (done.stderr.strip().splitlines() or [f"its prefix is {done.stdout.strip()}"])[-1]
        raise StagingError(f"{python} does not start as expected ({problem})")
