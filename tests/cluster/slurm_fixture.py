"""The fixture `slurm`: one real Slurm for the session. A test module has it by `pytest_plugins = [<this module>]`."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.slurm import SlurmCluster


@pytest.fixture(scope="session")
def slurm_cluster(need: Callable[[str], Path]) -> Iterator[SlurmCluster]:
    need("hosts")
    need("slurm")
    with SlurmCluster() as cluster:
        yield cluster


@pytest.fixture
def slurm(slurm_cluster: SlurmCluster) -> SlurmCluster:
    """Four idle nodes with four CPUs and two fake GPUs each: node1 is the first that a job gets."""
    slurm_cluster.run(["scancel", "--me"])
    slurm_cluster.wait_for_nodes()
    return slurm_cluster


@pytest.fixture
def slow_requeue(slurm: SlurmCluster) -> Iterator[None]:
    """`scontrol requeue` ends two seconds after it has done its work, long after Slurm has signalled the job."""
    wrapper = slurm.folder / "bin" / "scontrol"
    wrapper.write_text(f'#!/bin/sh\n{slurm.program("scontrol")} "$@"\nstatus=$?\n'
                       '[ "$1" != requeue ] || sleep 2\nexit $status\n')
    wrapper.chmod(0o755)
    yield
    wrapper.unlink()
