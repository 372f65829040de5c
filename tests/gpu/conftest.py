"""The GPUs of this machine, launches of tests/gpu/programs.py, and the table of figures."""
from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from utils.host.gpus import count_gpus

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = str(ROOT / "tests" / "gpu" / "programs.py")
TABLE = "DDPKIT_GPU_TABLE"  # the page to write to
MARKS = re.compile(r"(<!-- gpu -->\n).*?(<!-- end of gpu -->)", re.DOTALL)
QUERY = """\
import json, torch
cuda = torch.cuda
found = [cuda.get_device_properties(index) for index in range(cuda.device_count())] if cuda.is_available() else []
nccl = ".".join(map(str, cuda.nccl.version())) if found else ""
print(json.dumps({"names": [one.name for one in found], "uuids": [str(one.uuid) for one in found],
                  "software": f"torch {torch.__version__}, NCCL {nccl}"}))
"""


@dataclass
class Table:
    """Figures of a run, for docs/performance.md."""

    hardware: str = ""
    rows: dict[str, dict[str, str]] = field(default_factory=dict)  # by test: what was measured, and the figure

    def text(self, date: datetime.date) -> str:
        """Return the rows as Markdown, below the hardware and the date."""
        lines = [f"`scripts/test.sh --gpu`, {date}: {self.hardware}.", "", "| test | measured | |", "|---|---|---|"]
        for test, figures in self.rows.items():
            shown = test.removeprefix("test_").replace("_", " ")
            lines += [f"| {shown} | {what} | {figure} |" for what, figure in figures.items()]
        return "\n".join(lines) + "\n"

    def write(self, page: Path, date: datetime.date) -> None:
        """Replace the table of a page."""
        text = page.read_text(encoding="utf-8")
        page.write_text(MARKS.sub(lambda found: found[1] + self.text(date) + found[2], text), encoding="utf-8")


this_run = Table()


@dataclass(frozen=True)
class Gpus:
    names: list[str]
    uuids: list[str]
    software: str

    def __len__(self) -> int:
        return len(self.uuids)

    @property
    def entries(self) -> list[str]:
        """What selects each GPU in CUDA_VISIBLE_DEVICES; a job may have got some of them only."""
        mask = os.environ.get("CUDA_VISIBLE_DEVICES")
        return mask.split(",")[:len(self)] if mask else list(map(str, range(len(self))))


@pytest.fixture(scope="session")
def gpus() -> Gpus:
    """The GPUs that torch can use; without one, the test is skipped with the reason."""
    if not count_gpus() and TABLE not in os.environ:  # scripts/test.sh --gpu lets torch look for them
        pytest.skip("needs a GPU: this machine has none")
    done = subprocess.run([sys.executable, "-c", QUERY], capture_output=True, text=True, timeout=120)
    found = Gpus(**json.loads(done.stdout.splitlines()[-1])) if done.returncode == 0 else Gpus([], [], "")
    if not found.uuids:
        unusable = f"needs a GPU that torch can use: it sees none. This host has {count_gpus()}. {done.stderr[-300:]}"
        (pytest.fail if count_gpus() and TABLE in os.environ else pytest.skip)(unusable)
    this_run.hardware = f"{len(found)} x {found.names[0]}, {os.cpu_count()} CPUs, {found.software}"
    return found


@pytest.fixture
def several_gpus(gpus: Gpus) -> Gpus:
    if len(gpus) < 2:
        pytest.skip("needs two GPUs: this machine has one")
    return gpus


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """record("what was measured", "1.2 s") adds a row to the table."""
    def add(what: str, figure: str) -> None:
        this_run.rows.setdefault(request.node.name, {})[what] = figure
    return add


@dataclass
class Ended:
    status: int
    output: str

    def figures(self) -> dict[str, Any]:
        found = re.findall(r"^(?:.*\s)?result: (\{.*\})$", self.output, re.MULTILINE)
        assert self.status == 0 and len(found) == 1, self.output
        return dict(json.loads(found[0]))


def run(command: Sequence[str], *, env: dict[str, str] | None = None, seconds: float = 240) -> Ended:
    """Run a command with the environment of a login; what it printed, and how it ended."""
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "OMPI_", "PMI", "SLURM_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(ranks)}
    done = subprocess.run(command, env={**environ, **(env or {})}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, timeout=seconds, cwd=ROOT)
    return Ended(done.returncode, done.stdout)


def torchrun(ranks: int, *words: str) -> list[str]:
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*agent, PROGRAMS, *words]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    name = report.nodeid.partition("test_gpu.py::")[2]
    if not name or not (report.when == "call" or report.skipped):
        return
    rows = this_run.rows
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        rows[name] = {"not measured": reason.removeprefix("Skipped: ")}
    elif report.passed:
        rows.setdefault(name, {"passed": ""})
    else:
        rows[name] = {"FAILED": ""}


def pytest_sessionfinish(session: pytest.Session) -> None:
    page = os.environ.get(TABLE)
    if page and this_run.hardware:
        this_run.write(Path(page), datetime.date.today())
