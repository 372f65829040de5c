"""Find rank 0, exchange the start-up reports, and open the key-value store of all ranks.

The store is torchrun's, where its agent serves one, and otherwise rank 0's, on the port of the
start-up exchange.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import replace
from datetime import timedelta

from torch.distributed import (  # type: ignore[attr-defined]
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)

from ..launch_error import LaunchError
from ..launchers.detect import Detection
from ..launchers.launcher import NameService, Placement, poll
from ..launchers.rank_variables import without_inherited
from .address import Rendezvous, agree
from .reports import RankReport


def rendezvous(
    detection: Detection, report: RankReport, deadline: float
) -> tuple[Rendezvous, Store]:
    """Return what all ranks have agreed on, and the store that they share.

    deadline: monotonic seconds. Raises LaunchError when the ranks cannot start together.
    """
    launcher, placement = detection.launcher, detection.placement
    timeout = deadline - time.monotonic()
    if placement.world_size == 1:
        return agree(placement, report, launcher=launcher, timeout=timeout), HashStore()

    if launcher.has_store(os.environ):
        return _rendezvous_by_agent_store(detection, report, deadline)

    environ = without_inherited(os.environ)
    found = agree(placement, report, launcher=launcher, timeout=timeout, environ=environ)
    return found, _open_store_of_rank_0(placement, found, deadline)


def _open_store_of_rank_0(placement: Placement, found: Rendezvous, deadline: float) -> Store:
    try:
        return TCPStore(
            found.rank_0_addr,
            found.master_port,
            placement.world_size,
            is_master=placement.rank == 0,
            timeout=_remaining(deadline),
            wait_for_workers=False,
            # A later init_process_group() by env:// in this process shares the store.
            multi_tenant=True,
            master_listen_fd=None if found.listener is None else found.listener.detach(),
        )
    except RuntimeError as error:
        raise LaunchError(
            f"rank {placement.rank} of {placement.world_size} on {socket.gethostname()} lost the "
            f"key-value store of rank 0 at {found.rank_0_addr}:{found.master_port}: "
            f"{str(error).splitlines()[0]}. Look for rank 0's own message"
        ) from error


# torchrun's store --------------------------------------------------------------------------------
# The env:// rendezvous of torch prefixes the keys with TORCHELASTIC_RESTART_COUNT. Each agent
# counts its own restarts, so after one the ranks of several agents would use different keys.


def agree_by_agent_store(
    detection: Detection, report: RankReport, deadline: float
) -> tuple[Rendezvous, Store]:
    """Return what agree() returns under an agent of torchrun, and the store that it serves.

    deadline: monotonic seconds. Raises LaunchError when the ranks cannot start together.
    """
    agent_store = _connect_to_agent_store(deadline)
    placement = detection.placement
    found = agree(
        placement,
        report,
        launcher=detection.launcher,
        timeout=deadline - time.monotonic(),
        name_service=_AgentStore(agent_store, placement.world_size),
        environ=without_inherited(os.environ),
    )
    return found, agent_store


def _rendezvous_by_agent_store(
    detection: Detection, report: RankReport, deadline: float
) -> tuple[Rendezvous, Store]:
    found, agent_store = agree_by_agent_store(detection, report, deadline)
    if found.listener is not None:
        found.listener.close()
    found = replace(
        found, master_addr=os.environ["MASTER_ADDR"], master_port=int(os.environ["MASTER_PORT"])
    )
    return found, PrefixStore(f"ddpkit/{found.token}", agent_store)


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

    # TCPStore itself would retry with a warning each time.
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


class _AgentStore(NameService):
    """torchrun's store as the name service of the launch.

    The store outlives the workers, and nothing in a worker's environment identifies the attempt.
    So rank 0 of each attempt overwrites the address. A rank that reads the address of an earlier
    attempt finds nobody there who knows the secret, and reads again.
    """

    is_private = False

    def __init__(self, store: Store, world_size: int) -> None:
        self._store, self._key = store, f"ddpkit/address/{world_size}"

    def publish(self, text: str, timeout: float) -> None:
        self._store.set(self._key, text)

    def look_up(self, timeout: float) -> str | None:
        def published() -> str | None:
            return self._store.get(self._key).decode() if self._store.check([self._key]) else None

        return poll(published, timeout)


def _remaining(deadline: float) -> timedelta:
    return timedelta(seconds=max(1.0, deadline - time.monotonic()))
