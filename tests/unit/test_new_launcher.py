"""A launcher that does not exist: one class and one entry in LAUNCHERS are all that it takes.

The class is what a new file in utils/launchers/ would contain.
"""
from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from utils.launch.environment import clean
from utils.launchers import LAUNCHERS, LaunchError, Placement, detect
from utils.launchers.base import Launcher
from utils.launchers.detect import find_launcher
from utils.launchers.name_service import NameService, NameServiceUnavailable
from utils.rendezvous import Rendezvous, agree
from utils.rendezvous.checks import make_report
from utils.rendezvous.endpoints import find_endpoints


class Folder(NameService):
    """The name service of this launcher: a file in a folder that all hosts share."""

    def __init__(self, path: str) -> None:
        self._file = Path(path) / "address"

    def publish(self, text: str, timeout: float) -> None:
        self._file.with_suffix(".new").write_text(text)
        self._file.with_suffix(".new").rename(self._file)

    def look_up(self, timeout: float) -> str | None:
        return self._file.read_text() if self._file.exists() else None


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

    def name_service(self, environ: Mapping[str, str]) -> NameService | None:
        if "ACME_FOLDER" not in environ:
            return None
        if not Path(environ["ACME_FOLDER"]).is_dir():
            raise NameServiceUnavailable(f"ACME_FOLDER={environ['ACME_FOLDER']} is no folder")
        return Folder(environ["ACME_FOLDER"])


RANK = {"ACME_RANK": "3", "ACME_SIZE": "8", "ACME_LOCAL_RANK": "1", "ACME_LOCAL_SIZE": "2",
        "ACME_TOKEN": "b71f", "ACME_HOSTS": "h2 h1"}
SRUN = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}
PLACEMENT = Placement("acme", 3, 8, 1, 2)


@pytest.fixture(autouse=True)
def acme() -> Iterator[Acme]:
    """The launcher, which is in the list."""
    LAUNCHERS.insert(0, Acme())
    yield LAUNCHERS[0]  # type: ignore[misc]
    del LAUNCHERS[0]


def test_its_ranks_are_detected() -> None:
    openmpi = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}  # also_sets
    assert detect({**RANK, **openmpi}) == detect(RANK, launcher="acme") == PLACEMENT
    assert clean({**RANK, "PATH": "/bin"}) == {"ACME_HOSTS": "h2 h1", "PATH": "/bin"}
    with pytest.raises(LaunchError, match="acme: ACME_SIZE not set, but ACME_RANK='3'"):
        detect({"ACME_RANK": "3"})


@pytest.mark.parametrize(("ancestors", "launcher"), [
    (["/opt/acme/bin/acmed 7", "slurmstepd: [4.0]"], "acme"),
    (["acmerun.new -n 2 x", "slurmstepd: [4.0]"], "acme"),
    (["slurmstepd: [4.0]", "acmed"], "slurm")])
def test_its_parent_process_decides(ancestors: list[str], launcher: str) -> None:
    assert detect({**SRUN, **RANK}, ancestors=ancestors).launcher == launcher


def test_its_hosts_and_identity_lead_to_rank_0(acme: Acme) -> None:
    first, again, other = (
        find_endpoints(acme, PLACEMENT, {**RANK, "ACME_TOKEN": token}, timeout=1) for token in ("b71f", "b71f", "c822"))
    assert (first.hosts, first.source) == (["h2", "h1"], "ACME_HOSTS")
    assert (first.token, first.ports) == (again.token, again.ports)
    assert first.token != other.token and first.ports != other.ports


@pytest.mark.parametrize("by_name_service", [True, False])
def test_its_ranks_meet(by_name_service: bool, tmp_path: Path) -> None:
    environ = {"ACME_SIZE": "3", "ACME_TOKEN": str(tmp_path), "ACME_HOSTS": "127.0.0.1"}
    if by_name_service:
        environ |= {"ACME_FOLDER": str(tmp_path)}
    results: dict[int, Rendezvous] = {}

    def start(rank: int) -> None:
        found = find_launcher({**environ, "ACME_RANK": str(rank)})
        results[rank] = agree(found.placement, make_report(found.placement), environ=environ,
                              launcher=found.launcher, timeout=60)

    threads = [threading.Thread(target=start, args=(rank,), daemon=True) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert len({(results[rank].master_addr, results[rank].master_port) for rank in range(3)}) == 1
    assert (tmp_path / "address").exists() == by_name_service
    for rank in (1, 2, 0):
        monitor, listener = results[rank].monitor, results[rank].listener
        assert monitor is not None
        monitor.started()
        monitor.leave("")
        if listener is not None:
            listener.close()
