"""Another user of the same machine reads, replaces and follows nothing of a job."""
from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cluster.hosts import killed_at_end, wait_until
from tests.launch.launchers import ROOT

TOKEN = "5ec2e7-given-with-env"
OTHER = 61234  # the id of the other user
SUBMIT = [sys.executable, str(ROOT / "utils"), "submit"]
TRAINS = f"""\
import os, sys, time
from pathlib import Path
import torch
sys.path.insert(0, {str(ROOT)!r})
from utils import setup_distributed
from utils.checkpoint import Checkpointer
with setup_distributed("gloo") as job, Checkpointer(os.environ["FOLDER"]) as checkpoints:
    checkpoints.save(1, {{"model": torch.nn.Linear(2, 2)}})
    print("the token is", os.environ["TOKEN"], flush=True)
    loader = torch.utils.data.DataLoader(torch.zeros(64, 1000), num_workers=1)
    while job.all_reduce_mean(float(Path("stop").exists())) == 0:
        for batch in loader:
            time.sleep(0.01)
"""


class Victim(NamedTuple):
    """A job that is running, and where its files are."""

    project: Path
    folder: Path  # of the submission
    temporary: Path  # TMPDIR
    pids: list[int]


def as_other(command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash as another user."""
    return subprocess.run(["bash", "-c", command], user=OTHER, group=OTHER, extra_groups=[], text=True, cwd="/",
                          capture_output=True, env={"PATH": os.environ["PATH"], **variables}, timeout=60)


def open_folder(mode: int) -> Path:
    """A folder below /tmp that others can enter."""
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="second user "))
    folder.chmod(mode)
    return folder


def submit(project: Path, *words: str, umask: int = 0o022, **variables: str) -> subprocess.CompletedProcess[str]:
    programs = project / "programs"
    programs.mkdir(exist_ok=True)
    (programs / "qsub").write_text("#!/bin/sh\necho 101.head\n")
    (programs / "qsub").chmod(0o755)
    return subprocess.run([*SUBMIT, *words], cwd=project, text=True, capture_output=True, timeout=60, umask=umask,
                          env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", **variables})


@pytest.fixture(scope="module")
def victim() -> Iterator[Victim]:
    if os.geteuid() != 0:
        pytest.skip("needs root, to be two users")
    project, temporary = open_folder(0o755), open_folder(0o1777)
    try:
        (project / "train.py").write_text(TRAINS)
        done = submit(project, "run", "--site", "generic-pbs", "--no-check", "--launcher", "ssh", "--env", "TOKEN",
                      "--env", f"FOLDER={project}/checkpoints", "--ntasks-per-node", "2", "train.py", TOKEN=TOKEN)
        assert done.returncode == 0, done.stderr
        [folder] = (project / "jobs-out").iterdir()
        (project / "hosts").write_text(os.uname().nodename)
        in_job = {"TMPDIR": str(temporary), "PBS_JOBID": "101.head", "PBS_NODEFILE": str(project / "hosts")}
        with open(folder / "101.out", "w") as output:
            started = subprocess.Popen(["bash", str(folder / "job.sh")], cwd=project, stdout=output, stderr=output,
                                       start_new_session=True, env={**os.environ, **in_job})
        with killed_at_end(started):
            wait_until(lambda: (folder / "101.out").read_text().count(TOKEN) == 2, "two ranks that train")
            listed = subprocess.run(["pgrep", "-f", f"{project}|{folder}|train.py"], capture_output=True, text=True)
            yield Victim(project, folder, temporary, [int(word) for word in listed.stdout.split()])
            (project / "stop").touch()
            assert started.wait(60) == 0, (folder / "101.out").read_text()
    finally:
        shutil.rmtree(project)
        shutil.rmtree(temporary)


READS = {  # what the user himself can
    "list the folder of the submission": "ls '{0.folder}'",
    "read the job script": "cat '{0.folder}/job.sh'",
    "read the variables": "cat '{0.folder}/environment'",
    "read the record": "cat '{0.folder}/submission.json'",
    "read the output": "cat '{0.folder}/101.out'",
    "read the variables of a process": "cat /proc/{0.pids[0]}/environ",
    "signal a rank": "kill -0 {0.pids[0]}",
}
ATTACKS = {
    "append to the job script": "echo id >> '{0.folder}/job.sh'",
    "replace the job script": "echo id > /tmp/$$; mv -f /tmp/$$ '{0.folder}/job.sh' || (rm /tmp/$$; false)",
    "replace the folder": "mv '{0.folder}' '{0.folder}.old'",
    "stop the job": "touch '{0.folder}/101.stop'",
    "add a submission": "mkdir '{0.project}/jobs-out/train-1'",
    "replace a checkpoint": "mv '{0.project}/checkpoints' '{0.project}/old'",
    "write into a checkpoint": "find '{0.project}/checkpoints' -type f -writable | grep .",
    "read or write a secret": f"find /dev/shm -name 'ddpkit-{os.getuid()}*' '(' -readable -o -writable ')' | grep .",
    "find a temporary file": "find '{0.temporary}' -type f -readable | grep .",
    "write a temporary file": "find '{0.temporary}' -mindepth 1 -writable | grep .",
}


@pytest.mark.parametrize("attempt", [*READS, *ATTACKS])
def test_another_user_cannot(victim: Victim, attempt: str) -> None:
    command = {**READS, **ATTACKS}[attempt].format(victim)
    done = as_other(command)
    assert done.returncode != 0 and not done.stdout, done
    assert attempt in ATTACKS or subprocess.run(["bash", "-c", command], stdout=subprocess.DEVNULL).returncode == 0


def test_no_command_line_has_the_value_of_a_variable(victim: Victim) -> None:
    listed = as_other("cat /proc/[0-9]*/cmdline").stdout
    assert "train.py" in listed and TOKEN not in listed


def test_no_file_but_the_private_one_and_the_output_has_the_value(victim: Victim) -> None:
    found = subprocess.run(["grep", "-rl", TOKEN, victim.project, victim.temporary], capture_output=True, text=True)
    assert {*found.stdout.splitlines()} == {f"{victim.folder}/environment", f"{victim.folder}/101.out"}


@pytest.fixture
def project() -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("needs root, to be two users")
    folder = open_folder(0o755)
    (folder / "train.py").touch()
    yield folder
    shutil.rmtree(folder)


RUN = ("run", "--site", "generic-pbs", "--no-check", "train.py")


def test_a_folder_in_which_others_may_write_is_refused(project: Path) -> None:
    (project / "jobs-out").mkdir()
    for mode in (0o777, 0o1777, 0o775):
        (project / "jobs-out").chmod(mode)
        done = submit(project, *RUN)
        expected = (f"{project}/jobs-out is not used, because other users may write {project}/jobs-out (owner root, "
                    f"mode {mode:04o}); close it to writing by others (chmod go-w), or name another folder with "
                    "--folder.\n")
        assert done.returncode == 1 and done.stderr.endswith(expected), done
    (project / "jobs-out").chmod(0o755)
    assert submit(project, *RUN).returncode == 0


def test_a_folder_of_another_user_is_refused(project: Path) -> None:
    project.chmod(0o1777)
    as_other(f"mkdir -m 1777 '{project}/jobs-out'")
    done = submit(project, *RUN)
    assert done.returncode == 1 and f"another user owns {project}/jobs-out (owner {OTHER}, mode 1777)" in done.stderr
    assert submit(project, *RUN[:-1], "--folder", "mine", "train.py").returncode == 0


def test_a_folder_that_a_group_can_replace_is_refused(project: Path) -> None:
    os.chown(project, 0, OTHER)
    project.chmod(0o2770)
    done = submit(project, *RUN, umask=0o002)
    assert done.returncode == 1 and f"other users may write {project} (owner root, mode 2770)" in done.stderr


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_umask_does_not_decide_who_may_write(project: Path, umask: int) -> None:
    os.chown(project, 0, OTHER)
    project.chmod(0o2755)
    done = submit(project, *RUN[:-1], "--folder", "all/jobs", "train.py", umask=umask)
    assert done.returncode == 0, done
    made = [project / "all", project / "all/jobs", *(project / "all/jobs").iterdir()]
    assert [oct(path.stat().st_mode & 0o7777) for path in made] == ["0o2755", "0o2755", "0o2700"]
    attacks = [f"mv '{made[2]}' /tmp/", f"mv '{made[1]}' '{project}/gone'", f"find '{project}/all' -writable | grep ."]
    assert as_other(" || ".join(attacks)).returncode == 1
