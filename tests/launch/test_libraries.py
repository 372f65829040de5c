"""What libraries that know torchrun's variables find in a rank of any launcher, after setup_distributed()."""
from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.launch.launchers import Lab

PROGRAM = [sys.executable, str(Path(__file__).with_name("libraries.py"))]


@pytest.mark.parametrize("launcher", ["mpich5", "openmpi5", "torchrun"])
def test_libraries_see_the_launch_and_programs_of_a_rank_do_not(lab: Lab, launcher: str) -> None:
    if launcher == "torchrun":
        done = lab.run("h1", lab.torchrun("h1", PROGRAM, "--standalone", "--nproc-per-node", "2"), seconds=250)
        size = 2
    else:
        done, size = lab.mpi(launcher, "2x2", PROGRAM, seconds=250), 4
    assert done.status == 0, done.output
    every = f"sum {size}, sum by env:// {size}, single 0 of 1"
    for rank in range(1, size):
        assert f"rank {rank}, {every}" in done.output, done.output
    assert f"rank 0, {every}, torchrun 0 of 2, torchrun 1 of 2, spawned" in done.output, done.output
