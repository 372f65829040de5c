"""A launcher that does not exist: one class, as in a new file of utils/launchers/, and one entry in LAUNCHERS."""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from utils.launch.environment import clean
from utils.launchers import LAUNCHERS, LaunchError, Placement, detect
from utils.launchers.base import Launcher
from utils.launchers.detect import find_launcher
from utils.rendezvous import Rendezvous, agree
from utils.rendezvous.checks import make_report
from utils.rendezvous.endpoints import find_endpoints


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


def test_its_parent_process_decides() -> None:
    for parent in ("/opt/acme/bin/acmed 7", "acmerun.new -n 2 x"):
        assert detect({**SRUN, **RANK}, ancestors=[parent, "slurmstepd: [4.0]"]).launcher == "acme"
    assert detect({**SRUN, **RANK}, ancestors=["slurmstepd: [4.0]", "acmed"]).launcher == "slurm"


def test_its_hosts_and_identity_lead_to_rank_0(acme: Acme) -> None:
    first, other = (
        find_endpoints(acme, PLACEMENT, {**RANK, "ACME_TOKEN": token}, timeout=1) for token in ("b71f", "c822"))
    assert (first.hosts, first.source) == (["h2", "h1"], "ACME_HOSTS")
    assert first.token != other.token and first.ports != other.ports


def test_its_ranks_meet(tmp_path: Path) -> None:
    environ = {"ACME_SIZE": "3", "ACME_TOKEN": str(tmp_path), "ACME_HOSTS": "127.0.0.1"}

    def start(rank: int) -> Rendezvous:
        found = find_launcher({**environ, "ACME_RANK": str(rank)})
        met = agree(found.placement, make_report(found.placement), environ=environ, launcher=found.launcher, timeout=60)
        met.monitor.started()
        return met

    with ThreadPoolExecutor(3) as threads:
        results = list(threads.map(start, range(3)))
    assert len({(one.master_addr, one.master_port) for one in results}) == 1
    for one in (*results[1:], results[0]):
        one.monitor.leave("")
    results[0].listener.close()
