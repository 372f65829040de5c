"""Stop training jobs at random moments, as a scheduler does, and check what they have saved.

python tests/faults/stops.py [--stops 100] [--seed 0]          real Slurm on this machine, as root
python tests/faults/stops.py --pbs [--stops 100] [--seed 0]    the PBS stand-in

Each job has two ranks on two hosts. scancel, scontrol requeue or qdel stops it: SIGTERM, and SIGKILL
when the grace time is over. The next job continues in the same folder. For each stop a line shows
the moment, the seconds until the save was complete and until the last process had ended, and the
problems. A stop is right if:

- A job that had begun to train prints the step at which it stopped (or that it was done), and has
  saved that step, as the newest checkpoint, before the grace time is over.
- A job that was stopped earlier, while Python and the ranks started, ends as soon and has changed no
  checkpoint.
- All checkpoints are valid, and nothing half-written is left.
- The next job resumes after that step, and all jobs that come to their end print the same digest. A
  cancelled job does not come back by itself.

The exit status is 0 if all stops were right. A slow disk makes a save take about a second.
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
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for use by hand
from tests.cluster.pbs import HEAD, WORK, PbsCluster
from tests.cluster.slurm import SlurmCluster
from utils.checkpoint import storage
from utils.checkpoint.rank_file import read_rank_file

ROOT = Path(__file__).resolve().parents[2]
FAULTS = ROOT / "tests" / "faults"
PARALLEL_JOBS = 3
WAIT_SECONDS = 150.0
KILL_WAIT = 5  # seconds; Slurm's default is 30
FSYNC_SECONDS = "0.1"  # a save calls fsync about eight times
BEGUN = re.compile(r"^(?:starting|resuming after step (\d+))", re.MULTILINE)
ENDED = re.compile(r"^(?:stopped at step|done after) (\d+)", re.MULTILINE)
DONE = re.compile(r"^done after.*", re.MULTILINE)


# What is stopped, and when ------------------------------------------------------------------------

@dataclass(frozen=True)
class Moment:
    """A random time, up to `seconds`, after the output and the folder of a job show a sign."""

    name: str
    seconds: float
    sign: Callable[[str, Path], object]


@dataclass(frozen=True)
class Training:
    """A command, and the moments at which to stop it."""

    words: Sequence[str]
    moments: Sequence[Moment]
    weight: int  # how often it is chosen


def is_saving(output: str, folder: Path) -> bool:
    names = os.listdir(folder) if BEGUN.search(output) else []
    return any(name.startswith(".saving-") for name in names)


START_UP = Moment("start-up", 4.0, lambda output, folder: True)
FIRST_STEPS = Moment("first steps", 0.3, lambda output, folder: BEGUN.search(output))
ANY_STEP = Moment("any step", 2.0, lambda output, folder: BEGUN.search(output))
SAVE = Moment("save", 0.5, is_saving)
LAST_STEPS = Moment("last steps", 1.0, lambda output, folder: "step 40/48" in output)
EVALUATION = Moment("evaluation", 1.5, lambda output, folder: "evaluating" in output)

SLOW_DISK = [str(FAULTS / "slow_disk.py"), FSYNC_SECONDS]
SURVIVE = Training(
    [*SLOW_DISK, str(FAULTS / "survive.py"), "--epochs", "1", "--save-every", "5",
     "--step-seconds", "0.05"],
    [START_UP, FIRST_STEPS, ANY_STEP, SAVE, SAVE, LAST_STEPS], weight=3)
EVALUATES = Training(
    [*SLOW_DISK, str(FAULTS / "evaluates.py")], [START_UP, EVALUATION, EVALUATION], weight=1)


# The clusters -------------------------------------------------------------------------------------

class Cluster(Protocol):
    """grace: seconds from SIGTERM to SIGKILL. stops: the commands that stop a job."""

    grace: float
    stops: Sequence[str]

    def new_folder(self) -> str:
        """Return the path, on the hosts, of a folder that does not exist yet."""

    def local(self, path: str) -> Path:
        """Return where this machine sees a path of the hosts."""

    def submit(self, words: Sequence[str]) -> str:
        """Submit a command on two hosts; return the job id."""

    def state(self, job: str) -> str:
        """Return "waits", "runs" (until its last process has ended) or "ended"."""

    def stop(self, job: str, command: str) -> None: ...

    def output_file(self, job: str) -> Path: ...


class Slurm:
    grace: float = KILL_WAIT
    stops: Sequence[str] = ("scancel", "scontrol requeue")

    def __init__(self, cluster: SlurmCluster) -> None:
        self._cluster = cluster

    def new_folder(self) -> str:
        return str(self._cluster.work / f"run {time.monotonic_ns()}")

    def local(self, path: str) -> Path:
        return Path(path)

    def submit(self, words: Sequence[str]) -> str:
        return self._cluster.sbatch(
            "-N2", "--ntasks-per-node=1", "--gpus-per-node=1", "--requeue",
            str(ROOT / "jobs" / "slurm.sh"), *words,
            env={"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"})

    def state(self, job: str) -> str:
        states = {"PENDING": "waits", "RUNNING": "runs", "COMPLETING": "runs"}
        return states.get(self._cluster.job(job)["JobState"], "ended")

    def stop(self, job: str, command: str) -> None:
        self._cluster.run([*command.split(), job])

    def output_file(self, job: str) -> Path:
        return self._cluster.work / f"slurm-{job}.out"


class PbsStandin:
    stops: Sequence[str] = ("qdel",)

    def __init__(self, cluster: PbsCluster) -> None:
        self._cluster = cluster
        self.grace = cluster.kill_delay

    def new_folder(self) -> str:
        return f"{WORK}/run {time.monotonic_ns()}"

    def local(self, path: str) -> Path:
        return self._cluster.local(path)

    def submit(self, words: Sequence[str]) -> str:
        arguments = " ".join(f"'{word}'" for word in words)
        return self._cluster.submit(
            "-V", "-l", "select=2:ncpus=1:mpiprocs=1", str(ROOT / "jobs" / "pbs.sh"),
            env={"PYTHON": sys.executable, "ARGS": arguments})

    def state(self, job: str) -> str:
        return {"Q": "waits", "R": "runs", "E": "runs"}.get(self._cluster.state(job), "ended")

    def stop(self, job: str, command: str) -> None:
        self._cluster.run(HEAD, [command, job])

    def output_file(self, job: str) -> Path:
        return self.local(str(self._cluster.job(job)["Output_Path"]).partition(":")[2])


@contextlib.contextmanager
def start_cluster(pbs: bool) -> Iterator[Cluster]:
    if pbs:
        with PbsCluster(2 * PARALLEL_JOBS) as stand_in:
            yield PbsStandin(stand_in)
    else:
        with SlurmCluster(2 * PARALLEL_JOBS, kill_wait=KILL_WAIT) as slurm:
            yield Slurm(slurm)


# The stops ----------------------------------------------------------------------------------------

@dataclass
class Results:
    """What the threads have found so far; they share it."""

    remaining: int
    wrong: int = 0
    save_seconds: list[float] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)  # last lines of the jobs that were done
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, count: int = 1) -> bool:
        """Take a stop from those that remain; return False if there is none."""
        with self.lock:
            self.remaining -= count
            return self.remaining >= 0

    def add(self, line: str, saved: float | None, problems: Sequence[str], output: str) -> None:
        with self.lock:
            self.wrong += bool(problems)
            self.save_seconds += [] if saved is None else [saved]
            print(f"{line}{'; '.join(problems) or 'right'}", flush=True)
            if problems:
                print(re.sub("^", "    | ", output[-3000:], flags=re.MULTILINE), flush=True)


class Run:
    """A training in its folder of checkpoints, which one job after the other continues."""

    def __init__(self, cluster: Cluster, training: Training, results: Results) -> None:
        self._cluster, self.training, self._results = cluster, training, results
        self._start_again()

    def _start_again(self) -> None:
        self._path = self._cluster.new_folder()
        self._folder = self._cluster.local(self._path)
        self._checkpoints: list[str] = []
        self._step = 0  # of the newest checkpoint
        self.requeued_job = ""

    def stop_once(self, moment: Moment, command: str, delay: float) -> bool:
        """Let a job run, and stop it; return False if it has ended by itself before."""
        cluster, path = self._cluster, self._path
        job = self.requeued_job or cluster.submit([*self.training.words, "--folder", path])
        wait_until(lambda: cluster.state(job) == "runs", f"job {job} to run", pause=0.3)
        file = cluster.output_file(job)
        earlier = len(read(file)) if self.requeued_job else 0
        self.requeued_job = ""

        def output() -> str:
            return read(file)[earlier:]

        def is_gone() -> bool:
            return not is_in_command_lines(path) and cluster.state(job) != "runs"

        wait_until(lambda: moment.sign(output(), self._folder) or is_gone(),
                   f"the {moment.name} of job {job}", pause=0.05)
        time.sleep(delay)
        if cluster.state(job) != "runs":
            self._note_end(output())
            return False

        start = time.monotonic()
        cluster.stop(job, command)
        saved = None
        while is_in_command_lines(path) and time.monotonic() < start + WAIT_SECONDS:
            if saved is None and self._is_saved(output()):
                saved = time.monotonic() - start
            time.sleep(0.02)
        ended = time.monotonic() - start
        wait_until(is_gone, f"job {job} to end after {command}", pause=0.3)
        if saved is None and self._is_saved(output()):
            saved = ended

        problems = list(self._problems(output(), saved, ended))
        expected = "waits" if "requeue" in command else "ended"
        if (state := cluster.state(job)) != expected:
            problems.append(f"after {command} it {state}")
        took = "not begun    " if saved is None else f"saved {saved:5.2f} s"
        self._results.add(
            f"{command:16}  {moment.name:11}  {took}  ended {ended:5.2f} s  step {self._step:2}  ",
            saved, problems, output())

        if "requeue" in command:
            self.requeued_job = job
        elif DONE.search(output()):
            self._note_end(output())
        return True

    def _is_saved(self, output: str) -> bool:
        ended = ENDED.search(output)
        if ended is None:
            return False
        return newest_step(storage.checkpoint_names(self._folder)) == int(ended[1])

    def _note_end(self, output: str) -> None:
        last = DONE.search(output)
        if last is None:
            raise RuntimeError(f"a job ended before it was stopped:\n{output}")
        with self._results.lock:
            self._results.ends[last[0]] += 1
        self._start_again()

    def _problems(self, output: str, saved: float | None, ended: float) -> Iterator[str]:
        begun, last = BEGUN.search(output), ENDED.search(output)
        names = storage.checkpoint_names(self._folder) if self._folder.is_dir() else []
        grace = self._cluster.grace
        if begun is None:
            if names != self._checkpoints:
                yield f"it had not begun, and has {names} instead of {self._checkpoints}"
            if ended >= grace:
                yield "it had not begun, and was killed"
        else:
            if int(begun[1] or 0) != self._step:
                yield f"it began after step {begun[1] or 0} instead of {self._step}"
            if last is None:
                yield "it does not report that it has stopped"
            elif newest_step(names) != int(last[1]):
                yield f"it stopped at step {last[1]}, and the newest checkpoint is of step " \
                      f"{newest_step(names)}"
            elif saved is None or saved >= grace:
                yield f"the save was not complete within {grace:g} s"
        yield from damage(self._folder)
        self._step, self._checkpoints = newest_step(names), names


def newest_step(names: Sequence[str]) -> int:
    return storage.step_of(names[-1]) if names else 0


def damage(folder: Path) -> Iterator[str]:
    """Yield what is invalid in a folder of checkpoints, and what should not be there."""
    for name in sorted(os.listdir(folder)) if folder.is_dir() else []:
        if name not in storage.checkpoint_names(folder):
            yield f"{name} was left behind"
            continue
        try:
            for entry in storage.read_manifest(folder / name)["files"]:
                read_rank_file(folder / name, entry)
        except (storage.Damaged, storage.Unreadable, OSError) as error:
            yield f"{name}: {error}"


def is_in_command_lines(path: str) -> bool:
    """Return whether a process has this path in its arguments."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if path.encode() in (process / "cmdline").read_bytes():
                return True
    return False


def read(path: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        return path.read_text(errors="replace")
    return ""


def wait_until(condition: Callable[[], object], what: str, pause: float) -> None:
    """Poll with a pause in seconds, since a condition may ask the scheduler."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"waiting for {what}: nothing after {WAIT_SECONDS:.0f} s")
        time.sleep(pause)


def stop_jobs(cluster: Cluster, results: Results, random_numbers: random.Random) -> None:
    """Run and stop one job after the other while stops remain."""
    runs = [Run(cluster, training, results) for training in (SURVIVE, EVALUATES)]
    try:
        while results.take():
            requeued = [run for run in runs if run.requeued_job]
            weights = [run.training.weight for run in runs]
            run = (requeued or random_numbers.choices(runs, weights))[0]
            moment = random_numbers.choice(run.training.moments)
            command = random_numbers.choice(cluster.stops)
            if not run.stop_once(moment, command, random_numbers.uniform(0, moment.seconds)):
                results.take(-1)
    except BaseException:
        results.remaining = 0  # the other threads end as well
        raise


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stops", type=int, default=100)
    parser.add_argument("--pbs", action="store_true", help="the PBS stand-in instead of Slurm")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    args = parser.parse_args()

    results = Results(args.stops)
    with start_cluster(args.pbs) as cluster, ThreadPoolExecutor(PARALLEL_JOBS) as threads:
        seeds = [random.Random(f"{args.seed} {number}") for number in range(PARALLEL_JOBS)]
        futures = [threads.submit(stop_jobs, cluster, results, seed) for seed in seeds]
        for future in futures:
            future.result()
        grace = cluster.grace

    for line, times in results.ends.items():
        print(f"{times} times: {line}")
    saves = results.save_seconds
    print(f"{args.stops - results.wrong} of {args.stops} stops were right; {len(saves)} of them had "
          f"something to save. Seconds until the save was complete, of {grace:g}: median "
          f"{statistics.median(saves or [0]):.2f}, longest {max(saves, default=0):.2f}")
    each_digest_once = len(results.ends) <= 2  # one of each training
    return int(results.wrong > 0 or not each_digest_once)


if __name__ == "__main__":
    sys.exit(main())
