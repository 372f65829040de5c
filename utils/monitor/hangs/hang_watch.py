"""Decide whether the ranks hang, from their heartbeats and positions. No torch, no input or output.

A hang is a time without progress in which ranks wait in a collective, or all ranks are idle. A
pause in which all ranks compute, read or write is no hang. If the rank that the others wait for
does so, it is busy, and the limit is BUSY_FACTOR times as long. The same limit applies if all ranks
poll: their main threads wake up again and again at the same few lines, and hardly work.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from .hang_cause import (
    describe,
    describe_idle,
    describe_mismatch,
    late,
    may_be_awaited,
    unreported,
    waits,
)
from .positions import Position, ProcessState, Wait

BUSY_FACTOR = 3
BUSY_CPU = 0.2  # cores: above this, a rank is busy
_BUSY_MEGABYTES = 1.0  # megabytes per second: above this, a rank is busy
_IDLE_CPU = 0.01  # seconds of CPU per second
_INSPECTION_CPU = 0.05  # seconds of CPU for an inspection and the heartbeats
_IDLE_MEGABYTES = 1.0  # megabytes read and written between two inspections
_IDLE_WAKEUPS = 2.0  # wake-ups of the main thread per second
_POLLING = 0.1  # cores, and megabytes per second: below this, a rank may be polling
# Heartbeats within the limit. A stopped process does not read them: they must fit into its kernel's
# receive buffer, which holds more than a thousand.
_MOST_HEARTBEATS = 300
_STOPPED_OR_BUSY = "stopped, or busy in native code"
_LEAD_SECONDS, _LEAD_SHARE = 30.0, 0.1  # the watch acts this long before torch's own time limit
_RANKS_PER_SECOND = 500  # heartbeats that rank 0 can handle in a second


def time_before(timeout: float) -> float:
    """Return the seconds without progress after which torch would soon end a collective."""
    return timeout - min(_LEAD_SECONDS, _LEAD_SHARE * timeout)


class Heartbeat(NamedTuple):
    """The regular message of a rank."""

    progress: int  # a number that grows with the rank's progress
    entered: int  # collectives of the default group entered so far
    location: str  # where the main thread is


class HangWatch:
    """Collects the heartbeats of the ranks, and decides what they mean.

    Positions are requested twice: when half the limit has passed without progress, and when all
    of it has. The changes between the two show which rank works.
    """

    def __init__(
        self,
        limit_seconds: float,
        world_size: int,
        *,
        recorded: bool = False,
        before_torch: bool = False,
        ends_itself: bool = False,
        notice_after: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start to watch.

        limit_seconds: time without progress. recorded: positions show each collective that a rank
        waits in; a rank that has entered fewer need not be late, because gloo counts sends and
        receives. before_torch: limit_seconds is time_before(); only a wait that torch would end
        soon is a hang. ends_itself: a rank that holds the GIL for too long ends without the help of
        a launcher. notice_after: seconds without progress until a line says where ranks wait; 0:
        never.
        """
        self._recorded, self.before_torch = recorded, before_torch
        self.ends_itself = ends_itself
        self._busy_factor = 1 if before_torch else BUSY_FACTOR
        self.limit = limit_seconds
        interval = min(max(1.0, limit_seconds / _MOST_HEARTBEATS), limit_seconds / 8)
        self.interval = max(interval, world_size / _RANKS_PER_SECOND)
        self._clock = clock
        self._last_progress = clock()
        self._heartbeats: dict[int, Heartbeat] = {}
        self._received: dict[int, float] = {}
        self._first: dict[int, Position] = {}  # positions at the first inspection
        self._first_states: dict[int, ProcessState] = {}
        self._first_time = 0.0
        self._worked_at = self._last_progress  # when a rank was last seen to work, or to wait
        self._busy: dict[int, str] = {}  # rank -> "busy (98 % of a core)"
        self._silent: dict[int, tuple[str, bool]] = {}  # rank -> state, whether busy
        self._notice_after = notice_after
        self._pauses_told = 0  # number of lines printed about this pause
        self._noticed = False
        self.notice = ""  # says that a rank is busy; to be printed once
        self.reachable: set[int] = set()  # ranks whose hosts acknowledge what is sent to them

    def receive(self, rank: int, heartbeat: Heartbeat) -> None:
        """Take a rank's heartbeat."""
        previous = self._heartbeats.get(rank)
        if previous is None or heartbeat.progress != previous.progress:
            self.restart()
        self._heartbeats[rank] = heartbeat
        self._received[rank] = self._clock()

    def seconds_without_progress(self) -> float:
        """Return the time since the last progress of any rank."""
        return self._clock() - self._last_progress

    def is_due(self) -> bool:
        """Whether the positions of all ranks should be requested now."""
        stalled = self.seconds_without_progress()
        if not self._first:
            return stalled >= self.limit / 2
        since_first = self._clock() - self._first_time
        return stalled >= self.limit and since_first >= self.limit / 2

    def pause_is_due(self) -> bool:
        """Whether to request the positions for a line about a pause, not to end the job."""
        times = (self._notice_after, 5 * self._notice_after)
        told = self._pauses_told
        is_on = self._notice_after > 0 and told < len(times)
        return is_on and self.seconds_without_progress() >= times[told]

    def describe_pause(self, positions: Mapping[int, Position], hosts: Mapping[int, str]) -> str:
        """Return a line about ranks that wait for others; "" if none waits."""
        self._pauses_told += 1
        running = sorted(hosts)
        if not waits(positions, running):
            return ""
        seconds = self.seconds_without_progress()
        since = f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
        missing = self._describe_silent(unreported(positions, running), hosts)
        return f"no progress for {since}: {describe(positions, hosts, running, missing)}"

    def silent(self, rank: int) -> bool:
        """Whether a rank has sent no heartbeat for half the limit."""
        received = self._received.get(rank, self._clock() - self.seconds_without_progress())
        return self._clock() - received > max(self.limit / 2, 2 * self.interval)

    def has_missed_beats(self, rank: int) -> bool:
        """Whether a rank is overdue: if its thread could run, a heartbeat would have arrived."""
        received = self._received.get(rank, self._clock())
        return self._clock() - received > 2 * self.interval

    def find_cause(
        self,
        positions: Mapping[int, Position],
        hosts: Mapping[int, str],
        departed: Mapping[int, str],
        states: Mapping[int, ProcessState],
    ) -> str:
        """Return the cause of a hang; "" where there is none, or none yet.

        positions: where each rank is that has responded. hosts: "node17 (pid 4711)" for all ranks.
        departed: ranks that have left, and why. states: of ranks that do not respond.
        """
        first, elapsed = self._first, self._clock() - self._first_time
        before, self._first_states = self._first_states, dict(states)
        self._first, self._first_time = dict(positions), self._clock()
        running = [rank for rank in sorted(hosts) if rank not in departed]
        missing = unreported(positions, running)
        if not first or not positions or not all(map(self.silent, missing)):
            return ""
        if any(_entered(first.get(rank, now)) != _entered(now) for rank, now in positions.items()):
            self.restart()
            return ""

        waiting = waits(positions, running)
        if self._none_waits(positions, running):
            is_idle = not missing and all(
                rank in first and _is_idle(first[rank], position, elapsed)
                for rank, position in positions.items()
            )
            if missing or not all(
                rank in first and _is_quiet(first[rank], position, elapsed)
                for rank, position in positions.items()
            ):
                self._worked_at = self._clock()
            is_hang = (is_idle or self._all_poll(positions)) and not self.before_torch
            return self.describe(positions, hosts, departed) if is_hang else ""
        self._worked_at = self._clock()
        if self.before_torch and not self._ends_soon(waiting, positions):
            return ""
        awaited = set(late(positions, running))
        others = [wait.awaited for its_waits in waiting.values() for wait in its_waits]
        if self._recorded:  # then waiting uses no CPU: any use of it is work
            awaited |= positions.keys() & {rank for ranks in others for rank in ranks}
        if not all(others):  # torch does not say which ranks they wait for
            awaited |= positions.keys() - waiting.keys()
        if awaited & positions.keys() - first.keys():  # no earlier position to compare with
            return ""
        busy = {
            rank: use
            for rank in sorted(awaited & first.keys() & positions.keys())
            if (use := _use(first[rank], positions[rank], elapsed))
        }
        self._silent = {
            rank: _use_of_silent(before.get(rank), states[rank], elapsed)
            for rank in missing
            if rank in states
        }
        names = [_name(host) for host in hosts.values()]
        native = {
            rank: text
            for rank in missing
            for text, is_busy in [self._silent.get(rank, (_STOPPED_OR_BUSY, True))]
            # If no rank of a host responds, the host is down, unless it has only this one rank.
            if is_busy and (rank in states or names.count(_name(hosts[rank])) == 1)
        }
        is_waited_for = native.keys() == set(missing) and not describe_mismatch(positions, hosts)
        if (busy or native) and is_waited_for:
            if self.seconds_without_progress() < self._busy_factor * self.limit:
                self._notice({**busy, **native}, positions, hosts)
                return ""
        self._busy = busy
        return self.describe(positions, hosts, departed)

    def describe(
        self,
        positions: Mapping[int, Position],
        hosts: Mapping[int, str],
        departed: Mapping[int, str],
    ) -> str:
        """Return the cause of the hang that find_cause() found, as these positions show it."""
        running = [rank for rank in sorted(hosts) if rank not in departed]
        missing = unreported(positions, running)
        if self._none_waits(positions, running):
            return describe_idle(positions, hosts, departed)
        causes = (
            cause
            for rank, cause in departed.items()
            if cause and may_be_awaited(rank, positions, running)
        )
        left = next(causes, "")
        if left and not late(positions, running):
            return left
        cause = describe(positions, hosts, running, self._describe_silent(missing, hosts))
        return cause + "".join(f". Rank {rank} is {use}" for rank, use in self._busy.items())

    def _all_poll(self, positions: Mapping[int, Position]) -> bool:
        """Whether all ranks have been at the same few lines for long, and hardly worked."""
        longest = BUSY_FACTOR * self.limit
        shortest = min(position.stay.seconds for position in positions.values())
        return min(self._clock() - self._worked_at, shortest) >= longest

    def _ends_soon(
        self, waiting: Mapping[int, list[Wait]], positions: Mapping[int, Position]
    ) -> bool:
        """Whether torch's time limits of all groups in which ranks wait end the job soon."""
        groups = (
            positions[rank].groups.get(wait.call["group"])
            for rank, its_waits in waiting.items()
            for wait in its_waits
        )
        limits = [time_before(group.timeout) for group in groups if group and group.timeout]
        return self.seconds_without_progress() >= max(limits, default=self.limit)

    def _none_waits(self, positions: Mapping[int, Position], running: list[int]) -> bool:
        if waits(positions, running):
            return False
        if self._recorded or any(position.last for position in positions.values()):
            return True
        # Compare with the silent ranks' last heartbeats: has one entered fewer collectives?
        beats = [
            self._heartbeats[r] for r in unreported(positions, running) if r in self._heartbeats
        ]
        fewest = min((beat.entered for beat in beats), default=sys.maxsize)
        return all(position.collectives <= fewest for position in positions.values())

    def _notice(
        self,
        busy: Mapping[int, str],
        positions: Mapping[int, Position],
        hosts: Mapping[int, str],
    ) -> None:
        if self._noticed:
            return
        self._noticed = True
        places = {rank: f"last seen at {beat.location}" for rank, beat in self._heartbeats.items()}
        places |= {rank: f"at {position.location}" for rank, position in positions.items()}
        ranks = "; ".join(
            f"rank {rank} on {hosts[rank]} is {use} {places.get(rank, '')}"
            for rank, use in list(busy.items())[:8]
        )
        self.notice = (
            f"{ranks}. The other ranks have waited in a collective for "
            f"{self.seconds_without_progress():.0f} s. If that is intended, call "
            "report_progress() there, or set a larger hang_timeout. Otherwise the job ends after "
            f"{self._busy_factor * self.limit:.0f} s\n"
        )

    def restart(self) -> None:
        """Start the limit again, after progress or after this process was suspended."""
        self._last_progress = self._worked_at = self._clock()
        self._first = {}
        self._noticed = False
        self._pauses_told = 0

    def _describe_silent(self, missing: list[int], hosts: Mapping[int, str]) -> dict[int, str]:
        """Return what is known of the ranks that do not respond."""
        responding_hosts = {_name(hosts[rank]) for rank in hosts if rank not in missing}
        known = {}
        for rank in missing:
            state = f"it is {_STOPPED_OR_BUSY}"
            if rank in self._silent:
                state = f"its process is {self._silent[rank][0]}"
            elif _name(hosts[rank]) not in responding_hosts and rank not in self.reachable:
                state = "no rank of this host does, so the host is down or its network is cut"
            known[rank] = state
            if rank in self._heartbeats:
                beat = self._heartbeats[rank]
                known[rank] += (
                    f". Its last report: {beat.entered} collectives entered, at {beat.location}"
                )
        return known


def _entered(position: Position) -> tuple[object, ...]:
    newest = position.last[-1:]
    return position.collectives, [(c["group"], c["number"], c["operation"]) for c in newest]


def _is_idle(before: Position, now: Position, seconds: float) -> bool:
    cpu, megabytes = _difference(before, now)
    # Both numbers fall when a child process ends. That is work, too.
    quiet = abs(cpu) < _INSPECTION_CPU + _IDLE_CPU * seconds and abs(megabytes) < _IDLE_MEGABYTES
    wakeups = now.work.wakeups - before.work.wakeups  # polling wakes up more often
    return quiet and not now.work.waits_for_disk and wakeups <= 2 + _IDLE_WAKEUPS * seconds


def _is_quiet(before: Position, now: Position, seconds: float) -> bool:
    """Whether a rank has done as little work as one that polls."""
    cpu, megabytes = map(abs, _difference(before, now))
    quiet = cpu < _INSPECTION_CPU + _POLLING * seconds
    return (
        quiet and megabytes < _IDLE_MEGABYTES + _POLLING * seconds and not now.work.waits_for_disk
    )


def _use(before: Position, now: Position, seconds: float) -> str:
    """Return "busy (98 % of a core)" if a rank worked between two inspections, else ""."""
    cpu, megabytes = _difference(before, now)
    uses = (
        (cpu > BUSY_CPU * seconds, f"{100 * cpu / seconds:.0f} % of a core"),
        (megabytes > _BUSY_MEGABYTES * seconds, f"{megabytes / seconds:.0f} MB/s"),
    )
    found = ", ".join(use for is_busy, use in uses if is_busy)
    return f"busy ({found})" if found else ""


def _use_of_silent(
    before: ProcessState | None, now: ProcessState, seconds: float
) -> tuple[str, bool]:
    """Return the activity of a process that does not respond, and whether it is busy."""
    if now.why_stopped:
        return now.why_stopped, False
    cores = (now.cpu_seconds - before.cpu_seconds) / seconds if before else 0.0
    if cores > BUSY_CPU:
        return f"busy in native code ({100 * cores:.0f} % of a core)", True
    return "in native code", False


def _difference(before: Position, now: Position) -> tuple[float, float]:
    early, late = before.work, now.work
    return late.cpu_seconds - early.cpu_seconds, late.megabytes - early.megabytes


def _name(host: str) -> str:
    return host.partition(" ")[0]
