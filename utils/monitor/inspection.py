"""Where the ranks are when one of them hangs, times out or sends nothing: ask them, and decide.

Loaded when that happens, or with hang_timeout. No torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..channel import Channel, Message
from ..host import process
from . import monitor
from .hang import (
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
from .launch_report import Failure
from .monitor import DECIDE_SECONDS, Peer, host_of
from .positions import BUSY_FACTOR, HangWatch, Heartbeat

if TYPE_CHECKING:
    from .monitor import Monitor


class Inspection:
    """The positions and states of the ranks, as one of them knows them. Used by its Monitor."""

    def __init__(self, of: Monitor) -> None:
        self._monitor = of
        self.watch: HangWatch | None = None
        self._next_beat = time.monotonic()
        self._positions: dict[int, Position] = {}
        self._positions_requested = False
        self._inspecting_since: float | None = None
        self._of_hang: dict[int, Position] = {}  # the positions that show a hang
        self._states: dict[int, ProcessState] = {}  # of ranks that do not respond
        # Stopped ranks: since when this rank has made no progress, and how much it had made.
        self.found_stopped: dict[int, tuple[float, int]] = {}

    def restart(self) -> None:
        """Begin the limit of a hang again."""
        if self.watch is not None and self._inspecting_since is not None:
            self.watch.restart()
            self._inspecting_since, self._positions_requested = None, False
            self._of_hang = {}

    def pause(self) -> float:
        """Return the seconds until something has to be done without a message."""
        if self._inspecting_since is not None:
            return 0.05
        if self._monitor.leaving or self._monitor.hang_announced:  # there are no more heartbeats
            return 0.2
        interval = self.watch.interval if self.watch else 0.0
        return min(max(0.0, self._next_beat - time.monotonic()), interval)

    def handle(self, connection: Channel, peer: Peer, message: Message) -> None:
        """Handle a message about where ranks are."""
        kind = message["kind"]
        if kind == "beat" and self.watch is not None:
            beat = Heartbeat(message["progress"], message["entered"], message["location"])
            self.watch.receive(peer.rank, beat)
        elif kind == "beat":
            self._states.pop(peer.rank, None)
            self.found_stopped.pop(peer.rank, None)
        elif kind == "ask_states":
            connection.send({"kind": "states", "states": self._read_states(message["pids"])})
        elif kind == "states":
            self._note_states(host_of(peer.host), message["states"])
        elif kind == "ask_position":
            position = self._position(message["ends"])
            connection.send({"kind": "position", "position": position})
        elif kind == "position" and message["position"]:
            entered, location, last, work, groups = message["position"]
            groups = {name: Group(*group) for name, group in groups.items()}
            self._positions[peer.rank] = Position(
                entered, location, tuple(last), Work(*work), groups
            )

    def find_hung_ranks(self, last_chance: bool) -> Failure | None:
        """Return why a collective timed out; None while ranks may still report their position."""
        running = self._request_positions()
        missing = unreported(self._positions, running)
        if missing and not last_chance:
            return None
        self._monitor.hung = {*late(self._positions, running), *missing}
        stopped = {
            rank: f"its process is {state.why_stopped}"
            for rank, state in self._states.items()
            if rank in missing and state.why_stopped
        }
        text = describe(self._positions, self._monitor.hosts, running, stopped)
        return self._monitor.hang(text, at_fault(self._positions, running))

    def mismatch_is_known(self, last_chance: bool) -> bool:
        """Find out whether the ranks entered different collectives; False while that is unknown.

        gloo ends the process of a rank that receives more than it expects.
        """
        if unreported(self._positions, self._request_positions()) and not last_chance:
            return False
        known = self._monitor.known_cause()
        if known and (mismatch := describe_mismatch(self._positions, self._monitor.hosts)):
            self._monitor.first = self._monitor.hang(
                f"{mismatch}. Then {known.text}", at_fault(self._positions, [])
            )
        elif known and (example := describe_waiting(self._positions)):
            text = (
                f"{known.text}. {example}. gloo aborts a rank (SIGABRT, status 134) that "
                "has entered a smaller collective than the others: compare the sizes of tensors"
            )
            self._monitor.first = known._replace(text=text)
        return True

    def _request_positions(self, *, ends: bool = True) -> list[int]:
        """Request the positions of the running ranks, once; return these ranks.

        ends: the job ends in any case.
        """
        running = sorted(set(self._monitor.hosts) - set(self._monitor.departed))
        if not self._positions_requested:
            self._positions_requested = True
            if self.watch:
                self._ask_states(filter(self.watch.has_missed_beats, running))
            self._monitor.send_all({"kind": "ask_position", "ends": ends})
            position = self._position(ends)
            if position:
                self._positions[self._monitor.rank] = position
        return running

    def _ask_states(self, silent: Iterable[int]) -> None:
        """Find out from the other ranks of their hosts what ranks do that send nothing."""
        pids: dict[str, list[int]] = {}
        for rank in silent:
            pid = self._monitor.hosts[rank].rpartition("pid ")[2].rstrip(")")
            pids.setdefault(host_of(self._monitor.hosts[rank]), []).append(int(pid))
        for connection, peer in self._monitor.peers.items():
            if on_host := pids.get(host_of(peer.host)):
                connection.send({"kind": "ask_states", "pids": on_host})
        here = self._monitor.this_host()
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
        ranks = {name: rank for rank, name in self._monitor.hosts.items()}
        for pid, why_stopped, cpu_seconds in states:
            rank = ranks.get(f"{host} (pid {pid})")
            if rank is None:
                continue
            self._states[rank] = ProcessState(why_stopped, cpu_seconds)
            # Of rank 0, one other rank reports it.
            if why_stopped and self.watch is None and self._monitor.rank == (0 if rank else 1):
                self._report_stopped(rank, pid, why_stopped)

    def _report_stopped(self, rank: int, pid: int, why_stopped: str) -> None:
        """Name a stopped rank; end the job if that lasts and this rank makes no progress."""
        now, progress = time.monotonic(), self._monitor.progress()
        is_new = rank not in self.found_stopped
        since, before = self.found_stopped.setdefault(rank, (now, progress))
        name = f"rank {rank} on {self._monitor.hosts[rank]}"
        is_held = not why_stopped.startswith("stopped")  # by a debugger: its user continues it
        if is_new:
            remedy = (
                f". To continue it, run kill -CONT {pid} there; otherwise the job ends about "
                f"{monitor.HOST_LOST_SECONDS} s from now"
            )
            sys.stderr.write(
                f"{name} has sent nothing for some time: its process is {why_stopped}, and the "
                f"others wait for it{'' if is_held else remedy}\n"
            )
            sys.stderr.flush()
        elif progress != before:
            self.found_stopped[rank] = now, progress
        elif (
            now - since > monitor.HOST_LOST_SECONDS - 1
            and not is_held
            and not self._monitor.hang_announced
        ):
            cause = f"{name} does not respond: its process is {why_stopped}"
            message = f"The ranks wait for a stopped one.\n  {cause}\n"
            self._monitor.end_all(message, self._monitor.hang(cause, {rank}))

    def _position(self, ends: bool) -> Position | None:
        entered = self._monitor.entered_collectives()
        if entered is None:
            return None
        last, groups = self._monitor.read_collectives(ends)
        if last and self._monitor.has_timed_out:  # an exception has ended the wait
            last[-1]["blocks"] = True
        work = Work(*process.work_done())
        return Position(entered, main_thread_location(), tuple(last), work, groups)

    def look_at(self, silent: list[int], seconds: float) -> None:
        """Find out why ranks have sent nothing for so long, without a HangWatch."""
        self._ask_states(silent)
        hosts = [host_of(name) for name in self._monitor.hosts.values()]
        for rank in silent:  # no other rank of its host can tell more
            name = self._monitor.hosts[rank]
            is_new = rank not in self.found_stopped and self._monitor.rank == (0 if rank else 1)
            if is_new and hosts.count(host_of(name)) == 1:
                self.found_stopped[rank] = time.monotonic(), self._monitor.progress()
                sys.stderr.write(
                    f"rank {rank} on {name} has sent nothing for {seconds:.0f} s: its process "
                    "is stopped, or busy in native code. To continue a stopped one, run kill -CONT "
                    f"there; otherwise it is ended about {monitor.HOST_LOST_SECONDS} s from now\n"
                )
                sys.stderr.flush()

    def _send_beat(self) -> Heartbeat:
        entered = self._monitor.entered_collectives() or 0
        beat = Heartbeat(self._monitor.progress(), entered, main_thread_location())
        self._monitor.send_all({"kind": "beat", **beat._asdict()})
        return beat

    def watch_ranks(self) -> None:
        """Send a heartbeat when it is time, and look for a hang: rank 0, or this rank alone."""
        watch, now = self.watch, time.monotonic()
        if watch is None or self._monitor.leaving or self._monitor.hang_announced:
            return
        if now >= self._next_beat:
            if now > self._next_beat + watch.limit / 4:  # the job may have been suspended
                watch.restart()
            self._next_beat = now + watch.interval
            # Shows the line of a rank that cannot run this thread. It runs without the GIL.
            with contextlib.suppress(OSError, RuntimeError, ValueError):  # without a stderr
                faulthandler.dump_traceback_later(watch.limit / 2 + 2 * watch.interval)
            watch.receive(self._monitor.rank, self._send_beat())

        if self._monitor.rank == 0 or 0 in self._monitor.departed:
            self._inspect(watch, now)
            return
        stalled = watch.seconds_without_progress()
        if not watch.silent(0) or stalled < 1.1 * watch.limit + 5:
            return
        # A rank that does not wait may be busy, and has the limit of busy ranks.
        if self._monitor.waits() or stalled > 1.1 * BUSY_FACTOR * watch.limit + 5:
            text = (
                f"rank 0 on {self._monitor.hosts[0]} does not respond to "
                f"{self._monitor.this_host()}: it is "
                "stopped or busy in native code, its host is down, or the network between them is "
                "cut"
            )
            self._announce_hang(self._monitor.hang(text, {0}))

    def _inspect(self, watch: HangWatch, now: float) -> None:
        """Request all positions when no rank makes progress, and find the cause."""
        if self._inspecting_since is None:
            if not watch.is_due():
                return
            self._request_again(now)
        running = self._request_positions(ends=bool(self._of_hang))
        is_late = now - (self._inspecting_since or now) > DECIDE_SECONDS
        missing = unreported(self._positions, self._of_hang or running)
        if missing and not is_late:
            return

        watch.reachable = {
            peer.rank
            for connection, peer in self._monitor.peers.items()
            if not connection.closed and not connection.is_unacknowledged()
        }
        if self._of_hang:  # with the locations of collectives, where they have arrived
            self._positions = {**self._of_hang, **self._positions}
            known = (
                self._monitor.first if self._monitor.waits() else None
            )  # from rank 0, before it left
            text = watch.describe(
                self._positions, self._monitor.hosts, self._monitor.departed_ranks()
            )
            left = (one for one in self._monitor.departed.values() if one and one.text == text)
            hang = self._monitor.hang(text, at_fault(self._positions, running))
            self._announce_hang(known or next(left, hang))
            return
        departed = self._monitor.departed_ranks()
        cause = watch.find_cause(self._positions, self._monitor.hosts, departed, self._states)
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

    def _announce_hang(self, cause: Failure) -> None:
        """Print what is known of a hang, and end all ranks."""
        seconds = self.watch.seconds_without_progress() if self.watch else 0
        folder = os.path.abspath(time.strftime("hang-%Y%m%d-%H%M%S"))
        self._monitor.end_all(
            f"The ranks hang: no progress for {seconds:.0f} s.\n  {cause.text}\n"
            f"{summary(self._positions, self._monitor.hosts)}"
            f"Each rank writes its stacks and last collectives to {folder}, then ends with "
            "status 1\n",
            cause,
            folder,
        )
