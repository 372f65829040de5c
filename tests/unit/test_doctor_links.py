"""What the network checks of doctor exchange, over sockets of this host."""
from __future__ import annotations

import threading
from collections.abc import Callable

from utils.host import network
from utils.tools.doctor.peers import data_address, exchange_with, in_threads, listen, respond, serve, stop

HERE = "127.0.0.1"


def test_hosts_exchange_data_in_both_directions() -> None:
    listener = listen(HERE)
    serve(listener, respond)
    place = (HERE, int(listener.getsockname()[1]))
    problem, trip = exchange_with({7: place}, "10.0.0.1")[7]
    assert problem == "" and (trip is None or 0 <= trip < 1)
    assert exchange_with({7: place}, HERE) == {7: ("same address", None)}
    stop(listener)
    assert exchange_with({7: place}, "10.0.0.1") == {7: ("refused", None)}


def test_connection_over_which_no_data_pass() -> None:
    silent = listen(HERE)
    serve(silent, lambda connected: None)  # closes without a response
    place = (HERE, int(silent.getsockname()[1]))
    try:
        assert exchange_with({1: place}, "") == {1: ("sent data do not arrive", None)}
    finally:
        stop(silent)


def test_address_of_the_collectives() -> None:
    assert data_address("10.1.2.3", {}) == "10.1.2.3"
    for name, address in network.interfaces().items():
        expected = "10.1.2.3" if network.is_loopback(address) else address  # which no other host can reach
        assert data_address("10.1.2.3", {"GLOO_SOCKET_IFNAME": name}) == expected
        assert data_address("10.1.2.3", {"NCCL_SOCKET_IFNAME": f"={name}"}) == expected
    assert data_address("10.1.2.3", {"NCCL_SOCKET_IFNAME": "^lo"}) == "10.1.2.3"
    assert data_address("127.0.0.1", {}) == next(iter(network.local_addresses()), HERE)


def test_functions_that_hang_do_not_delay_the_others() -> None:
    released = threading.Event()
    jobs: dict[int, Callable[[], bool]] = {0: released.wait, 1: lambda: True}
    assert in_threads(jobs, 0.2) == {1: True}
    released.set()
