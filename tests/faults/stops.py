"""Stops training jobs at random moments, as the scheduler does it, and looks at what they have saved before the kill.

python tests/faults/stops.py [--stops 100] [--seed 0]          on the Slurm of tests/cluster/slurm.py, as root
python tests/faults/stops.py --pbs [--stops 100] [--seed 0]    on the stand-in of tests/cluster/pbs.py

Each job has two ranks on two hosts. It is stopped by scancel, scontrol requeue or qdel: SIGTERM, and SIGKILL when the
grace time is up. The next job goes on in the same folder. For each stop a line tells the moment, the seconds from the
command until the save was finished and until the last process had ended, and what was found:

- A job that had begun to train says at which step it stopped (or that it was done), and by then has a checkpoint of
  that step, the newest one, before the grace time is up.
- One that was stopped earlier, while Python and the ranks started, ends as soon, and has touched no checkpoint.
- All checkpoints pass the checks of utils/checkpoint.py, and nothing half written is left.
- The job that comes next resumes after that very step; all that come to their end print the same digests. One that
  was cancelled does not come back by itself.

Exit status 0 if all stops were so. The disk is made slow, so that a save takes a second or so and can be met.
"""
from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import statistics
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for use by hand
from tests.cluster.pbs import HEAD, WORK, PbsCluster
from tests.cluster.slurm import SlurmCluster
from utils import checkpoint_files

ROOT = Path(__file__).resolve().parents[2]
FAULTS = ROOT / "tests" / "faults"
FSYNC_SECONDS = "0.1"  # a save has about eight of them
SURVIVE = [str(FAULTS / "slow_disk.py"), FSYNC_SECONDS, str(ROOT / "examples" / "05_survive.py"), "--epochs", "1",
           "--save-every", "5", "--step-seconds", "0.05"]
EVALUATES = [str(FAULTS / "slow_disk.py"), FSYNC_SECONDS, str(FAULTS / "evaluates.py")]
LANES = 3  # jobs at a time
KILL_WAIT = 5  # seconds; Slurm's default is 30
PATIENCE = 150.0  # seconds for what has to come
BEGUN = re.compile(r"^(?:starting|resuming after step (\d+))", re.MULTILINE)
ENDED = re.compile(r"^(?:stopped at step|done after) (\d+)", re.MULTILINE)


@dataclass(frozen=True)
class Moment:
    """When to stop a job: some time, up to `seconds`, after `sign` of its output and folder has come true."""

    name: str
    seconds: float
    sign: Callable[[str, Path], object]


def saving(output: str, folder: Path) -> bool:
    return bool(BEGUN.search(output)) and any(name.startswith(".saving-") for name in os.listdir(folder))


START_UP = Moment("start-up", 4.0, lambda output, folder: True)
FIRST_STEPS = Moment("first steps", 0.3, lambda output, folder: BEGUN.search(output))
ANY_STEP = Moment("any step", 2.0, lambda output, folder: BEGUN.search(output))
SAVE = Moment("save", 0.5, saving)
LAST_STEPS = Moment("last steps", 1.0, lambda output, folder: "step 40/48" in output)
EVALUATION = Moment("evaluation", 1.5, lambda output, folder: "evaluating" in output)
# Of each script the moments that it has, those of interest more than once.
MOMENTS = {tuple(SURVIVE): [START_UP, FIRST_STEPS, ANY_STEP, SAVE, SAVE, LAST_STEPS],
           tuple(EVALUATES): [START_UP, EVALUATION, EVALUATION]}


# The clusters ---------------------------------------------------------------------------------------------------------

class Cluster(ABC):
    """What is done here with either scheduler. grace: seconds from SIGTERM to SIGKILL. stops: commands that stop."""

    grace: float
    stops: Sequence[str]

    @abstractmethod
    def new_folder(self) -> str:
        """The path, on the hosts, of a folder for checkpoints that is not there yet."""

    @abstractmethod
    def local(self, path: str) -> Path:
        """Where this machine has it."""

    @abstractmethod
    def submit(self, words: Sequence[str]) -> str:
        """Start a script with its arguments on two hosts; returns the job's id."""

    @abstractmethod
    def state(self, job: str) -> str:
        """"waits", "runs" (until its last process is gone) or "ended"."""

    def running(self, job: str) -> bool:
        return self.state(job) == "runs"

    @abstractmethod
    def stop(self, job: str, how: str) -> None:
        """Give one of the commands that stop."""

    @abstractmethod
    def output_file(self, job: str) -> Path:
        """What the job writes to."""


class Slurm(Cluster):
    stops = ("scancel", "scontrol requeue")

    def __init__(self, cluster: SlurmCluster) -> None:
        self._cluster, self.grace = cluster, KILL_WAIT

    def new_folder(self) -> str:
        return str(self._cluster.work / f"run {time.monotonic_ns()}")

    def local(self, path: str) -> Path:
        return Path(path)

    def submit(self, words: Sequence[str]) -> str:
        asked = self._cluster.run(["sbatch", "--parsable", "-N2", "--ntasks-per-node=1", "--gpus-per-node=1",
                                   "--requeue", str(ROOT / "jobs" / "slurm_srun.sh"), *words],
                                  env={"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"})
        if asked.status != 0:
            raise RuntimeError(f"sbatch: {asked.output}")
        return asked.output.split()[-1]

    def state(self, job: str) -> str:
        return {"PENDING": "waits", "RUNNING": "runs", "COMPLETING": "runs"}.get(self._cluster.job(job)["JobState"],
                                                                                 "ended")

    def stop(self, job: str, how: str) -> None:
        self._cluster.run([*how.split(), job])

    def output_file(self, job: str) -> Path:
        return self._cluster.work / f"slurm-{job}.out"


class PbsStandin(Cluster):
    stops = ("qdel",)

    def __init__(self, cluster: PbsCluster) -> None:
        self._cluster, self.grace = cluster, cluster.kill_delay

    def new_folder(self) -> str:
        return f"{WORK}/run {time.monotonic_ns()}"

    def local(self, path: str) -> Path:
        return self._cluster.local(path)

    def submit(self, words: Sequence[str]) -> str:
        return self._cluster.submit("-V", "-l", "select=2:ncpus=1:mpiprocs=1", str(ROOT / "jobs" / "pbs_mpiexec.sh"),
                                    env={"PYTHON": sys.executable, "ARGS": " ".join(f"'{word}'" for word in words)})

    def state(self, job: str) -> str:
        return {"Q": "waits", "R": "runs", "E": "runs"}.get(self._cluster.state(job), "ended")

    def stop(self, job: str, how: str) -> None:
        self._cluster.run(HEAD, [*how.split(), job])

    def output_file(self, job: str) -> Path:
        return self.local(str(self._cluster.job(job)["Output_Path"]).partition(":")[2])


@contextlib.contextmanager
def raised(pbs: bool) -> Iterator[Cluster]:
    if pbs:
        with PbsCluster(2 * LANES) as stand_in:
            yield PbsStandin(stand_in)
    else:
        with SlurmCluster(2 * LANES, kill_wait=KILL_WAIT) as slurm:
            yield Slurm(slurm)


# The stops ------------------------------------------------------------------------------------------------------------

class Tally:
    """What the lanes have found so far; they share it."""

    def __init__(self, wanted: int) -> None:
        self._lock = threading.Lock()
        self._left = self.wanted = wanted
        self.wrong = 0
        self.saves: list[float] = []  # seconds
        self.ends: dict[str, int] = {}  # last lines of the runs that were done

    def take(self) -> bool:
        """Whether one more stop is to be made."""
        with self._lock:
            self._left -= 1
            return self._left >= 0

    def put_back(self) -> None:
        with self._lock:
            self._left += 1

    def give_up(self) -> None:
        """No more stops."""
        with self._lock:
            self._left = 0

    def done(self, line: str) -> None:
        with self._lock:
            self.ends[line] = self.ends.get(line, 0) + 1

    def stopped(self, line: str, seconds: float | None, problems: Sequence[str], output: str) -> None:
        with self._lock:
            self.wrong += bool(problems)
            if seconds is not None:
                self.saves.append(seconds)
            print(f"{line}{'; '.join(problems) or 'right'}", flush=True)
            if problems:
                print("    | ".join(["", *output[-3000:].splitlines(keepends=True)]), flush=True)


class Run:
    """A script in its folder of checkpoints, and the job in which it runs now, if any."""

    def __init__(self, cluster: Cluster, script: Sequence[str]) -> None:
        self._cluster, self._script = cluster, script
        self._anew()

    def _anew(self) -> None:
        self._path = self._cluster.new_folder()
        self.folder = self._cluster.local(self._path)
        self.step, self.found = 0, list[str]()  # of the newest checkpoint; the names of all
        self.back = ""  # a job that was put back into the queue

    def once(self, moment: Moment, how: str, delay: float, tally: Tally) -> bool:
        """Let a job run and stop it; whether it did not end by itself before."""
        job = self.back or self._cluster.submit([*self._script, "--folder", self._path])
        wait_until(lambda: self._cluster.running(job), f"job {job} to run", pause=0.3)
        file = self._cluster.output_file(job)
        before = len(read(file)) if self.back else 0
        self.back = ""

        def output() -> str:
            return read(file)[before:]

        def gone() -> bool:
            return not named_in_processes(self._path) and not self._cluster.running(job)

        wait_until(lambda: moment.sign(output(), self.folder) or gone(), f"the {moment.name} of job {job}")
        time.sleep(delay)
        if not self._cluster.running(job):
            self._after_its_end(output(), tally)
            return False
        start = time.monotonic()
        self._cluster.stop(job, how)
        saved: float | None = None
        while named_in_processes(self._path) and time.monotonic() < start + PATIENCE:
            if saved is None and self._is_saved(output()):
                saved = time.monotonic() - start
            time.sleep(0.02)
        ended = time.monotonic() - start
        wait_until(gone, f"job {job} to end after {how}", pause=0.3)
        text = output()
        if saved is None and self._is_saved(text):
            saved = ended
        problems = list(self._problems(text, saved, ended))
        if (state := self._cluster.state(job)) != ("waits" if "requeue" in how else "ended"):
            problems.append(f"after {how} it {state}")
        took = f"saved {saved:5.2f} s" if saved is not None else "not begun    "
        tally.stopped(f"{how:16}  {moment.name:11}  {took}  ended {ended:5.2f} s  step {self.step:2}  ",
                      saved, problems, text)
        if "requeue" in how:
            self.back = job
        elif (last := re.search(r"^done after.*", text, re.MULTILINE)) is not None:
            tally.done(last[0])
            self._anew()
        return True

    def _is_saved(self, output: str) -> bool:
        ended = ENDED.search(output)
        return ended is not None and newest(checkpoint_files.names(self.folder)) == int(ended[1])

    def _after_its_end(self, output: str, tally: Tally) -> None:
        last = re.search(r"^done after.*", output, re.MULTILINE)
        if last is None:
            raise RuntimeError(f"a job ended before it was stopped:\n{output}")
        tally.done(last[0])
        self._anew()

    def _problems(self, output: str, saved: float | None, ended: float) -> Iterator[str]:
        """What is wrong after a stop."""
        begun, last = BEGUN.search(output), ENDED.search(output)
        names = checkpoint_files.names(self.folder) if self.folder.is_dir() else []
        if begun is None:
            if names != self.found:
                yield f"it had not begun, and the checkpoints are {names} instead of {self.found}"
            if ended >= self._cluster.grace:
                yield "it had not begun, and had to be killed"
        else:
            if int(begun[1] or 0) != self.step:
                yield f"it began after step {begun[1] or 0} instead of {self.step}"
            if last is None:
                yield "it does not say that it has stopped"
            elif newest(names) != int(last[1]):
                yield f"it stopped at step {last[1]}, and the newest checkpoint is of step {newest(names)}"
            elif saved is None or saved >= self._cluster.grace:
                yield f"the save was not finished within {self._cluster.grace:g} s"
        yield from damage(self.folder)
        self.step, self.found = newest(names), names


def lane(cluster: Cluster, tally: Tally, rng: random.Random) -> None:
    """One job after the other, until there were enough stops."""
    runs = {script: Run(cluster, script) for script in MOMENTS}
    try:
        while tally.take():
            back = [script for script, run in runs.items() if run.back]
            script = (back or rng.choices(list(MOMENTS), weights=[3, 1]))[0]
            moment = rng.choice(MOMENTS[script])
            if not runs[script].once(moment, rng.choice(cluster.stops), rng.uniform(0, moment.seconds), tally):
                tally.put_back()
    finally:
        tally.give_up()


def newest(names: Sequence[str]) -> int:
    return checkpoint_files.step_of(names[-1]) if names else 0


def damage(folder: Path) -> Iterator[str]:
    """What the checks of utils/checkpoint.py find in a folder, and what should not be there."""
    for name in sorted(os.listdir(folder)) if folder.is_dir() else []:
        if name not in checkpoint_files.names(folder):
            yield f"{name} was left behind"
            continue
        try:
            for entry in checkpoint_files.read_manifest(folder / name)["files"]:
                checkpoint_files.read_part(folder / name, entry)
        except (checkpoint_files.Damaged, checkpoint_files.Unreadable, OSError) as error:
            yield f"{name}: {error}"


def named_in_processes(path: str) -> bool:
    """Whether a process has this path in its arguments."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if path.encode() in (process / "cmdline").read_bytes():
                return True
    return False


def read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return ""


def wait_until(condition: Callable[[], object], what: str, pause: float = 0.05) -> None:
    limit = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > limit:
            raise RuntimeError(f"waiting for {what}: nothing after {PATIENCE:.0f} s")
        time.sleep(pause)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stops", type=int, default=100)
    parser.add_argument("--pbs", action="store_true", help="on the stand-in of PBS instead of Slurm")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    args = parser.parse_args()
    tally = Tally(args.stops)
    with raised(args.pbs) as cluster, ThreadPoolExecutor(LANES) as lanes:
        for future in [lanes.submit(lane, cluster, tally, random.Random(f"{args.seed} {number}"))
                       for number in range(LANES)]:
            future.result()
        grace = cluster.grace
    for line, times in tally.ends.items():
        print(f"{times} times: {line}")
    print(f"{args.stops - tally.wrong} of {args.stops} stops were right; {len(tally.saves)} of them had something to "
          f"save. Seconds from the command until the save was finished, of {grace:g}: median "
          f"{statistics.median(tally.saves or [0]):.2f}, longest {max(tally.saves, default=0):.2f}")
    return int(tally.wrong > 0 or len(tally.ends) > 2)


if __name__ == "__main__":
    sys.exit(main())
