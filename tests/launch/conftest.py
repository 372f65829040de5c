"""Hosts and launchers for the launch tests."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Hosts
from tests.launch.launchers import Lab


@pytest.fixture(scope="session")
def lab(need: Callable[[str], Path]) -> Iterator[Lab]:
    """Three hosts h1, h2, h3 whose names resolve rightly."""
    need("hosts")
    need("sshd")
    with Hosts(3) as hosts:
        yield Lab(hosts, hosts.start_sshd(), need)


@pytest.fixture(scope="module")
def odd_lab(need: Callable[[str], Path], request: pytest.FixtureRequest) -> Iterator[Lab]:
    """Three hosts whose own names lie, as request.param says (see Hosts)."""
    need("hosts")
    need("sshd")
    with Hosts(3, names=request.param) as hosts:
        yield Lab(hosts, hosts.start_sshd(), need)
