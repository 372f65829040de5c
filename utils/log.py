"""Log by rank: rank 0 prints information, every rank prints warnings and errors.

Information goes to standard output. Warnings and errors go to standard error, with rank and host
in front. setup_distributed() sets this up.
"""

from __future__ import annotations

import logging
import socket
import sys

_ROOT = "ddpkit"


def get_logger(name: str) -> logging.Logger:
    """Return a logger: info() prints on rank 0 only, warning() and error() on every rank."""
    return logging.getLogger(f"{_ROOT}.{name}")


def setup_logging(rank: int, world_size: int) -> None:
    """Set level and format of all loggers of get_logger(); a second call replaces the first."""
    root = logging.getLogger(_ROOT)
    root.handlers[:] = [_ByLevel(rank, world_size)]
    root.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    root.propagate = False


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
            # Looked up each time, so that a redirected sys.stdout is used. One write keeps lines
            # of several ranks whole.
            stream = sys.stderr if is_warning else sys.stdout
            stream.write(text + "\n")
            stream.flush()
        except (OSError, ValueError):  # a closed stream or a full disk must not end the training
            self.handleError(record)
