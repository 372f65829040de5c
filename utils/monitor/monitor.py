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
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from ..channel import LONGEST_CAUSE, Channel
from ..connection import Message
from ..host import process
from .guard import Guard
from .hang import (
    Collective,
    Group,
    Position,
    ProcessState,
    Work,
    at_fault,
    describe,
    describe_mismatch,
    describe_waiting,
    late,
    main_thread_location,
    summary,
    unreported,
)
from .launch_report import Failure, report_first_cause
from .positions import BUSY_FACTOR, HangWatch, Heartbeat

HUNG_RANK_TIMEOUT = 10.0
HOST_LOST_SECONDS = 60  # without a response of another host's kernel, until the host is lost
_BEAT_SHARE = 1 / 3  # of that: how often ranks send beats without a HangWatch
_ACKNOWLEDGE_SECONDS = 2.0  # that a leaving rank waits for its report to arrive
_REPORT_SECONDS = 10.0  # that a hung rank has for its files
_DECIDE_SECONDS = 3.0  # that rank 0 waits for reports and positions before it responds to a query


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
        self._rank = rank
        self._peers = dict(connections)
        self._hosts = {rank: host, **{peer.rank: peer.host for peer in connections.values()}}
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
        self._unconnected = set(self._hosts)  # ranks, as far as rank 0 knows
        self._all_started = threading.Event()
        self._start_failure = ""
        self.failed_at_start: int | None = None  # the rank, where this one has seen it
        self._start_failure_found = threading.Event()
        self._start_failure_handled = threading.Event()  # the main thread reports it

        self._first_cause = ""  # the cause that every rank reports
        self._departed: dict[int, str] = {}  # rank -> cause for the ranks that still need it
        self._failed: dict[int, str] = {}  # rank -> its own failure
        self._left_after: dict[int, int] = {}  # rank -> collectives that it had entered
        self._queries: dict[Channel | None, _Query] = {}  # None: from this process
        self._response = threading.Event()
        self._positions: dict[int, Position] = {}
        self._positions_requested = self._has_timed_out = False
        self._hung: set[int] = set()  # ranks, as far as rank 0 knows
        self._blamed: set[int] = set()  # for a hang
        self._told: Failure | None = None  # what rank 0 knows of the first cause
        self._killed: set[int] = set()  # ranks that ended without a report
        self._lost: dict[int, str] = {}  # rank -> cause for the ranks of lost hosts
        self._reported = False  # to launch.py

        self._watch: HangWatch | None = None
        self._guard: Guard | None = None
        self._is_alone = False  # on its host
        self._next_beat = time.monotonic()
        self._alive: dict[int, float] = {}  # when ranks reported that
        # Stopped ranks: since when this rank has made no progress, and how much it had made.
        self._found_stopped: dict[int, tuple[float, int]] = {}
        self._last_progress, self._progressed_at = (0, 0), 0.0  # since ranks ended, and how many
        self._next_check = 0.0  # of these
        self._inspecting_since: float | None = None
        self._of_hang: dict[int, Position] = {}  # the positions that show a hang
        self._states: dict[int, ProcessState] = {}  # of ranks that do not respond
        self._hang_announced = False

        self._acknowledged: set[int] = set()
        self._all_acknowledged = threading.Event()
        self._leaving = self._left = False
        self._wake_read, self._wake_write = socket.socketpair()
        # A forked child, such as a DataLoader's worker, must not keep the connections of a dead
        # rank open.
        close_in_child = functools.partial(_close_in_child, weakref.ref(self))
        os.register_at_fork(after_in_child=close_in_child)
        for connection in self._peers:
            connection.keep_alive(HOST_LOST_SECONDS)
        threading.Thread(target=self._run, daemon=True, name="rank monitor").start()

    # Called by the main thread -------------------------------------------------------------------

    def start_failure(self, timeout: float) -> str:
        """Return which rank ended during the start; "" if unknown after `timeout` seconds."""
        self._start_failure_handled.set()
        self._start_failure_found.wait(timeout)
        return self._start_failure

    def started(self) -> None:
        """A rank that ends from now on does not make the start fail."""
        self._start_failure_handled.set()
        self._all_started.set()

    def connected(self) -> str:
        """Report that torch has connected this rank, and wait until it has connected all.

        A rank that left earlier would close what others still need. Returns which rank ended
        instead; "" for none.
        """
        global _current
        with self._lock:
            self._start_failure_handled.set()
            if self._rank == 0:
                self._note_connected(0)
            else:
                self._send_all({"kind": "connected"})
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
            self._watch, self._next_beat = watch, time.monotonic()
            self._start_guard()
        self._wake()

    def leave(self, cause: str) -> None:
        """Report that this rank leaves, and close the connections.

        cause: what the ranks that still need this one should report; "" where another rank's
        failure stops this one. Waits at most two seconds for the report to arrive.
        """
        global _current
        with self._lock:
            if self._leaving:
                return
            self._leaving = True
            self._end_hung_ranks(running=set())
            # Nobody can query rank 0 after it has left: it leaves with the cause that it knows.
            known = self._known_cause() if self._rank == 0 else ""
            left = {"kind": "left", "cause": _cut(cause), "first_cause": known}
            entered = self.entered_collectives()
            self._send_all({**left, "entered": entered, **_whose(self._failure(known))})
        self._wake()
        self._all_acknowledged.wait(_ACKNOWLEDGE_SECONDS)
        if self._hang_announced:  # while the main thread was in native code: another one ends this
            time.sleep(2 * _REPORT_SECONDS)
        if self._watch:
            faulthandler.cancel_dump_traceback_later()
        if self._guard:
            self._guard.dismiss()
        self._left = True
        _current = None  # those that have ended are no ranks of a later job
        self._wake()

    def find_cause(self, kind: str) -> str:
        """Return the first cause, as rank 0 knows it; "" where it is not known.

        kind: what this rank has seen, "lost" for a connection and "timeout" for a collective.
        """
        with self._lock:
            rank_0_left = self._rank != 0 and 0 in self._departed
            if self._first_cause or self._leaving or rank_0_left:
                return self._known_cause()
            self._has_timed_out = kind == "timeout"
            self._response.clear()
            if self._rank == 0:
                self._queries[None] = _Query(kind, time.monotonic())
            else:
                self._send_all({"kind": "query", "about": kind})
        self._wake()
        self._response.wait(2 * _DECIDE_SECONDS + 1)
        return self._known_cause()

    def departed_ranks(self) -> dict[int, str]:
        """Return what the function of this name does."""
        with self._lock:
            return dict(self._departed)

    def report_failure(self, cause: str) -> str:
        """Report a failure of this rank, before it leaves; return the cause that came first."""
        cause = _cut(cause)
        with self._lock:
            self._failed[self._rank] = cause
            if self._rank == 0:
                self._first_cause = self._first_cause or cause
                return self._first_cause
            if self._first_cause or self._leaving or 0 in self._departed:
                return self._first_cause or cause
            self._response.clear()
            self._send_all({"kind": "failed", "cause": cause})
        self._response.wait(_ACKNOWLEDGE_SECONDS)
        return self._first_cause or cause

    def report_to_launcher(self, cause: str) -> None:
        """Report the first cause to launch.py, or write its line.

        Rank 0 does, and the one at fault; without rank 0, any rank does. In a thread, for which the
        end of the program waits: launch.py may be cut off.
        """
        with self._lock:
            failure = self._failure(cause)._replace(
                is_over=self._hang_announced or bool(self._lost)
            )
            own = {self._rank} & {0, failure.rank}
            reports = own or 0 in self._departed or self._hang_announced
            if not reports or self._reported and not failure.is_over:
                return
            self._reported = True
            threading.Thread(target=report_first_cause, args=(failure,)).start()

    def _failure(self, cause: str) -> Failure:
        """Return whose failure a cause is, as far as this rank knows that."""
        if self._told is not None and self._told.text == cause:
            return self._told
        kinds = {
            "lost": self._lost,
            "killed": self._killed,
            "exception": self._failed,
            "uneven": self._departed,
        }
        known = {**self._departed, **self._failed}
        ranks = {rank for rank, reason in known.items() if reason == cause} or self._blamed
        ranks = ranks or {rank for rank, reason in known.items() if reason and reason in cause}
        rank = next(iter(ranks)) if len(ranks) == 1 else None
        kind = "hang"
        if ranks is not self._blamed:
            kind = next((one for one in kinds if ranks and min(ranks) in kinds[one]), kind)
        host = None if rank is None else _host(self._hosts.get(rank, "")) or None
        return Failure(cause, kind, rank, host)

    # The thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        with contextlib.suppress(OSError, ValueError), selectors.DefaultSelector() as selector:
            selector.register(self._wake_read, selectors.EVENT_READ)
            for connection in self._peers:
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
            _exit_with(self._start_failure)

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
            if self._hung:
                self._end_hung_ranks(running=set(self._hosts) - set(self._departed))
            self._watch_lost_ranks()
            if self._watch is None:
                if self._is_alone and self._guard is None:  # in this thread: it takes a while
                    self._start_guard(longest_stop=2 * HOST_LOST_SECONDS)
                self._watch_stopped_ranks()
            self._watch_ranks()
            others = {peer.rank for peer in self._peers.values()}
            if self._leaving and self._acknowledged >= others:
                self._all_acknowledged.set()

    def _pause(self) -> float | None:
        """Return the seconds until something has to be done without a message."""
        if self._queries or self._inspecting_since is not None:
            return 0.05
        if self._watch is None:
            return 1.0 if self._departed else max(0.0, self._next_beat - time.monotonic())
        if self._leaving or self._hang_announced:  # there are no more heartbeats
            return 0.2
        return min(max(0.0, self._next_beat - time.monotonic()), self._watch.interval)

    def _read(self, connection: Channel) -> None:
        with self._lock:
            for message in connection.receive():
                self._handle(connection, self._peers[connection], message)
            if connection.closed:
                self._handle_end(connection, self._peers[connection])

    def _handle(self, connection: Channel, peer: Peer, message: Message) -> None:
        kind, cause = message["kind"], message.get("cause", "")
        if kind == "start_failed":  # on another rank
            self._start_failure = self._start_failure or cause
        elif kind == "connected":  # from rank 0: all ranks are
            self._note_connected(peer.rank)
        elif kind == "left":
            self._departed[peer.rank] = cause
            if message["entered"] is not None:
                self._left_after[peer.rank] = message["entered"]
            self._acknowledged.add(peer.rank)  # it needs no report any more
            connection.send({"kind": "ack"})
            self._first_cause = self._first_cause or message["first_cause"]
            self._note_whose(message["first_cause"], message)
            if self._watch is not None and self._inspecting_since is not None:
                self._watch.restart()  # it was late, and is not any more
                self._inspecting_since, self._positions_requested = None, False
                self._of_hang = {}
            if self._rank != 0:  # nobody responds any more
                self._response.set()
        elif kind == "ack":
            self._acknowledged.add(peer.rank)
        elif kind == "failed":
            self._failed[peer.rank] = cause
            self._first_cause = self._first_cause or cause
            whose = _whose(self._failure(self._first_cause))
            connection.send({"kind": "cause", "cause": self._first_cause, **whose})
        elif kind == "query":
            self._queries[connection] = _Query(message["about"], time.monotonic())
        elif kind == "cause":
            self._first_cause = self._first_cause or cause
            self._note_whose(cause, message)
            self._response.set()
        elif kind == "end":
            self._end_later(cause)
        elif kind == "hang" and not self._hang_announced:  # else this rank ends already
            self._note_whose(cause, message)
            by = f"rank {peer.rank} on {peer.host}"
            self._end_hang(message["folder"], cause, f"{by} has found that the job must end")
        elif kind == "beat" and self._watch is not None:
            beat = Heartbeat(message["progress"], message["entered"], message["location"])
            self._watch.receive(peer.rank, beat)
        elif kind == "beat":
            self._alive[peer.rank] = time.monotonic()
            self._states.pop(peer.rank, None)
            self._found_stopped.pop(peer.rank, None)
        elif kind == "ask_states":
            connection.send({"kind": "states", "states": self._read_states(message["pids"])})
        elif kind == "states":
            self._note_states(_host(peer.host), message["states"])
        elif kind == "ask_position":
            position = self._position(message["ends"])
            connection.send({"kind": "position", "position": position})
        elif kind == "position" and message["position"]:
            entered, location, last, work, groups = message["position"]
            groups = {name: Group(*group) for name, group in groups.items()}
            self._positions[peer.rank] = Position(
                entered, location, tuple(last), Work(*work), groups
            )

    def _note_whose(self, cause: str, message: Message) -> None:
        if cause and self._rank != 0 and message["about"]:
            self._told = Failure(cause, message["about"], message["rank"], message["host"])

    def _handle_end(self, connection: Channel, peer: Peer) -> None:
        self._acknowledged.add(peer.rank)
        self._queries.pop(connection, None)
        if self._leaving or peer.rank in self._departed:
            return

        rank = f"rank {peer.rank} on {peer.host}"
        lost = (
            f"{rank} does not respond to {self._this_host()}: its host is down, or the network "
            "between them is cut"
        )
        if not self._all_started.is_set():
            died = f"{rank} died while torch was connecting the ranks. Look for its own message"
            if not self._start_failure:
                self._start_failure = lost if connection.host_lost else died
                self.failed_at_start = peer.rank
            if self._rank == 0:
                self._send_all({"kind": "start_failed", "cause": self._start_failure})
            return
        if connection.host_lost:
            self._departed[peer.rank] = self._lost[peer.rank] = lost
        else:
            self._killed.add(peer.rank)
            silent = peer.rank in self._found_stopped
            self._departed[peer.rank] = (
                f"{rank} {'had sent nothing for a while, and ' * silent}ended without a report. It "
                f"was {'stopped for too long, ' * silent}killed (out of memory, or a signal), "
                "crashed, or called os._exit(). The launcher's output has its exit status"
            )
        if self._rank != 0:
            self._response.set()

    def _note_connected(self, rank: int) -> None:
        """Note a rank that torch has connected; rank 0 tells the others when all are."""
        self._unconnected.discard(rank)
        if self._rank == 0 and not self._unconnected:
            self._send_all({"kind": "connected"})
        if self._rank != 0 or not self._unconnected:
            self._all_started.set()

    def _known_cause(self) -> str:
        """The first cause, else what the first rank that departed gave as the cause."""
        given = (cause for cause in self._departed.values() if cause)
        return self._first_cause or next(given, "")

    # Decisions of rank 0 -------------------------------------------------------------------------

    def _respond_to_queries(self) -> None:
        """Respond as soon as the cause is known, or after some seconds with what is known."""
        if not self._queries or self._rank != 0:
            return
        waited = time.monotonic() - min(query.since for query in self._queries.values())
        last_chance = waited > _DECIDE_SECONDS

        if not self._first_cause and self._killed and not self._mismatch_is_known(last_chance):
            return
        timed_out = any(query.kind == "timeout" for query in self._queries.values())
        if timed_out and not (self._first_cause or self._killed or self._lost):
            found = self._find_hung_ranks(last_chance)
            if not found and not last_chance:
                return
            # A rank that has left, such as one that only sent, is not the cause if another is late.
            if self._hung or not self._known_cause():
                self._first_cause = found
        self._first_cause = self._first_cause or self._known_cause()
        if not self._first_cause and not last_chance:
            return

        by_others = None not in self._queries  # this rank may need no other one, and end well
        if self._first_cause and by_others and not self._reported:
            self.report_to_launcher(self._first_cause)
        for connection in self._queries:
            if connection is None:
                self._response.set()
            else:
                whose = _whose(self._failure(self._first_cause))
                connection.send({"kind": "cause", "cause": self._first_cause, **whose})
        self._queries.clear()

    def _find_hung_ranks(self, last_chance: bool) -> str:
        """Return why a collective timed out; "" while ranks may still report their position."""
        running = self._request_positions()
        missing = unreported(self._positions, running)
        if missing and not last_chance:
            return ""
        self._hung = {*late(self._positions, running), *missing}
        self._blamed = at_fault(self._positions, running)
        stopped = {
            rank: f"its process is {state.why_stopped}"
            for rank, state in self._states.items()
            if rank in missing and state.why_stopped
        }
        return describe(self._positions, self._hosts, running, stopped)

    def _mismatch_is_known(self, last_chance: bool) -> bool:
        """Find out whether the ranks entered different collectives; False while that is unknown.

        gloo ends the process of a rank that receives more than it expects.
        """
        if unreported(self._positions, self._request_positions()) and not last_chance:
            return False
        mismatch = describe_mismatch(self._positions, self._hosts)
        if mismatch:
            self._blamed = at_fault(self._positions, [])
            self._first_cause = f"{mismatch}. Then {self._known_cause()}"
        elif example := describe_waiting(self._positions):
            self._first_cause = (
                f"{self._known_cause()}. {example}. gloo aborts a rank (SIGABRT, status 134) that "
                "has entered a smaller collective than the others: compare the sizes of tensors"
            )
        return True

    def _request_positions(self, *, ends: bool = True) -> list[int]:
        """Request the positions of the running ranks, once; return these ranks.

        ends: the job ends in any case.
        """
        running = sorted(set(self._hosts) - set(self._departed))
        if not self._positions_requested:
            self._positions_requested = True
            if self._watch:
                self._ask_states(filter(self._watch.has_missed_beats, running))
            self._send_all({"kind": "ask_position", "ends": ends})
            position = self._position(ends)
            if position:
                self._positions[self._rank] = position
        return running

    def _ask_states(self, silent: Iterable[int]) -> None:
        """Find out from the other ranks of their hosts what ranks do that send nothing."""
        pids: dict[str, list[int]] = {}
        for rank in silent:
            pid = self._hosts[rank].rpartition("pid ")[2].rstrip(")")
            pids.setdefault(_host(self._hosts[rank]), []).append(int(pid))
        for connection, peer in self._peers.items():
            if on_host := pids.get(_host(peer.host)):
                connection.send({"kind": "ask_states", "pids": on_host})
        here = self._this_host()
        self._note_states(here, self._read_states(pids.get(here, [])))

    def _read_states(self, pids: list[int]) -> list[tuple[int, str, float]]:
        """Return the states of ranks of this host that are silent; see ProcessState."""
        states = []
        for pid in pids:
            if process.name(pid) == process.name(os.getpid()):  # else of another PID namespace
                work = process.schedule(pid, pid)  # of the main thread: those of gloo never rest
                seconds = work.run_seconds + work.ready_seconds
                states.append((pid, process.why_stopped(pid), seconds))
        return states

    def _note_states(self, host: str, states: list[tuple[int, str, float]]) -> None:
        ranks = {name: rank for rank, name in self._hosts.items()}
        for pid, why_stopped, cpu_seconds in states:
            rank = ranks.get(f"{host} (pid {pid})")
            if rank is None:
                continue
            self._states[rank] = ProcessState(why_stopped, cpu_seconds)
            # Of rank 0, one other rank reports it.
            if why_stopped and self._watch is None and self._rank == (0 if rank else 1):
                self._report_stopped(rank, pid, why_stopped)

    def _report_stopped(self, rank: int, pid: int, why_stopped: str) -> None:
        """Name a stopped rank; end the job if that lasts and this rank makes no progress."""
        now, progress = time.monotonic(), self.progress()
        is_new = rank not in self._found_stopped
        since, before = self._found_stopped.setdefault(rank, (now, progress))
        name = f"rank {rank} on {self._hosts[rank]}"
        is_held = not why_stopped.startswith("stopped")  # by a debugger: its user continues it
        if is_new:
            remedy = (
                f". To continue it, run kill -CONT {pid} there; otherwise the job ends about "
                f"{HOST_LOST_SECONDS} s from now"
            )
            sys.stderr.write(
                f"{name} has sent nothing for some time: its process is {why_stopped}, and the "
                f"others wait for it{'' if is_held else remedy}\n"
            )
            sys.stderr.flush()
        elif progress != before:
            self._found_stopped[rank] = now, progress
        elif now - since > HOST_LOST_SECONDS - 1 and not is_held and not self._hang_announced:
            cause = f"{name} does not respond: its process is {why_stopped}"
            self._blamed = {rank}
            self._end_all(f"The ranks wait for a stopped one.\n  {cause}\n", cause)

    def _position(self, ends: bool) -> Position | None:
        entered = self.entered_collectives()
        if entered is None:
            return None
        last, groups = self.read_collectives(ends)
        if last and self._has_timed_out:  # an exception has ended the wait
            last[-1]["blocks"] = True
        work = Work(*process.work_done())
        return Position(entered, main_thread_location(), tuple(last), work, groups)

    def _this_host(self) -> str:
        return _host(self._hosts[self._rank])

    def _start_guard(self, longest_stop: float = math.inf) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # only a help more
            sockets = [one.fileno() for one in self._peers if not one.closed]
            self._guard = Guard(sockets, longest_stop)

    # Hangs and lost hosts ------------------------------------------------------------------------

    def _watch_lost_ranks(self) -> None:
        """End the job when ranks have ended and this rank makes no progress without them.

        A collective of NCCL, or of other ranks that wait for them, does not raise. The collectives
        may use another network than the connections of the monitor, and a rank that computes or
        saves needs no other one for a while.
        """
        now = time.monotonic()
        if not self._departed or self._leaving or self._hang_announced or now < self._next_check:
            return
        self._next_check = now + 1.0  # not for every message of thousands of ranks that leave
        ended = self._killed | self._failed.keys() | self._awaited_after_leaving()
        given = {rank: cause for rank, cause in self._departed.items() if cause and rank in ended}
        causes = self._lost or given
        if not causes:
            return
        progress = self.progress(), len(causes)
        if progress != self._last_progress:
            self._last_progress, self._progressed_at = progress, now
        seconds = now - self._progressed_at
        if seconds < HOST_LOST_SECONDS * (1 / 3 if self._waits() else 5):
            return
        cause = "; ".join(cause for _, cause in sorted(causes.items())[:8])
        found = f"A rank has ended: no collective for {seconds:.0f} s since then"
        if self._lost:
            found = (
                f"A host is lost: no response for {HOST_LOST_SECONDS} s, then no collective for "
                f"{seconds:.0f} s"
            )
        self._end_all(f"{found}.\n  {cause}\n", cause)

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

    def _watch_stopped_ranks(self) -> None:
        """Report that this rank is alive, and look for ranks that do not."""
        now, interval = time.monotonic(), HOST_LOST_SECONDS * _BEAT_SHARE
        if now < self._next_beat or self._leaving or self._hang_announced:
            return
        if now > self._next_beat + interval:  # this process was stopped, perhaps with all others
            self._alive.clear()
        self._next_beat = now + interval
        self._send_beat()
        others = [peer.rank for peer in self._peers.values() if peer.rank not in self._departed]
        silent = [r for r in others if now - self._alive.setdefault(r, now) > 2 * interval]
        self._ask_states(silent)
        hosts = [_host(name) for name in self._hosts.values()]
        for rank in silent:  # no other rank of its host can tell more
            name = self._hosts[rank]
            is_new = rank not in self._found_stopped and self._rank == (0 if rank else 1)
            if is_new and hosts.count(_host(name)) == 1:
                self._found_stopped[rank] = now, self.progress()
                sys.stderr.write(
                    f"rank {rank} on {name} has sent nothing for {2 * interval:.0f} s: its process "
                    "is stopped, or busy in native code. To continue a stopped one, run kill -CONT "
                    f"there; otherwise it is ended about {HOST_LOST_SECONDS} s from now\n"
                )
                sys.stderr.flush()

    def _send_beat(self) -> Heartbeat:
        entered = self.entered_collectives() or 0
        beat = Heartbeat(self.progress(), entered, main_thread_location())
        self._send_all({"kind": "beat", **beat._asdict()})
        return beat

    def _watch_ranks(self) -> None:
        """Send a heartbeat when it is time, and look for a hang: rank 0, or this rank alone."""
        watch, now = self._watch, time.monotonic()
        if watch is None or self._leaving or self._hang_announced:
            return
        if now >= self._next_beat:
            if now > self._next_beat + watch.limit / 4:  # the job may have been suspended
                watch.restart()
            self._next_beat = now + watch.interval
            # Shows the line of a rank that cannot run this thread. It runs without the GIL.
            with contextlib.suppress(OSError, RuntimeError, ValueError):  # without a stderr
                faulthandler.dump_traceback_later(watch.limit / 2 + 2 * watch.interval)
            watch.receive(self._rank, self._send_beat())

        if self._rank == 0 or 0 in self._departed:
            self._inspect(watch, now)
            return
        stalled = watch.seconds_without_progress()
        if not watch.silent(0) or stalled < 1.1 * watch.limit + 5:
            return
        # A rank that does not wait may be busy, and has the limit of busy ranks.
        if self._waits() or stalled > 1.1 * BUSY_FACTOR * watch.limit + 5:
            self._blamed = {0}
            self._announce_hang(
                f"rank 0 on {self._hosts[0]} does not respond to {self._this_host()}: it is "
                "stopped or busy in native code, its host is down, or the network between them is "
                "cut"
            )

    def _waits(self) -> bool:
        """Whether this rank waits in a collective; True where these are not recorded."""
        last, _ = self.read_collectives(False)
        return not last or any(collective["blocks"] for collective in last)

    def _inspect(self, watch: HangWatch, now: float) -> None:
        """Request all positions when no rank makes progress, and find the cause."""
        if self._inspecting_since is None:
            if not watch.is_due():
                return
            self._request_again(now)
        running = self._request_positions(ends=bool(self._of_hang))
        is_late = now - (self._inspecting_since or now) > _DECIDE_SECONDS
        missing = unreported(self._positions, self._of_hang or running)
        if missing and not is_late:
            return

        watch.reachable = {
            peer.rank
            for connection, peer in self._peers.items()
            if not connection.closed and not connection.is_unacknowledged()
        }
        if self._of_hang:  # with the locations of collectives, where they have arrived
            self._positions = {**self._of_hang, **self._positions}
            known = self._first_cause if self._waits() else ""  # from rank 0, before it left
            self._blamed = at_fault(self._positions, running)
            self._announce_hang(
                known or watch.describe(self._positions, self._hosts, self._departed)
            )
            return
        cause = watch.find_cause(self._positions, self._hosts, self._departed, self._states)
        sys.stderr.write(watch.notice)
        sys.stderr.flush()
        watch.notice = ""
        if cause:
            self._of_hang = dict(self._positions)
            self._request_again(now)
        else:
            self._inspecting_since, self._positions_requested = None, False

    def _request_again(self, now: float) -> None:
        self._inspecting_since = now
        self._positions_requested = False
        self._positions.clear()
        if not self._of_hang:
            self._states.clear()

    def _announce_hang(self, cause: str) -> None:
        """Print what is known of a hang, and end all ranks."""
        seconds = self._watch.seconds_without_progress() if self._watch else 0
        folder = os.path.abspath(time.strftime("hang-%Y%m%d-%H%M%S"))
        self._end_all(
            f"The ranks hang: no progress for {seconds:.0f} s.\n  {cause}\n"
            f"{summary(self._positions, self._hosts)}"
            f"Each rank writes its stacks and last collectives to {folder}, then ends with "
            "status 1\n",
            cause,
            folder,
        )

    def _end_all(self, message: str, cause: str, folder: str = "") -> None:
        """Print a message, and end all ranks that can still be reached. folder: for their files."""
        sys.stderr.write(message)
        sys.stderr.flush()
        whose = _whose(self._failure(cause))
        self._send_all({"kind": "hang", "cause": _cut(cause), "folder": folder, **whose})
        self._hang_announced = True
        self.report_to_launcher(cause)
        self._end_hang(folder, cause, cause)

    def _end_hang(self, folder: str, cause: str, reason: str) -> None:
        """Write this rank's file and end the process, whatever its main thread does.

        reason: what this rank prints: the rank that has found the cause prints that.
        """
        self._hang_announced = True
        self._first_cause = self._first_cause or cause

        def end() -> None:
            writer = threading.Thread(target=self.write_report, args=(folder, cause), daemon=True)
            writer.start()
            writer.join(_REPORT_SECONDS)  # the file system may be what hangs
            time.sleep(1 + (self._rank == 0))  # until the other ranks have written theirs
            if self._leaving:  # the main thread has reported it
                process.end(1)
            _exit_with(f"rank {self._rank} on {socket.gethostname()} stops, because {reason}")

        threading.Thread(target=end, daemon=True, name="hang report").start()

    def _end_hung_ranks(self, running: set[int]) -> None:
        """End the hung ranks when no other ranks are running: they may never notice themselves."""
        if not self._hung >= running:
            return
        for connection, peer in self._peers.items():
            if peer.rank in self._hung:
                connection.send({"kind": "end", "cause": self._first_cause})
        if 0 in self._hung:
            self._end_later(self._first_cause)
        self._hung = set()

    def _end_later(self, cause: str) -> None:
        def end() -> None:
            if not self._leaving:
                _exit_with(
                    f"rank {self._rank} on {socket.gethostname()} is ended, because all other "
                    f"ranks have stopped: {cause}"
                )

        timer = threading.Timer(self._hung_rank_timeout, end)
        timer.daemon = True
        timer.start()

    def _send_all(self, message: Message) -> None:
        for connection in self._peers:
            connection.send(message)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_write.send(b"x")

    def _close_sockets(self) -> None:
        for connection in self._peers:
            connection.close()
        self._wake_read.close()
        self._wake_write.close()


def _whose(failure: Failure) -> Message:
    """Return the fields of a message about whose failure its cause is."""
    return {"about": failure.kind, "rank": failure.rank, "host": failure.host}


def _cut(cause: str) -> str:
    """Shorten a cause to what a message may hold, such as an exception with a long text."""
    return cause[:LONGEST_CAUSE]


def _host(name: str) -> str:
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
