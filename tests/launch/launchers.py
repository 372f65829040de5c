"""The real launchers, as commands: how each gets its hosts, its remote shell and the variables to pass on."""
from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster.hosts import Hosts, killed_at_end

ROOT = Path(__file__).resolve().parents[2]
RANK_PROGRAM = ROOT / "tests" / "rank_program.py"
MINIMAL = [sys.executable, str(ROOT / "examples" / "01_ddp_minimal.py"), "--epochs", "1"]
# name -> what conftest's need() calls it, the launcher that detect() should find
MPIS = {"mpich5": ("mpich", "mpich"), "mpich4": ("system-mpich", "mpich"), "intel": ("impi", "intel-mpi"),
        "openmpi5": ("openmpi", "openmpi"), "openmpi4": ("system-openmpi", "openmpi")}
# The library that mpi4py has to load to belong to the launcher: a file beside the launcher, or a name of the system.
LIBRARIES = {"mpich5": "lib/libmpi.so.12", "mpich4": "libmpich.so.12", "intel": "lib/libmpi.so.12",
             "openmpi5": "lib/libmpi.so.40", "openmpi4": "libmpi.so.40"}
# Placement of the ranks on the hosts: slots of each host, and whether ranks go round the hosts in turn.
LAYOUTS: dict[str, tuple[dict[str, int], bool]] = {
    "2x2": ({"h1": 2, "h2": 2}, False), "round robin": ({"h1": 2, "h2": 2}, True),
    "2+1": ({"h1": 2, "h2": 1}, False), "remote": ({"h2": 2, "h3": 2}, False), "one host": ({"h1": 2}, False)}


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


@dataclass
class Lab:
    """Three hosts with sshd, and the launchers that were found."""

    hosts: Hosts
    ssh: Path
    need: Callable[[str], Path]
    results: dict[tuple[str, int], str] = field(default_factory=dict)

    def mpi(self, name: str, layout: str, program: Sequence[str], *, env: dict[str, str] | None = None,
            seconds: float = 120) -> Result:
        """Run `program` under the mpiexec called `name` on h1, with the ranks of `layout`."""
        return self.run("h1", [*self.mpiexec(name, layout, env or {}), *program], env=env, seconds=seconds)

    def mpiexec(self, name: str, layout: str, env: dict[str, str]) -> list[str]:
        slots, in_turn = LAYOUTS[layout]
        mpiexec, ranks = str(self.need(MPIS[name][0])), str(sum(slots.values()))
        if name.startswith("openmpi"):
            agent = ["--prtemca", "plm_ssh_agent"] if name == "openmpi5" else ["--mca", "plm_rsh_agent"]
            hosts = ",".join(f"{host}:{count}" for host, count in slots.items())
            pass_on = [word for variable in env for word in ("-x", variable)]
            return [mpiexec, "--allow-run-as-root", *agent, str(self.ssh), "--bind-to", "none", "--host", hosts,
                    *(["--map-by", "node"] if in_turn else []), *pass_on, "-n", ranks]
        hostfile = self.hosts.folder / f"hosts {layout}"
        # Hydra takes as many ranks from a host as it has slots; one slot each makes it go round.
        hostfile.write_text("".join(f"{host}:{1 if in_turn else count}\n" for host, count in slots.items()))
        return [mpiexec, "-launcher", "ssh", "-launcher-exec", str(self.ssh), "-f", str(hostfile), "-n", ranks]

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

    def torchrun(self, host: str, program: Sequence[str], *options: str) -> list[str]:
        return [sys.executable, "-m", "torch.distributed.run", *options, *program[1:]]

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

    def minimal_loss(self, ranks: int) -> str:
        """The final loss of 01_ddp_minimal.py on that many ranks of torchrun on one host, measured once."""
        key = ("loss", ranks)
        if key not in self.results:
            command = self.torchrun("h1", MINIMAL, "--standalone", "--nproc-per-node", str(ranks))
            done = self.run("h1", command)
            assert done.status == 0, done.output
            self.results[key] = done.line("final loss:")
        return self.results[key]
