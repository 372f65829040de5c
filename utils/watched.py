"""Watch a script that does not use the kit: which rank fails, which hangs and where.

`ddpkit launch` and `ddpkit watch` load this module in each rank once its process group is
connected; see tools/launch/rank_site. It does not change what the script computes: the ranks
exchange reports over the group's own store, and keep separate connections, as after
setup_distributed().
"""

from __future__ import annotations

import os
import sys

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from .distributed import (
    CHECK_TRAINING,
    Watched,
    hang_timeout_of,
    report_rank,
    watch_collectives,
    watch_ranks,
)
from .host import device
from .launch_protocol import may_have
from .launchers.detect import find_launcher
from .launchers.launcher import NameService, poll
from .launchers.rank_variables import LAUNCH_RANK
from .monitor.counts import entered_collectives
from .monitor.shutdown import Shutdown
from .startup.address import agree
from .training_hooks import TrainingHooks

_TIMEOUT_SECONDS = 60.0  # seconds to wait for a rank that does not take part
_groups = 0  # number of this process's default groups so far; equal on all ranks


class GroupStore(NameService):
    """The store of a process group, as the name service of its ranks."""

    is_private = False

    def __init__(self, store: Store) -> None:
        self._store = store

    def publish(self, text: str, timeout: float) -> None:
        self._store.set("address", text)

    def look_up(self, timeout: float) -> str | None:
        def published() -> str | None:
            return self._store.get("address").decode() if self._store.check(["address"]) else None

        return poll(published, timeout)

    def release(self) -> None:
        """Drop the store: this process may later create another one at the same port."""
        self._store = HashStore()


class WatchedGroup:
    """A watched process group. close(): this rank leaves it, and is no longer waited for."""

    def __init__(self, shutdown: Shutdown, hooks: TrainingHooks | None) -> None:
        self._shutdown, self._hooks = shutdown, hooks

    def close(self) -> None:
        self._shutdown.close()

    def report(self, error: BaseException) -> bool:
        """Report what ends this rank, and print its traceback; False if that was done already."""
        return self._shutdown.report(error)

    def at_exit(self) -> None:
        """End with the process: atexit ignores functions registered while it runs others."""
        if may_have("atexit"):
            self._shutdown.at_exit()


def watch(store: Store, rank: int, world_size: int, backend: str) -> WatchedGroup | None:
    """Watch the default group; None if its ranks are not the launch's ranks.

    store: the group's; this rank opens its own connection to it. Called in a thread besides the
    training. Raises LaunchError if the ranks cannot reach each other, or a check fails.
    """
    global _groups
    _groups += 1
    if not may_have("monitor"):
        return None
    detection = find_launcher()
    placement = detection.placement
    if (placement.rank, placement.world_size) != (rank, world_size):
        return None
    if backend not in device.BACKENDS:  # init_device_mesh(): "undefined", "cpu:gloo,cuda:nccl"
        backend = device.choose_backend(None)
    own = store.clone() if hasattr(store, "clone") else store
    own = PrefixStore(f"ddpkit/watch/{_groups}", own)
    report = report_rank(placement, backend, False)
    names = GroupStore(own)
    rendezvous = agree(
        placement,
        report,
        launcher=detection.launcher,
        timeout=_TIMEOUT_SECONDS,
        environ=detection.environ,
        name_service=names,
    )
    names.release()
    monitor = watch_ranks(placement, report, rendezvous)
    if monitor is None:
        return None
    monitor.own.entered_collectives = entered_collectives
    if monitor.connected() is not None:  # a rank has ended; the training notices it, too
        return None
    shutdown = Shutdown(
        rank, world_size, backend, PrefixStore("job", own), monitor, owns_group=False
    )
    shutdown.register_hooks()
    ends_itself = LAUNCH_RANK not in detection.environ
    if dist.is_initialized():
        place = Watched(rank, world_size, backend)
        watch_collectives(place, monitor, hang_timeout_of("auto"), ends_itself=ends_itself)
    hooks = None
    check = os.environ.get(CHECK_TRAINING)  # setup_distributed() checks by default
    if check in ("1", "error"):
        store = PrefixStore("training", own)
        hooks = TrainingHooks(rank, world_size, store, raises=check == "error")
    if rank == 0:
        hosts = rendezvous.assignment["num_nodes"]
        on = f"{hosts} host{'s' * (hosts > 1)}"
        lines = [f"{world_size} ranks on {on} are watched, backend {backend}"]
        if rendezvous.notes:
            lines += [rendezvous.table, *rendezvous.notes]
        # Standard output belongs to the script.
        sys.stderr.write("".join(f"ddpkit: {line}\n" for line in lines))
        sys.stderr.flush()
    return WatchedGroup(shutdown, hooks)
