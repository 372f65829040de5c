"""What a copy of the packages finds: paths that lead out of them, and folders that Python does not search by itself."""
from __future__ import annotations

import importlib
import importlib.machinery
import os
import subprocess
from pathlib import Path

import pytest

from tests.launch.launchers import Lab
from tests.launch.shared_packages import Shared, assert_one_warning, make_shared
from tests.matrix import with_all
from utils.early_failure import find_unimported
from utils.tools.staging import Archive, StagingError, distribute
from utils.tools.staging.archive import get_archive
from utils.tools.staging.imports import check_imports
from utils.tools.staging.node_copy import prepare
from utils.tools.staging.packages import Environment, find_environment


@pytest.fixture
def shared(tmp_path: Path) -> Shared:
    return make_shared(tmp_path)


def make_copy(shared: Shared, environment: Environment | None = None, start: str = "1") -> Path:
    archive = get_archive(environment or find_environment(str(shared.python), []), lambda text: None)
    return Path(prepare(archive, "", [str(shared.disk)], start).path)


def printed(copy: Path, code: str) -> str:
    done = subprocess.run([copy / "bin" / "python", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def stage(shared: Shared, *also: str, **environ: str) -> str:
    """The lines that a launch prints."""
    notes: list[str] = []
    assert distribute.stage(str(shared.python), ["n1"], "n1", environ, spares=0, one_per_host=[],
                            stage_dir="" if environ else str(shared.disk), also=also, note=notes.append)
    return "\n".join(notes)


def test_torch_in_a_folder_that_is_not_staged_is_named(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    module = shared.folder / "module" / "site-packages"
    module.mkdir(parents=True)
    (shared.packages / "torch").rename(module / "torch")
    expected = f"torch is imported from {module}, which is not staged: add --stage-also {module}"
    (shared.packages / "shared.pth").write_text(f"{module}\n")
    assert expected in stage(shared)
    assert "not staged" not in stage(shared, str(module))
    (shared.packages / "shared.pth").unlink()
    monkeypatch.setenv("PYTHONPATH", str(module))
    assert expected in stage(shared)
    (shared.packages / "torch").symlink_to(module / "torch")
    monkeypatch.delenv("PYTHONPATH")
    assert f"is a link to {module}/torch/__init__.py, which is not staged" in stage(shared)


def test_a_folder_of_pth_through_a_link_is_staged_with_the_option(shared: Shared) -> None:
    (shared.folder / "home").symlink_to("source")
    (shared.packages / "editable.pth").write_text(f"{shared.folder}/home\n")
    copy = make_copy(shared, find_environment(str(shared.python), [str(shared.folder / "home")]))
    assert Path(printed(copy, "import editable; print(editable.__file__)")).is_relative_to(copy)


@pytest.mark.parametrize(("line", "is_staged"), [
    ("./../../../../aside", False), ("heavy/../../../../../aside", False), ("../../../../aside", False),
    ("{aside}", False), ("vendored", True), ("{packages}/vendored", True)])
def test_lines_of_pth_files_lead_to_the_same_files(shared: Shared, line: str, is_staged: bool) -> None:
    aside = shared.folder / "aside"
    folder = shared.packages / "vendored" if is_staged else aside
    folder.mkdir()
    (folder / "found.py").write_text("")
    (shared.packages / "more.pth").write_text(f"\n# a comment\n{line.format(aside=aside, packages=shared.packages)}\n")
    copy = make_copy(shared)
    found = Path(printed(copy, "import found; print(found.__file__)"))
    assert found.is_relative_to(copy if is_staged else aside)
    entries = printed(copy, "import sys; print(*sys.path)").split()
    assert [entry for entry in entries if Path(entry).is_relative_to(shared.packages)] == []


def test_what_is_added_beside_the_packages_later_is_found(shared: Shared) -> None:
    env = shared.folder / "env"
    copy = make_copy(shared)
    for name in ("nltk_data", "bin/tool", "lib/data"):
        (env / name).mkdir()
        (env / name / "file").write_text("")
    assert make_copy(shared, start="2") == copy
    assert all((copy / name / "file").exists() for name in ("nltk_data", "bin/tool", "lib/data"))
    inode = copy.stat().st_ino
    assert make_copy(shared, start="3").stat().st_ino == inode
    (copy / "pyvenv.cfg").unlink()
    assert make_copy(shared, start="4").stat().st_ino != inode


@pytest.mark.parametrize("name", ["packages", "also", "caches"])
def test_a_folder_of_the_environment_has_any_name(shared: Shared, name: str) -> None:
    (shared.folder / "env" / name).mkdir()
    (shared.folder / "env" / name / "file").write_text("")
    assert (make_copy(shared) / name / "file").exists()


def test_lib64_of_its_own_has_the_libraries(shared: Shared) -> None:
    lib64 = shared.folder / "env" / "lib64"
    lib64.unlink(missing_ok=True)
    lib64.mkdir()
    (lib64 / "libx.so").write_text("")
    assert (make_copy(shared) / "lib64" / "libx.so").exists()


@pytest.mark.parametrize("is_on", [True, False])
def test_usercustomize_runs_where_it_did(shared: Shared, is_on: bool) -> None:
    """In conda's environments, unlike in a venv."""
    (shared.packages / "usercustomize.py").write_text("import sys; sys.is_customized = True\n")
    environment = find_environment(str(shared.python), [])._replace(has_user_site=is_on)
    assert printed(make_copy(shared, environment), "import sys; print(hasattr(sys, 'is_customized'))") == str(is_on)


@pytest.mark.parametrize(("name", "variable", "is_said"), [
    ("pbs.12.head", "12.head", True), ("pbs.12.head", "123.head", False), ("tmp", "12.head", False),
    ("pbs.12.head", "", False)])
def test_a_folder_that_ends_with_the_job_is_named(shared: Shared, name: str, variable: str, is_said: bool) -> None:
    folder = shared.disk / name
    folder.mkdir()
    said = stage(shared, TMPDIR=str(folder), PBS_JOBID=variable)
    assert (f"$TMPDIR, {folder}, is removed with the job" in said) == is_said, said


def test_the_folder_of_a_job_with_a_kept_copy_is_not_named(shared: Shared) -> None:
    folder = shared.disk / "pbs.12.head"
    folder.mkdir()
    archive: Archive = get_archive(find_environment(str(shared.python), []), lambda text: None)
    prepare(archive, "", [str(folder)], "1")
    assert "removed with the job" not in stage(shared, TMPDIR=str(folder), PBS_JOBID="12.head")


# What the script imports ----------------------------------------------------------------------------------------------

IMPORTS = """\
import json, heavy as also_heavy
from os import path
import torch.distributed, missing
from editable import (
    name)
if json:
    import optional
"""


def check(shared: Shared, copy: Path, script: str = IMPORTS, words: tuple[str, ...] = ()) -> list[str]:
    """Check a script, and return what has been imported from the copy by then."""
    (shared.folder / "train.py").write_text(script)
    environ = {**os.environ, "TRACE": str(shared.folder / "trace")}
    words = words or ("python", str(shared.folder / "train.py"))
    check_imports(str(copy), words, str(shared.python), environ, environ)
    trace = shared.folder / "trace"
    return trace.read_text().split() if trace.exists() else []


def test_packages_of_a_script_are_imported_once_from_a_copy(shared: Shared) -> None:
    for name in ("heavy", "torch", "optional"):
        (shared.packages / name).mkdir(exist_ok=True)
        (shared.packages / name / "__init__.py").write_text(
            f"import os\nwith open(os.environ['TRACE'], 'a') as file:\n    file.write('{name} ')\n")
    copy = make_copy(shared)
    assert check(shared, copy) == ["heavy", "torch"]
    assert check(shared, copy) == ["heavy", "torch"]
    assert check(shared, copy, f"{IMPORTS}\nimport optional\n") == ["heavy", "torch", "optional"]
    assert make_copy(shared, start="2") == copy, "it is complete"


def test_a_module_is_a_script_too(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    (shared.packages / "heavy" / "__init__.py").write_text("import os\nopen(os.environ['TRACE'], 'w').write('heavy')\n")
    (shared.folder / "package").mkdir()
    (shared.folder / "package" / "train.py").write_text("import heavy\n")
    monkeypatch.chdir(shared.folder)
    assert check(shared, make_copy(shared), words=("python", "-m", "package.train", "--lr", "1")) == ["heavy"]


@pytest.mark.parametrize("ends", ["raise ImportError('libx.so: cannot open')", "import os; os.kill(os.getpid(), 11)"])
def test_a_package_that_a_copy_cannot_load(shared: Shared, ends: str) -> None:
    (shared.packages / "heavy" / "__init__.py").write_text(
        f"if not __file__.startswith({str(shared.packages)!r}):\n    {ends}\nVERSION = 1\n")
    copy = make_copy(shared)
    with pytest.raises(StagingError, match=r"heavy can be imported only from where it is installed: "
                                           r"(ImportError: libx.so|exit status -11)"):
        check(shared, copy)
    ranks, output = shared.launch()
    assert shared.uses_shared(ranks)
    assert_one_warning(output, "heavy can be imported only from where it is installed")


ONLY_WHERE_INSTALLED = """\
if not __file__.startswith({packages!r}):
    {ends}
VERSION = 1
"""
LATER = """\
import os, sys
def main():
    import heavy
    sys.stdout.write(f"from {heavy.__file__} {os.environ.get('DDPKIT_RESTART')}\\n")
    sys.stdout.flush()
    sys.exit(int(sys.argv[1]))
main()
"""


def program_that_needs(shared: Shared, ends: str) -> str:
    """A program that imports heavy later than its copy is checked; that ends so, but where it is installed."""
    text = ONLY_WHERE_INSTALLED.format(packages=str(shared.packages), ends=ends)
    (shared.packages / "heavy" / "__init__.py").write_text(text)
    program = shared.folder / "later.py"
    program.write_text(LATER)
    return str(program)


def start_with(shared: Shared, ends: str, *options: str, status: int = 0) -> str:
    """The output of two ranks of this program."""
    words = shared.words("-n", "2", *options, program=(program_that_needs(shared, ends), str(status)))
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
    assert done.returncode == status, done.stdout
    return done.stdout


@pytest.mark.parametrize("ends", ["raise ImportError('libx.so: cannot open')", "import ctypes; ctypes.CDLL('libx.so')"])
def test_ranks_start_from_the_shared_packages_where_an_import_fails(shared: Shared, ends: str) -> None:
    output = start_with(shared, ends)
    assert_one_warning(output, "heavy cannot be imported from the copy on ")
    assert f"; the copy is {shared.copies[0]}). The ranks start again with the shared packages." in output, output
    assert output.count(f"from {shared.packages}") == 2 and "rank 0 on" not in output, output


def test_a_start_from_the_shared_packages_is_no_restart(shared: Shared) -> None:
    """And the restart, after another failure, does not try the copy again."""
    output = start_with(shared, "raise ImportError('libx.so')", "--max-restarts", "1", status=5)
    assert_one_warning(output, "heavy cannot be imported from the copy on ")
    assert output.count(f"from {shared.packages}") == 4 and output.count('"number": 0') == 2, output
    assert output.count("restart 1 on the same hosts; 0 more allowed") == 1, output


@pytest.mark.parametrize("by", ["ssh", *with_all("system-mpich")])
def test_hosts_start_from_the_shared_packages_where_an_import_fails(lab: Lab, shared: Shared, by: str) -> None:
    nodes = shared.folder / "nodes"
    nodes.write_text("h1\nh2\n")
    env = {"PATH": f"{lab.ssh.parent}:/usr/bin:/bin", "PBS_JOBID": "1.lab", "PBS_NODEFILE": str(nodes)}
    program = program_that_needs(shared, "raise ImportError('libx.so')")
    launcher = "ssh" if by == "ssh" else str(lab.need(by))
    words = ["env", "-C", str(shared.folder), *shared.words("--launcher", launcher, program=(program, "0"))]
    done = lab.run("h1", words, env=env)
    assert done.status == 0 and done.output.count(f"from {shared.packages}") == 2, done.output
    assert_one_warning(done.output, "heavy cannot be imported from the copy on h")


@pytest.mark.parametrize(("error", "module"), [
    ("ImportError('libx.so')", "needs_place.part"), ("OSError('libx.so: cannot open')", "needs_place.part"),
    ("ValueError('not of an import')", None)])
def test_only_an_import_from_the_copy_is_its_fault(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str, module: str | None) -> None:
    (tmp_path / "needs_place").mkdir()
    (tmp_path / "needs_place" / "__init__.py").write_text("from . import part\n")
    (tmp_path / "needs_place" / "part.py").write_text(f"raise {error}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(Exception, match="libx.so|not of") as raised:
        importlib.import_module("needs_place")
    found = find_unimported(raised.value, str(tmp_path))
    assert (found.module if found else None) == module
    assert not find_unimported(raised.value, f"{tmp_path}/other") and not find_unimported(raised.value, "")


@pytest.mark.parametrize(("name", "is_found"), [
    (f"extension{importlib.machinery.EXTENSION_SUFFIXES[0]}", True), ("__init__.py", False)])
def test_an_extension_of_a_copy_is_found_without_a_traceback(name: str, is_found: bool) -> None:
    """Of "cannot import name", too, the error has a path; but that is a mistake of the script."""
    error = ImportError("libx.so", name="extension", path=f"/tmp/copy/lib/{name}")
    found = find_unimported(error, "/tmp/copy")
    assert (found.module if found else None) == ("extension" if is_found else None)


def test_a_package_that_cannot_be_loaded_at_all_is_not_the_fault_of_a_copy(shared: Shared) -> None:
    (shared.packages / "heavy" / "__init__.py").write_text("raise ImportError\n")
    check(shared, make_copy(shared))
