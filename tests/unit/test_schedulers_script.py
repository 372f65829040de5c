"""Job scripts: options, set-up and command of a job, and values that are hostile to a shell."""
from __future__ import annotations

import dataclasses
import os
import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from utils.schedulers import Job, JobError, Pbs, Scheduler, Slurm
from utils.schedulers.script import quote

TEMPLATE = """\
#!/bin/bash
@directives@
set -euo pipefail
@setup@
launch @command@
"""
SCHEDULERS = (Slurm(), Pbs())


def directives(scheduler: Scheduler, **values: Any) -> list[str]:
    return [" ".join(words) for words in scheduler.directives(Job(("train.py",), **values))]


# Options --------------------------------------------------------------------------------------------

FULL: dict[str, Any] = {"nodes": 2, "gpus_per_node": 4, "cores_per_rank": 8, "walltime": 7200,
                        "memory": "64gb", "queue": "gpu", "account": "abc@v100", "name": "t"}


def test_the_options_of_slurm() -> None:
    assert directives(Slurm(), **FULL) == [
        "--job-name=t", "--nodes=2", "--ntasks-per-node=4", "--cpus-per-task=8",
        "--gpus-per-node=4", "--mem=64G", "--time=02:00:00", "--partition=gpu",
        "--account=abc@v100", "--open-mode=append"]
    assert directives(Slurm(), signal_seconds=300, dependency="afterok:12", requeue=True,
                      array="0-9%2") == [
        "--nodes=1", "--array=0-9%2", "--dependency=afterok:12", "--kill-on-invalid-dep=yes",
        "--open-mode=append", "--signal=B:USR1@300", "--requeue"]


def test_the_options_of_pbs() -> None:
    assert directives(Pbs(), **FULL, chunk=("system=polaris",)) == [
        "-l select=2:ncpus=32:mpiprocs=4:ompthreads=8:ngpus=4:mem=64gb:system=polaris",
        "-l place=scatter", "-l walltime=02:00:00", "-N t", "-q gpu", "-A abc@v100", "-j oe",
        "-k doe"]


def test_an_agent_of_torchrun_has_the_cores_of_all_ranks() -> None:
    values: dict[str, Any] = {"gpus_per_node": 4, "cores_per_rank": 8, "launcher": "torchrun"}
    slurm, pbs = directives(Slurm(), **values), directives(Pbs(), **values)
    assert {"--ntasks-per-node=1", "--cpus-per-task=32"} <= set(slurm)
    assert pbs[0] == "-l select=1:ncpus=32:mpiprocs=1:ompthreads=8:ngpus=4"


@pytest.mark.parametrize(("scheduler", "extra", "replaced"), [
    (Slurm(), "--gres=gpu:a100:4", "--gpus-per-node="), (Slurm(), "-G 8", "--gpus-per-node="),
    (Slurm(), "-N1-4", "--nodes="), (Slurm(), "--ntasks=3", "--ntasks-per-node="),
    (Slurm(), "--mem-per-cpu=2G", "--mem="), (Slurm(), "-p long", "--partition="),
    (Pbs(), "-l select=2:ncpus=4", "-l select"), (Pbs(), "-l place=pack", "-l place"),
    (Pbs(), "-l walltime=5,filesystems=home", "-l walltime"), (Pbs(), "-qlong", "-q gpu")])
def test_a_directive_replaces_the_option_for_its_setting(
        scheduler: Scheduler, extra: str, replaced: str) -> None:
    found = directives(scheduler, **FULL, directives=(extra,))
    assert [option for option in found if option.startswith(replaced) or option == extra] == [extra]


@pytest.mark.parametrize(("component", "second"), [
    ("--nodes=1", ["--nodes=1", "--ntasks-per-node=4", "--gpus-per-node=4"]),
    ("-N1 --gpus-per-node=a100:2", ["-N1", "--ntasks-per-node=2", "--gpus-per-node=a100:2"]),
    ("--gres gpu:2 -n 1 -p 'big mem'", ["--nodes=3", "--gres gpu:2", "-n 1", "-p big mem"])])
def test_a_component_differs_by_its_options_only(component: str, second: list[str]) -> None:
    values: dict[str, Any] = {"nodes": 3, "gpus_per_node": 4, "walltime": 60, "queue": "gpu",
                              "output": "o", "directives": ("-C a",)}
    found = directives(Slurm(), **values, components=(component,))
    split = found.index("hetjob")
    assert found[:split] == directives(Slurm(), **values)
    shared = ["--time=00:01:00", "-C a", *([] if " -p " in component else ["--partition=gpu"])]
    assert sorted(found[split + 1:]) == sorted([*second, *shared])


def test_launch_counts_the_gpus_of_every_component() -> None:
    found = directives(Slurm(), nodes=2, directives=("--exclusive",),
                       components=("--nodes=1 --gpus-per-node=2",))
    assert not [option for option in found if "ntasks" in option]


@pytest.mark.parametrize("values", [
    {"array": "1,3"}, {"array": "5-5"}, {"signal_seconds": 60}, {"output": "log-%j.out"},
    {"output": "/home/a:b"}, {"output": "\u00e9.out"}, {"dependency": "afterok:1?afterok:2"},
    {"components": ("--nodes=2",)}])
def test_what_pbs_does_not_support_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(JobError) as refused:
        Pbs().directives(Job(("a.py",), **values))
    assert [refused.value.field] == list(values)


@pytest.mark.parametrize(("field", "value"), [
    ("nodes", 0), ("nodes", True), ("nodes", None), ("gpus_per_node", -1), ("cores_per_rank", 1.5),
    ("walltime", "90"), ("command", ["a.py"]), ("command", ("-x",)), ("command", ("",)),
    ("command", (3,)), ("launcher", ""), ("environment", {"UID": "0"}),
    ("environment", {"A B": "1"}), ("environment", {"A": 1}), ("directives", ("gpu",)),
    ("setup", ("cat <<EOF",)), ("setup", ("if true; then",)), ("setup", ("echo 'a",)),
    ("setup", ("(",)), ("setup", ("echo \\",)), ("setup", ("a\nb",))])
def test_a_value_that_cannot_be_used_is_refused(field: str, value: Any) -> None:
    with pytest.raises(JobError) as refused:
        Slurm().render(Job(**{"command": ("a.py",), field: value}), TEMPLATE)
    assert refused.value.field == field and str(refused.value).startswith(f"{field}: ")


# Script ---------------------------------------------------------------------------------------------

def test_a_script_has_modules_environment_setup_and_command() -> None:
    job = Job(("my train.py", "--lr", "1e-3"), modules=("cuda/12.4",),
              environment={"A": "two words"}, setup=("source env.sh",), launcher="mpiexec",
              ranks_per_node=2)
    assert Slurm().render(job, TEMPLATE).split("\n")[-6:-1] == [
        "set -euo pipefail", "module load cuda/12.4", "export A='two words'", "source env.sh",
        "launch --launcher mpiexec --ntasks-per-node 2 -- 'my train.py' --lr 1e-3"]


@pytest.mark.parametrize(("job", "command"), [
    (Job(launcher="torchrun"), '--torchrun -- "$@"'),
    (Job(("train.py", "-x"), container="my image.sif", gpu_vendor="amd"),
     "--container 'my image.sif' --gpu-vendor amd -- train.py -x"),
    (Job(("train.py", "-x"), container="i.sif"), "--container i.sif -- train.py -x"),
    (Job(("@setup@", "@command@")), "-- @setup@ @command@")])
def test_the_arguments_of_launch(job: Job, command: str) -> None:
    assert Slurm().render(job, TEMPLATE).endswith(f"\nlaunch {command}\n")


def test_a_directive_with_blanks_quotes_and_a_hash() -> None:
    script = Slurm().render(Job(("a.py",), output='logs/a "b" # %j.out'), TEMPLATE)
    assert '#SBATCH "--output=logs/a \\"b\\" # %j.out"' in script.split("\n")


def test_a_script_of_pbs_sends_the_signal_itself() -> None:
    job = Job(("a.py",), walltime=3600, signal_seconds=300)
    assert '(sleep 3300 && kill -USR1 "$$")' in Pbs().render(job, TEMPLATE)


# Hostile values -------------------------------------------------------------------------------------

GOOD = {  # for each field an accepted value, to which hostile text is added
    "command": "train.py", "memory": "64G", "queue": "gpu", "account": "abc", "name": "run",
    "array": "0-9", "dependency": "afterany:12", "setup": "true", "modules": "cuda",
    "environment": "value", "launcher": "srun", "output": "out.log",
    "directives": "--constraint=a100", "components": "--nodes=2", "chunk": "system=polaris",
    "container": "image.sif", "gpu_vendor": "amd", "variable": "NAME", "nodes": "2",
    "walltime": "60"}
HOSTILE = [
    "'", '"', "`", "`touch canary`", "$(touch canary)", ";touch canary;", "; touch canary #",
    "&& touch canary", "| touch canary", "> canary", "\n", "\ntouch canary\n", "\r\n", "\r", "\\",
    "\\\n", "-rf", "--", "--wrap=touch canary", "#", "!", "!!", "$HOME", "${IFS}", "*", "?", "~",
    "\u00e9", "\U0001f600", "\u2028", "\u202e", "\x00", "\x07", "\x1b[31m", "\udce9", "\ud800", " ",
    "\t", "", "EOF", "<<EOF", "<(touch canary)", "@setup@", "@command@", "@directives@", "%j",
    "${x:?}", ")", "(", "}", "{", "fi", "done", "\n#SBATCH --wrap=x", "\n#PBS -q evil\n", "$((",
    "A" * 5000, "a,b", "[1]", "^", "="]
TUPLES = ("setup", "modules", "directives", "components", "chunk")


def hostile_job(chance: random.Random) -> tuple[str, dict[str, Any]]:
    """A field, and the values of a job in which this field is hostile."""
    field = chance.choice(list(GOOD))
    text = "".join(chance.choice(HOSTILE) for _ in range(chance.randint(1, 4)))
    good = GOOD[field]
    value = chance.choice([text, good + text, text + good, f"{good} {text}"])
    values: dict[str, Any] = {"command": ("train.py", "plain")}
    if field == "command":
        values[field] = ("train.py", value) if chance.random() < 0.5 else (value, "plain")
    elif field == "environment":
        values[field] = {"VALUE": value}
    elif field == "variable":
        field, values["environment"] = "environment", {value: "1"}
    else:
        values[field] = (value,) if field in TUPLES else value
    return field, values


@dataclasses.dataclass
class Rendered:
    job: Job
    text: str
    path: Path


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> list[Rendered]:
    """The scripts of 5,000 jobs with a hostile value, except the refused ones, as files."""
    chance = random.Random(11)
    folder = tmp_path_factory.mktemp("scripts")
    found: list[Rendered] = []
    for number in range(5000):
        field, values = hostile_job(chance)
        try:
            job = Job(**values)
            script = Rendered(job, SCHEDULERS[number % 2].render(job, TEMPLATE),
                              folder / f"{number}.sh")
        except JobError as refused:
            assert refused.field == field, (values, refused)
            continue
        script.path.write_text(script.text, encoding="utf-8", errors="surrogateescape")
        found.append(script)
    return found


def test_hostile_values_are_refused_or_rendered(rendered: list[Rendered]) -> None:
    assert 500 < len(rendered) < 4500
    plain = Job(("train.py", "plain"))
    changed = {field.name for field in dataclasses.fields(Job) for script in rendered
               if getattr(script.job, field.name) != getattr(plain, field.name)}
    assert changed >= {"command", "environment", "output", "directives", "container", "setup", "name"}


def test_no_hostile_value_leaves_its_directive(rendered: list[Rendered]) -> None:
    for script in rendered:
        lines = script.text.split("\n")
        options = lines[1:lines.index("set -euo pipefail")]
        assert all(re.match("#(SBATCH|PBS) [\"']?-|#SBATCH hetjob$", line) for line in options)
        assert "\r" not in script.text, script.text


def test_scripts_with_hostile_values_pass_bash_n(rendered: list[Rendered], tmp_path: Path) -> None:
    # Each as a function of one file, one process instead of thousands; some also by themselves.
    together = tmp_path / "all"
    with together.open("w", encoding="utf-8", errors="surrogateescape") as file:
        for script in rendered:
            file.write(f"f{script.path.stem}() {{\n{script.text}\n}}\n")
    alone = " ".join(str(script.path) for script in rendered[::12])
    check = f'bash -n "$0" && for f in {alone}; do bash -n "$f" || exit; done'
    done = subprocess.run(["bash", "-c", check, str(together)], capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


STUBS = """\
set +e
touch() { : > canary; }
module() { :; }
sleep() { :; }
launch() { { printf '%s\\0' "${VALUE-}" "$@"; } > "$name.args"; }
for script in $SCRIPTS; do
    name=${script##*/}
    ( . "$script" ) < /dev/null > /dev/null 2>> stderr
done
"""


def test_scripts_run_nothing_of_hostile_values(rendered: list[Rendered], tmp_path: Path) -> None:
    """Run the scripts: launch gets every word and variable unchanged, and no file appears."""
    scripts = [script for script in rendered if not script.job.setup][::2]  # set-up lines are run
    environ = {"PATH": "/nowhere", "LC_ALL": "C.UTF-8",
               "SCRIPTS": " ".join(str(script.path) for script in scripts)}
    done = subprocess.run([shutil.which("bash") or "", "-c", STUBS], cwd=tmp_path, env=environ,
                          timeout=60, capture_output=True)
    assert (done.stdout, done.stderr) == (b"", b"")
    assert (tmp_path / "stderr").read_bytes() == b""
    for script in scripts:
        value, *words = (tmp_path / f"{script.path.name}.args").read_bytes().split(b"\0")[:-1]
        assert value == os.fsencode(script.job.environment.get("VALUE", "")), script.text
        command = [os.fsencode(word) for word in script.job.command]
        assert words[-len(command):] == command, script.text
    expected = {"stderr", *(f"{script.path.name}.args" for script in scripts)}
    assert {path.name for path in tmp_path.iterdir()} == expected


def test_any_text_is_quoted_as_one_word() -> None:
    chance = random.Random(13)
    pieces = [piece for piece in HOSTILE if piece not in ("\x00", "\ud800")]
    texts = ["".join(chance.choices(pieces, k=chance.randint(0, 6))) for _ in range(1000)]
    script = "printf '%s\\0' " + " ".join(map(quote, texts))
    shown = subprocess.run(["bash", "-s"], input=os.fsencode(script), capture_output=True).stdout
    assert shown.split(b"\0")[:-1] == [os.fsencode(text) for text in texts]
