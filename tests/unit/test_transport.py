"""What rank 0 reads from NCCL's log: recorded logs, the line for the output, and the variables that it needs."""
from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from utils.host.nccl_log import Expected, classify, describe, expected_network, log_of_nccl

RECORDINGS = Path(__file__).parents[1] / "recordings" / "transport"
NOTHING_FOUND = [
    "n1:7:9 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.",
    "n1:7:9 [0] NCCL INFO NET/IB : No device found.",
    "n1:7:9 [0] NCCL INFO NET/Socket : Using [0]hsn0:10.150.0.7<0> [1]hsn1:10.150.0.8<0>",
    "n1:7:9 [0] NCCL INFO Using network Socket"]
CXI = Expected("AWS Libfabric", "DDPKIT_NETWORK")
INFINIBAND = Expected("IB", "this host has InfiniBand mlx5_0")


@pytest.mark.parametrize("recording", sorted(RECORDINGS.rglob("*.json")), ids=lambda path: path.stem)
def test_recorded_log(recording: Path) -> None:
    recorded = json.loads(recording.read_text())
    found = classify(recorded["lines"])
    assert {
        "network": found.network, "provider": found.provider, "devices": found.devices,
        "gpudirect": found.gpudirect, "interface": found.interface,
    } == recorded["expected"]


@pytest.mark.parametrize(("lines", "expected", "text"), [
    (NOTHING_FOUND, CXI, "TCP sockets over hsn0, hsn1, although AWS Libfabric is expected (DDPKIT_NETWORK)"),
    (NOTHING_FOUND, INFINIBAND,
     "TCP sockets over hsn0, hsn1, although IB is expected (this host has InfiniBand mlx5_0)"),
    (["NCCL INFO Using network Socket"], CXI,
     "TCP sockets over an unknown interface, although AWS Libfabric is expected (DDPKIT_NETWORK)"),
    (["NCCL INFO NET/OFI Selected provider is tcp;ofi_rxm, fabric is 10.0.0.0/8 (found 1 nics)",
      "NCCL INFO Using network AWS Libfabric"], CXI,
     "AWS Libfabric (tcp;ofi_rxm), although AWS Libfabric is expected (DDPKIT_NETWORK)")])
def test_tcp_where_more_is_expected(lines: list[str], expected: Expected, text: str) -> None:
    line, warns = describe(classify(lines, one_host=False), expected)
    assert warns and line.startswith(f"NCCL uses {text}. Set NCCL_DEBUG=INFO and read the log")


@pytest.mark.parametrize(("lines", "expected", "text"), [
    (["NCCL INFO NET/OFI Selected provider is cxi, fabric is cxi (found 4 nics)", "NCCL INFO Using network Libfabric",
      "NCCL INFO NET/Libfabric : GPU Direct RDMA Enabled for HCA 0 'cxi0'"], CXI,
     "network: Libfabric (cxi), GPUDirect RDMA"),
    (["NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB ; OOB ib0:10.0.0.1<0>", "NCCL INFO Using network IB",
      "NCCL INFO Channel 00/0 : 0[0] -> 4[0] [send] via NET/IB/0"], INFINIBAND,
     "network: IB (mlx5_0, mlx5_1), no GPUDirect RDMA"),
    (NOTHING_FOUND, None, "network: TCP sockets over hsn0, hsn1"),
    (NOTHING_FOUND, Expected("Socket", "DDPKIT_NETWORK"), "network: TCP sockets over hsn0, hsn1"),
    (["NCCL version 2.27.7+cuda12.9"], CXI, "network: unknown; NCCL_DEBUG=INFO shows the log of NCCL")])
def test_line_without_a_warning(lines: list[str], expected: Expected | None, text: str) -> None:
    assert describe(classify(lines, one_host=False), expected) == (text, False)


def test_expected_network(tmp_path: Path) -> None:
    """The profile first, then what sysfs shows: only an active port of InfiniBand counts."""
    assert expected_network({}, tmp_path) is None
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    for layer, state, found in (
            ("Ethernet", "4: ACTIVE", None), ("InfiniBand", "1: DOWN", None), ("InfiniBand", "4: ACTIVE", INFINIBAND)):
        (port / "link_layer").write_text(f"{layer}\n")
        (port / "state").write_text(f"{state}\n")
        assert expected_network({}, tmp_path) == found

    (tmp_path / "drivers/efa").mkdir(parents=True)
    (tmp_path / "sys/class/infiniband/efa_0/device").mkdir(parents=True)
    (tmp_path / "sys/class/infiniband/efa_0/device/driver").symlink_to(tmp_path / "drivers/efa")
    assert expected_network({}, tmp_path) == Expected("AWS Libfabric", "this host has the EFA adapter efa_0")
    (tmp_path / "sys/class/cxi/cxi0").mkdir(parents=True)
    assert expected_network({}, tmp_path) == Expected("AWS Libfabric", "this host has cxi0")
    assert expected_network({"DDPKIT_NETWORK": "AWS Libfabric"}, tmp_path) == CXI


@pytest.mark.parametrize("end", [contextlib.nullcontext(), pytest.raises(RuntimeError)])
def test_log_is_read_and_no_variable_stays(end: contextlib.AbstractContextManager[object]) -> None:
    """Also where NCCL cannot start."""
    before = {"NCCL_DEBUG_FILE": "mine.%p", "NCCL_CONF_FILE": "/none"}
    environ = dict(before)
    with end, log_of_nccl(True, environ) as log:
        assert (environ["NCCL_DEBUG"], environ["NCCL_DEBUG_SUBSYS"]) == ("INFO", "INIT,NET,ENV")
        with open(environ["NCCL_DEBUG_FILE"], "w") as file:  # as NCCL does
            file.write("\n".join(NOTHING_FOUND))
        if not isinstance(end, contextlib.nullcontext):
            raise RuntimeError
    assert log == NOTHING_FOUND and environ == before


def test_log_of_the_user_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "nccl.conf").write_text("NCCL_DEBUG=WARN\n")
    for environ in ({"NCCL_DEBUG": "WARN"}, {"NCCL_CONF_FILE": str(tmp_path / "nccl.conf")}):
        with log_of_nccl(True, dict(environ)) as log:
            assert log == []
    with log_of_nccl(False, unwanted := {}) as log:
        assert (log, unwanted) == ([], {})
