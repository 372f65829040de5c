"""PBS: what was allocated, and what its commands print. Recorded jobs of a real OpenPBS."""
from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from tests.unit.scheduler_commands import pbs_recording
from utils.schedulers import AllocationError, SchedulerError, current_allocation
from utils.schedulers.command import decode
from utils.schedulers.pbs import read_nodefile
from utils.schedulers.pbs_answers import chunk_resources, listing, moment_of, objects, seconds_of

RECORDINGS = Path(__file__).resolve().parents[1] / "recordings" / "pbs"
JSON_ANSWERS = {"commands/qstat_xf_json_finished.json": "Jobs", "commands/qstat_running_f_json.json": "Jobs",
                "array/array_qstat_xtf_json.json": "Jobs", "commands/qstat_Qf_json.json": "Queue",
                "commands/qstat_Bf_json.json": "Server", "commands/pbsnodes_a_json.json": "nodes",
                "commands/pbsnodes_a_json_busy.json": "nodes", "commands/err_server_down_qstat_json.json": "Jobs",
                "commands/err_qstat_f_unknown_job.json": "Jobs", "commands/qstat_json_nums.raw.txt": "Jobs",
                "commands/qstat_json_ctrl.raw.txt": "Jobs", "commands/qstat_json_latin1.raw.txt": "Jobs"}


def recorded(name: str) -> Any:
    return json.loads((RECORDINGS / name).read_text())


def printed(name: str) -> str:
    """What a command printed, decoded as the kit does."""
    return decode((RECORDINGS / name).read_bytes()) if name.endswith(".txt") else str(recorded(name)["stdout"])


# What was allocated ---------------------------------------------------------------------------------------------------

PLACED = {  # recorded job: hosts, ranks, GPUs and cores of each
    "sel_2x_ncpus2_mpiprocs2": (["n1.pbs.lab"], [4], [None], [4]),
    "sel_2x_scatter": (["n1.pbs.lab", "n2.pbs.lab"], [2, 2], [None, None], [2, 2]),
    "nodefile_interleaved": (["n1.pbs.lab", "n2.pbs.lab"], [2, 1], [None, None], [2, 1]),
    "nodefile_shortname_n3": (["n3"], [2], [None], [2]),
    "sel_2x_mpiprocs0": (["n1.pbs.lab", "n2"], [2, 0], [None, None], [2, 2]),
    "sel_uneven_scatter": (["n1.pbs.lab", "n2.pbs.lab"], [1, 2], [None, None], [1, 2]),
    "sel_2x_ncpus4_mpiprocs4_ngpus4": (["n1.pbs.lab", "n2.pbs.lab"], [4, 4], [4, 4], [4, 4]),
    "sel_2x_ncpus2_ngpus2": (["n1.pbs.lab"], [2], [4], [4]),
    "sel_2x_mpiprocs_gt_ncpus": (["n1.pbs.lab", "n2.pbs.lab"], [4, 4], [None, None], [1, 1]),
    "sel_3x_mixed_scatter": (["n1.pbs.lab", "n2.pbs.lab", "n3.pbs.lab"], [2, 2, 1], [None] * 3, [2, 2, 1]),
    "sel_nodes_ppn": (["n1.pbs.lab", "n2.pbs.lab"], [2, 2], [None, None], [2, 2]),
    "sel_host_named": (["n3.pbs.lab", "n1.pbs.lab"], [1, 1], [None, None], [1, 1]),
}
SELECTS = sorted(path.stem for path in (RECORDINGS / "select").glob("*.json"))


def in_job(recording: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, *, qstat: bool = True) -> dict[str, str]:
    """The environment of a recorded job, its node file, and a qstat on PATH that says what PBS said then."""
    seen = json.loads(recording["output"])
    nodefile = folder / "nodefile"
    nodefile.write_text("".join(f"{line}\n" for line in seen["nodefile"]))
    (folder / "answer").write_text(json.dumps({"Jobs": {recording["jobid"]: {**recording["final"], "job_state": "R"}}}))
    (folder / "qstat").write_text(f'#!/bin/sh\n{"" if qstat else "exit 255"}\ncat "{folder}/answer"\n')
    (folder / "qstat").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return {**seen["env"], "PBS_NODEFILE": str(nodefile)}


@pytest.mark.parametrize("name", PLACED)
def test_a_job_knows_its_hosts_wherever_pbs_placed_it(name: str, tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    found = current_allocation(in_job(recorded(f"select/{name}.json"), tmp_path, monkeypatch))
    assert found is not None
    assert ([*found.hosts], [*found.ranks_per_host], [*found.gpus_per_host], [*found.cores_per_host]) == PLACED[name]
    assert (found.scheduler, found.restart_count, found.array_index) == ("pbs", 0, None)


@pytest.mark.parametrize("name", SELECTS)
def test_hosts_and_ranks_are_those_of_the_node_file_and_exec_host(name: str, tmp_path: Path,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in another way than the kit counts: by the words of the recording."""
    recording = recorded(f"select/{name}.json")
    found = current_allocation(in_job(recording, tmp_path, monkeypatch))
    assert found is not None
    lines = json.loads(recording["output"])["nodefile"]
    hosts = list(dict.fromkeys(part.split("/")[0] for part in recording["final"]["exec_host"].split("+")))
    assert [host.split(".")[0] for host in found.hosts] == hosts
    assert [lines.count(host) for host in found.hosts] == [*found.ranks_per_host]
    assert sum(found.ranks_per_host) == len(lines)


@pytest.mark.parametrize(("name", "note"), [
    ("sel_2x_ncpus2", "all 2 chunks of select=2:ncpus=2 on one host, n1"), ("sel_2x_pack", ""), ("sel_2x_scatter", ""),
    ("sel_uneven", "all 2 chunks"), ("sel_1x_ncpus2", ""), ("sel_nodes_ppn", ""), ("nodefile_interleaved", "")])
def test_chunks_that_landed_on_one_host_are_pointed_out(name: str, note: str, tmp_path: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    found = current_allocation(in_job(recorded(f"select/{name}.json"), tmp_path, monkeypatch))
    assert found is not None
    assert note in found.notes[0] and "place=scatter" in found.notes[0] if note else found.notes == ()


def test_without_qstat_the_node_file_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = in_job(recorded("select/sel_uneven_scatter.json"), tmp_path, monkeypatch, qstat=False)
    found = current_allocation(environ)
    assert found is not None
    assert (found.hosts, found.ranks_per_host) == (("n1.pbs.lab", "n2.pbs.lab"), (1, 2))
    assert (found.gpus_per_host, found.restart_count, found.seconds_left()) == ((None, None), None, None)


def test_a_task_of_pbsdsh_without_the_variable_asks_qstat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = in_job(recorded("select/sel_2x_scatter.json"), tmp_path, monkeypatch)
    del environ["PBS_NODEFILE"]
    found = current_allocation(environ)
    assert found is not None and (found.hosts, found.cores_per_host) == (("n1", "n2"), (2, 2))


def test_the_index_of_an_array_and_the_run_count_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = recorded("select/sel_2x_scatter.json")
    recording["final"]["run_count"] = 3
    found = current_allocation({**in_job(recording, tmp_path, monkeypatch), "PBS_ARRAY_INDEX": "2"})
    assert found is not None and (found.array_index, found.restart_count) == (2, 2)


def test_seconds_left_are_the_walltime_less_what_was_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = recorded("select/sel_2x_scatter.json")  # of long ago: its start is not believed
    recording["final"]["resources_used"]["walltime"] = "00:00:30"
    found = current_allocation(in_job(recording, tmp_path, monkeypatch))
    assert found is not None and found.seconds_left() == 90


@pytest.mark.parametrize("path", ["/nowhere/nodefile", ""])
def test_a_job_without_any_host_is_an_error_that_names_it(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(AllocationError, match="PBS job 7.server"):
        current_allocation({"PBS_JOBID": "7.server", "PBS_NODEFILE": path})


def test_full_and_short_names_are_one_host_and_addresses_are_not() -> None:
    assert read_nodefile(["n1.pbs.lab", "n2", "n1", "", " N1.pbs.lab \n"]) == [("n1.pbs.lab", 3), ("n2", 1)]
    assert read_nodefile(["n1.a.org", "n1.b.org"]) == [("n1.a.org", 1), ("n1.b.org", 1)]
    assert read_nodefile(["10.0.0.1", "10.0.0.2", "fe80::1", "fe80::2"]) == [
        ("10.0.0.1", 1), ("10.0.0.2", 1), ("fe80::1", 1), ("fe80::2", 1)]


def test_ten_thousand_node_files_are_counted_right() -> None:
    chance = random.Random(5)
    for _ in range(10000):
        hosts = [f"{chance.choice('nx')}{number:0{chance.choice([0, 4])}d}" for number in range(chance.randint(1, 6))]
        lines = [chance.choice(hosts) for _ in range(chance.randint(1, 12))]
        written = [name + chance.choice(["", ".pbs.lab"]) + chance.choice(["", " ", "\n", "\r\n"]) for name in lines]
        counted = read_nodefile(written + [""] * chance.randint(0, 2))
        assert [name.split(".")[0] for name, _ in counted] == list(dict.fromkeys(lines))
        assert [count for _, count in counted] == [lines.count(name) for name in dict.fromkeys(lines)]


def test_any_node_file_at_all_is_read(tmp_path: Path) -> None:
    chance = random.Random(6)
    for number in range(300):
        path = tmp_path / str(number)
        path.write_bytes(bytes(chance.choice(b"n1.\n\r \x00\xe9\xff:/") for _ in range(chance.randint(0, 40))))
        try:
            found = current_allocation({"PBS_JOBID": "1.s", "PBS_NODEFILE": str(path)}, ask=False)
        except AllocationError:
            continue
        assert found is not None and len(found.hosts) == len(found.ranks_per_host) > 0


# What commands print --------------------------------------------------------------------------------------------------

def leaves(value: Any) -> list[str]:
    """All names and values of a record, in order, as the text that JSON had for them."""
    if isinstance(value, dict):
        return [leaf for name, member in value.items() for leaf in (name, *leaves(member))]
    if isinstance(value, list):
        return [",".join(leaf for member in value for leaf in leaves(member))]
    return [value if isinstance(value, str) else json.dumps(value)]


@pytest.mark.parametrize("name", JSON_ANSWERS)
def test_nothing_that_pbs_printed_is_lost(name: str) -> None:
    """Every name and value is there as it was printed, in its order, and nothing else is."""
    text, kind = printed(name), JSON_ANSWERS[name]
    found = leaves(objects(text, kind))
    as_printed = json.loads(re.sub(r'(:\s*)(-?[0-9][-+.0-9eE]*)(?=\s*[,}\]])', r'\1"\2"', text), strict=False)
    assert found == leaves(as_printed.get(kind, {}))


def test_the_listing_says_the_same_as_the_json() -> None:
    plain, wide, as_json = (pbs_recording(f"commands/{name}.json")["stdout"] for name in (
        "qstat_xf_finished_plain", "qstat_x_f_w", "qstat_xf_json_finished"))
    [(name, record)] = listing(plain).items()
    assert {name: record} == listing(wide)
    [(name_there, there)] = objects(as_json, "Jobs").items()
    variables = there.pop("Variable_List")
    assert record.pop("Variable_List") == ",".join(f"{key}={value}" for key, value in variables.items())
    assert (name, record) == (name_there, there)


def test_a_value_that_looks_like_a_line_of_the_listing_changes_nothing() -> None:
    text = ("Job Id: 1.h\n    job_state = R\n    Variable_List = F=() {\n    job_state = F\n"
            "    job_state.x = F\n\t},G=1\n    comment = x\n")
    assert listing(text)["1.h"] == {"job_state": "R", "Variable_List": "F=() {", "comment": "x"}


def test_a_listing_without_a_job_is_an_error() -> None:
    with pytest.raises(SchedulerError, match="expected a job"):
        listing("try again later\n")


def test_what_looks_like_a_number_stays_text() -> None:
    [job] = objects(printed("commands/qstat_json_nums.raw.txt"), "Jobs").values()
    assert all(isinstance(leaf, str) for leaf in leaves(job))
    assert job["Variable_List"]["B"] == "100000"


def test_a_byte_that_is_not_utf_8_is_read_as_latin_1() -> None:
    [job] = objects(printed("commands/qstat_json_latin1.raw.txt"), "Jobs").values()
    assert job["Variable_List"]["L1"] == "café"


def test_control_characters_come_through() -> None:
    [job] = objects(printed("commands/qstat_json_ctrl.raw.txt"), "Jobs").values()
    assert (job["Variable_List"]["NL"], job["Variable_List"]["ESC"]) == ("x\ny", "\x1b[0m")


@pytest.mark.parametrize("text", ["", "Connection refused", "[1]", '{"Jobs": 3}', '{"Jobs": {"1": 2}}', "[" * 100000])
def test_what_is_no_answer_is_an_error(text: str) -> None:
    with pytest.raises(SchedulerError):
        objects(text, "Jobs")


def test_chunks_and_hosts_are_parallel_even_when_vnodes_are_named_otherwise() -> None:
    assert chunk_resources("n1/0*2+n2/0", "(n1:ncpus=2:ngpus=1)+(n2[0]:ncpus=1:mem=5kb+n2[1]:ncpus=1)") == [
        ("n1", {"ncpus": "2", "ngpus": "1"}), ("n2", {"ncpus": "2"})]


@pytest.mark.parametrize(("text", "seconds"), [("02:00:00", 7200), ("30:00", 1800), ("90", 90), ("", None),
                                               ("x", None)])
def test_durations_are_read(text: str, seconds: int | None) -> None:
    assert seconds_of(text) == seconds


def test_moments_are_read_in_any_locale() -> None:
    early, late = moment_of("Sat Nov 21 03:56:14 2026"), moment_of("Sat Nov 21 03:57:14 2026")
    assert early is not None and late is not None and late - early == 60
    assert moment_of("morgen") is None
