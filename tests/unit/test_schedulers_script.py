"""Job scripts: options, set-up and command of a job, and values that are hostile to a shell."""
from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from utils.job.notation import format_walltime, parse_duration
from utils.tools.cli.launch_options import LaunchOptions
from utils.tools.schedulers.job_spec import Job, JobError, parse_walltime
from utils.tools.schedulers.pbs_scheduler import Pbs
from utils.tools.schedulers.scheduler import Scheduler
from utils.tools.schedulers.slurm_scheduler import SlurmScheduler


def render(scheduler: Scheduler, job: Job) -> str:
    lines = [*scheduler.directive_lines(job), "set -euo pipefail", *job.setup_lines()]
    return "\n".join(["#!/bin/bash", *lines, f"launch {job.launch_words()}", ""])


def job_with(command: Sequence[str], field: str, value: Any) -> Job:
    """A job with a value of its own, or of its LaunchOptions."""
    if field in LaunchOptions._fields:
        field, value = "launch", LaunchOptions(**{field: value})
    return Job(**{"command": command, field: value})


SCHEDULERS = (SlurmScheduler(), Pbs())


CSH = 'type module >/dev/null 2>&1 || . "${MODULESHOME:?is not set, and there is no command module}/init/bash"'


@pytest.mark.parametrize(("scheduler", "extra", "replaced"), [
    (SlurmScheduler(), "--gres=gpu:a100:4", "--gpus-per-node="), (SlurmScheduler(), "-G 8", "--gpus-per-node="),
    (SlurmScheduler(), "-N1-4", "--nodes="), (Pbs(), "-l place=pack", "-l place"),
    (SlurmScheduler(), "--ntasks=3", "--ntasks-per-node="), (SlurmScheduler(), "--mem-per-cpu=2G", "--mem="),
    (SlurmScheduler(), "-p long", "--partition="), (Pbs(), "-l select=2:ncpus=4", "-l select"),
    (Pbs(), "-l walltime=5,filesystems=home", "-l walltime"), (Pbs(), "-qlong", "-q gpu")])
def test_a_directive_replaces_the_option_for_its_setting(scheduler: Scheduler, extra: str, replaced: str) -> None:
    job = Job(("train.py",), 2, 4, cores_per_rank=8, memory="64gb", walltime=7200, queue="gpu", directives=(extra,))
    found = [" ".join(words) for words in scheduler.directives(job)]
    assert [option for option in found if option.startswith(replaced) or option == extra] == [extra]


@pytest.mark.parametrize(("scheduler", "field", "value"), [
    *((Pbs(), *row) for row in (("output", "log-%j.out"), ("output", "/home/a:b"), ("directives", ("--qos=x",)),
                                ("output", "\u00e9.out"), ("dependency", "afterok:1?afterok:2"),
                                ("directives", ("--mail-type=END",)), ("mail_type", "often"), ("mail_user", "-x"))),
    *((SlurmScheduler(), *row) for row in (
        ("nodes", 0), ("hang_timeout", -1.0), ("mail_type", "begin,"),
        ("gpus_per_node", -1), ("command", ("-x",)), ("command", ("",)), ("launcher", ""),
        ("environment", {"A B": "1"}), ("directives", ("gpu",)), ("directives", ("-l filesystems=home",)),
        ("directives", ("-W group_list=x",)),
        ("setup", ("echo \\",)), ("setup", ("a\nb",))))])
def test_a_value_that_cannot_be_used_is_refused(scheduler: Scheduler, field: str, value: Any) -> None:
    with pytest.raises(JobError) as refused:
        render(scheduler, job_with(("a.py",), field, value))
    assert refused.value.field == field and str(refused.value).startswith(f"{field}: ")


@pytest.mark.parametrize(("text", "seconds"), [
    ("2:00:00", 7200), ("90", 5400), ("30:00", 1800), ("0:07", 7), ("1-12", 129600), ("1-12:30:15", 131415),
    ("1-02:03", 93780), ("120:00:00", 432000), ("30m", 1800), ("1h30m", 5400), ("1.5h", 5400),
    ("1d 12h", 129600), ("90 min", 5400), ("45s", 45), ("2 Days", 172800), ("1 hour 30 minutes", 5400)])
def test_a_walltime_is_read_in_every_form(text: str, seconds: int) -> None:
    assert parse_walltime(text) == parse_walltime(format_walltime(seconds)) == seconds


@pytest.mark.parametrize("text", [
    "", "1x", "h", "1h1h", "-5", "1:2:3:4", "1-", "\u0663", "9" * 5000, "infinite", "UNLIMITED", "NOT_SET", "0",
    "00:00:00", "0h"])
def test_a_walltime_that_is_no_time_is_refused(text: str) -> None:
    assert not parse_duration(text)
    with pytest.raises(JobError, match="walltime"):
        parse_walltime(text)


def test_a_script_has_modules_environment_setup_and_command() -> None:
    job = Job(("my train.py", "--lr", "1e-3"), modules=("cuda/12.4",), module_paths=("/soft",),
              environment={"A": "two words"}, setup=("source env.sh",),
              launch=LaunchOptions(launcher="mpiexec", ranks_per_node=2))
    assert render(SlurmScheduler(), job).split("\n")[-8:-1] == [
        "set -euo pipefail", CSH, "module use /soft", "module load cuda/12.4", "export A='two words'", "source env.sh",
        "launch --launcher mpiexec --ntasks-per-node 2 -- 'my train.py' --lr 1e-3"]
    torchrun = job_with(("a.py",), "launcher", "torchrun")
    assert render(SlurmScheduler(), torchrun).endswith("\nlaunch --torchrun -- a.py\n")


FIELDS: list[tuple[str, str, Callable[[str], Any]]] = [  # an accepted text, and the value of the field with a text
    ("command", "train.py", lambda text: (text, "plain")), ("command", "train.py", lambda text: ("train.py", text)),
    ("environment", "value", lambda text: {"VALUE": text}), ("environment", "NAME", lambda text: {text: "1"}),
    *((field, good, lambda text: (text,)) for field, good in (
        ("setup", "true"), ("modules", "cuda"), ("directives", "--constraint=a100"),
        ("chunk", "system=polaris"))),
    *((field, good, str) for field, good in (
        ("memory", "64G"), ("queue", "gpu"), ("account", "abc"), ("name", "run"),
        ("dependency", "afterany:12"), ("launcher", "srun"), ("output", "out.log"), ("container", "image.sif")))]
HOSTILE = [
    "'", '"', "`touch canary`", "$(touch canary)", ";touch canary;", "; touch canary #", "&& touch canary", "> canary",
    "'; touch canary #", "\n", "\ntouch canary\n", "\r", "\\", "\\\n", "-rf", "--", "--wrap=touch canary", "#", "!",
    "$HOME", "*", "~", "\u00e9", "\u2028", "\u202e", "\x1b[31m", "\udce9", " ", "\t", "", "<<EOF",
    "<(touch canary)", "@setup@", "@command@", "%j", "${x:?}", ")", "(", "}", "done", "\n#SBATCH --wrap=x",
    "\n#PBS -q evil\n", "$((", "A" * 5000, "a,b", "[1]", "="]


def hostile_jobs() -> Iterator[tuple[str, Any]]:
    """A field and a hostile value: each text alone, and in several places of an accepted one."""
    for field, good, value in FIELDS:
        for text in HOSTILE:
            for one in (text, good + text, text + good, f"{good} {text}", f"{text} {good}"):
                yield field, value(one)


# A job script as a function, which prints the variable VALUE and the words that launch gets, each with a zero byte.
STUBS = """\
set +e
touch() { : > canary; }
module() { :; }
sleep() { :; }
launch() { { printf '%s\\0' "${VALUE-}" "$@"; } > "$name.args"; }
for script in ../*.sh; do
    name=${script##*/}
    ( . "$script" ) < /dev/null > /dev/null 2>> stderr
done
"""


def test_hostile_values_are_refused_or_do_nothing(tmp_path: Path) -> None:
    """launch gets every word unchanged, and no file appears."""
    scripts: dict[str, Job] = {}
    changed: set[str] = set()
    for number, (field, value) in enumerate(hostile_jobs()):
        try:
            job = job_with(("train.py", "plain"), field, value)
            text = render(SCHEDULERS[number % 2], job)
        except JobError as refused:
            assert refused.field == field, (value, refused)
            continue
        lines = text.split("\n")
        options = lines[1:lines.index("set -euo pipefail")]
        assert all(re.match("#(SBATCH|PBS) [\"']?-", line) for line in options), text
        assert "\r" not in text, text
        changed.add(field)
        if not job.setup:  # these lines are run
            (tmp_path / f"{number}.sh").write_text(text, encoding="utf-8", errors="surrogateescape")
            scripts[f"{number}.sh"] = job
    assert changed >= {"command", "environment", "output", "directives", "container", "setup", "name"}

    folder = tmp_path / "run"
    folder.mkdir()
    environ = {"PATH": "/nowhere", "LC_ALL": "C.UTF-8"}
    done = subprocess.run([shutil.which("bash") or "", "-c", STUBS], cwd=folder, env=environ, timeout=60,
                          capture_output=True)
    assert (done.stdout, done.stderr, (folder / "stderr").read_bytes()) == (b"", b"", b"")
    for name, job in scripts.items():
        value, *words = (folder / f"{name}.args").read_bytes().split(b"\0")[:-1]
        assert value == os.fsencode(job.environment.get("VALUE", "")), name
        command = [os.fsencode(word) for word in job.command]
        assert words[-len(command):] == command, name
    assert {path.name for path in folder.iterdir()} == {"stderr", *(f"{name}.args" for name in scripts)}
