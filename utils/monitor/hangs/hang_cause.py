"""Find and word the cause of a hang in reported positions: the ranks that the others wait for.

No torch, no input or output.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Mapping

from ...phrases import NOT_ENTERED, OTHER_COLLECTIVE, SILENT
from ...ranges import name_ranks, parse_ranges
from .positions import Collective, Group, Position, Wait

_SHOWN_RANKS = 8
_WITH_ROOT = ("broadcast", "reduce", "gather", "scatter")
# A gather or an all-to-all is missing: its sizes may differ between ranks.
_EQUAL_SIZES = ("all_reduce", "allreduce", "broadcast", "reduce")


def unreported(positions: Mapping[int, Position], running: Iterable[int]) -> list[int]:
    """Return the running ranks that have not reported their position."""
    return [rank for rank in running if rank not in positions]


def waits(positions: Mapping[int, Position], running: Iterable[int]) -> dict[int, list[Wait]]:
    """Return what each rank waits in. It may wait for any rank without a position."""
    running = set(running)
    silent = running - positions.keys()
    newest: dict[str, dict[int, Group]] = {}
    for rank, position in positions.items():
        for name, group in position.groups.items():
            newest.setdefault(name, {})[rank] = group

    @functools.cache
    def awaited(name: str, number: int) -> tuple[int, ...]:
        groups = newest.get(name, {})
        members = parse_ranges(next((group.ranks for group in groups.values()), ""))
        late = (rank for rank, g in groups.items() if g.entered is not None and g.entered < number)
        return (*sorted(late), *sorted(silent.intersection(members)))

    found: dict[int, list[Wait]] = {}
    for rank, position in sorted(positions.items()):
        for call in position.last or _assumed_calls(position):
            others = awaited(call["group"], call["number"])
            if call["between_two"]:
                others = (call["peer"],) if call["peer"] in running else ()
            if call["blocks"] and (position.last or set(others) & positions.keys()):
                found.setdefault(rank, []).append(Wait(call, others))
    return found


def may_be_awaited(rank: int, positions: Mapping[int, Position], running: Iterable[int]) -> bool:
    """Return whether others may wait for this rank, which has left: as a peer, or in a group."""
    for other, its_waits in waits(positions, running).items():
        for call in (wait.call for wait in its_waits):
            group = positions[other].groups.get(call["group"])
            if call["peer"] is not None:
                if call["peer"] == rank:
                    return True
            elif group is None or rank in parse_ranges(group.ranks):
                return True
    return False


def _assumed_calls(position: Position) -> list[Collective]:
    """Return the newest collective of each group, for a rank whose torch records none."""
    return [
        Collective(group=name, number=group.entered, operation="", sizes="", between_two=False,
                   peer=None, location="", thread=group.thread, pending=True, blocks=True)
        for name, group in position.groups.items()
        if group.entered
    ]  # fmt: skip


def late(
    positions: Mapping[int, Position], running: Iterable[int]
) -> dict[int, list[tuple[int, Wait]]]:
    """Return the ranks that others wait for, with the first waiting rank of each collective.

    A rank that waits itself is not late, unless another of its threads should have entered.
    """
    waiting = waits(positions, running)
    found: dict[int, dict[tuple[str, int], tuple[int, Wait]]] = {}
    for rank, its_waits in waiting.items():
        for wait in its_waits:
            call = wait.call
            for other in wait.awaited:
                threads = {own.call["thread"] for own in waiting.get(other, ())}
                group = positions[other].groups.get(call["group"]) if threads else None
                if not threads or (group and group.thread and group.thread not in threads):
                    key = call["group"], call["number"]
                    found.setdefault(other, {}).setdefault(key, (rank, wait))
    return {rank: list(by_collective.values()) for rank, by_collective in sorted(found.items())}


def describe(
    positions: Mapping[int, Position],
    hosts: Mapping[int, str],
    running: list[int],
    silent: Mapping[int, str] | None = None,
) -> str:
    """Return the cause of a collective's time-out, as far as the positions show it.

    hosts: the host of each rank. running: the ranks that have not left. silent: the known state
    of each rank that does not respond.
    """
    silent = silent or {}
    causes = [mismatch] if (mismatch := describe_mismatch(positions, hosts)) else []
    found, waiting = late(positions, running), waits(positions, running)
    no_response = [r for r in unreported(positions, running) if r in found or not found]
    causes += [
        _describe_late(rank, found[rank], waiting, positions, hosts)
        for rank in found
        if rank in positions
    ]
    causes += [
        f"rank {rank} on {hosts[rank]} {SILENT}: "
        f"{silent.get(rank, 'it is stopped, or busy in native code')}"
        for rank in no_response
    ]
    if len(causes) > _SHOWN_RANKS:
        causes[_SHOWN_RANKS:] = [f"... and {len(causes) - _SHOWN_RANKS} more ranks"]
    if causes and not mismatch:
        first = next((its[0] for its in found.values()), None)
        if first and not first[1].call["between_two"]:
            causes[-1] += f". Rank {first[0]} waits in {_show(first[1].call, positions[first[0]])}"
    return "; ".join(causes) or _describe_unknown(positions, hosts, running)


def _describe_late(
    rank: int,
    by: list[tuple[int, Wait]],
    waiting: Mapping[int, list[Wait]],
    positions: Mapping[int, Position],
    hosts: Mapping[int, str],
) -> str:
    collectives = [wait.call for _, wait in by if not wait.call["between_two"]]
    # With a GPU, a rank may wait in several of a group: the first of each group is shown.
    collectives.sort(key=lambda call: -call["number"])
    calls = list({call["group"]: call for call in collectives}.values())[:-4:-1]
    location = f"{positions[rank].location}{describe_workers(positions[rank])}"
    if not calls:
        first, call = by[0][0], by[0][1].call
        return (
            f"rank {first} on {hosts[first]} waits in {_show(call, positions[first])}, and "
            f"rank {rank} on {hosts[rank]} does not take part: it is at {location}"
        )
    shown = []
    for call in calls:
        key = call["group"], call["number"]
        members = [
            member
            for member, its_waits in waiting.items()
            if any(key == (wait.call["group"], wait.call["number"]) for wait in its_waits)
        ]
        who = f"{name_ranks(members)} wait{'s' * (len(members) == 1)}"
        shown.append(f"{_number(call)}, in which {who}")
    group = positions[rank].groups.get(calls[0]["group"])
    number = ", and ".join(shown)
    if group and group.location not in ("", positions[rank].location):  # of another thread
        location = group.location
    return f"rank {rank} on {hosts[rank]} {NOT_ENTERED} {number}. It is at {location}"


def describe_workers(position: Position) -> str:
    """Return the DataLoader workers a rank waits for, as an addition to its line; "" for none."""
    if not position.workers:
        return ""
    known = [line for line in position.workers if line]
    if not known:
        return ", and waits for its DataLoader workers, whose lines are not known"
    return f", and waits for its DataLoader workers at {' and '.join(known)}"


def _describe_unknown(
    positions: Mapping[int, Position], hosts: Mapping[int, str], running: Iterable[int]
) -> str:
    """Return what is known if all ranks wait: for each other, or for an unknown cause."""
    waiting = waits(positions, running)
    awaited = {
        rank for its_waits in waiting.values() for wait in its_waits for rank in wait.awaited
    }
    shown = [
        f"rank {rank} on {hosts[rank]} waits{_awaited_in(its_waits[0])} in "
        f"{_show(its_waits[0].call, positions[rank])}"
        for rank, its_waits in sorted(waiting.items())
        if rank in awaited or its_waits[0].call["between_two"]
    ]
    if shown:
        return (
            "which rank is wrong cannot be told: every rank that others wait for also waits. Check "
            "that these ranks enter the same collectives in the same order: "
            f"{'; '.join(shown[:_SHOWN_RANKS])}"
        )
    call = next((its_waits[0].call for its_waits in waiting.values()), None)
    last = _number(call) if call else f"collective {_last_collective(positions)}"
    reasons = ["one of them, or its GPU, was late"]
    if call and call["operation"] in _WITH_ROOT:
        reasons.insert(0, "the ranks gave different roots (src, dst)")
    if len({host.partition(" ")[0] for host in hosts.values()}) > 1:
        reasons.append("a connection between the hosts is interrupted")
    return (
        f"a collective timed out although all ranks have entered {last} by now: "
        f"{', or '.join(reasons)}"
    )


def places_of_waits(positions: Mapping[int, Position]) -> dict[int, str]:
    """Return the collective that each waiting rank is in, and where."""
    return {
        rank: _show(its_waits[0].call, positions[rank])
        for rank, its_waits in waits(positions, positions).items()
    }


def describe_waiting(positions: Mapping[int, Position]) -> str:
    """Return the collective that the first waiting rank is in; "" where none is known."""
    for rank, its_waits in waits(positions, positions).items():
        for wait in its_waits:
            if wait.call["operation"] and not wait.call["between_two"]:
                return f"rank {rank} waits in {_show(wait.call, positions[rank])}"
    return ""


def describe_mismatch(
    positions: Mapping[int, Position], hosts: Mapping[int, str], *, all_sizes: bool = False
) -> str:
    """Return which ranks entered a different collective than the majority; "" where none did.

    all_sizes: compare also the sizes of a gather, which may differ. For a rank that was aborted.
    """
    by_rank, odd = _mismatch(positions, all_sizes)
    if not odd:
        return ""
    shown = {rank: _show(call, positions[rank]) for rank, call in by_rank.items()}
    number = _number(next(iter(by_rank.values())))
    causes = "; ".join(
        f"rank {rank} on {hosts[rank]} {OTHER_COLLECTIVE} {number}: {shown[rank]}"
        for rank in odd[:_SHOWN_RANKS]
    )
    example = next((rank for rank in by_rank if rank not in odd), None)
    if example is None:
        return (
            f"{causes}. One of these is a collective that only some ranks call; which one cannot "
            "be told. Different numbers of batches on the ranks do this, too: use drop_last=True "
            "or DistributedDataParallel.join()"
        )
    return f"{causes}. The other ranks entered {shown[example]}"


def mismatched(positions: Mapping[int, Position], *, all_sizes: bool = False) -> set[int]:
    """Return the ranks that describe_mismatch() names."""
    return set(_mismatch(positions, all_sizes)[1])


def _mismatch(
    positions: Mapping[int, Position], all_sizes: bool = False
) -> tuple[dict[int, Collective], list[int]]:
    """Return the first collective in which the ranks differ, and the ranks in the minority.

    Without a majority these are all ranks; if no ranks differ there are none.
    """
    calls: dict[tuple[str, int], dict[int, Collective]] = {}
    for rank, position in sorted(positions.items()):
        for call in position.last:
            if not call["between_two"]:
                calls.setdefault((call["group"], call["number"]), {})[rank] = call
    for _, by_rank in sorted(calls.items(), key=lambda item: item[0][1]):
        signatures = {rank: _signature(call, all_sizes) for rank, call in by_rank.items()}
        (usual, most), *others = Counter(signatures.values()).most_common(2)
        if others:
            is_even = most == others[0][1]
            odd = [rank for rank in by_rank if is_even or signatures[rank] != usual]
            return by_rank, odd
    return {}, []


def at_fault(positions: Mapping[int, Position], running: list[int]) -> set[int]:
    """Return the ranks that describe() names, or all where none waits."""
    waiting, found = waits(positions, running), late(positions, running)
    silent = {rank for rank in unreported(positions, running) if rank in found or not found}
    named = {*_mismatch(positions)[1], *found, *silent}
    return named if waiting else set(positions)


def summary(positions: Mapping[int, Position], hosts: Mapping[int, str]) -> str:
    """Return one line for each group of ranks at the same place."""
    places: dict[tuple[str, str], list[int]] = {}
    for rank, position in sorted(positions.items()):
        pending = next((call for call in reversed(position.last) if call["blocks"]), None)
        doing = (
            f"in {'' if pending['between_two'] else f'{_number(pending)}, '}{_name(pending)}"
            if pending
            else (f"{position.collectives} collectives entered, in none")
        )
        location = f"{position.location}{describe_workers(position)}"
        places.setdefault((doing, location), []).append(rank)
    lines = []
    for (doing, location), ranks in places.items():
        names = ", ".join(dict.fromkeys(hosts[rank].partition(" ")[0] for rank in ranks[:64]))
        lines.append(f"  {name_ranks(ranks)} on {names}: {doing}; at {location}\n")
    silent = unreported(positions, sorted(hosts))
    if silent:
        lines.append(f"  {name_ranks(silent)}: no position\n")
    return "".join(lines)


def _signature(call: Collective, all_sizes: bool) -> tuple[str, str]:
    compares_sizes = all_sizes or call["operation"] in _EQUAL_SIZES
    return call["operation"], call["sizes"] if compares_sizes else ""


def _number(call: Collective) -> str:
    return f"collective {call['number']}" + (f" of group {call['group']}" if call["group"] else "")


def _awaited_in(wait: Wait) -> str:
    return f" for {name_ranks(wait.awaited)}" if wait.awaited else ""


def _name(call: Collective) -> str:
    sizes = f" of {call['sizes']}" if call["sizes"] not in ("", "[]") else ""  # "[]": a barrier
    return f"{call['operation'] or _number(call)}{sizes}"


def _show(call: Collective, position: Position) -> str:
    """Return a collective and where it was called; if not recorded, where the rank waits."""
    return f"{_name(call)} at {call['location'] or position.location}"


def _last_collective(positions: Mapping[int, Position]) -> int:
    return max((position.collectives for position in positions.values()), default=0)


def describe_idle(
    positions: Mapping[int, Position], hosts: Mapping[int, str], departed: Mapping[int, str]
) -> str:
    """Return where the ranks are when all are idle. departed: ranks that have left, and why."""
    shown = sorted(positions.items())[:_SHOWN_RANKS]
    places = {rank: f"{place.location}{describe_workers(place)}" for rank, place in shown}
    if departed or len(positions) == 1:
        after = " after the other ranks have left" if departed else ""
        return "; ".join(
            f"rank {rank} on {hosts[rank]} is idle{after}. It is at {place}"
            for rank, place in places.items()
        )
    if all(position.workers for position in positions.values()):
        return f"all ranks wait for their DataLoader workers, {_describe_workers(positions)}"
    lines = {position.stay.location for position in positions.values()}
    if len(lines) == 1 and (line := lines.pop()):
        seconds = min(position.stay.seconds for position in positions.values())
        return f"all ranks have been at {line} for {seconds:.0f} s, without a collective"
    each = (f"rank {rank} on {hosts[rank]} is at {place}" for rank, place in places.items())
    return (
        "which rank is wrong cannot be told: all are idle, and none waits in a collective. "
        f"torch does not record gloo's sends and receives. {'; '.join(each)}"
    )


def _describe_workers(positions: Mapping[int, Position]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, position in sorted(positions.items()):
        known = [line for line in position.workers if line]
        ranks.setdefault(" and ".join(known), []).append(rank)
    if list(ranks) == [""]:
        return f"whose lines are not known. {_describe_locations(positions)}"
    if len(ranks) == 1:
        return f"which are at {next(iter(ranks))}"
    places = [
        f"those of {name_ranks(its)} are at {lines or 'lines that are not known'}"
        for lines, its in list(ranks.items())[:_SHOWN_RANKS]
    ]
    return f"and {'; '.join(places)}"


def _describe_locations(positions: Mapping[int, Position]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, position in sorted(positions.items()):
        ranks.setdefault(position.location, []).append(rank)
    places = (f"{name_ranks(its)} at {place}" for place, its in [*ranks.items()][:_SHOWN_RANKS])
    return f"The ranks themselves: {', '.join(places)}"
