"""This host's addresses, and what its names resolve to."""
from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from utils import network

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def cluster_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node whose name stands for its second network, with bridges that every node has."""
    addresses = {"lo": "127.0.0.1", "docker0": "172.17.0.1", "eth0": "10.0.0.5", "ib0": "10.1.0.5"}
    monkeypatch.setattr(network, "interfaces", lambda: addresses)
    monkeypatch.setattr(network, "resolve", lambda host: ["10.1.0.5"])


def test_loopback_is_an_interface_of_every_host() -> None:
    assert "127.0.0.1" in network.interfaces().values()
    assert network.interface_of("127.0.0.1") == "lo"
    assert network.interface_of("192.0.2.1") is None


@pytest.mark.parametrize(("address", "loopback"), [
    ("127.0.0.1", True), ("127.0.1.1", True), ("::1", True), ("localhost", True), ("10.0.0.1", False),
    ("fe80::1%eth0", False), ("n1", False), ("", False)])
def test_loopback_is_told_from_other_addresses(address: str, loopback: bool) -> None:
    assert network.is_loopback(address) is loopback


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 300, "..", "n\u0663.invalid", "bad name",
                                  "x" * 64 + ".a"])
def test_a_name_that_does_not_resolve_has_no_addresses(host: str) -> None:
    assert network.resolve(host) == []


def test_ipv4_comes_before_ipv6_and_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def getaddrinfo(*_: Any, **__: Any) -> list[tuple[Any, ...]]:
        return [(0, 0, 0, "", (address, 0)) for address in ("::1", "10.0.0.1", "::1", "10.0.0.2", "10.0.0.1")]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    assert network.resolve("n1") == ["10.0.0.1", "10.0.0.2", "::1"]


def test_an_address_resolves_to_itself() -> None:
    assert network.resolve("127.0.0.1") == ["127.0.0.1"]


def test_the_own_addresses_start_with_that_of_the_host_name_and_end_with_bridges(cluster_node: None) -> None:
    assert network.own_addresses() == ["10.1.0.5", "10.0.0.5", "172.17.0.1"]


def test_a_host_name_that_stands_for_loopback_is_no_own_address(cluster_node: None,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "resolve", lambda host: ["127.0.1.1"])
    assert network.own_addresses() == ["10.0.0.5", "10.1.0.5", "172.17.0.1"]
    assert network.default_gloo_address() == "127.0.1.1"


def test_gloo_takes_the_address_of_the_host_name_and_none_where_that_is_another_hosts(
        cluster_node: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert network.default_gloo_address() == "10.1.0.5"
    monkeypatch.setattr(network, "resolve", lambda host: ["10.9.9.9"])
    assert network.default_gloo_address() is None


def test_missing_interfaces_are_those_that_the_host_does_not_have() -> None:
    assert network.missing_interfaces(["lo", "nosuch0"]) == ["nosuch0"]


def test_the_network_is_looked_at_without_torch() -> None:
    code = "import sys, utils.network, utils.rendezvous; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0
