"""Choose gloo's network interface, and let its threads end before the interpreter does."""

from __future__ import annotations

import os
import socket
import time

from . import network, process

_RELEASE_SECONDS = 10.0
_ASLEEP_SECONDS = 0.02  # seconds; a thread that waits for Python's lock wakes every 5 ms


def interface_problem() -> str:
    """Return why gloo cannot use the interfaces in GLOO_SOCKET_IFNAME; "" if it can."""
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    missing = network.missing_interfaces(interfaces.split(",")) if interfaces else []
    if not missing:
        return ""
    present = ", ".join(name for _, name in socket.if_nameindex())
    return (
        f"GLOO_SOCKET_IFNAME={interfaces}, but {socket.gethostname()} has no interface "
        f"{missing[0]}; it has {present}. Unset it, or name one of these"
    )


def choose_interface(local_addr: str, master_addr: str) -> str:
    """Set GLOO_SOCKET_IFNAME if gloo would choose an interface that other hosts cannot reach.

    gloo listens on the address of the host name, which may be 127.0.1.1. A value that is already
    set stays. Returns the interface that gloo uses; "" if it is unknown.

    local_addr: this host's address on the way to rank 0. master_addr: rank 0's address.
    """
    if chosen := os.environ.get("GLOO_SOCKET_IFNAME"):
        return chosen
    address = local_addr
    if network.is_loopback(address):
        # On rank 0's host, the name by which rank 0 was reached means the host itself.
        outward = network.local_addresses()
        address = master_addr if master_addr in outward else (outward or [address])[0]
    interface = network.interface_of(address) or ""
    if interface and network.default_gloo_address() != address:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    return interface


def wait_for_threads() -> None:
    """Wait until gloo's threads sleep: 20 ms, ten seconds at most. Linux only.

    After a collective, a thread of gloo releases the tensor. If it holds the last reference, it
    needs Python's lock. If the interpreter is ending by then, the thread aborts the process
    ("terminate called without an active exception"). The thread lives as long as a
    DistributedDataParallel holds the process group.
    """
    limit = time.monotonic() + _RELEASE_SECONDS
    turns = _turns_of_threads()
    while turns and time.monotonic() < limit:
        time.sleep(_ASLEEP_SECONDS)  # releases Python's lock
        earlier, turns = turns, _turns_of_threads()
        if turns == earlier and all(state != "R" for state, _ in turns.values()):
            break


def _turns_of_threads() -> dict[int, tuple[str, process.Schedule]]:
    """Return the state and schedule of each gloo thread; "R" means running or ready."""
    turns = {}
    for thread in process.thread_ids():
        name, fields = process.stat(f"/proc/self/task/{thread}")
        if name == "pt_gloo_runloop" and fields:
            turns[thread] = (fields[0], process.schedule(thread))
    return turns
