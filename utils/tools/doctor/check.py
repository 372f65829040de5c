"""Define a check of `doctor`: ranks collect facts, and rank 0 draws conclusions from them."""

from __future__ import annotations

import abc
import enum
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

Facts = TypeVar("Facts")
# Yields a JSON value for all ranks; each yield returns the values of all ranks, by rank, with None
# for a rank that has sent none within the time limit. Needs only connections to rank 0.
Exchange = Generator[Any, list[Any], Facts]


class Level(enum.IntEnum):
    """How serious a finding is. The highest level is the exit status of `doctor`."""

    GOOD = 0
    WARNING = 1
    BAD = 2


@dataclass(frozen=True)
class Finding:
    """One result of a check.

    message: what was found, with values; for WARNING and BAD also what was expected.
    remedy: the next step; "" for GOOD.
    ranks, hosts: at fault; empty if the finding concerns the whole job.
    exclude: whether a later job should avoid these hosts.
    """

    level: Level
    message: str
    remedy: str = ""
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    exclude: bool = False


@dataclass(frozen=True)
class RankPlace:
    """A rank of this run of `doctor`. host: its name; node: number of its host, from 0."""

    rank: int
    host: str
    node: int
    local_rank: int


@dataclass(frozen=True)
class Ranks:
    """The ranks of this run, as one of them sees them.

    everyone: indexed by rank. address: this host's on the way to rank 0; "" if unknown.
    """

    me: RankPlace
    everyone: tuple[RankPlace, ...]
    address: str = ""

    @property
    def hosts(self) -> list[RankPlace]:
        """The first rank of each host, in order of the hosts' numbers."""
        return [place for place in self.everyone if place.local_rank == 0]


@dataclass(frozen=True)
class Reported(Generic[Facts]):
    """The facts of one rank."""

    place: RankPlace
    facts: Facts


class Check(abc.ABC, Generic[Facts]):
    """One subject to check. All ranks run the same checks in the same order.

    name: name in the table and in --json, such as "limits". per: who collects facts: every rank, or
    the first rank of each host. quick: whether --quick includes it. seconds: after this time, a
    step of collect() counts as hanging.
    facts: a dataclass whose fields are JSON values (numbers, strings, lists, dicts, None).
    """

    name: str
    per: Literal["rank", "host"] = "host"
    quick: bool = False
    seconds: float = 20.0
    facts: type[Facts]

    @abc.abstractmethod
    def collect(self, ranks: Ranks) -> Facts | Exchange[Facts]:
        """Measure or read on this rank. Each yield of a generator ends a step."""

    @abc.abstractmethod
    def conclude(self, reported: Sequence[Reported[Facts]]) -> Iterator[Finding]:
        """Yield findings from the facts that have arrived, by rank; on rank 0 only.

        The runner itself reports missing facts and exceptions. If nothing is wrong, yield a GOOD
        finding that says what is right, or nothing if the check does not apply.
        """
