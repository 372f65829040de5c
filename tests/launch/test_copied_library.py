"""utils/ without utils/tools/, copied beside a script under another name: the examples train under every launcher."""
from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.cluster.slurm import SlurmCluster
from tests.launch.launchers import ROOT, STARTED, TORCHRUN, Lab
from tests.matrix import with_all

ARGUMENTS = {"01_ddp_minimal": ["--epochs", "1"], "02_distributed_sampler": [],
             "05_survive": ["--epochs", "1", "--folder", "survive"]}
PAIRS = [("torchrun", "05_survive"), *with_all(("openmpi5", "01_ddp_minimal"), ("srun", "02_distributed_sampler"))]


@pytest.mark.parametrize(("by", "example"), PAIRS)
def test_a_copy_trains(by: str, example: str, tmp_path: Path, lab: Lab, request: pytest.FixtureRequest) -> None:
    ignored = shutil.ignore_patterns("tools", "__pycache__")
    shutil.copytree(ROOT / "utils", tmp_path / "mykit", ignore=ignored)
    script = tmp_path / f"{example}.py"
    source = (ROOT / "examples" / script.name).read_text()
    script.write_text(re.sub(r"^from ddpkit\b", "from mykit", source, flags=re.MULTILINE))
    arguments = [str(tmp_path / word) if word == "survive" else word for word in ARGUMENTS[example]]
    program = [str(script), *arguments]
    if by == "srun":
        slurm: SlurmCluster = request.getfixturevalue("slurm")
        done = slurm.run(["srun", "-N2", "--ntasks-per-node=1", sys.executable, *program])
    elif by == "torchrun":
        done = lab.run("h1", [*TORCHRUN, "--standalone", "--nproc-per-node=2", *program])
    else:
        done = lab.mpi(by, "h1 h2", [sys.executable, *program])
    launcher = {"openmpi5": "openmpi", "srun": "slurm"}.get(by, by)
    assert done.status == 0 and f"2 ranks on {1 if by == 'torchrun' else 2} host" in done.output, done.output
    assert f", {STARTED[launcher]}," in done.output, done.output
