"""The fixture `pbs`: an idle PBS, the stand-in or with --real-pbs PREFIX a real OpenPBS."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.pbs import Pbs, PbsCluster, RealPbs


@pytest.fixture(scope="session")
def pbs_cluster(request: pytest.FixtureRequest, need: Callable[[str], Path]) -> Iterator[Pbs]:
    prefix = request.config.getoption("--real-pbs")
    if prefix:
        yield RealPbs(prefix)
        return
    need("hosts")
    with PbsCluster() as cluster:
        yield cluster


@pytest.fixture
def pbs(pbs_cluster: Pbs) -> Iterator[Pbs]:
    """An idle PBS of pbs-head and n1, n2, n3 with four CPUs and four GPUs each."""
    yield pbs_cluster
    pbs_cluster.delete_all()
