"""Broadcast, gather and decide over the process group's key-value store.

No collective is involved, so a background thread can coordinate while the training loop runs its
collectives. utils/checkpoint/ and utils/preemption/ use it. Reports and decisions are JSON values.
"""

from __future__ import annotations

import collections
import contextlib
import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from .monitor.monitor import departed_ranks
from .ranges import name_ranks

_FIRST_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.001, 0.05
_MAX_POLLS_PER_SECOND = 20_000  # sum over all ranks, because one process serves the store
_ACKNOWLEDGEMENT_TIMEOUT = 20.0  # seconds that rank 0 waits until all ranks have its decision

_instances: collections.Counter[str] = collections.Counter()

Report = TypeVar("Report")
Decision = TypeVar("Decision")


class CoordinationError(RuntimeError):
    """The ranks could not exchange reports."""


class RankTimeout(CoordinationError):
    """Some ranks did not report in time. `ranks` and the message name them."""

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = list(ranks)


class StoreLost(CoordinationError):
    """The store is gone, because the process that serves it has ended."""


class RankLost(CoordinationError):
    """A rank has ended without its report."""


class StoreCommunicator:
    """All ranks of a training, as one of them sees them.

    A topic names one exchange and is used once; all ranks use the same topics. Calls that wait
    raise RankLost if a rank that they wait for has ended, and RankTimeout after timeout_seconds
    or cancel(). All calls raise StoreLost if the store is gone.

    prefix: first part of the keys in the store. Each communicator of a process needs another
        prefix; it is equal on all ranks.
    store: shared by the ranks; a single process needs none.
    """

    def __init__(
        self,
        prefix: str,
        rank: int = 0,
        world_size: int = 1,
        store: Store | None = None,
        *,
        timeout_seconds: float = math.inf,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self._store = PrefixStore(f"ddpkit/{prefix}", store or HashStore())
        self._timeout_seconds = timeout_seconds
        self._cancelled = threading.Event()

    @classmethod
    def of_process_group(cls, purpose: str, *, timeout_seconds: float) -> StoreCommunicator:
        """Return a communicator for torch's default process group, or for a single process.

        purpose: "checkpoint". All ranks create communicators with one purpose in the same order.
        Raises CoordinationError if the environment names several ranks and there is no group yet.
        """
        prefix = f"{purpose}/{_instances[purpose]}"
        _instances[purpose] += 1

        if not _is_initialized():
            world_size = os.environ.get("WORLD_SIZE", "1")
            if world_size not in ("", "1") and "RANK" in os.environ:
                raise CoordinationError(
                    f"torch.distributed is not initialised, while WORLD_SIZE is {world_size}"
                )
            return cls(prefix, timeout_seconds=timeout_seconds)

        store = None
        if dist.get_world_size() > 1:
            # Private: torch has no public function for the store of an existing group.
            store = dist.distributed_c10d._get_default_store()
            # A separate connection: the training may be waiting in a call on the first one.
            store = store.clone() if hasattr(store, "clone") else store
        return cls(
            prefix, dist.get_rank(), dist.get_world_size(), store, timeout_seconds=timeout_seconds
        )

    def check_world_size(self) -> None:
        """Raise CoordinationError if torch.distributed was initialised after this object."""
        if _is_initialized() and dist.get_world_size() != self.world_size:
            raise CoordinationError(
                f"torch.distributed was initialised later, with {dist.get_world_size()} ranks; "
                f"expected {self.world_size}"
            )

    @property
    def name(self) -> str:
        """This rank's name in messages: "rank 3 on node7"."""
        return f"rank {self.rank} on {socket.gethostname()}"

    @property
    def _reporter(self) -> str:
        """This rank's name in a message about another rank."""
        return f"rank {self.rank} of {self.world_size} on {socket.gethostname()}"

    def cancel(self) -> None:
        """End all present and later waits with RankTimeout. Any thread may call it."""
        self._cancelled.set()

    # --- rank 0 sends or decides

    def broadcast(self, topic: str, make: Callable[[], Decision]) -> Decision:
        """Return, on every rank, what make() returns on rank 0."""
        key = f"{topic}/0"
        if self.rank != 0:
            return self._wait([key], [0])[0]  # type: ignore[no-any-return]
        value = make()
        self._set(key, value)
        return value

    def forget(self, topic: str) -> None:
        """Delete a broadcast on rank 0, after a later decide() shows that all have received it."""
        self._delete([f"{topic}/0"])

    def decide(
        self,
        topic: str,
        report: Report,
        check: Callable[[list[Report]], Decision],
        *,
        waiting: Callable[[], object] = lambda: None,
    ) -> Decision:
        """Gather the reports of all ranks, decide on rank 0, and return the decision on every rank.

        check: called on rank 0 with the reports in rank order; returns the decision. Rank 0 returns
        only when all ranks have the decision: it may exit then, and the store ends with it.

        waiting: called repeatedly on rank 0 while it waits for reports; may raise.
        """
        self._set(f"{topic}/{self.rank}", report)
        if self.rank != 0:
            decision: Decision = self.receive(topic)
            with contextlib.suppress(CoordinationError):  # rank 0 may have exited by now
                self._set(f"{topic}/acknowledged/{self.rank}", True)
            return decision

        reports = [f"{topic}/{rank}" for rank in range(self.world_size)]
        decision = check(self._wait(reports, range(self.world_size), waiting=waiting))
        self._set(f"{topic}/decision", decision)

        acknowledged = [f"{topic}/acknowledged/{rank}" for rank in range(1, self.world_size)]
        seconds = min(_ACKNOWLEDGEMENT_TIMEOUT, self._timeout_seconds)
        with contextlib.suppress(CoordinationError):
            self._wait(acknowledged, range(1, self.world_size), seconds)
            self._delete([*reports, f"{topic}/decision", *acknowledged])
        return decision

    # --- any rank starts an exchange, and the last rank to report decides

    def propose(self, topic: str, value: str) -> str:
        """Return the value that any rank has proposed first. Does not wait."""
        with self._store_errors():
            return str(self._store.compare_set(f"{topic}/proposed", "", value).decode())

    def is_proposed(self, topic: str) -> bool:
        """Whether any rank has proposed a value; takes one round trip to the store."""
        return self._has(f"{topic}/proposed")

    def report(self, topic: str, report: Report, check: Callable[[list[Report]], object]) -> None:
        """Store this rank's report. The last rank to report also decides. Does not wait.

        check: called on that rank with the reports in rank order; returns the decision, which
            receive() then returns on every rank.
        """
        self._set(f"{topic}/{self.rank}", report)
        if self.count(f"{topic}/reports") == self.world_size:
            self._set(f"{topic}/decision", check(self.reports(topic)))

    def receive(self, topic: str) -> Any:
        """Wait for the decision and return it."""
        return self._wait([f"{topic}/decision"], [0])[0]

    def reports(self, topic: str) -> list[Any]:
        """Return all ranks' reports in rank order, after all have reported."""
        keys = [f"{topic}/{rank}" for rank in range(self.world_size)]
        with self._store_errors():
            return [json.loads(text) for text in self._store.multi_get(keys)]

    def forget_reports(self, topic: str) -> None:
        """Delete the reports stored by report(), after all ranks have reported."""
        keys = [f"{topic}/{rank}" for rank in range(self.world_size)]
        self._delete([*keys, f"{topic}/reports", f"{topic}/decision"])

    def missing(self, topic: str) -> list[int]:
        """Return the ranks that have not reported."""
        return [rank for rank in range(self.world_size) if not self._has(f"{topic}/{rank}")]

    def count(self, counter: str, increment: int = 1) -> int:
        """Add to a counter that all ranks share, and return its value. Does not wait."""
        with self._store_errors():
            return int(self._store.add(counter, increment))

    # --- the store

    def _set(self, key: str, value: object) -> None:
        with self._store_errors():
            self._store.set(key, json.dumps(value))

    def _has(self, *keys: str) -> bool:
        with self._store_errors():
            return bool(self._store.check(list(keys)))

    def _delete(self, keys: Iterable[str]) -> None:
        with contextlib.suppress(RuntimeError):  # not every kind of store can delete
            for key in keys:
                self._store.delete_key(key)

    def _wait(
        self,
        keys: list[str],
        ranks: Sequence[int],
        seconds: float | None = None,
        waiting: Callable[[], object] = lambda: None,
    ) -> list[Any]:
        """Return the values of the keys once all are set. ranks: the rank that sets each key."""
        seconds = self._timeout_seconds if seconds is None else seconds
        deadline = time.monotonic() + seconds
        pause = max(_FIRST_POLL_SECONDS, self.world_size / _MAX_POLLS_PER_SECOND)
        longest_pause = max(_LONGEST_POLL_SECONDS, pause)

        while keys and not self._has(*keys):
            if self._cancelled.wait(pause) or time.monotonic() > deadline:
                missing = [
                    rank for rank, key in zip(ranks, keys, strict=True) if not self._has(key)
                ]
                raise RankTimeout(self._explain_timeout(missing, seconds), missing)
            waiting()
            self._check_departed(keys, ranks)
            pause = min(longest_pause, pause * 1.5)
        with self._store_errors():
            return [json.loads(self._store.get(key)) for key in keys]

    def _check_departed(self, keys: Sequence[str], ranks: Sequence[int]) -> None:
        """Raise RankLost if a rank has ended and its key is not set."""
        departed = departed_ranks()  # read first: a rank sets its key before it ends
        for rank, key in zip(ranks, keys, strict=True):
            if rank in departed and not self._has(key):
                raise RankLost(
                    f"{self._reporter} lost the connection to rank {rank}, which has ended: "
                    f"{departed[rank] or 'it left'}"
                )

    def _explain_timeout(self, missing: Sequence[int], seconds: float) -> str:
        when = "before this rank ended" if self._cancelled.is_set() else f"within {seconds:.0f} s"
        if self.rank != 0:
            return (
                f"rank 0 did not send {self._reporter} a decision {when}. Look for rank 0's own "
                "message"
            )
        return (
            f"{len(missing)} of {self.world_size} ranks did not report to {self._reporter} {when}: "
            f"{name_ranks(missing)}. Look for their own messages"
        )

    @contextlib.contextmanager
    def _store_errors(self) -> Iterator[None]:
        try:
            yield
        except CoordinationError:
            raise
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise StoreLost(
                f"{self._reporter} lost the connection to rank 0's store: {reason}. "
                "Look for rank 0's own message"
            ) from error


def _is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()
