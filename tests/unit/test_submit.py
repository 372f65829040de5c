"""submit.py with programs that answer as sbatch and qsub do, and with schedulers made up for watching.

The refusals of PBS are recorded ones; Slurm itself is asked in tests/cluster/test_jobs_slurm.py.
"""
from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.pythons import make_environment

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))  # where the scripts import each other from
import following
import interpreter
import job_scripts
import launch_recorded
import records
import submit

from utils.schedulers import SchedulerError, Status

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "tests" / "recordings" / "pbs" / "commands"
# Prints 101, 102, ... and keeps its words. It refuses the submission whose number is in the file `refuse`.
SUBMITTER = """\
#!/bin/bash
cd {folder}
count=$(($(cat count 2>/dev/null || echo 0) + 1)); echo $count > count
printf '%s\\n' "$@" > words-$count
if [ "$(cat refuse 2>/dev/null)" = $count ]; then cat said >&2; exit "$(cat status)"; fi
echo $((100 + count)){server}
"""
SAID = "sbatch: error: invalid partition specified: nosuch\n"


class Programs:
    """Stand-ins for a scheduler's programs, alone on PATH with the few that a job script and git need."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        for name in ("bash", "cat", "git", "env"):
            (folder / name).symlink_to(shutil.which(name) or name)

    def add(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)
        (self.folder / name).chmod(0o755)

    def slurm(self) -> None:
        self.add("sbatch", SUBMITTER.format(folder=self.folder, server=""))
        self.add("scancel", f'#!/bin/bash\necho "$1" >> {self.folder}/cancelled\n')
        for name in ("scontrol", "sinfo", "squeue", "sacct"):  # what cannot be answered is no problem
            self.add(name, "#!/bin/bash\nexit 1\n")

    def pbs(self) -> None:
        self.add("qsub", SUBMITTER.format(folder=self.folder, server=".head"))
        self.add("qdel", f'#!/bin/bash\necho "$1" >> {self.folder}/cancelled\n')
        for name in ("qstat", "pbsnodes", "qselect"):
            self.add(name, "#!/bin/bash\nexit 1\n")

    def refuse(self, number: int, said: str = SAID, status: int = 1) -> None:
        (self.folder / "refuse").write_text(str(number))
        (self.folder / "said").write_text(said)
        (self.folder / "status").write_text(str(status))

    def words(self, number: int = 1) -> list[str]:
        return (self.folder / f"words-{number}").read_text().splitlines()

    @property
    def submissions(self) -> int:
        count = self.folder / "count"
        return int(count.read_text()) if count.exists() else 0

    @property
    def cancelled(self) -> list[str]:
        file = self.folder / "cancelled"
        return file.read_text().split() if file.exists() else []


@pytest.fixture()
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with train.py, from which jobs are submitted."""
    folder = tmp_path / "my work"
    folder.mkdir()
    (folder / "train.py").touch()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture()
def programs(tmp_path: Path, work: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    made = Programs(tmp_path / "bin")
    monkeypatch.setenv("PATH", str(made.folder))
    return made


def slurm(*words: str) -> int:
    return submit.main(["run", "--site", "generic-slurm", "--no-check", *words])


def pbs(*words: str) -> int:
    return submit.main(["run", "--site", "generic-pbs", "--no-check", *words])


def only_folder(work: Path) -> Path:
    folders = list((work / "jobs-out").iterdir())
    assert len(folders) == 1
    return folders[0]


# --- dry run

def test_a_dry_run_prints_the_script_and_asks_no_scheduler(programs: Programs, capsys: pytest.CaptureFixture[str],
                                                           work: Path) -> None:
    programs.add("sbatch", f"#!/bin/bash\ntouch {programs.folder}/asked\n")
    for name in ("scontrol", "sinfo", "squeue"):
        shutil.copy(programs.folder / "sbatch", programs.folder / name)
    assert submit.main(["run", "--site", "lumi", "--account", "p", "--nodes", "2", "--dry-run", "train.py",
                        "--epochs", "3"]) == 0
    script = capsys.readouterr().out
    assert script.startswith("#!/bin/bash\n") and "#SBATCH --nodes=2\n" in script and "train.py --epochs 3" in script
    assert not (programs.folder / "asked").exists()
    assert list(work.iterdir()) == [work / "train.py"]


def test_a_dry_run_of_what_would_be_refused_prints_the_script_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    too_long = ["--site", "derecho", "--account", "p", "--time", "13:00:00"]
    assert submit.main(["run", *too_long, "--dry-run", "train.py"]) == 1
    said = capsys.readouterr()
    assert said.out.startswith("#!/bin/bash") and "would not be submitted: 13:00:00 is over the limit" in said.err
    assert submit.main(["run", *too_long, "--no-check", "--dry-run", "train.py"]) == 0
    assert "warning: 13:00:00 is over the limit" in capsys.readouterr().err


def test_submitting_loads_no_torch() -> None:
    code = ("import sys; sys.path.insert(0, 'scripts'); import submit\n"
            "submit.main(['run', '--site', 'derecho', '--nodes', '4', '--dry-run', 'train.py'])\n"
            "sys.exit('torch' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("site", ["derecho", "polaris", "aurora", "perlmutter", "frontier", "lumi", "alps", "jean-zay",
                                  "generic-slurm", "generic-pbs"])
@pytest.mark.parametrize("launcher", [None, "torchrun"])
def test_every_site_gives_a_script_that_bash_reads(site: str, launcher: str | None,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--launcher", launcher] if launcher else []
    assert submit.main(["run", "--site", site, "--account", "a", "--nodes", "2", "--time", "1:00:00", *words,
                        "--dry-run", "train.py"]) == 0
    script = capsys.readouterr().out
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_settings_of_a_site_and_of_the_options_are_in_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    submit.main(["run", "--site", "frontier", "--account", "ABC123", "--nodes", "2", "--module", "own/1.0", "--env",
                 "A=b $c", "--set-up", "source my/activate", "--directive=--network=single_node_vni", "--signal",
                 "120", "--time", "1:00:00", "--dry-run", "train.py"])
    lines = capsys.readouterr().out.splitlines()
    for line in ("#SBATCH --account=ABC123", "#SBATCH --gpus-per-node=8", "#SBATCH --cpus-per-task=7",
                 "#SBATCH --gpu-bind=closest", "#SBATCH --signal=B:USR1@120", "module load rccl-net-plugin",
                 "module load own/1.0", "export NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3", "export A='b $c'",
                 "source my/activate", "#SBATCH --network=single_node_vni"):
        assert line in lines
    assert "#SBATCH --network=disable_rdzv_get" not in lines  # the option takes the place of the site's


def test_a_queue_may_be_a_qos(capsys: pytest.CaptureFixture[str]) -> None:
    submit.main(["run", "--site", "perlmutter", "--account", "m1", "--queue", "debug", "--dry-run", "train.py"])
    lines = capsys.readouterr().out.splitlines()
    assert "#SBATCH --qos=debug" in lines
    assert not [line for line in lines if "partition" in line]


def test_gpus_are_not_asked_for_where_the_scheduler_knows_none(capsys: pytest.CaptureFixture[str]) -> None:
    submit.main(["run", "--site", "aurora", "--account", "p", "--nodes", "2", "--dry-run", "train.py"])
    script = capsys.readouterr().out
    assert "#PBS -l select=2:ncpus=204:mpiprocs=12:" in script
    assert "ngpus" not in script and "--ranks-per-node 12" in script


@pytest.mark.parametrize(("site", "options", "vendor"), [
    ("alps", [], " --gpu-vendor nvidia"), ("lumi", [], " --gpu-vendor amd"), ("aurora", [], " --gpu-vendor intel"),
    ("lumi", ["--gpus-per-node", "0"], ""), ("generic-slurm", [], "")])
def test_a_container_is_shown_the_gpus_of_the_site(site: str, options: list[str], vendor: str,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    submit.main(["run", "--site", site, *options, "--container", "my image.sif", "--dry-run", "train.py"])
    assert f"--container 'my image.sif'{vendor} -- train.py" in capsys.readouterr().out


# --- submitting

def test_a_submission_keeps_script_settings_commit_and_id(programs: Programs, work: Path,
                                                          capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["init", "-q"], ["add", "."],
                    ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *command], check=True, env={**os.environ, "HOME": str(work)})
    (work / "new").touch()
    programs.slurm()
    assert slurm("--nodes", "3", "train.py", "--lr", "0.1") == 0
    assert capsys.readouterr().out == "101\n"
    folder = only_folder(work)
    assert folder.name.startswith("train-20")
    assert programs.words() == ["--parsable", str(folder / "job.sh")]
    record = json.loads((folder / "submission.json").read_text())
    assert record["job_ids"] == ["101"]
    assert record["job"]["nodes"] == 3 and record["job"]["command"] == ["train.py", "--lr", "0.1"]
    assert record["submit_folder"] == str(work)
    assert len(record["git"]["commit"]) == 40 and record["git"]["dirty"] is True
    script = (folder / "job.sh").read_text()
    assert f'#SBATCH "--output={folder}/%j.out"' in script and "train.py --lr 0.1" in script


def test_pbs_runs_the_script_without_a_login_shell_around_it(programs: Programs, work: Path) -> None:
    programs.pbs()
    assert pbs("--nodes", "2", "--account", "p1", "train.py") == 0
    words = programs.words()
    script = only_folder(work) / "job.sh"
    assert words[-4:] == ["--", "/bin/bash", "-l", str(script)]
    assert words[words.index("-A") + 1] == "p1" and words[words.index("-o") + 1] == f"{script.parent}/"


def test_two_submissions_in_one_second_have_two_folders(programs: Programs, work: Path) -> None:
    programs.slurm()
    assert slurm("train.py") == slurm("train.py") == 0
    assert len(list((work / "jobs-out").iterdir())) == 2


def test_a_folder_with_a_percent_sign_is_no_pattern_of_slurm(programs: Programs, work: Path) -> None:
    programs.slurm()
    assert slurm("--folder", "50%j", "train.py") == 0
    script = next((work / "50%j").glob("*/job.sh"))
    assert "/50%%j/" in script.read_text()


def test_the_job_name_comes_from_the_script_and_suits_every_scheduler(programs: Programs, work: Path) -> None:
    programs.pbs()
    assert pbs("1. my 'odd' name; é.py") == 0
    words = programs.words()
    assert words[words.index("-N") + 1] == "my__odd__name__"


def test_each_job_of_a_chain_waits_for_the_end_of_the_one_before(programs: Programs, work: Path,
                                                                 capsys: pytest.CaptureFixture[str]) -> None:
    programs.slurm()
    assert slurm("--chain", "3", "--dependency", "afterok:7", "train.py") == 0
    assert capsys.readouterr().out == "101\n102\n103\n"
    folder = only_folder(work)
    waits = [[line for line in (folder / f"job-{number}.sh").read_text().splitlines() if "--dependency" in line]
             for number in (1, 2, 3)]
    assert waits == [["#SBATCH --dependency=afterok:7"], ["#SBATCH --dependency=afterany:101"],
                     ["#SBATCH --dependency=afterany:102"]]
    record = json.loads((folder / "submission.json").read_text())
    assert record["job_ids"] == ["101", "102", "103"]
    assert record["dependencies"] == ["afterok:7", "afterany:101", "afterany:102"]


def test_a_chain_is_submitted_as_a_whole_or_not_at_all(programs: Programs, work: Path,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    programs.slurm()
    programs.refuse(3)
    assert slurm("--chain", "4", "train.py") == 1
    assert programs.submissions == 3
    assert programs.cancelled == ["102", "101"]  # the last first, so that none starts
    assert not (work / "jobs-out").exists()
    captured = capsys.readouterr()
    assert captured.out == "" and SAID.strip() in captured.err


@pytest.mark.parametrize(("recording", "words", "line"), [
    ("err_bad_queue", ["--queue", "nosuch"], "-q nosuch"),
    ("err_walltime_over_queue_max", ["--time", "99:00:00"], "walltime=99:00:00"),
    ("err_unknown_resource", ["--directive=-l select=1:nosuchres=4"], "nosuchres=4"),
    ("err_place_syntax", ["--directive=-l place=scattered"], "place=scattered"),
])
def test_a_refusal_of_pbs_is_shown_with_the_line_that_caused_it(
        recording: str, words: list[str], line: str, programs: Programs, work: Path,
        capsys: pytest.CaptureFixture[str]) -> None:
    recorded = json.loads((RECORDED / f"{recording}.json").read_text())
    programs.pbs()
    programs.refuse(1, recorded["stderr"], recorded["rc"])
    assert pbs(*words, "train.py") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert recorded["stderr"].strip() in captured.err
    assert line in captured.err.split(recorded["stderr"].strip())[1]
    assert not (work / "jobs-out").exists()


@pytest.mark.parametrize("words", [["./missing.py"], ["cancle"]])
def test_a_dry_run_on_the_cluster_itself_finds_what_the_submission_would(
        words: list[str], programs: Programs, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    programs.slurm()
    assert submit.main(["run", "--dry-run", *words]) == 1
    assert "would not be submitted: command: " in capsys.readouterr().err
    assert programs.submissions == 0


def test_what_the_checks_find_prevents_a_submission(programs: Programs, work: Path,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    programs.slurm()
    assert submit.main(["run", "--site", "lumi", "--nodes", "2000", "--time", "72:00:00", "train.py"]) == 1
    said = capsys.readouterr().err
    for words in ("account", "project_", "2000 nodes", "1024", "72:00:00", "48:00:00"):
        assert words in said
    assert programs.submissions == 0 and not (work / "jobs-out").exists()


@pytest.mark.parametrize(("words", "said"), [
    (["--nodes", "2"], "no training script"),
    (["--env", "A", "train.py"], "NAME=VALUE"),
    (["--env", "A-B=c", "train.py"], "A-B"),
    (["--chain", "0", "train.py"], "--chain 0"),
    (["--chain", "2", "--array", "0-3", "train.py"], "--array"),
    (["--nodes", "0", "train.py"], "--nodes"),
    (["--time", "soon", "train.py"], "--time"),
    (["--queue", "a b", "train.py"], "--queue"),
    (["--ranks-per-node", "99", "train.py"], "4 cores"),
    (["--set-up", "if true", "train.py"], "--set-up"),
    (["--directive", "nonsense", "train.py"], "--directive"),
])
def test_a_value_that_cannot_be_used_is_named(words: list[str], said: str, programs: Programs, work: Path,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    programs.pbs()
    assert pbs(*words) == 1
    assert said in capsys.readouterr().err
    assert programs.submissions == 0 and not (work / "jobs-out").exists()


@pytest.mark.parametrize("here", ["slurm", "pbs"])
def test_without_a_site_the_scheduler_that_is_here_is_taken(here: str, programs: Programs, work: Path,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    programs.slurm() if here == "slurm" else programs.pbs()
    of_name = submit.get_scheduler
    monkeypatch.setattr(submit, "get_scheduler", lambda name=None: of_name(name or here))
    assert submit.main(["run", "--no-check", "train.py"]) == 0
    assert json.loads((only_folder(work) / "submission.json").read_text())["site"] == f"generic-{here}"


@pytest.mark.parametrize("reason", ["Both sbatch and qsub were found.", "Neither sbatch nor qsub was found."])
def test_both_schedulers_or_none_is_a_clear_error(reason: str, work: Path, monkeypatch: pytest.MonkeyPatch,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    def nothing_found(name: str | None = None) -> None:
        raise SchedulerError(reason)
    monkeypatch.setattr(submit, "get_scheduler", nothing_found)
    assert submit.main(["run", "train.py"]) == 1
    said = capsys.readouterr().err
    assert reason in said and "--site NAME" in said and "derecho" in said


def test_everything_that_a_job_can_be_is_written_into_the_record(programs: Programs, work: Path) -> None:
    programs.slurm()
    assert slurm("--env", "TEXT=\udcff\n'\"", "train.py") == 0
    record = json.loads((only_folder(work) / "submission.json").read_text())
    assert record["job"]["environment"]["TEXT"] == "\udcff\n'\""


# --- watching

class Scripted:
    """A scheduler that gives one answer after the other for each job; an exception is raised."""

    name = "slurm"

    def __init__(self, **answers: list[Status | Exception]) -> None:
        self.answers = {job_id.strip("_"): list(given) for job_id, given in answers.items()}
        self.cancelled: list[str] = []

    def status(self, job_id: str) -> Status:
        given = self.answers[job_id]
        answer = given.pop(0) if len(given) > 1 else given[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def cancel(self, job_id: str) -> None:
        self.cancelled.append(job_id)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "SHORTEST", 0.02)
    monkeypatch.setattr(following, "LONGEST", 0.02)
    monkeypatch.setattr(following, "LOG_SECONDS", 0.01)


@pytest.fixture()
def record(work: Path) -> records.Record:
    """Of a chain of three jobs."""
    folder = work / "jobs-out" / "train-1"
    folder.mkdir(parents=True)
    job = job_scripts.Job(command=("train.py",))
    records.write(folder, job, scheduler="slurm", site="x", job_ids=["1", "2", "3"], dependencies=[None, "a", "b"])
    return records.Record(folder, "slurm", ("1", "2", "3"), str(work))


def follow(scheduler: Scripted, record: records.Record, *job_ids: str) -> int:
    return following.follow(scheduler.status, record.logs, job_ids)


def test_following_shows_states_place_and_output(record: records.Record, capfd: pytest.CaptureFixture[str]) -> None:
    def answers() -> Iterator[Status]:
        yield Status("1", "queued", position=3, reason="Resources")
        yield Status("1", "queued", position=1, reason="Priority")
        (record.folder / "1.out").write_text("epoch 1\n")
        (record.folder / "2.out").write_text("of another job\n")
        yield Status("1", "running", hosts=("n1", "n2"))
        with (record.folder / "1.out").open("a") as file:
            file.write("epoch 2\n")
        yield Status("1", "completed", 0)
    steps = answers()
    scheduler = Scripted(_1=[Status("1", "unknown")])
    scheduler.status = lambda job_id: next(steps)  # type: ignore[method-assign]
    assert follow(scheduler, record, "1") == 0
    captured = capfd.readouterr()
    assert captured.out == "epoch 1\nepoch 2\n"
    assert captured.err.splitlines() == [
        "submit: job 1: queued, number 3 in the queue (Resources)",
        "submit: job 1: queued, number 1 in the queue (Priority)",
        "submit: job 1: running, on n1 n2",
        "submit: job 1: completed, exit status 0"]


@pytest.mark.parametrize(("status", "expected"), [
    (Status("1", "completed", 0), 0), (Status("1", "failed", 42), 42), (Status("1", "failed", 0), 1),
    (Status("1", "failed", 137), 137), (Status("1", "cancelled"), 1), (Status("1", "timeout", 0), 1),
    (Status("1", "node_fail"), 1), (Status("1", "never_ran"), 1), (Status("1", "unknown"), 1),
    (Status("1", "stopped", 75), 75), (Status("1", "held", reason="waits for ever for 7"), 1),
])
def test_the_exit_status_of_following_is_the_jobs(status: Status, expected: int, record: records.Record) -> None:
    assert follow(Scripted(_1=[status]), record, "1") == expected


@pytest.mark.parametrize(("first", "expected"), [
    (Status("1", "completed", 0), 0), (Status("1", "timeout"), 0), (Status("1", "failed", 3), 3),
    (Status("1", "cancelled"), 1), (Status("1", "never_ran"), 1), (Status("1", "node_fail"), 1),
    (Status("1", "unknown"), 1), (Status("1", "stopped", 75), 0),
    (Status("1", "cancelled", native="PREEMPTED"), 0),
])
def test_a_chain_is_a_success_when_its_jobs_end_well_or_by_the_time_limit(first: Status, expected: int,
                                                                          record: records.Record) -> None:
    assert follow(Scripted(_1=[first], _2=[Status("2", "completed", 0)]), record, "1", "2") == expected


def test_a_chain_whose_last_job_is_ended_by_the_time_limit_is_none(record: records.Record) -> None:
    assert follow(Scripted(_1=[Status("1", "completed", 0)], _2=[Status("2", "timeout")]), record, "1", "2") == 1


def test_a_scheduler_that_is_away_for_a_moment_is_asked_again(record: records.Record,
                                                              capfd: pytest.CaptureFixture[str]) -> None:
    away: list[Status | Exception] = [SchedulerError("scontrol gave no answer within 30 s.")] * 3
    assert follow(Scripted(_1=[*away, Status("1", "completed", 0)]), record, "1") == 0
    assert "Asking again" in capfd.readouterr().err


def test_a_scheduler_that_stays_away_is_an_error(record: records.Record) -> None:
    with pytest.raises(SchedulerError):
        follow(Scripted(_1=[SchedulerError("no answer")]), record, "1")


def about(scheduler: Scripted, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    monkeypatch.setattr(submit, "get_scheduler", lambda name=None: scheduler)
    return lambda *words: submit.main(list(words))


@pytest.mark.parametrize(("status", "expected"), [
    (Status("1", "running"), 0), (Status("1", "queued"), 0), (Status("1", "completed", 0), 0),
    (Status("1", "failed", 3), 1), (Status("1", "never_ran"), 1), (Status("1", "unknown"), 1),
    (Status("1", "stopped", 75), 75)])
def test_status_prints_the_state_and_fails_for_a_job_that_ended_badly(
        status: Status, expected: int, record: records.Record, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    assert about(Scripted(_1=[status]), monkeypatch)("status", "1") == expected
    out = capsys.readouterr().out
    assert f"job 1: {following.describe(status)}"[7:] in out and "train-1" in out


@pytest.mark.parametrize("state", ["failed", "cancelled", "never_ran", "unknown"])
def test_a_job_whose_predecessor_ended_badly_is_no_success(state: str, record: records.Record,
                                                           monkeypatch: pytest.MonkeyPatch,
                                                           capsys: pytest.CaptureFixture[str]) -> None:
    scheduler = Scripted(_1=[Status("1", state)], _2=[Status("2", "completed", 0)], _3=[Status("3", "completed", 0)])
    assert about(scheduler, monkeypatch)("status", "3") == 1
    assert "earlier in its chain, job 1:" in capsys.readouterr().out


def test_cancel_ends_the_later_jobs_of_the_chain_too(record: records.Record, monkeypatch: pytest.MonkeyPatch,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    scheduler = Scripted(_2=[Status("2", "running")])
    assert about(scheduler, monkeypatch)("cancel", "2") == 0
    assert scheduler.cancelled == ["3", "2"]  # the last first, so that none starts
    assert "later jobs of its chain" in capsys.readouterr().out


def test_a_job_that_is_not_known_is_not_cancelled(record: records.Record, monkeypatch: pytest.MonkeyPatch,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    scheduler = Scripted(_1=[Status("1", "unknown")])
    assert about(scheduler, monkeypatch)("cancel", "1") == 1
    assert scheduler.cancelled == [] and "no job 1" in capsys.readouterr().err


def test_logs_prints_what_the_job_has_written(record: records.Record, monkeypatch: pytest.MonkeyPatch,
                                              capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    (record.folder / "2.out").write_bytes(b"loss \xff\n")
    (record.folder / "21.out").write_bytes(b"another job\n")
    run = about(Scripted(_2=[Status("2", "running")], _1=[Status("1", "queued")]), monkeypatch)
    assert run("logs", "2") == 0
    assert capfdbinary.readouterr().out == b"loss \xff\n"
    assert run("logs", "1") == 1
    assert b"No output was found of job 1: queued" in capfdbinary.readouterr().err


def test_logs_of_a_job_from_elsewhere_are_where_the_scheduler_says(work: Path, monkeypatch: pytest.MonkeyPatch,
                                                                   capfd: pytest.CaptureFixture[str]) -> None:
    (work / "slurm-9.out").write_text("loss 0.5\n")
    run = about(Scripted(_9=[Status("9", "completed", 0, output=str(work / "slurm-9.out"))]), monkeypatch)
    for words in (["logs", "9"], ["logs", "--follow", "9"]):
        assert run(*words, "--site", "generic-slurm") == 0
        assert capfd.readouterr().out == "loss 0.5\n"


@pytest.mark.parametrize("words", [["status", "../x"], ["cancel", "-rf"], ["logs", "train.py"]])
def test_what_is_no_job_id_is_refused(words: list[str], work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert submit.main(words) == 1
    except SystemExit as exit_:  # argparse, for what looks like an option
        assert exit_.code == 2
    assert capsys.readouterr().err


@pytest.mark.parametrize(("asked", "known", "same"), [
    ("12", "12.head", True), ("12.head", "12.head", True), ("12.other", "12.head", False), ("1", "12.head", False),
    ("79[2].head", "79[].head", True), ("79_2", "79", True)])
def test_a_job_is_found_by_its_short_id_too(asked: str, known: str, same: bool, work: Path) -> None:
    folder = work / "jobs-out" / "x"
    folder.mkdir(parents=True)
    records.write(folder, job_scripts.Job(command=("a",)), scheduler="pbs", site="x", job_ids=[known],
                  dependencies=[None])
    (work / "jobs-out" / "other").mkdir()
    (work / "jobs-out" / "other" / "submission.json").write_text("[]")
    assert (records.find(work / "jobs-out", asked) is not None) is same


def test_every_script_that_a_person_runs_may_be_executed() -> None:
    for script in (ROOT / "scripts").iterdir():
        if script.is_file() and script.read_bytes().startswith(b"#!"):
            assert os.access(script, os.X_OK), script


# --- subcommands

def typos(word: str) -> set[str]:
    """The words within distance 1 of a word: a letter left out, doubled, swapped or replaced."""
    cut = [(word[:place], word[place:]) for place in range(len(word) + 1)]
    return ({left + right[1:] for left, right in cut if right} | {left + right[:1] + right for left, right in cut}
            | {left + right[1::-1] + right[2:] for left, right in cut if len(right) > 1}
            | {left + letter + right[1:] for left, right in cut if right for letter in "aestx-"}) - {word, ""}


@pytest.mark.parametrize("name", sorted(submit.COMMANDS))
def test_a_mistyped_subcommand_is_never_submitted(name: str, programs: Programs, work: Path,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    programs.slurm()
    near = typos(name) - set(submit.COMMANDS)
    for word in sorted(near | {typo for one in near for typo in typos(one)} - set(submit.COMMANDS)):
        if word in ("-h", "--help"):
            continue
        assert submit.main([word, "77"]) == 2
        said = capsys.readouterr()
        assert f"{word!r} is not a subcommand" in said.err and "Expected one of: run, status" in said.err
        assert said.out == ""
    assert programs.submissions == 0 and not (work / "jobs-out").exists()


@pytest.mark.parametrize(("words", "said"), [
    (["cancle", "77"], "Did you mean: submit.py cancel 77"), (["LIST"], "Did you mean: submit.py list"),
    (["--nodes", "2", "train.py"], "Did you mean: submit.py run --nodes 2 train.py"),
    (["my train.py"], "Did you mean: submit.py run 'my train.py'"), ([], "a subcommand is missing")])
def test_what_is_no_subcommand_is_answered_with_the_right_one(words: list[str], said: str, work: Path,
                                                              capsys: pytest.CaptureFixture[str]) -> None:
    assert submit.main(words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("words", "said"), [
    (["cancle", "77"], "command: cancle is neither a file here nor a program on PATH"),
    (["./cancle"], "does not exist"), (["list"], "submit.py list"), (["tool"], "Write ./tool")])
def test_a_command_that_does_not_exist_is_refused(words: list[str], said: str, programs: Programs, work: Path,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    programs.slurm()
    (work / "tool").touch(0o755)
    assert submit.main(["run", "--site", "generic-slurm", *words]) == 1
    assert said in capsys.readouterr().err
    assert programs.submissions == 0 and not (work / "jobs-out").exists()


def test_a_program_that_the_jobs_setup_brings_need_not_be_here(
        programs: Programs, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    programs.slurm()
    assert submit.main(["run", "--site", "generic-slurm", "--module", "tools", "trainer"]) == 1
    assert "trainer" not in capsys.readouterr().err  # the folder is refused: it is in /tmp


def test_a_module_is_run_as_python_m_does(programs: Programs, work: Path) -> None:
    programs.slurm()
    assert slurm("--nodes", "2", "-m", "package.module", "--lr", "0.1", "-m", "x") == 0
    folder = only_folder(work)
    assert folder.name.startswith("module-")
    record = json.loads((folder / "submission.json").read_text())
    assert record["job"]["command"] == ["-m", "package.module", "--lr", "0.1", "-m", "x"]
    assert " -- -m package.module --lr 0.1 -m x\n" in (folder / "job.sh").read_text()


def test_a_module_without_a_name_is_refused(work: Path, programs: Programs, capsys: pytest.CaptureFixture[str]) -> None:
    programs.slurm()
    assert slurm("-m") == 1 == slurm("-m", "--lr", "1")
    assert "-m has no module" in capsys.readouterr().err and programs.submissions == 0


def test_options_of_sbatch_are_understood(programs: Programs, work: Path) -> None:
    programs.slurm()
    assert slurm("-N", "2", "-n", "8", "-t", "1h30m", "-p", "gpu", "-A", "p1", "-J", "mine", "--mem", "4G",
                 "train.py") == 0
    lines = (only_folder(work) / "job.sh").read_text().splitlines()
    for line in ("--nodes=2", "--ntasks-per-node=4", "--time=01:30:00", "--partition=gpu", "--account=p1",
                 "--job-name=mine", "--mem=4G"):
        assert f"#SBATCH {line}" in lines


@pytest.mark.parametrize("words", [["-N", "2", "-n", "3"], ["-n", "2", "--ranks-per-node", "2"], ["-n", "0"]])
def test_a_number_of_ranks_that_nodes_cannot_share_is_refused(words: list[str], programs: Programs, work: Path,
                                                              capsys: pytest.CaptureFixture[str]) -> None:
    programs.slurm()
    assert slurm(*words, "train.py") == 1
    assert "--ntasks" in capsys.readouterr().err and programs.submissions == 0


def test_options_after_the_script_are_pointed_out(programs: Programs, work: Path,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    programs.slurm()
    assert slurm("train.py", "--nodes", "4", "--lr", "1") == 0
    said = capsys.readouterr().err
    assert "--nodes comes after the script" in said and "--lr" not in said


@pytest.mark.parametrize("name", sorted(submit.COMMANDS))
def test_the_help_of_each_subcommand_is_short(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        submit.main([name, "--help"])
    assert left.value.code == 0
    assert len(capsys.readouterr().out.splitlines()) < (20 if name != "run" else 90)


# --- list, resubmit, what jobs keep

def test_list_shows_the_latest_submissions_first(programs: Programs, work: Path,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    programs.slurm()
    assert slurm("--chain", "2", "train.py") == slurm("--job-name", "other", "train.py") == 0
    for folder in (work / "jobs-out").iterdir():
        if folder.name.startswith("train"):
            os.utime(folder / "submission.json", (1, 1))
            records.keep_status(folder, "101", 75)
    programs.add("scontrol", "#!/bin/bash\necho 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1\n")
    capsys.readouterr()
    assert submit.main(["list"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == ["JOB", "103", "101", "102"]
    assert lines[1][1] == "unknown" and lines[2][1:3] == ["stopped", "(75)"] and "other" in lines[1]


def test_a_folder_that_may_not_be_listed_is_not_an_empty_one(record: records.Record, monkeypatch: pytest.MonkeyPatch,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(path: str) -> list[str]:
        raise PermissionError(13, "Permission denied", str(path))
    monkeypatch.setattr(os, "listdir", refuse)
    assert submit.main(["list"]) == 1
    assert "jobs-out: Permission denied" in capsys.readouterr().err
    assert about(Scripted(_1=[Status("1", "running")]), monkeypatch)("status", "1", "--site", "generic-slurm") == 0


def test_list_of_nothing_says_so(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit.main(["list"]) == 0
    assert "no submissions in jobs-out" in capsys.readouterr().err


def test_resubmit_submits_the_same_job_in_a_new_folder(programs: Programs, work: Path, tmp_path: Path,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    programs.slurm()
    assert slurm("--nodes", "3", "--chain", "2", "--env", "A=b \udcff", "--time", "1h", "train.py", "--lr", "é") == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert submit.main(["resubmit", "--no-check", "--folder", str(work / "jobs-out"), "102"]) == 0
    first, second = sorted((work / "jobs-out").iterdir())
    scripts = [[(folder / f"job-{number}.sh").read_bytes().replace(os.fsencode(folder), b"FOLDER")
                for number in (1, 2)] for folder in (first, second)]
    assert scripts[0][0] == scripts[1][0]
    assert scripts[0][1].replace(b"101", b"103") == scripts[1][1]
    assert json.loads((second / "submission.json").read_text())["submit_folder"] == str(work)


@pytest.mark.parametrize(("state", "submissions"), [("RUNNING", 1), ("PENDING", 1), ("FAILED", 2)])
def test_a_job_that_has_not_ended_is_not_submitted_again(state: str, submissions: int, programs: Programs, work: Path,
                                                         monkeypatch: pytest.MonkeyPatch,
                                                         capsys: pytest.CaptureFixture[str]) -> None:
    programs.slurm()
    monkeypatch.setattr("utils.schedulers.checks.NODE_LOCAL", ())
    assert slurm("train.py") == 0
    programs.add("scontrol", f"#!/bin/bash\necho 'JobId=101 JobName=train'\necho '   JobState={state} Reason=None'\n")
    assert submit.main(["resubmit", "101"]) == (state != "FAILED")
    assert ("both would train at once" in capsys.readouterr().err) == (state != "FAILED")
    assert programs.submissions == submissions


def test_resubmit_without_a_record_is_an_error(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit.main(["resubmit", "7"]) == 1
    assert "no record of job 7" in capsys.readouterr().err


def test_what_a_job_has_kept_is_its_status_where_the_scheduler_has_forgotten_it(
        record: records.Record, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run = about(Scripted(_1=[Status("1", "unknown")]), monkeypatch)
    for kept, expected, said in ((0, 0, "completed"), (75, 75, "stopped after saving"), (3, 1, "failed, exit status 3"),
                                 (records.TIME_LIMIT, 1, "timeout")):
        records.keep_status(record.folder, "1", kept)
        assert run("status", "1") == expected
        assert f"job 1: {said}" in capsys.readouterr().out


def test_what_a_job_has_kept_is_its_status_where_the_scheduler_is_down(
        record: records.Record, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run = about(Scripted(_1=[SchedulerError("scontrol gave no answer")]), monkeypatch)
    assert run("status", "1") == 1 and "no answer" in capsys.readouterr().err
    records.keep_status(record.folder, "1", 0)
    assert run("status", "1") == 0


@pytest.mark.parametrize(("kept", "expected"), [("0", 0), ("75", 75), ("4", 4), ("time limit", 1)])
def test_following_ends_well_where_the_server_has_no_history(
        kept: str, expected: int, record: records.Record, monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str]) -> None:
    """PBS forgets a job at its end then."""
    (record.folder / "3.status").write_text(kept + "\n")
    (record.folder / "3.out").write_text("loss 0.5\n")
    run = about(Scripted(_3=[Status("3", "running"), Status("3", "unknown")]), monkeypatch)
    assert run("logs", "--follow", "3") == expected
    assert capfd.readouterr().out == "loss 0.5\n"


def test_output_of_a_forgotten_job_without_a_record_is_found_by_its_usual_name(
        work: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    for name, job_id in (("slurm-9.out", "9"), ("slurm-9_2.out", "9_2"), ("train.o11", "11.head"),
                         ("train.o12.3", "12[3].head"), ("13.head.OU", "13.head")):
        (work / name).write_text(name)
        run = about(Scripted(**{f"_{job_id}": [Status(job_id, "unknown")]}), monkeypatch)
        assert run("logs", job_id, "--site", "generic-slurm") == 0
        assert capfd.readouterr().out.endswith(name)


def test_a_failed_job_is_not_hidden_by_one_that_stopped(record: records.Record,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"_1": [Status("1", "stopped", 75)], "_2": [Status("2", "failed", 1)]}
    assert about(Scripted(**answers), monkeypatch)("status", "1", "2") == 1
    assert about(Scripted(**answers), monkeypatch)("status", "2", "1") == 1


def test_each_element_of_an_array_has_a_heading(record: records.Record, capfdbinary: pytest.CaptureFixture[bytes],
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    for index, text in enumerate(("a\nb\n", "c")):
        (record.folder / f"1_{index}.out").write_text(text)
    assert about(Scripted(_1=[Status("1", "completed", 0)]), monkeypatch)("logs", "1") == 0
    assert capfdbinary.readouterr().out == (b"==> array element 0: 1_0.out\na\nb\n"
                                            b"==> array element 1: 1_1.out\nc")


def test_lines_of_two_elements_do_not_run_into_each_other(record: records.Record,
                                                          capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    files = [record.folder / f"1_{index}.out" for index in (0, 1)]
    for file in files:
        file.write_text("half a")
    log = following.Log(lambda: files, sys.stdout.buffer)
    assert not log.print_new(to_the_end=False)
    files[0].write_text("half a line\n")
    assert log.print_new(to_the_end=False) and log.print_new()
    assert capfdbinary.readouterr().out == (b"==> array element 0: 1_0.out\nhalf a line\n"
                                            b"==> array element 1: 1_1.out\nhalf a")


# --- faults of the file system

@pytest.mark.parametrize("name", ["job.sh", "submission.json.unfinished"])
def test_a_full_disk_is_told_and_nothing_stays_in_the_queue(name: str, programs: Programs, work: Path,
                                                            monkeypatch: pytest.MonkeyPatch,
                                                            capsys: pytest.CaptureFixture[str]) -> None:
    programs.slurm()
    write_text = Path.write_text

    def full(path: Path, *args: object, **options: object) -> int:
        if path.name == name:
            raise OSError(28, "No space left on device", str(path))
        return write_text(path, *args, **options)  # type: ignore[arg-type]
    monkeypatch.setattr(Path, "write_text", full)
    assert slurm("train.py") == 1
    said = capsys.readouterr()
    assert "No space left on device" in said.err and "Traceback" not in said.err and said.out == ""
    assert programs.submissions == len(programs.cancelled)
    assert not (work / "jobs-out").exists()


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


def test_nothing_is_submitted_where_no_python_has_torch(programs: Programs, without_torch: Path, work: Path,
                                                        capsys: pytest.CaptureFixture[str]) -> None:
    site = ["--site", "generic-slurm"]
    assert submit.main(["run", *site, "train.py"]) == 1
    assert f"{without_torch} (runs this script) has no torch" in capsys.readouterr().err
    assert submit.main(["run", *site, "--env", f"PYTHON={without_torch}", "train.py"]) == 1
    assert f"PYTHON is '{without_torch}', which has no torch" in capsys.readouterr().err
    assert submit.main(["run", *site, "--dry-run", "train.py"]) == 1
    assert programs.submissions == 0


@pytest.mark.parametrize("words", [
    ["--module", "pytorch", "train.py"], ["--set-up", "source env.sh", "train.py"],
    ["--container", "a.sif", "train.py"], ["bash"], ["--no-check", "train.py"]])
def test_python_without_torch_is_no_problem_where_another_may_come(without_torch: Path, words: list[str],
                                                                   capsys: pytest.CaptureFixture[str]) -> None:
    assert submit.main(["run", "--site", "generic-slurm", "--dry-run", *words]) == 0
    assert ("export PYTHON=" in capsys.readouterr().out) == (words == ["bash"])


def test_modules_of_a_site_may_bring_torch(without_torch: Path, work: Path,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    (work / "site.yaml").write_text("title: Ours\nscheduler: slurm\nmodules: [pytorch]\n")
    assert submit.main(["run", "--site", "site.yaml", "--dry-run", "train.py"]) == 0
    printed = capsys.readouterr()
    assert "The modules of Ours may bring it" in printed.err
    assert "export PYTHON=" not in printed.out


# --- within the job

class Recorded:
    """launch_recorded.py in a job of Slurm, with launch.py replaced by a status, and a scheduler that is scripted."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, left: float | None = None) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        self.started = 0
        monkeypatch.setenv("SLURM_JOB_ID", "2")
        monkeypatch.delenv("SLURM_ARRAY_JOB_ID", raising=False)
        monkeypatch.setattr(launch_recorded, "current_allocation", lambda ask: self)
        self.seconds_left = lambda: left

    def run(self, launch: Callable[[], int], previous: str = "", **answers: list[Status | Exception]) -> int:
        def start() -> int:
            self.started += 1
            return launch()
        self.scheduler = Scripted(**{"_2": [Status("2", "running")], **answers})
        self.monkeypatch.setattr(launch_recorded, "get_scheduler", lambda name: self.scheduler)
        self.monkeypatch.setattr("launch.main", start)
        self.monkeypatch.setattr(sys, "argv", ["launch_recorded.py", str(self.folder), previous, "--", "train.py"])
        return launch_recorded.main()


@pytest.mark.parametrize(("kept", "answer", "starts"), [
    (0, SchedulerError("down"), True), (75, SchedulerError("down"), True),
    (records.TIME_LIMIT, SchedulerError("down"), True),
    (3, SchedulerError("down"), False), (None, SchedulerError("down"), False), (None, Status("1", "unknown"), False),
    (3, Status("1", "unknown"), False), (None, Status("1", "completed", 0), True), (None, Status("1", "timeout"), True),
    (143, Status("1", "timeout"), True), (143, Status("1", "cancelled", native="PREEMPTED"), True),
    (143, Status("1", "cancelled"), False), (None, Status("1", "failed", 1), False),
    (None, Status("1", "node_fail"), False), (None, Status("1", "stopped", 75), True)])
def test_a_job_of_a_chain_starts_only_when_it_can_continue_the_one_before(
        kept: int | str | None, answer: Status | Exception, starts: bool, record: records.Record,
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    if kept is not None:
        records.keep_status(record.folder, "1", kept)
    monkeypatch.setattr(launch_recorded, "QUERY_SECONDS", 0.0)
    job = Recorded(record.folder, monkeypatch)
    assert job.run(lambda: 0, "1", _1=[answer]) == (0 if starts else 1)
    assert job.started == starts
    assert (records.kept_status(record.folder, "2") == 0) is starts
    assert ("not started" in capsys.readouterr().err) is not starts


def test_a_kept_status_that_cannot_be_removed_is_reported(
        record: records.Record, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(folder: Path, job_id: str) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(records, "forget_status", fail)
    assert Recorded(record.folder, monkeypatch).run(lambda: 0) == 0
    assert "job 2 could not be removed" in capsys.readouterr().err


def test_a_job_of_a_chain_waits_for_a_scheduler_that_does_not_respond(
        record: records.Record, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    job = Recorded(record.folder, monkeypatch)
    down = SchedulerError("Unable to contact slurm controller")
    assert job.run(lambda: 0, "1", _1=[down, down, Status("1", "completed", 0)]) == 0
    assert job.started == 1
    assert capsys.readouterr().err.count("the state of job 1 is not known: Unable to contact") == 2


@pytest.mark.parametrize(("status", "state", "cancelled"), [
    (0, "running", []), (75, "running", []), (3, "running", ["3"]), (143, "ending", [])])
def test_a_failure_takes_the_rest_of_the_chain_from_the_queue(status: int, state: str, cancelled: list[str],
                                                              record: records.Record,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    job = Recorded(record.folder, monkeypatch)
    assert job.run(lambda: status, _2=[Status("2", state)]) == status
    assert job.scheduler.cancelled == cancelled
    assert records.kept_status(record.folder, "2") == status


def test_a_job_that_outlives_its_time_limit_keeps_that(record: records.Record, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Recorded(record.folder, monkeypatch, left=0.01)

    def ended_by_the_limit() -> int:
        while records.kept_status(record.folder, "2") is None:
            pass
        return 143
    assert job.run(ended_by_the_limit) == 143
    assert records.kept_status(record.folder, "2") == records.TIME_LIMIT and job.scheduler.cancelled == []
    assert job.run(lambda: 75) == 75  # a later run of the same job
    assert records.kept_status(record.folder, "2") == 75


def test_a_failure_after_the_time_limit_was_extended_is_a_failure(record: records.Record,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    job = Recorded(record.folder, monkeypatch)
    left = iter([0.01, 1000.0])
    asked = threading.Event()

    def seconds_left() -> float:
        seconds = next(left)
        if seconds > 1:
            asked.set()
        return seconds

    def fails() -> int:
        assert asked.wait(10)
        while records.kept_status(record.folder, "2") is not None:
            pass
        return 3
    job.seconds_left = seconds_left
    assert job.run(fails, _2=[Status("2", "running")]) == 3
    assert records.kept_status(record.folder, "2") == 3 and job.scheduler.cancelled == ["3"]


def test_a_launch_that_raises_has_failed(record: records.Record, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> int:
        raise RuntimeError("a defect")
    job = Recorded(record.folder, monkeypatch)
    with pytest.raises(RuntimeError):
        job.run(fails)
    assert records.kept_status(record.folder, "2") == 1 and job.scheduler.cancelled == ["3"]
    assert job.run(lambda: sys.exit(2)) == 2
