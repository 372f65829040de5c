"""Which rank failed first: reports of the ranks go in, what to do comes out.

Nothing here sends, waits or reads a clock, so a table of events tests it. monitor.py delivers the
events and carries out the actions. No torch.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..channel import Message
from ..launch_protocol import Failure, Kind
from ..phrases import LEFT, NO_REPORT, NOT_ENTERED, SILENT
from ..ranges import name_ranks

if TYPE_CHECKING:  # loaded when the positions of the ranks are needed
    from .hangs.positions import Collective, Position

HOST_LOST_SECONDS = 60  # seconds without a response of its kernel until a host is lost
DECIDE_SECONDS = 3.0  # seconds that rank 0 collects reports before it answers a query for the cause
_LONGEST_CAUSE = 1 << 14  # characters; an exception may have a long text
_BLOCKED_SHARE, _BUSY_SHARE = 1 / 3, 5  # shares of HOST_LOST_SECONDS; see find_stuck()
_SHOWN_CAUSES = 8


class State(enum.Enum):
    """The state of one rank as another rank sees it; see Decisions."""

    STARTING = "starting"
    RUNNING = "running"
    FAILED = "failed"
    LEFT = "left"
    KILLED = "killed"
    LOST = "lost"


ENDED = (State.LEFT, State.KILLED, State.LOST)


class Send(NamedTuple):
    """Send a message to `ranks`; if this rank is among them, it handles the message itself."""

    message: Message
    ranks: Collection[int]


class ReportToLauncher(NamedTuple):
    """Report the first cause to ddpkit launch."""

    cause: Failure


Action = Send | ReportToLauncher


class Stuck(NamedTuple):
    """Ranks have ended, and this one makes no progress without them: the job has to end."""

    message: str
    cause: Failure


class _Query(NamedTuple):
    """A rank's query for the cause, which waits for rank 0's response."""

    kind: str  # "lost" or "timeout"
    since: float  # monotonic seconds
    place: str  # names the failed collective: "barrier() at train.py, line 9, in save"
    missing: Sequence[int]  # ranks that torch's error names, after a monitored_barrier()


class Decisions:
    """The states of the ranks as this one knows them, and which of them failed first.

    A rank's states, and the event that leads from one to the next:

        starting --connected--> running --left--> left
            |                      |--failed--> failed --left--> left
            |                      |
            '----------------------'--its connection ends without "left"--> killed,
                                      or lost: its host's kernel does not respond either

    A rank whose heartbeats stop is silent: hang_watch.HangWatch notices that, with hang_timeout.

    Rank 0 is connected to all ranks, and decides what failed first:

    1. the first rank that is `failed`;
    2. else the first rank that is killed or lost;
    3. else the rank that the others wait for in a collective;
    4. else the first rank that left while others still needed it. But if most ranks have left
       normally, the ranks that call one more collective are at fault.

    A rank that queries the cause gets an answer after DECIDE_SECONDS at the latest. The other
    ranks are connected to rank 0 only; once it has ended they use the cause it sent when it left.
    """

    def __init__(self, rank: int, hosts: Mapping[int, str]) -> None:
        """rank: this one. hosts: "n1 (pid 7)" for this rank and each rank it is connected to."""
        self.rank, self.hosts = rank, dict(hosts)
        self.backend = ""  # of the ranks, once torch has connected them
        self.states = dict.fromkeys(self.hosts, State.STARTING)
        self.start_failure: Failure | None = None
        self.first: Failure | None = None  # the first cause; every rank reports it
        # Ended ranks, each with the cause that ranks which still need it report; None if the rank
        # ended because of another rank's failure.
        self.departed: dict[int, Failure | None] = {}
        self.hung: set[int] = set()  # ranks that the others wait for in vain; rank 0 knows them
        self.positions: dict[int, Position] = {}
        self.positions_requested = False
        self.silent: dict[int, str] = {}  # rank -> why it does not respond
        self._left_after: dict[int, int] = {}  # rank -> number of collectives it had entered
        self._left_how: dict[int, str] = {}  # rank -> "left normally"
        self._queries: dict[int, _Query] = {}
        self._last_progress, self._progressed_at = (0, 0), 0.0  # see find_stuck()
        self._next_check = 0.0  # monotonic seconds

    # Events --------------------------------------------------------------------------------------

    def connected(self, rank: int) -> list[Action]:
        """Note that torch has connected a rank. Rank 0 reports when all are connected."""
        for started in [rank] if self.rank == 0 else self.hosts:  # rank 0 reports all ranks
            if self.states[started] is State.STARTING:
                self.states[started] = State.RUNNING
        if self.rank == 0 and self.all_started:
            return [Send({"kind": "connected"}, self.others())]
        return []

    def failed(self, rank: int, cause: Failure) -> list[Action]:
        """Note that a rank has failed, and send it the cause that came first."""
        self.states[rank] = State.FAILED
        self.first = self.first or cause
        return [Send({"kind": "cause", "cause": self.first}, [rank])]

    def left(
        self,
        rank: int,
        cause: Failure | None,
        first: Failure | None,
        entered: int | None,
        how: str = LEFT,
    ) -> None:
        """Note that a rank has left.

        cause: why the ranks that still need it stop. first: the first cause, if that rank knows it.
        entered: number of collectives it has entered.
        """
        self.states[rank] = State.LEFT
        self.departed[rank] = cause
        self._left_how[rank] = how
        if entered is not None:
            self._left_after[rank] = entered
        self.first = self.first or first

    def connection_ended(self, rank: int, *, host_lost: bool) -> list[Action]:
        """Note that the connection to a rank has ended."""
        self._queries.pop(rank, None)
        if self.states[rank] in ENDED:
            return []
        name = f"rank {rank} on {self.hosts[rank]}"
        is_starting = not self.all_started
        if host_lost:
            text = (
                f"{name} {SILENT} to {self.this_host}: its host is down, or the network "
                "between them is cut"
            )
        elif is_starting:
            text = f"{name} died while torch was connecting the ranks. Look for its own message"
        else:
            text = (
                f"{name} {NO_REPORT}. It was killed (out of memory, or a signal), "
                "crashed, or called os._exit(). The launcher's output has its exit status"
            )
        self.states[rank] = State.LOST if host_lost else State.KILLED
        failure = self.failure_of(rank, text, "lost" if host_lost else "killed")
        if not is_starting:
            self.departed[rank] = failure
            return []
        return self.start_failed(failure)

    def start_failed(self, failure: Failure) -> list[Action]:
        """Note that the start has failed. Rank 0 reports it to the others."""
        self.start_failure = self.start_failure or failure
        message = {"kind": "start_failed", "cause": self.start_failure}
        return [Send(message, self.others())] if self.rank == 0 else []

    def query(
        self, rank: int, kind: str, now: float, place: str = "", missing: Sequence[int] = ()
    ) -> None:
        """Note that a rank asks for the cause.

        kind: "lost" after a lost connection, "timeout" after a collective timed out. place: the
        failed call, and its line. missing: the ranks that torch's error names.
        """
        self._queries[rank] = _Query(kind, now, place, missing)

    # What is known -------------------------------------------------------------------------------

    @property
    def all_started(self) -> bool:
        """Whether every rank has started, as far as this one knows."""
        return State.STARTING not in self.states.values()

    @property
    def has_queries(self) -> bool:
        return bool(self._queries)

    @property
    def this_host(self) -> str:
        return host_of(self.hosts[self.rank])

    def others(self) -> list[int]:
        """Return the ranks that this one is connected to, ended ones included."""
        return [rank for rank in self.hosts if rank != self.rank]

    def running(self) -> list[int]:
        """Return the ranks that have not ended, this one included."""
        return [rank for rank, state in sorted(self.states.items()) if state not in ENDED]

    def known_cause(self) -> Failure | None:
        """Return the first cause, else the cause given by the first rank that ended with one."""
        return self.first or next(filter(None, self.departed.values()), None)

    def has_ended(self, *kinds: str) -> bool:
        """Whether a rank has ended in one of these ways, by Failure.kind."""
        return any(cause.kind in kinds for cause in self.departed.values() if cause)

    def failure_of(self, rank: int, text: str, kind: Kind) -> Failure:
        return Failure(text, kind, rank, host_of(self.hosts[rank]))

    def hang(self, text: str, ranks_at_fault: Collection[int]) -> Failure:
        """Return the failure for a hang; it names a rank if a single one is at fault."""
        text = text[:_LONGEST_CAUSE]
        if len(ranks_at_fault) == 1:
            return self.failure_of(min(ranks_at_fault), text, "hang")
        return Failure(text, "hang")

    def reports(self, cause: Failure) -> bool:
        """Whether this rank reports a cause to ddpkit launch: rank 0, the rank at fault, or any."""
        return self.rank in (0, cause.rank) or 0 in self.departed

    def prints(self, cause: Failure) -> bool:
        """Whether this rank prints a cause where there is no ddpkit launch: one rank does."""
        if cause.kind in ("exception", "start"):
            return self.rank == cause.rank
        return self.rank == 0 or 0 in self.departed

    # Decisions -----------------------------------------------------------------------------------

    def request_positions(self, *, ends: bool = True) -> list[Action]:
        """Ask the running ranks where they are, once. ends: whether the job ends in any case."""
        if self.positions_requested:
            return []
        self.positions_requested = True
        return [Send({"kind": "ask_position", "ends": ends}, self.running())]

    def respond(self, now: float) -> list[Action]:
        """Rank 0: answer the queries when the cause is known, or time is up. now: monotonic."""
        if not self._queries or self.rank != 0:
            return []
        last_chance = now - min(query.since for query in self._queries.values()) > DECIDE_SECONDS
        timed_out = any(query.kind == "timeout" for query in self._queries.values())
        if not self.first:
            killed = self.has_ended("killed")
            if killed or (timed_out and not self.has_ended("lost")):
                if requests := self.request_positions():
                    return requests
                if not last_chance and not self.positions.keys() >= set(self.running()):
                    return []
                if killed:
                    self._explain_killed()
                else:
                    self._find_hung()
        known = self.known_cause()
        if known and known.kind == "uneven" and known is not self.first:
            if not last_chance and not self._queries.keys() >= set(self.running()):
                return []  # wait: other ranks may leave, too
            places = {rank: query.place for rank, query in self._queries.items() if query.place}
            known = self.explain_left(places) or known
        self.first = known
        if not self.first and not last_chance:
            return []

        asked_by = list(self._queries)
        self._queries.clear()
        actions: list[Action] = [Send({"kind": "cause", "cause": self.first}, asked_by)]
        if self.first and 0 not in asked_by:  # rank 0 itself may end without an error
            actions.append(ReportToLauncher(self.first))
        return actions

    def _explain_killed(self) -> None:
        """Extend the cause of a killed rank by the collective that the others wait in, if any.

        gloo ends the process of a rank that receives more than it expects.
        """
        from .hangs import hang_cause

        known = self.known_cause()
        if not known or self.backend != "gloo":
            return
        if mismatch := hang_cause.describe_mismatch(self.positions, self.hosts, all_sizes=True):
            ranks = hang_cause.mismatched(self.positions, all_sizes=True)
            aborted = next(rank for rank, cause in self.departed.items() if cause is known)
            text = f"{mismatch}. Then gloo aborted rank {aborted} (SIGABRT)"
            self.first = self.hang(text, ranks)
            return
        waiting = hang_cause.describe_waiting(self.positions)
        for rank, query in sorted(self._queries.items()):
            if query.place and not waiting:  # earlier than torch 2.13
                waiting = f"rank {rank} was in {query.place}"
        if waiting:
            self.first = _may_be_aborted(known, waiting)

    def _find_hung(self) -> None:
        """Find the ranks that the others waited for when a collective timed out."""
        from .hangs import hang_cause

        running = self.running()
        if self._find_named(running):
            return
        missing = hang_cause.unreported(self.positions, running)
        self.hung = {*hang_cause.late(self.positions, running), *missing}
        # If a rank is late, one that has left (it may only have sent) is not the cause.
        if self.hung or not self.known_cause():
            text = hang_cause.describe(self.positions, self.hosts, running, self.silent)
            self.first = self.hang(text, hang_cause.at_fault(self.positions, running))

    def _find_named(self, running: Sequence[int]) -> bool:
        """Blame the ranks that torch itself names; return whether it names any."""
        for query in self._queries.values():
            named = [rank for rank in query.missing if rank in running]
            causes = [
                f"{self._names([rank])} {NOT_ENTERED} {query.place}. It "
                + (f"is at {self.positions[rank].location}" if rank in self.positions else SILENT)
                for rank in named[:_SHOWN_CAUSES]
            ]
            if len(named) > _SHOWN_CAUSES:
                causes.append(f"... and {len(named) - _SHOWN_CAUSES} more ranks")
            if named:
                self.hung = set(named)
                self.first = self.hang("; ".join(causes), named)
                return True
        return False

    def explain_without_rank_0(self, cause: Failure, place: str) -> Failure:
        """Add what this rank knows to the end of rank 0. place: the failed call, and its line."""
        if cause.kind == "uneven":
            return self.explain_left({self.rank: place}) or cause
        if cause.kind == "killed" and self.backend == "gloo":
            return _may_be_aborted(cause, f"rank {self.rank} was in {place}")
        return cause

    def last_cause(self, own: Failure | None, entered: int | None, how: str) -> Failure | None:
        """Return the cause that rank 0 knows when it leaves. own: the cause of its departure."""
        known = self.known_cause()
        if self.first or not known or known.kind != "uneven" or not own or own.kind != "uneven":
            return known
        self.left(self.rank, own, None, entered, how)
        places = {rank: query.place for rank, query in self._queries.items() if query.place}
        return self.explain_left(places) or known

    def explain_left(self, places: Mapping[int, str]) -> Failure | None:
        """Name the ranks that call one more collective than most; None where most call it.

        places: for each rank that still runs, the collective it waits in, and its line.
        """
        left = [rank for rank, cause in self.departed.items() if cause and cause.kind == "uneven"]
        if not places or not left or (self.rank == 0 and 2 * len(left) < len(self.hosts)):
            return None
        calls: dict[str, list[int]] = {}
        for rank, place in sorted(places.items()):
            calls.setdefault(place, []).append(rank)
        shown = "; ".join(
            f"{self._names(ranks)} called {place}" for place, ranks in [*calls.items()][:3]
        )
        numbers = {self._left_after.get(rank) for rank in left} - {None}
        after = f" after {max(filter(None, numbers), default=0)} collectives" if numbers else ""
        how = self._left_how[left[0]] if len(left) == 1 else LEFT
        text = f"{shown}, and {self._names(sorted(left))} {how}{after}. "
        if self.rank == 0 and 2 * len(left) > len(self.hosts):
            text += "It is a collective that only some ranks call: call it on all ranks, or on none"
            return self.hang(text, places)._replace(kind="uneven")
        text += (
            "It is a collective that only some ranks call, such as a barrier under `if is_main`, "
            "or the ranks run different numbers of steps. Call it on all ranks, or give each the "
            "same number of steps (drop_last=True, DistributedDataParallel.join())"
        )
        return Failure(text, "uneven")

    def _names(self, ranks: Sequence[int]) -> str:
        if len(ranks) == 1:
            return f"rank {ranks[0]} on {host_of(self.hosts[ranks[0]])}"
        return name_ranks(ranks)

    def end_hung(self, running: Collection[int]) -> list[Action]:
        """End the hung ranks once no others run: a hung rank may never notice that by itself."""
        if not self.hung or not self.hung >= set(running) or not self.first:
            return []
        hung, self.hung = self.hung, set()
        return [Send({"kind": "end", "cause": self.first}, hung)]

    def find_stuck(
        self, now: float, progress: int, read_collectives: Callable[[], Sequence[Collective]]
    ) -> Stuck | None:
        """Find out whether ranks have ended and this one makes no progress without them.

        NCCL's collectives do not raise when a rank ends, nor do collectives among ranks that wait
        for it. The collectives may also use another network than the monitor's connections. A rank
        that computes or saves needs no other rank for a while. Call this at least once a second.
        """
        if not self.departed or now < self._next_check:
            return None
        self._next_check = now + 1.0  # once a second, although thousands of ranks may leave at once
        calls = read_collectives()
        awaited = self._awaited_after_leaving(calls)
        causes = {
            rank: cause for rank, cause in self.departed.items() if cause and cause.kind == "lost"
        }
        is_lost = bool(causes)
        causes = causes or {
            rank: cause
            for rank, cause in self.departed.items()
            if cause and (cause.kind != "uneven" or rank in awaited)
        }
        if not causes:
            return None
        if (progress, len(causes)) != self._last_progress:
            self._last_progress, self._progressed_at = (progress, len(causes)), now
        seconds = now - self._progressed_at
        share = _BLOCKED_SHARE if waits(calls) else _BUSY_SHARE
        if seconds < HOST_LOST_SECONDS * share:
            return None
        cause, *others = (cause for _, cause in sorted(causes.items())[:_SHOWN_CAUSES])
        if others:
            cause = Failure("; ".join(failure.text for failure in (cause, *others)), cause.kind)
        found = f"A rank has ended: no collective for {seconds:.0f} s since then"
        if is_lost:
            found = (
                f"A host is lost: no response for {HOST_LOST_SECONDS} s, then no collective for "
                f"{seconds:.0f} s"
            )
        return Stuck(found, cause)

    def _awaited_after_leaving(self, calls: Sequence[Collective]) -> set[int]:
        """Return the ranks that left before they entered the collective that this rank waits in.

        gloo counts point-to-point transfers, too, so it may have more such ranks than are returned.
        """
        of_all = (
            call["number"]
            for call in calls
            if call["blocks"] and not call["group"] and not call["between_two"]
        )
        newest = max(of_all, default=0)
        return {rank for rank, entered in self._left_after.items() if entered < newest}


def _may_be_aborted(killed: Failure, waiting: str) -> Failure:
    """Add that gloo may have aborted a killed rank. waiting: see Failure."""
    failure = killed._replace(waiting=waiting)
    text = f"{killed.text}. If that is 134 (SIGABRT), gloo has aborted it: {failure.why_aborted}"
    return failure._replace(text=text)


def waits(calls: Sequence[Collective]) -> bool:
    """Whether this rank waits in one of its last collectives; True where none are recorded."""
    return not calls or any(call["blocks"] for call in calls)


def host_of(name: str) -> str:
    """Return "node17" for "node17 (pid 4711)"."""
    return name.partition(" ")[0]
