"""Programs that the tests of job scripts submit, and the ranks that a job's output reports."""
from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
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


# Rank 1 asks for a stop in the first run; the second one comes to its end.
STOPS_ONCE = f"""\
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from utils import setup_distributed
from utils.preemption import StopSignal, requeue
with setup_distributed("gloo") as dist, StopSignal(dist) as stop:
    again = os.path.exists("saved")
    dist.barrier()
    if dist.rank == 1 and not again:
        stop.request("a test")
    while not again and not stop.should_stop():
        time.sleep(0.01)
    if dist.is_main:
        print("goes on" if again else "saves", flush=True)
        open("saved", "w").close()
if stop.stopped and dist.is_main:
    requeue()
sys.exit(stop.exit_status)
"""


# Writes when it began and when it ended.
STEP = """\
import time
open('times', 'a').write(f'{time.time()} ')
time.sleep(0.5)
open('times', 'a').write(f'{time.time()} ')
"""


def one_after_the_other(folder: Path, jobs: int) -> bool:
    """Whether that number of runs of STEP in this folder did not overlap."""
    times = [float(word) for word in (folder / "times").read_text().split()]
    return len(times) == 2 * jobs and times == sorted(times)
