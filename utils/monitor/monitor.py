"""Find out which rank ended, failed or hangs first, so that every rank can report the same cause.

Every rank keeps the connection of the start-up exchange until it leaves, and a thread listens to
it. A rank reports on it before it leaves or when it fails. A connection that ends without a report
belongs to a rank that was killed or crashed, or whose host is down. A rank whose collective fails
or times out queries rank 0 for the cause. No torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import math
import os
import selectors
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..channel import Channel, Message
from ..host import process
from .launch_report import Failure, report_first_cause

if TYPE_CHECKING:  # loaded when a rank hangs, times out or sends nothing, or with hang_timeout
    from .guard import Guard
    from .hang import Collective, Group
    from .inspection import Inspection
    from .positions import HangWatch

_LONGEST_CAUSE = 1 << 14  # characters, such as of an exception with a long text
HUNG_RANK_TIMEOUT = 10.0
HOST_LOST_SECONDS = 60  # without a response of another host's kernel, until the host is lost
_BEAT_SHARE = 1 / 3  # of that: how often ranks send beats without a HangWatch
_ACKNOWLEDGE_SECONDS = 2.0  # that a leaving rank waits for its report to arrive
_REPORT_SECONDS = 10.0  # that a hung rank has for its files
DECIDE_SECONDS = 3.0  # that rank 0 waits for reports and positions before it responds to a query


class Peer(NamedTuple):
    """The rank at the other end of a connection."""

    rank: int
    host: str  # "node17 (pid 4711)"


_current: Monitor | None = None  # of this process, from connected() to leave()


def departed_ranks() -> dict[int, str]:
    """Return the ranks that have ended, and why, as far as this one is connected to them."""
    return _current.departed_ranks() if _current else {}


class Monitor:
    """One rank's end of the connections between rank 0 and the others.

    Until the ranks have started, one that ends makes the start fail: the thread then ends this
    process, unless the main thread asks for the cause with connected() or start_failure().
    """

    def __init__(
        self,
        connections: Mapping[Channel, Peer],
        *,
        rank: int,
        host: str,
        hung_rank_timeout: float = HUNG_RANK_TIMEOUT,
    ) -> None:
        """Start to listen.

        connections: to rank 0, or on rank 0 to every other rank. host: of this rank, for messages.
        hung_rank_timeout: seconds until a rank for which all others have waited in vain is ended,
        after they have stopped.
        """
        self.rank = rank
        self.peers = dict(connections)
        self.hosts = {rank: host, **{peer.rank: peer.host for peer in connections.values()}}
        self._hung_rank_timeout = hung_rank_timeout
        # Called by the thread: the number of collectives that this rank has entered.
        self.entered_collectives: Callable[[], int | None] = lambda: None
        # The last of them, oldest first, with or without locations, and the process groups.
        self.read_collectives: Callable[[bool], tuple[list[Collective], dict[str, Group]]]
        self.read_collectives = lambda locations: ([], {})
        # A number that grows with this rank's progress.
        self.progress: Callable[[], int] = lambda: 0
        # Writes this rank's file; its arguments are a folder, "" for none, and the cause.
        self.write_report: Callable[[str, str], None] = lambda folder, cause: None

        self._lock = threading.RLock()
        self._unconnected = set(self.hosts)  # ranks, as far as rank 0 knows
        self._all_started = threading.Event()
        self._start_failure: Failure | None = None
        self._start_failure_found = threading.Event()
        self._start_failure_handled = threading.Event()  # the main thread reports it

        self.first: Failure | None = None  # that every rank reports
        # The ranks that have ended, and what those that still need them report; None where another
        # rank's failure stopped them.
        self.departed: dict[int, Failure | None] = {}
        self._left_after: dict[int, int] = {}  # rank -> collectives that it had entered
        self._queries: dict[Channel | None, _Query] = {}  # None: from this process
        self._response = threading.Event()
        self.has_timed_out = False
        self.hung: set[int] = set()  # ranks, as far as rank 0 knows
        self._reported = False  # to launch.py

        self._inspection: Inspection | None = None
        self._guard: Guard | None = None
        self._is_alone = False  # on its host
        self._next_beat = time.monotonic()
        self._alive: dict[int, float] = {}  # when ranks reported that
        self._last_progress, self._progressed_at = (0, 0), 0.0  # since ranks ended, and how many
        self._next_check = 0.0  # of these
        self.hang_announced = False

        self._acknowledged: set[int] = set()
        self._all_acknowledged = threading.Event()
        self.leaving = self._left = False
        self._wake_read, self._wake_write = socket.socketpair()
        # A forked child, such as a DataLoader's worker, must not keep the connections of a dead
        # rank open.
        close_in_child = functools.partial(_close_in_child, weakref.ref(self))
        os.register_at_fork(after_in_child=close_in_child)
        for connection in self.peers:
            connection.keep_alive(HOST_LOST_SECONDS)
        threading.Thread(target=self._run, daemon=True, name="rank monitor").start()

    # Called by the main thread -------------------------------------------------------------------

    def start_failure(self, timeout: float) -> Failure | None:
        """Return which rank ended during the start; None if unknown after `timeout` seconds."""
        self._start_failure_handled.set()
        self._start_failure_found.wait(timeout)
        return self._start_failure

    def started(self) -> None:
        """A rank that ends from now on does not make the start fail."""
        self._start_failure_handled.set()
        self._all_started.set()

    def connected(self) -> Failure | None:
        """Report that torch has connected this rank, and wait until it has connected all.

        A rank that left earlier would close what others still need. Returns which rank ended
        instead; None for none.
        """
        global _current
        with self._lock:
            self._start_failure_handled.set()
            if self.rank == 0:
                self._note_connected(0)
            else:
                self.send_all({"kind": "connected"})
        self._all_started.wait()
        _current = self
        return self._start_failure

    def note_alone(self) -> None:
        """Let a guard end this rank if it is stopped: no other rank of its host can."""
        self._is_alone = True
        self._wake()

    def watch(self, watch: HangWatch) -> None:
        """Look for hangs from now on, and end this process when the ranks hang."""
        with self._lock:
            self.inspection.watch = watch
            self._start_guard()
        self._wake()

    @property
    def inspection(self) -> Inspection:
        """What this rank knows of where the others are."""
        if self._inspection is None:
            from .inspection import Inspection

            self._inspection = Inspection(self)
        return self._inspection

    def leave(self, cause: Failure | None) -> None:
        """Report that this rank leaves, and close the connections.

        cause: what the ranks that still need this one should report; None where another rank's
        failure stops this one. Waits at most two seconds for the report to arrive.
        """
        global _current
        with self._lock:
            if self.leaving:
                return
            self.leaving = True
            self._end_hung_ranks(running=set())
            # Nobody can query rank 0 after it has left: it leaves with the cause that it knows.
            first = self.known_cause() if self.rank == 0 else None
            entered = self.entered_collectives()
            self.send_all({"kind": "left", "cause": cause, "first": first, "entered": entered})
        self._wake()
        self._all_acknowledged.wait(_ACKNOWLEDGE_SECONDS)
        if self.hang_announced:  # while the main thread was in native code: another one ends this
            time.sleep(2 * _REPORT_SECONDS)
        if self._inspection and self._inspection.watch:
            faulthandler.cancel_dump_traceback_later()
        if self._guard:
            self._guard.dismiss()
        self._left = True
        _current = None  # those that have ended are no ranks of a later job
        self._wake()

    def find_cause(self, kind: str) -> Failure | None:
        """Return the first cause, as rank 0 knows it; None where it is not known.

        kind: what this rank has seen, "lost" for a connection and "timeout" for a collective.
        """
        with self._lock:
            rank_0_left = self.rank != 0 and 0 in self.departed
            if self.first or self.leaving or rank_0_left:
                return self.known_cause()
            self.has_timed_out = kind == "timeout"
            self._response.clear()
            if self.rank == 0:
                self._queries[None] = _Query(kind, time.monotonic())
            else:
                self.send_all({"kind": "query", "about": kind})
        self._wake()
        self._response.wait(2 * DECIDE_SECONDS + 1)
        return self.known_cause()

    def departed_ranks(self) -> dict[int, str]:
        """Return what the function of this name does."""
        with self._lock:
            return {rank: one.text if one else "" for rank, one in self.departed.items()}

    def report_failure(self, cause: Failure) -> Failure:
        """Report a failure of this rank, before it leaves; return the cause that came first."""
        with self._lock:
            if self.rank == 0:
                self.first = self.first or cause
            if self.first or self.leaving or 0 in self.departed:
                return self.first or cause
            self._response.clear()
            self.send_all({"kind": "failed", "cause": cause})
        self._response.wait(_ACKNOWLEDGE_SECONDS)
        return self.first or cause

    def report_to_launcher(self, cause: Failure) -> None:
        """Report the first cause to launch.py, or write its line.

        Rank 0 does, and the one at fault; without rank 0, any rank does. In a thread, for which the
        end of the program waits: launch.py may be cut off.
        """
        with self._lock:
            failure = cause._replace(is_over=self.hang_announced or self._has_ended("lost"))
            own = {self.rank} & {0, failure.rank}
            reports = own or 0 in self.departed or self.hang_announced
            if not reports or self._reported and not failure.is_over:
                return
            self._reported = True
            threading.Thread(target=report_first_cause, args=(failure,)).start()

    # The thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        with contextlib.suppress(OSError, ValueError), selectors.DefaultSelector() as selector:
            selector.register(self._wake_read, selectors.EVENT_READ)
            for connection in self.peers:
                selector.register(connection, selectors.EVENT_READ)
                self._read(connection)  # what arrived behind the result of the exchange
            while not self._start_failure and not self._left:
                self._serve(selector)

        self._start_failure_found.set()
        self._all_started.set()
        self._all_acknowledged.set()
        self._response.set()
        self._close_sockets()
        if self._start_failure and not self._start_failure_handled.wait(2):
            _exit_with(self._start_failure.text)

    def _serve(self, selector: selectors.BaseSelector) -> None:
        """Handle what arrives next, and what rank 0 can decide then."""
        for key, _ in selector.select(self._pause()):
            if key.fileobj is self._wake_read:
                self._wake_read.recv(4096)
            elif isinstance(key.fileobj, Channel):
                self._read(key.fileobj)
                if key.fileobj.closed:
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
        with self._lock:
            self._respond_to_queries()
            if self.hung:
                self._end_hung_ranks(running=set(self.hosts) - set(self.departed))
            self._watch_lost_ranks()
            if self._inspection and self._inspection.watch:
                self._inspection.watch_ranks()
            else:
                if self._is_alone and self._guard is None:  # in this thread: it takes a while
                    self._start_guard(longest_stop=2 * HOST_LOST_SECONDS)
                self._find_silent_ranks()
            others = {peer.rank for peer in self.peers.values()}
            if self.leaving and self._acknowledged >= others:
                self._all_acknowledged.set()

    def _pause(self) -> float | None:
        """Return the seconds until something has to be done without a message."""
        if self._queries:
            return 0.05
        if self._inspection and self._inspection.watch:
            return self._inspection.pause()
        return 1.0 if self.departed else max(0.0, self._next_beat - time.monotonic())

    def _read(self, connection: Channel) -> None:
        with self._lock:
            for message in connection.receive():
                self._handle(connection, self.peers[connection], message)
            if connection.closed:
                self._handle_end(connection, self.peers[connection])

    def _handle(self, connection: Channel, peer: Peer, message: Message) -> None:
        kind, cause = message["kind"], _failure(message.get("cause"))
        if kind == "start_failed":  # on another rank
            self._start_failure = self._start_failure or cause
        elif kind == "connected":  # from rank 0: all ranks are
            self._note_connected(peer.rank)
        elif kind == "left":
            self.departed[peer.rank] = cause
            if message["entered"] is not None:
                self._left_after[peer.rank] = message["entered"]
            self._acknowledged.add(peer.rank)  # it needs no report any more
            connection.send({"kind": "ack"})
            self.first = self.first or _failure(message["first"])
            if self._inspection:
                self._inspection.restart()  # it was late, and is not any more
            if self.rank != 0:  # nobody responds any more
                self._response.set()
        elif kind == "ack":
            self._acknowledged.add(peer.rank)
        elif kind == "failed":
            self.first = self.first or cause
            connection.send({"kind": "cause", "cause": self.first})
        elif kind == "query":
            self._queries[connection] = _Query(message["about"], time.monotonic())
        elif kind == "cause":
            self.first = self.first or cause
            self._response.set()
        elif kind == "end" and cause:
            self._end_later(cause)
        elif kind == "hang" and cause and not self.hang_announced:  # else this rank ends already
            by = f"rank {peer.rank} on {peer.host}"
            self._end_hang(message["folder"], cause, f"{by} has found that the job must end")
        elif kind == "beat" and not self._inspection:
            self._alive[peer.rank] = time.monotonic()
        elif kind in ("beat", "ask_states", "states", "ask_position", "position"):
            self._alive[peer.rank] = time.monotonic()
            self.inspection.handle(connection, peer, message)

    def _handle_end(self, connection: Channel, peer: Peer) -> None:
        self._acknowledged.add(peer.rank)
        self._queries.pop(connection, None)
        if self.leaving or peer.rank in self.departed:
            return

        rank = f"rank {peer.rank} on {peer.host}"
        lost = (
            f"{rank} does not respond to {self.this_host()}: its host is down, or the network "
            "between them is cut"
        )
        silent = bool(self._inspection) and peer.rank in self.inspection.found_stopped
        died = f"{rank} died while torch was connecting the ranks. Look for its own message"
        if self._all_started.is_set():
            died = (
                f"{rank} {'had sent nothing for a while, and ' * silent}ended without a report. It "
                f"was {'stopped for too long, ' * silent}killed (out of memory, or a signal), "
                "crashed, or called os._exit(). The launcher's output has its exit status"
            )
        failure = self._of(peer.rank, died, "killed")
        if connection.host_lost:
            failure = self._of(peer.rank, lost, "lost")
        if self._all_started.is_set():
            self.departed[peer.rank] = failure
            if self.rank != 0:
                self._response.set()
            return
        self._start_failure = self._start_failure or failure
        if self.rank == 0:
            self.send_all({"kind": "start_failed", "cause": self._start_failure})

    def _note_connected(self, rank: int) -> None:
        """Note a rank that torch has connected; rank 0 tells the others when all are."""
        self._unconnected.discard(rank)
        if self.rank == 0 and not self._unconnected:
            self.send_all({"kind": "connected"})
        if self.rank != 0 or not self._unconnected:
            self._all_started.set()

    def known_cause(self) -> Failure | None:
        """The first cause, else what the first rank that departed gave as the cause."""
        return self.first or next(filter(None, self.departed.values()), None)

    def _has_ended(self, *kinds: str) -> bool:
        """Whether a rank has ended in one of these ways, by Failure.kind."""
        return any(one.kind in kinds for one in self.departed.values() if one)

    def _of(self, rank: int, text: str, kind: str) -> Failure:
        return Failure(text, kind, rank, host_of(self.hosts[rank]))

    def hang(self, text: str, blamed: Collection[int]) -> Failure:
        """Return the failure that is a hang: of one rank, if one alone is to blame."""
        text = text[:_LONGEST_CAUSE]
        return self._of(min(blamed), text, "hang") if len(blamed) == 1 else Failure(text, "hang")

    # Decisions of rank 0 -------------------------------------------------------------------------

    def _respond_to_queries(self) -> None:
        """Respond as soon as the cause is known, or after some seconds with what is known."""
        if not self._queries or self.rank != 0:
            return
        waited = time.monotonic() - min(query.since for query in self._queries.values())
        last_chance = waited > DECIDE_SECONDS

        is_killed = not self.first and self._has_ended("killed")
        if is_killed and not self.inspection.mismatch_is_known(last_chance):
            return
        timed_out = any(query.kind == "timeout" for query in self._queries.values())
        if timed_out and not (self.first or self._has_ended("killed", "lost")):
            found = self.inspection.find_hung_ranks(last_chance)
            if not found and not last_chance:
                return
            # A rank that has left, such as one that only sent, is not the cause if another is late.
            if self.hung or not self.known_cause():
                self.first = found
        self.first = self.known_cause()
        if not self.first and not last_chance:
            return

        by_others = None not in self._queries  # this rank may need no other one, and end well
        if self.first and by_others and not self._reported:
            self.report_to_launcher(self.first)
        for connection in self._queries:
            if connection is None:
                self._response.set()
            else:
                connection.send({"kind": "cause", "cause": self.first})
        self._queries.clear()

    def this_host(self) -> str:
        return host_of(self.hosts[self.rank])

    def _start_guard(self, longest_stop: float = math.inf) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # only a help more
            sockets = [one.fileno() for one in self.peers if not one.closed]
            from .guard import Guard

            self._guard = Guard(sockets, longest_stop)

    # Hangs and lost hosts ------------------------------------------------------------------------

    def _watch_lost_ranks(self) -> None:
        """End the job when ranks have ended and this rank makes no progress without them.

        A collective of NCCL, or of other ranks that wait for them, does not raise. The collectives
        may use another network than the connections of the monitor, and a rank that computes or
        saves needs no other one for a while.
        """
        now = time.monotonic()
        if not self.departed or self.leaving or self.hang_announced or now < self._next_check:
            return
        self._next_check = now + 1.0  # not for every message of thousands of ranks that leave
        awaited = self._awaited_after_leaving()
        causes = {rank: one for rank, one in self.departed.items() if one and one.kind == "lost"}
        is_lost = bool(causes)
        causes = causes or {
            rank: one
            for rank, one in self.departed.items()
            if one and (one.kind != "uneven" or rank in awaited)
        }
        if not causes:
            return
        progress = self.progress(), len(causes)
        if progress != self._last_progress:
            self._last_progress, self._progressed_at = progress, now
        seconds = now - self._progressed_at
        if seconds < HOST_LOST_SECONDS * (1 / 3 if self.waits() else 5):
            return
        cause, *others = (one for _, one in sorted(causes.items())[:8])
        if others:
            cause = Failure("; ".join(one.text for one in (cause, *others)), cause.kind)
        found = f"A rank has ended: no collective for {seconds:.0f} s since then"
        if is_lost:
            found = (
                f"A host is lost: no response for {HOST_LOST_SECONDS} s, then no collective for "
                f"{seconds:.0f} s"
            )
        self.end_all(f"{found}.\n  {cause.text}\n", cause)

    def waits(self) -> bool:
        """Whether this rank waits in a collective; True where these are not recorded."""
        last, _ = self.read_collectives(False)
        return not last or any(collective["blocks"] for collective in last)

    def _find_silent_ranks(self) -> None:
        """Report that this rank is alive, and look for ranks that do not."""
        now, interval = time.monotonic(), HOST_LOST_SECONDS * _BEAT_SHARE
        if now < self._next_beat or self.leaving or self.hang_announced:
            return
        if now > self._next_beat + interval:  # this process was stopped, perhaps with all others
            self._alive.clear()
        self._next_beat = now + interval
        self.send_all({"kind": "beat", "progress": 0, "entered": 0, "location": ""})
        others = [peer.rank for peer in self.peers.values() if peer.rank not in self.departed]
        silent = [r for r in others if now - self._alive.setdefault(r, now) > 2 * interval]
        if silent:
            self.inspection.look_at(silent, 2 * interval)

    def _awaited_after_leaving(self) -> set[int]:
        """Return the ranks that left before they entered the collective that this rank waits in.

        gloo also counts transfers as entered: there the ranks may be more than are returned.
        """
        if not self._left_after:
            return set()
        calls = [call for call in self.read_collectives(False)[0] if call["blocks"]]
        of_all = [c["number"] for c in calls if not c["group"] and not c["between_two"]]
        newest = max(of_all, default=0)
        return {rank for rank, entered in self._left_after.items() if entered < newest}

    def end_all(self, message: str, cause: Failure, folder: str = "") -> None:
        """Print a message, and end all ranks that can still be reached. folder: for their files."""
        sys.stderr.write(message)
        sys.stderr.flush()
        self.send_all({"kind": "hang", "cause": cause, "folder": folder})
        self.hang_announced = True
        self.report_to_launcher(cause)
        self._end_hang(folder, cause, cause.text)

    def _end_hang(self, folder: str, cause: Failure, reason: str) -> None:
        """Write this rank's file and end the process, whatever its main thread does.

        reason: what this rank prints: the rank that has found the cause prints that.
        """
        self.hang_announced = True
        self.first = self.first or cause

        def end() -> None:
            writer = threading.Thread(
                target=self.write_report, args=(folder, cause.text), daemon=True
            )
            writer.start()
            writer.join(_REPORT_SECONDS)  # the file system may be what hangs
            time.sleep(1 + (self.rank == 0))  # until the other ranks have written theirs
            if self.leaving:  # the main thread has reported it
                process.end(1)
            _exit_with(f"rank {self.rank} on {socket.gethostname()} stops, because {reason}")

        threading.Thread(target=end, daemon=True, name="hang report").start()

    def _end_hung_ranks(self, running: set[int]) -> None:
        """End the hung ranks when no other ranks are running: they may never notice themselves."""
        if not self.hung >= running or not self.first:
            return
        for connection, peer in self.peers.items():
            if peer.rank in self.hung:
                connection.send({"kind": "end", "cause": self.first})
        if 0 in self.hung:
            self._end_later(self.first)
        self.hung = set()

    def _end_later(self, cause: Failure) -> None:
        def end() -> None:
            if not self.leaving:
                _exit_with(
                    f"rank {self.rank} on {socket.gethostname()} is ended, because all other "
                    f"ranks have stopped: {cause.text}"
                )

        timer = threading.Timer(self._hung_rank_timeout, end)
        timer.daemon = True
        timer.start()

    def send_all(self, message: Message) -> None:
        for connection in self.peers:
            connection.send(message)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_write.send(b"x")

    def _close_sockets(self) -> None:
        for connection in self.peers:
            connection.close()
        self._wake_read.close()
        self._wake_write.close()


def _failure(fields: list[Any] | None) -> Failure | None:
    """Return the failure in a message."""
    return Failure(*fields) if fields else None


def host_of(name: str) -> str:
    """Return "node17" for "node17 (pid 4711)"."""
    return name.partition(" ")[0]


class _Query(NamedTuple):
    """A rank's query for the cause, which waits for rank 0's response."""

    kind: str  # "lost" or "timeout"
    since: float  # monotonic seconds


def _exit_with(message: str) -> None:
    sys.stderr.write(f"{message}\n")
    sys.stderr.flush()
    process.end(1)


def _close_in_child(reference: weakref.ref[Monitor]) -> None:
    monitor = reference()
    if monitor is not None:
        monitor._close_sockets()
        if monitor._guard:
            monitor._guard.close()
