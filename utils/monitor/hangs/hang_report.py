"""Start the watch for hangs; write one rank's report of a hang: stacks and last collectives.

Loaded a little after the start, since it imports much. It cannot wait for a hang: the file system
may be what hangs.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import TextIO

import torch

from ...launch_protocol import notice_after
from ...launchers.torchrun import write_error_file
from ...log import get_logger
from . import collectives
from .hang_watch import HangWatch, time_before

_log = get_logger(__name__)
_KIT = os.path.join(Path(__file__).absolute().parents[2], "")


def write_hang_report(rank: int, folder: str, cause: str) -> None:
    """Write the Python stacks of all threads and the last collectives of this rank to a file.

    folder: "" to write no file. If it is not writable, the report goes to stderr. torchrun's agent
    gets the cause in any case.
    """
    name = f"rank{rank}-{socket.gethostname()}.txt"
    if folder:
        try:
            os.makedirs(folder, exist_ok=True)
            # Others can predict the folder's name: "x" follows no link that they have put there.
            with open(os.path.join(folder, name), "x", encoding="utf-8") as file:
                _write_stacks(file, cause)
        except OSError as error:
            _log.error("no hang report in %s: %s", folder, error.strerror)
            with contextlib.suppress(OSError):
                _write_stacks(sys.stderr, cause)
    write_error_file(cause, is_root_cause=False)


def _write_stacks(file: TextIO, cause: str) -> None:
    """Write the script's stacks first, then the kit's own threads."""
    file.write(f"{cause}\n\nStacks, innermost frame last:\n")
    threads = {thread.ident: thread for thread in threading.enumerate()}
    main = threading.main_thread()
    stacks = []
    for ident, frame in sys._current_frames().items():
        thread = threads.get(ident)
        lines = traceback.format_stack(frame)
        is_of_kit = thread is not main and all(_is_of_kit(line) for line in lines)
        stacks.append((is_of_kit, thread is not main, thread.name if thread else "", lines))
    for *_, name, lines in sorted(stacks, key=lambda stack: stack[:2]):
        file.write(f"\nThread {name}:\n{''.join(lines)}")
    file.write(f"\n{collectives.show_collectives()}")


def _is_of_kit(line: str) -> bool:
    """Whether a line of a stack is in this package, or in the library that starts its threads."""
    path = line.split('"')[1] if '"' in line else ""
    return path.startswith((_KIT, os.path.dirname(threading.__file__)))


_log = get_logger(__name__)


def make_watch(
    rank: int,
    world_size: int,
    backend: str,
    seconds: float,
    *,
    before_torch: bool = False,
    ends_itself: bool = False,
) -> HangWatch:
    """Return the watch that decides whether the ranks hang.

    seconds: limit without progress. before_torch: `seconds` is torch's own time limit, and the
    ranks end shortly before it. ends_itself: see HangWatch.
    """
    has_recorder = collectives.has_recorder()
    if not has_recorder and not before_torch and rank == 0:
        _log.warning(
            f"torch {torch.__version__} does not record the collectives of {backend} "
            f"(TORCH_FR_BUFFER_SIZE={os.environ.get('TORCH_FR_BUFFER_SIZE', '')!r}): the cause "
            "of a hang is then found from stacks and counts of collectives alone. Unset this "
            "variable if it is 0; otherwise use a newer torch"
        )
    return HangWatch(
        time_before(seconds) if before_torch else seconds,
        world_size,
        recorded=has_recorder and backend == "gloo",  # gloo's waiting ranks use no CPU
        before_torch=before_torch,
        ends_itself=ends_itself,
        notice_after=notice_after(),
    )
