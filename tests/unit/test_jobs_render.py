"""Job scripts: what a job asks for is in them, and nothing that a value holds is ever run."""
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

from utils.schedulers import Job, JobError, Pbs, Slurm, format_walltime, parse_walltime
from utils.schedulers.script import quote

TEMPLATE = """\
#!/bin/bash
@directives@
set -euo pipefail
@setup@
python "$KIT/scripts/launch.py" @command@
"""
SCHEDULERS = (Slurm(), Pbs())


def directives(scheduler: Slurm | Pbs, **values: Any) -> list[str]:
    return [" ".join(words) for words in scheduler.directives(Job(("train.py",), **values))]


# Slurm ----------------------------------------------------------------------------------------------------------------

def test_slurm_is_asked_for_one_task_for_each_gpu() -> None:
    assert directives(Slurm(), nodes=2, gpus_per_node=4, cores_per_rank=8, walltime=7200, memory="64gb",
                      queue="gpu", account="abc@v100") == [
        "--nodes=2", "--ntasks-per-node=4", "--cpus-per-task=8", "--gpus-per-node=4", "--mem=64G", "--time=02:00:00",
        "--partition=gpu", "--account=abc@v100", "--open-mode=append"]


def test_slurm_starts_one_torchrun_on_each_node_with_the_cores_of_all_ranks() -> None:
    found = directives(Slurm(), gpus_per_node=4, cores_per_rank=8, launcher="torchrun")
    assert "--ntasks-per-node=1" in found and "--cpus-per-task=32" in found


def test_slurm_signals_the_script_and_ends_a_job_whose_dependency_cannot_be_met() -> None:
    found = directives(Slurm(), signal_seconds=300, dependency="afterok:12", requeue=True, array="0-9%2")
    assert {"--signal=B:USR1@300", "--dependency=afterok:12", "--kill-on-invalid-dep=yes", "--requeue",
            "--array=0-9%2"} <= set(found)


@pytest.mark.parametrize(("extra", "ours"), [
    ("--gres=gpu:a100:4", "--gpus-per-node"), ("-G 8", "--gpus-per-node"), ("-N1-4", "--nodes"),
    ("--ntasks=3", "--ntasks-per-node"), ("--mem-per-cpu=2G", "--mem"), ("-p long", "--partition")])
def test_an_extra_option_takes_the_place_of_ours(extra: str, ours: str) -> None:
    found = directives(Slurm(), gpus_per_node=4, memory="8G", queue="gpu", directives=(extra,))
    assert extra in found
    assert not [option for option in found if option.startswith(ours + "=")]


@pytest.mark.parametrize(("said", "second"), [
    ("--nodes=1", ["--nodes=1", "--ntasks-per-node=4", "--gpus-per-node=4"]),  # for the rest like the first
    ("-N1 --gpus-per-node=a100:2", ["-N1", "--ntasks-per-node=2", "--gpus-per-node=a100:2"]),  # a rank for each GPU
    ("--gres gpu:2 -n 1 -p 'big mem'", ["--nodes=3", "--gres gpu:2", "-n 1", "-p big mem"])])
def test_a_further_component_is_like_the_first_but_for_what_it_says(said: str, second: list[str]) -> None:
    found = directives(Slurm(), nodes=3, gpus_per_node=4, walltime=60, queue="gpu", output="o", directives=("-C a",),
                       components=(said,))
    first, second_found = found[:found.index("hetjob")], found[found.index("hetjob") + 1:]
    assert first == directives(Slurm(), nodes=3, gpus_per_node=4, walltime=60, queue="gpu", output="o",
                               directives=("-C a",))
    shared = ["--time=00:01:00", "-C a", *([] if " -p " in said else ["--partition=gpu"])]
    assert sorted(second_found) == sorted([*second, *shared])


def test_where_launch_counts_the_gpus_it_does_so_for_every_component() -> None:
    found = directives(Slurm(), nodes=2, directives=("--exclusive",), components=("--nodes=1 --gpus-per-node=2",))
    assert not [option for option in found if "ntasks" in option]


def test_slurm_reads_a_directive_with_blanks_quotes_and_a_hash() -> None:
    script = Slurm().render(Job(("a.py",), output='logs/a "b" # %j.out'), TEMPLATE)
    assert '#SBATCH "--output=logs/a \\"b\\" # %j.out"' in script.split("\n")


# PBS ------------------------------------------------------------------------------------------------------------------

def test_pbs_is_asked_for_chunks_on_hosts_of_their_own_with_gpus_and_no_surplus_of_threads() -> None:
    assert directives(Pbs(), nodes=2, gpus_per_node=4, cores_per_rank=8, walltime=7200, memory="64G", queue="gpu",
                      account="abc", name="t", chunk=("system=polaris",)) == [
        "-l select=2:ncpus=32:mpiprocs=4:ompthreads=8:ngpus=4:mem=64gb:system=polaris", "-l place=scatter",
        "-l walltime=02:00:00", "-N t", "-q gpu", "-A abc", "-j oe", "-k doe"]


def test_pbs_has_one_line_in_the_node_file_for_each_torchrun() -> None:
    assert directives(Pbs(), gpus_per_node=4, cores_per_rank=8, launcher="torchrun")[0] == (
        "-l select=1:ncpus=32:mpiprocs=1:ompthreads=8:ngpus=4")


@pytest.mark.parametrize(("extra", "ours"), [
    ("-l select=2:ncpus=4", "-l select"), ("-l place=pack", "-l place"), ("-l walltime=5,filesystems=home",
                                                                           "-l walltime"), ("-qlong", "-q gpu")])
def test_an_extra_option_of_pbs_takes_the_place_of_ours(extra: str, ours: str) -> None:
    found = directives(Pbs(), walltime=60, queue="gpu", directives=(extra,))
    assert extra in found
    assert not [option for option in found if option.startswith(ours) and option != extra]


def test_under_pbs_the_script_itself_sends_the_signal_before_the_end() -> None:
    assert '(sleep 3300 && kill -USR1 "$$")' in Pbs().render(
        Job(("a.py",), walltime=3600, signal_seconds=300), TEMPLATE)


@pytest.mark.parametrize(("field", "values"), [
    ("array", {"array": "1,3"}), ("array", {"array": "5-5"}), ("signal_seconds", {"signal_seconds": 60}),
    ("output", {"output": "log-%j.out"}), ("output", {"output": "/home/a:b"}), ("output", {"output": "\u00e9.out"}),
    ("dependency", {"dependency": "afterok:1?afterok:2"})])
def test_what_pbs_does_not_know_is_refused_by_name(field: str, values: dict[str, Any]) -> None:
    with pytest.raises(JobError) as refused:
        Pbs().directives(Job(("a.py",), **values))
    assert refused.value.field == field


# The script -----------------------------------------------------------------------------------------------------------

def test_a_script_holds_modules_environment_set_up_and_command_in_this_order() -> None:
    job = Job(("my train.py", "--lr", "1e-3"), modules=("cuda/12.4",), environment={"A": "two words"},
              setup=("source env.sh",), launcher="mpiexec", ranks_per_node=2)
    assert Slurm().render(job, TEMPLATE).split("\n")[-6:-1] == [
        "set -euo pipefail", "module load cuda/12.4", "export A='two words'", "source env.sh",
        "python \"$KIT/scripts/launch.py\" --by mpiexec --ranks-per-node 2 -- 'my train.py' --lr 1e-3"]


def test_without_a_command_the_script_takes_its_own_arguments() -> None:
    assert Slurm().render(Job(launcher="torchrun"), TEMPLATE).endswith('launch.py" --torchrun -- "$@"\n')


@pytest.mark.parametrize(("vendor", "option"), [("amd", " --gpu-vendor amd"), (None, "")])
def test_which_container_program_a_job_takes_is_left_to_the_job(vendor: str | None, option: str) -> None:
    job = Job(("train.py", "-x"), container="my image.sif", gpu_vendor=vendor)
    assert Slurm().render(job, TEMPLATE).endswith(f"--container 'my image.sif'{option} -- train.py -x\n")


def test_what_is_put_into_a_template_is_not_searched_for_markers() -> None:
    script = Slurm().render(Job(("@setup@", "@command@"), environment={"A": "@directives@"}), TEMPLATE)
    assert script.endswith("-- @setup@ @command@\n") and "\nexport A=@directives@\n" in script


@pytest.mark.parametrize(("text", "seconds"), [("2:00:00", 7200), ("90", 5400), ("30:00", 1800), ("1-12", 129600),
                                               ("1-12:30:15", 131415), ("120:00:00", 432000),
                                               ("30m", 1800), ("1h30m", 5400), ("2h", 7200), ("1.5h", 5400),
                                               ("1d 12h", 129600), ("90 min", 5400), ("45s", 45), ("2 Days", 172800),
                                               ("1 hour 30 minutes", 5400)])
def test_a_walltime_is_read_in_every_form(text: str, seconds: int) -> None:
    assert parse_walltime(text) == seconds
    assert parse_walltime(format_walltime(seconds)) == seconds


@pytest.mark.parametrize("text", ["", "0", "00:00:00", "1x", "0h", "h", "1h1h", "-5", "1:2:3:4", "1-", "\u0663",
                                  "9" * 5000])
def test_what_is_no_walltime_is_refused(text: str) -> None:
    with pytest.raises(JobError, match="walltime"):
        parse_walltime(text)


@pytest.mark.parametrize(("field", "value"), [
    ("nodes", 0), ("nodes", True), ("nodes", None), ("gpus_per_node", -1), ("cores_per_rank", 1.5), ("walltime", "90"),
    ("command", ["a.py"]), ("command", ("-x",)), ("command", ("",)), ("command", (3,)), ("launcher", ""),
    ("environment", {"UID": "0"}), ("environment", {"A B": "1"}), ("environment", {"A": 1}), ("directives", ("gpu",)),
    ("setup", ("cat <<EOF",)), ("setup", ("if true; then",)), ("setup", ("echo 'a",)), ("setup", ("(",)),
    ("setup", ("echo \\",)), ("setup", ("a\nb",))])
def test_a_value_that_cannot_be_used_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(JobError) as refused:
        Slurm().render(Job(**{"command": ("a.py",), field: value}), TEMPLATE)
    assert refused.value.field == field and str(refused.value).startswith(f"{field}: ")


# Hostile values -------------------------------------------------------------------------------------------------------

GOOD = {  # for each field a value that is accepted, to which the hostile text is put
    "command": "train.py", "memory": "64G", "queue": "gpu", "account": "abc", "name": "run", "array": "0-9",
    "dependency": "afterany:12", "setup": "true", "modules": "cuda", "environment": "value", "launcher": "srun",
    "output": "out.log", "directives": "--constraint=a100", "components": "--nodes=2", "chunk": "system=polaris",
    "container": "image.sif", "gpu_vendor": "amd", "variable": "NAME", "nodes": "2", "walltime": "60"}
HOSTILE = [
    "'", '"', "`", "`touch canary`", "$(touch canary)", ";touch canary;", "; touch canary #", "&& touch canary",
    "| touch canary", "> canary", "\n", "\ntouch canary\n", "\r\n", "\r", "\\", "\\\n", "-rf", "--",
    "--wrap=touch canary", "#", "!", "!!", "$HOME", "${IFS}", "*", "?", "~", "\u00e9", "\U0001f600", "\u2028",
    "\u202e", "\x00", "\x07", "\x1b[31m", "\udce9", "\ud800", " ", "\t", "", "EOF", "<<EOF", "<(touch canary)",
    "@setup@", "@command@", "@directives@", "%j", "${x:?}", ")", "(", "}", "{", "fi", "done", "\n#SBATCH --wrap=x",
    "\n#PBS -q evil\n", "$((", "A" * 5000, "a,b", "[1]", "^", "="]
TUPLES = ("setup", "modules", "directives", "components", "chunk")


def hostile_job(chance: random.Random) -> tuple[str, dict[str, Any]]:
    """A field, and the values of a job in which this field is hostile."""
    field = chance.choice(list(GOOD))
    value = "".join(chance.choice(HOSTILE) for _ in range(chance.randint(1, 4)))
    value = chance.choice([value, GOOD[field] + value, value + GOOD[field], f"{GOOD[field]} {value}"])
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
    number: int

    def path(self, folder: Path) -> Path:
        return folder / f"{self.number}.sh"


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Rendered]]:
    """The scripts of 5,000 jobs with a hostile value, as far as they are not refused, written into a folder."""
    chance = random.Random(11)
    folder = tmp_path_factory.mktemp("scripts")
    found: list[Rendered] = []
    for number in range(5000):
        field, values = hostile_job(chance)
        scheduler = SCHEDULERS[number % 2]
        try:
            job = Job(**values)
            script = Rendered(job, scheduler.render(job, TEMPLATE), number)
        except JobError as refused:
            assert refused.field == field, (values, refused)
            continue
        script.path(folder).write_text(script.text, encoding="utf-8", errors="surrogateescape")
        found.append(script)
    return folder, found


def test_hostile_values_are_refused_or_rendered_but_both_happen(rendered: tuple[Path, list[Rendered]]) -> None:
    assert 500 < len(rendered[1]) < 4500
    touched = [field for field in GOOD if field != "variable" and any(
        getattr(script.job, field) not in (getattr(Job(("train.py", "plain")), field),) for script in rendered[1])]
    assert set(touched) >= {"command", "environment", "output", "directives", "container", "setup", "name"}


def test_no_hostile_value_leaves_its_directive_line(rendered: tuple[Path, list[Rendered]]) -> None:
    for script in rendered[1]:
        lines = script.text.split("\n")
        head = lines[1:lines.index("set -euo pipefail")]
        assert all(re.match("#(SBATCH|PBS) [\"']?-|#SBATCH hetjob$", line) for line in head), script.text
        assert not any("\r" in line for line in lines), script.text


def test_scripts_with_hostile_values_pass_bash_n(rendered: tuple[Path, list[Rendered]]) -> None:
    folder, scripts = rendered
    # Each as a function of one file, which is one process instead of thousands; then some on their own.
    together = folder / "all"
    with together.open("w", encoding="utf-8", errors="surrogateescape") as file:
        for script in scripts:
            file.write(f"f{script.number}() {{\n{script.text}\n}}\n")
    alone = " ".join(str(script.path(folder)) for script in scripts[::12])
    checked = subprocess.run(["bash", "-c", f'bash -n "$0" && for f in {alone}; do bash -n "$f" || exit; done',
                              str(together)], capture_output=True)
    assert (checked.returncode, checked.stderr) == (0, b"")


STUBS = """\
set +e
touch() { : > "$SANDBOX/canary"; }
module() { :; }
sleep() { :; }
python() { { printf '%s\\0' "${VALUE-}" "$@"; } > "$SANDBOX/$number.args"; }
export KIT=/kit
for number in $NUMBERS; do
    ( . "$SCRIPTS/$number.sh" ) < /dev/null > /dev/null 2>> "$SANDBOX/stderr"
done
"""


def test_scripts_with_hostile_values_run_nothing_of_them(rendered: tuple[Path, list[Rendered]], tmp_path: Path) -> None:
    """Really run, with functions in place of commands: launch.py gets every word and variable as it was given."""
    folder, scripts = rendered
    run = [script for script in scripts if not script.job.setup][::2]  # set-up lines are shell and are to be run
    sandbox = tmp_path / "sandbox"
    sandbox.mkdir()
    done = subprocess.run([shutil.which("bash") or "", "-c", STUBS], cwd=sandbox, timeout=60, capture_output=True, env={
        "PATH": "/nowhere", "SANDBOX": str(sandbox), "SCRIPTS": str(folder), "LC_ALL": "C.UTF-8",
        "NUMBERS": " ".join(str(script.number) for script in run)})
    assert (done.stdout, done.stderr) == (b"", b"")
    assert (sandbox / "stderr").read_bytes() == b""
    for script in run:
        passed = (sandbox / f"{script.number}.args").read_bytes().split(b"\0")[:-1]
        value = script.job.environment.get("VALUE", "")
        assert passed[0] == os.fsencode(value), script.text
        words = [os.fsencode(word) for word in script.job.command]
        assert passed[-len(words):] == words and passed[1] == b"/kit/scripts/launch.py", script.text
    assert {path.name for path in sandbox.iterdir()} == {"stderr", *(f"{script.number}.args" for script in run)}


def test_every_text_is_quoted_so_that_bash_reads_the_same() -> None:
    chance = random.Random(13)
    texts = ["".join(chance.choice([piece for piece in HOSTILE if piece not in ("\x00", "\ud800")])
                     for _ in range(chance.randint(0, 6))) for _ in range(1000)]
    script = "printf '%s\\0' " + " ".join(map(quote, texts))
    shown = subprocess.run(["bash", "-s"], input=os.fsencode(script), capture_output=True).stdout
    assert shown.split(b"\0")[:-1] == [os.fsencode(text) for text in texts]
