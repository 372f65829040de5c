"""A listening socket that takes connections from known addresses only."""
from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tests.unit.test_rendezvous import LIMIT, launcher_named, placed, start_rank
from utils.host import network
from utils.host.address_filter import accept_only
from utils.startup import agree
from utils.startup.reports import make_report

MANY = [f"10.{number // 256}.{number % 256}.7" for number in range(3000)]


@pytest.fixture(params=["", "127.0.0.1", "::1"])
def listener(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    """On both families, or on one."""
    with network.listen(0, 8, request.param) as opened:
        opened.setblocking(False)
        yield opened


def connects(listener: socket.socket, source: str) -> bool:
    """Whether a client with this address of loopback is let in."""
    target = "::1" if ":" in source else "127.0.0.1"
    try:
        port = listener.getsockname()[1]
        with socket.create_connection((target, port), timeout=0.4, source_address=(source, 0)) as client:
            client.sendall(b"x")
            return True
    except TimeoutError:
        return False


@pytest.mark.parametrize("more", [[], MANY, [f"2001:db8::{number:x}" for number in range(3000)]])
def test_connections_from_other_addresses_are_dropped(listener: socket.socket, more: list[str]) -> None:
    known = listener.getsockname()[0]
    sources = ["127.0.0.1", "::1"] if known == "::" else [known]
    assert all(connects(listener, source) for source in sources)
    assert accept_only(listener, [*sources, "192.0.2.7", *more])
    assert all(connects(listener, source) for source in sources)
    if "127.0.0.1" in sources:
        assert not connects(listener, "127.9.0.9")


def test_an_address_of_the_other_family_alone_lets_nobody_in(listener: socket.socket) -> None:
    accept_only(listener, ["fe80::1%eth0"] if ":" not in listener.getsockname()[0] else ["192.0.2.7"])
    assert not connects(listener, "::1" if ":" in listener.getsockname()[0] else "127.0.0.1")


def test_who_has_connected_before_is_turned_away() -> None:
    with network.listen(0, 8, "127.0.0.1") as listener:
        listener.setblocking(False)
        with socket.create_connection(listener.getsockname(), source_address=("127.9.0.9", 0)) as early:
            accept_only(listener, ["127.0.0.1"])
            early.settimeout(5)
            assert early.recv(1) == b""
            with pytest.raises(BlockingIOError):
                listener.accept()


@pytest.mark.parametrize("without", ["", "filter"])
def test_port_of_rank_0_is_for_hosts_of_the_ranks_alone(without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the answers to the ranks on, and where it listens on all interfaces: torch's store follows there."""
    monkeypatch.setenv("DDPKIT_WITHOUT", without)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        environ = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(probe.getsockname()[1])}
    other = start_rank(placed(1, 2), environ)
    met = agree(placed(0, 2), {**make_report(placed(0, 2)), "host": "h0"}, launcher=launcher_named("env"),
                timeout=LIMIT, environ=environ)
    other.result(LIMIT)
    assert met.listener is not None
    with met.listener:
        assert connects(met.listener, "127.0.0.1") and connects(met.listener, "127.9.0.9") == bool(without)
