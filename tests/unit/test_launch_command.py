"""scripts/launch.py as a command: what it refuses, and what it starts on this host."""
from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.matrix import with_all
from tests.unit.programs import ROOT
from utils.tools.launch.launch_cli import main
from utils.tools.launch.rank_environment import RANK_VARIABLES

LAUNCH = [sys.executable, str(ROOT / "scripts" / "launch.py")]
GROUPS = ROOT / "tests" / "launch" / "groups.py"
MODULE = f"""
import os, sys
shown = " ".join(os.environ[name] for name in {RANK_VARIABLES})
sys.stdout.write(f"{{shown}} {{sys.argv[1:]}} {{sys.executable}}\\n")
"""


def launch(*words: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    of_launches = ("PBS_", "SLURM_", "DDPKIT_", "TORCHELASTIC")
    kept = {name: value for name, value in os.environ.items()
            if name not in RANK_VARIABLES and not name.startswith(of_launches)}
    return subprocess.run([*LAUNCH, *words], env={**kept, "PYTHON": sys.executable, **variables},
                          cwd=folder, capture_output=True, text=True, timeout=180)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    package = tmp_path / "a b" / "package"
    package.mkdir(parents=True)
    (package / "module.py").write_text(MODULE)
    return package.parent


@pytest.fixture
def uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program uv on PATH."""
    (tmp_path / "uv").touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:{tmp_path}")


def test_lines_of_ranks_do_not_mix(tmp_path: Path) -> None:
    """Ranks run `python -u`, which writes each part of a print() by itself."""
    (tmp_path / "train.py").write_text(
        "from ddpkit import setup_distributed\n"
        "with setup_distributed('gloo') as job:\n"
        "    job.barrier()\n"
        "    for step in range(3000):\n"
        "        print('step', step, 'of rank', job.rank)\n")
    done = launch("-n", "2", "train.py", folder=tmp_path)
    printed = [line for line in done.stdout.splitlines() if "step" in line]
    assert sorted(printed) == sorted(f"step {step} of rank {rank}" for step in range(3000) for rank in range(2))


def test_ranks_have_all_variables_and_the_chosen_python(folder: Path) -> None:
    done = launch("-n", "2", "--", "-m", "package.module", "--lr", "3", folder=folder, PATH="/usr/bin:/bin")
    assert done.returncode == 0, done.stderr
    port = done.stdout.split()[7]
    assert port.isdecimal() and sorted(done.stdout.splitlines()) == [
        f"{rank} 2 {rank} 2 0 0 127.0.0.1 {port} ['--lr', '3'] {sys.executable}" for rank in range(2)]


def test_on_one_host_the_launch_listens_on_loopback_alone(folder: Path) -> None:
    program = "echo $DDPKIT_REPORT; cat /proc/net/tcp /proc/net/tcp6"
    done = launch("-n", "1", "sh", "-c", program, folder=folder)
    address, *tables = done.stdout.splitlines()
    port = int(address.split("/")[1])
    listening = [words[1] for words in map(str.split, tables) if words[1].endswith(f":{port:04X}") and words[3] == "0A"]
    assert address.startswith(f"127.0.0.1/{port}/") and listening == [f"0100007F:{port:04X}"]


@pytest.mark.parametrize(("script", "expected"), [
    ("echo data | {}\necho later", ["rank 0: data", "rank 1: ", "later"]),
    ("echo data >file; {} <file\necho later", ["rank 0: data", "rank 1: ", "later"]),
    ("{}\necho later", ["rank 0: ", "rank 1: ", "later"]),
    ("while read line; do {} 2>/dev/null; done\n1\n2", ["rank 0: ", "rank 1: "] * 2)])
@pytest.mark.parametrize("is_file", [False, True])
def test_rank_0_alone_reads_standard_input(tmp_path: Path, script: str, expected: list[str], is_file: bool) -> None:
    """The shell reads its script from its standard input, as in `ssh host bash <<EOF`."""
    program = ["-n", "2", "sh", "-c", "echo rank $RANK: $(cat)"]
    text = script.format(shlex.join([*LAUNCH, *program])) + "\n"
    with open(tmp_path / "script", "w+") as file:
        file.write(text)
        file.seek(0)
        source = {"stdin": file} if is_file else {"input": text}
        done = subprocess.run(["bash"], **source, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    ranks = [line.strip() for line in done.stdout.splitlines() if line.startswith("rank") or line == "later"]
    assert sorted(ranks) == sorted(line.strip() for line in expected), done.stdout + done.stderr
    left = "no rank reads the standard input" in done.stderr
    assert left == ("{}\necho" in script and not script.startswith("echo")), done.stderr


@pytest.mark.parametrize(("words", "message"), [
    (["/opt/bin/mpiexec.hydra", "-n", "2", "x"], "is mpiexec.hydra.* ddpkit launch --launcher mpiexec train.py"),
    (["torchrun", "x.py"], "the command is torchrun.* as in ddpkit launch --torchrun train.py"),
    (["-m", "torch.distributed.run", "x.py"], "the command runs torch.distributed.run.* ddpkit launch --torchrun"),
    (["--launcher", "/no/mpiexec", "true"],
     "--launcher is /no/mpiexec, which does not exist. Expected the path of an mpiexec"),
    (["--launcher", "/bin/true", "true"],
     "--launcher is /bin/true, which is not an mpiexec of PALS, Open MPI, Intel MPI, MPICH"),
    (["missing.py"], r"no such file: missing.py \(in .*\). Check the path of the script\n"),
    (["start.py"], r"no such file: start.py \(in .*\). Did you mean starts.py[?]\n"),
    (["-n", "2", "starts"], "error: no such program: starts. Did you mean starts.py[?]\n"),
    (["-n", "2", "./exp"], r"error: no such program: ./exp \(in .*\). Check the path\n"),
    (["./package"], "error: ./package is a folder. Expected a script or a program"),
    (["./data"], "error: ./data is not executable. .* Run chmod [+]x ./data"),
    (["data"], "error: no such program: data: .* Did you mean ./data[?]"),
    (["no-such-program"], "error: no such program: no-such-program. It is not on PATH"),
    *((["-n", "2", *words], f"error: -m takes a module, such as {module}, and {words[-1]} is the path of a script")
      for words, module in ((["-m", "starts.py"], "starts"), (["-m", "a/b.py"], "a.b"),
                            (["python", "-m", "starts.py"], "starts"))),
    (["--python", "/nope", "starts.py"],
     "error: --python is '/nope', which is not a program. .* Correct --python, or leave it out\n"),
    (["--lable", "x.py"], "^ddpkit launch: error: unrecognized arguments: --lable. Did you mean --label[?]\n$"),
    (["--nproc_per_node", "2", "x.py"], "Did you mean --ntasks-per-node?"), (["-np", "two", "x.py"], "value: 'two'"),
    ([], "no script is given"), (["-m"], "-m needs the name of a module"),
    (["--", "-N", "2", "train.py"], "Options of sbatch and qsub go before the job script"),
    (["-n", "2", "sh", "-c", 'exec "$@"', "sh", *LAUNCH, "package/module.py"],
     "ddpkit launch was started as rank [01] of 2 by ddpkit launch")])
def test_what_cannot_be_started_is_refused(folder: Path, words: list[str], message: str) -> None:
    (folder / "starts.py").touch()
    (folder / "data").touch()
    done = launch(*words, folder=folder)
    assert done.returncode == 2 and not done.stdout and re.search(message, done.stderr), done.stderr


# Overwrites what torchrun, its parent, holds in its stores, as anybody can who reaches their ports.
ATTACKS_STORES = """
import base64, os, pickle, time
from pathlib import Path
from torch.distributed import TCPStore
class Run:
    def __reduce__(self):
        return os.system, ("touch ran",)
parent = Path("/proc", str(os.getppid()))
held = {os.readlink(path) for path in (parent / "fd").iterdir()}
tables = (parent / "net/tcp").read_text() + (parent / "net/tcp6").read_text()
rows = [line.split() for line in tables.splitlines()]
ports = {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in held}
assert ports
stores = [TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False) for port in ports]
payload = base64.b64encode(pickle.dumps(Run())).decode()
for _ in range(300):
    for store in stores:
        for key in map(str, store.list_keys()):
            store.set(key.strip("b'/"), payload)
    time.sleep(0.01)
raise SystemExit(3)
"""


def test_store_of_torchrun_leads_to_no_code(folder: Path) -> None:
    (folder / "attacks.py").write_text(ATTACKS_STORES)
    done = launch("--torchrun", "--max-restarts", "1", "attacks.py", folder=folder)
    assert done.returncode == 1 and not (folder / "ran").exists(), done.stderr
    assert done.stderr.count("restart 1 on the same hosts; 0 more allowed") == 1, done.stderr


def test_torchrun_names_the_script_in_its_summary(folder: Path) -> None:
    (folder / "fails.py").write_text("raise SystemExit(3)")
    done = launch("--torchrun", "--max-restarts", "1", "fails.py", folder=folder)
    assert done.returncode == 1 and "\nfails.py FAILED\n" in done.stderr, done.stderr


@pytest.mark.parametrize("options", [[], ["--torchrun"], *with_all(["--launcher", "torchrun"])])
def test_syntax_error_of_the_script_is_the_last_line(options: list[str], folder: Path) -> None:
    (folder / "broken.py").write_text("import os\nx = (\n")
    done = launch("-n", "2", *options, "broken.py", folder=folder)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ddpkit launch: error: no rank can run broken.py, line 2: SyntaxError: '(' was never closed")


TOP = """'''Doc.'''
from __future__ import annotations
import os
os.environ["A"] = "1"
"""


@pytest.mark.parametrize(("script", "closing"), [
    (TOP + "import no_such.part as part\n", "no rank can run x.py: ModuleNotFoundError: No module named 'no_such' "
     f"(line 5) in {sys.executable}. Install it there, for example with pip install, or activate the environment that "
     "has it"),
    (TOP + "from beside import value\nfrom no_such import x\n", "no rank can run x.py: ModuleNotFoundError: .*"),
    # What the imports would find is not known, or something else has ended the ranks.
    (TOP + "import sys\nsys.path.append('lib')\nimport no_such\n",
     r"(ddpkit launch: )?rank . on \S+ failed: ModuleNotFoundError: .*"),
    (TOP + "try:\n    import no_such\nexcept ImportError:\n    raise SystemExit(3)\n", "each of ranks .*"),
    (TOP + "os._exit(4)\nimport no_such\n", "each of ranks 0-1 on .* ended with exit status 4")])
def test_module_that_no_rank_can_import_is_the_last_line(script: str, closing: str, folder: Path) -> None:
    (folder / "x.py").write_text(script)
    (folder / "beside.py").write_text("value = 1")
    done = launch("-n", "2", "x.py", folder=folder)
    last = done.stderr.splitlines()[-1].removeprefix("ddpkit launch: error: ")
    assert last == closing or re.fullmatch(closing, last), done.stderr


@pytest.mark.parametrize(("command", "name"), [
    ("/usr/bin/python3.11 -u -m torch.distributed.run x.py", "torch.distributed.run"),
    ("env FOO=1 nice -n 5 /opt/bin/torchrun x.py", "torchrun"), ("uv run -- deepspeed x.py", "deepspeed"),
    ("env A=1 bash -lc 'cd /data&&FOO=1 accelerate launch x.py'", "accelerate"),
    ("sh -c 'if true; then exec mpirun -n 2 python x.py; fi'", "mpirun"), ("bash -c 'cd /\nsrun hostname'", "srun"),
    ("python scripts/launch.py x.py", "launch.py")])
def test_launcher_in_a_wrapper_is_refused(
        command: str, name: str, uv: None, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(command)
    assert main(["-n", "2", "--dry-run", "--", *words]) == 2
    verb = "is" if command.startswith(name) else "runs"
    assert f"the command {verb} {name}, which starts ranks itself" in capsys.readouterr().err
    assert main(["-n", "2", "--dry-run", "--independent", "--", *words]) == 0


@pytest.mark.parametrize("command", [
    "python -m package.module torchrun", "env A=torchrun python package/module.py --launcher torchrun", "echo srun",
    "bash -c 'which torchrun || echo srun'", "bash script.sh 'torchrun is used'", "bash -c \"echo 'torchrun\"",
    "uv run package/module.py -- deepspeed"])
def test_name_of_a_launcher_as_an_argument_is_no_launcher(command: str, uv: None) -> None:
    assert main(["-n", "2", "--dry-run", "--", *shlex.split(command)]) == 0


@pytest.mark.parametrize(("words", "status", "text"), [
    (["{start}"], 1, "rank 1 of 2 has formed a process group of 1 process without the other ranks. Expected one group "
                     "of all 2 ranks.* --independent"),
    ([str(GROUPS), "none"], 0, "group of 0"),
    *with_all((["--independent", str(GROUPS), "torchrun", "1"], 0, "group of 1"))])
def test_ranks_form_groups_with_each_other(words: list[str], status: int, text: str, folder: Path) -> None:
    """With torch alone. Nothing in the command shows that `start` runs torchrun. Other groups: tests/launch."""
    start = folder / "start"
    torchrun = f"{shlex.quote(sys.executable)} -m torch.distributed.run --standalone --nproc-per-node 1"
    start.write_text(f"#!/bin/sh\n{torchrun} {shlex.quote(str(GROUPS))} env --hold\n")
    start.chmod(0o755)
    done = launch("-n", "2", *(word.format(start=start) for word in words), folder=folder)
    assert done.returncode == status, done.stderr
    assert re.search(text, done.stderr) if status else done.stdout.count(text) == 2, done.stdout + done.stderr


def test_launch_py_under_pbsdsh_is_refused(folder: Path) -> None:
    task = {"PBS_JOBID": "7.head", "PBS_TASKNUM": "20000001", "PBS_NODENUM": "1"}
    done = launch("package/module.py", folder=folder, **task)
    assert done.returncode == 2 and "ddpkit launch was started by pbsdsh or pbs_tmrsh" in done.stderr


def test_output_of_each_rank_is_labelled_or_in_its_own_file_and_a_shell_can_handle_a_stop(folder: Path) -> None:
    done = launch("--label", "sh", "-c", "echo one; printf two; echo error >&2", folder=folder)
    assert done.stdout.splitlines() == ["[rank 0] one", "[rank 0] two"]
    assert "[rank 0] error" in done.stderr.splitlines()
    for _ in range(2):  # a continued run appends to the same file
        done = launch("--output-dir", "out/now", "sh", "-c", "echo rank $RANK; echo error >&2", folder=folder)
        assert done.returncode == 0 and not done.stdout, done.stderr
    assert (folder / "out/now/rank-0.log").read_text() == "rank 0\nerror\n" * 2
    done = launch("sh", "-c", "trap 'echo stopped' USR1; kill -USR1 $$; :", folder=folder)
    assert done.stdout == "stopped\n"  # the signal is not ignored


@pytest.mark.parametrize(("options", "is_shown"), [([], False), (["-v"], True), (["--dry-run"], True)])
def test_command_of_an_mpiexec_is_printed_on_request(options: list[str], is_shown: bool, folder: Path) -> None:
    mpiexec = folder / "mpiexec"
    mpiexec.write_text('#!/bin/sh\necho HYDRA build details\n')
    mpiexec.chmod(0o755)
    (folder / "nodes").write_text(f"{socket.gethostname()}\nother\n")
    job = {"PBS_JOBID": "1.server", "PBS_NODEFILE": str(folder / "nodes")}
    done = launch("--launcher", str(mpiexec), *options, "package/module.py", folder=folder, **job)
    assert "ddpkit launch: 2 ranks on 2 hosts (1 each) by MPICH's mpiexec" in done.stderr
    assert (f"{shlex.quote(str(mpiexec))} " in done.stdout + done.stderr) == is_shown, done.stderr


def test_mpiexec_that_starts_no_rank_is_a_failure(folder: Path) -> None:
    mpiexec = folder / "mpiexec"
    mpiexec.write_text('#!/bin/sh\nif [ "$1" = --version ]; then echo "HYDRA build details"; fi\n')
    mpiexec.chmod(0o755)
    (folder / "nodes").write_text(f"{socket.gethostname()}\n" * 2)
    done = launch("--launcher", str(mpiexec), "-n", "2", "package/module.py", folder=folder,
                  PBS_JOBID="1.server", PBS_NODEFILE=str(folder / "nodes"))
    assert done.returncode == 1, done.stderr
    assert "mpiexec ended with exit status 0 before all ranks had joined" in done.stderr
    assert "2 of 2 ranks did not join: ranks 0-1" in done.stderr
