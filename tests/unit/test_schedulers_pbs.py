"""The allocations and output of PBS, as recorded from real jobs of OpenPBS."""
from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.scheduler_commands import RECORDINGS, Commands, pbs_job, pbs_recording
from utils.job import current_allocation
from utils.job.allocation import Allocation, AllocationError
from utils.job.commands import SchedulerError, decode
from utils.job.pbs_job import chunk_resources, listing, objects, parse_time, read_nodefile

PLACED: dict[str, tuple[str, list[int | None], list[int]]] = {  # recorded job: hosts, GPUs and cores of each
    "sel_2x_ncpus2_mpiprocs2": ("n1.pbs.lab", [None], [4]),
    "sel_2x_mpiprocs0": ("n1.pbs.lab n2", [None, None], [2, 2]),
    "sel_uneven_scatter": ("n1.pbs.lab n2.pbs.lab", [None, None], [1, 2]),
    "sel_2x_ncpus4_mpiprocs4_ngpus4": ("n1.pbs.lab n2.pbs.lab", [4, 4], [4, 4]),
    "sel_2x_ncpus2_ngpus2": ("n1.pbs.lab", [4], [4]),
    "sel_2x_mpiprocs_gt_ncpus": ("n1.pbs.lab n2.pbs.lab", [None, None], [1, 1]),
    "sel_3x_mixed_scatter": ("n1.pbs.lab n2.pbs.lab n3.pbs.lab", [None, None, None], [2, 2, 1]),
}
NOTES = {  # recorded job whose chunks share a host, unlike those with place=pack
    "sel_2x_ncpus2": "all 2 chunks of select=2:ncpus=2 on one host, n1", "sel_uneven": "all 2 chunks",
    "sel_2x_pack": "", "sel_2x_scatter": "", "sel_1x_ncpus2": "", "sel_nodes_ppn": "", "nodefile_interleaved": ""}
SELECTS = sorted(path.stem for path in (RECORDINGS / "pbs" / "select").glob("*.json"))


def recorded_job(commands: Commands, name: str, **changes: Any) -> tuple[dict[str, str], list[str]]:
    """The environment and node file of a recorded job, with qstat as it was then."""
    recording = pbs_recording(f"select/{name}")
    seen = json.loads(recording["output"])
    nodefile = commands.folder / "nodefile"
    nodefile.write_text("".join(f"{line}\n" for line in seen["nodefile"]))
    record = {**recording["final"], "job_state": "R", **changes}
    commands.add("qstat", pbs_job(record, recording["jobid"]))
    return {**seen["env"], "PBS_NODEFILE": str(nodefile)}, seen["nodefile"]


def allocation(environ: dict[str, str]) -> Allocation:
    found = current_allocation(environ)
    assert found is not None
    return found


@pytest.mark.parametrize("name", SELECTS)
def test_a_job_knows_where_pbs_placed_it(commands: Commands, name: str) -> None:
    environ, lines = recorded_job(commands, name)
    found = allocation(environ)
    exec_host = pbs_recording(f"select/{name}")["final"]["exec_host"]
    hosts = list(dict.fromkeys(part.split("/")[0] for part in exec_host.split("+")))
    assert [host.split(".")[0] for host in found.hosts] == hosts
    assert [lines.count(host) for host in found.hosts] == [*found.ranks_per_host]
    assert sum(found.ranks_per_host) == len(lines)
    assert (found.scheduler, found.restart_count, found.array_index) == ("pbs", 0, None)
    if name in PLACED:
        counts = [*found.gpus_per_host], [*found.cores_per_host]
        assert (" ".join(found.hosts), *counts) == PLACED[name]
    if name in NOTES:
        assert NOTES[name] in "".join(found.notes) and len(found.notes) == bool(NOTES[name])


def test_without_qstat_or_the_node_file_the_other_is_enough(commands: Commands) -> None:
    environ, _ = recorded_job(commands, "sel_uneven_scatter")
    found = allocation({name: value for name, value in environ.items() if name != "PBS_NODEFILE"})  # as under pbsdsh
    assert (found.hosts, found.cores_per_host) == (("n1", "n2"), (1, 2))

    commands.add("qstat", status=255)
    found = allocation(environ)
    assert (found.hosts, found.ranks_per_host) == (("n1.pbs.lab", "n2.pbs.lab"), (1, 2))
    assert found.gpus_per_host == (None, None)
    assert found.restart_count is found.seconds_left() is None


def test_array_index_restarts_and_time_left_are_known(commands: Commands) -> None:
    # The recorded start is long ago and does not count.
    used = {"resources_used": {"walltime": "00:00:30"}, "run_count": 3}
    environ, _ = recorded_job(commands, "sel_2x_scatter", **used)
    found = allocation({**environ, "PBS_ARRAY_INDEX": "2"})
    assert (found.array_index, found.restart_count, found.seconds_left()) == (2, 2, 90)


@pytest.mark.parametrize("path", ["/nowhere/nodefile", ""])
def test_a_job_without_a_host_is_an_error(commands: Commands, path: str) -> None:
    with pytest.raises(AllocationError, match="PBS job 7.server"):
        current_allocation({"PBS_JOBID": "7.server", "PBS_NODEFILE": path})


@pytest.mark.parametrize(("lines", "hosts"), [
    (["n1.pbs.lab", "n2", "n1", "", " N1.pbs.lab \n"], [("n1.pbs.lab", 3), ("n2", 1)]),
    (["n1.a.org", "n1.b.org"], [("n1.a.org", 1), ("n1.b.org", 1)]),
    (["10.0.0.1", "10.0.0.2", "fe80::1"], [("10.0.0.1", 1), ("10.0.0.2", 1), ("fe80::1", 1)])])
def test_full_and_short_names_are_one_host(lines: list[str], hosts: list[tuple[str, int]]) -> None:
    assert [(host.name, host.lines) for host in read_nodefile(lines).all] == hosts


@pytest.mark.parametrize("name", ["nums", "latin1", "ctrl"])
def test_a_job_with_odd_values_is_read(name: str) -> None:
    text = decode((RECORDINGS / "pbs" / "commands" / f"qstat_json_{name}.raw.txt").read_bytes())
    [job] = objects(text, "Jobs").values()
    assert job["job_state"] == "H"


def test_a_value_that_looks_like_a_line_of_the_listing() -> None:
    text = ("Job Id: 1.h\n    job_state = R\n    Variable_List = F=() {\n    job_state = F\n"
            "    job_state.x = F\n\t},G=1\n    comment = x\n")
    assert listing(text)["1.h"] == {"job_state": "R", "Variable_List": "F=() {", "comment": "x"}


@pytest.mark.parametrize("text", [
    "", "Connection refused", "[1]", '{"Jobs": {"1": 2}}'])
def test_output_of_another_form_is_an_error(text: str) -> None:
    with pytest.raises(SchedulerError, match="Expected a JSON object of Jobs"):
        objects(text, "Jobs")
    with pytest.raises(SchedulerError, match="Expected a job"):
        listing(text)


def test_chunks_match_hosts_where_vnodes_have_other_names() -> None:
    vnodes = "(n1:ncpus=2:ngpus=1)+(n2[0]:ncpus=1:mem=5kb+n2[1]:ncpus=1)"
    assert chunk_resources("n1/0*2+n2/0", vnodes) == [("n1", {"ncpus": 2, "ngpus": 1}), ("n2", {"ncpus": 2})]


def test_times_are_read_in_any_locale() -> None:
    early, late = parse_time("Sat Nov 21 03:56:14 2026"), parse_time("Sat Nov 21 03:57:14 2026")
    assert early is not None and late is not None and late - early == 60
    assert parse_time("morgen") is None
