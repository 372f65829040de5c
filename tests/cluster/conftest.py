"""--real-pbs PREFIX: the tests of PBS run on a real OpenPBS instead of the stand-in; and the fixture `pbs`.

Not here: what both have in common (pbs.py), Slurm (slurm_fixture.py).
"""
from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.pbs import Pbs, PbsCluster, RealPbs

pytest.register_assert_rewrite("tests.cluster.pbs_recordings")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--real-pbs", metavar="PREFIX", default=None,
                     help="run the tests of PBS on a real OpenPBS: `PREFIX HOST USER command...` runs a command there "
                          "(also DDPKIT_REAL_PBS; see tests/cluster/pbs.py)")


@pytest.fixture(scope="session")
def pbs_cluster(request: pytest.FixtureRequest, need: Callable[[str], Path]) -> Iterator[Pbs]:
    # The option does not exist where pytest was not started with this folder.
    prefix = request.config.getoption("--real-pbs", default=None) or os.environ.get("DDPKIT_REAL_PBS")
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
