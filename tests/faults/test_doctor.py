"""doctor.py on four hosts of two ranks, with real faults: it names check, host and cause, and nothing else.

One run for each way to collect facts; tests/unit/test_doctor_*.py have what is concluded from other facts. The hosts
are network namespaces.
"""
from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hosts import CLEAN_ENV, Hosts
from tests.faults import host_faults, packets
from tests.launch.launchers import LAUNCH, ROOT, Lab
from tests.matrix import with_all


class Cluster:
    """Hosts with a folder for checkpoints that they share, and how doctor.py starts there.

    shell: lines that each rank runs first. mpi: one of MPIS, whose mpiexec starts one rank on each
    host instead of launch.py.
    """

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self.hosts, self.folder = lab, lab.hosts, folder
        self.shell: list[str] = []
        self.mpi = ""
        self.checkpoints, self.work = folder / "checkpoints", folder / "work"
        self.checkpoints.mkdir()
        self.work.mkdir()
        (self.work / "train.py").write_text("import torch\n")

    def replace(self, host: str, path: Path, text: str) -> None:
        host_faults.replace_file(self.hosts, host, path, text)

    def append(self, host: str, path: Path, line: str) -> None:
        self.replace(host, path, f"{path.read_text()}{line}\n")

    def doctor(self, *options: str) -> tuple[int, str]:
        """Run doctor.py; return its exit status and its output."""
        words = ["sh", "-c", "\n".join([*self.shell, 'exec "$@"']), "sh", sys.executable,
                 str(ROOT / "utils" / "__main__.py"), "doctor", "--json", "--checkpoints",
                 str(self.checkpoints), *options]
        ranks = [host for host in self.hosts.hosts for _ in range(1 if self.mpi else 2)]
        (self.folder / "nodes").write_text("\n".join(ranks))
        environ = {"PATH": f"{self.lab.ssh.parent}:{CLEAN_ENV['PATH']}", "NCPUS": "2",
                   "PYTHONDONTWRITEBYTECODE": "1"}
        if self.mpi:
            start = self.lab.mpiexec(self.mpi, " ".join(ranks), environ)
            environ["PATH"] = f"{Path(start[0]).parent}:{environ['PATH']}"
        else:
            start = LAUNCH
            environ |= {"PBS_JOBID": "1.lab", "PBS_NODEFILE": str(self.folder / "nodes")}
        done = self.lab.run("h1", ["env", "-C", str(self.work), *start, *words], env=environ)
        return done.status, done.output


@pytest.fixture
def cluster(need: Callable[[str], Path], tmp_path: Path) -> Iterator[Cluster]:
    for needed in ("hosts", "sshd"):
        need(needed)
    with Hosts(4) as hosts:
        yield Cluster(Lab(hosts, hosts.start_sshd(), need), tmp_path)


def report_of(output: str) -> dict[str, Any]:
    """Return the report of rank 0. A rank that does not find rank 0 reports earlier."""
    starts = [found.start() for found in re.finditer(r"^\{\n", output, re.MULTILINE)]
    assert starts, output
    report: dict[str, Any] = json.JSONDecoder().raw_decode(output, starts[-1])[0]
    return report


def alarms(output: str) -> list[tuple[str, str, str]]:
    """Return what rank 0 has found: for each finding that is not good, its check, hosts and message."""
    return [(check["name"], " ".join(finding["hosts"]), finding["message"]) for check in report_of(output)["checks"]
            for finding in check["findings"] if finding["level"] != "good"]


# Faults --------------------------------------------------------------------------------------------------------------

def single_hosts(run: Cluster) -> None:
    """Of each host something else: torch, GPUs and threads, cores, limits. All drivers list two GPUs."""
    file = next(Path(sys.prefix).glob("lib/python*/site-packages/torch/functional.py"))
    run.replace("h1", file, "raise ImportError('libmpi.so.12: not found')")
    for host in run.hosts.hosts:
        driver = run.folder / f"driver.{host}"
        for number in range(2):
            gpu = driver / "nvidia" / "gpus" / f"0000:0{number + 1}:00.0"
            gpu.mkdir(parents=True)
            (gpu / "information").write_text(f"Model: \t\t NVIDIA H100\nGPU UUID: \t GPU-{host}-{number}\n"
                                             f"Device Minor: \t {number}\n")
        packets.run(run.hosts, host, f"mount --bind {driver} /proc/driver")
    run.shell.append("if [ $(hostname) = h2 ]; then export CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=64; fi")
    host_faults.set_cores(run.hosts, "h3", {0})
    host_faults.set_limits(run.hosts, "h4", nofile=256)


def one_name(run: Cluster) -> None:
    """Two hosts with one name. Each has its boot id, which hosts of the tests otherwise share."""
    for number, host in enumerate(run.hosts.hosts):
        run.replace(host, Path("/proc/sys/kernel/random/boot_id"), f"{number}1111111-2222-4333-8444-555555555555\n")
    packets.run(run.hosts, "h4", "hostname h3")


def different_hosts(run: Cluster) -> None:
    run.append("h3", ROOT / "utils" / "__init__.py", '__version__ = "0.0.9"')
    run.shell.append("if [ $(hostname) = h3 ]; then export NCCL_IB_DISABLE=1; fi")


def broken_storage(run: Cluster) -> None:
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("needs /dev/fuse, which this user may not open")
    host_faults.hang_folder(run.hosts, "h3", run.checkpoints)
    for options in (f"--bind {run.checkpoints}", "-o remount,bind,ro"):
        packets.run(run.hosts, "h2", f"mount {options} {run.checkpoints}")


def one_way_loss(run: Cluster) -> None:
    packets.drop(run.hosts, "h2", "to", packets.source(run.hosts, "h3"))


def black_hole(run: Cluster) -> None:
    packets.one_packet_per_frame(run.hosts, run.hosts.hosts)
    for direction in ("from", "to"):
        packets.drop(run.hosts, "h3", direction, *packets.NOT_SSH, packets.longer_than(1400))


def odd_mtu(run: Cluster) -> None:
    packets.run(run.hosts, "h2", "ip link set eth0 mtu 1200")


def wrong_interfaces(run: Cluster) -> None:
    run.shell += ["case $(hostname) in", "h2|h3) export GLOO_SOCKET_IFNAME=lo;;",
                  "h4) export GLOO_SOCKET_IFNAME=ib7;;", "esac"]


def signalled(name: str, check: str = "limits.Limits") -> Callable[[Cluster], None]:
    """Rank 4 gets a signal when it collects facts."""
    def inject(run: Cluster) -> None:
        module, kind = check.split(".")
        run.append("h3", ROOT / "utils" / "tools" / "doctor" / "checks" / f"{module}.py",
                   f"import os, signal, time\n{kind}.collect = lambda self, ranks: (  # it takes effect later\n"
                   f"    os.kill(os.getpid(), signal.{name}), time.sleep(99))")
    return inject


# The checks that run, and what they find: check, hosts, regular expression.
CASES: dict[str, tuple[Callable[[Cluster], None], str, list[tuple[str, str, str]]]] = {
    "single hosts": (single_hosts, "placement,limits,import", [
        ("import", "h1", r"torch cannot be imported on h1: ImportError: libmpi\.so\.12: not found"),
        ("placement", "h2", r"ranks 2, 3 on h2 see no GPU \(CUDA_VISIBLE_DEVICES=\), but the host has 2"),
        ("placement", "h2", r"2 ranks on h2 would start 128 threads \(OMP_NUM_THREADS=64\)"),
        ("placement", "h3", "all 2 ranks of h3 may run on core 0 only"),
        ("limits", "h4", r"a process on h4 may open 256 files \(ulimit -n\)")]),
    "one name on two hosts": (one_name, "placement", [
        ("placement", "h3", "2 hosts have the name h3: ranks 4, 6 on h3 run on different hosts"),
        ("placement", "h4", "no rank runs on h4: 1 of the 4 hosts of job 1.lab")]),
    "different hosts": (different_hosts, "equality", [
        ("equality", "h3", r"kit version differs\. h3: 0\.0\.9; the other ranks: "),
        ("equality", "h3", r"NCCL_IB_DISABLE differs\. h3: 1; the other ranks: \(unset\)")]),
    "broken storage": (broken_storage, "storage", [
        ("storage", "h2", r"h2 cannot write in the checkpoint folder .*: Read-only file system; 2 other hosts can"),
        ("storage", "h3", "rank 4 on h3 did not finish within 25 s; expected facts about storage")]),
    "one-way loss between two hosts": (one_way_loss, "connections", [
        ("connections", "h2 h3", "h2 and h3 cannot connect in both directions: no response from h2 to h3")]),
    "path MTU black hole": (black_hole, "connections", [
        ("connections", "h3", "h3 cannot exchange data with any of 3 other hosts: .*packets of full size from h3")]),
    "odd MTU": (odd_mtu, "connections", [
        ("connections", "h2", "eth0 of h2 has MTU 1200, while h1, h3 and h4 have 1500")]),
    "wrong interfaces": (wrong_interfaces, "equality,connections,collectives", [
        ("equality", "h1 h4", "GLOO_SOCKET_IFNAME differs"),
        ("connections", "h2 h3", "GLOO_SOCKET_IFNAME=lo is the loopback interface of h2 and h3"),
        ("connections", "h4", "GLOO_SOCKET_IFNAME=ib7, but h4 has no interface ib7")]),
    "killed rank": (signalled("SIGKILL"), "limits", [
        ("limits", "h3", "rank 4 on h3 ended; expected facts about limits")]),
}


# tests/unit/test_doctor_network.py and test_doctor_checks.py conclude from facts like those of these.
IN_TABLES = ("different hosts", "one-way loss between two hosts", "odd MTU")


@pytest.mark.parametrize("name", [*(name for name in CASES if name not in IN_TABLES), *with_all(*IN_TABLES)])
def test_doctor_names_the_fault_and_nothing_else(cluster: Cluster, name: str) -> None:
    inject, checks, expected = CASES[name]
    inject(cluster)
    status, output = cluster.doctor("--only", checks)
    left = alarms(output)
    for check, hosts, words in expected:
        found = [one for one in left if one[:2] == (check, hosts) and re.search(words, one[2])]
        assert len(found) == 1, (check, hosts, words, output)
        left.remove(found[0])
    assert not left and status, (left, status, output)


def test_stopped_rank_is_named_within_30_seconds(cluster: Cluster) -> None:
    """Although the check may take 70."""
    signalled("SIGSTOP", "torch_import.TorchImportCheck")(cluster)
    _, output = cluster.doctor("--only", "import")
    assert alarms(output) == [("import", "h3", "rank 4 on h3 did not respond; expected facts about import")]
    assert report_of(output)["checks"][1]["seconds"] <= 30


@pytest.mark.parametrize(("mpi", "options"), [("", []), *with_all(("mpich5", ["--quick"]))])
def test_doctor_finds_nothing_on_healthy_hosts(cluster: Cluster, mpi: str, options: list[str]) -> None:
    """With the bridge of Docker, which has the same address everywhere."""
    for host in cluster.hosts.hosts:
        for words in ("link add docker0 type bridge", "address add 172.17.0.1/16 dev docker0", "link set docker0 up"):
            packets.run(cluster.hosts, host, f"ip {words}")
    cluster.mpi = mpi
    status, output = cluster.doctor(*options)
    assert alarms(output) == [] and status == 0, output


def test_packet_filter_drops_frames_for_which_all_conditions_hold() -> None:
    assert packets.program([packets.TCP, packets.longer_than(1400)]) == (
        "6,48 0 0 23,21 0 3 6,128 0 0 0,37 0 1 1400,6 0 0 2,6 0 0 4294967295")
