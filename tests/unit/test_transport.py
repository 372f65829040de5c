"""What rank 0 reads from NCCL's log: recorded logs, the line for the output, and the variables that it needs."""
from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from utils.host.nccl_log import Expected, Transport, classify, describe, expected_network, log_of_nccl

RECORDINGS = Path(__file__).parents[1] / "recordings" / "transport"
SOCKET = [
    "n1:7:9 [0] NCCL INFO NET/IB : No device found.",
    "n1:7:9 [0] NCCL INFO NET/Socket : Using [0]hsn0:10.150.0.7<0> [1]hsn1:10.150.0.8<0>",
    "n1:7:9 [0] NCCL INFO Using network Socket"]
OFI_OVER_TCP = ["NCCL INFO NET/OFI Selected provider is tcp;ofi_rxm, fabric is 10.0.0.0/8 (found 1 nics)"]
CXI = Expected("AWS Libfabric", "DDPKIT_NETWORK")
INFINIBAND = Expected("IB", "this host has InfiniBand mlx5_0")


@pytest.mark.parametrize("recording", sorted(RECORDINGS.rglob("*.json")), ids=lambda path: path.stem)
def test_recorded_log(recording: Path) -> None:
    recorded = json.loads(recording.read_text())
    expected = recorded["expected"]
    devices = expected["provider"].replace("verbs", "") or expected["devices"]
    uses = expected["interface"] if expected["network"] == "Socket" else devices
    assert classify(recorded["lines"]) == (expected["network"], uses.replace(",", ", "), expected["gpudirect"])


@pytest.mark.parametrize(("found", "expected", "line"), [
    (classify(SOCKET), INFINIBAND,
     "NCCL uses TCP sockets over hsn0, hsn1, although IB is expected (this host has InfiniBand mlx5_0)"),
    (classify(SOCKET[2:]), CXI,
     "NCCL uses TCP sockets over an unknown interface, although AWS Libfabric is expected (DDPKIT_NETWORK)"),
    (classify(OFI_OVER_TCP), CXI,
     "NCCL uses AWS Libfabric (tcp;ofi_rxm), although AWS Libfabric is expected (DDPKIT_NETWORK)"),
    (Transport("Libfabric", "cxi", True), CXI, "network: Libfabric (cxi), GPUDirect RDMA"),
    (Transport("IB", "mlx5_0, mlx5_1", False), INFINIBAND,
     "network: IB (mlx5_0, mlx5_1), no GPUDirect RDMA"),
    *((classify(SOCKET), expected, "network: TCP sockets over hsn0, hsn1")
      for expected in (None, Expected("Socket", "DDPKIT_NETWORK"))),
    (classify(["NCCL version 2.27.7+cuda12.9"]), CXI, "network: unknown; NCCL_DEBUG=INFO shows the log of NCCL")])
def test_line_warns_of_tcp_where_more_is_expected(found: Transport, expected: Expected | None, line: str) -> None:
    text, warns = describe(found, expected)
    described, remedy, _ = text.partition(". Set NCCL_DEBUG=INFO and read the log")
    assert (described, warns, bool(remedy)) == (line, "although" in line, "although" in line)


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


def test_log_is_read_and_no_variable_stays(tmp_path: Path) -> None:
    """Also where NCCL cannot start. NCCL keeps the file open: it is /dev/null afterwards."""
    before = {"NCCL_DEBUG_FILE": "mine.%p", "NCCL_CONF_FILE": "/none"}
    environ = dict(before)
    with pytest.raises(RuntimeError), log_of_nccl(environ) as log:
        assert (environ["NCCL_DEBUG"], environ["NCCL_DEBUG_SUBSYS"]) == ("INFO", "INIT,NET,ENV")
        file = open(environ["NCCL_DEBUG_FILE"], "w")  # noqa: SIM115 - as NCCL does
        print(*SOCKET, sep="\n", file=file, flush=True)
        raise RuntimeError
    with file:
        assert os.readlink(f"/proc/self/fd/{file.fileno()}") == os.devnull
    assert log == SOCKET and environ == before
    # The log of the user is left alone.
    (tmp_path / "nccl.conf").write_text("NCCL_DEBUG=WARN\n")
    for environ in ({"NCCL_DEBUG": "WARN"}, {"NCCL_CONF_FILE": str(tmp_path / "nccl.conf")}):
        with log_of_nccl(dict(environ)) as log:
            assert log == []
