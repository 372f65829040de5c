"""The stand-in for PBS does what a real OpenPBS did when tests/recordings/pbs was made.

The recorded commands and jobs are run again; with --real-pbs on a real one. Ids, times and process ids may differ.
"""
from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hosts import wait_until
from tests.cluster.pbs import HEAD, WORK, Pbs, Result

pytest_plugins = ["tests.cluster.pbs_fixture"]

RECORDINGS = Path(__file__).resolve().parents[1] / "recordings" / "pbs"
HOME = "/home/alice"
PYTHON = shlex.quote(sys.executable)
# The attributes of a job that the kit reads, without its times.
SHOWN = {"Job_Name", "job_state", "queue", "substate", "comment", "run_count", "Output_Path", "exec_host", "exec_vnode",
         "Resource_List", "Variable_List", "Exit_status", "array", "array_index", "Hold_Types", "Submit_arguments"}
PROBE = """import json, os, socket
mask = os.umask(0o777); os.umask(mask)
path = os.environ.get("PBS_NODEFILE", "")
print(json.dumps({"hostname": socket.gethostname(), "cwd": os.getcwd(), "umask": oct(mask), "env": dict(os.environ),
                  "nodefile": open(path).read().split() if os.path.exists(path) else None}))
"""
# Writes the signals. ckpt.py ends 4 s after the first one; sigcatch.py dies of those that are named.
SIGNAL_LOG = """import signal, sys, time
program, path, *deadly = sys.argv
log = open(path, "a", buffering=1)
got = []
def note(number, frame):
    name = signal.Signals(number).name
    got.append(name)
    log.write(name + "\\n")
    if name in deadly:
        log.write("exit\\n"); signal.signal(number, signal.SIG_DFL); signal.raise_signal(number)
for name in ("USR1", "USR2", "TERM", "HUP", "INT"): signal.signal(signal.Signals["SIG" + name], note)
log.write("start\\n")
limit = time.monotonic() + 60
while time.monotonic() < limit and not (got and program.endswith("ckpt.py")): time.sleep(0.02)
time.sleep(4)
log.write("exit\\n")
sys.exit(85)
"""
SCRIPTS = {
    "probe.py": PROBE, "ckpt.py": SIGNAL_LOG, "sigcatch.py": SIGNAL_LOG,
    "ok.sh": "#!/bin/bash\n#PBS -N ok\n#PBS -l walltime=00:01:00\nexit 0\n",
    "long.sh": "#!/bin/bash\n#PBS -N long\n#PBS -l walltime=00:02:00\nsleep 60\n",
    "waits.sh": "#PBS -l select=1:ncpus=1\nwhile [ ! -e ~/go ]; do sleep 0.1; done\nexit $STATUS\n"}


def recording(path: str) -> dict[str, Any]:
    return dict(json.loads((RECORDINGS / f"{path}.json").read_text()))


def names(*patterns: str) -> list[str]:
    """Return the recordings of jobs, without those of what the stand-in does not support."""
    unsupported = re.compile(r"excl|group|vscatter|mem|joblevel|nodes_ppn|stdin|_jeo|_k_oe|_R_|hostpath|newline|PATH"
                             r"|dir_missing|qsub_in_job|shortname|\.files")
    found = [path.relative_to(RECORDINGS).with_suffix("") for pattern in patterns for path in RECORDINGS.glob(pattern)]
    return sorted(str(path) for path in found if not unsupported.search(path.name) and "script" in recording(str(path)))


def shown(job: Mapping[str, Any], job_id: str, *, hosts: bool = True) -> dict[str, Any]:
    """Return the attributes to compare; hosts=False: of a job that may run on any host."""
    return {key: plain(value, job_id, hosts=hosts) for key, value in job.items()
            if key in SHOWN and (hosts or key != "exec_host")}


def plain(value: Any, job_id: str = "", *, hosts: bool = True) -> Any:
    """Remove what differs from run to run; hosts=False: also the names of the execution hosts."""
    if isinstance(value, Mapping):
        return {key: plain(each, job_id, hosts=hosts) for key, each in value.items()}
    if not isinstance(value, str):
        return value
    number = re.match(r"\d*", job_id)[0]  # type: ignore[index]
    text = re.sub(rf"\.([oe]){number}\b", r".\1ID", value) if number else value
    text = re.sub(r"\d+(\[\d*\])?\.pbs-head", r"ID\1.pbs-head", text)
    text = re.sub(r"\w{3} \w{3} +\d+ (at )?\d\d:\d\d(:\d\d \d{4})?", "MOMENT", text)
    text = re.sub(r'("timestamp":\t)\d+', r"\1N", text)
    text = re.sub(r"line (\d+): +\d+ ", r"line \1: PID ", text)
    return text if hosts else re.sub(r"\bn\d\b", "n", text)


def plain_output(text: str, job_id: str, *, hosts: bool = True) -> Any:
    """What a job wrote; of the probe's environment without the values that differ, but with their names."""
    if not text.startswith("{"):
        return plain(text, job_id, hosts=hosts).replace(sys.executable, "/usr/bin/python3")
    seen = json.loads(text if hosts else re.sub(r"\bn\d\b", "n", text))
    different = ("PBS_JOBCOOKIE", "PBS_JOBID", "PBS_NODEFILE", "TMPDIR", "_")
    environment = seen["env"] | dict.fromkeys(different, "") | {"LC_CTYPE": ""}  # which Python itself adds
    return {"hostname": seen["hostname"], "cwd": seen["cwd"], "umask": seen["umask"], "nodefile": seen["nodefile"],
            "env": environment, "absent": set(different) - set(seen["env"])}


def localised(text: str) -> str:
    """A recorded script or command with the paths of this machine."""
    return (text.replace("/usr/bin/python3 /cluster/", f"{PYTHON} {WORK}/")
            .replace("/cluster/", f"{WORK}/").replace("/home/alice/sig/", f"{WORK}/sig/"))


def shell(pbs: Pbs, command: str) -> Result:
    return pbs.run(HEAD, ["bash", "-c", localised(command)], env={"FOO": "from_submit_env"})


def submit_again(pbs: Pbs, recorded: Mapping[str, Any]) -> str:
    """Submit a recorded job again; return its id, "" where it is refused as recorded."""
    pbs.write(f"{recorded['name']}.sh", localised(recorded["script"]))
    done = shell(pbs, recorded["qsub"]["cmd"])
    assert (done.status, done.stderr) == (recorded["qsub"]["rc"], recorded["qsub"]["stderr"])
    return done.stdout.strip()


def kept(job: Mapping[str, Any]) -> Any:
    """What the recordings in flow/ have of a job."""
    return plain({name: job.get(name) for name in (
        "job_state", "substate", "Exit_status", "run_count", "Hold_Types", "comment")})


@pytest.fixture(scope="module")
def lab(pbs_cluster: Pbs) -> Pbs:
    """PBS with the scripts of the recordings in its user's folder."""
    for name, text in SCRIPTS.items():
        pbs_cluster.write(name, text)
    pbs_cluster.run(HEAD, ["sh", "-c", f"rm -rf {WORK}/sig ~/o ~/go; mkdir -p {WORK}/sig ~/o/dir ~/dsh ~/tm"])
    return pbs_cluster


# Commands ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", [
    "err_bad_queue", "err_unknown_resource", "err_unknown_joblevel_resource", "err_select_syntax", "err_select_syntax2",
    "err_select_syntax3", "err_place_syntax", "err_walltime_syntax", "err_no_script", "err_qdel_unknown",
    "err_qstat_f_unknown_job", "qselect_none"])
def test_command_is_as_recorded(lab: Pbs, name: str) -> None:
    recorded = recording(f"commands/{name}")
    done = shell(lab, recorded["cmd"])
    assert (done.status, plain(done.stdout), plain(done.stderr)) == (
        recorded["rc"], plain(recorded["stdout"]), plain(recorded["stderr"]))


def test_qstat_is_as_recorded(lab: Pbs) -> None:
    lab.write("sel_1x_ncpus2.sh", localised(recording("select/sel_1x_ncpus2")["script"]))
    job_id = lab.submit("-l", "select=1:ncpus=2", "sel_1x_ncpus2.sh")
    lab.wait(job_id)
    wide, as_json = (recording(f"commands/{name}")["stdout"] for name in ("qstat_x_f_w", "qstat_xf_json_finished"))
    texts = ((lab.run(HEAD, ["qstat", "-xfw", job_id]).stdout, job_id), (wide, "1"))
    mine, theirs = ({plain(line, number) for line in text.splitlines() if SHOWN & set(re.findall(r"^ +(\w+) =", line))
                     - {"Variable_List"}} for text, number in texts)
    assert mine == theirs
    [recorded] = json.loads(as_json)["Jobs"].values()
    assert shown(lab.job(job_id), job_id) == shown(recorded, "1")
    for name, words in (("err_qdel_finished", ["qdel"]), ("err_qstat_finished_without_x", ["qstat", "-fw"])):
        recorded = recording(f"commands/{name}")
        done = lab.run(HEAD, [*words, job_id])
        assert (done.status, plain(done.stderr)) == (recorded["rc"], plain(recorded["stderr"]))


def test_job_that_waits_for_room_is_as_recorded(lab: Pbs) -> None:
    [(recorded_id, recorded)] = recording("commands/queued_wait_resources")["Jobs"].items()
    running = lab.submit("-l", "select=3:ncpus=4", "-l", "place=scatter", "long.sh")
    lab.wait(running, states="R")
    job_id = lab.submit(*shlex.split(recorded["Submit_arguments"]))
    wait_until(lambda: "comment" in lab.job(job_id), "the comment of the scheduler")
    assert shown(lab.job(job_id), job_id) == shown(recorded, recorded_id)
    lab.run(HEAD, ["qdel", job_id])
    deleted = lab.wait(job_id)
    assert ("Exit_status" in deleted, deleted["substate"]) == (False, 91)
    lab.delete_all()


# Jobs ----------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", names("select/*.json"))
def test_chunks_are_placed_as_recorded(lab: Pbs, name: str) -> None:
    recorded = recording(name)
    job_id = submit_again(lab, recorded)
    job = lab.wait(job_id)
    assert shown(job, job_id) == shown(recorded["final"], recorded["jobid"])
    assert plain_output(lab.output(job), job_id) == plain_output(recorded["output"], "")


SIDE_BY_SIDE = names("exitcodes/*.json", "styles/*.json", "submit/env_v_*.json", "submit/out_*.json")


@pytest.fixture(scope="module")
def submitted(lab: Pbs) -> dict[str, str]:
    """Job ids by the name of the recording."""
    return {name: submit_again(lab, recording(name)) for name in SIDE_BY_SIDE}


@pytest.mark.parametrize("name", SIDE_BY_SIDE)
def test_job_is_as_recorded(lab: Pbs, submitted: Mapping[str, str], name: str) -> None:
    recorded, job_id = recording(name), submitted[name]
    if not job_id:  # it was refused
        return
    job = lab.wait(job_id)
    assert shown(job, job_id, hosts=False) == shown(recorded["final"], recorded["jobid"], hosts=False)
    if "/out_" not in name:
        mine, theirs = ((lab.output(job), job_id), (recorded["output"], recorded["jobid"]))
        assert plain_output(*mine, hosts=False) == plain_output(*theirs, hosts=False)
        return
    for path, (text, mode) in recording(f"{name}.files")["new_files"].items():
        local = lab.local(re.sub(rf"\b{recorded['jobid'].partition('.')[0]}\b", job_id.partition(".")[0],
                                 re.sub(r"\.([oe])\d+$", rf".\g<1>{job_id.partition('.')[0]}", path)))
        wait_until(local.is_file, str(local))
        assert (local.read_text(), oct(local.stat().st_mode)) == (text, mode)


def test_array_is_as_recorded(lab: Pbs) -> None:
    lab.write("arr.sh", "#!/bin/bash\n#PBS -N arr\n#PBS -j oe\n#PBS -l walltime=00:01:00\n#PBS -l select=1:ncpus=1\n"
                        f"{PYTHON} {WORK}/probe.py\nexit $PBS_ARRAY_INDEX\n")
    job_id = lab.submit("-J", "0-4:2", f"{WORK}/arr.sh")
    lab.wait(job_id)
    mine = json.loads(lab.run(HEAD, ["qstat", "-xtf", "-F", "json", job_id]).stdout)["Jobs"]
    recorded = json.loads(re.sub(r"/home/alice/arr\b", WORK, recording("array/array_qstat_xtf_json")["stdout"]))["Jobs"]
    number = job_id.partition("[")[0]
    assert [name.replace(number, "79", 1) for name in mine] == list(recorded)
    for own, theirs in zip(mine.values(), recorded.values(), strict=True):
        assert shown(own, number, hosts=False) == shown(theirs, "79", hosts=False)
    environment = json.loads(lab.output(mine[f"{number}[2].pbs-head"]))["env"]
    assert (environment["PBS_ARRAY_INDEX"], environment["PBS_ARRAY_ID"]) == ("2", job_id)


@pytest.mark.parametrize(("name", "status"), [("depend_after_success", 0), ("depend_after_failure", 5)])
def test_dependent_jobs_run_or_never_run_as_recorded(lab: Pbs, name: str, status: int) -> None:
    recorded, go = recording(f"flow/{name}"), lab.local(f"{HOME}/go")
    lab.write("quick.sh", "#PBS -l select=1:ncpus=1\nexit 0\n")
    ids = {"parent": lab.submit("-v", f"STATUS={status}", "waits.sh")}
    for kind in ("afterok", "afternotok", "afterany"):
        ids[kind] = lab.submit("-W", f"depend={kind}:{ids['parent']}", "quick.sh")
    ids["chain2"] = lab.submit("-W", f"depend=afterok:{ids['afterok']}", "quick.sh")
    waiting = lab.job(ids["chain2"])
    assert (waiting["job_state"], waiting["substate"]) == ("H", 22)
    go.touch()
    for key, job_id in ids.items():
        assert kept(lab.wait(job_id)) == kept(recorded[key]), key
    go.unlink()


def test_job_after_one_that_is_unknown_failed_or_deleted(lab: Pbs) -> None:
    failed = lab.submit(script="exit 1\n")
    lab.wait(failed)
    for word, recorded in ((failed, recording("flow/depend_on_finished_failed")["afterok"]),
                           ("99999", next(iter(recording("depend/depend_on_unknown_job")["Jobs"].values())))):
        job = lab.wait(lab.submit("-W", f"depend=afterok:{word}", "ok.sh"))
        assert kept(job) == kept(recorded)

    lab.wait(lab.submit("-l", "select=3:ncpus=4", "long.sh"), states="R")
    never_ran = lab.submit("ok.sh")
    child = lab.submit("-W", f"depend=afterok:{never_ran}", "ok.sh")
    lab.run(HEAD, ["qdel", never_ran])
    lab.wait(never_ran)
    assert kept(lab.job(child)) == kept(recording("flow/depend_parent_qdel_never_ran")["afterok"])
    lab.delete_all()


# Signals and limits --------------------------------------------------------------------------------------------------

SIGNALS = [name for name in names("signals/*.json") if "walltime" not in name and recording(name)["signals"]]


@pytest.fixture(scope="module")
def signalled(lab: Pbs) -> dict[str, str]:
    """Ids of the jobs that were sent what is recorded, by the name of the recording."""
    profile = lab.local(f"{HOME}/.bash_profile")
    ids = {}
    for with_profile in (True, False):
        if with_profile:
            profile.write_text("trap : USR1 TERM\n")
        for name in [name for name in SIGNALS if ("profile" in name) == with_profile]:
            ids[name] = lab.submit(script=localised(recording(name)["script"]), name=f"{Path(name).name}.sh")
        for name in ids:
            log = lab.local(f"{WORK}/sig/{Path(name).name}.log")
            wait_until(lambda log=log: log.exists() and "start" in log.read_text(), f"{log} to be written")  # type: ignore[misc]
        profile.unlink(missing_ok=True)
    for name, job_id in ids.items():
        shell(lab, re.sub(r"\d+\.pbs-head", job_id, recording(name)["action"]["cmd"]))
    return ids


@pytest.mark.parametrize("name", SIGNALS)
def test_signal_does_what_was_recorded(lab: Pbs, signalled: Mapping[str, str], name: str) -> None:
    recorded = recording(name)
    job = lab.wait(signalled[name])
    for key in ("Exit_status", "substate", "comment"):
        assert plain(job[key], hosts=False) == plain(recorded[key], hosts=False)
    if "ckpt" in name:  # whether it had the four seconds that it takes to save its work
        log = lab.local(f"{WORK}/sig/{Path(name).name}.log").read_text()
        assert ("exit" in log) == any(what == "exit" for _, what, _ in recorded["signals"])


def test_signals_reach_only_the_first_host_and_the_end_all(lab: Pbs) -> None:
    log = lab.local(f"{HOME}/signals")
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


# Tasks ---------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("name", "leave"), [
    ("pbsdsh/pbsdsh_2x2_scatter", "(?!F pbsdsh -h n2.pbs.lab)"),
    ("tmrsh/tmrsh_2x2_scatter", "usage|[GHIJMLN]|B -x")])
def test_programs_on_the_hosts_of_a_job_behave_as_recorded(lab: Pbs, name: str, leave: str) -> None:
    """The sections of the recorded script, without those about timing, other tools, and output in any order."""
    recorded = recording(name)
    head, *sections = re.split(r"(?m)^(?=.*?=== )", recorded["script"])
    kept_sections = [part for part in sections if not re.search(f"=== ({leave})", part)]
    script = "".join([head, "N1=n1.pbs.lab N2=n2.pbs.lab\n", *kept_sections])
    address = lab.run(HEAD, ["getent", "hosts", "n2.pbs.lab"]).stdout.split()[0]
    lab.write("tm.sh", localised(script).replace("10.78.1.12", address))
    job = lab.wait(lab.submit("-l", "select=2:ncpus=2:mpiprocs=2", "-l", "place=scatter", "tm.sh"))

    def parts(text: str) -> dict[str, list[str]]:
        found = re.split(r"(?m)^(?==== )", text)
        # Lines of several hosts come in any order, and a real program's name in a message is a piece of memory.
        return {part.split("\n")[0]: sorted(re.sub(r".*: No such file", "X: No such file", re.sub(
            r"TASKNUM=\w+", "TASKNUM", plain(line))) for line in part.split("\n")) for part in found if part.strip()}

    mine, theirs = parts(lab.output(job)), parts(recorded["output"])
    for title, lines in mine.items():
        assert lines == theirs[title], title


def test_first_host_without_slots_is_not_informed_of_the_end_of_a_task(lab: Pbs) -> None:
    """Of a task on the first host with slots, that is."""
    job = lab.wait(lab.submit("-l", "select=1:ncpus=1:mpiprocs=0+2:ncpus=1:mpiprocs=1", "-l", "place=scatter", script=(
        "for n in n2 n3; do timeout -s KILL 4 pbs_tmrsh $n.pbs.lab sleep 1; echo $n $?; done\n")))
    assert lab.output(job).splitlines() == ["n2 137", "n3 0"]
