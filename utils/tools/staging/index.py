"""Find the key of an unchanged environment without a walk over its files.

The index has the time of each folder, and the time and size of each file that Python may load. New,
removed and renamed files change the time of their folder. C headers and type stubs, half of all
files, are not in the index: if one of them is edited in place, that is not noticed.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from array import array
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import chain

from ...host.trust import make_folders, open_owned
from .packages import Environment, Member, key_of, name_of

_NOT_LOADED = (".h", ".hpp", ".cuh", ".pyi")
_TRIED = 50  # files to time first
_SLOW_SECONDS = 50e-6  # seconds per file; if slower, threads are worth their start
_THREADS = 16  # a parallel file system answers many requests at once
_SETTLED_NS = 2 * 10**9  # nanoseconds; a younger file may change again without a new time


def find_key(environment: Environment, folders: Sequence[str], owners: set[int]) -> str:
    """Return the key of an environment, from an index in one of these folders if it is valid."""
    name = f"{name_of(environment)}.index"
    for folder in folders:
        with suppress(OSError, ValueError):
            with open(open_owned(os.path.join(folder, name), owners), "rb") as file:
                header, *paths = file.read().split(b"\0")
            key, digest, count = header.decode("ascii").split()
            if digest == _digest(paths[: int(count)], paths[int(count) :]):
                with suppress(OSError):  # the folder belongs to another user
                    os.utime(os.path.join(folder, name))
                return key
    return _walk(environment, [os.path.join(folder, name) for folder in folders])


def _walk(environment: Environment, indexes: Sequence[str]) -> str:
    """Return the key of an environment by a walk over all its files; write an index."""
    paths: tuple[list[bytes], list[bytes]] = ([], [])
    numbers: tuple[array[int], array[int]] = (array("q"), array("q"))

    def visit(member: Member) -> None:
        is_folder = member.kind == "folder"
        if not is_folder and (member.kind == "link" or member.source.endswith(_NOT_LOADED)):
            return
        paths[not is_folder].append(os.fsencode(member.source))
        numbers[not is_folder].append(member.mtime_ns)
        if not is_folder:
            numbers[1].append(member.size)

    start = time.time_ns()
    key = key_of(environment, visit)
    if (
        max(numbers[0]) < start - _SETTLED_NS
        and max(numbers[1][::2], default=0) < start - _SETTLED_NS
    ):
        digest = hashlib.sha256(numbers[0].tobytes() + numbers[1].tobytes()).hexdigest()
        header = f"{key} {digest} {len(paths[0])}".encode("ascii")
        for index in indexes:
            with suppress(OSError):
                _write(index, b"\0".join([header, *paths[0], *paths[1]]))
                break
    return key


def _write(path: str, content: bytes) -> None:
    make_folders(os.path.dirname(path))
    descriptor, temporary = tempfile.mkstemp(prefix=".index-", dir=os.path.dirname(path))
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            os.fchmod(descriptor, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _digest(folders: Sequence[bytes], files: Sequence[bytes]) -> str:
    """Return a hash over folders' times, and files' times and sizes. Raises OSError."""
    times = [status.st_mtime_ns for status in _status(folders)]
    both = [(status.st_mtime_ns, status.st_size) for status in _status(files)]
    numbers = array("q", [*times, *chain.from_iterable(both)])
    return hashlib.sha256(numbers.tobytes()).hexdigest()


def _status(paths: Sequence[bytes]) -> Iterable[os.stat_result]:
    """Return the status of each file, in threads if the file system is slow."""
    seconds = []
    for path in paths[:_TRIED]:
        start = time.perf_counter()
        os.lstat(path)
        seconds.append(time.perf_counter() - start)
    if not seconds or sorted(seconds)[len(seconds) // 2] < _SLOW_SECONDS:
        return map(os.lstat, paths)
    from concurrent.futures import ThreadPoolExecutor  # slow to load, and seldom needed

    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(os.lstat, paths))
