"""Send the archive to all nodes by MPI; an mpiexec starts this program once on each of them."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ...host.trust import make_folders
from . import Archive
from .node_copy import candidates, is_kept
from .room import free_bytes, needed_bytes

FAILED = "ddpkit-stage-failed "  # prefix of an error that ends the broadcast
NOT_WRITTEN = "ddpkit-stage-not-written "  # prefix: why a node does not keep the archive
_PIECE_BYTES = 4 << 20
_BUFFERS = 3
_POLL_SECONDS = 0.001


def main(order: Mapping[str, Any]) -> None:
    """Read the archive on the first node, and write it on the others.

    A node without room takes part, but writes nothing. The file gets its name only when all nodes
    have all of it, so a launch that is killed meanwhile leaves no file.
    Any other error is printed. ddpkit launch then ends the processes on all nodes, which may wait
    for this one in MPI.

    order: archive, stage_dir; target: path of the file; hosts: their number; seconds: time limit.
    """
    signal.alarm(int(order["seconds"]))  # ends the process even if nobody else can
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
    """Pass pieces from each node to the next, all nodes at the same time.

    MPI_Bcast of large buffers takes two to four times as long on links of 1 Gbit/s.
    """
    rank, target = world.rank, order["target"]
    file = _create(archive, order) if rank else os.open(archive.path, os.O_RDONLY)
    buffers = [memoryview(bytearray(_PIECE_BYTES)) for _ in range(_BUFFERS)]
    pieces = -(-archive.size // _PIECE_BYTES)
    sends: dict[int, Any] = {}

    def buffer_of(piece: int) -> memoryview:
        if piece - _BUFFERS in sends:  # that send used the same buffer
            _wait(sends.pop(piece - _BUFFERS))
        return buffers[piece % _BUFFERS][: archive.size - piece * _PIECE_BYTES]

    incoming = world.Irecv(buffer_of(0), rank - 1) if rank else None
    for piece in range(pieces):
        if rank:
            _wait(incoming)
            chunk = buffers[piece % _BUFFERS][: archive.size - piece * _PIECE_BYTES]
            if piece + 1 < pieces:
                incoming = world.Irecv(buffer_of(piece + 1), rank - 1)
        else:
            chunk = buffer_of(piece)
            _read(file or 0, chunk)
        if rank + 1 < world.size:
            sends[piece] = world.Isend(chunk, rank + 1)
        if rank and file is not None:
            try:
                _write(file, chunk)
            except OSError as error:
                _print(NOT_WRITTEN, str(error.strerror))
                os.close(file)
                with suppress(FileNotFoundError):
                    os.unlink(target)
                file = None
    for send in sends.values():
        _wait(send)
    _wait(world.Ibarrier())
    if rank and file is not None:
        _give_name(file, target)


def _wait(request: Any) -> None:
    while not request.Test():  # Wait() would use a whole core, which other jobs may need
        time.sleep(_POLL_SECONDS)


def _create(archive: Archive, order: Mapping[str, Any]) -> int | None:
    """Create the file on this node; None if it has a copy, or no room for both."""
    target, stage_dir = order["target"], order["stage_dir"]
    folder = os.path.dirname(target)
    try:
        if stage_dir:
            make_folders(folder)
        if is_kept(archive.key, candidates(stage_dir, os.environ)):
            return None
        if free_bytes(folder) < archive.size + needed_bytes(archive):
            raise OSError(errno.ENOSPC, "no room for the archive beside the copy")
        with suppress(OSError):  # some network file systems have no files without a name
            return os.open(folder, os.O_WRONLY | os.O_TMPFILE, 0o600)
        return os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        _print(NOT_WRITTEN, str(error.strerror))
        return None


def _give_name(file: int, target: str) -> None:
    if os.fstat(file).st_nlink:
        return
    folder = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.link(str(file), target, src_dir_fd=folder)  # follows the link in /proc only with dir_fd
    except OSError as error:
        _print(NOT_WRITTEN, str(error.strerror))
    finally:
        os.close(folder)


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
