"""This host's addresses, and what its names resolve to."""
from __future__ import annotations

import socket

import pytest

from utils.host import network
from utils.launchers import LaunchError
from utils.startup.endpoints import candidate_ports


def test_loopback_interface_and_addresses() -> None:
    assert "127.0.0.1" in network.interfaces().values()
    assert network.interface_of("127.0.0.1") == "lo"
    assert network.interface_of("192.0.2.1") is None
    assert network.missing_interfaces(["lo", "nosuch0"]) == ["nosuch0"]

    addresses = ("127.0.0.1", "127.0.1.1", "::1", "localhost", "10.0.0.1", "fe80::1%eth0", "n1", "")
    assert [one for one in addresses if network.is_loopback(one)] == ["127.0.0.1", "127.0.1.1", "::1", "localhost"]


@pytest.mark.parametrize("text", ["21000", "21000-20000", "0-10", "1-70000", "a-b", "20000-20010 ", "-"])
def test_a_wrong_port_range_is_an_error(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(network.PORT_RANGE, text)
    with pytest.raises(LaunchError, match=f"{network.PORT_RANGE} is '{text}'; expected two ports such as"):
        network.free_ports()


def test_listeners_keep_to_the_ports_and_the_interface_of_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(network.INTERFACE, "lo")
    assert network.local_addresses() == ["127.0.0.1"] == [network.published_address()]
    monkeypatch.setenv(network.PORT_RANGE, "20500-20503")
    assert sorted(network.free_ports()) == [20500, 20501, 20502, 20503] and network.listen_ports()[-1] == 20503
    assert set(candidate_ports("slurm:7:0")) <= set(network.free_ports())
    monkeypatch.setenv(network.INTERFACE, "ib9")
    with pytest.raises(LaunchError, match="ib9, but .* has no such interface that is up .*; it has lo.* Name one"):
        network.local_addresses()


def test_address_on_the_way_to_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a route to 127.0.0.2, and none of loopback leads to another host."""
    known = {"near": ["127.0.0.2"], "other": ["192.0.2.1"], "unknown": []}
    monkeypatch.setattr(network, "resolve", known.__getitem__)
    assert network.address_towards([]) == "127.0.0.1"
    assert network.address_towards(["unknown"]) == network.address_towards(["near"]) == ""
    monkeypatch.setattr(network, "is_loopback", lambda address: False)
    assert network.address_towards(["near", "unknown", "near"]) == "127.0.0.1"
    assert network.address_towards(["near", "unknown"]) == ""
    monkeypatch.setenv(network.INTERFACE, "lo")
    assert network.address_towards(["unknown"]) == "127.0.0.1"


def test_ipv4_comes_before_ipv6_without_duplicates(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = ("::1", "10.0.0.1", "::1", "10.0.0.2", "10.0.0.1")

    found = [(0, 0, 0, "", (address, 0)) for address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert network.resolve("n1") == ["10.0.0.1", "10.0.0.2", "::1"]


@pytest.mark.parametrize(("resolved", "local", "gloo"), [
    ("10.1.0.5", ["10.1.0.5", "10.0.0.5", "172.17.0.1"], "10.1.0.5"),
    ("127.0.1.1", ["10.0.0.5", "10.1.0.5", "172.17.0.1"], "127.0.1.1"),
    ("10.9.9.9", ["10.0.0.5", "10.1.0.5", "172.17.0.1"], None)])
def test_local_addresses_depend_on_the_host_name(
        resolved: str, local: list[str], gloo: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node with two networks, and a bridge that every node has."""
    interfaces = {"lo": "127.0.0.1", "docker0": "172.17.0.1", "eth0": "10.0.0.5", "ib0": "10.1.0.5"}
    monkeypatch.setattr(network, "interfaces", lambda: interfaces)
    monkeypatch.setattr(network, "resolve", lambda host: [resolved])
    assert network.local_addresses() == local
    assert network.default_gloo_address() == gloo
