"""The file of one rank about a hang: its stacks and last collectives. Loaded with a HangWatch."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import traceback
from typing import TextIO

from ..log import get_logger
from .collectives import show_collectives
from .shutdown import write_error_file

_log = get_logger(__name__)
_KIT = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")


def write_hang_report(rank: int, folder: str, cause: str) -> None:
    """Write the Python stacks of all threads and the last collectives of this rank to a file.

    folder: "" for no file. Where it is not writable, stderr gets all. torchrun's agent gets the
    cause in any case.
    """
    name = f"rank{rank}-{socket.gethostname()}.txt"
    if folder:
        try:
            os.makedirs(folder, exist_ok=True)
            # "x" follows no link that another user has put there: the folder's name is foreseen.
            with open(os.path.join(folder, name), "x", encoding="utf-8") as file:
                _write_stacks(file, cause)
        except OSError as error:
            _log.error("no hang report in %s: %s", folder, error.strerror)
            with contextlib.suppress(OSError):
                _write_stacks(sys.stderr, cause)
    write_error_file(cause, is_root_cause=False)


def _write_stacks(file: TextIO, cause: str) -> None:
    """Write the stacks, those of the script before those of the kit's own threads."""
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
    file.write(f"\n{show_collectives()}")


def _is_of_kit(line: str) -> bool:
    """Whether a line of a stack is in this package, or in the library that starts its threads."""
    path = line.split('"')[1] if '"' in line else ""
    return path.startswith((_KIT, os.path.dirname(threading.__file__)))
