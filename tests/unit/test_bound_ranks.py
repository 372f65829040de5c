"""Two real ranks on the cores of this machine; their threads and loader workers stay on them."""
from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.matrix import with_all
from tests.unit.programs import python
from utils.host.cores import Topology, cores_in, read_topology
from utils.ranges import parse_ranges

CORES = cores_in(read_topology() or Topology(()), frozenset(os.sched_getaffinity(0)))
pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="two ranks need two cores")

PROGRAM = """\
import json, os, sys
import torch
from utils import setup_distributed

class Cores(torch.utils.data.Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, index):
        return torch.tensor(sorted(os.sched_getaffinity(0)))

def threads():
    return sorted({tuple(sorted(os.sched_getaffinity(int(name)))) for name in os.listdir("/proc/self/task")})

if __name__ == "__main__":
    before = sorted(os.sched_getaffinity(0))
    with setup_distributed("gloo", bind=json.loads(sys.argv[2])) as dist:
        rank, default = sorted(os.sched_getaffinity(0)), torch.get_num_threads()
        torch.set_num_threads(4)
        torch.rand(1 << 22).exp_()  # starts the threads of OpenMP
        loader = torch.utils.data.DataLoader(Cores(), num_workers=2)
        found = {"before": before, "rank": rank, "threads": threads(), "number": len(os.listdir("/proc/self/task")),
                 "workers": [batch[0].tolist() for batch in loader], "default": default}
        with open(os.path.join(sys.argv[1], str(dist.rank)), "w") as file:
            json.dump(found, file)
"""


def run(folder: Path, bind: str, warm: bool = False, **env: str) -> tuple[list[dict[str, object]], str]:
    """What each of two ranks has found, and the output of the launch."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    root = str(Path(__file__).resolve().parents[2])
    done = python(str(program), str(folder), bind, ranks=2, env={"PYTHONPATH": root, **env}, warm=warm)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / str(rank)).read_text()) for rank in range(2)], done.stdout


@pytest.mark.parametrize("given", [False, *with_all(True)])
def test_rank_threads_and_workers_have_the_cores_of_the_rank(tmp_path: Path, given: bool) -> None:
    half = len(CORES) // 2
    halves = [sorted(cpu for core in part for cpu in core.cpus) for part in (CORES[:half], CORES[half:])]
    binding = ":".join(",".join(map(str, cpus)) for cpus in halves)
    found, output = run(tmp_path, '"auto"', DDPKIT_CPU_BIND=f"list:{binding}" if given else "")
    for one in found:
        assert one["number"] >= 4 and one["threads"] == [one["rank"]]
        assert one["workers"] == [one["rank"]] * 2
    first, second = (set(one["rank"]) for one in found)
    before = set().union(*(one["before"] for one in found))  # ddpkit launch has bound them already
    assert [one["before"] for one in found] == [one["rank"] for one in found]
    shared = len(CORES) < 4 and not given  # fewer than two cores for each rank
    assert first | second == before and first & second == (before if shared else set())
    shown = next(line for line in output.splitlines() if "CPUs of ranks 0-1: " in line)
    assert [parse_ranges(text) for text in shown.split(": ")[1].split(":")] == [first, second]


def test_without_binding_the_cores_stay(tmp_path: Path) -> None:
    for bind in ("false", '"auto"'):
        found, output = run(tmp_path, bind, warm=True, DDPKIT_CPU_BIND="none")
        assert all(one["rank"] == one["before"] == sorted(os.sched_getaffinity(0)) for one in found)
        assert "CPUs of ranks" not in output
