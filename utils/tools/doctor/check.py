"""What a check of `doctor` is: facts that ranks collect, and what rank 0 concludes from them."""

from __future__ import annotations

import abc
import enum
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

Facts = TypeVar("Facts")
# What yields a JSON value to send it to all ranks, and gets those of all ranks, by rank: None for a
# rank that has sent none within the time limit. Only connections to rank 0 are needed.
Exchange = Generator[Any, list[Any], Facts]


class Level(enum.IntEnum):
    """How serious a finding is. The highest one is the exit status of `doctor`."""

    GOOD = 0
    WARNING = 1
    BAD = 2


@dataclass(frozen=True)
class Finding:
    """One result of a check.

    message: what was found, with values, and for WARNING and BAD what was expected.
    remedy: the next step; "" for GOOD.
    ranks, hosts: those at fault; empty where it concerns the whole job.
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
    """A rank of this run of `doctor`. host: its name; node: the number of its host, from 0."""

    rank: int
    host: str
    node: int
    local_rank: int


@dataclass(frozen=True)
class Ranks:
    """The ranks of this run, as seen from one of them.

    everyone: by rank. address: of this host on the way to rank 0; "" where it is unknown.
    """

    me: RankPlace
    everyone: tuple[RankPlace, ...]
    address: str = ""

    @property
    def hosts(self) -> list[RankPlace]:
        """The first rank of each host, by node."""
        return [place for place in self.everyone if place.local_rank == 0]


@dataclass(frozen=True)
class Reported(Generic[Facts]):
    """The facts of one rank."""

    place: RankPlace
    facts: Facts


class Check(abc.ABC, Generic[Facts]):
    """One subject. All ranks run the same checks in the same order.

    name: in the table and in --json, such as "limits". per: who collects: every rank, or the first
    rank of each host. quick: whether --quick runs it. seconds: until a step of collect() hangs.
    facts: a dataclass whose fields are JSON values (numbers, strings, lists, dicts, None).
    """

    name: str
    per: Literal["rank", "host"] = "host"
    quick: bool = False
    seconds: float = 20.0
    facts: type[Facts]

    @abc.abstractmethod
    def collect(self, ranks: Ranks) -> Facts | Exchange[Facts]:
        """Measure or read on this rank. The steps of a generator end at its yields."""

    @abc.abstractmethod
    def conclude(self, reported: Sequence[Reported[Facts]]) -> Iterator[Finding]:
        """Yield findings from the facts that have arrived, by rank; on rank 0 only.

        The runner reports missing facts and exceptions itself. A check without anything to
        criticise yields one GOOD finding that says what is right, or nothing if it does not apply.
        """
