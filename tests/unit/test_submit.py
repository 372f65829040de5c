"""`submit run` and `submit resubmit` with programs that respond as sbatch and qsub do.

The refusals of PBS are recorded ones; those of Slurm are in tests/cluster/test_jobs_slurm.py.
"""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.pythons import make_environment
from tests.unit.submission import REFUSAL, Programs, nothing_submitted, only_folder, pbs, slurm, submit, use_scheduler
from utils.launch import interpreter
from utils.schedulers import SchedulerError, get_scheduler
from utils.submission import build, profiles, records
from utils.submission.files import PROGRAM
from utils.submission.options import COMMANDS

pytest_plugins = ["tests.unit.submission_fixture"]
ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "tests" / "recordings" / "pbs" / "commands"


def dry_run(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """The lines of the script that would be submitted."""
    submit("run", *words, "--dry-run", "train.py")
    return capsys.readouterr().out.splitlines()


# --- dry run

def test_dry_run_prints_the_script_and_runs_no_scheduler_command(
        programs: Programs, capsys: pytest.CaptureFixture[str], work: Path) -> None:
    for name in ("sbatch", "scontrol", "sinfo", "squeue"):
        programs.add(name, f"touch {programs.folder}/called\n")
    assert submit("run", "--site", "lumi", "--account", "p", "--nodes", "2", "--dry-run",
                  "train.py", "--epochs", "3") == 0
    script = capsys.readouterr().out
    assert script.startswith("#!/bin/bash\n") and "#SBATCH --nodes=2\n" in script
    assert script.endswith("run launch --launcher srun -- train.py --epochs 3\n")
    assert not (programs.folder / "called").exists()
    assert list(work.iterdir()) == [work / "train.py"]


def test_dry_run_of_a_refused_job_prints_the_script_and_fails(
        capsys: pytest.CaptureFixture[str]) -> None:
    too_long = ["--site", "derecho", "--account", "p", "--time", "13:00:00"]
    assert submit("run", *too_long, "--dry-run", "train.py") == 1
    printed = capsys.readouterr()
    assert printed.out.startswith("#!/bin/bash")
    assert "would not be submitted: walltime: 13:00:00 is more than the 12:00:00" in printed.err
    assert submit("run", *too_long, "--no-check", "--dry-run", "train.py") == 0
    assert "warning: walltime: 13:00:00 is more than" in capsys.readouterr().err


def test_submitting_imports_no_torch() -> None:
    code = ("import sys; from utils import cli\ncli.main(['submit', 'run', '--site', 'derecho', "
            "'--dry-run', 'train.py'])\nsys.exit('torch' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("site", profiles.names())
@pytest.mark.parametrize("options", [[], ["--launcher", "torchrun"]])
def test_every_site_gives_a_script_that_bash_parses(site: str, options: list[str],
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    lines = dry_run(capsys, "--site", site, "--account", "a", "--nodes", "2", "--time", "1h", *options)
    done = subprocess.run(["bash", "-n"], input="\n".join(lines), capture_output=True, text=True)
    assert done.returncode == 0 and lines, done.stderr


def test_script_holds_settings_of_site_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    lines = dry_run(capsys, *"--site frontier --account ABC123 --nodes 2 --module own/1.0 --signal 120 "
                    "--directive=--network=single_node_vni --time 1:00:00".split(),
                    "--env", "A=b $c", "--setup", "source my/activate")
    expected = ["#SBATCH --account=ABC123", "#SBATCH --gpus-per-node=8", "#SBATCH --cpus-per-task=7",
                "#SBATCH --gpu-bind=closest", "#SBATCH --signal=B:USR1@120",
                "module load rccl-net-plugin", "module load own/1.0",
                "export NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3", "export A='b $c'",
                "source my/activate", "#SBATCH --network=single_node_vni"]
    assert [line for line in expected if line not in lines] == []
    assert "#SBATCH --network=disable_rdzv_get" not in lines  # --directive replaces the site's


def test_options_of_sbatch_are_understood(capsys: pytest.CaptureFixture[str]) -> None:
    lines = dry_run(capsys, *"--site generic-slurm -N 2 -n 8 -c 3 -t 1h30m -p gpu -A p1 -J mine --mem 4G "
                    "-a 0-9%2 -d afterok:7 --gpus-per-node 4 --no-requeue".split())
    for option in ("--nodes=2", "--ntasks-per-node=4", "--cpus-per-task=3", "--time=01:30:00",
                   "--partition=gpu", "--account=p1", "--job-name=mine", "--mem=4G", "--array=0-9%2",
                   "--dependency=afterok:7", "--gpus-per-node=4", "--no-requeue"):
        assert f"#SBATCH {option}" in lines, option


@pytest.mark.parametrize(("words", "present", "absent"), [
    ("--site perlmutter --account m1 --queue debug", "#SBATCH --qos=debug", "partition"),
    ("--site aurora --nodes 2", "#PBS -l select=2:ncpus=204:mpiprocs=12:", "ngpus"),
    ("--site alps --container a.sif", "--container a.sif --gpu-vendor nvidia -- train.py", "$@"),
    ("--site lumi --container a.sif --gpus-per-node 0", "--container a.sif -- train.py", "vendor"),
    ("--site generic-slurm --container a.sif", "--container a.sif -- train.py", "vendor")])
def test_queues_gpus_and_containers_are_as_the_site_has_them(
        words: str, present: str, absent: str, capsys: pytest.CaptureFixture[str]) -> None:
    script = "\n".join(dry_run(capsys, *words.split()))
    assert present in script and absent not in script


# --- one submission

def test_submission_keeps_script_settings_commit_and_id(programs: Programs, work: Path,
                                                        capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["init", "-q"], ["add", "."],
                    ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *command], check=True, env={**os.environ, "HOME": str(work)})
    (work / "new").touch()
    programs.slurm()
    assert slurm("--nodes", "3", "--env", "TEXT=\udcff\n'\"", "train.py", "--lr", "0.1") == 0
    assert capsys.readouterr().out == "101\n"
    folder = only_folder(work)
    assert folder.name.startswith("train-20")
    assert programs.words() == ["--parsable", str(folder / "job.sh")]
    record = json.loads((folder / "submission.json").read_text())
    assert record["job_ids"] == ["101"] and record["submit_folder"] == str(work)
    assert record["job"]["nodes"] == 3 and record["job"]["command"] == ["train.py", "--lr", "0.1"]
    assert record["job"]["environment"]["TEXT"] == "\udcff\n'\""
    assert len(record["git"]["commit"]) == 40 and record["git"]["dirty"] is True
    script = (folder / "job.sh").read_text()
    assert f'#SBATCH "--output={folder}/%j.out"' in script and "-- train.py --lr 0.1" in script


def test_pbs_runs_the_script_without_a_login_shell(programs: Programs, work: Path) -> None:
    programs.pbs()
    assert pbs("--nodes", "2", "--account", "p1", "1. my 'odd' name; é.py") == 0
    words = programs.words()
    script = only_folder(work) / "job.sh"
    assert words[-4:] == ["--", "/bin/bash", "-l", str(script)]
    values = dict(zip(words, words[1:], strict=False))
    assert (values["-A"], values["-o"], values["-N"]) == ("p1", f"{script.parent}/", "my__odd__name__")


def test_two_submissions_in_one_second_have_two_folders(programs: Programs, work: Path) -> None:
    programs.slurm()
    assert slurm("train.py") == slurm("train.py") == 0
    assert len(list((work / "jobs-out").iterdir())) == 2


def test_percent_sign_in_a_folder_is_no_pattern_of_slurm(programs: Programs, work: Path) -> None:
    programs.slurm()
    assert slurm("--folder", "50%j", "train.py") == 0
    assert "/50%%j/" in next((work / "50%j").glob("*/job.sh")).read_text()


def test_module_is_run_as_python_m_does(programs: Programs, work: Path) -> None:
    programs.slurm()
    assert slurm("--nodes", "2", "-m", "package.module", "--lr", "0.1", "-m", "x") == 0
    folder = only_folder(work)
    assert folder.name.startswith("module-")
    assert (folder / "job.sh").read_text().endswith(" -- -m package.module --lr 0.1 -m x\n")


@pytest.mark.parametrize("name", ["slurm", "pbs"])
def test_without_a_site_the_scheduler_of_this_host_is_used(
        name: str, programs: Programs, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    getattr(programs, name)()
    use_scheduler(monkeypatch, get_scheduler(name))
    assert submit("run", "--no-check", "train.py") == 0
    assert records.read(only_folder(work)).site == f"generic-{name}"


def test_no_single_scheduler_is_an_error_that_names_sites(
        work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise SchedulerError("Both sbatch and qsub were found.")
    monkeypatch.setattr(build, "get_scheduler", fail)
    assert submit("run", "train.py") == 1
    message = capsys.readouterr().err
    assert "Both sbatch and qsub" in message and "--site NAME" in message and "derecho" in message


# --- chains

def test_each_job_of_a_chain_waits_for_the_one_before(programs: Programs, work: Path,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    programs.slurm()
    assert slurm("--chain", "3", "--dependency", "afterok:7", "train.py") == 0
    assert capsys.readouterr().out == "101\n102\n103\n"
    folder = only_folder(work)
    expected = ["afterok:7", "afterany:101", "afterany:102"]
    for number, dependency in enumerate(expected, 1):
        lines = (folder / f"job-{number}.sh").read_text().splitlines()
        assert [line for line in lines if "--dep" in line] == [f"#SBATCH --dependency={dependency}"]
    record = json.loads((folder / "submission.json").read_text())
    assert (record["job_ids"], record["dependencies"]) == (["101", "102", "103"], expected)


def test_chain_is_submitted_completely_or_not_at_all(programs: Programs, work: Path,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    programs.slurm()
    programs.refuse(3)
    assert slurm("--chain", "4", "train.py") == 1
    assert programs.submissions == 3
    assert programs.cancelled == ["102", "101"]  # the last first, so that none starts
    assert not (work / "jobs-out").exists()
    printed = capsys.readouterr()
    assert printed.out == "" and REFUSAL.strip() in printed.err


@pytest.mark.parametrize(("time", "noted"), [("2m", True), ("10m", False)])
def test_chain_of_very_short_jobs_is_noted(time: str, noted: bool, programs: Programs, work: Path,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    programs.slurm()
    assert slurm("--chain", "2", "--time", time, "train.py") == 0
    assert ("little time to train" in capsys.readouterr().err) == noted


# --- refusals

@pytest.mark.parametrize(("recording", "words", "line"), [
    ("err_bad_queue", ["--queue", "nosuch"], "-q nosuch"),
    ("err_walltime_over_queue_max", ["--time", "99:00:00"], "walltime=99:00:00"),
    ("err_unknown_resource", ["--directive=-l select=1:nosuchres=4"], "nosuchres=4"),
    ("err_place_syntax", ["--directive=-l place=scattered"], "place=scattered")])
def test_refusal_of_pbs_is_shown_with_the_line_that_caused_it(
        recording: str, words: list[str], line: str, programs: Programs, work: Path,
        capsys: pytest.CaptureFixture[str]) -> None:
    recorded = json.loads((RECORDED / f"{recording}.json").read_text())
    programs.pbs()
    programs.refuse(1, recorded["stderr"], recorded["rc"])
    assert pbs(*words, "train.py") == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert line in printed.err.partition(recorded["stderr"].strip())[2]
    assert not (work / "jobs-out").exists()


@pytest.mark.parametrize("words", [["./missing.py"], ["cancle"]])
def test_dry_run_on_the_cluster_finds_what_a_submission_would(
        words: list[str], programs: Programs, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    programs.slurm()
    assert submit("run", "--dry-run", *words) == 1
    assert "would not be submitted: command: " in capsys.readouterr().err
    assert programs.submissions == 0


def test_job_over_the_published_limits_is_not_submitted(programs: Programs, work: Path,
                                                        capsys: pytest.CaptureFixture[str]) -> None:
    programs.slurm()
    assert submit("run", "--site", "lumi", "--nodes", "2000", "--time", "72:00:00", "train.py") == 1
    message = capsys.readouterr().err
    for found in ("account", "project_", "2000", "1024", "72:00:00", "48:00:00"):
        assert found in message
    assert nothing_submitted(programs, work)


@pytest.mark.parametrize(("words", "message"), [
    ("--nodes 2", "no training script"), ("-m", "-m has no module"), ("-m --lr 1", "-m has no module"),
    ("--env A train.py", "NAME=VALUE"), ("--env A-B=c train.py", "A-B"),
    ("--chain 0 train.py", "--chain is 0"), ("--chain 2 --array 0-3 train.py", "--array"),
    ("--nodes 0 train.py", "--nodes"), ("--time soon train.py", "--time"),
    ("--queue @ train.py", "--partition"),
    ("--ntasks-per-node 99 train.py", "4 cores"), ("--setup if train.py", "--setup"),
    ("--directive nonsense train.py", "--directive"), ("-N 2 -n 3 train.py", "--ntasks 3"),
    ("-n 2 --ntasks-per-node 2 train.py", "Both --ntasks"), ("-n 0 train.py", "--ntasks 0"),
    ("list", f"{PROGRAM} list")])
def test_value_that_cannot_be_used_is_named(words: str, message: str, programs: Programs, work: Path,
                                            capsys: pytest.CaptureFixture[str]) -> None:
    programs.pbs()
    assert pbs(*words.split()) == 1
    assert message in capsys.readouterr().err
    assert nothing_submitted(programs, work)


@pytest.mark.parametrize(("words", "message"), [
    (["cancle", "77"], "command: cancle is neither a file here nor a program on PATH"),
    (["./cancle"], "does not exist"), (["tool"], "Write ./tool")])
def test_command_that_does_not_exist_is_refused(
        words: list[str], message: str, programs: Programs, work: Path,
        capsys: pytest.CaptureFixture[str]) -> None:
    programs.slurm()
    (work / "tool").touch(0o755)
    assert submit("run", "--site", "generic-slurm", *words) == 1
    assert message in capsys.readouterr().err and nothing_submitted(programs, work)


def test_program_that_a_module_brings_need_not_be_here(programs: Programs, work: Path,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    programs.slurm()
    assert submit("run", "--site", "generic-slurm", "--module", "tools", "trainer") == 1
    assert "trainer" not in capsys.readouterr().err  # the folder is refused: it is in /tmp


@pytest.mark.parametrize("name", ["job.sh", "submission.json.unfinished"])
def test_full_disk_is_reported_and_nothing_stays_in_the_queue(
        name: str, programs: Programs, work: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    programs.slurm()
    write_text = Path.write_text

    def full(path: Path, *args: object, **options: object) -> int:
        if path.name == name:
            raise OSError(28, "No space left on device", str(path))
        return write_text(path, *args, **options)  # type: ignore[arg-type]
    monkeypatch.setattr(Path, "write_text", full)
    assert slurm("train.py") == 1
    printed = capsys.readouterr()
    assert "No space left on device" in printed.err and "Traceback" not in printed.err
    assert printed.out == "" and programs.submissions == len(programs.cancelled)
    assert not (work / "jobs-out").exists()


# --- subcommands and options

def typos(word: str) -> set[str]:
    """The words with a letter of this one left out, doubled, or swapped with the next."""
    cut = [(word[:place], word[place:]) for place in range(len(word))]
    return {left + changed for left, right in cut
            for changed in (right[1:], right[:1] + right, right[1::-1] + right[2:])}


def test_mistyped_subcommand_is_never_submitted(programs: Programs, work: Path,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    programs.slurm()
    for word in {typo for name in COMMANDS for typo in typos(name)} - set(COMMANDS):
        assert submit(word, "77") == 2
        printed = capsys.readouterr()
        assert f"{word!r} is not a subcommand. Expected one of: run, status" in printed.err
        assert printed.out == ""
    assert nothing_submitted(programs, work)


@pytest.mark.parametrize(("words", "message"), [
    (["cancle", "77"], f"Did you mean: {PROGRAM} cancel 77"), (["LIST"], f"Did you mean: {PROGRAM} list"),
    (["--nodes", "2", "train.py"], f"Did you mean: {PROGRAM} run --nodes 2 train.py"),
    (["my train.py"], f"Did you mean: {PROGRAM} run 'my train.py'"), ([], "a subcommand is missing"),
    (["run", "--node", "2", "train.py"], "Did you mean --nodes?"),
    (["run", "--ntasks-per-nodes", "2", "train.py"], "Did you mean --ntasks-per-node?"),
    (["list", "--al"], "Did you mean --all?")])
def test_unknown_subcommand_or_option_gets_a_suggestion(words: list[str], message: str, work: Path,
                                                        capsys: pytest.CaptureFixture[str]) -> None:
    assert submit(*words) == 2
    assert message in capsys.readouterr().err


def test_options_after_the_script_are_pointed_out(programs: Programs, work: Path,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    programs.slurm()
    assert slurm("train.py", "--nodes", "4", "--lr", "1") == 0
    message = capsys.readouterr().err
    assert "--nodes comes after the script" in message and "--lr" not in message


@pytest.mark.parametrize("name", ["", *sorted(COMMANDS)])
def test_help_fits_on_a_screen(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit(*[name][: len(name)], "--help") == 0
    lines = capsys.readouterr().out.splitlines()
    assert 5 < len(lines) < (75 if name == "run" else 30)


# --- the Python for the ranks

def test_job_gets_the_python_that_was_chosen_here(programs: Programs, work: Path) -> None:
    programs.slurm()
    assert slurm("train.py") == 0
    assert f"export PYTHON={sys.executable}\n" in (only_folder(work) / "job.sh").read_text()


@pytest.fixture()
def without_torch(tmp_path: Path, programs: Programs, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A conda base without torch is active, and the kit has no .venv."""
    python = make_environment(tmp_path / "base", torch=False)
    monkeypatch.setenv("CONDA_PREFIX", str(python.parents[1]))
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    monkeypatch.delenv("PYTHON", raising=False)
    monkeypatch.setenv(interpreter.STARTED_BY, str(python))
    monkeypatch.setattr(interpreter, "KIT_PYTHON", str(tmp_path / "none"))
    programs.slurm()
    return python


def test_nothing_is_submitted_where_no_python_has_torch(programs: Programs, without_torch: Path,
                                                        capsys: pytest.CaptureFixture[str]) -> None:
    site = ["--site", "generic-slurm"]
    assert submit("run", *site, "train.py") == 1
    assert f"{without_torch} (runs this script) has no torch" in capsys.readouterr().err
    assert submit("run", *site, "--env", f"PYTHON={without_torch}", "train.py") == 1
    assert f"PYTHON is '{without_torch}', which has no torch" in capsys.readouterr().err
    assert submit("run", *site, "--dry-run", "train.py") == 1
    assert programs.submissions == 0


@pytest.mark.parametrize("words", [
    ["--module", "pytorch", "train.py"], ["--setup", "source env.sh", "train.py"],
    ["--container", "a.sif", "train.py"], ["bash"], ["--no-check", "train.py"]])
def test_python_without_torch_is_accepted_where_another_may_come(
        without_torch: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert submit("run", "--site", "generic-slurm", "--dry-run", *words) == 0
    assert ("export PYTHON=" in capsys.readouterr().out) == (words == ["bash"])


def test_modules_of_a_site_may_bring_torch(without_torch: Path, work: Path,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    (work / "site.yaml").write_text("title: Ours\nscheduler: slurm\nmodules: [pytorch]\n")
    assert submit("run", "--site", "site.yaml", "--dry-run", "train.py") == 0
    printed = capsys.readouterr()
    assert "The modules of Ours may bring it" in printed.err
    assert "export PYTHON=" not in printed.out


# --- resubmit

def test_resubmit_submits_the_same_job_in_a_new_folder(
        programs: Programs, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs.slurm()
    assert slurm("--nodes", "3", "--chain", "2", "--env", "A=b \udcff", "--time", "1h", "train.py",
                 "--lr", "é") == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert submit("resubmit", "--no-check", "--folder", str(work / "jobs-out"), "102") == 0
    first, second = sorted((work / "jobs-out").iterdir())
    scripts = [[(folder / f"job-{number}.sh").read_bytes().replace(os.fsencode(folder), b"FOLDER")
                for number in (1, 2)] for folder in (first, second)]
    assert scripts[0][0] == scripts[1][0]
    assert scripts[0][1].replace(b"101", b"103") == scripts[1][1]
    assert records.read(second).submit_folder == str(work)


@pytest.mark.parametrize(("state", "submissions"), [("RUNNING", 1), ("PENDING", 1), ("FAILED", 2)])
def test_job_that_has_not_ended_is_not_resubmitted(
        state: str, submissions: int, programs: Programs, work: Path,
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    programs.slurm()
    monkeypatch.setattr("utils.schedulers.checks.NODE_LOCAL", ())
    assert slurm("train.py") == 0
    programs.add("scontrol", f"echo 'JobId=101 JobName=a'\necho '   JobState={state} Reason=None'\n")
    assert submit("resubmit", "101") == (state != "FAILED")
    assert ("both would train at once" in capsys.readouterr().err) == (state != "FAILED")
    assert programs.submissions == submissions


def test_resubmit_without_a_record_is_an_error(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit("resubmit", "7") == 1
    assert "no record of job 7" in capsys.readouterr().err


def test_scripts_that_a_person_runs_are_executable() -> None:
    for script in (ROOT / "scripts").iterdir():
        if script.is_file() and script.read_bytes().startswith(b"#!"):
            assert os.access(script, os.X_OK), script
