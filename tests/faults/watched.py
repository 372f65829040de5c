"""Run trainings that do not know the kit under `ddpkit launch -n 2`, let rank 1 go wrong, and judge what is said.

tests/faults/watched.py --env FOLDER [--programs NAME ...] [--modes NAME ...] [--jobs N] [--pairs N] [--keep FOLDER]

Run it by hand: it takes about half an hour. --env names a folder for a virtual environment outside of the repository:
where it is missing, the one that runs this program is copied there, and the public packages are added, while torch
stays as it is. Each program (unchanged_programs.py) runs once for each mode:

  ok       healthy: every rank prints the same loss, to the last bit, with and without --no-watch
  raise    rank 1 raises an exception         kill     rank 1 is killed
  sleep    rank 1 sleeps in a step            skip     rank 0 enters a barrier that rank 1 does not enter
  early    rank 1 leaves by sys.exit(0)

A run is right when the closing line names rank 1 and the line (or says that it cannot be told, for skip), the exit
status fits, and no process is left. --pairs: how long a start takes with and without the watch, in pairs.
"""
from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from tests.faults.unchanged_programs import PROGRAMS  # noqa: E402

PACKAGES = ("transformers", "accelerate", "lightning", "hydra-core")
FAULTS = {
    "ok": "",
    "raise": "if rank == 1 and step == 3: raise ValueError('bad sample 17')",
    "kill": "if rank == 1 and step == 3: os.kill(os.getpid(), signal.SIGKILL)",
    "sleep": "if rank == 1 and step == 3: time.sleep(600)",
    "skip": "if rank == 0 and step == 3: dist.barrier()",
    "early": "if rank == 1 and step == 3: sys.exit(0)",
}
CLOSING = {  # {line}: that of the fault
    "raise": r"rank 1 on \S+ failed: ValueError: bad sample 17",
    "kill": r"rank 1 (on \S+ )?was ended by SIGKILL",
    "sleep": r"rank 1 on \S+ .*did not enter .*train\.py, line {line}\b",
    "skip": r"(rank 1 on |(?=.*cannot be told)).*train\.py, line {line}\b",
    "early": r"(.* and )?rank 1 on \S+ left by sys\.exit\(\) at .*train\.py, line {line}\b",
}
# Groups of its own are left alone: the launch sees only how mp.spawn() of its rank 1 ends.
CLOSING_OF_SPAWN = {
    "raise": r"rank 1 on \S+ failed: ProcessRaisedException: .*Process 1",
    "kill": r"rank 1 on \S+ failed: ProcessExitedException: process 1 terminated with signal SIGKILL",
    "sleep": r"rank 1 on \S+ failed: Process(Raised|Exited)Exception",
    "skip": r"rank 1 on \S+ failed: Process(Raised|Exited)Exception",
    "early": r"rank 1 on \S+ failed: Process(Raised|Exited)Exception",
}
HANG_SECONDS, LONGEST_SECONDS = 8, 240
MARK = "DDPKIT_TEST_RUN"  # in the environment of every process of a run


class Run(NamedTuple):
    """A launch that has ended. left: processes that still ran a second later."""

    status: int
    stdout: str
    stderr: str
    seconds: float
    left: tuple[int, ...]

    @property
    def closing(self) -> str:
        lines = [line for line in self.stderr.splitlines() if line.startswith("ddpkit launch: ")]
        return lines[-1].removeprefix("ddpkit launch: ").removeprefix("error: ") if lines else ""

    @property
    def losses(self) -> list[str]:
        return sorted(line for line in self.stdout.splitlines() if line.startswith("loss "))


def make_environment(folder: Path) -> Path:
    """Return the Python of an environment with the public packages; make it where it is missing."""
    python = folder / "env" / "bin" / "python"
    if (folder / "complete").exists():
        return python
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(sys.prefix, folder / "env", symlinks=True, dirs_exist_ok=True)
    import torch

    (folder / "constraints.txt").write_text(f"torch=={torch.__version__}\n")
    install = [python, "-m", "pip", "install", "-q", "-c", folder / "constraints.txt"]
    subprocess.run([*install, *PACKAGES], check=True)
    (folder / "complete").touch()
    return python


def marked(mark: str) -> tuple[int, ...]:
    """Return the processes of a run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return tuple(found)


def launch(python: Path, folder: Path, source: str, *options: str, hang_seconds: int = HANG_SECONDS,
           variables: Mapping[str, str] | None = None) -> Run:
    """Run a program on two ranks, and see that nothing of it is left."""
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(source)
    words = [python, ROOT / "scripts" / "launch.py", "-n", "2", "--hang-timeout", str(hang_seconds), *options]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("DDPKIT", "PYTHON"))}
    more = {MARK: folder.as_posix(), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore",
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    began = time.monotonic()
    with open(folder / "stdout", "w") as out, open(folder / "stderr", "w") as errors:
        process = subprocess.Popen([*words, "train.py"], cwd=folder, stdout=out, stderr=errors,
                                   env={**clean, **more, **(variables or {})})
        try:
            process.wait(LONGEST_SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
    seconds = time.monotonic() - began
    limit = time.monotonic() + 5
    while (left := marked(folder.as_posix())) and time.monotonic() < limit:
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, 9)
    return Run(process.returncode, (folder / "stdout").read_text(), (folder / "stderr").read_text(), seconds, left)


def source_of(program: str, mode: str) -> tuple[str, int]:
    """Return the program with the fault in it, and the line of the fault."""
    source = PROGRAMS[program]
    line = source[: source.index("# FAULT")].count("\n") + 1
    return source.replace("# FAULT", FAULTS[mode] or "pass"), line


def judge(program: str, mode: str, line: int, run: Run, without: Run | None) -> str:
    """Return what is wrong with a run; "" where it is right."""
    if run.left:
        return f"left behind: {run.left}"
    if "are not watched" in run.stderr:
        return "not watched: " + next(text for text in run.stderr.splitlines() if "not watched" in text)
    if (program == "spawn") != ("--hang-timeout does not apply" in run.stderr):
        return "it is not said whether --hang-timeout applies"
    if mode == "ok":
        if run.status or len(run.losses) < 2:
            return f"exit status {run.status}: {run.closing}"
        if program != "spawn" and "are watched" not in run.stderr:
            return "not watched"
        return "" if without is None or run.losses == without.losses else f"{run.losses} without {without.losses}"
    if not run.status or (mode == "kill" and program != "spawn" and run.status != 137):
        return f"exit status {run.status}: {run.closing}"
    pattern = (CLOSING_OF_SPAWN if program == "spawn" else CLOSING)[mode].replace("{line}", str(line))
    if not re.match(pattern, run.closing):
        return run.closing or "no closing line"
    if mode == "raise" and f"train.py\", line {line}, in" not in run.stderr:
        return "no traceback"
    return ""


def compare_starts(python: Path, folder: Path, pairs: int) -> str:
    """Return how much longer a start and a few steps take with the watch: the median of pairs."""
    ratios, source = [], source_of("plain", "ok")[0]
    for index in range(pairs):
        seconds = {}
        for option in (("--no-watch",), ()) if index % 2 else ((), ("--no-watch",)):
            seconds[option] = launch(python, folder / f"pair{index}{len(option)}", source, *option).seconds
        ratios.append(seconds[()] / seconds["--no-watch",])
    quartiles = statistics.quantiles(ratios, n=4)
    return f"a start takes {quartiles[1]:.3f} times as long ({pairs} pairs, {quartiles[0]:.3f} to {quartiles[2]:.3f})"


def main() -> int:
    description, *_ = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--env", type=Path, required=True, metavar="FOLDER", help="for the public packages")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--modes", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--pairs", type=int, default=0, help="compare so many starts")
    parser.add_argument("--keep", type=Path, default=Path("/tmp/ddpkit-watched"), help="for the output of the runs")
    args = parser.parse_args()
    python = make_environment(args.env.absolute())
    shutil.rmtree(args.keep, ignore_errors=True)

    def one(case: tuple[str, str]) -> bool:
        program, mode = case
        source, line = source_of(program, mode)
        folder = args.keep.absolute() / f"{program}-{mode}"
        run, without = launch(python, folder, source), None
        if mode == "ok":
            without = launch(python, folder.with_name(folder.name + "-off"), source, "--no-watch")
        wrong = judge(program, mode, line, run, without)
        print(f"{program:<15}{mode:<7}{run.status:>4}{run.seconds:>6.1f} s  {wrong or 'right: ' + run.closing}",
              flush=True)
        return not wrong

    cases = [(program, mode) for program in args.programs for mode in args.modes]
    with ThreadPoolExecutor(args.jobs) as pool:
        right = list(pool.map(one, cases))
    print(f"{sum(right)} of {len(right)} right")
    if args.pairs:
        print(compare_starts(python, args.keep.absolute(), args.pairs))
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
