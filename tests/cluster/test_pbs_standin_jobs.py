"""Jobs of the stand-in for PBS end as those of a real OpenPBS did: conditions, signals, limits, tasks on other hosts.

With --real-pbs the same is requested of a real one.
"""
from __future__ import annotations

import re
import time

import pytest

from tests.cluster.hosts import wait_until
from tests.cluster.pbs import HEAD, WORK, Pbs
from tests.cluster.pbs_recordings import kept, localised, number_of, plain, recording, shell

pytest_plugins = ["tests.cluster.pbs_fixture"]


@pytest.mark.parametrize(("name", "status"), [("depend_after_success", 0), ("depend_after_failure", 5)])
def test_dependent_jobs_run_or_never_run_as_recorded(lab: Pbs, name: str, status: int) -> None:
    recorded = recording(f"flow/{name}")
    lab.write("quick.sh", "#PBS -l select=1:ncpus=1\nexit 0\n")
    ids = {"parent": lab.submit("-h", script=f"#PBS -l select=1:ncpus=1\nexit {status}\n")}
    for kind in ("afterok", "afternotok", "afterany"):
        ids[kind] = lab.submit("-W", f"depend={kind}:{ids['parent']}", "quick.sh")
    ids["chain2"] = lab.submit("-W", f"depend=afterok:{ids['afterok']}", "quick.sh")
    waiting = lab.job(ids["chain2"])
    assert (waiting["job_state"], waiting["substate"]) == ("H", 22)
    lab.run(HEAD, ["qrls", ids["parent"]])
    for key, job_id in ids.items():
        lab.wait(job_id)
        assert kept(lab.job(job_id)) == kept(recorded[key]), key


def test_a_job_after_one_that_is_unknown_or_failed_looks_finished(lab: Pbs) -> None:
    failed = lab.submit(script="exit 1\n")
    lab.wait(failed)
    for word, recorded in ((failed, recording("flow/depend_on_finished_failed")["afterok"]),
                           ("99999", next(iter(recording("depend/depend_on_unknown_job")["Jobs"].values())))):
        got = lab.wait(lab.submit("-W", f"depend=afterok:{word}", "ok.sh"))
        assert kept(got) == kept(recorded)


def test_a_job_after_one_that_was_deleted_unstarted_waits_for_ever(lab: Pbs) -> None:
    recorded = recording("flow/depend_parent_qdel_never_ran")
    parent = lab.submit("-h", "exit0.sh")
    child = lab.submit("-W", f"depend=afterok:{parent}", "exit0.sh")
    lab.run(HEAD, ["qdel", parent])
    lab.wait(parent)
    time.sleep(0.5)  # nothing happens to it
    assert kept(lab.job(parent)) == kept(recorded["parent"])
    assert kept(lab.job(child)) == kept(recorded["afterok"])


def test_a_job_that_never_ran_counts_as_a_success_for_later_ones(lab: Pbs) -> None:
    never = lab.submit("-W", "depend=afterok:99999", "ok.sh")
    assert "run_count" not in lab.wait(never)
    for kind, runs in (("afterok", True), ("afterany", True), ("afternotok", False)):
        assert ("run_count" in lab.wait(lab.submit("-W", f"depend={kind}:{never}", "ok.sh"))) == runs


def test_no_job_runs_that_waited_for_one_that_never_ran(lab: Pbs) -> None:
    failing = lab.submit("-h", script="exit 1\n")
    never = lab.submit("-W", f"depend=afterok:{failing}", "ok.sh")
    waiting = [lab.submit("-W", f"depend={kind}:{never}", "ok.sh") for kind in ("afterok", "afterany", "afternotok")]
    lab.run(HEAD, ["qrls", failing])
    for job_id in (never, *waiting):
        job = lab.wait(job_id)
        assert "Exit_status" not in job and "run_count" not in job


def test_an_array_that_is_deleted_while_it_runs(lab: Pbs) -> None:
    array = lab.submit("-J", "0-3", "-l", "select=1:ncpus=4", "long.sh")
    number = number_of(array)
    for index in range(3):
        lab.wait_for(f"{number}[{index}].pbs-head", "R")
    lab.run(HEAD, ["qdel", array])
    job = lab.wait(array)
    assert (job["substate"], job["Exit_status"], job["comment"].endswith(" and terminated")) == (91, 1, True)
    started, unstarted = (lab.job(f"{number}[{index}].pbs-head") for index in (0, 3))
    assert (started["substate"], started["Exit_status"]) == (91, 271)
    assert (unstarted["substate"], unstarted["Exit_status"], unstarted["comment"]) == (91, 1, "Subjob finished")


def test_hold_release_and_rerun_as_recorded(lab: Pbs) -> None:
    job_id = lab.submit("-h", "exit0.sh")
    assert kept(lab.job(job_id)) == kept(recording("flow/hold_release")["held"])
    assert lab.run(HEAD, ["qrls", job_id]).status == 0
    assert kept(lab.wait(job_id)) == kept(recording("flow/hold_release")["after"])
    again = lab.submit(script="#PBS -j oe\necho run; [ -e $HOME/again ] || { touch $HOME/again; sleep 60; }\n")
    wait_until(lab.local(f"{lab.home}/again").exists, "the first run")
    recorded = recording("flow/qrerun_user_vs_root")
    done = lab.run(HEAD, ["qrerun", again])
    assert (done.status, plain(done.stderr)) == (159, plain(recorded["qrerun_user"]["stderr"]))
    assert lab.run(HEAD, ["qrerun", again], user="root").status == 0
    assert lab.wait(again)["run_count"] == 2
    lab.local(f"{lab.home}/again").unlink()


@pytest.mark.parametrize("name", ["qsig_usr1_default", "qsig_usr1_ignore", "qsig_numeric", "ckpt_usr1_default_top",
                                  "ckpt_term_qsig", "ckpt_int_qsig", "ckpt_usr1_profile_trapped",
                                  "ckpt_qdel_profile_trapped", "qdel_child_obey", "qdel_bash_trap_wait",
                                  "qdel_trap_exit0", "qdel_Wforce"])
def test_signals_do_what_was_recorded(lab: Pbs, name: str) -> None:
    recorded = recording(f"signals/{name}")
    profile = lab.local(f"{lab.home}/.bash_profile")
    log = lab.local(f"{WORK}/sig/{name}.log")
    lab.run(HEAD, ["sh", "-c", f"mkdir -p {WORK}/sig; rm -f {WORK}/sig/{name}.log"])
    if "profile" in name:
        profile.write_text("trap : USR1 TERM\n")
    try:
        job_id = lab.submit(script=localised(recorded["script"]), name=f"{name}.sh")
        lab.wait_for(job_id, "R")
        if recorded["signals"]:
            wait_until(lambda: log.exists() and "start" in log.read_text(), "the script to run")
        else:
            time.sleep(1)
        shell(lab, re.sub(r"\d+\.pbs-head", job_id, recorded["action"]["cmd"]))
        got = lab.wait(job_id)
    finally:
        profile.unlink(missing_ok=True)
    assert [got["Exit_status"], got["substate"], re.sub(r"n\d:", "", plain(got["comment"]))] == [
        recorded["Exit_status"], recorded["substate"], re.sub(r"n\d:", "", plain(recorded["comment"]))]
    if name.startswith("ckpt"):  # whether it had the four seconds that it takes to save its work
        assert ("exit" in log.read_text()) == any(what == "exit" for _, what, _ in recorded["signals"])


def test_the_end_of_the_walltime_is_reported_and_kept(lab: Pbs) -> None:
    script = "trap 'echo TERM; sleep 1; exit 7' TERM\nsleep 50 & wait\n"
    job_id = lab.submit("-l", "walltime=2", "-j", "oe", script=script)
    got = lab.wait(job_id, 90)
    assert (got["Exit_status"], got["substate"]) == (-29, 93)
    assert got["comment"].endswith("and exceeded resource walltime")
    assert re.fullmatch(r"=>> PBS: job killed: walltime \d+ exceeded limit 2\nTERM\n", lab.output(got))


GUARD = """if shopt -q login_shell && [ "$PBS_TASKNUM" = 1 ]; then trap : USR1 TERM; fi
unset BASH_ENV
"""
GUARDED = """#!/bin/bash
#PBS -j oe
#PBS -v BASH_ENV=$PBS_O_WORKDIR/guard.sh
trap 'echo USR1' USR1
trap 'echo TERM; stop=1' TERM
echo "${BASH_ENV-unset}"; touch up
while [ -z "$stop" ]; do sleep 0.1; done
sleep 1; echo saved; exit 42
"""


@pytest.mark.parametrize(("variables", "status"), [((), 42), (("-V",), 42), (("-v", "A=1"), 266),
                                                   (("-V", "BASH_ENV=/dev/null"), 266)])
def test_bash_env_keeps_the_login_shell_alive_unless_another_takes_its_place(
        lab: Pbs, variables: tuple[str, ...], status: int) -> None:
    lab.write("guard.sh", GUARD)
    up = lab.local(f"{lab.home}/up")
    up.unlink(missing_ok=True)
    environment = dict(word.split("=", 1) for word in variables if word.startswith("BASH_ENV="))
    job_id = lab.submit(*[word for word in variables if word.split("=")[0] not in environment], script=GUARDED,
                        env=environment)
    wait_until(up.exists, "the script to run")
    lab.run(HEAD, ["qsig", "-s", "USR1", job_id])
    time.sleep(0.5)  # not to be noticed by the trap at once with the next one
    lab.run(HEAD, ["qdel", job_id])
    job = lab.wait(job_id)
    assert job["Exit_status"] == status
    if status == 42:
        events = [line for line in lab.output(job).splitlines() if line in ("unset", "USR1", "TERM", "saved")]
        assert (events, job["substate"]) == (["unset", "USR1", "TERM", "saved"], 91)


def test_signals_reach_only_the_first_host_and_the_end_all(lab: Pbs) -> None:
    log = lab.local(f"{lab.home}/signals")
    log.unlink(missing_ok=True)
    task = 'trap "echo $0 TERM >> ~/signals" TERM; echo $0 up >> ~/signals; for i in $(seq 400); do sleep 0.1; done'
    lab.write("task.sh", task)
    job_id = lab.submit("-l", "select=2:ncpus=1:mpiprocs=1", "-l", "place=scatter", script=(
        f"for n in n1 n2; do pbs_tmrsh $n.pbs.lab bash -c \". {WORK}/task.sh\" $n & done; trap : TERM\n"
        "while [ $(jobs -r | wc -l) -gt 0 ]; do wait; done; sleep 1\n"))
    wait_until(lambda: log.exists() and log.read_text().count("up") == 2, "both tasks")
    lab.run(HEAD, ["qdel", job_id])
    assert lab.wait(job_id)["Exit_status"] == 271
    assert sorted(log.read_text().splitlines()) == ["n1 TERM", "n1 up", "n2 up"]
    for host in ("n1", "n2"):
        assert lab.run(host, ["pgrep", "-f", f"{WORK}/task.sh"]).status == 1


@pytest.mark.parametrize(("name", "leave"), [("pbsdsh/pbsdsh_2x2_scatter", "ILMNQRST"),
                                             ("tmrsh/tmrsh_2x2_scatter", "GHIJMLN")])
def test_programs_on_the_hosts_of_a_job_behave_as_recorded(lab: Pbs, name: str, leave: str) -> None:
    """The sections of the recorded script, but for those about timing, other tools, and output in any order."""
    recorded = recording(name)
    head, *sections = re.split(r"(?m)^(?=.*?=== )", recorded["script"])
    script = "".join([head, *(part for part in sections if re.search(r"=== (\w)", part)[1] not in leave)])  # type: ignore[index]
    address = lab.run(HEAD, ["getent", "hosts", "n2.pbs.lab"]).stdout.split()[0]
    lab.run(HEAD, ["mkdir", "-p", f"{lab.home}/dsh", f"{lab.home}/tm"])
    lab.write("tm.sh", localised(script).replace("10.78.1.12", address))
    got = lab.wait(lab.submit("-l", "select=2:ncpus=2:mpiprocs=2", "-l", "place=scatter", "tm.sh"))

    def parts(text: str) -> dict[str, list[str]]:
        found = re.split(r"(?m)^(?==== )", text)
        # Lines of several hosts come in any order, and a real program's name in a message is a piece of memory.
        return {part.split("\n")[0]: sorted(re.sub(r".*: No such file", "X: No such file", re.sub(
            r"TASKNUM=\w+", "TASKNUM", plain(line))) for line in part.split("\n")) for part in found if part.strip()}

    mine, theirs = parts(lab.output(got)), parts(recorded["output"])
    for title, lines in mine.items():
        assert lines == theirs[title], title


def test_a_first_host_without_slots_never_hears_that_a_task_on_the_first_with_slots_is_over(lab: Pbs) -> None:
    job = lab.wait(lab.submit("-l", "select=1:ncpus=1:mpiprocs=0+2:ncpus=1:mpiprocs=1", "-l", "place=scatter", script=(
        "for n in n2 n3; do timeout -s KILL 4 pbs_tmrsh $n.pbs.lab sleep 1; echo $n $?; done\n")))
    assert lab.output(job).splitlines() == ["n2 137", "n3 0"]
