"""`submit run` with programs that respond as sbatch and qsub do."""
from __future__ import annotations

import errno
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.pythons import make_environment
from tests.unit.scheduler_commands import ROOT
from tests.unit.submission import Login
from utils.tools.cli import interpreter
from utils.tools.submission import profiles

REFUSAL = "sbatch: error: invalid partition specified: nosuch\n"


@pytest.mark.parametrize("site", profiles.names())
def test_every_site_gives_a_script_that_bash_parses(site: str, login: Login) -> None:
    for options in ("", "--nodes 2 --time 10m --launcher torchrun"):
        words = f"run --dry-run --site {site} --account a {options} train.py"
        script = login.submit(*words.split()).out
        done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
        assert done.returncode == 0 and "train.py" in script, done.stderr


def quoted(path: str) -> str:
    return shlex.quote(str(ROOT / path))


@pytest.mark.parametrize(("words", "lines", "absent"), [
    ("run --site lumi --account p --nodes 2 train.py --epochs 3",
     ["#!/bin/bash\n", "--nodes=2",
      f"exec python3 {quoted('utils')} launch --launcher srun -- train.py --epochs 3\n"], "time"),
    ("doctor --site lumi --account p --nodes 2 -- --quick --only limits",
     ["--job-name=doctor", "--time=00:10:00",
      f" launch --launcher srun -- {quoted('utils/__main__.py')} doctor --quick --only limits\n"], "train.py"),
    ("run --site frontier --account ABC123 --nodes 2 --time 1:00:00 --env 'A=b $c' "
     "--setup 'source my/activate' --directive=--network=single_node_vni train.py",  # replaces the site's network
     ["--account=ABC123", "--gpus-per-node=8", "--cpus-per-task=7", "--gpu-bind=closest",
      "--network=single_node_vni", "module load rccl-net-plugin", "export NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3\n",
      "export GLOO_SOCKET_IFNAME=hsn0\n", "export A='b $c'", "source my/activate"], "disable_rdzv_get"),
    ("run --site generic-slurm -N 2 -n 8 -c 3 -t 1h30m -p gpu -A p1 -J mine --mem 4G -d afterok:7 "
     "--gpus-per-node 4 --no-requeue train.py",
     ["--nodes=2", "--ntasks-per-node=4", "--cpus-per-task=3", "--time=01:30:00", "--partition=gpu", "--account=p1",
      "--job-name=mine", "--mem=4G", "--dependency=afterok:7", "--kill-on-invalid-dep=yes", "--gpus-per-node=4",
      "--open-mode=append", "--no-requeue"], "--ntasks=8"),
    ("run --site generic-slurm --gpus-per-node 4 -c 8 --launcher torchrun --requeue train.py",  # the cores of all ranks
     ["--ntasks-per-node=1", "--cpus-per-task=32", "--gpus-per-node=4", "--requeue"], "dependency"),
    ("run --site generic-pbs -N 2 --gpus-per-node 4 -c 8 -t 2h --mem 64gb -p gpu -A abc@v100 -J t train.py",
     ["-l select=2:ncpus=32:mpiprocs=4:ompthreads=8:ngpus=4:mem=64gb", "-l place=scatter", "-l walltime=02:00:00",
      "-N t", "-q gpu", "-A abc@v100", "-j oe", "-k doe"], "SBATCH"),
    ("run --site generic-slurm --mail-user ada@example.org --mail-type begin,FAIL --hang-timeout 90 "
     f"--python {shlex.quote(sys.executable)} train.py",
     ["#SBATCH --mail-user=ada@example.org\n", "#SBATCH --mail-type=BEGIN,FAIL\n", " --hang-timeout 90 -- train.py",
      f"export PYTHON={shlex.quote(sys.executable)}\n"], "PBS "),
    ("run --site generic-pbs --mail-user ada@example.org --hang-timeout 0 train.py",
     ["#PBS -M ada@example.org\n", "#PBS -m ea\n", " --hang-timeout 0 -- train.py"], "SBATCH"),
    ("run --site generic-pbs --gpus-per-node 4 -c 8 --launcher torchrun train.py",
     ["-l select=1:ncpus=32:mpiprocs=1:ompthreads=8:ngpus=4"], "SBATCH"),
    ("run --site perlmutter --account m1 --queue debug train.py", ["--qos=debug"], "partition"),
    ("run --site perlmutter --account m1 -q debug train.py", ["--qos=debug"], "partition"),
    ("run --site generic-slurm -p gpu -q short train.py", ["--partition=gpu", "--qos=short"], "#PBS"),
    ("run --site generic-pbs -q gpu train.py", ["-q gpu"], "SBATCH"),
    ("run --site generic-slurm --nodes 8 --spare 1 --max-restarts 2 train.py",
     ["#SBATCH --nodes=9\n", "#SBATCH --no-kill\n", " --spare 1 --max-restarts 2 -- train.py"], "tolerate"),
    ("run --site generic-pbs --nodes 2 --spare 1 train.py",
     ["select=3:", "#PBS -W tolerate_node_failures=all\n", " --spare 1 -- train.py"], "max-restarts"),
    ("run --site generic-slurm --stage train.py", [" --stage -- train.py"], "stage-dir"),
    ("run --site generic-slurm --label --output-dir out train.py", [" --label --output-dir out -- train.py"], "stage"),
    ("run --site generic-slurm --no-stage train.py", [" --no-stage -- train.py"], "stage-dir"),
    ("run --site generic-slurm -n 16 --gpus-per-node 4 train.py",
     ["--nodes=4", "--ntasks-per-node=4", "--gpus-per-node=4"], "oversubscribe"),
    ("run --site perlmutter -A m1 -n 16 train.py", ["--nodes=4", "--ntasks-per-node=4"], "oversubscribe"),
    ("run --site generic-slurm -n 2 --gpus-per-node a100:4 --mem 0 train.py",
     ["--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=a100:4", "--mem=0"], "oversubscribe"),
    ("run --site generic-slurm -n 16 --gpus-per-node 0 train.py", ["--nodes=1", "--ntasks-per-node=16"], "gpus"),
    ("run --site generic-slurm -n 16 --gpus-per-node 4 --oversubscribe train.py",
     ["--nodes=1", "--ntasks-per-node=16", " --oversubscribe -- train.py"], "a100"),
    ("run --site generic-pbs --stage-dir $LOCAL train.py", [" --stage --stage-dir '$LOCAL' -- train.py"], "$LOCAL "),
    ("run --site alps --container a.sif train.py", ["srun --container a.sif -- train.py"], "$@"),
    ("run --site lumi --container a.sif --gpus-per-node 0 train.py", ["srun --container a.sif -- train.py"], "vendor"),
    ("run --site generic-slurm -m package.module --lr 1 -m x", ["=module\n", " -- -m package.module --lr 1 -m x\n"],
     "train.py"),
    ("run --site alps --preflight --checkpoints o --nodes 2 train.py",
     ["# first: doctor --quick --checkpoints ", "export NCCL_NET='AWS Libfabric'",
      "export DDPKIT_NETWORK='AWS Libfabric'"], "CPU_BIND"),
    ("run --site alps train.py", ["export FI_CXI_DEFAULT_TX_SIZE=16384"], "NCCL_NET="),
    ("run --site alps --nodes 2 --env NCCL_NET=Socket train.py", ["export NCCL_NET=Socket"], "NCCL_NET='"),
    ("run --site juwels-booster --nodes 2 train.py", ["DDPKIT_NETWORK=IB", "DDPKIT_HOST_SUFFIX=i"], "IFNAME"),
    ("run --site roihu -A p train.py", ["--partition=gpumedium"], "gpularge"),
    ("run --site roihu -A p --nodes 2 train.py", ["--partition=gpularge"], "gpumedium"),
    ("run --site polaris -A p --nodes 9 train.py", ["-q debug-scaling", "export https_proxy="], "stage"),
    ("run --site aurora -A p --nodes 256 train.py", ["-q prod", "export CCL_CONFIGURATION_PATH=''"], "debug"),
    ("run --site frontier -A p --stage --setup 'a b' train.py",
     ["--constraint=nvme", " --stage --stage-dir '/mnt/bb/$USER' -- train.py"], "all_proxy"),
    ("run --site perlmutter -A p --nodes 2 train.py", ["export GLOO_SOCKET_IFNAME=hsn0\n"], "IFNAME=hsn\n"),
    ("run --site lumi train.py", ["export DDPKIT_CPU_BIND=list:49-55:57-63:"], "NCCL"),
    ("run --site aurora train.py", ["select=1:ncpus=204:mpiprocs=12:", "export OMP_NUM_THREADS=4\n",
     "export DDPKIT_CPU_BIND=list:4-7:8-11:12-15:16-19:20-23:24-27:56-59:"], "ngpus"),
    ("run --site aurora --ntasks-per-node 6 train.py", ["module load frameworks"], "CPU_BIND")])
def test_dry_run_prints_what_site_and_options_say(words: str, lines: list[str], absent: str, login: Login) -> None:
    for name in ("scontrol", "sinfo", "squeue"):
        login.commands.add(name)
    command, *options = shlex.split(words)
    script = login.submit(command, "--dry-run", *options).out
    prefix = "#PBS" if "#PBS" in script else "#SBATCH"
    expected = [f"\n{prefix} {line}\n" if line.startswith("-") else line for line in lines]
    assert [line for line in expected if line not in script] == [] and absent not in script
    assert login.commands.calls() == [] and list(login.folder.iterdir()) == [login.folder / "train.py"]


def test_variables_that_pbs_does_not_pass_are_named(login: Login, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {*os.environ} - {"HOME", "PATH"}:
        monkeypatch.delenv(name)
    run = "run --dry-run --env NCCL_NET=Socket --site {} train.py"
    monkeypatch.setenv("DDPKIT_SITE", "generic-pbs")  # as a centre's module does; the job needs it not
    assert "note: PBS" not in login.submit(*run.format("generic-pbs").split()).err
    for name in ("NCCL_DEBUG", "NCCL_NET", "WANDB_API_KEY", "TORCH_NCCL_BLOCKING_WAIT", "NCCLX"):
        monkeypatch.setenv(name, "secret")
    noted = login.submit(*run.format("generic-pbs").split()).err
    assert "does not get NCCL_DEBUG, TORCH_NCCL_BLOCKING_WAIT, WANDB_API_KEY. For" in noted and "secret" not in noted
    assert "note: PBS" not in login.submit(*run.format("generic-slurm").split()).err


def test_submission_keeps_script_settings_commit_and_id(login: Login) -> None:
    for command in ("init -q", "add .", "-c user.name=a -c user.email=a@b commit -q -m first"):
        subprocess.run(["git", *command.split()], check=True, env={**os.environ, "HOME": str(login.folder)})
    (login.folder / "new").touch()
    done = login.submit("run", "--nodes", "3", "--env", "TEXT=\udcff\n'\"", "--env", "HOME", "train.py", "--lr",
                        "0.1")
    assert (done.status, done.out) == (0, "101\n") and "note: " not in done.err
    [folder] = login.submissions()
    assert folder.name.startswith("train-20") and folder.stat().st_mode & 0o777 == 0o700
    [words] = login.commands.calls("sbatch")
    assert (words[:3], words[-1]) == (["sbatch", "--parsable", "--job-name=train"], str(folder / "job.sh"))

    record = json.loads((folder / "submission.json").read_text())
    assert record["job_ids"] == ["101"] and record["submit_folder"] == str(login.folder)
    assert record["job"]["nodes"] == 3 and record["job"]["command"] == ["train.py", "--lr", "0.1"]
    assert (folder / "environment").stat().st_mode & 0o777 == 0o600
    variables = (folder / "environment").read_bytes().split(b"\0")
    assert {b"TEXT=\xff\n'\"", os.fsencode(f"HOME={os.environ['HOME']}"), os.fsencode(f"PYTHON={sys.executable}")} < {
        *variables}
    assert len(record["git"]["commit"]) == 40 and record["git"]["dirty"] is True
    script = (folder / "job.sh").read_text()
    assert f'#SBATCH "--output={folder}/%j.out"' in script and "-- train.py --lr 0.1" in script
    assert not any("\\377" in text or "TEXT=" in text for text in (script, json.dumps(record)))

    assert login.submit("run", "train.py").status == 0  # in the same second, perhaps
    assert len(login.submissions()) == 2


def test_pbs_runs_the_script_without_a_login_shell(login: Login) -> None:
    login.commands.add_submitter("qsub")
    name = "1. my 'odd' name; é.py"
    assert login.submit("run", "--site", "generic-pbs", "--no-check", "--account", "p1", name).status == 0
    [words] = login.commands.calls("qsub")
    [folder] = login.submissions()
    assert words[-4:] == ["--", "/bin/bash", "-l", str(folder / "job.sh")]
    values = dict(zip(words, words[1:], strict=False))
    assert (values["-A"], values["-o"], values["-N"]) == ("p1", f"{folder}/", "my__odd__name__")


def test_chain_is_submitted_completely_or_not_at_all(login: Login) -> None:
    login.commands.add_submitter("sbatch", refused=3, error=REFUSAL)
    done = login.submit("run", "--chain", "4", "train.py")
    assert (done.status, done.out) == (1, "") and REFUSAL.strip() in done.err
    [folder] = login.submissions()  # with the scripts, for people; no record of a job
    assert f"Nothing is in the queue. The script is kept in {folder}" in done.err and (folder / "job-3.sh").exists()
    assert len(login.commands.calls("sbatch")) == 3 and "no submissions" in login.submit("list").err
    assert login.commands.calls("scancel") == [["scancel", "102"], ["scancel", "101"]]  # so that none starts


@pytest.mark.parametrize("name", ["job.sh", "submission.json.unfinished"])
def test_full_disk_leaves_nothing_in_the_queue(name: str, login: Login, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str, **options: Any) -> int:
        if path.name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return path.write_bytes(os.fsencode(text))

    monkeypatch.setattr(Path, "write_text", full)
    done = login.submit("run", "train.py")
    assert (done.status, done.out) == (1, "") and login.submissions() == []
    assert "No space left on device" in done.err and "Traceback" not in done.err
    assert len(login.commands.calls("sbatch")) == len(login.commands.calls("scancel"))


@pytest.mark.parametrize(("words", "status", "message"), [
    ("run --chain 2 --time 2m train.py", 0, "little time to train"),
    ("run train.py --nodes 4 --lr 1", 0, "--nodes comes after the script"),
    ("run --site derecho --dry-run --no-check train.py", 0, "warning: Derecho, NCAR"),
    ("run cancle 77", 1, "command: no such program: cancle. It is not on PATH"),
    ("run tool", 1, "Write ./tool"),
    ("run --nodes 2", 1, "no training script"),
    ("run -m --lr 1", 1, "-m has no module"),
    ("run --env NOT_SET train.py", 1, "NOT_SET is not set here. Expected NAME=VALUE"),
    ("run --chain 0 train.py", 1, "--chain is 0"),
    ("run --queue @ train.py", 1, "--partition"),
    ("run --directive='-l filesystems=home' train.py", 1,
     "'-l filesystems=home' is not an option of sbatch, and this job is for slurm. Give an option of sbatch. (option"),
    ("run --site generic-pbs --directive=--qos=x train.py", 1, "'--qos=x' is not an option of qsub"),
    ("run -c 1 --ntasks-per-node 1 train.py", 0, "the profile generic-slurm adds --exclusive: the job waits for whole"),
    ("run --site generic-pbs --ntasks-per-node 99 --gpus-per-node 0 train.py", 1, "4 cores"),
    ("run --ntasks-per-node 8 --gpus-per-node 4 train.py", 1, "8 ranks on each node are more than its 4 GPUs"),
    ("run --ntasks 16 --nodes 2 --gpus-per-node 4 train.py", 1, "Give --nodes 4, fewer ranks, or --oversubscribe"),
    ("run -n 6 --gpus-per-node 4 train.py", 1, "--ntasks 6 is not a multiple of the 4 GPUs of a node"),
    ("run --gpus-per-node many train.py", 2, "'many' is not a number of GPUs. Expected one such as 4"),
    ("run --site generic-pbs --gpus-per-node a100:4 train.py", 1, "a100:4 is for Slurm only"),
    ("run --site generic-pbs --mem 0 train.py", 1, "0, all memory of the nodes, is for Slurm only"),
    ("run -N 2 -n 3 train.py", 1, "--ntasks 3"),
    ("run -n 2 --ntasks-per-node 2 train.py", 1, "Both --ntasks"),
    ("run --site generic-pbs -p a -q b train.py", 1, "Both -p and -q name a queue"),
    ("run --gres gpu:4 train.py", 2, "unrecognized arguments: --gres. Another option of sbatch or qsub"),
    ("run -l walltime=1:00:00 train.py", 2, "or qsub: --directive='OPTION VALUE'"),
    ("run --gpus 4 train.py", 2, "Did you mean --gpus-per-node?"),
    ("sites new", 2, "See: ddpkit submit --help"),
    ("doctor --quick", 2, "One of ddpkit doctor follows --, as in: -- --quick"),
    ("run list", 1, "ddpkit submit list"),
    ("run --checkpoints out train.py", 1, "Add --preflight"),
    ("run --site derecho --account p --dry-run trian.py", 0, "Did you mean train.py?"),
    ("run --site polaris --queue debug --dry-run train.py", 1, "requires an account. Add --account: your project."),
    ("cancle 77", 2, "Did you mean: ddpkit submit cancel 77"),
    ("--nodes 2 train.py", 2, "Did you mean: ddpkit submit run --nodes 2 train.py"),
    ("'my train.py'", 2, "Did you mean: ddpkit submit run 'my train.py'"),
    ("", 2, "a subcommand is missing"),
    ("run env A=1 torchrun train.py", 1, "as in ddpkit submit run --launcher torchrun train.py; or give --env"),
    ("run bash -c 'srun python train.py'", 1, "the command runs srun"),
    ("run --dry-run --env DDPKIT_INDEPENDENT=1 env torchrun train.py", 0, ""),
    ("run --node 2 train.py", 2, "Did you mean --nodes?")])
def test_mistake_is_named(words: str, status: int, message: str, login: Login) -> None:
    (login.folder / "tool").touch(0o755)
    done = login.submit(*shlex.split(words))
    assert done.status == status and message in done.err
    assert done.out.startswith("#!/bin/bash") == ("--dry-run" in words)
    assert status != 2 or done.err.count("\n") == 1
    if status:
        assert login.commands.calls() == [] and login.submissions() == []


@pytest.mark.parametrize(("words", "variable", "value"), [
    ("", "SBATCH_ACCOUNT", "m1"), ("--account m1", "", ""), ("--directive='-A m1'", "", "")])
def test_account_may_come_from_the_shell_or_a_directive(words: str, variable: str, value: str, login: Login,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_ACCOUNT", "")
    assert "requires an account" in login.submit("run", "--site", "perlmutter", "--dry-run", "train.py").err
    if variable:
        monkeypatch.setenv(variable, value)
    done = login.submit("run", "--site", "perlmutter", *shlex.split(words), "--dry-run", "train.py")
    assert done.status == 0 and "account" not in done.err


def test_variables_that_break_a_submission_do_not_reach_sbatch(login: Login, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = ["SBATCH_ARRAY_INX", "SBATCH_GPUS", "SBATCH_GPUS_PER_TASK", "SBATCH_GRES", "SBATCH_WAIT"]
    for name in (*refused, "SBATCH_RESERVATION"):
        monkeypatch.setenv(name, "1")
    login.commands.write("sbatch", "#!/bin/bash\nenv >&2; exit 1\n")
    error = login.submit("run", "train.py").err
    assert "SBATCH_RESERVATION" in error and not [name for name in refused if f"{name}=" in error]


@pytest.mark.parametrize(("words", "is_noted"), [
    ("--site lumi", True), ("--site derecho", True), ("--site lumi --time 2h", False),
    ("--site lumi --directive=--time=2:00:00", False), ("--site derecho '--directive=-l walltime=2:00:00'", False)])
def test_dry_run_without_a_time_limit_notes_that(words: str, is_noted: bool, login: Login) -> None:
    done = login.submit("run", "--dry-run", "--account", "p", *shlex.split(words), "train.py")
    assert ("note: no --time is given: the limit is the default of the queue" in done.err) == is_noted


def test_nodes_are_shared_on_request(login: Login) -> None:
    assert "--exclusive" in login.submit("run", "--dry-run", "-c", "1", "train.py").out
    done = login.submit("run", "--dry-run", "-c", "1", "--directive=--oversubscribe", "train.py")
    assert "--exclusive" not in done.out + done.err


def test_default_site_is_that_of_the_centre_or_scheduler(login: Login, monkeypatch: pytest.MonkeyPatch) -> None:
    assert login.submit("run", "train.py").status == 0
    assert json.loads((login.submissions()[0] / "submission.json").read_text())["site"] == "generic-slurm"
    login.commands.add_submitter("qsub")
    done = login.submit("run", "train.py")
    assert done.status == 1 and "--site NAME" in done.err and "one of ddpkit sites list" in done.err

    (login.folder / "ours.yaml").write_text("title: Ours\nscheduler: slurm\n")
    done = login.submit("run", "--site", "ours", "train.py")
    assert "but ./ours.yaml exists. Write the path of a file with a slash: --site ./ours.yaml" in done.err
    assert login.submit("run", "--site", "./ours.yaml", "--dry-run", "train.py").out.startswith("#!")

    monkeypatch.setenv("DDPKIT_SITE", "derecho")
    for words, line in (("", "\n#PBS -q main"), ("--site lumi", "\n#SBATCH ")):
        assert line in login.submit(*f"run {words} --account p --dry-run train.py".split()).out


@pytest.mark.parametrize(("words", "status", "message"), [
    ("--env PYTHON={python} train.py", 1, "PYTHON is '{python}', which has no torch"),
    ("--no-check train.py", 0, "(runs this script) has no torch"),
    ("--setup 'source env.sh' train.py", 0, ""), ("--container a.sif train.py", 0, ""), ("bash", 0, ""),
    ("--site site.yaml train.py", 0, "The modules of Ours may bring it")])
def test_python_without_torch_is_refused_unless_another_may_come(
        words: str, status: int, message: str, login: Login, tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch) -> None:
    python = make_environment(tmp_path / "base", torch=False)
    monkeypatch.setenv("CONDA_PREFIX", str(python.parents[1]))
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    monkeypatch.delenv("PYTHON", raising=False)
    monkeypatch.setenv(interpreter.STARTED_BY, str(python))
    monkeypatch.setattr(interpreter, "KIT_PYTHON", str(tmp_path / "none"))
    (login.folder / "site.yaml").write_text("title: Ours\nscheduler: slurm\nmodules: [pytorch]\n")

    words = f"run --dry-run --site generic-slurm {words.format(python=python)}"
    done = login.submit(*shlex.split(words))
    assert done.status == status and message.format(python=python) in done.err
    assert ("export PYTHON=" in done.out) == ("PYTHON=" in words or words.endswith("bash"))


def test_missing_scheduler_leaves_nothing_behind(login: Login, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    done = login.submit("run", "--site", "generic-pbs", "--no-check", "train.py")
    assert done.status == 1 and "qsub was not found" in done.err and "may be in the queue" not in done.err
    assert not (login.folder / "jobs-out").exists()


def test_a_profile_stages_unless_the_user_says_otherwise(login: Login, tmp_path: Path) -> None:
    site = tmp_path / "own.yaml"
    site.write_text("title: Own\nscheduler: slurm\nstage: true\nstage_dir: $NVME\n")
    for options, words in (((), " --stage --stage-dir '$NVME' -- train.py"),
                           (("--no-stage",), "launch --no-stage -- train.py"),
                           (("--stage-dir", "/fast"), " --stage --stage-dir /fast -- train.py")):
        assert words in login.submit("run", "--dry-run", "--site", str(site), *options, "train.py").out


def test_directives_of_the_stage_folder_come_with_it(login: Login, tmp_path: Path) -> None:
    site = tmp_path / "own.yaml"
    site.write_text("title: Own\nscheduler: slurm\nstage_dir: /nvme/$USER\nstage_directives: [--constraint=nvme]\n")
    for options, words, is_requested in (
            ("--stage", " --stage --stage-dir '/nvme/$USER' -- ", True), ("", "launch", False),
            ("--no-stage", " --no-stage -- ", False), ("--stage-dir /fast", " --stage --stage-dir /fast -- ", False)):
        done = login.submit("run", "--dry-run", "--site", str(site), *options.split(), "train.py")
        assert words in done.out and ("\n#SBATCH --constraint=nvme\n" in done.out) == is_requested


@pytest.mark.parametrize(("scheduler", "options", "queue"), [
    ("pbs", "--nodes 2", "-q debug"), ("pbs", "--nodes 3", "-q scaling"), ("pbs", "--nodes 2 --spare 1", "-q scaling"),
    ("pbs", "--nodes 9999", "-q prod"), ("pbs", "--nodes 2 -p mine", "-q mine"),
    ("pbs", "--nodes 2 -q mine", "-q mine"),
    ("pbs", "--nodes 2 --directive='-q mine'", "-q mine"), ("slurm", "--nodes 4", "--partition=scaling"),
    ("slurm", "--nodes 4 -q short", "--partition=scaling"),
    ("slurm", "--directive=--partition=mine", "--partition=mine"),
    ("qos", "--nodes 4", "--qos=scaling"), ("qos", "--nodes 4 -q mine", "--qos=mine"),
    ("qos", "--nodes 4 --directive=--qos=mine", "--qos=mine"), ("pbs", "--nodes 12", "")])
def test_queue_follows_the_number_of_nodes(scheduler: str, options: str, queue: str, login: Login,
                                           tmp_path: Path) -> None:
    site = tmp_path / "own.yaml"
    is_qos = scheduler == "qos"
    site.write_text(f"title: Own\nscheduler: {'slurm' if is_qos else scheduler}\n"
                    f"queue_option: {'qos' if is_qos else 'partition'}\nqueues:\n  - {{nodes: 1-2, queue: debug}}\n"
                    "  - {nodes: 3-9, queue: scaling}\n  - {nodes: 20-, queue: prod}\n")
    done = login.submit("run", "--dry-run", "--site", str(site), *shlex.split(options), "train.py")
    if not queue:
        assert done.status == 1 and ("own has no queue for 12 nodes. Expected a number of: debug (nodes: 1-2), scaling "
                                     "(nodes: 3-9), prod (nodes: 20-). Give another --nodes, or name a") in done.err
        site.write_text(site.read_text() + "queue: other\n")
        queue = "-q other"
        done = login.submit("run", "--dry-run", "--site", str(site), *shlex.split(options), "train.py")
    named = [line for line in done.out.splitlines() if line.startswith("#") and any(
        f" {option}" in line for option in ("-q ", "--partition", "--qos"))]
    assert [line for line in named if "short" not in line] == [f"#{'PBS' if scheduler == 'pbs' else 'SBATCH'} {queue}"]


@pytest.mark.parametrize(("proxy", "lines"), [
    ("", 0), ("proxy: http://proxy.site.org:3128\n", 3),
    ("proxy: {value: 'http://proxy.site.org:3128', no_proxy: 'localhost,.site.org', reason: a, source: b}\n", 3)])
def test_proxy_is_set_only_where_the_profile_has_one(proxy: str, lines: int, login: Login, tmp_path: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://that.of.the.shell")
    site = tmp_path / "own.yaml"
    site.write_text(f"title: Own\nscheduler: slurm\n{proxy}")
    run = ("run", "--dry-run", "--site", str(site))
    script = login.submit(*run, "train.py").out
    assert script.count("_proxy=") == lines
    if proxy:
        excepted = "localhost,.site.org" if "no_proxy" in proxy else "localhost,127.0.0.1"
        for variable, value in (("http_proxy", "http://proxy.site.org:3128"),
                                ("https_proxy", "http://proxy.site.org:3128"), ("no_proxy", excepted)):
            assert f"export {variable}={value}\n" in script
        assert "export http_proxy=''\n" in login.submit(*run, "--env", "http_proxy=", "train.py").out
