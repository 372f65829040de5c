"""The fixtures `pbs` and `lab`: an idle PBS, the stand-in or with --real-pbs PREFIX a real OpenPBS."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.pbs import Pbs, PbsCluster, RealPbs

pytest.register_assert_rewrite("tests.cluster.pbs_recordings")


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
    """An idle PBS of pbs-head and n1, n2, n3 with four CPUs and four GPUs each, the stand-in or a real one."""
    yield pbs_cluster
    pbs_cluster.delete_all()


@pytest.fixture
def lab(pbs: Pbs) -> Pbs:
    """PBS with the scripts of the recordings in its user's folder."""
    from tests.cluster.pbs_recordings import write_scripts  # not on top, for it is rewritten as tests are

    write_scripts(pbs)
    return pbs
