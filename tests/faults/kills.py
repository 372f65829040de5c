"""Run a training script, kill its ranks at random moments, and start it again until it is done.

python tests/faults/kills.py [--kills 50] [--ranks 2] [--preload MODULE] script.py [...]
python tests/faults/kills.py [--kills 50] [--ranks 2] --log examples/03_text_lm.py [...]

The script is given `--folder FOLDER` for its checkpoints, and its ranks end with lines that start with "done". This
process imports torch once and forks the ranks, so a start takes a tenth of a second. All processes of a run, DataLoader
workers among them, get SIGKILL at the same moment: two seconds at most after the start, or half a second at most after
another checkpoint. Prints these lines of every run that was done, and after how many kills they were those of the run
that was never killed. Exit status 0 if that is so after all of them.

--log compares the loss of each step in the log of example 03 instead. After every kill, the complete lines of the log
have to be the steps 1, 2, 3, ...
"""
from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import random
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ["OMP_NUM_THREADS"] = "1"  # sums in the same order in each start
from tests.faults import quick_imports

# isort: split
import torch._dynamo  # by the first DDP or optimizer
import torch.distributed
import torch.nn.parallel
import torch.utils.data  # noqa: F401 - imported once for all runs

from utils.metrics.run_log import FILE_NAME, parse_line

quick_imports.done()

ROOT = Path(__file__).resolve().parents[2]
RUN_SECONDS = 300.0
LOG_OPTIONS = ["--backend", "gloo", "--text", str(ROOT / "README.md"), "--layers", "1", "--heads", "2", "--width", "32",
               "--context", "32", "--save-every", "7", "--eval-every", "50", "--log-every", "1000", "--sample", "0",
               "--steps", "400"]


def start_rank(rank: int, ranks: int, port: int, script: str, arguments: Sequence[str], output: Path) -> int:
    """Fork a process group that is rank `rank`; return its process id."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setpgid(0, 0)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks),
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        target = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(target, 1)
        os.dup2(target, 2)
        sys.argv = [script, *arguments]
        try:
            runpy.run_path(script, run_name="__main__")
            status = 0
        except SystemExit as leaving:
            status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        except BaseException:
            sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run(ranks: int, script: str, arguments: Sequence[str], output: Path, strikes: Callable[[], bool] = lambda: False,
        expected: Sequence[int] = (0,)) -> bool:
    """Start all ranks once; return whether they ended before `strikes` returned True, with an expected status."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    pids = [start_rank(rank, ranks, port, script, arguments, output) for rank in range(ranks)]
    waiting, limit = set(pids), time.monotonic() + RUN_SECONDS
    statuses = []
    while waiting and time.monotonic() < limit and not strikes():
        for pid in list(waiting):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                waiting.discard(pid)
                statuses.append(os.waitstatus_to_exitcode(status))
        time.sleep(0.002)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    for pid in waiting:
        os.waitpid(pid, 0)
    if waiting and time.monotonic() >= limit or not waiting and not set(statuses) <= set(expected):
        sys.exit(f"the ranks ended with {statuses}, {len(waiting)} still running after "
                 f"{RUN_SECONDS:.0f} s:\n{output.read_text(errors='replace')[-4000:]}")
    return not waiting


def killer(folder: Path) -> Callable[[], bool]:
    """Return a function that returns True from a random moment on: after the start, or after another checkpoint."""
    def checkpoints() -> set[str]:
        return {path.name for path in folder.glob("step-*")}

    saved = checkpoints()
    at = time.monotonic() + random.uniform(0, 2) if random.random() < 0.3 else None

    def strikes() -> bool:
        nonlocal at
        if at is None and checkpoints() != saved:
            at = time.monotonic() + random.uniform(0, 0.5)
        return at is not None and time.monotonic() >= at

    return strikes


def done_lines(output: Path) -> str:
    """What the ranks printed at the end. A kill after it makes them print it again."""
    lines = output.read_text(errors="replace").splitlines()
    return " | ".join(sorted({line for line in lines if line.startswith("done")}))


def losses(folder: Path) -> dict[int, float]:
    """The loss of each step in the log. Exits if a step is missing or there twice, or starts do not fit."""
    found: dict[int, float] = {}
    log = folder / FILE_NAME
    for text in log.read_bytes().splitlines(keepends=True) if log.exists() else []:
        line = parse_line(text)
        if line is None:
            continue  # cut off by the kill; the next start drops it
        step = int(str(line["step"]))
        if step != len(found) + ("event" not in line):
            sys.exit(f"{log}: step {step} follows {len(found)} steps:\n{log.read_text()[-3000:]}")
        if "event" not in line:
            found[step] = float(str(line["loss"]))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--preload", help="module that is imported once for all runs, such as torch._inductor")
    parser.add_argument("--log", action="store_true", help="compare the log")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    if args.preload:
        importlib.import_module(args.preload)
        quick_imports.done()
    kills = same_kills = 0
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        output, whole, folder = (Path(name) / part for part in ("output", "whole", "killed"))
        option = "--checkpoints" if args.log else "--folder"
        arguments = [*(LOG_OPTIONS if args.log else []), *args.arguments, option]

        def result(of: Path) -> object:
            return losses(of) if args.log else done_lines(output)

        def shown(result: object) -> object:
            return f"{len(result)} steps, each once" if isinstance(result, dict) else result

        run(args.ranks, args.script, [*arguments, str(whole)], output)
        expected = result(whole)
        print(f"never killed: {shown(expected)}", flush=True)
        while kills < args.kills:
            shutil.rmtree(folder, ignore_errors=True)
            output.unlink()
            starts = 0
            while not run(args.ranks, args.script, [*arguments, str(folder)], output,
                          killer(folder) if kills < args.kills else lambda: False):
                result(folder)
                starts += 1
                kills += 1
            found = result(folder)
            same_kills += starts * (found == expected)
            print(f"killed {starts} times: {shown(found)}", flush=True)
    print(f"the same after {same_kills} of {kills} kills")
    return int(same_kills < kills)


if __name__ == "__main__":
    sys.exit(main())
