"""Values of all ranks are gathered without pickles."""
from __future__ import annotations

import re

from tests.unit.programs import ROOT, python

GATHERS = """
import torch.distributed
from utils import setup_distributed
from utils.gather import gather_json
from utils.training.step_timer import StepTimer
def refused(*args, **options):
    raise AssertionError("a pickle")
for name in ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"):
    setattr(torch.distributed, name, refused)
with setup_distributed("gloo") as job:
    StepTimer(job)
    found = gather_json({"of": [job.rank, None, "\\u00e9" * job.rank]})
    if job.is_main:
        print("found", found)
"""


def test_values_of_any_length_are_gathered_in_rank_order() -> None:
    done = python("-c", GATHERS, ranks=2, warm=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "found [{'of': [0, None, '']}, {'of': [1, None, '\u00e9']}]\n" in done.stdout


def test_no_module_calls_an_object_collective() -> None:
    calls = re.compile(r"(all_gather|gather|broadcast|scatter|send|recv)_object(_list)?\(")
    found = [path for path in (ROOT / "utils").rglob("*.py") if calls.search(path.read_text())]
    assert [path.name for path in found] == ["worker.py"]  # in a comment: bench times those of the script
