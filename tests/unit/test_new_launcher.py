"""A launcher that does not exist: one class, as in a new file of utils/launchers/, and one entry in LAUNCHERS."""
from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from utils.launchers import LAUNCHERS, LaunchError, Placement, detect
from utils.launchers.launcher import Launcher
from utils.startup.endpoints import find_endpoints
from utils.tools.launch.rank_environment import clean


class Acme(Launcher):
    """acmerun of the Acme framework: acmed on each host starts the ranks."""

    name = "acme"
    rank_variable = "ACME_RANK"
    world_size_variable = "ACME_SIZE"
    local_rank_variable = "ACME_LOCAL_RANK"
    local_world_size_variable = "ACME_LOCAL_SIZE"
    marker_variables = ("ACME_TOKEN",)
    job_variables = ("ACME_HOSTS",)
    identity_variables = ("ACME_TOKEN",)  # "b71f", one for each acmerun
    parent_programs = ("acmed", "acmerun*")
    also_sets = ("openmpi",)

    def candidate_hosts(self, environ: Mapping[str, str]) -> tuple[list[str], str]:
        return environ.get("ACME_HOSTS", "").split(), "ACME_HOSTS"


RANK = {"ACME_RANK": "3", "ACME_SIZE": "8", "ACME_LOCAL_RANK": "1", "ACME_LOCAL_SIZE": "2",
        "ACME_TOKEN": "b71f", "ACME_HOSTS": "h2 h1"}
SRUN = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}
PLACEMENT = Placement("acme", 3, 8, 1, 2)


@pytest.fixture(autouse=True)
def acme() -> Iterator[Acme]:
    """The launcher, which is in the list."""
    LAUNCHERS.insert(0, Acme())
    yield LAUNCHERS[0]
    del LAUNCHERS[0]


def test_its_ranks_are_detected() -> None:
    openmpi = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}  # also_sets
    assert detect({**RANK, **openmpi}) == detect(RANK, launcher="acme") == PLACEMENT
    assert clean({**RANK, "PATH": "/bin"}) == {"ACME_HOSTS": "h2 h1", "PATH": "/bin"}
    with pytest.raises(LaunchError, match="acme: ACME_SIZE not set, but ACME_RANK='3'"):
        detect({"ACME_RANK": "3"})


def test_its_hosts_and_identity_lead_to_rank_0(acme: Acme) -> None:
    first, other = (
        find_endpoints(acme, PLACEMENT, {**RANK, "ACME_TOKEN": token}, timeout=1) for token in ("b71f", "c822"))
    assert (first.hosts, first.source) == (["h2", "h1"], "ACME_HOSTS")
    assert first.secret() != other.secret() and first.ports != other.ports
