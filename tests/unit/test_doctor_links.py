"""What the network checks of doctor measure, over sockets of this host."""
from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import pytest

from utils.host import network, process
from utils.tools.doctor.check import Check, Level, RankPlace, Ranks, Reported
from utils.tools.doctor.checks.clock import Clock
from utils.tools.doctor.link import LinkEnd, Measured
from utils.tools.doctor.peers import connect, data_address, in_threads, listen, listen_spread, serve, stop, tcp_info
from utils.tools.doctor.probes import Probes, connect_all, respond, round_trips

HERE = "127.0.0.1"


def collect(check: Check[Any], count: int) -> list[Reported[Any]]:
    """Run a check on hosts that are threads of this process; return their facts."""
    places = tuple(RankPlace(node, f"h{node + 1}", node, 0) for node in range(count))
    values: dict[str, list[Any]] = {}
    barrier = threading.Barrier(count, timeout=20)

    def all_gather(node: int, topic: str, value: Any) -> list[Any]:
        values.setdefault(topic, [None] * count)[node] = value
        barrier.wait()
        return values[topic]

    jobs = {place.node: partial(check.collect, Ranks(place, places, partial(all_gather, place.node)))
            for place in places}
    facts = in_threads(jobs, 20)
    return [Reported(place, facts[place.node]) for place in places]


@pytest.fixture
def listeners() -> Iterator[list[socket.socket]]:
    opened = listen_spread(HERE, 4)
    for listener in opened:
        serve(listener, respond)
    yield opened
    for listener in opened:
        stop(listener)


def ports(listeners: list[socket.socket]) -> list[int]:
    return [int(listener.getsockname()[1]) for listener in listeners]


def test_listeners_are_spread_over_the_ports_of_outgoing_connections(listeners: list[socket.socket]) -> None:
    low, high = map(int, process.system_setting("net/ipv4/ip_local_port_range").split())
    assert len(set(ports(listeners))) == 4 and all(low <= port <= high for port in ports(listeners))


def test_open_and_closed_ports(listeners: list[socket.socket]) -> None:
    place = {"address": HERE, "ports": ports(listeners)}
    assert connect_all({7: place}, "10.0.0.1") == [(7, "", [])]
    trip = round_trips({7: place})[7]
    assert trip is None or 0 <= trip < 1
    stop(listeners[2])
    assert connect_all({7: place}, "10.0.0.1") == [(7, "", [place["ports"][2]])]
    for listener in listeners:
        stop(listener)
    assert connect_all({7: place}, "10.0.0.1") == [(7, "refused", place["ports"])]
    assert connect_all({7: place}, HERE) == [(7, "same address", place["ports"])]


def test_connection_over_which_no_data_pass() -> None:
    silent = listen(HERE)
    serve(silent, lambda connected: None)  # closes without a response
    try:
        assert connect_all({1: {"address": HERE, "ports": ports([silent])}}, "")[0][1] == "sent data do not arrive"
    finally:
        stop(silent)


def test_packets_are_counted_by_host_and_size() -> None:
    ends = [Probes(HERE, node) for node in range(2)]
    ends[0].send({1: {"address": HERE, "udp": ends[1].port}}, 1500)
    ((node, count, largest),) = ends[1].received([0])
    assert (node, largest) == (0, 1500) and count >= 3
    assert ends[0].received([1]) == [(1, 0, 0)]


def test_link_between_two_ends() -> None:
    ends = [LinkEnd(HERE, node) for node in range(2)]
    places = {node: end.place for node, end in enumerate(ends)}
    connecting = [threading.Thread(target=end.connect, args=(places, [(0, 1)])) for end in ends]
    for thread in connecting:
        thread.start()
    for thread in connecting:
        thread.join()
    found: dict[int, Measured | None] = in_threads({n: partial(end.measure, (0, 1)) for n, end in enumerate(ends)}, 30)
    link = found[0]
    assert found[1] is None and link is not None and Measured(**asdict(link)) == link
    assert (link.bandwidth or 0) > 1e6 and link.possible_bandwidth >= (link.bandwidth or 0)
    assert 0 < link.round_trip < 1 and link.lost == (0, 0) and min(link.probes) >= 30 and link.segments > 0
    ends[1].close()
    assert ends[0].measure((0, 1)) is None  # the other host has ended
    ends[0].close()


def test_clocks_of_one_host_agree() -> None:
    (finding,) = Clock().conclude(collect(Clock(), 3))
    assert finding.level is Level.GOOD and "the clocks of 3 hosts differ by" in finding.message


def test_clock_of_another_host_is_measured_with_its_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    right = time.time

    def on(check: Clock, ranks: Ranks, run: Callable[..., Any]) -> Any:
        threading.current_thread().name = f"h{ranks.me.node + 1}"
        return run(check, ranks)

    monkeypatch.setattr(Clock, "collect", lambda check, ranks, run=Clock.collect: on(check, ranks, run))
    monkeypatch.setattr(time, "time", lambda: right() - 3600 * (threading.current_thread().name == "h3"))
    (finding,) = Clock().conclude(collect(Clock(), 4))
    assert finding.hosts == ("h3",) and "the clock of h3 is 3600.0 s behind" in finding.message


def test_address_of_the_collectives() -> None:
    assert data_address("10.1.2.3", {}) == "10.1.2.3"
    for name, address in network.interfaces().items():
        expected = "10.1.2.3" if network.is_loopback(address) else address  # which no other host can reach
        assert data_address("10.1.2.3", {"GLOO_SOCKET_IFNAME": name}) == expected
        assert data_address("10.1.2.3", {"NCCL_SOCKET_IFNAME": f"={name}"}) == expected
    assert data_address("10.1.2.3", {"NCCL_SOCKET_IFNAME": "^lo"}) == "10.1.2.3"
    assert data_address("127.0.0.1", {}) == next(iter(network.local_addresses()), HERE)


def test_what_the_kernel_knows_of_a_connection() -> None:
    listener = listen(HERE)
    serve(listener, respond)
    with connect(HERE, ports([listener])[0], 5) as connected:
        connected.sendall(b"x")
        info = tcp_info(connected)
    assert info.sent >= 1 and info.sent_again == 0 and (info.round_trip or 0) < 1
    assert network.mtu("lo") and network.mtu("none9") is None
    stop(listener)


def test_functions_that_hang_do_not_delay_the_others() -> None:
    released = threading.Event()
    jobs: dict[int, Callable[[], bool]] = {0: released.wait, 1: lambda: True}
    assert in_threads(jobs, 0.2) == {1: True}
    released.set()
