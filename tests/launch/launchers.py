"""The real launchers, as commands: how each gets its hosts, its remote shell and the variables to pass on."""
from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.hosts import Hosts, killed_at_end

ROOT = Path(__file__).resolve().parents[2]
RANK_PROGRAM = ROOT / "tests" / "rank_program.py"
GROUPS = str(ROOT / "tests" / "launch" / "groups.py")
PUBLIC = str(ROOT / "tests" / "launch" / "public_code.py")
MEET = [sys.executable, str(RANK_PROGRAM), "--join"]  # not under torchrun, whose store needs torch
SHOW = [sys.executable, str(RANK_PROGRAM), "--torch"]
TRAIN = ["env", "OMP_NUM_THREADS=1", sys.executable, str(ROOT / "tests" / "launch" / "training.py")]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
LAUNCH = [sys.executable, str(ROOT / "scripts" / "launch.py")]
# Writes the process id of each rank to a folder, and trains until a hang is found, after 2 s.
TRAINS_FOR_EVER = f"""\
import os, sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from tests.faults import quick_imports
from utils import setup_distributed
with setup_distributed("gloo", hang_timeout=2) as dist:
    quick_imports.done()
    dist.barrier()
    Path(sys.argv[1], str(dist.rank)).write_text(str(os.getpid()))
    while True:
        dist.all_reduce_mean(1.0)
"""
# name -> what conftest's need() calls it, the launcher that detect() should find
MPIS = {"mpich5": ("mpich", "mpich"), "mpich4": ("system-mpich", "mpich"), "intel": ("impi", "intel-mpi"),
        "openmpi5": ("openmpi", "openmpi"), "openmpi4": ("system-openmpi", "openmpi")}
# What the first line of a training says of a launcher.
STARTED = {"mpich": "started by mpiexec (MPICH)", "intel-mpi": "started by mpiexec (Intel MPI)",
           "openmpi": "started by mpirun (Open MPI)", "slurm": "started by srun (Slurm)",
           "torchrun": "started by torchrun", "env": "numbered by RANK and WORLD_SIZE"}
# The library that mpi4py has to load to belong to the launcher: a file beside the launcher, or a name of the system.
LIBRARIES = {"mpich5": "lib/libmpi.so.12", "mpich4": "libmpich.so.12", "intel": "lib/libmpi.so.12",
             "openmpi5": "lib/libmpi.so.40", "openmpi4": "libmpi.so.40"}


def launch_py(by: str, need: Callable[[str], Path]) -> list[str]:
    """The start of a command: launch.py with one of MPIS, another --launcher, torchrun, or what it chooses itself."""
    options = {"": [], "torchrun": ["--torchrun"], "restarts": ["--torchrun", "--max-restarts", "1"]}
    launcher = need(MPIS[by][0]) if by in MPIS else by
    return [*LAUNCH, *options.get(by, ["--launcher", str(launcher)])]


@dataclass
class Result:
    """What a launch printed and how it ended; both streams are one text, as a person sees them."""

    status: int
    output: str

    def line(self, start: str) -> str:
        """The one line that starts with `start`."""
        found = [line for line in self.output.splitlines() if line.startswith(start)]
        assert len(found) == 1, f"{len(found)} lines start with {start!r} in:\n{self.output}"
        return found[0]


@functools.cache
def final_loss() -> str:
    """What TRAIN prints in one process, which is this one."""
    from tests.launch.training import train

    return f"final loss: {train(0, 1, lambda tensor: tensor):.10f}"


def assert_met(done: Result, hosts: str, launcher: str) -> None:
    """Each rank has printed its line: rank 0 is on the first of the hosts, and so on."""
    assert done.status == 0, done.output
    names = hosts.split()
    for rank, host in enumerate(names):
        assert done.line(f"rank {rank} of").startswith(
            f"rank {rank} of {len(names)}, local {names[:rank].count(host)} of {names.count(host)}, on {host}, "
            f"by {launcher}, "), done.output


@dataclass
class Lab:
    """Three hosts with sshd, and the launchers that were found."""

    hosts: Hosts
    ssh: Path
    need: Callable[[str], Path]

    def mpi(self, name: str, hosts: str, program: Sequence[str], *, env: dict[str, str] | None = None,
            seconds: float = 120) -> Result:
        """Run `program` under the mpiexec called `name` on h1; `hosts`: those of rank 0, 1, ..., as "h1 h1 h2".

        Open MPI gets the address of rank 0, unless `env` has something.
        """
        if name.startswith("openmpi") and env is None:
            env = {"MASTER_ADDR": self.hosts.address[hosts.split()[0]], "MASTER_PORT": "29700"}
        return self.run("h1", [*self.mpiexec(name, hosts, env or {}), *program], env=env, seconds=seconds)

    def mpiexec(self, name: str, hosts: str, env: dict[str, str] | None = None) -> list[str]:
        ranks = hosts.split()
        slots = Counter(host if self.hosts.names == "right" else self.hosts.address[host] for host in ranks)
        in_turn = len(slots) < len(ranks) and ranks[0] != ranks[1]
        mpiexec = str(self.need(MPIS[name][0]))
        if name.startswith("openmpi"):
            agent = ["--prtemca", "plm_ssh_agent"] if name == "openmpi5" else ["--mca", "plm_rsh_agent"]
            pass_on = [word for variable in env or {} for word in ("-x", variable)]
            return [mpiexec, "--allow-run-as-root", *agent, str(self.ssh), "--bind-to", "none", "--host",
                    ",".join(f"{host}:{count}" for host, count in slots.items()),
                    *(["--map-by", "node"] if in_turn else []), *pass_on, "-n", str(len(ranks))]
        hostfile = self.hosts.folder / f"hosts {hosts}"
        # Hydra takes as many ranks from a host as it has slots; one slot each makes it go round.
        hostfile.write_text("".join(f"{host}:{1 if in_turn else count}\n" for host, count in slots.items()))
        return [mpiexec, "-launcher", "ssh", "-launcher-exec", str(self.ssh), "-f", str(hostfile), "-n",
                str(len(ranks))]

    def mpi4py(self, name: str) -> dict[str, str]:
        """Variables with which a rank finds mpi4py, and mpi4py the library of the launcher."""
        library = LIBRARIES[name]
        if "/" in library:
            library = str(self.need(MPIS[name][0]).parents[1] / library)
        env = {"PYTHONPATH": str(self.need("mpi4py")), "MPI4PY_LIBMPI": library}
        if name == "mpich4":  # Debian's MPICH has libmpich.so.12 only, and mpi4py's wheel wants libmpi.so.12
            link = self.hosts.folder / "mpich4" / "libmpi.so.12"
            link.parent.mkdir(exist_ok=True)
            if not link.exists():
                found = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
                link.symlink_to(next(line.split()[-1] for line in found.splitlines() if "libmpich.so.12" in line))
            env |= {"MPI4PY_LIBMPI": str(link), "LD_LIBRARY_PATH": str(link.parent)}
        if name == "intel":
            env |= {"LD_LIBRARY_PATH": str(Path(library).parent)}
        return env

    def together(self, commands: Sequence[tuple[str, Sequence[str], dict[str, str]]], seconds: float = 120) -> Result:
        """Run commands, each on a host with its variables, at the same time; their outputs and greatest status."""
        with contextlib.ExitStack() as at_end:
            processes = [at_end.enter_context(killed_at_end(self.hosts.popen(
                host, command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)))
                for host, command, env in commands]
            done = [self.wait(process, seconds) for process in processes]
        return Result(max(abs(one.status) for one in done), "".join(one.output for one in done))

    def run(self, host: str, command: Sequence[str], *, env: dict[str, str] | None = None,
            seconds: float = 120) -> Result:
        """Run a command on a host; AssertionError with its output when it takes longer than `seconds`."""
        process = self.hosts.popen(host, command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        with killed_at_end(process):
            return self.wait(process, seconds)

    @staticmethod
    def wait(process: subprocess.Popen[str], seconds: float = 120) -> Result:
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired as late:
            shown = (late.stdout or b"").decode(errors="replace")
            raise AssertionError(f"did not end within {seconds} s:\n{shown}") from None
        return Result(process.returncode, output)
