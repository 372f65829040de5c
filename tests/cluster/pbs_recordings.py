"""Recordings of a real OpenPBS, run again: what is recorded, and how two runs are compared.

Ids, times and process ids are left aside.
"""
from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.cluster.pbs import HEAD, WORK, Pbs, Result

PYTHON = shlex.quote(sys.executable)
RECORDINGS = Path(__file__).resolve().parents[1] / "recordings" / "pbs"
# Attributes that differ from run to run.
MOMENTS = {"ctime", "mtime", "qtime", "stime", "obittime", "etime", "history_timestamp", "resources_used",
           "session_id", "estimated", "run_version", "eligible_time"}
PROBE = """import json, os, socket
mask = os.umask(0o777); os.umask(mask)
path = os.environ.get("PBS_NODEFILE")
text = json.dumps({"hostname": socket.gethostname(), "cwd": os.getcwd(), "umask": oct(mask), "nodefile_path": path,
                   "nodefile": open(path).read().split() if path else None, "env": dict(os.environ)})
out = os.environ.get("PROBE_OUT")
open(out, "w").write(text) if out else print(text)
"""
# Says in a file when it starts, at each signal, and when it ends; it ends 4 s after the first with status 85.
CKPT = """import os, signal, sys, time
log = open(sys.argv[1], "a", buffering=1)
got = []
def note(number, frame): got.append(number); log.write(signal.Signals(number).name + "\\n")
for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT): signal.signal(number, note)
log.write("start\\n")
limit = time.monotonic() + 60
while not got and time.monotonic() < limit: time.sleep(0.02)
time.sleep(4)
log.write("exit\\n")
sys.exit(85)
"""
# Notes signals; dies of those that are named.
SIGCATCH = """import signal, sys, time
log = open(sys.argv[1], "a", buffering=1)
def note(number, frame):
    log.write(signal.Signals(number).name + "\\n")
    if signal.Signals(number).name in sys.argv[2:]:
        log.write("exit\\n"); signal.signal(number, signal.SIG_DFL); signal.raise_signal(number)
for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGHUP): signal.signal(number, note)
log.write("start\\n")
time.sleep(60)
"""


def recording(path: str) -> dict[str, Any]:
    return dict(json.loads((RECORDINGS / f"{path}.json").read_text()))


def names(folder: str, pattern: str = "*", leave: tuple[str, ...] = ()) -> list[str]:
    """The recordings of a folder that are of a script, as recording() takes them."""
    return sorted(f"{folder}/{path.stem}" for path in (RECORDINGS / folder).glob(f"{pattern}.json")
                  if path.stem not in leave and "script" in json.loads(path.read_text()))


def plain(value: Any, number: str = "") -> Any:
    """Without what differs from run to run. number: of the job."""
    if isinstance(value, Mapping):
        return {key: plain(each, number) for key, each in value.items() if key not in MOMENTS}
    if isinstance(value, list):
        return [plain(each, number) for each in value]
    if not isinstance(value, str):
        return value
    text = re.sub(rf"\.([oe]){number}\b", r".\1ID", value) if number else value
    text = re.sub(r"\d+(\[\d*\])?\.pbs-head", r"ID\1.pbs-head", text)
    text = re.sub(r"\w{3} \w{3} +\d+ (at )?\d\d:\d\d(:\d\d \d{4})?", "MOMENT", text)
    text = re.sub(r'("timestamp":\t|_time"?[:=] ?\t?|cookie=|JOBCOOKIE=)\s*\w+', r"\1N", text)
    return re.sub(r"line (\d+): +\d+ ", r"line \1: PID ", text)


def number_of(job_id: str) -> str:
    return re.match(r"\d+", job_id)[0]  # type: ignore[index]


def assert_same_job(got: Mapping[str, Any], got_id: str, recorded: Mapping[str, Any], recorded_id: str) -> None:
    mine, theirs = plain(got, number_of(got_id)), plain(recorded, number_of(recorded_id))
    assert mine == theirs


def write_scripts(pbs: Pbs) -> None:
    """Put the scripts that the recordings name into the user's folder."""
    for name, text in {"probe.py": PROBE, "ckpt.py": CKPT, "sigcatch.py": SIGCATCH,
                       "ok.sh": "#!/bin/bash\n#PBS -N ok\n#PBS -l walltime=00:01:00\nexit 0\n",
                       "long.sh": "#!/bin/bash\n#PBS -N long\n#PBS -l walltime=00:02:00\nsleep 60\n",
                       "out_joe.sh": "#!/bin/bash\n#PBS -N outp\n#PBS -l walltime=00:01:00\n"
                                     "echo out; echo err >&2; pwd; umask\n",
                       "smoke.sh": "#!/bin/bash\n#PBS -N probe\n#PBS -l select=1\n#PBS -l walltime=00:02:00\n"
                                   f"#PBS -j oe\n{PYTHON} {WORK}/probe.py\n"}.items():
        pbs.write(name, text)
    for name in ("exit0", "exit7", "exit_kill9"):
        pbs.write(f"{name}.sh", recording(f"exitcodes/{name}")["script"])


def localised(text: str) -> str:
    """A recorded script or command with the places of the recording changed to ours."""
    return (text.replace("/usr/bin/python3 /cluster/", f"{PYTHON} {WORK}/")
            .replace("/cluster/", f"{WORK}/").replace("/home/alice/sig/", f"{WORK}/sig/"))


def shell(pbs: Pbs, command: str, **options: Any) -> Result:
    return pbs.run(HEAD, ["bash", "-c", localised(command)], **options)


def rerun(pbs: Pbs, recorded: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Submit what was recorded, and wait for its end."""
    pbs.write(f"{recorded['name']}.sh", localised(recorded["script"]))
    done = shell(pbs, recorded["qsub"]["cmd"], env={"FOO": "from_submit_env"})
    assert (done.status, done.stderr) == (recorded["qsub"]["rc"], recorded["qsub"]["stderr"])
    job_id = done.stdout.strip()
    return job_id, pbs.wait(job_id) if job_id else {}


def kept(job: Mapping[str, Any]) -> dict[str, Any]:
    """What the recordings of flow/ have of a job."""
    names = ("job_state", "substate", "Exit_status", "run_count", "Hold_Types", "comment", "Rerunable")
    return dict(plain({name: job.get(name) for name in names}))
