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
    """A node whose name stands for its second network, with a bridge that every node has."""
    addresses = {"lo": "127.0.0.1", "docker0": "172.17.0.1", "eth0": "10.0.0.5", "ib0": "10.1.0.5"}
    monkeypatch.setattr(network, "interfaces", lambda: addresses)
    monkeypatch.setattr(network, "resolve", lambda host: ["10.1.0.5"])


def test_every_host_has_a_loopback_interface() -> None:
    assert "127.0.0.1" in network.interfaces().values()
    assert network.interface_of("127.0.0.1") == "lo"
    assert network.interface_of("192.0.2.1") is None
    assert network.missing_interfaces(["lo", "nosuch0"]) == ["nosuch0"]


@pytest.mark.parametrize(("address", "expected"), [
    ("127.0.0.1", True), ("127.0.1.1", True), ("::1", True), ("localhost", True),
    ("10.0.0.1", False), ("fe80::1%eth0", False), ("n1", False), ("", False)])
def test_loopback_addresses(address: str, expected: bool) -> None:
    assert network.is_loopback(address) is expected


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 300, "..", "n\u0663.invalid",
                                  "bad name", "x" * 64 + ".a"])
def test_an_unresolvable_name_has_no_addresses(host: str) -> None:
    assert network.resolve(host) == []


def test_ipv4_comes_before_ipv6_without_duplicates(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = ("::1", "10.0.0.1", "::1", "10.0.0.2", "10.0.0.1")

    def getaddrinfo(*_: Any, **__: Any) -> list[tuple[Any, ...]]:
        return [(0, 0, 0, "", (address, 0)) for address in addresses]

    assert network.resolve("127.0.0.1") == ["127.0.0.1"]
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    assert network.resolve("n1") == ["10.0.0.1", "10.0.0.2", "::1"]


@pytest.mark.parametrize(("resolved", "local", "gloo"), [
    ("10.1.0.5", ["10.1.0.5", "10.0.0.5", "172.17.0.1"], "10.1.0.5"),
    ("127.0.1.1", ["10.0.0.5", "10.1.0.5", "172.17.0.1"], "127.0.1.1"),
    ("10.9.9.9", ["10.0.0.5", "10.1.0.5", "172.17.0.1"], None)])
def test_local_addresses_depend_on_the_host_name(
        resolved: str, local: list[str], gloo: str | None, cluster_node: None,
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "resolve", lambda host: [resolved])
    assert network.local_addresses() == local
    assert network.default_gloo_address() == gloo


def test_network_and_rendezvous_need_no_torch() -> None:
    code = "import sys, utils.network, utils.rendezvous; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0
