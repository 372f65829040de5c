"""How many lines the kit adds to what a failed program has written itself: the twelve commonest failures."""
from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.programs import LAUNCH, ROOT, python

BEGIN = """
import os, signal, sys, time, torch
from torch.nn.parallel import DistributedDataParallel as DDP
from utils import setup_distributed
with setup_distributed("gloo", hang_timeout=3) as job:
    job.all_reduce_mean(1.0)
    bad = job.rank == 1
"""
END = """
    job.all_reduce_mean(2.0)
"""
FAILURES = {  # what rank 1 does, and the last line
    "exception": ("    if bad: raise ValueError('bad batch 17')", r"rank 1 on \S+ failed: ValueError: bad batch 17"),
    "sys.exit(3)": ("    if bad: sys.exit(3)", r"rank 1 on \S+ failed: SystemExit: 3.*"),
    "SIGKILL": ("    if bad: os.kill(os.getpid(), signal.SIGKILL)", r"rank 1 on \S+ was ended by SIGKILL .*"),
    "os._exit(0)": ("    if bad: os._exit(0)", r"rank 1 on \S+ ended with exit status 0 before the others.*"),
    "os._exit(7)": ("    if bad: os._exit(7)", r"rank 1 on \S+ ended with exit status 7 and without an exception, .*"),
    "one step less": ("    if bad: sys.exit()", r"rank 0 on \S+ called all_reduce\(\) at .* or the ranks run .*"),
    "a barrier more": ("    if not bad: job.barrier()\n    sys.exit()", r"rank 0 on \S+ called barrier\(\) at .*"),
    "one batch less, then a metric": (
        "    for _ in range(1 + bad): job.all_reduce_mean(torch.ones(1000))",
        r"rank 0 on \S+ was aborted by gloo \(SIGABRT, exit status 134\): rank 1 was in all_reduce\(\) at "
        r"\S+train\.py, line \d+, in <module>, and rank 0 entered another, smaller .* The line of rank 0 follows .*"),
    "hang": ("    if bad: time.sleep(60)", r"rank 1 on \S+ \(pid \d+\) did not enter collective 2, in which .*"),
    "device_ids on a CPU": ("    if bad: DDP(torch.nn.Linear(2, 2), device_ids=[0])",
                            r"rank 1 on \S+ failed: ValueError: .* Pass device_ids=job.device_ids, which .*"),
    "second group": ("    if bad: torch.distributed.init_process_group('gloo')",
                     r"rank 1 on .* failed: ValueError: .* Leave out init_process_group\(\): .*"),
    "GPU memory": ("    if bad: raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB.')",
                   r"rank 1 on .* failed: OutOfMemoryError: CUDA out of memory. Tried .* Use a smaller batch, or .*"),
    "other models": ("    DDP(torch.nn.Linear(2, 2 + bad))", r"rank 1 on .* failed: RuntimeError: the ranks build .*"),
}


def lines_of_kit(output: str) -> list[str]:
    """Return the lines of the kit about the failure: not those about the start."""
    launch = r"ddpkit launch: (?!\d+ ranks on|Python for the ranks)"
    kit = rf"ddpkit-failure |{launch}|rank \d+ on |The ranks hang|LaunchError|\[rank .*ERROR"
    return [line for line in output.splitlines() if re.match(kit, line)]


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_has_one_closing_line(failure: str, tmp_path: Path) -> None:
    what, last = FAILURES[failure]
    program, record = tmp_path / "train.py", tmp_path / "failure"
    program.write_text(BEGIN + what + END)
    env = {"PYTHONPATH": str(ROOT), "DDPKIT_FAILURE_FILE": str(record)}  # as in a job of `ddpkit submit`
    # Of what the launcher has started itself.
    ended_from_outside = failure in ("SIGKILL", "os._exit(0)", "os._exit(7)", "one batch less, then a metric")
    done = python(str(program), ranks=2, env=env, cwd=tmp_path, warm=not ended_from_outside)
    lines = lines_of_kit(done.stderr)
    assert done.returncode != 0 and len(lines) == 1 + (failure == "hang"), done.stderr
    assert re.fullmatch(f"ddpkit launch: (error: )?{last}", lines[-1]) and done.stderr.endswith(f"{lines[-1]}\n")
    assert record.read_text().count("ddpkit-failure ") == 1  # for programs
    with_traceback = ("exception", "other models", "device_ids on a CPU", "second group", "GPU memory")
    assert ("Traceback" in done.stderr) == (failure in with_traceback)
    assert done.stderr.count("Traceback") <= 1


@pytest.mark.parametrize(("words", "last"), [
    (["missing.py"], r"error: no such file: missing.py \(in .*\). Check the path of the script"),
    (["-n", "2", "broken.py"], r"error: no rank can run broken.py, line 1: SyntaxError: .*"),
    (["-n", "2", "nccl.py"], r"LaunchError: .*|.*backend nccl was requested, but torch .*")])
def test_what_cannot_start_has_one_line(words: list[str], last: str, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("print(\n")
    (tmp_path / "nccl.py").write_text("from utils import setup_distributed\nsetup_distributed('nccl')\n")
    env = {"PYTHONPATH": str(ROOT), "DDPKIT_FAILURE_FILE": str(tmp_path / "failure")}
    done = python(*LAUNCH[1:2], *words, env=env, cwd=tmp_path)
    lines = lines_of_kit(done.stderr)
    assert done.returncode != 0 and len(lines) == 1 and re.fullmatch(f"ddpkit launch: {last}", lines[0]), done.stderr


DIVERGES = """
import time, torch
from utils import setup_distributed
with setup_distributed("gloo") as job:
    torch.manual_seed(job.rank)  # other parameters on each rank, and no DDP
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        time.sleep(0.5)
"""


@pytest.mark.parametrize(("check", "status", "last"), [
    ("1", 0, r"error: 1 ERROR above: weight differs on rank 1.*"),
    ("error", 1, r"rank \d on \S+ failed: TrainingError: weight differs on rank 1.*")])
def test_a_training_that_goes_wrong_is_the_last_line_too(check: str, status: int, last: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DIVERGES)
    env = {"PYTHONPATH": str(ROOT), "DDPKIT_CHECK_TRAINING": check}
    done = python(str(tmp_path / "train.py"), ranks=2, env=env, cwd=tmp_path, warm=True)
    assert done.returncode == status, done.stderr
    assert re.fullmatch(f"ddpkit launch: {last}", done.stderr.splitlines()[-1]), done.stderr
