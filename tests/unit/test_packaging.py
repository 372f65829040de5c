"""The kit works where pip has installed it, and as a copy of utils/ in another project, under any name."""
from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
from collections import Counter
from pathlib import Path

import pytest

from tests.unit.programs import ROOT, python


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kit's wheel, installed. Built from a copy, because a build leaves files in the sources."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("utils", "jobs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-index"]
    for command in (["wheel", "--no-build-isolation", "--wheel-dir", out, source],
                    ["install", "--no-compile", "--target", out / "site", "--find-links", out, "ddpkit"]):
        done = subprocess.run([*pip, command[0], *offline, *command[1:]], capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stdout + done.stderr
    (out / "train.py").touch()
    return out / "site"


def test_installing_for_all_users_removes_no_other_installation(installed: Path, tmp_path: Path) -> None:
    """By the options of docs/centres.md, twice, in an environment that has the kit already."""
    page = (ROOT / "docs" / "centres.md").read_text()
    lines = [line for line in re.findall(r"pip install (.*?) \.(?:`|$)", page, re.MULTILINE) if "--no-deps" in line]
    assert len(lines) == 2
    venv.create(tmp_path / "module", symlinks=True)  # has no pip, as pip finds this environment by --python
    pip = [sys.executable, "-m", "pip", "--python", tmp_path / "module", "--quiet", "--disable-pip-version-check"]
    wheels = ["--no-index", "--find-links", installed.parent, "ddpkit"]
    options = [lines[1].replace("/apps", str(tmp_path)).split()] * 2
    for words in (["--no-deps"], *options):
        subprocess.run([*pip, "install", *words, *wheels], check=True, timeout=200)
    for folder in ("module", "ddpkit/0.1.0"):
        assert (tmp_path / folder / "bin" / "ddpkit").is_file(), folder
        assert [*(tmp_path / folder).glob("lib/python3*/site-packages/ddpkit/__init__.py")], folder


MODULES = next(Path("/usr/lib").glob("*/modulecmd.tcl"), None)  # Environment Modules, where the system has them


@pytest.mark.parametrize("kind", ["lua", "tcl"])
def test_module_file_for_all_users_puts_one_command_on_path(installed: Path, tmp_path: Path, kind: str) -> None:
    """By the lines of docs/centres.md. Where the system has no such modules, the lines for PATH are read."""
    page = (ROOT / "docs" / "centres.md").read_text().replace("/apps", str(tmp_path / "apps"))
    folder = tmp_path / "apps" / "ddpkit" / "0.1.0"
    venv.create(folder, symlinks=True)
    for name in ("pip", "pip3"):
        (folder / "bin" / name).write_text("")
    command = folder / "bin" / "ddpkit"
    command.write_text(f"#!{folder}/bin/python\n" + (installed / "bin" / "ddpkit").read_text().partition("\n")[2])
    command.chmod(0o755)
    made = [line for line in page.splitlines() if line.startswith(("mkdir ", "ln "))]
    subprocess.run(["bash", "-ec", "\n".join(made)], check=True)

    text, = re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL)
    file = tmp_path / "modules" / "ddpkit" / "0.1.0"
    file.parent.mkdir(parents=True)
    file.write_text(text.replace("prereq pytorch\n", ""))
    if kind == "tcl" and MODULES is not None:
        load = f'eval "$({MODULES} bash load ddpkit/0.1.0)"'
    else:
        folders = re.findall(r'prepend[_-]path\W+PATH\W+"?(/[^"\n]*?)"?\)?\n', text)
        assert len(folders) == 1
        load = f'PATH="{folders[0]}:$PATH"'
    words = "ddpkit --version; for name in ddpkit python3 pip; do type -P $name || echo none; done"
    env = {"PATH": "/usr/bin:/bin", "MODULEPATH": str(tmp_path / "modules"), "PYTHONPATH": str(installed)}
    before = {name: shutil.which(name, path=env["PATH"]) or "none" for name in ("python3", "pip")}
    done = subprocess.run(["bash", "-c", f"{load}\n{words}"], env=env, capture_output=True, text=True, timeout=60)
    version, *paths = done.stdout.splitlines()
    assert version.startswith("ddpkit 0."), done.stderr
    assert paths == [f"{folder}/command/ddpkit", before["python3"], before["pip"]]


def test_wheel_holds_every_file_of_utils_and_jobs(installed: Path) -> None:
    def files(folder: Path) -> set[Path]:
        return {path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"}

    jobs = {Path("jobs") / path for path in files(ROOT / "jobs") if path.suffix != ".md"}
    expected = files(ROOT / "utils") | jobs
    assert {Path("py.typed"), Path("jobs/sites/lumi.yaml")} <= expected
    assert files(installed / "ddpkit") == expected, "is a new folder missing in pyproject.toml?"
    assert {path.name for path in installed.iterdir() if path.suffix != ".dist-info"} == {"ddpkit", "bin"}


def run(installed: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder that is not the checkout, with the installed kit."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    env = {**kept, "PYTHONPATH": str(installed), "PYTHON": sys.executable}
    return subprocess.run(command, env=env, cwd=installed.parent, capture_output=True, text=True, timeout=200)


LAUNCH = "--ntasks-per-node 2 --dry-run train.py"


@pytest.mark.parametrize(("command", "status", "text"), [
    ("SITE/bin/ddpkit --version", 0, "ddpkit 0."),
    ("SITE/bin/ddpkit submit run --site lumi --account p --dry-run train.py", 0, "#SBATCH --account=p"),
    ("SITE/bin/ddpkit submit run --site lumi --account p --dry-run train.py", 0, "exec python3 SITE/ddpkit launch "),
    ("SITE/bin/ddpkit submit run --help", 0, "--dry-run"),
    ("SITE/bin/ddpkit sites list", 0, "lumi            LUMI-G (8 MI250X dies per node"),
    ("SITE/bin/ddpkit submit stats 1", 2, "Did you mean: ddpkit submit status 1"),
    (f"SITE/bin/ddpkit launch {LAUNCH}", 0, "PYTHON -u train.py"),
    (f"PYTHON -m ddpkit launch {LAUNCH}", 0, "PYTHON -u train.py"),
    (f"PYTHON SITE/ddpkit launch {LAUNCH}", 0, "PYTHON -u train.py"),
    ("PYTHON -m ddpkit.launchers", 0, "launcher          single"),
    ("SITE/bin/ddpkit --help", 0, "submit a training script"),
    ("SITE/bin/ddpkit lanch", 2, "Did you mean: ddpkit launch\n"),
    ("SITE/bin/ddpkit train.py 3", 2, "Did you mean: ddpkit launch train.py 3, or ddpkit submit run train.py 3\n"),
    ("SITE/bin/ddpkit status 12", 2, "Did you mean: ddpkit submit status 12\n"),
    ("SITE/bin/ddpkit doctor log", 2, "To read the output of a job: ddpkit doctor logs FILE\n"),
    ("SITE/bin/ddpkit", 2, "a command is missing")])
def test_installed_commands_work_and_explain_themselves(installed: Path, command: str, status: int, text: str) -> None:
    def in_place(words: str, python: str = sys.executable) -> str:
        return words.replace("SITE", str(installed)).replace("PYTHON", python)

    done = run(installed, *map(in_place, command.split()))
    shown = in_place(text, shlex.quote(sys.executable))
    assert done.returncode == status and shown in done.stdout + done.stderr, done.stderr


# All modules can be imported without the packages that only some functions need.
TRAIN = """
import importlib, os, pkgutil, sys
sys.modules.update(dict.fromkeys(["numpy", "yaml", "mpi4py", "submitit"]))

import pkg.mykit
from pkg.mykit import LaunchError, setup_distributed

for module in pkgutil.walk_packages(pkg.mykit.__path__, "pkg.mykit."):
    if os.environ["RANK"] == "0" and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
assert "utils" not in sys.modules

with setup_distributed("gloo", timeout=60) as job:
    mean = job.all_reduce_mean(job.rank)
    print(f"rank {job.rank} of {job.world_size} mean {mean}\\n", end="", flush=True)
"""


def test_copy_under_another_name_starts_two_ranks(tmp_path: Path) -> None:
    project = tmp_path / "my project"
    shutil.copytree(ROOT / "utils", project / "pkg" / "mykit", ignore=shutil.ignore_patterns("__pycache__"))
    (project / "train.py").write_text(TRAIN)
    done = python("train.py", ranks=2, cwd=project, env={"PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr
    assert all(f"rank {rank} of 2 mean 0.5\n" in done.stdout for rank in range(2))


# What a start reads: without the tools, and without what is needed only by a training, a job, GPUs or a hang.
START = """
import sys
from pathlib import Path

from ddpkit import setup_distributed

with setup_distributed("gloo") as job:
    loaded = {name.partition(".")[2]: module.__file__ for name, module in sys.modules.items() if "ddpkit" in name}
    if job.is_main:
        lines = sum(len(Path(file).read_text().splitlines()) for file in loaded.values())
        print(f"a start reads {len(loaded)} files, {lines} lines")
        print("loaded:", *loaded, "")
    job.all_reduce_mean(1)  # a rank that has left is looked at by the others: they load what that needs
"""


def test_a_start_loads_no_more_than_it_needs(tmp_path: Path) -> None:
    (tmp_path / "start.py").write_text(START)
    done = python(str(tmp_path / "start.py"), ranks=2)
    print(*(line for line in done.stdout.splitlines() if line.startswith("a start reads")))
    loaded = done.stdout.partition("loaded: ")[2].split()
    assert "startup.exchange" in loaded and "monitor.monitor" in loaded, done.stderr
    others = ("tools", "training", "checkpoint", "data", "metrics", "preemption", "job", "host.gpus", "monitor.hang",
              "monitor.inspection", "consistency")
    of_steps = {"job", "job.slurm_steps", "training_hooks"}
    assert not [name for name in loaded if name.startswith(others) and name not in of_steps]


# As an editable installation finds it: as ddpkit, in a folder of another name.
EDITABLE = f"""
import importlib.util, subprocess, sys
spec = importlib.util.spec_from_file_location("ddpkit", {str(ROOT / "utils" / "__init__.py")!r},
                                              submodule_search_locations=[{str(ROOT / "utils")!r}])
sys.modules["ddpkit"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
from ddpkit.tools.launch.bootstrap import module_command
command = module_command(sys.executable, "agent", [])
code = command[-1].replace("sys.exit(main(sys.argv[1:]))", "print(main)")
print(subprocess.run([*command[:-1], code], text=True, capture_output=True, check=True).stdout)
"""


def test_agents_start_in_an_editable_installation(tmp_path: Path) -> None:
    done = python("-c", EDITABLE, cwd=tmp_path, env={"PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr
    assert "<function main" in done.stdout


def test_no_file_imports_the_folder_by_its_name() -> None:
    """Not in a function either."""
    absolute = re.compile(r"^ *(from|import) (utils|scripts|jobs|examples|tests)\b", re.MULTILINE)
    assert not [file for file in (ROOT / "utils").rglob("*.py") if absolute.search(file.read_text())]


def test_the_name_of_a_class_is_that_of_one_class() -> None:
    names = [node.name for path in (ROOT / "utils").rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))
             if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    assert [name for name, count in Counter(names).items() if count > 1] == []


def test_git_ignores_venv_where_it_is_a_link_and_scripts_are_executable(tmp_path: Path) -> None:
    for script in (*ROOT.glob("scripts/*"), ROOT / "jobs" / "slurm.sh", ROOT / "jobs" / "pbs.sh"):
        if script.is_file() and script.read_bytes().startswith(b"#!"):
            assert os.access(script, os.X_OK), script
    shutil.copy(ROOT / ".gitignore", tmp_path)
    for name in (".venv", ".mpi"):
        (tmp_path / name).symlink_to("/nowhere")
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    ignored = subprocess.run(["git", "check-ignore", ".venv", ".mpi"], cwd=tmp_path, capture_output=True, text=True)
    assert ignored.stdout.split() == [".venv", ".mpi"]
