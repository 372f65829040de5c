"""End a rank: find which rank failed first, close in order, limit the time of the start.

The first rank to fail shows its traceback. The others name that rank, and do not show the
traceback of their own collective that failed because of it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from ..errors import LaunchError
from ..host import process
from ..launch_protocol import EXIT_REQUEUE, Failure, describe, may_have, report_first_cause
from ..launchers.launcher import Placement
from ..launchers.torchrun import write_error_file
from ..log import get_logger
from ..phrases import FAILED, LEFT
from . import exit_calls
from .counts import entered_collectives
from .monitor import Monitor

_log = get_logger(__name__)

_DESTROY_SECONDS = 20.0
_SLOWEST_RANK_SECONDS = 1800.0  # seconds for a last evaluation or save while others close
_ORDERLY_EXITS = (None, 0, EXIT_REQUEUE)  # values of SystemExit.code
_REPORTED = "_ddpkit_reported"  # attribute of an exception that has been printed
_FAILED_KEY, _CLOSING_KEY = "ddpkit/failed", "ddpkit/closing"  # keys in the store

# Messages of torch 2.13. gloo raises a plain RuntimeError: "[.../gloo/transport/tcp/pair.cc:553]
# Connection closed by peer [10.0.0.2]:57993". NCCL and the store raise DistError: "... Watchdog
# caught collective operation timeout".
_RUNTIME_ERROR_OF_TORCH = (
    r"gloo/[\w./-]+:\d+\] |\AOperation timed out!\Z|monitoredBarrier (after|in) \d+ ?ms"
    r"|lost the connection to rank (0's store|\d+, which has ended)"
    r"|the store that rank 0 or torchrun serves is no longer reachable"
)
# Errors that the kit raises on all ranks name the rank that failed: "cannot load /scratch/run/step-
# 000000001 on rank 1 on n2: the state does not match".
_FAILED_RANK = r" on rank (\d+) on ([\w.-]+): "
_MONITORED_BARRIER = r"Ranks? ([\d, ]+) failed to pass monitoredBarrier"
_DDP_ERROR = r"expects same model|appears not to match sizes|finished reduction in the prior"
_PEER_FAILURES = {
    "lost": r"(closed|reset) by (remote )?peer|Broken pipe|Connection (was likely )?closed"
    r"|remote process exited|ncclRemoteError|lost the connection"
    r"|store that rank 0 or torchrun serves is no longer reachable",
    "timeout": r"[Tt]im(e|ed|ing) ?out|monitoredBarrier",
}
_KIT = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_TORCH_AND_KIT = (os.path.join(os.path.dirname(os.path.abspath(torch.__file__)), ""), _KIT)


class Shutdown:
    """The end of one rank: orderly, or with a report of the first failure."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        backend: str,
        store: Store,
        monitor: Monitor | None,
        *,
        owns_group: bool = True,
    ) -> None:
        """Prepare the end.

        store: shared by all ranks. monitor: the connections to the other ranks; None where there
        are none. owns_group: whether the end destroys the process group.
        """
        self.store = store
        self._owns_group = owns_group
        self._monitor = monitor
        self._rank, self._world_size, self._backend = rank, world_size, backend
        self._this_rank = f"rank {rank} on {socket.gethostname()}"
        self._closed = False
        self._hook: Callable[..., None] | None = None
        self._previous_hook = sys.excepthook

    def register_hooks(self) -> None:
        """Report exceptions and sys.exit() also if the program uses no with statement."""
        if may_have("atexit"):
            atexit.register(self.at_exit)
        if not may_have("excepthook"):
            return
        exit_calls.record()
        previous = sys.excepthook

        def hook(
            kind: type[BaseException], error: BaseException, trace: TracebackType | None
        ) -> None:
            self.report(error)
            if not getattr(error, _REPORTED, False):
                previous(kind, error, trace)

        self._hook, self._previous_hook = hook, previous
        sys.excepthook = hook

    def _remove_hooks(self) -> None:
        """Remove the hooks, unless other code has added its own since."""
        atexit.unregister(self.at_exit)
        exit_calls.stop()
        if self._hook is not None and sys.excepthook is self._hook:
            sys.excepthook = self._previous_hook

    def exit(self, error: BaseException | None) -> None:
        """Leave the with statement: report `error`, if there is one, and close."""
        if error is not None:
            self.report(error)
        how = ""
        if error is not None:
            how = f"left by {_place_of(error, 'sys.exit()')}"
        self.close(orderly=error is None or _is_orderly(error), how=how)

    def close(self, *, orderly: bool = True, how: str = "") -> None:
        """Leave the other ranks and destroy the process group; a second call does nothing.

        orderly: expect that the other ranks close, too. NCCL's end waits for the ranks of the same
        host, so this rank first waits for all ranks. how: the reason that the other ranks report if
        they still need this one.
        """
        if self._closed:
            return
        self._closed = True
        how = how or _describe_leaving(LEFT)
        self._leave(self._departure(how), how)
        if not self._owns_group:
            self.store = HashStore()  # a group of this process may begin a store at the same port
            self._remove_hooks()
            return
        if orderly and self._backend != "gloo" and self._world_size > 1:
            self._wait_for_all()

        self.store = HashStore()  # rank 0's store and its port end with their last reference
        if dist.is_initialized() and not _ends_within(_DESTROY_SECONDS, dist.destroy_process_group):
            _log.error(
                "the process group could not be destroyed within %.0f s: a collective is still "
                "waiting for another rank. Ending this process",
                _DESTROY_SECONDS,
            )
            _exit_now()
        from ..host import gloo

        gloo.wait_for_threads()

    def report(self, error: BaseException, *, printed: bool = False) -> bool:
        """Print why this rank stops, once, and report it to the other ranks; return whether it did.

        The connections are still open and no other rank has noticed yet, so this traceback is
        printed first. printed: whether the script has printed it already.
        """
        if self._closed or _is_orderly(error) or getattr(error, _REPORTED, False):
            return False
        with contextlib.suppress(AttributeError):  # an exception class with __slots__
            setattr(error, _REPORTED, True)

        name, text = type(error).__name__, str(error).strip()
        description = describe(error)
        from .remedies import add_remedy  # imported only after a failure

        description = add_remedy(description, text)
        if re.search(_DDP_ERROR, text):
            from .ddp_errors import explain

            if details := explain(error, self._rank, self.store):
                description = f"{name}: {details}"
        named = re.search(_FAILED_RANK, description) if _raised_by_torch(error) else None
        rank, host = (int(named[1]), named[2]) if named else (self._rank, socket.gethostname())
        failed_rank = f"rank {rank} on {host}"
        failure = Failure(f"{failed_rank} {FAILED} {description}", "exception", rank, host)
        kind = peer_failure(error) if self._world_size > 1 else ""
        found = re.search(_MONITORED_BARRIER, text) if kind else None
        missing = [int(number) for number in re.findall(r"\d+", found[1])] if found else []
        first = self._first_cause(kind, failure, _place_of(error) if kind else "", missing)
        self._release_closing_ranks()

        is_root_cause = first == failure and failed_rank == self._this_rank
        another_rank_shows_it = not is_root_cause and (
            bool(first) and _raised_by_torch(error) if kind else first and description in first.text
        )
        message = failure.text
        if not first:
            message = (
                f"{self._this_rank} stops: {description}. No rank reported a cause: look for the "
                "first message of the others"
            )
        elif not is_root_cause:
            message = f"{self._this_rank} stops, because {first.text}"

        # The traceback of an exit does not explain a failure.
        is_exit = isinstance(error, SystemExit | KeyboardInterrupt)
        if not (printed or is_exit or another_rank_shows_it):
            sys.stderr.write("".join(traceback.format_exception(error)))
        if not first:  # otherwise ddpkit launch or one of the ranks prints it
            sys.stderr.write(f"{message}\n")
        sys.stderr.flush()
        write_error_file(message, is_root_cause=is_root_cause)
        if first and self._monitor is not None:
            self._monitor.report_to_launcher(first)
        elif first:
            report_first_cause(first, prints=first.rank == self._rank)
        self._leave(failure if is_root_cause else None)
        return True

    def _first_cause(
        self, kind: str, failure: Failure, place: str, missing: Sequence[int]
    ) -> Failure | None:
        """Return what failed first; None where no rank knows.

        kind: see peer_failure(). place: where the failed collective was called. missing: ranks that
        torch's error names.
        """
        if self._monitor is None:
            return None if kind else failure
        if kind:
            return self._monitor.find_cause(kind, place, missing)
        return self._monitor.report_failure(failure)

    def _leave(self, cause: Failure | None, how: str = LEFT) -> None:
        if self._monitor is not None:
            self._monitor.leave(cause, how)

    def _departure(self, how: str) -> Failure:
        """Return what others report if they still need this rank, which has not failed."""
        entered = entered_collectives()
        after = "" if entered is None else f" after {entered} collectives"
        text = (
            f"{self._this_rank} {how}{after}, and other ranks still wait for it. The ranks run "
            "different numbers of steps: give each the same number (DistributedSampler, "
            "drop_last=True), or train under DistributedDataParallel.join()"
        )
        return Failure(text, "uneven", self._rank, socket.gethostname())

    def _wait_for_all(self) -> None:
        """Wait until all ranks close, one has failed, or the slowest takes half an hour."""
        limit = time.monotonic() + _SLOWEST_RANK_SECONDS
        pause = max(0.05, self._world_size / 5000)
        with contextlib.suppress(RuntimeError):  # rank 0's exit closes the store
            closing = self.store.add(_CLOSING_KEY, 1)
            while closing < self._world_size and time.monotonic() < limit:
                if self.store.check([_FAILED_KEY]):
                    return
                time.sleep(pause)
                closing = self.store.add(_CLOSING_KEY, 0)

    def _release_closing_ranks(self) -> None:
        """End _wait_for_all() on the ranks that are closing already."""
        with contextlib.suppress(RuntimeError):  # rank 0's exit closes the store
            self.store.set_timeout(timedelta(seconds=3))
            self.store.set(_FAILED_KEY, "")

    def at_exit(self) -> None:
        """Report the exit: ranks that wait would not notice it without a with statement."""
        if not self._closed:
            # Python keeps an uncaught error here; a hook of the script may have only printed it.
            if error := getattr(sys, "last_value", None):
                self.report(error, printed=True)
            call = exit_calls.last_exit()
            if call is not None and call.status not in _ORDERLY_EXITS:
                self.report(call.handled or SystemExit(call.status), printed=True)
            how = _describe_leaving("ended its program (by its last line or sys.exit())")
            self._leave(self._departure(how), how)
        # NCCL's shutdown may wait for ranks that are still at work; the process's end does not.
        if self._backend == "gloo":
            self.close(orderly=False)


# Errors ------------------------------------------------------------------------------------------


def peer_failure(error: BaseException) -> str:
    """Return "lost" or "timeout" for torch's error because of another rank, "" for other errors."""
    text = str(error)
    is_of_torch = isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and re.search(_RUNTIME_ERROR_OF_TORCH, text)
    )
    if not is_of_torch:
        return ""
    return next((kind for kind, pattern in _PEER_FAILURES.items() if re.search(pattern, text)), "")


def _place_of(error: BaseException, call: str = "") -> str:
    """Return the call that raised an error, and its line: "barrier() at train.py, ...".

    call: the name to show; "" for the innermost function.
    """
    from .hangs.positions import user_frame

    frames = traceback.extract_tb(error.__traceback__)
    place = user_frame((f.filename, f.lineno or 0, f.name) for f in reversed(frames))
    names = (frame.name for frame in reversed(frames))
    name = next(
        (function for function in names if not function.startswith("_") and function != "wrapper"),
        "",
    )
    return f"{call or f'{name}()'} at {place}"


def _describe_leaving(otherwise: str) -> str:
    """Return how this rank leaves; after sys.exit() in its function, torch's @record goes on."""
    call = exit_calls.last_exit()
    return f"left by sys.exit() at {call.place}" if call is not None else otherwise


def _is_orderly(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and error.code in _ORDERLY_EXITS


def _raised_by_torch(error: BaseException) -> bool:
    """Whether the innermost frame is in torch or in this package, as for a collective."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and os.path.abspath(frames[-1].filename).startswith(_TORCH_AND_KIT)


# A failed start ----------------------------------------------------------------------------------


def connection_failure(
    placement: Placement, backend: str, error: Exception, monitor: Monitor
) -> LaunchError:
    """Return why torch could not connect the ranks: a rank that has died, or torch's error."""
    cause = monitor.start_failure(timeout=2)
    if cause:
        return LaunchError(cause.text, rank=cause.rank)
    interfaces = " ".join(
        f"{name}={os.environ.get(name, '')!r}"
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    )
    return LaunchError(
        f"rank {placement.rank} of {placement.world_size} on {socket.gethostname()}: all ranks "
        f"joined, but {backend} could not connect them: {' '.join(str(error).split())[:600]}. "
        "Another rank may have died since (look for its message). Otherwise check "
        f"{interfaces} and the firewalls between hosts"
    )


def print_without_traceback(failure: LaunchError) -> None:
    """Report an uncaught LaunchError without its traceback: once, if all ranks have the same."""
    if not may_have("excepthook"):
        return
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if error is failure:
            if not failure.reported_by_rank_0:
                report_first_cause(Failure(str(failure), "start", failure.rank, failure.host))
            write_error_file(str(failure), is_root_cause=not failure.reported_by_rank_0)
        else:
            previous(kind, error, trace)

    sys.excepthook = hook


@contextlib.contextmanager
def start_up_time_out(rank: int, world_size: int, timeout: float) -> Iterator[None]:
    """End this process when the start takes 10 % longer than `timeout` seconds.

    Every step of the start applies the timeout itself, but native code may wait without a limit.
    """
    done = threading.Event()

    def watch() -> None:
        if done.wait(timeout * 1.1 + 1):
            return
        # faulthandler would show the frames without their source lines.
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        stack = "".join(traceback.format_stack(frame)) if frame else ""
        sys.stderr.write(
            f"[rank {rank}/{world_size} {socket.gethostname()}] ERROR: the start did not end "
            f"within {timeout:.0f} s: another rank died or hangs (look for its message), or the "
            "hosts cannot reach each other on the chosen network interface. Stack of the main "
            "thread:\n"
            f"{stack}"
        )
        _exit_now()

    threading.Thread(target=watch, daemon=True, name="start-up time-out").start()
    try:
        yield
    finally:
        done.set()


def _ends_within(seconds: float, action: Callable[[], None]) -> bool:
    """Run `action` in a thread; return whether it ended in time. Its errors are logged."""

    def run() -> None:
        try:
            action()
        except (RuntimeError, ValueError) as error:
            _log.warning("destroying the process group: %s", error)

    thread = threading.Thread(target=run, daemon=True, name="close")
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def _exit_now() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    process.end(1)
