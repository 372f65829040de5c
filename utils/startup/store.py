"""Open the key-value store that the ranks share, once they have found rank 0.

With torchrun this is its agent's store, if the agent serves one. Otherwise it is rank 0's, on the
port of the start-up exchange.
"""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta

from torch.distributed import (  # type: ignore[attr-defined]
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)

from ..errors import LaunchError
from ..launchers.detect import Detection
from ..launchers.launcher import NameService, Placement, poll
from .address import Rendezvous


def agent_store(detection: Detection, deadline: float) -> AgentStore | None:
    """Connect to the store that torchrun's agent serves; None if this launch has no agent.

    deadline: monotonic seconds. Raises LaunchError if it cannot be reached.
    """
    placement = detection.placement
    if placement.world_size == 1 or not detection.launcher.has_store(os.environ):
        return None
    return AgentStore(_connect_to_agent_store(deadline), placement.world_size)


def open_store(
    placement: Placement, found: Rendezvous, agent: AgentStore | None, deadline: float
) -> Store:
    """Return the store of all ranks: the agent's, rank 0's, or one in memory for a single rank.

    found: its listener, on rank 0, becomes the store's. deadline: monotonic seconds. Raises
    LaunchError if rank 0 can no longer be reached.
    """
    if placement.world_size == 1:
        return HashStore()
    if agent is not None:
        if found.listener is not None:
            found.listener.close()
        return PrefixStore(f"ddpkit/{found.token}", agent.store)
    try:
        return TCPStore(
            found.rank_0_addr,
            found.master_port,
            placement.world_size,
            is_master=placement.rank == 0,
            timeout=_remaining(deadline),
            wait_for_workers=False,
            # So that a later init_process_group() by env:// in this process shares the store.
            multi_tenant=True,
            master_listen_fd=None if found.listener is None else found.listener.detach(),
        )
    except RuntimeError as error:
        raise LaunchError(
            f"rank {placement.rank} of {placement.world_size} on {socket.gethostname()} lost the "
            f"key-value store of rank 0 at {found.rank_0_addr}:{found.master_port}: "
            f"{str(error).splitlines()[0]}. Look for rank 0's own message"
        ) from error


class AgentStore(NameService):
    """torchrun's store, used also as the name service of the launch.

    The store outlives the workers, and nothing in a worker's environment identifies the attempt.
    Rank 0 of each attempt therefore overwrites the address. A rank that reads an earlier attempt's
    address finds nobody there who knows the secret, and reads again. For the same reason the
    ranks' keys have their own prefix: torch's env:// rendezvous uses TORCHELASTIC_RESTART_COUNT,
    which each agent counts for itself.
    """

    is_private = False

    def __init__(self, store: Store, world_size: int) -> None:
        self.store, self._key = store, f"ddpkit/address/{world_size}"

    def publish(self, text: str, timeout: float) -> None:
        self.store.set(self._key, text)

    def look_up(self, timeout: float) -> str | None:
        def published() -> str | None:
            return self.store.get(self._key).decode() if self.store.check([self._key]) else None

        return poll(published, timeout)


def _connect_to_agent_store(deadline: float) -> Store:
    """Connect to the store that torchrun's agent serves at MASTER_ADDR and MASTER_PORT."""
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    timeout, problem = deadline - time.monotonic(), ""

    def reached() -> str | None:
        nonlocal problem
        try:
            socket.create_connection((address, int(port)), timeout=3).close()
        except (OSError, ValueError) as error:
            problem = str(error)
            return None
        return "yes"

    # TCPStore itself would retry, with a warning each time.
    if not poll(reached, timeout):
        raise LaunchError(
            f"torchrun's store at MASTER_ADDR={address!r} MASTER_PORT={port!r} cannot be reached "
            f"(from {socket.gethostname()}, for {timeout:.0f} s): {problem}. Give torchrun a "
            "--rdzv-endpoint that all hosts can reach"
        )
    return TCPStore(
        address,
        int(port),
        is_master=False,
        wait_for_workers=False,
        timeout=_remaining(deadline),
    )


def _remaining(deadline: float) -> timedelta:
    return timedelta(seconds=max(1.0, deadline - time.monotonic()))
