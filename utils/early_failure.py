"""Report to `ddpkit launch` an exception of a rank without a process group. No torch."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.machinery
import os
import signal
import socket
import traceback
from collections.abc import Callable, Iterator

from .launch_protocol import (
    EARLY,
    STAGED_COPY,
    TRACEBACK,
    Failure,
    Unimported,
    describe,
    query,
    send,
)
from .launchers.rank_variables import LAUNCH_RANK
from .phrases import ENDED_BY, ENDED_WITH, FAILED

_ANSWER_SECONDS = 1.0  # seconds until it prints a traceback that another rank may have shown
# Exit statuses of ranks that torchrun has ended, or that raised an exception and reported it.
_NO_FIRST_ENDS = (0, 1, -signal.SIGTERM)


def report(error: Exception, show: Callable[[], object], *, shares_output: bool) -> bool:
    """Print and report what has ended this rank, or a rank of this torchrun. Returns True.

    show: prints the traceback. It is not called if another rank has printed the same one.
    shares_output: whether this rank prints to the standard error that its launch has given it.
    """
    text, _, _ = os.environ.get("RANK", os.environ.get(LAUNCH_RANK, "")).partition("/")
    if type(error).__name__ == "ChildFailedError" or not text.isdecimal():
        show()
        if type(error).__name__ == "ChildFailedError":
            _report_rank_of_torchrun(error)
        return True
    rank, host = int(text), socket.gethostname()
    failure = Failure(f"rank {rank} on {host} {FAILED} {describe(error)}", "exception", rank, host)
    with _later_stops():
        digest = _digest(error)
        is_printed = shares_output and _is_printed(digest, failure)
        if not is_printed:
            show()
        found = find_unimported(error, os.environ.get(STAGED_COPY, ""))
        send(
            EARLY, os.environ, failure, digest=digest, has_printed=not is_printed, unimported=found
        )
    return True


def find_unimported(error: Exception, copy: str) -> Unimported | None:
    """Return what could not be imported from a copy of --stage; None for another error.

    That is a library of the copy that cannot be loaded, or a package of it that raises while it is
    imported, and perhaps only there: it may look for files where it was installed.
    """
    if not copy or not isinstance(error, ImportError | OSError):
        return None
    inside, module = os.path.join(copy, ""), ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        name, code = frame.f_globals.get("__name__", "__main__"), frame.f_code
        is_import = code.co_name == "<module>" and name != "__main__"
        if is_import and code.co_filename.startswith(inside):
            module = str(name)
    path = getattr(error, "path", None) or ""
    if path.startswith(inside) and path.endswith(tuple(importlib.machinery.EXTENSION_SUFFIXES)):
        module = str(getattr(error, "name", None) or os.path.basename(path))
    return Unimported(module, describe(error), copy, socket.gethostname()) if module else None


def _digest(error: Exception) -> str:
    with contextlib.suppress(Exception):  # the script's own __str__() may fail
        text = "".join(traceback.format_exception(error))
        return hashlib.sha256(text.encode(errors="replace")).hexdigest()
    return ""


def _is_printed(digest: str, failure: Failure) -> bool:
    """Whether the launch knows that another rank has printed the same traceback."""
    with contextlib.suppress(Exception):  # printing twice is better than not at all
        answer = query(TRACEBACK, os.environ, failure, seconds=_ANSWER_SECONDS, digest=digest)
        return bool(digest and answer and answer.get("is_printed"))
    return False


@contextlib.contextmanager
def _later_stops() -> Iterator[None]:
    """Delay SIGTERM, with which the launch ends this rank after another has failed."""
    received: list[int] = []
    try:
        previous = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if previous is None else previous)
        if received:
            os.kill(os.getpid(), signal.SIGTERM)


def _report_rank_of_torchrun(error: Exception) -> None:
    """Report the rank that ended first, from torch.distributed.elastic's ChildFailedError."""
    failures = getattr(error, "failures", {})  # rank -> its failure
    ends = [(each.timestamp, rank, each.exitcode) for rank, each in failures.items()]
    first = [end for end in sorted(ends) if end[2] not in _NO_FIRST_ENDS]
    if not first:
        return
    _, rank, code = first[0]
    how = f"{ENDED_WITH} {code}"
    if code < 0:
        how = f"{ENDED_BY} {signal.Signals(-code).name} (exit status {128 - code})"
    host = socket.gethostname()
    send(
        EARLY,
        os.environ,
        Failure(f"rank {rank} on {host} {how}", "killed" if code < 0 else "status", rank, host),
    )
