"""The guide's commands for Slurm, on a real one."""
from __future__ import annotations

import getpass
from pathlib import Path

import pytest

from tests.cluster.hosts import killed_at_end
from tests.cluster.slurm import SlurmCluster
from tests.docs import pages
from tests.docs.pages import GUIDE, Shell


@pytest.mark.matrix
@pytest.mark.parametrize("name", pages.with_commands("slurm"))
def test_commands_write_what_the_page_shows(slurm: SlurmCluster, name: str, tmp_path: Path) -> None:
    kit = pages.copy_kit(slurm.work / tmp_path.name)
    environ = {"PATH": pages.path_with_python(slurm.environment["PATH"], kit), "OMP_NUM_THREADS": "1",
               "USER": getpass.getuser()}
    with killed_at_end(slurm.start(["bash"], cwd=kit, env=environ, **pages.shell_options())) as process:
        Shell(process).follow(pages.steps(GUIDE / name, "slurm"), seconds=180)
