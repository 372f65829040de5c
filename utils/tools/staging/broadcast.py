"""Send the archive to all nodes by MPI: a program that an mpiexec starts once on each of them."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
from collections.abc import Mapping
from typing import Any

from . import Archive
from .node_copy import candidates, is_kept
from .room import needed_bytes

FAILED = "ddpkit-stage-failed "  # before what ends the broadcast, in the output of a process
NOT_WRITTEN = "ddpkit-stage-not-written "  # before why one node does not keep the archive
_CHUNK_BYTES = 64 << 20


def main(order: Mapping[str, Any]) -> None:
    """Read the archive on the first node, and write it on the others.

    A node without room takes part, and writes nothing. Anything else that goes wrong is printed:
    ddpkit launch then ends the processes of all nodes, which may wait for this one in MPI.

    order: archive, stage_dir; target: where to write; hosts: their number; seconds: for all.
    """
    signal.alarm(int(order["seconds"]))  # also where nobody is left who could end it
    try:
        from mpi4py import MPI  # type: ignore[import-not-found,unused-ignore]

        world = MPI.COMM_WORLD
        if world.size != order["hosts"]:
            size = f"MPI has {world.size} processes instead of {order['hosts']}"
            raise OSError(f"{size}: mpi4py belongs to another MPI than mpiexec")
        _broadcast(world, Archive(*order["archive"]), order)
    except BaseException as error:
        _print(FAILED, f"{type(error).__name__}: {error}")
        signal.pause()  # an exit would wait for the other processes, or end them before this line


def _broadcast(world: Any, archive: Archive, order: Mapping[str, Any]) -> None:
    is_first, target = world.rank == 0, order["target"]
    file = os.open(archive.path, os.O_RDONLY) if is_first else _create(archive, order)
    buffer, left = memoryview(bytearray(min(_CHUNK_BYTES, archive.size))), archive.size
    while left:
        chunk = buffer[: min(len(buffer), left)]
        if is_first and file is not None:
            _read(file, chunk)
        world.Bcast(chunk, 0)
        if not is_first and file is not None:
            try:
                _write(file, chunk)
            except OSError as error:
                _print(NOT_WRITTEN, str(error.strerror))
                os.close(file)
                os.unlink(target)
                file = None
        left -= len(chunk)


def _create(archive: Archive, order: Mapping[str, Any]) -> int | None:
    """Create the file on this node; None where it has a copy, or no room for both."""
    target, stage_dir = order["target"], order["stage_dir"]
    folder = os.path.dirname(target)
    try:
        if stage_dir:
            os.makedirs(folder, exist_ok=True)
        if is_kept(archive.key, candidates(stage_dir, os.environ)):
            return None
        if shutil.disk_usage(folder).free < archive.size + needed_bytes(archive):
            raise OSError(errno.ENOSPC, "no room for the archive beside the copy")
        return os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        _print(NOT_WRITTEN, str(error.strerror))
        return None


def _read(file: int, chunk: memoryview) -> None:
    while chunk:
        if not (count := os.readv(file, [chunk])):
            raise OSError("the archive ends early: torn")
        chunk = chunk[count:]


def _write(file: int, chunk: memoryview) -> None:
    while chunk:
        chunk = chunk[os.write(file, chunk) :]


def _print(mark: str, text: str) -> None:
    line = " ".join(text.split())
    sys.stdout.write(f"{mark}{os.uname().nodename}: {line}\n")
    sys.stdout.flush()
