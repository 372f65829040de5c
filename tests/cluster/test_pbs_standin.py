"""The stand-in for PBS responses as a real OpenPBS did, and starts jobs in the same places and environments.

With --real-pbs the same is requested of a real one.
"""
from __future__ import annotations

import json
import re
import shlex
import sys

import pytest

from tests.cluster.hosts import wait_until
from tests.cluster.pbs import HEAD, WORK, Pbs
from tests.cluster.pbs_recordings import (
    PYTHON,
    RECORDINGS,
    assert_same_job,
    localised,
    names,
    number_of,
    plain,
    recording,
    rerun,
    shell,
)

pytest_plugins = ["tests.cluster.pbs_fixture"]


@pytest.mark.parametrize("name", [
    "err_bad_queue", "err_unknown_resource", "err_unknown_joblevel_resource", "err_select_syntax", "err_select_syntax2",
    "err_select_syntax3", "err_place_syntax", "err_walltime_syntax", "err_walltime_over_queue_max",
    "err_ncpus_over_queue_max", "err_select_and_ncpus", "err_select_and_nodes", "err_no_script", "err_bad_name_space",
    "err_name_too_long", "err_array_1_1", "err_array_single", "err_array_syntax", "err_bad_depend_syntax",
    "err_interactive_script_no_tty", "err_interactive_with_array", "err_unknown_option", "err_qdel_unknown",
    "err_qstat_bad_id", "err_qstat_f_unknown_job", "err_qstat_unknown_job", "err_server_unreachable", "qsub_help",
    "qsub_version", "qstat_version", "pbsnodes_l", "qselect_none"])
def test_a_command_answers_as_recorded(lab: Pbs, name: str) -> None:
    recorded = recording(f"commands/{name}")
    done = shell(lab, recorded["cmd"])
    assert (done.status, plain(done.stdout), plain(done.stderr)) == (
        recorded["rc"], plain(recorded["stdout"]), plain(recorded["stderr"]))


def test_root_may_not_submit(lab: Pbs) -> None:
    recorded = recording("commands/err_root_qsub")
    done = lab.run(HEAD, ["qsub", "ok.sh"], user="root")
    assert (done.status, done.stderr) == (recorded["rc"], recorded["stderr"])


def test_a_finished_job_is_only_history(lab: Pbs) -> None:
    job_id = lab.submit("ok.sh")
    lab.wait(job_id)
    for name in ("err_qdel_finished", "err_qstat_finished_without_x", "qstat_x_finished"):
        recorded = recording(f"commands/{name}")
        done = lab.run(HEAD, [*recorded["cmd"].split()[:-1], job_id])
        assert (done.status, plain(done.stderr)) == (recorded["rc"], plain(recorded["stderr"]))


@pytest.mark.parametrize("name", ["qstat_xf_finished_plain", "qstat_x_f_w", "qstat_xf_json_finished"])
def test_qstat_shows_a_job_in_full(lab: Pbs, name: str) -> None:
    recorded = recording(f"commands/{name}")
    lab.write("sel_1x_ncpus2.sh", localised(recording("select/sel_1x_ncpus2")["script"]))
    job_id = lab.submit("-l", "select=1:ncpus=2", "sel_1x_ncpus2.sh")
    lab.wait(job_id)
    done = lab.run(HEAD, [*recorded["cmd"].split()[:-1], job_id])
    kept = [[plain(re.sub(r"\.([oe])\d+", r".\1ID", line)) for line in text.splitlines()
             if not re.match(r'\s*"?(history_timestamp|resources_used|cput|mem|vmem|cpupercent|walltime")', line)]
            for text in (done.stdout, recorded["stdout"])]
    assert kept[0] == kept[1]


def test_json_makes_numbers_of_what_looks_like_one(lab: Pbs) -> None:
    cmd = recording("commands/json_nums")["qsub"]["cmd"]
    job_id = shell(lab, cmd).stdout.strip()
    recorded = json.loads((RECORDINGS / "commands" / "qstat_json_nums.raw.txt").read_text())
    assert lab.job(job_id)["Variable_List"] == recorded["Jobs"]["76.pbs-head"]["Variable_List"]


@pytest.mark.parametrize("name", ["pbsnodes_a", "pbsnodes_a_json"])
def test_idle_nodes_look_as_recorded(lab: Pbs, name: str) -> None:
    recorded = recording(f"commands/{name}")
    done = shell(lab, recorded["cmd"])
    kept = [[re.sub(r"\d+kb", "SIZE", line) for line in text.splitlines() if not re.search(
        "_time|timestamp|license|resources_assigned.ngpus", line)] for text in (done.stdout, recorded["stdout"])]
    assert kept[0] == kept[1]


def test_busy_nodes_look_as_recorded(lab: Pbs) -> None:
    recorded = json.loads(recording("commands/pbsnodes_a_json_busy")["stdout"])["nodes"]
    lab.wait_for(lab.submit("-l", "select=3:ncpus=4", "-l", "place=scatter", "long.sh"), "R")
    got = json.loads(lab.run(HEAD, ["pbsnodes", "-a", "-F", "json"]).stdout)["nodes"]
    times = ("last_state_change_time", "last_used_time", "resources_available")
    for each in (*got.values(), *recorded.values()):
        for key in times:
            each.pop(key, None)
    assert plain(got) == plain(recorded)


@pytest.mark.parametrize("name", ["queued_never_run", "queued_never_run_ngpus", "queued_wait_resources"])
def test_a_job_that_cannot_start_says_why(lab: Pbs, name: str) -> None:
    (recorded,) = recording(f"commands/{name}")["Jobs"].values()
    if name == "queued_wait_resources":
        lab.wait_for(lab.submit("-l", "select=3:ncpus=4", "-l", "place=scatter", "long.sh"), "R")
    job_id = lab.submit(*shlex.split(recorded["Submit_arguments"]))
    wait_until(lambda: "comment" in lab.job(job_id), "the scheduler to say why")
    assert_same_job(lab.job(job_id), job_id, recorded, "37" if name == "queued_never_run" else
                    next(iter(recording(f"commands/{name}")["Jobs"])))
    lab.run(HEAD, ["qdel", job_id])
    deleted = lab.wait(job_id)
    assert "Exit_status" not in deleted and deleted["substate"] == 91
    assert deleted["comment"] == f"{recorded['comment']} and terminated"


@pytest.mark.parametrize("name", [*names("select", "sel_*"), "select/nodefile_interleaved"])
def test_chunks_are_placed_as_recorded(lab: Pbs, name: str) -> None:
    recorded = recording(name)
    job_id, got = rerun(lab, recorded)
    assert_same_job(got, job_id, recorded["final"], recorded["jobid"])
    mine, theirs = json.loads(lab.output(got)), json.loads(recorded["output"])
    for key in ("hostname", "cwd", "umask", "nodefile"):
        assert mine[key] == theirs[key]
    # LC_CTYPE is added by Python itself.
    assert set(mine["env"]) - {"LC_CTYPE"} == set(theirs["env"]) - {"LC_CTYPE"}
    different = {key for key in theirs["env"] if mine["env"].get(key) != theirs["env"][key]}
    assert different <= {"LC_CTYPE", "PBS_JOBCOOKIE", "PBS_JOBID", "PBS_NODEFILE", "TMPDIR", "_"}
    assert mine["nodefile_path"] == f"/var/spool/pbs/aux/{job_id}"


@pytest.mark.parametrize("name", [*names("exitcodes"), *names("styles", leave=("qsub_in_job",))])
def test_a_script_ends_as_recorded(lab: Pbs, name: str) -> None:
    recorded = recording(name)
    job_id, got = rerun(lab, recorded)
    if not job_id:
        return
    assert_same_job(got, job_id, recorded["final"], recorded["jobid"])
    ours = plain(lab.output(got), number_of(job_id)).replace(sys.executable, "/usr/bin/python3")
    assert ours == plain(recorded["output"], number_of(recorded["jobid"]))


@pytest.mark.parametrize("name", names("submit", "out_*", leave=("out_dir_missing", "out_k_dir_missing")))
def test_output_goes_where_recorded(lab: Pbs, name: str) -> None:
    recorded, files = recording(name), recording(f"{name}.files")
    for folder in ("o", "o/dir"):
        lab.run(HEAD, ["sh", "-c", f"rm -rf ~/{folder}/*; mkdir -p ~/{folder}"])
    job_id, got = rerun(lab, recorded)
    # Another job was running when it was recorded; files that are not copied leave no such status.
    for job in (got, recorded["final"]):
        job.pop("exec_host")
        job.pop("Stageout_status", None)
    assert_same_job(got, job_id, recorded["final"], recorded["jobid"])
    for path, (text, mode) in files["new_files"].items():
        local = lab.local(path.replace(number_of(recorded["jobid"]), number_of(job_id)))
        wait_until(local.is_file, str(local))
        assert (local.read_text(), oct(local.stat().st_mode)) == (text, mode)
        local.unlink()


@pytest.mark.parametrize("name", names("submit", "env_v_*", leave=("env_v_newline", "env_v_PATH")))
def test_variables_arrive_as_recorded(lab: Pbs, name: str) -> None:
    recorded = recording(name)
    _, got = rerun(lab, recorded)
    if not got:
        return
    mine, theirs = json.loads(lab.output(got))["env"], json.loads(recorded["output"])["env"]
    assert {key: value for key, value in mine.items() if not key.startswith("PBS_") and key not in (
        "LC_CTYPE", "TMPDIR", "_")} == {key: value for key, value in theirs.items() if not key.startswith("PBS_")
                                        and key not in ("LC_CTYPE", "TMPDIR", "_")}
    assert got["Variable_List"] == recorded["final"]["Variable_List"]


def test_an_array_is_listed_as_recorded(lab: Pbs) -> None:
    lab.write("arr.sh", "#!/bin/bash\n#PBS -N arr\n#PBS -j oe\n#PBS -l walltime=00:01:00\n#PBS -l select=1:ncpus=1\n"
                        f"{PYTHON} {WORK}/probe.py\nexit $PBS_ARRAY_INDEX\n")
    job_id = lab.submit("-J", "0-4:2", f"{WORK}/arr.sh")
    lab.wait(job_id)
    got = json.loads(lab.run(HEAD, ["qstat", "-xtf", "-F", "json", job_id]).stdout)["Jobs"]
    recorded = json.loads(recording("array/array_qstat_xtf_json")["stdout"].replace("/home/alice/arr/", f"{WORK}/")
                          .replace('"/home/alice/arr"', f'"{WORK}"'))["Jobs"]
    mine = {key.replace(number_of(job_id), "79", 1): 0 for key in got}
    assert list(plain(mine)) == list(plain(dict.fromkeys(recorded)))
    for (mine_id, mine), (their_id, theirs) in zip(got.items(), recorded.items(), strict=True):
        if mine_id != job_id:
            mine["exec_host"] = theirs["exec_host"]  # elements are free to start in any order
        assert_same_job(mine, mine_id, theirs, their_id)
    element = got[f"{number_of(job_id)}[2].pbs-head"]
    env = json.loads(lab.output(element))["env"]
    recorded_env = json.loads((RECORDINGS / "array" / "out_arr.o79.2.txt").read_text())["env"]
    assert set(env) - {"LC_CTYPE"} == set(recorded_env) - {"LC_CTYPE"}
    assert (env["PBS_ARRAY_INDEX"], env["PBS_ARRAY_ID"]) == ("2", job_id)
