"""Network checks of doctor: an exchange over sockets of this host, and what is concluded from facts of several."""
from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.doctor_findings import conclude, exchanged, only
from utils.host import gpus as host_gpus
from utils.host import network
from utils.tools.doctor import networking
from utils.tools.doctor.check import Finding, Level, RankPlace, Ranks
from utils.tools.doctor.checks.collective_calls import CollectiveFacts, Collectives
from utils.tools.doctor.checks.connections import ConnectionFacts, Connections
from utils.tools.doctor.checks.gpu_compute import GpuCompute
from utils.tools.doctor.checks.gpu_health import GpuFacts, Gpus, parse

ADDRESS, HERE = "10.0.0.{}".format, "127.0.0.1"
EVERYONE = ("h1", "h2", "h3", "h4")


# Connections

def connections(changed: dict[tuple[int, int], str], **facts_of_h3: Any) -> list[Finding]:
    """changed: what the first host finds of the second one, where there is a problem."""
    facts = [ConnectionFacts(ADDRESS(node + 1), "eth0", 1500, others=[
        (other, changed.get((node, other), "")) for other in range(4) if other != node])
        for node in range(4)]
    facts[2] = replace(facts[2], **facts_of_h3)
    return conclude(Connections(), facts)


def both(pairs: Iterable[tuple[int, int]], problem: str = "timed out") -> dict[tuple[int, int], str]:
    return {pair: problem for a, b in pairs for pair in ((a, b), (b, a))}


def test_healthy_connections_are_good() -> None:
    assert "4 hosts connect in both directions over eth0 (MTU 1500)" in only(connections({})).message
    assert not conclude(Connections(), [ConnectionFacts(HERE, "lo", 65536)])


H3_WITH_ALL = [(2, other) for other in (0, 1, 3)]


@pytest.mark.parametrize(("changed", "hosts", "level", "exclude", "words"), [
    ({(1, 2): "timed out"}, ("h2", "h3"), Level.BAD, False,
     "while h3 connects to h2: a firewall drops connections from h2"),
    (both([(1, 2)]), ("h2", "h3"), Level.BAD, False, "no response from h2 to h3 (10.0.0.3), nor from h3 to h2"),
    (both(H3_WITH_ALL), ("h3",), Level.BAD, True, "h3 cannot exchange data with any of 3 other hosts: no response"),
    ({(other, 2): "refused" for other in (0, 1, 3)}, ("h3",), Level.BAD, True,
     "h3 cannot exchange data with any of 3 other hosts: h1 is refused by h3"),
    (both((a, b) for a in range(4) for b in range(a)), EVERYONE, Level.BAD, False,
     "no host can connect to another one"),
    ({(1, 2): "data do not return"}, ("h2", "h3"), Level.BAD, False,
     "packets of full size from h3 to h2 are lost; expected 12,000 bytes to arrive in packets of 1500 bytes")])
def test_connections_that_fail(changed: dict[tuple[int, int], str], hosts: tuple[str, ...], level: Level,
                               exclude: bool, words: str) -> None:
    finding = only(connections(changed))
    assert (finding.hosts, finding.level, finding.exclude) == (hosts, level, exclude) and words in finding.message


def test_hosts_that_refuse_or_use_one_address() -> None:
    with socket.create_server((HERE, 0)) as server:
        closed = server.getsockname()
    everyone = (RankPlace(0, "h1", 0, 0), RankPlace(1, "h2", 1, 0))
    ranks = Ranks(everyone[0], everyone)
    for address, result in (("127.0.0.2", "refused"), (HERE, "same address")):
        run = networking.connect_hosts(ranks, address)
        assert exchanged([run], lambda values: [*values, closed]) == [{1: result}]
    finding = only(connections(both([(1, 2)], "same address"), address=ADDRESS(2)))
    assert "h2 and h3 use the same address 10.0.0.2 (eth0)" in finding.message


def test_interfaces_of_nccl_that_a_host_does_not_have() -> None:
    for value, allowed in (("eth,ib", ["eth0", "eth1", "ib0"]), ("=eth1", ["eth1"]), ("^docker", []), ("", [])):
        assert networking.nccl_interfaces(value, ["lo", "eth0", "eth1", "ib0"]) == allowed
    assert networking.interface_problem({"NCCL_SOCKET_IFNAME": "lo"}) == networking.interface_problem({}, hosts=2) == ""
    problem = networking.interface_problem({"NCCL_SOCKET_IFNAME": "lo"}, hosts=2)
    assert "NCCL_SOCKET_IFNAME=lo is the loopback" in problem
    finding = only(connections({}, interface_problem=networking.interface_problem({"NCCL_SOCKET_IFNAME": "ib7"})))
    assert (finding.level, finding.hosts, finding.remedy) == (Level.BAD, ("h3",), "Unset it, or name one of these")
    assert finding.message.startswith("NCCL_SOCKET_IFNAME=ib7, but ")


def test_partners_of_many_hosts() -> None:
    assert networking.partners(4, 1) == [0, 2, 3]
    found = [networking.partners(100, node) for node in range(100)]
    assert all(len(one) <= 20 and (node + 1) % 100 in one for node, one in enumerate(found))
    assert all(node in found[other] for node, one in enumerate(found) for other in one)  # both know it


# Collectives and GPUs


def trial(**values: Any) -> CollectiveFacts:
    usual = {"backend": "gloo", "wrong": {"4": 0, "65536": 0}, "bus_bandwidth": 1e9, "flops": None}
    return CollectiveFacts(4, {**usual, **values}, unreachable=[])


LATE, FAILED, REFUSED = (CollectiveFacts(2, error=error) for error in (
    "did not end within 40 s", "exit status 1: no memory", "the ranks do not start: the ranks differ in torch version"))


@pytest.mark.parametrize(("facts", "level", "hosts", "words"), [
    ([trial()] * 4, Level.GOOD, (), "all-reduces of 4 ranks over gloo are right, bus bandwidth 1 GB/s"),
    ([trial(), trial(wrong={"4": 0, "65536": 7})], Level.BAD, ("h2",), "7 wrong elements"),
    ([trial(flops=6e14), trial(flops=6.1e14), trial(flops=4e14)], Level.WARNING, ("h3",),
     "the GPU of rank 2 on h3 computes 400 TFLOP/s, the median of 3 GPUs 600"),
    ([LATE, FAILED], Level.BAD, ("h2",), "of 2 ranks failed on rank 1 on h2: exit status 1: no memory"),
    ([REFUSED] * 2, Level.BAD, (), "differ in torch version"),
    ([LATE] * 2, Level.WARNING, (), "of 2 ranks did not end"),
    ([CollectiveFacts(0, unreachable=[1])], Level.GOOD, (), "not run")])
def test_collectives(facts: list[CollectiveFacts], level: Level, hosts: tuple[str, ...], words: str) -> None:
    finding = only(conclude(Collectives(), facts))
    assert (finding.level, finding.hosts) == (level, hosts) and words in finding.message


ROW = ("{0}, NVIDIA A100-SXM4-80GB, GPU-{0}, 00000000:4{0}:00.0, 81920, {1}, {2}, [N/A], 0x{3:016x}, 210, 1410, 32, "
       "62.10\n")  # what nvidia-smi shows: number, MiB in use, ECC errors, reasons to slow down


def gpus(shown: str, remapped: str = "", processes: str = "") -> list[Finding]:
    found = parse({"gpu": shown, "remapped-rows": remapped, "compute-apps": processes})
    return conclude(Gpus(), [GpuFacts([asdict(one) for one in found])])


def test_gpus_that_are_not_healthy() -> None:
    shown = ROW.format(0, 4, 0, 0x1) + ROW.format(1, 40000, 2, 0x48) + ROW.format(2, 4, "[N/A]", 0x1)
    found = gpus(shown, "GPU-0, 0, 0\nGPU-1, 1, 0\nGPU-2, 1, 1\n", "GPU-1, 4242\n")
    for finding, (level, words) in zip(found, [
            (Level.WARNING, "GPU 1 of h1: 41.9 of 85.9 GB are in use by other processes (4242)"),
            (Level.BAD, "GPU 1 of h1 has had 2 uncorrectable ECC errors"),
            (Level.WARNING, "GPU 1 of h1: a memory row waits to be remapped"),
            (Level.WARNING, "GPU 1 of h1 is slowed down by hardware slowdown and hardware thermal slowdown: 210"),
            (Level.BAD, "GPU 2 of h1: remapping of a damaged memory row has failed")], strict=True):
        assert (finding.level, finding.exclude) == (level, True) and finding.message.startswith(words)


def test_idle_gpus_are_good() -> None:
    for reasons in (0x1, 0x4):  # the latter is the power limit under load
        finding = only(gpus(ROW.format(0, 4, 0, reasons) + ROW.format(1, 570, "[N/A]", reasons)))
        assert "2 GPUs (NVIDIA A100-SXM4-80GB): no errors" in finding.message
    assert not gpus("")


@pytest.mark.parametrize(("program", "words"), [
    ("echo 'Unable to determine the device handle for GPU0000:41:00.0: GPU is lost.  Reboot'; exit 15",
     "nvidia-smi fails on h1: Unable to determine the device handle for GPU0000:41:00.0: GPU is lost. Reboot"),
    (f"case $1 in *query-gpu*) echo '{ROW.format(1, 4, 0, 1).strip()}';; esac",
     "nvidia-smi does not list the GPU 0000:40:00.0 of h1"),
    ("echo 'not a valid field'; exit 2", ""), ("exit 12", "")], ids=["lost", "not listed", "field", "no library"])
def test_gpu_that_nvidia_smi_has_lost_is_a_finding(
        program: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{program}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(host_gpus, "gpu_vendor", lambda *root: "nvidia")
    monkeypatch.setattr(host_gpus, "visible_gpu_addresses", lambda environ: ["0000:40:00.0", "0000:41:00.0"])
    me = RankPlace(0, "h1", 0, 0)
    facts = Gpus().collect(Ranks(me, (me,)))
    found = [one for one in conclude(Gpus(), [facts]) if one.level is Level.BAD]
    assert [(one.hosts, one.exclude) for one in found] == [(("h1",), True)] * bool(words)
    assert all(one.message.startswith(words) for one in found)


@pytest.mark.parametrize(("program", "words"), [
    ("print('ready', flush=True); time.sleep(60)", "does not compute: it did not compute within 1 s"),
    ("print('ready', flush=True); raise RuntimeError('no memory')", "does not compute: RuntimeError: no memory"),
    ("print('ready', flush=True)", ""), ("import no_such_module", "")], ids=["wedged", "fails", "good", "no torch"])
def test_gpu_that_does_not_compute_is_a_finding_within_the_limit(
        program: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_gpus, "gpu_vendor", lambda *root: "nvidia")
    monkeypatch.setattr(host_gpus, "count_gpus", lambda *environ: 1)
    me, began = RankPlace(0, "h1", 0, 0), time.monotonic()
    check = GpuCompute([sys.executable, "-c", f"import time; {program}"], 1.0)
    finding = only(conclude(check, [check.collect(Ranks(me, (me,)))]))
    assert (finding.level, finding.exclude) == ((Level.BAD, True) if words else (Level.GOOD, False))
    assert words in finding.message and time.monotonic() - began < 20


def test_address_of_the_collectives() -> None:
    assert networking.data_address("10.1.2.3", {}) == "10.1.2.3"
    for name, address in network.interfaces().items():
        expected = "10.1.2.3" if network.is_loopback(address) else address  # which no other host can reach
        assert networking.data_address("10.1.2.3", {"GLOO_SOCKET_IFNAME": name}) == expected
        assert networking.data_address("10.1.2.3", {"NCCL_SOCKET_IFNAME": f"={name}"}) == expected
    assert networking.data_address("127.0.0.1", {}) == next(iter(network.local_addresses()), HERE)


def test_functions_that_hang_do_not_delay_the_others() -> None:
    released = threading.Event()
    jobs: dict[int, Callable[[], bool]] = {0: released.wait, 1: lambda: True}
    assert networking.in_threads(jobs, 0.2) == {1: True}
    released.set()
