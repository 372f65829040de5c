"""Jobs of Slurm and PBS as tests submit them, and the ranks that their output reports."""
from __future__ import annotations

import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.hosts import wait_until
from tests.cluster.pbs import HEAD, LOGIN_PATH, WORK, Pbs
from tests.cluster.slurm import SlurmCluster
from tests.launch.launchers import ROOT, Result

TRAIN = "my rank.py"
RANK = f"import runpy; runpy.run_path({str(ROOT / 'tests' / 'rank_program.py')!r}, run_name='__main__')\n"
LINE = re.compile(r"^(?:.*: )?rank (\d+) of (\d+), local (\d+) of (\d+), on (\S+), by (\S+), ", re.MULTILINE)


def ranks_on(output: str) -> dict[str, int]:
    """Return the number of ranks per host; all ranks must be there, with the right numbers."""
    found = sorted((int(rank), int(size), int(local), int(local_size), host)
                   for rank, size, local, local_size, host, _ in LINE.findall(output))
    assert [(rank, size) for rank, size, *_ in found] == [(rank, len(found)) for rank in range(len(found))], output
    count = Counter(host for *_, host in found)
    for rank, (_, _, local, local_size, host) in enumerate(found):
        assert local == sum(other[-1] == host for other in found[:rank]), output
        assert local_size == count[host], output
    return dict(count)


class Jobs:
    """A new folder with a training script, whose names have spaces, and what its classes do there with a scheduler.

    run: run a command on the login host. start: submit the ready script jobs/slurm.sh or jobs/pbs.sh; return the id.
    ended: wait until a job has ended; return its exit status and output. path: of the folder, on the hosts.
    """

    scheduler: str
    path: str
    folder: Path  # where this machine has it

    def ready_script(self) -> str:
        """Copy jobs/slurm.sh or jobs/pbs.sh into the folder, for a kit that is not installed; return its path."""
        name = f"{self.scheduler}.sh"
        text = (ROOT / "jobs" / name).read_text().replace('source ".venv/bin/activate"', ": set-up lines")
        launch = f"exec {shlex.quote(str(ROOT / 'scripts' / 'launch.py'))}"
        (self.folder / name).write_text(text.replace("exec ddpkit launch", launch))
        (self.folder / name).chmod(0o755)
        return f"{self.path}/{name}"

    def submit_py(self, *words: str, seconds: float = 120) -> Result:
        return self.run([sys.executable, str(ROOT / "utils"), "submit", *words], seconds=seconds)

    def submit(self, *words: str, seconds: float = 120) -> Result:
        """Submit with submit.py. Without the checks: the nodes share /tmp, which is an error elsewhere."""
        return self.submit_py("run", "--site", f"generic-{self.scheduler}", "--no-check", *words, seconds=seconds)


class SlurmJobs(Jobs):
    scheduler = "slurm"

    def __init__(self, slurm: SlurmCluster) -> None:
        self.cluster = slurm
        self.path = f"{slurm.work}/jobs of {time.monotonic_ns()}"
        self.folder = Path(self.path)
        self.folder.mkdir()
        (self.folder / TRAIN).write_text(RANK)

    def run(self, words: Sequence[str], *, seconds: float = 120) -> Result:
        return self.cluster.run(words, cwd=self.folder, seconds=seconds, env={"PYTHON": sys.executable})

    def start(self, options: Sequence[str], *arguments: str) -> str:
        done = self.run(["sbatch", "--parsable", *options, self.ready_script(), *arguments])
        assert done.status == 0, done.output
        return done.output.split()[-1]

    def ended(self, job_id: str) -> Result:
        job = self.cluster.wait(job_id, 120)
        return Result(int(job["ExitCode"].partition(":")[0]), self.cluster.output(job_id))


class PbsJobs(Jobs):
    scheduler = "pbs"

    def __init__(self, pbs: Pbs) -> None:
        self.cluster = pbs
        self.path = f"{WORK}/jobs of {time.monotonic_ns()}"
        self.folder = pbs.local(pbs.write(f"{self.path}/{TRAIN}", RANK)).parent

    def run(self, words: Sequence[str], *, seconds: float = 120) -> Result:
        return self.cluster.run(HEAD, words, cwd=self.path, seconds=seconds, env={"PYTHON": sys.executable})

    def start(self, options: Sequence[str], *arguments: str) -> str:
        script, env = self.ready_script(), {"PATH": f"{Path(sys.executable).parent}:{LOGIN_PATH}"}
        if shlex.join(arguments) == " ".join(arguments):
            return self.cluster.submit(*options, script, cwd=self.path, env={**env, "ARGS": " ".join(arguments)})
        own = ["-l", "place=scatter", "-l", "walltime=600", "-j", "oe", "-k", "doe"]  # qsub does not read the script
        return self.cluster.submit(*own, *options, "--", script, *arguments, cwd=self.path, env=env)

    def ended(self, job_id: str) -> Result:
        job = self.cluster.wait(job_id, 120)
        wait_until(lambda: bool(self.cluster.output(job)), f"the output of {job_id}")
        return Result(int(job.get("Exit_status", -999)), self.cluster.output(job))
