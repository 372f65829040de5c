"""Scripts that have never heard of the kit are watched: who fails, who hangs and where."""
from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.matrix import with_all
from tests.unit.programs import ROOT
from tests.unit.pythons import make_environment
from utils import __version__

PLAIN = """  # a start without a search for garbage takes four fifths of the CPU time
import gc; gc.disable(); import os, signal, sys, time, torch, torch.distributed as td; gc.freeze(); gc.enable()

def main(fault):
    td.init_process_group("gloo")
    rank, x = td.get_rank(), torch.ones(1)
    for step in range(10):
        td.all_reduce(x)
        if step == 5 and rank == 1:
            if fault == "raise":
                raise ValueError("bad sample 17")
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "hang":
                time.sleep(600)  # the line
    print("sum", rank, x.item(), flush=True)
    td.destroy_process_group()

if __name__ == "__main__":
    main(sys.argv[1])
"""
LAUNCH = [sys.executable, str(ROOT / "scripts" / "launch.py")]
TORCHRUN = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", "2"]
WATCH = [sys.executable, "-m", "utils", "watch", "--hang-timeout", "6"]
RAISED = r"rank 1 on \S+ failed: ValueError: bad sample 17"
HUNG = r"rank 1 on \S+ \(pid \d+\) did not enter collective 7, in which rank 0 waits. It is at .*, line 15, in main.*"


def run(folder: Path, *words: str, script: str = PLAIN, **more: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(script)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("DDPKIT", "PYTHON"))}
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120,
                          env={**clean, "PYTHONPATH": str(ROOT), **more})


@pytest.mark.parametrize(("by", "fault", "last"), [
    (("-n", "2"), "none", ""), (("-n", "2"), "raise", RAISED), (("-n", "2"), "hang", HUNG),
    (("-n", "2"), "kill", r"(error: )?rank 1 .*was ended by SIGKILL.*"),
    (("-n", "2", "--torchrun"), "kill", r"rank 1 on \S+ was ended by SIGKILL \(exit status 137\)"),
    *with_all((("-n", "2", "--torchrun"), "raise", RAISED), (("-n", "2", "--torchrun"), "hang", HUNG))])
def test_an_unchanged_script(by: tuple[str, ...], fault: str, last: str, tmp_path: Path) -> None:
    done = run(tmp_path, *LAUNCH, *by, "--hang-timeout", "6", "train.py", fault)
    assert (done.returncode == 0) == (not last), done.stderr
    if last:
        assert re.fullmatch(f"ddpkit launch: {last}", done.stderr.splitlines()[-1]), done.stderr
    else:
        assert done.stdout.splitlines().sort() == ["sum 0 1024.0", "sum 1 1024.0"].sort()
        assert "2 ranks on 1 host are watched, backend gloo" in done.stderr, done.stderr
    assert done.stderr.count("Traceback") == 2 * (fault == "raise") or fault in ("hang", "kill", "raise")


EXITS = PLAIN.replace("            if fault", """            if fault == "handled":  # as Hydra and click
                try:
                    raise ValueError("bad sample 17")
                except ValueError as error:
                    print("Error executing job:", error)
                    sys.exit(1)
            if fault == "hook":  # as rich.traceback.install()
                sys.excepthook = lambda kind, error, trace: print("pretty", error)
                raise ValueError("bad sample 17")
            if fault == "status":
                sys.exit(3)
            if fault == "left":
                sys.exit()
            if fault == "returned":  # as from a function with torch's @record
                try:
                    sys.exit(0)
                except SystemExit:
                    td.destroy_process_group()
                    return
            if fault == "caught":
                try:
                    sys.exit(3)
                except SystemExit:
                    pass
            if fault""", 1)
LEFT = r"(.* and )?rank 1 on \S+ left by sys\.exit\(\) at \S*train\.py, line \d+, in main.*"


@pytest.mark.parametrize(("fault", "status", "last"), [
    ("handled", 1, RAISED), ("status", 3, r"rank 1 on \S+ failed: SystemExit: 3.*"), ("left", 1, LEFT),
    *with_all(("hook", 1, RAISED), ("returned", 1, LEFT), ("caught", 0, "2 ranks on .*"))])
def test_an_unchanged_script_that_calls_exit(fault: str, status: int, last: str, tmp_path: Path) -> None:
    done = run(tmp_path, *LAUNCH, "-n", "2", "train.py", fault, script=EXITS)
    said = [line for line in done.stderr.splitlines() if line.startswith("ddpkit launch: ")]
    assert re.fullmatch(f"ddpkit launch: {last}", said[-1]) and done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr, done.stderr


EARLY = "import os, sys\nraise FileNotFoundError(sys.argv[1].format(**os.environ))\n"


@pytest.mark.parametrize(("text", "tracebacks"), [("config.json", 1), ("{RANK}.json", 3)])
def test_equal_tracebacks_before_the_group_are_one(text: str, tracebacks: int, tmp_path: Path) -> None:
    done = run(tmp_path, *LAUNCH, "-n", "3", "train.py", text, script=EARLY)
    lines = done.stderr.splitlines()
    assert done.returncode == 1 and done.stderr.count("Traceback") == tracebacks, done.stderr
    same = [line for line in lines if "other ranks reported" in line]
    assert len(same) == (tracebacks == 1), done.stderr
    if same:
        assert re.fullmatch(r"ddpkit launch: 2 other ranks reported the same error as rank \d: ranks [\d,-]+", same[0])
    assert re.fullmatch(r"ddpkit launch: rank \d on \S+ failed: FileNotFoundError: \w+\.json", lines[-1]), done.stderr
    done = run(tmp_path, *LAUNCH, "-n", "2", "--output-dir", "out", "train.py", text, script=EARLY)
    assert all("Traceback" in (tmp_path / "out" / f"rank-{rank}.log").read_text() for rank in range(2))


def test_torchrun_with_a_watch_around_it(tmp_path: Path) -> None:
    done = run(tmp_path, *WATCH, *TORCHRUN, "train.py", "hang")
    assert done.returncode == 1 and re.search(f"^{HUNG}", done.stderr, re.MULTILINE), done.stderr


def test_a_pause_is_told_before_anything_ends(tmp_path: Path) -> None:
    script = PLAIN.replace("time.sleep(600)", "time.sleep(8)")
    words = [*LAUNCH, "-n", "2", "--hang-timeout", "60", "train.py", "hang"]
    done = run(tmp_path, *words, script=script, DDPKIT_NOTICE_AFTER="2")
    assert done.returncode == 0 and done.stderr.count("no progress for") == 1, done.stderr
    told = r"^no progress for \d+ s: rank 1 on \S+ .*did not enter collective 7, .* line 15, in main"
    assert re.search(told, done.stderr, re.MULTILINE), done.stderr


LEFT_ALONE = """
import os, sys, torch.distributed as td
assert ("watched" in sys.modules.get("sitecustomize").__doc__) is False, "the environment's own one runs"
td.init_process_group("gloo", init_method="tcp://127.0.0.1:" + str(29000 + os.getpid() % 1000), rank=0, world_size=1)
td.barrier()
td.destroy_process_group()
print("alone", os.environ["RANK"], "_ddpkit_watch" in sys.modules, flush=True)
"""


def test_other_groups_are_left_alone_and_the_own_sitecustomize_runs(tmp_path: Path) -> None:
    own = tmp_path / "site"
    own.mkdir()
    (own / "sitecustomize.py").write_text('"""Of the environment."""\n')
    done = run(tmp_path, *LAUNCH, "-n", "2", "train.py", script=LEFT_ALONE, PYTHONPATH=str(own))
    assert done.returncode == 0 and "watched" not in done.stderr, done.stderr
    assert sorted(done.stdout.split("\n"))[1:] == ["alone 0 False", "alone 1 False"]


CHILDREN = """
import json, os, subprocess, sys, time, torch, torch.distributed as td
from torch.utils.data import DataLoader

class Data(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, index): return os.environ["DDPKIT_WATCHED"].split()[0] == str(os.getpid())

if __name__ == "__main__":
    td.init_process_group("gloo")
    loader = DataLoader(Data(), num_workers=1, multiprocessing_context="spawn", batch_size=None)
    child = "import os, sys; print(os.environ['DDPKIT_WATCHED'].split()[0] == str(os.getpid()))"
    started = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout.strip()
    for number in range(2):  # more groups in the same process; with torch, a store at the same port is a race
        td.all_reduce(torch.ones(1))
        time.sleep(1)  # gloo resets connections of which the other rank still reads
        td.destroy_process_group()
        store = f"file://{os.getcwd()}/store{number}"
        td.init_process_group("gloo", init_method=store, rank=int(os.environ["RANK"]), world_size=2)
    time.sleep(1)
    td.destroy_process_group()
    print(json.dumps([list(map(bool, loader)), started]), flush=True)
"""


def test_only_the_rank_itself_is_watched_and_each_of_its_groups(tmp_path: Path) -> None:
    done = run(tmp_path, *LAUNCH, "-n", "2", "train.py", script=CHILDREN)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == 2 * [[[False] * 4, "False"]]
    assert done.stderr.count("are watched") == 3 and "not watched" not in done.stderr, done.stderr


GROUP_OF_CHILDREN = """
import os, torch, torch.distributed as td, torch.multiprocessing as mp

def work(local, port):
    td.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=local, world_size=2)
    td.all_reduce(torch.ones(1))
    td.destroy_process_group()

if __name__ == "__main__":
    port = 20000 + os.getpid() % 9000
    mp.start_processes(work, (port,), nprocs=2, start_method="METHOD")
"""


@pytest.mark.parametrize("method", ["spawn", *with_all("fork")])
def test_a_group_of_children_is_left_alone(method: str, tmp_path: Path) -> None:
    """Its ranks have the numbers of those of the launch, but are others."""
    script = GROUP_OF_CHILDREN.replace("METHOD", method)
    done = run(tmp_path, *LAUNCH, "-n", "1", "--hang-timeout", "60", "train.py", script=script)
    assert done.returncode == 0 and "are watched" not in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.count("--hang-timeout does not apply to it") == 1, done.stderr


@pytest.mark.parametrize("off", [("--no-watch",), ("--independent",), ()], ids=["option", "independent", "variable"])
def test_a_watch_can_be_switched_off(off: tuple[str, ...], tmp_path: Path) -> None:
    more = {} if off else {"DDPKIT_WITHOUT": "monitor"}
    script = "import os; print(os.environ.get('DDPKIT_WATCH'), os.environ.get('PYTHONPATH'))"
    done = run(tmp_path, *LAUNCH, *off, "train.py", script=script, PYTHONPATH="", **more)
    assert done.stdout.split() == ["None", "None"], done.stdout


# The kit in the ranks -----------------------------------------------------------------------------

SHOW = """
import importlib.util, sys
from ddpkit import __file__ as file, __version__ as version
import ddpkit.launchers
import ddpkit.tools.cli.arguments
sys.stdout.write(f"kit {version} {file} {importlib.util.find_spec('utils')}\\n")
"""


def launch_kit(folder: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Launch SHOW in an environment of its own, without ddpkit and with a stand-in for torch."""
    python = make_environment(folder / "env", torch=True)
    return run(folder, *LAUNCH, "--python", str(python), "-n", "2", *words, "train.py", script=SHOW,
               **{"PYTHONPATH": "", **more})


@pytest.mark.parametrize(("words", "reason"), [
    (("python", "-I", "train.py"), "python -I ignores PYTHONPATH"),
    (("python", "-BE", "train.py"), "python -E ignores PYTHONPATH"),
    (("python3", "-S", "train.py"), "python3 -S does not import sitecustomize"),
    (("/bin/true",), "true does not run in Python"),
    (("/bin/true", "train.py"), ""), (("train.py", "-I"), ""), (("python", "-u", "train.py", "-S"), "")])
@pytest.mark.parametrize("command", ["launch", "watch"])
def test_a_limit_that_nothing_counts_is_told(command: str, words: tuple[str, ...], reason: str, tmp_path: Path) -> None:
    """Once, not by each rank: a watch is started in front of each."""
    if command == "watch":
        words = ("python", *words) if words[0] == "train.py" else words
        of_rank = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}
        done = [run(tmp_path, *WATCH, *words, script="", RANK=str(rank), **of_rank) for rank in range(2)]
        told = done[0].stderr + done[1].stderr
    else:
        told = run(tmp_path, *LAUNCH, "-n", "2", "--hang-timeout", "6", *words, script="").stderr
    found = re.findall(r"nothing watches the ranks, and --hang-timeout does not apply: (.*?)\. Expected", told)
    assert found == ([reason] if reason else []), told


def test_ranks_without_ddpkit_import_that_of_the_launch_alone(tmp_path: Path) -> None:
    (tmp_path / "ddpkit" / "docs").mkdir(parents=True)  # a clone beside the script
    done = launch_kit(tmp_path)
    assert done.stdout.splitlines() == [f"kit {__version__} {ROOT}/utils/__init__.py None"] * 2, done
    assert "warning" not in done.stderr


def test_unwatched_ranks_without_ddpkit_are_told_the_command(tmp_path: Path) -> None:
    done = launch_kit(tmp_path, "--no-watch")
    assert done.stderr.splitlines()[-1].endswith(
        f"Install it there: {tmp_path}/env/bin/python -m pip install {shlex.quote(str(ROOT))}"), done


def test_unwatched_ranks_of_an_installed_kit_are_told_a_command_that_works(tmp_path: Path) -> None:
    installed = tmp_path / "the site" / "ddpkit"
    shutil.copytree(ROOT / "utils", installed, ignore=shutil.ignore_patterns("__pycache__"))
    python = make_environment(tmp_path / "env", torch=True)
    words = (sys.executable, str(installed), "launch", "--python", str(python), "-n", "2", "--no-watch", "train.py")
    done = run(tmp_path, *words, script=SHOW, PYTHONPATH="")
    command = done.stderr.splitlines()[-1].partition("Copy it there: ")[2]
    subprocess.run(command, shell=True, check=True)
    done = run(tmp_path, *words, script=SHOW, PYTHONPATH="")
    assert done.returncode == 0 and f"{tmp_path}/env/lib/" in done.stdout, done


@pytest.mark.parametrize("version", [__version__, "0.0.7"])
def test_ranks_with_another_version_of_ddpkit_are_one_warning(tmp_path: Path, version: str) -> None:
    own = tmp_path / "site" / "ddpkit"
    (own / "tools" / "cli").mkdir(parents=True)
    (own / "__init__.py").write_text(f'__version__ = "{version}"\n')
    for name in ("launchers.py", "tools/__init__.py", "tools/cli/__init__.py", "tools/cli/arguments.py"):
        (own / name).touch()
    done = launch_kit(tmp_path, PYTHONPATH=str(own.parent))
    assert done.stdout.splitlines() == [f"kit {version} {own}/__init__.py None"] * 2, done
    warning = (f"ddpkit: warning: the ranks import ddpkit 0.0.7 of {own}, and were started by ddpkit {__version__} of "
               f"{ROOT}/utils. Expected one version. ")
    assert done.stderr.count(warning) == (version != __version__), done.stderr
