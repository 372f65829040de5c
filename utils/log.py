"""Log by rank: rank 0 prints information, every rank prints warnings and errors.

Information goes to standard output. Warnings and errors go to standard error, prefixed with rank
and host. setup_distributed() sets this up. show_progress() shows a line that the next output
replaces. print_result() prints the result of a command.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shutil
import socket
import sys
from typing import TextIO

_ROOT = "ddpkit"
_CLEAR_LINE = "\r\x1b[K"
_shows_progress = False


def get_logger(name: str) -> logging.Logger:
    """Return a logger: info() prints on rank 0 only, warning() and error() on every rank."""
    return logging.getLogger(f"{_ROOT}.{name}")


def setup_logging(rank: int, world_size: int) -> None:
    """Set level and format of all loggers from get_logger(). A second call replaces the first."""
    root = logging.getLogger(_ROOT)
    root.handlers[:] = [_ByLevel(rank, world_size)]
    root.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    root.propagate = False
    _escape_unknown_characters()
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.write_through:
        # `python -u` writes each part of a print() separately, so lines of two ranks would mix.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)


def show_progress(text: str) -> None:
    """Show a line until a logger's next output, if standard output is a terminal."""
    global _shows_progress
    if sys.stdout is not None and sys.stdout.isatty():
        width = shutil.get_terminal_size().columns - 1  # a line that wraps could not be cleared
        sys.stdout.write(_CLEAR_LINE + text[:width])
        sys.stdout.flush()
        _shows_progress = True


def clear_progress() -> None:
    """Remove the line shown by show_progress()."""
    global _shows_progress
    if _shows_progress:
        _shows_progress = False
        sys.stdout.write(_CLEAR_LINE)
        sys.stdout.flush()


def in_red(text: str, stream: TextIO | None) -> str:
    """Return a text in red for a terminal; unchanged for other streams or with NO_COLOR."""
    if stream is None or not stream.isatty() or os.environ.get("NO_COLOR"):
        return text
    return f"\033[1;31m{text}\033[0m"


def print_result(text: str) -> None:
    """Print the result of a command; characters that the encoding lacks are escaped.

    A reader that has ended, as in `COMMAND | head`, is not an error.
    """
    _escape_unknown_characters()
    try:
        print(text, flush=True)
    except BrokenPipeError:
        _discard(sys.stdout)


def _discard(stream: TextIO) -> None:
    """Redirect a stream whose reader has ended to /dev/null, so that a later flush succeeds."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _escape_unknown_characters() -> None:
    """Make standard output escape characters that its encoding lacks, as standard error does."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        with contextlib.suppress(OSError):  # a pipe has replaced its file by dup2()
            sys.stdout.reconfigure(errors="backslashreplace")


class _ByLevel(logging.Handler):
    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self._prefix = ""
        if world_size > 1:
            self._prefix = f"[rank {rank}/{world_size} {socket.gethostname()}] "

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text, is_warning = self.format(record), record.levelno >= logging.WARNING
            if is_warning:
                text = f"{self._prefix}{record.levelname}: {text}"
            clear_progress()
            if record.levelno >= logging.ERROR:
                text = in_red(text, sys.stderr)
            # Look sys.stdout up each time, because it may be redirected. A single write keeps the
            # lines of several ranks whole.
            stream = sys.stderr if is_warning else sys.stdout
            print(text + "\n", end="", file=stream, flush=True)  # None, if closed: no output
        except BrokenPipeError:
            _discard(stream)
        except (OSError, ValueError):  # a closed stream or a full disk must not end the training
            self.handleError(record)
