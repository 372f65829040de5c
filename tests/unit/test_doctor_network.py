"""Network checks of doctor: an exchange over sockets of this host, and what is concluded from facts of several."""
from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import Any

import pytest

from utils.host import network
from utils.tools.doctor.check import Check, Finding, Level, RankPlace, Reported
from utils.tools.doctor.checks.collective_calls import CollectiveFacts, Collectives
from utils.tools.doctor.checks.connections import ConnectionFacts, Connections
from utils.tools.doctor.checks.gpu_health import Gpu, GpuFacts, Gpus, parse, parse_rocm, xid_errors
from utils.tools.doctor.checks.names import NameFacts, Names
from utils.tools.doctor.checks.torch_import import ImportFacts, TorchImportCheck
from utils.tools.doctor.peers import (
    data_address,
    exchange_with,
    in_threads,
    interface_problem,
    listen,
    names_of,
    nccl_interfaces,
    partners,
    respond,
    serve,
    stop,
)

ADDRESS, HERE = "10.0.0.{}".format, "127.0.0.1"
EVERYONE = ("h1", "h2", "h3", "h4")


def conclude(check: Check[Any], facts: Iterable[Any]) -> list[Finding]:
    """Return the findings; facts of one rank on each of h1, h2, ..."""
    places = [Reported(RankPlace(node, f"h{node + 1}", node, 0), one) for node, one in enumerate(facts)]
    return list(check.conclude(places))


def only(findings: list[Finding]) -> Finding:
    assert len(findings) == 1, findings
    return findings[0]


# Names


def names(wrong: dict[int, list[tuple[int, list[str] | None]]], count: int = 4) -> list[Finding]:
    return conclude(Names(), [NameFacts([ADDRESS(node + 1)], wrong.get(node, [])) for node in range(count)])


@pytest.mark.parametrize("wrong, hosts, words", [
    ({2: [(2, ["127.0.1.1"])]}, ("h3",), "the own name of h3 leads to 127.0.1.1, which other hosts cannot reach; "
                                         "expected 10.0.0.3"),
    ({2: [(2, [])]}, ("h3",), "h3: h3 is not resolved at all; expected 10.0.0.3"),
    ({node: [(2, [])] for node in (0, 1, 3)}, ("h3",), "all other hosts: h3 is not resolved at all; expected 10.0.0.3"),
    ({1: [(2, [])]}, ("h2",), "h2: h3 is not resolved at all"),
    ({1: [(2, [])], 3: [(2, [])]}, ("h2", "h4"), "h2 and h4: h3 is not resolved at all"),
    ({1: [(2, None)]}, ("h2",), "h2: h3 is not resolved within 8 s"),
    ({1: [(2, [ADDRESS(4)])]}, ("h2",), "h2: h3 leads to 10.0.0.4, an address of h4; expected 10.0.0.3"),
    ({1: [(2, ["10.9.9.9"])]}, ("h2",), "h2: h3 leads to 10.9.9.9, no address of a host of this job"),
    ({1: [(2, ["127.0.0.1"])]}, ("h2",), "h2: h3 leads to 127.0.0.1, the host itself"),
    ({1: [(2, ["10.9.9.9", ADDRESS(3)])]}, ("h2",), "h2: h3 leads to 10.9.9.9, no address of a host of this job"),
    ({1: [(2, ["fd00::99"])]}, ("h2",), "h2: h3 leads to fd00::99, no address of a host of this job"),
    ({node: [(other, []) for other in range(4)] for node in range(4)}, EVERYONE,
     "all other hosts: h1, h2, h3 and h4 is not resolved"),
    ({node: [(node, ["127.0.1.1"])] for node in range(4)}, EVERYONE,
     "the own name of h1, h2, h3 and h4 leads to 127.0.1.1")])
def test_wrong_names(wrong: dict[int, list[tuple[int, list[str] | None]]], hosts: tuple[str, ...], words: str) -> None:
    finding = only(names(wrong))
    assert (finding.level, finding.hosts) == (Level.WARNING, hosts)
    assert words in finding.message and finding.remedy


def test_right_names_and_other_families_are_good() -> None:
    for wrong in ({}, {1: [(2, [ADDRESS(3), "fe80::1"])]}, {1: [(2, [ADDRESS(3), "127.0.1.1"])]}):
        assert only(names(wrong)).level is Level.GOOD
    assert not names({0: [(0, ["127.0.1.1"])]}, count=1)  # a laptop


# Connections

Result = tuple[str, float | None]  # problem, round trip


def connections(changed: dict[tuple[int, int], Result] | None = None, count: int = 4, **facts_of_h3: Any,
                ) -> list[Finding]:
    """changed: what the first host finds of the second one, where that is not a quick response."""
    facts = [ConnectionFacts(ADDRESS(node + 1), "eth0", 1500, others=[
        (one, *(changed or {}).get((node, one), ("", 1e-4))) for one in range(count) if one != node])
        for node in range(count)]
    if count > 2:
        facts[2] = replace(facts[2], **facts_of_h3)
    return conclude(Connections(), facts)


def both(pairs: Iterable[tuple[int, int]], result: Result = ("timed out", None)) -> dict[tuple[int, int], Result]:
    return {pair: result for a, b in pairs for pair in ((a, b), (b, a))}


def test_healthy_connections_are_good() -> None:
    assert "4 hosts connect in both directions over eth0 (MTU 1500), round trip 100 us" in only(connections()).message
    assert not connections(count=1)


H3_WITH_ALL = [(2, other) for other in (0, 1, 3)]


@pytest.mark.parametrize(("changed", "hosts", "level", "exclude", "words"), [
    ({(1, 2): ("timed out", None)}, ("h2", "h3"), Level.BAD, False,
     "while h3 connects to h2: a firewall drops connections from h2"),
    ({(1, 2): ("refused", None)}, ("h2", "h3"), Level.BAD, False, "h2 is refused by h3 (10.0.0.3), which listens"),
    (both([(1, 2)]), ("h2", "h3"), Level.BAD, False, "no response from h2 to h3 (10.0.0.3), nor from h3 to h2"),
    (both(H3_WITH_ALL), ("h3",), Level.BAD, True, "h3 cannot exchange data with any of 3 other hosts: no response"),
    (both((a, b) for a in range(4) for b in range(a)), EVERYONE, Level.BAD, False,
     "no host can connect to another one"),
    *(({(1, 2): (problem, None)}, ("h2", "h3"), Level.BAD, False,
       f"packets of full size from {way} are lost; expected 12,000 bytes to arrive in packets of 1500 bytes")
      for problem, way in (("sent data do not arrive", "h2 to h3"), ("data do not return", "h3 to h2"))),
    (both(H3_WITH_ALL, ("", 0.2)), ("h3",), Level.WARNING, True,
     "a round trip to h3 takes 200 ms from every other host, among the others 0.1 ms"),
    (both([(1, 2)], ("", 0.2)), ("h2", "h3"), Level.WARNING, False,
     "a round trip between h2 and h3 takes 200 ms; ")])
def test_connections_that_fail_or_are_slow(changed: dict[tuple[int, int], Result], hosts: tuple[str, ...],
                                           level: Level, exclude: bool, words: str) -> None:
    finding = only(connections(changed))
    assert (finding.hosts, finding.level, finding.exclude) == (hosts, level, exclude) and words in finding.message


def test_odd_mtu_and_one_address_on_two_hosts_are_named() -> None:
    finding = only(connections(mtu=1400))
    assert finding.hosts == ("h3",) and "eth0 of h3 has MTU 1400" in finding.message
    bridges = [ConnectionFacts("172.17.0.1", "docker0", 1500, others=[(1 - node, "same address", None)])
               for node in range(2)]
    assert "h1 and h2 use the same address 172.17.0.1 (docker0)" in only(conclude(Connections(), bridges)).message


def test_interfaces_that_a_host_does_not_have() -> None:
    for value, allowed in (("eth,ib", ["eth0", "eth1", "ib0"]), ("=eth1", ["eth1"]), ("^docker", []), ("", [])):
        assert nccl_interfaces(value, ["lo", "eth0", "eth1", "ib0"]) == allowed
    assert interface_problem({"NCCL_SOCKET_IFNAME": "lo"}) == interface_problem({}, hosts=2) == ""
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        assert interface_problem({variable: "lo"}, hosts=2).startswith(f"{variable}=lo is the loopback interface of ")
    assert interface_problem({"NCCL_SOCKET_IFNAME": "ib7"}).startswith("NCCL_SOCKET_IFNAME=ib7, but ")
    finding = only(connections(
        interface_problem="GLOO_SOCKET_IFNAME=ib7, but h3 has no interface ib7; it has lo. Unset it"))
    assert (finding.level, finding.hosts, finding.remedy) == (Level.BAD, ("h3",), "Unset it")


def test_partners_of_many_hosts() -> None:
    assert partners(4, 1) == [0, 2, 3]
    for count in (33, 100, 1000):
        found = [partners(count, node) for node in range(count)]
        assert all(len(one) <= 20 and node not in one for node, one in enumerate(found))
        assert all((node + step) % count in one for node, one in enumerate(found) for step in (1, -1, 16))
        assert all(node in found[other] for node, one in enumerate(found) for other in one)  # both know it
    assert names_of([f"h{number}" for number in range(10)]).endswith("h7 and 2 more")


# Collectives and GPUs


def trial(**values: Any) -> CollectiveFacts:
    usual = {"backend": "gloo", "wrong": {"4": 0, "65536": 0}, "bus_bandwidth": 1e9, "flops": None,
             "no_peer_access": []}
    return CollectiveFacts(4, {**usual, **values}, unreachable=[])


def test_torch_that_cannot_be_imported_is_no_fault_of_the_network() -> None:
    facts = [ImportFacts(0.1), ImportFacts(0.1, "ImportError: numpy.core.multiarray failed to import")]
    bad = only(conclude(TorchImportCheck(), facts))
    assert bad.level is Level.BAD and "cannot be imported on h2: ImportError: numpy" in bad.message
    assert "PYTHONPATH" in bad.remedy and "loopback" not in bad.remedy


LATE, FAILED, REFUSED = (CollectiveFacts(2, error=error) for error in (
    "did not end within 40 s", "exit status 1: no memory", "the ranks do not start: the ranks differ in torch version"))


@pytest.mark.parametrize(("facts", "expected", "level", "hosts", "words"), [
    ([trial()] * 4, None, Level.GOOD, (), "all-reduces of 4 ranks over gloo are right, bus bandwidth 1 GB/s"),
    ([trial(), trial(wrong={"4": 0, "65536": 7})], None, Level.BAD, ("h2",), "7 wrong elements"),
    ([trial(flops=6e14), trial(flops=6.1e14), trial(flops=4e14)], None, Level.WARNING, ("h3",),
     "the GPU of rank 2 on h3 computes 400 TFLOP/s, the median of 3 GPUs 600"),
    ([trial(), trial(bus_bandwidth=1.4e9)], 3e9, Level.WARNING, (), "a bus bandwidth of 1 GB/s; expected 3"),
    ([trial(), trial()], 2e9, Level.GOOD, (), "bus bandwidth 1 GB/s"),
    ([trial(), trial(no_peer_access=[0, 3])], None, Level.WARNING, ("h2",),
     "the GPU of rank 1 on h2 cannot access the memory of GPU 0, 3"),
    ([trial(no_peer_access=[1])] * 2, None, Level.GOOD, (), "are right"),  # none has NVLink
    ([LATE, FAILED], None, Level.BAD, ("h2",), "of 2 ranks failed on rank 1 on h2: exit status 1: no memory"),
    ([REFUSED] * 2, None, Level.BAD, (), "differ in torch version"),
    ([LATE] * 2, None, Level.WARNING, (), "of 2 ranks did not end"),
    ([CollectiveFacts(0, unreachable=[1])], None, Level.GOOD, (), "not run")])
def test_collectives(facts: list[CollectiveFacts], expected: float | None, level: Level, hosts: tuple[str, ...],
                     words: str) -> None:
    finding = only(conclude(Collectives(expected=expected), facts))
    assert (finding.level, finding.hosts) == (level, hosts) and words in finding.message


def gpus(*changes: dict[str, Any]) -> list[Finding]:
    """Findings about GPUs with the values that nvidia-smi shows on an idle A100, and these changes."""
    found = []
    for index, change in enumerate(changes):
        usual = {"name": "NVIDIA A100-SXM4-80GB", "uuid": f"GPU-{index}", "memory_bytes": 85899345920,
                 "used_bytes": 598016000, "uncorrected_errors": 0, "rows_pending": False, "rows_failed": False,
                 "clock_mhz": 210, "max_clock_mhz": 1410, "throttle_reasons": 0x1, "power_watts": "62.10",
                 "temperature": 32, "nvlinks": 12}
        found.append(asdict(Gpu(index, **{**usual, **change})))
    return conclude(Gpus(), [GpuFacts(found, len(found), len(found), {})])


@pytest.mark.parametrize("change, level, words", [
    ({"used_bytes": 34 * 10**9, "processes": [4242]}, Level.WARNING,
     "34.0 of 85.9 GB are in use by other processes (4242)"),
    ({"uncorrected_errors": 2}, Level.BAD, "2 uncorrectable ECC errors"),
    ({"rows_failed": True, "rows_pending": True}, Level.BAD, "remapping of a damaged memory row has failed"),
    ({"rows_pending": True}, Level.WARNING, "a memory row waits to be remapped"),
    ({"throttle_reasons": 0x48}, Level.WARNING, "slowed down by hardware slowdown and hardware thermal slowdown"),
    ({"nvlinks": 11}, Level.WARNING, "has 11 NVLinks that are up; expected 12"),
])
def test_gpu_health(change: dict[str, Any], level: Level, words: str) -> None:
    finding = only(gpus({}, change, {}))
    assert finding.level is level and words in finding.message and "GPU 1 of h1" in finding.message
    assert finding.exclude


def test_idle_gpus_are_good() -> None:
    assert "3 GPUs (NVIDIA A100-SXM4-80GB): no errors" in only(gpus({}, {}, {})).message
    assert only(gpus({"throttle_reasons": 0x4})).level is Level.GOOD  # the power limit under load
    assert not conclude(Gpus(), [GpuFacts([], None, 0, {})])
    assert only(gpus(*({"name": "NVIDIA A40", "nvlinks": 0} for _ in range(2)))).level is Level.GOOD


def test_output_of_nvidia_smi() -> None:
    row = ("{}, NVIDIA A100-SXM4-80GB, GPU-{}, 00000000:4{}:00.0, 81920, {}, {}, [N/A], 0x{:016x}, 210, 1410, 32, "
           "62.10\n")
    outputs = {"gpu": row.format(0, "a", 1, 4, 0, 1) + row.format(1, "b", 2, 40000, "[N/A]", 0x48),
               "remapped-rows": "GPU-a, 0, 0\nGPU-b, 1, 0\n", "compute-apps": "GPU-b, 4242\n"}
    links = "".join(f"GPU {gpu}: NVIDIA A100-SXM4-80GB (UUID: GPU-{gpu})\n\t Link 0: 25 GB/s\n\t Link 1: {state}\n"
                    for gpu, state in enumerate(("25 GB/s", "<inactive>")))
    idle, busy = parse(outputs, links)
    assert (idle.address, idle.memory_bytes, idle.used_bytes, idle.nvlinks) == ("0000:41:00.0", 80 << 30, 4 << 20, 2)
    assert (idle.uncorrected_errors, idle.throttle_reasons, idle.rows_pending, idle.processes) == (0, 1, False, [])
    assert (busy.uncorrected_errors, busy.throttle_reasons, busy.rows_pending) == (None, 0x48, True)
    assert busy.processes == [4242]
    assert (busy.index, busy.nvlinks, busy.rows_failed, busy.power_watts) == (1, 1, False, "62.10")
    assert parse({**outputs, "remapped-rows": "", "compute-apps": ""}, "")[1].nvlinks == 0  # an older GPU


def test_xid_errors_of_the_kernel_log() -> None:
    line = "4,1052,98212,-;NVRM: Xid (PCI:0000:41:00): 79, pid='<unknown>', GPU has fallen off the bus."
    found = xid_errors(iter([line, "6,1,2,-;usb 1-1: new device"]))
    assert found == {"0000:41:00.0": [79]}
    facts = GpuFacts([], 3, 4, found)
    assert "fallen off the bus (Xid 79): the driver shows 3 of 4" in only(conclude(Gpus(), [facts])).message


def test_output_of_rocm_smi() -> None:
    text = ('{"card0": {"Temperature (Sensor edge) (C)": "40.0", "Temperature (Sensor junction) (C)": "44.0", '
            '"VRAM Total Memory (B)": "68702699520", "VRAM Total Used Memory (B)": "10960896", '
            '"Card Series": "Instinct MI250X"}, "system": {}}')
    gpu = parse_rocm(text)[0]
    assert (gpu.name, gpu.temperature, gpu.used_bytes) == ("Instinct MI250X", 44, 10960896)


# Sockets


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
