"""Ask all ranks where they are after a hang or a time-out of a collective, and find the cause.

Loaded when that happens, or with hang_timeout. No torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

from ..channel import Channel, Message, Peer
from ..host import process
from ..host.process import work_done
from ..launch_protocol import Failure
from ..phrases import SILENT
from .decisions import DECIDE_SECONDS, host_of
from .hangs.hang_cause import at_fault, places_of_waits, summary, unreported, waits
from .hangs.hang_watch import BUSY_FACTOR, HangWatch, Heartbeat
from .hangs.positions import (
    Group,
    Position,
    ProcessState,
    Stay,
    StayWatch,
    Work,
    main_thread_location,
    sample,
)
from .hangs.worker_lines import worker_lines

if TYPE_CHECKING:
    from .decisions import Action, Decisions
    from .hangs.positions import Collective


class OwnProgress(Protocol):
    """The progress of this rank; see monitor.OwnRank."""

    @property
    def entered_collectives(self) -> Callable[[], int | None]: ...
    @property
    def progress(self) -> Callable[[], int]: ...
    @property
    def read_collectives(self) -> Callable[[bool], tuple[list[Collective], dict[str, Group]]]: ...


class InspectedRanks(Protocol):
    """The part of Monitor that an inspection uses."""

    rank: int
    decisions: Decisions
    peers: dict[Channel, Peer]
    leaving: bool
    hang_announced: bool
    collective_failed: bool

    @property
    def own(self) -> OwnProgress: ...
    def waits(self) -> bool: ...
    def departed_ranks(self) -> dict[int, str]: ...
    def send_all(self, message: Message) -> None: ...
    def carry_out(self, actions: Iterable[Action]) -> None: ...
    def end_all(
        self, message: str, cause: Failure, files: Mapping[str, str] | None = None, folder: str = ""
    ) -> None: ...


class Inspection:
    """The states of silent ranks, and the watch for hangs. Used by a Monitor, under its lock."""

    def __init__(self, monitor: InspectedRanks) -> None:
        self.watch: HangWatch | None = None
        self._monitor, self._decisions = monitor, monitor.decisions
        self._next_beat = time.monotonic()
        self._stays = StayWatch()  # samples of the main thread
        self._since: float | None = None  # monotonic seconds of the request for positions
        self._is_pause = False  # True if the request is for a line about a pause, and nothing ends
        self._positions_at_hang: dict[int, Position] = {}  # the positions that show a hang
        self._states: dict[int, ProcessState] = {}  # states of ranks that do not respond

    def restart(self) -> None:
        """Begin the limit of a hang again."""
        if self.watch is not None and self._since is not None:
            self.watch.restart()
            self._since, self._decisions.positions_requested = None, False
            self._positions_at_hang = {}

    def pause(self) -> float:
        """Return the seconds until something has to be done without a message."""
        if self._since is not None:
            return 0.05
        if self._monitor.leaving or self._monitor.hang_announced:  # no more heartbeats are sent
            return 0.2
        interval = self.watch.interval if self.watch else 0.0
        return min(max(0.0, self._next_beat - time.monotonic()), interval)

    def handle(self, rank: int, message: Message, reply: Callable[[Message], None]) -> None:
        """Handle a message about where ranks are."""
        kind = message["kind"]
        if kind == "beat" and self.watch is not None:
            beat = Heartbeat(message["progress"], message["entered"], message["location"])
            self.watch.receive(rank, beat)
        elif kind == "ask_states":
            reply({"kind": "states", "states": _read_states(message["pids"])})
        elif kind == "states":
            self._note_states(host_of(self._decisions.hosts[rank]), message["states"])
        elif kind == "ask_position":
            if rank == self._monitor.rank and self.watch:  # this rank asks all; some may be silent
                self._ask_states(filter(self.watch.has_missed_beats, self._decisions.running()))
            reply({"kind": "position", "position": self._position(message["ends"])})
        elif kind == "position" and message["position"]:
            entered, location, last, work, groups, workers, stay = message["position"]
            self._decisions.positions[rank] = Position(
                entered,
                location,
                tuple(last),
                Work(*work),
                {name: Group(*group) for name, group in groups.items()},
                tuple(workers),
                Stay(*stay),
            )

    def _position(self, ends: bool) -> Position | None:
        """Return where this rank is. ends: whether the job ends in any case."""
        entered = self._monitor.own.entered_collectives()
        if entered is None:
            return None
        last, groups = self._monitor.own.read_collectives(ends)
        if last and self._monitor.collective_failed:  # the wait ended with an exception
            last[-1]["blocks"] = True
        work = Work(*work_done())
        location = main_thread_location()
        stay = self._stays.stay(time.monotonic())
        return Position(entered, location, tuple(last), work, groups, worker_lines(), stay)

    # Silent ranks --------------------------------------------------------------------------------

    def _ask_states(self, silent: Iterable[int]) -> None:
        """Ask the other ranks on the same hosts what the silent ranks do."""
        hosts = self._decisions.hosts
        pids: dict[str, list[int]] = {}
        for rank in silent:
            pid = hosts[rank].rpartition("pid ")[2].rstrip(")")
            pids.setdefault(host_of(hosts[rank]), []).append(int(pid))
        for connection, peer in self._monitor.peers.items():
            if on_host := pids.get(host_of(peer.host)):
                connection.send({"kind": "ask_states", "pids": on_host})
        here = self._decisions.this_host
        self._note_states(here, _read_states(pids.get(here, [])))

    def _note_states(self, host: str, states: list[tuple[int, str, float]]) -> None:
        ranks = {name: rank for rank, name in self._decisions.hosts.items()}
        for pid, why_stopped, cpu_seconds in states:
            rank = ranks.get(f"{host} (pid {pid})")
            if rank is not None:
                self._states[rank] = ProcessState(why_stopped, cpu_seconds)
                if why_stopped:
                    self._decisions.silent[rank] = f"its process is {why_stopped}"

    # The watch for hangs -------------------------------------------------------------------------

    def watch_ranks(self) -> None:
        """Send a heartbeat when it is time, and look for a hang: rank 0, or this rank alone."""
        watch, now = self.watch, time.monotonic()
        if watch is None or self._monitor.leaving or self._monitor.hang_announced:
            return
        if now >= self._next_beat:
            if now > self._next_beat + watch.limit / 4:  # the job may have been suspended
                watch.restart()
            self._next_beat = now + watch.interval
            # faulthandler ends a rank that cannot run this thread because another holds the GIL,
            # later than the other ranks end. It would also end a rank that was suspended as long by
            # `scontrol suspend`.
            if watch.ends_itself:
                with contextlib.suppress(OSError, RuntimeError, ValueError):  # stderr may be closed
                    seconds = 1.1 * BUSY_FACTOR * watch.limit + 5
                    faulthandler.dump_traceback_later(seconds, exit=True)
            watch.receive(self._monitor.rank, self._send_beat())

        if self._monitor.rank == 0 or 0 in self._decisions.departed:
            self._inspect(watch, now)
        else:
            self._look_for_rank_0(watch)

    def _send_beat(self) -> Heartbeat:
        own = self._monitor.own
        entered = own.entered_collectives() or 0
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        location, running = sample(frame)
        self._stays.add(time.monotonic(), location, running)
        beat = Heartbeat(own.progress(), entered, location or "an unknown location")
        self._monitor.send_all({"kind": "beat", **beat._asdict()})
        return beat

    def _look_for_rank_0(self, watch: HangWatch) -> None:
        """Announce a hang if rank 0, which normally decides, is silent."""
        stalled = watch.seconds_without_progress()
        if not watch.silent(0) or stalled < 1.1 * watch.limit + 5:
            return
        # A rank that does not wait may be busy: the limit of busy ranks applies.
        if self._monitor.waits() or stalled > 1.1 * BUSY_FACTOR * watch.limit + 5:
            text = (
                f"rank 0 on {self._decisions.hosts[0]} {SILENT} to "
                f"{self._decisions.this_host}: it is stopped or busy in native code, its host is "
                "down, or the network between them is cut"
            )
            self._announce_hang(self._decisions.hang(text, {0}))

    def _inspect(self, watch: HangWatch, now: float) -> None:
        """Request all positions when no rank makes progress, and find the cause."""
        decisions = self._decisions
        if self._since is None:
            is_due = watch.is_due()
            if not is_due and not watch.pause_is_due():
                return
            self._is_pause = not is_due
            self._request_again(now)
        self._monitor.carry_out(decisions.request_positions(ends=bool(self._positions_at_hang)))
        running = decisions.running()
        is_late = now - (self._since or now) > DECIDE_SECONDS
        missing = unreported(decisions.positions, self._positions_at_hang or running)
        if missing and not is_late:
            return

        watch.reachable = {
            peer.rank
            for connection, peer in self._monitor.peers.items()
            if not connection.closed and not connection.is_unacknowledged()
        }
        departed = self._monitor.departed_ranks()
        if self._positions_at_hang:  # second answers: they include where collectives were called
            self._conclude(watch, running, departed)
            return
        positions, hosts = decisions.positions, decisions.hosts
        if self._is_pause:
            here = {rank: hosts[rank] for rank in running}
            text = watch.describe_pause(positions, here)
            if text and not departed:
                sys.stderr.write(f"{text}\n")
                sys.stderr.flush()
            self._since, decisions.positions_requested = None, False
            return
        cause = watch.find_cause(positions, hosts, departed, self._states)
        sys.stderr.write(watch.notice)
        sys.stderr.flush()
        watch.notice = ""
        if cause:
            self._positions_at_hang = dict(positions)
            self._request_again(now)
        else:
            self._since, decisions.positions_requested = None, False

    def _conclude(self, watch: HangWatch, running: list[int], departed: dict[int, str]) -> None:
        """Announce the hang that these positions show."""
        decisions = self._decisions
        decisions.positions = {**self._positions_at_hang, **decisions.positions}
        text = watch.describe(decisions.positions, decisions.hosts, departed)
        known = decisions.first if self._monitor.waits() else None  # sent by rank 0 before it left
        ranks = at_fault(decisions.positions, running)
        if not departed and not waits(decisions.positions, running):
            ranks = set()  # all are idle: nothing shows which rank is wrong
        cause = decisions.hang(text, ranks)
        left = next(
            (cause for cause in decisions.departed.values() if cause and cause.text == text), None
        )
        if left and left.kind == "uneven":
            left = decisions.explain_left(places_of_waits(decisions.positions)) or left
        self._announce_hang(known or left or cause)

    def _request_again(self, now: float) -> None:
        self._since = now
        self._decisions.positions_requested = False
        self._decisions.positions.clear()
        if not self._positions_at_hang:
            self._states.clear()

    def _announce_hang(self, cause: Failure) -> None:
        """Print the cause of a hang, and end all ranks."""
        seconds = self.watch.seconds_without_progress() if self.watch else 0
        folder = os.path.abspath(time.strftime("hang-%Y%m%d-%H%M%S"))
        self._monitor.end_all(
            f"The ranks hang: no progress for {seconds:.0f} s. Where each rank is, and its stacks "
            f"and last collectives: {folder}",
            cause,
            {
                "ranks.txt": summary(self._decisions.positions, self._decisions.hosts),
                "positions.json": self._positions_as_json(),
            },
            folder,
        )

    def _positions_as_json(self) -> str:
        """Return the data behind the decision, for `python -m tests.faults.replay`."""
        decisions = self._decisions
        return json.dumps(
            {
                "hosts": decisions.hosts,
                "departed": self._monitor.departed_ranks(),
                "positions": decisions.positions,
            },
            indent=1,
        )


def _read_states(pids: list[int]) -> list[tuple[int, str, float]]:
    """Return the states of this host's silent ranks; see ProcessState."""
    states = []
    for pid in pids:
        if process.name(pid) == process.name(os.getpid()):  # names differ in another PID namespace
            work = process.schedule(pid, pid)  # only the main thread: gloo's threads never rest
            seconds = work.run_seconds + work.ready_seconds
            states.append((pid, process.why_stopped(pid), seconds))
    return states
