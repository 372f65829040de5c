"""The GPUs of this machine, launches of tests/gpu/programs.py, and the table of figures."""
from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hosts import killed_at_end
from tests.gpu.page import write_part
from utils.host.gpus import count_gpus

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = str(ROOT / "tests" / "gpu" / "programs.py")
TABLE = "DDPKIT_GPU_TABLE"  # the page to write to
LIMIT_SECONDS = 270.0  # then no further test starts
QUERY = """\
import json, os, torch
cuda = torch.cuda
found = [cuda.get_device_properties(index) for index in range(cuda.device_count())]
if found:
    software = f"torch {torch.__version__}, NCCL {'.'.join(map(str, cuda.nccl.version()))}"
    print(json.dumps({"uuids": [str(one.uuid) for one in found],
                      "hardware": f"{len(found)} x {found[0].name}, {os.cpu_count()} CPUs, {software}"}))
"""


@dataclass
class Table:
    """Figures of a run, for docs/performance.md."""

    hardware: str = ""
    rows: list[tuple[str, str, str]] = field(default_factory=list)  # test, what was measured, the figure

    def write(self, page: Path, date: datetime.date) -> None:
        """Replace the table of a page."""
        measured: dict[str, list[str]] = {}
        others: dict[str, list[str]] = {}
        for test, what, figure in self.rows:
            if what in ("passed", "FAILED", "not measured"):
                name = test.removeprefix("test_").replace("_", " ").replace("[", " [")
                others.setdefault(what.capitalize(), []).append(f"{name}{figure and ': '}{figure}")
            else:
                parameter = test.partition("[")[2].rstrip("]")
                measured.setdefault(what, []).append(f"{parameter} {figure}".strip())
        lines = [f"`scripts/test.sh --gpu correctness`, {date}: {self.hardware}.", ""]
        lines += [f"- {what}: {'; '.join(found)}." for what, found in [*measured.items(), *others.items()]]
        table = "\n".join(lines) + "\n"
        write_part(page, "correctness", table)


this_run = Table()
beginning = time.monotonic()


@pytest.fixture(scope="session")
def gpus() -> list[str]:
    """The UUIDs of the GPUs that torch can use; without one, the test is skipped with the reason."""
    if not count_gpus() and TABLE not in os.environ:  # scripts/test.sh --gpu lets torch look for them
        pytest.skip("needs a GPU: this machine has none")
    done = subprocess.run([sys.executable, "-c", QUERY], capture_output=True, text=True, timeout=120)
    if done.returncode != 0 or not done.stdout:
        unusable = f"needs a GPU that torch can use: it sees none. This host has {count_gpus()}. {done.stderr[-300:]}"
        (pytest.fail if count_gpus() and TABLE in os.environ else pytest.skip)(unusable)
    found = json.loads(done.stdout.splitlines()[-1])
    this_run.hardware = found["hardware"]
    return list(found["uuids"])


@pytest.fixture
def ranks(gpus: list[str]) -> int:
    """A rank for each GPU, up to four."""
    return min(len(gpus), 4)


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """record("what was measured", "1.2 s") adds a row to the table."""
    return lambda what, figure: this_run.rows.append((request.node.name, what, figure))


def run(command: Sequence[str], *, env: dict[str, str] | None = None, seconds: float = 240) -> tuple[int, str]:
    """Run a command with the environment of a login: its exit status, and what it printed."""
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "OMPI_", "PMI", "SLURM_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(ranks)}
    done = subprocess.run(command, env={**environ, **(env or {})}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, timeout=seconds, cwd=ROOT)
    return done.returncode, done.stdout


def run_on_hosts(ranks: int, gpus: Sequence[str], folder: Path, *words: str, seconds: float = 120
                 ) -> tuple[list[int], str]:
    """Run the programs on hosts of their own, one rank on each: their exit statuses, and what they printed.

    The hosts are UTS namespaces (root). NCCL and the kit take ranks there for ranks of several hosts: they may share a
    GPU, and their data go through TCP.
    """
    if subprocess.run(["unshare", "--uts", "true"], capture_output=True).returncode != 0:
        pytest.skip("needs hosts in UTS namespaces: unshare --uts true fails (run as root)")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    in_namespace = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"']
    processes = []
    with (folder / "output").open("w+") as output, contextlib.ExitStack() as started:
        for rank in range(ranks):
            env = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                   "CUDA_VISIBLE_DEVICES": gpus[rank % len(gpus)] if gpus else "", "OMP_NUM_THREADS": "1"}
            command = [*in_namespace, f"host{rank}", sys.executable, PROGRAMS, "--folder", str(folder), *words]
            processes.append(started.enter_context(killed_at_end(subprocess.Popen(
                command, stdout=output, stderr=output, text=True, cwd=folder, env={**os.environ, **env},
                start_new_session=True))))
        end = time.monotonic() + seconds
        with contextlib.suppress(subprocess.TimeoutExpired):
            for process in processes:
                process.wait(max(0.1, end - time.monotonic()))
        statuses = [process.poll() for process in processes]
        output.seek(0)
        return [-1000 if status is None else status for status in statuses], output.read()


def figures(status: int, output: str) -> dict[str, Any]:
    """The figures of the programs that run() has run."""
    found = re.findall(r"^(?:.*\s)?result: (\{.*\})$", output, re.MULTILINE)
    assert status == 0 and len(found) == 1, output
    return dict(json.loads(found[0]))


def torchrun(ranks: int, *words: str) -> list[str]:
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*agent, PROGRAMS, *words]


def pytest_runtest_setup() -> None:
    if TABLE in os.environ and time.monotonic() > beginning + LIMIT_SECONDS:
        pytest.skip("the five minutes were over: scripts/test.sh --gpu correctness -k NAME")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    name = report.nodeid.partition("test_correctness.py::")[2]
    if name and report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        this_run.rows.append((name, "not measured", reason.removeprefix("Skipped: ")))
    elif name and report.when == "call" and (report.failed or name not in {test for test, _, _ in this_run.rows}):
        this_run.rows.append((name, "passed" if report.passed else "FAILED", ""))
    page = os.environ.get(TABLE)
    if page and this_run.hardware:  # after each test: an interrupted run keeps what is done
        this_run.write(Path(page), datetime.date.today())
