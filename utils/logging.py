"""Logging that knows the rank: rank 0 tells what happens, every rank warns. Set up once, by setup_distributed().

Information goes to standard output, warnings and errors to standard error with rank and host in front.
"""
from __future__ import annotations

import logging
import socket
import sys

_ROOT = "ddpkit"


def get_logger(name: str) -> logging.Logger:
    """A logger for a module or script: info() prints on rank 0 alone, warning() and error() on every rank."""
    return logging.getLogger(f"{_ROOT}.{name}")


def setup_logging(rank: int, world_size: int) -> None:
    """Set the level and the form of all loggers of get_logger(); a second call replaces the first."""
    root = logging.getLogger(_ROOT)
    root.handlers[:] = [_ByLevel(rank, world_size)]
    root.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    root.propagate = False


class _ByLevel(logging.Handler):
    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self._where = f"[rank {rank}/{world_size} {socket.gethostname()}] " if world_size > 1 else ""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            loud = record.levelno >= logging.WARNING
            text = f"{self._where}{record.levelname}: {self.format(record)}" if loud else self.format(record)
            # Looked up anew each time, so that a redirected sys.stdout is honoured; one write keeps lines whole.
            stream = sys.stderr if loud else sys.stdout
            stream.write(text + "\n")
            stream.flush()
        except (OSError, ValueError):  # a closed stream or a full disk must not end the training
            self.handleError(record)
