"""Say where idle ranks are: none of them waits in a collective. No torch, no input or output."""

from __future__ import annotations

from collections.abc import Mapping

from ..host.cores import name_ranks
from .hang import Position, describe_workers

_SHOWN_RANKS = 8


def describe_idle(
    positions: Mapping[int, Position], hosts: Mapping[int, str], departed: Mapping[int, str]
) -> str:
    """Return where ranks are that are all idle. departed: ranks that have left, and why."""
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
