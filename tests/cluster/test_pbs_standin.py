"""The stand-in for PBS runs jobs as a real OpenPBS did when tests/recordings/pbs was made.

The recorded jobs are run again; with --real-pbs on a real one.
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
from tests.cluster.pbs import HEAD, HOME, WORK, Pbs
from tests.launch.launchers import Result

RECORDINGS = Path(__file__).resolve().parents[1] / "recordings" / "pbs"
# What the kit and its tests read of a job.
SHOWN = ["job_state", "substate", "queue", "run_count", "Exit_status", "Output_Path", "exec_vnode", "Submit_arguments"]
PROBE = """import json, os, socket
mask = os.umask(0o777)
path = os.environ.get("PBS_NODEFILE", "")
print(json.dumps({"hostname": socket.gethostname(), "cwd": os.getcwd(), "umask": oct(mask), "env": dict(os.environ),
                  "nodefile": open(path).read().split() if os.path.exists(path) else None}))
"""
# Instead of the recorded programs ckpt.py and sigcatch.py: saves for a second after a signal.
SAVES = """\
#!/bin/bash
trap 'sleep 1; echo exit >> "$1"; exit 85' USR1 TERM
echo start >> "$1"
while :; do sleep 0.1; done
"""


@pytest.fixture
def lab(pbs: Pbs) -> Pbs:
    """PBS with the programs of the recordings in its user's folder."""
    pbs.write("probe.py", PROBE)
    pbs.local(f"{WORK}/{pbs.write('saves.sh', SAVES)}").chmod(0o755)
    pbs.run(HEAD, ["sh", "-c", "rm -rf ~/sig; mkdir ~/sig"])
    return pbs


def recording(path: str) -> dict[str, Any]:
    return dict(json.loads((RECORDINGS / f"{path}.json").read_text()))


def submit_again(pbs: Pbs, recorded: Mapping[str, Any]) -> str:
    script = re.sub(r"/usr/bin/python3 /cluster/(ckpt|sigcatch).py", f"{WORK}/saves.sh", recorded["script"])
    script = script.replace("/usr/bin/python3 /cluster/", f"{shlex.quote(sys.executable)} {WORK}/")
    pbs.write(f"{recorded['name']}.sh", script)
    command = recorded["qsub"]
    return shell(pbs, command if isinstance(command, str) else command["cmd"]).output.strip()


def shell(pbs: Pbs, command: str) -> Result:
    return pbs.run(HEAD, ["bash", "-c", command], env={"FOO": "from_submit_env"})


def shown(job: Mapping[str, Any], job_id: str) -> dict[str, Any]:
    requested = {key: job["Resource_List"].get(key) for key in ("select", "place", "walltime")}
    output = re.sub(rf"\.o{job_id.partition('.')[0]}$", ".oID", job["Output_Path"])
    return {key: job.get(key) for key in SHOWN} | requested | {
        "hosts": re.findall(r"(\w+)/", job["exec_host"]), "Output_Path": output}


def probed(output: str) -> Any:
    """What a job wrote; of the probe's environment the names of variables whose values differ.

    Not those that OpenPBS sets only after v23.06.06.
    """
    if not output.startswith("{"):
        return output
    seen = json.loads(output)
    env = {name: value for name, value in seen["env"].items() if not name.startswith("PBS_O_INTERACTIVE_")}
    differ = {"PBS_JOBCOOKIE", "PBS_JOBID", "PBS_NODEFILE", "TMPDIR"} & set(env)
    environment = env | {"_": "", "LC_CTYPE": ""} | dict.fromkeys(differ, "")
    return environment, seen["hostname"], seen["cwd"], seen["umask"], seen["nodefile"]


@pytest.mark.parametrize("name", [
    "select/nodefile_interleaved", "select/sel_2x_mpiprocs0", "select/sel_2x_ncpus2",
    "select/sel_2x_ncpus4_mpiprocs4_ngpus4", "select/sel_2x_ompthreads", "select/sel_2x_pack", "select/sel_2x_scatter",
    "select/sel_3x_mixed_scatter", "select/sel_host_named", "exitcodes/exit300", "exitcodes/exit_kill_parent",
    "styles/bash_l_shebang", "submit/env_v_one", "submit/env_v_inherit"])
def test_job_is_as_recorded(lab: Pbs, name: str) -> None:
    recorded = recording(name)
    job_id = submit_again(lab, recorded)
    job = lab.wait(job_id)
    assert shown(job, job_id) == shown(recorded["final"], recorded["jobid"])
    assert probed(lab.output(job)) == probed(recorded["output"])


@pytest.mark.parametrize("name", [
    "ckpt_qdel_profile_trapped", "ckpt_usr1_profile_trapped", "ckpt_usr1_default_top", "qdel_Wforce"])
def test_signal_does_what_was_recorded(lab: Pbs, name: str) -> None:
    recorded, profile = recording(f"signals/{name}"), lab.local(f"{HOME}/.bash_profile")
    log = lab.local(f"{HOME}/sig/{name}.log")
    profile.write_text("trap : USR1 TERM\n" if "profile" in name else "")
    job_id = submit_again(lab, recorded)
    wait_until(lambda: log.exists() and "start" in log.read_text(), "the program to handle signals")
    profile.unlink()
    shell(lab, re.sub(r"\d+\.pbs-head", job_id, recorded["action"]["cmd"]))
    job = lab.wait(job_id)
    assert (job["Exit_status"], job["substate"]) == (recorded["Exit_status"], recorded["substate"])
    if "ckpt" in name:  # whether it had the time that it takes to save its work
        assert ("exit" in log.read_text()) == any(what == "exit" for _, what, _ in recorded["signals"])
