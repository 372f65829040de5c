"""What the ranks tell each other about a checkpoint: through the key-value store, so that no collective is needed.

It works from a thread beside the training loop. Not here: what they tell (checkpoint.py).
"""
from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

Message = dict[str, Any]  # what json can write
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05  # seconds between two looks into the store
_FAREWELL_SECONDS = 20.0
_EARLY = "the Checkpointer was made before torch.distributed was initialised"
_made = 0  # all ranks make their checkpointers in the same order


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


class Silence(RuntimeError):
    """Other ranks did not answer; the message says which."""


class Ranks:
    """This rank among those of torch.distributed's default group; one alone where that is not initialised."""

    def __init__(self, timeout: float) -> None:
        global _made
        _made += 1
        self.rank, self.world_size = 0, 1
        if os.environ.get("WORLD_SIZE", "1") not in ("", "1") and "RANK" in os.environ and not _initialized():
            raise Silence(f"{_EARLY}, while WORLD_SIZE is {os.environ['WORLD_SIZE']}. Make it after "
                          "setup_distributed(). A program that a rank starts uses load_part(), or unsets WORLD_SIZE")
        store: Store = HashStore()
        if _initialized():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            if self.world_size > 1:
                store = dist.distributed_c10d._get_default_store()
                if hasattr(store, "clone"):  # a connection of its own: the training may wait in a call of the other one
                    store = store.clone()
        self._store = PrefixStore(f"ddpkit/checkpoint/{_made}", store)
        self._timeout = timeout
        self.given_up = threading.Event()  # set: wait for nobody any more

    def check(self) -> None:
        """Raise Silence if torch.distributed was initialised only after this was made."""
        if _initialized() and dist.get_world_size() != self.world_size:
            raise Silence(f"{_EARLY}, and would take each of {dist.get_world_size()} ranks for a training of its own. "
                          "Make it after setup_distributed()")

    @property
    def here(self) -> str:
        return f"rank {self.rank} on {socket.gethostname()}"

    def share(self, topic: str, make: Callable[[], Message]) -> Message:
        """What rank 0 makes, on every rank. The topic has to be another one each time."""
        if self.rank == 0:
            message = make()
            self._tell(f"{topic}/0", message)
            return message
        return self._hear([f"{topic}/0"])[0]

    def decide(self, topic: str, mine: Message, judge: Callable[[list[Message]], Message]) -> Message:
        """What rank 0 judges from the messages of all ranks, in their order; the same on every rank.

        Returns on rank 0 when all ranks know, so that it may end then and take the store with it.
        """
        self._tell(f"{topic}/{self.rank}", mine)
        verdict_key = f"{topic}/verdict"
        if self.rank != 0:
            verdict = self._hear([verdict_key])[0]
            with contextlib.suppress(Silence):  # rank 0 may have ended meanwhile
                self._tell(f"{topic}/heard/{self.rank}", {})
            return verdict
        keys = [f"{topic}/{rank}" for rank in range(self.world_size)]
        verdict = judge(self._hear(keys))
        self._tell(verdict_key, verdict)
        heard = [f"{topic}/heard/{rank}" for rank in range(1, self.world_size)]
        with contextlib.suppress(Silence):
            self._hear(heard, min(_FAREWELL_SECONDS, self._timeout))
            self._forget([*keys, verdict_key, *heard])
        return verdict

    def forget(self, topic: str) -> None:
        """Rank 0 removes what it shared, once all ranks have decided on something since."""
        self._forget([f"{topic}/0"])

    def _forget(self, keys: list[str]) -> None:
        with contextlib.suppress(RuntimeError):  # kinds of stores that cannot delete
            for key in keys:
                self._store.delete_key(key)

    def _tell(self, key: str, message: Message) -> None:
        try:
            self._store.set(key, json.dumps(message))
        except RuntimeError as error:
            raise self._lost(error) from error

    def _hear(self, keys: list[str], seconds: float | None = None) -> list[Message]:
        seconds = self._timeout if seconds is None else seconds
        end, pause = time.monotonic() + seconds, _FIRST_PAUSE
        try:
            while keys and not self._store.check(keys):
                if self.given_up.wait(pause) or time.monotonic() > end:
                    silent = [key.rpartition("/")[2] for key in keys if not self._store.check([key])]
                    who = "rank 0" if self.rank else f"rank {', '.join(silent[:8])}{' ...' if len(silent) > 8 else ''}"
                    why = "when the training stopped" if self.given_up.is_set() else f"within {seconds:.0f} s"
                    raise Silence(f"{who} did not answer {self.here} {why}. Look for its own message")
                pause = min(_LONGEST_PAUSE, pause * 1.5)
            return [json.loads(self._store.get(key)) for key in keys]
        except Silence:
            raise
        except RuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, error: RuntimeError) -> Silence:
        return Silence(f"{self.here} lost the connection to rank 0's store: {str(error).splitlines()[0]}. Look for "
                       "rank 0's own message")
