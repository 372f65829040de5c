"""Connect rank 0 with the other ranks while they run: report failures, and end ranks.

Every rank keeps its connection from the start-up exchange until it leaves, and a thread reads it.
Messages and ends of connections go to decisions.py, which finds out which rank failed first. This
module sends the messages that it decides on. No torch.

    message                     from, to         meaning
    connected                   rank -> 0        torch has connected this rank; 0 -> all: all ranks
    start_failed                0 -> all         a rank has ended during the start
    failed, query -> cause      rank -> 0        what failed first? rank 0's response is the cause
    left -> ack                 any              this rank leaves, and why others may need it
    ask_position -> position    0 -> all         where is each rank? inspection.py
    ask_states -> states        0 -> all         what do silent processes of a host do?
    beat                        any              with hang_timeout: this rank's progress
    hang                        any              all ranks end, each writes its file
    end                         0 -> rank        all others have stopped
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import selectors
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..channel import Channel, Message, Peer
from ..host import process
from ..launch_protocol import Failure, report_first_cause
from ..phrases import LEFT
from . import decisions as rules
from .decisions import DECIDE_SECONDS, Action, Decisions, Send, waits

if TYPE_CHECKING:  # loaded when a rank hangs or times out, or with hang_timeout
    from .hangs.hang_watch import HangWatch
    from .hangs.positions import Collective, Group
    from .inspection import Inspection

HUNG_RANK_TIMEOUT = 10.0
_ACKNOWLEDGE_SECONDS = 2.0  # a leaving rank waits this long for its report to arrive
_JOIN_SECONDS = 1.0  # seconds that leave() waits for the thread to end
_REPORT_SECONDS = 10.0  # a hung rank has this long to write its files

_current: Monitor | None = None  # the monitor of this process, from connected() to leave()


def departed_ranks() -> dict[int, str]:
    """Return the ranks that have ended, and why, as far as this rank is connected to them."""
    return _current.departed_ranks() if _current else {}


@dataclass
class OwnRank:
    """What a monitor calls to read its own rank, in its thread; set once torch has connected it.

    entered_collectives: returns how many it has entered. read_collectives: returns the last of
    them, oldest first, and the process groups; its argument requests where they were called.
    progress: returns a number that grows with the rank's progress. write_report: writes the rank's
    file; the arguments are a folder, "" for none, and the cause.
    """

    entered_collectives: Callable[[], int | None] = lambda: None
    read_collectives: Callable[[bool], tuple[list[Collective], dict[str, Group]]] = (
        lambda locations: ([], {})
    )
    progress: Callable[[], int] = lambda: 0
    write_report: Callable[[str, str], None] = lambda folder, cause: None


class Monitor:
    """One rank's side of the connections between rank 0 and the others.

    Until all ranks have started, the end of any rank makes the start fail. The thread then ends
    this process, unless the main thread asks for the cause with connected() or start_failure().
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

        connections: to rank 0, or on rank 0 to every other rank. host: this rank's, "n1 (pid 7)".
        hung_rank_timeout: all other ranks have stopped after waiting in vain for one rank; it is
        ended after so many seconds.
        """
        self.rank = rank
        self.peers = dict(connections)
        self.own = OwnRank()
        hosts = {rank: host, **{peer.rank: peer.host for peer in connections.values()}}
        self.decisions = Decisions(rank, hosts)
        self.hang_announced = self._announced = False  # by any rank; by this one
        self.leaving = self._left = False
        self.collective_failed = False  # whether this rank's last collective has failed
        self._hung_rank_timeout = hung_rank_timeout
        self._inspection: Inspection | None = None
        self._make_watch: Callable[[], HangWatch] | None = None
        self._watch_at = 0.0  # monotonic seconds: when to start the watch
        self._reported = 0  # 1: the cause was sent to ddpkit launch; 2: also that all ranks end

        self._lock = threading.RLock()
        self._all_started = threading.Event()
        self._start_failure_found = threading.Event()
        self._start_failure_handled = threading.Event()  # the main thread reports it
        self._response = threading.Event()
        self._acknowledged: set[int] = set()
        self._all_acknowledged = threading.Event()
        self._wake_read, self._wake_write = socket.socketpair()
        # A forked child, such as a DataLoader worker, must not keep the connections of a dead rank
        # open.
        close_in_child = functools.partial(_close_in_child, weakref.ref(self))
        os.register_at_fork(after_in_child=close_in_child)
        for connection in self.peers:
            connection.keep_alive(rules.HOST_LOST_SECONDS)
        self._thread = threading.Thread(target=self._run, daemon=True, name="rank monitor")
        self._thread.start()

    # Called by the main thread -------------------------------------------------------------------

    def start_failure(self, timeout: float) -> Failure | None:
        """Return which rank ended during the start; None if unknown after `timeout` seconds."""
        self._start_failure_handled.set()
        self._start_failure_found.wait(timeout)
        return self.decisions.start_failure

    def connected(self) -> Failure | None:
        """Report that torch has connected this rank, and wait until it has connected all.

        If a rank left earlier, it would close connections that others still need. Returns the rank
        that ended instead, with its cause; None if all are connected.
        """
        global _current
        with self._lock:
            self._start_failure_handled.set()
            if self.rank == 0:
                self.carry_out(self.decisions.connected(0))
            else:
                self.send_all({"kind": "connected"})
        self._all_started.wait()
        _current = self
        return self.decisions.start_failure

    def watch(self, make_watch: Callable[[], HangWatch], seconds: float = 0.0) -> None:
        """Start to look for hangs after `seconds`, and end this process when the ranks hang."""
        with self._lock:
            self._make_watch, self._watch_at = make_watch, time.monotonic() + seconds
        self._wake()

    @property
    def inspection(self) -> Inspection:
        """The positions and states of the other ranks; created on first use."""
        if self._inspection is None:
            from .inspection import Inspection

            self._inspection = Inspection(self)
        return self._inspection

    def leave(self, cause: Failure | None, how: str = LEFT) -> None:
        """Report that this rank leaves, and close the connections.

        cause: what ranks report if they still need this one; None if another rank's failure stops
        it. how: "left normally". Waits at most two seconds for the report to arrive.
        """
        global _current
        with self._lock:
            if self.leaving:
                return
            self.leaving = True
            self.carry_out(self.decisions.end_hung(running=()))
            # Nobody can query rank 0 after it has left, so it sends the cause that it knows.
            entered = self.own.entered_collectives()
            first = self.decisions.last_cause(cause, entered, how) if self.rank == 0 else None
            left = {"kind": "left", "cause": cause, "first": first, "entered": entered}
            self.send_all({**left, "how": how})
        self._wake()
        self._all_acknowledged.wait(_ACKNOWLEDGE_SECONDS)
        if self.hang_announced:  # another thread ends this process, which was in native code
            time.sleep(2 * _REPORT_SECONDS)
        if self._inspection and self._inspection.watch:
            faulthandler.cancel_dump_traceback_later()
        self._left = True
        _current = None  # ranks that have ended do not belong to a later job
        self._wake()
        if threading.current_thread() is not self._thread:
            # A thread that is inside of torch when Python ends can abort the process.
            self._thread.join(_JOIN_SECONDS)

    def find_cause(self, kind: str, place: str = "", missing: Sequence[int] = ()) -> Failure | None:
        """Return the first cause, as rank 0 knows it; None where it is not known.

        kind: "lost" after a lost connection, "timeout" after a collective timed out. place: what
        failed, and where: "barrier() at train.py, line 9, in save". missing: on rank 0, the ranks
        that torch's error names.
        """
        decisions = self.decisions
        with self._lock:
            self.collective_failed = True
            rank_0_left = self.rank != 0 and 0 in decisions.departed
            if not (decisions.first or self.leaving or rank_0_left):
                self._response.clear()
                if self.rank == 0:
                    decisions.query(0, kind, time.monotonic(), place, missing)
                else:
                    self.send_all({"kind": "query", "about": kind, "place": place})
        self._wake()
        if not (decisions.first or self.leaving or rank_0_left):
            self._response.wait(2 * DECIDE_SECONDS + 1)
        with self._lock:
            cause = decisions.known_cause()
            if self.rank != 0 and not decisions.first and cause and place:  # rank 0 has not decided
                return decisions.explain_without_rank_0(cause, place)
            return cause

    def departed_ranks(self) -> dict[int, str]:
        """Return the ranks that have ended, and why; takes the lock."""
        with self._lock:
            departed = self.decisions.departed.items()
            return {rank: cause.text if cause else "" for rank, cause in departed}

    def report_failure(self, cause: Failure) -> Failure:
        """Report a failure of this rank, before it leaves; return the cause that came first."""
        with self._lock:
            first = self.decisions.first
            if self.rank == 0 and not first:
                self.decisions.failed(0, cause)
                return cause
            if first or self.leaving or 0 in self.decisions.departed:
                return first or cause
            self._response.clear()
            self.send_all({"kind": "failed", "cause": cause})
        self._response.wait(_ACKNOWLEDGE_SECONDS)
        return self.decisions.first or cause

    def report_to_launcher(self, cause: Failure) -> None:
        """Report the first cause to ddpkit launch, once; without it, one of the ranks prints it.

        In a thread, since ddpkit launch may be unreachable; the program ends after the thread.
        """
        with self._lock:
            is_over = self.hang_announced or self.decisions.has_ended("lost")
            reports = self.hang_announced or self.decisions.reports(cause)
            urgency = 1 + is_over
            if not reports or self._reported >= urgency:
                return
            prints = self._announced or self.decisions.prints(cause)
            options = {"prints": prints and not self._reported}
            self._reported = urgency
            failure = cause._replace(is_over=is_over)
            threading.Thread(target=report_first_cause, args=(failure,), kwargs=options).start()

    # The thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        with contextlib.suppress(OSError, ValueError), selectors.DefaultSelector() as selector:
            selector.register(self._wake_read, selectors.EVENT_READ)
            for connection in self.peers:
                selector.register(connection, selectors.EVENT_READ)
                self._read(connection)  # read what arrived behind the result of the exchange
            while not self.decisions.start_failure and not self._left:
                self._serve(selector)

        self._start_failure_found.set()
        self._all_started.set()
        self._all_acknowledged.set()
        self._response.set()
        self._close_sockets()
        if (failure := self.decisions.start_failure) and not self._start_failure_handled.wait(2):
            _exit_with(failure.text)

    def _serve(self, selector: selectors.BaseSelector) -> None:
        """Handle arriving messages, and carry out the decisions that they allow."""
        for key, _ in selector.select(self._pause()):
            if key.fileobj is self._wake_read:
                self._wake_read.recv(4096)
            elif isinstance(key.fileobj, Channel):
                self._read(key.fileobj)
                if key.fileobj.closed:
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
        with self._lock:
            now, decisions = time.monotonic(), self.decisions
            self.carry_out(decisions.respond(now))
            self.carry_out(decisions.end_hung(decisions.running()))
            if not self.leaving and not self.hang_announced:
                stuck = decisions.find_stuck(now, self.own.progress(), self.read_calls)
                if stuck:
                    self.end_all(stuck.message, stuck.cause)
            if self._make_watch and now >= self._watch_at and not self.leaving:
                self.inspection.watch, self._make_watch = self._make_watch(), None
            if self._inspection and self._inspection.watch:
                self._inspection.watch_ranks()
            if self.leaving and self._acknowledged.issuperset(decisions.others()):
                self._all_acknowledged.set()

    def _pause(self) -> float | None:
        """Return the seconds until something is due without a message; None: wait for one."""
        if self.decisions.has_queries:
            return 0.05
        if self._inspection and self._inspection.watch:
            return self._inspection.pause()
        if self.decisions.departed:
            return 1.0
        return max(0.0, self._watch_at - time.monotonic()) if self._make_watch else None

    def _read(self, connection: Channel) -> None:
        peer = self.peers[connection]
        with self._lock:
            for message in connection.receive():
                self._handle(peer.rank, message, connection.send)
            if connection.closed:
                self._acknowledged.add(peer.rank)
                if not self.leaving:
                    host_lost = connection.host_lost
                    self.carry_out(self.decisions.connection_ended(peer.rank, host_lost=host_lost))
                    if peer.rank in self.decisions.departed and self.rank != 0:
                        self._response.set()

    def _handle(self, rank: int, message: Message, reply: Callable[[Message], None]) -> None:
        """Handle a message from another rank, or from rank 0 to itself."""
        kind, cause, decisions = message["kind"], _failure(message.get("cause")), self.decisions
        if kind == "connected":
            self.carry_out(decisions.connected(rank))
        elif kind == "start_failed" and cause:
            decisions.start_failed(cause)
        elif kind == "failed" and cause:
            self.carry_out(decisions.failed(rank, cause))
        elif kind == "query":
            decisions.query(rank, message["about"], time.monotonic(), message["place"])
        elif kind == "cause":
            decisions.first = decisions.first or cause
            self._response.set()
        elif kind == "left":
            first = _failure(message["first"])
            decisions.left(rank, cause, first, message["entered"], message["how"])
            self._acknowledged.add(rank)  # a rank that has left needs no report
            reply({"kind": "ack"})
            if self._inspection:
                self._inspection.restart()  # the rank was late; now it has left
            if self.rank != 0:  # rank 0 has left: no response will arrive
                self._response.set()
        elif kind == "ack":
            self._acknowledged.add(rank)
        elif kind == "end" and cause:
            self._end_later(cause)
        elif kind == "hang" and cause and not self.hang_announced:  # else it ends already
            self._end_hang(message["folder"], cause, {})
        elif kind in ("beat", "ask_states", "states", "ask_position", "position"):
            self.inspection.handle(rank, message, reply)
        if decisions.all_started:
            self._all_started.set()

    def carry_out(self, actions: Iterable[Action]) -> None:
        """Send the messages of these actions, and report to ddpkit launch."""
        for action in actions:
            if not isinstance(action, Send):
                if not self._reported:
                    self.report_to_launcher(action.cause)
                continue
            for connection, peer in self.peers.items():
                if peer.rank in action.ranks:
                    connection.send(action.message)
            if self.rank in action.ranks:
                self._handle(self.rank, action.message, self._handle_own)
        if self.decisions.all_started:
            self._all_started.set()

    def _handle_own(self, message: Message) -> None:
        """Handle this rank's response to a message of its own."""
        self._handle(self.rank, message, self._handle_own)

    def send_all(self, message: Message) -> None:
        for connection in self.peers:
            connection.send(message)

    def read_calls(self) -> list[Collective]:
        """Return the last collectives that this rank has entered."""
        return self.own.read_collectives(False)[0]

    def waits(self) -> bool:
        """Whether this rank waits in a collective; True if collectives are not recorded."""
        return waits(self.read_calls())

    # The end of ranks ----------------------------------------------------------------------------

    def end_all(
        self,
        message: str,
        cause: Failure,
        files: Mapping[str, str] | None = None,
        folder: str = "",
    ) -> None:
        """Print a message, and end all ranks that can still be reached.

        folder: receives the files of all ranks. files: more files of this rank, name -> text.
        """
        sys.stderr.write(f"{message}\n")
        sys.stderr.flush()
        self.send_all({"kind": "hang", "cause": cause, "folder": folder})
        self.hang_announced = self._announced = True
        self.report_to_launcher(cause)
        self._end_hang(folder, cause, files or {})

    def _end_hang(self, folder: str, cause: Failure, files: Mapping[str, str]) -> None:
        """Write this rank's files and end the process, whatever its main thread does."""
        self.hang_announced = True
        self.decisions.first = self.decisions.first or cause

        def write() -> None:
            self.own.write_report(folder, cause.text)
            for name, text in files.items():
                with contextlib.suppress(OSError):  # write_report() has logged the error
                    with open(os.path.join(folder, name), "x", encoding="utf-8") as file:
                        file.write(text)

        def end() -> None:
            writer = threading.Thread(target=write, daemon=True)
            writer.start()
            writer.join(_REPORT_SECONDS)  # do not wait longer: the file system may hang
            time.sleep(1 + (self.rank == 0))  # gives the other ranks time to write theirs
            process.end(1)

        threading.Thread(target=end, daemon=True, name="hang report").start()

    def _end_later(self, cause: Failure) -> None:
        """End this process after a while: the other ranks have ended, and it may never notice."""

        def end() -> None:
            if not self.leaving:
                process.end(1)

        timer = threading.Timer(self._hung_rank_timeout, end)
        timer.daemon = True
        timer.start()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_write.send(b"x")

    def _close_sockets(self) -> None:
        for connection in self.peers:
            connection.close()
        self._wake_read.close()
        self._wake_write.close()


def _failure(fields: list[Any] | None) -> Failure | None:
    """Return the failure that a message contains, as a list of its fields."""
    return Failure(*fields) if fields else None


def _exit_with(message: str) -> None:
    sys.stderr.write(f"{message}\n")
    sys.stderr.flush()
    process.end(1)


def _close_in_child(reference: weakref.ref[Monitor]) -> None:
    monitor = reference()
    if monitor is not None:
        monitor._close_sockets()
