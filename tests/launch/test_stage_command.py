"""ddpkit stage: one archive for all users of an environment, the list of what is kept, and its removal."""
from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor  # the child of as_user() may not read its file
from pathlib import Path

import pytest

from tests.launch.launchers import ROOT
from tests.launch.shared_packages import Shared, make_shared
from tests.launch.users import VICTIM, Machine, machine
from utils.tools.staging import IN_MEMORY
from utils.tools.staging.archive import get_archive
from utils.tools.staging.node_copy import prepare, remove_from_memory
from utils.tools.staging.packages import Environment, find_environment

__all__ = ["ThreadPoolExecutor", "machine"]
USER = 61235  # an ordinary user


def settle(folder: Path, hours: float = 1) -> None:
    """Let all files below a folder be so old."""
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (time.time() - 3600 * hours,) * 2, follow_symlinks=False)


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shared:
    """An environment whose files are old. Caches and temporary folders are the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "disk"))
    made = make_shared(tmp_path)
    settle(tmp_path / "env")
    return made


def stage(shared: Shared, *words: str, status: int = 0, **variables: str) -> str:
    """Run ddpkit stage; what it prints."""
    done = subprocess.run([sys.executable, ROOT / "utils", "stage", *words, "--python", str(shared.python)], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120,
                          env={**os.environ, **variables})
    assert done.returncode == status, done.stdout
    return done.stdout


def lines_of(output: str, path: Path) -> list[str]:
    """The lines about what lies in a folder of the test."""
    return [line for line in output.splitlines() if str(path) in line]


def archives(shared: Shared) -> list[Path]:
    return sorted((shared.folder / "env" / ".ddpkit-stage").glob("*.tar"))


def as_user(function: Callable[[], str]) -> str:
    """What a function returns that an ordinary user calls."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(USER)
            os.setuid(USER)
            text = function()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with open(reading) as pipe:
        return pipe.read()


def test_archive_that_root_has_packed_is_that_of_all_users(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = make_shared(machine.make("shared", VICTIM))
    settle(shared.folder / "env")
    home = machine.make("user", USER, 0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    environment = find_environment(str(shared.python), [])

    def launch() -> str:
        lines: list[str] = []
        path = get_archive(environment, lines.append).path
        return "\n".join([path, *lines, *map(str, home.rglob("*"))])

    own = as_user(launch).splitlines()
    assert own[0].startswith(str(home)) and "packed" in own[2]
    for path in home.iterdir():
        shutil.rmtree(path)
    stage(shared, "pack", HOME=str(machine.home))
    packed, = archives(shared)
    assert (packed.stat().st_uid, oct(packed.stat().st_mode & 0o777)) == (0, "0o644")
    assert as_user(launch) == str(packed), "it packs nothing, and root's index saves the walk over all files"

    os.chown(packed, USER + 1, USER + 1)
    assert as_user(launch).startswith(str(home)), "another user may have changed it"


def test_archive_fits_whatever_name_its_python_was_started_by(shared: Shared) -> None:
    base = find_environment(str(shared.python), []).base
    (shared.folder / "bin").mkdir()
    for name in ("python", "python3"):
        (shared.folder / "bin" / name).symlink_to(base)
    lines: list[str] = []
    environment = find_environment(str(shared.python), [])
    for name in ("python", "python3"):
        get_archive(environment._replace(base=str(shared.folder / "bin" / name)), lines.append)
    assert sum("packed" in line for line in lines) == 1, lines


def test_packages_of_the_user_who_packs_are_left_out(shared: Shared) -> None:
    """A Python that is no venv has them, in ~/.local."""
    config = shared.folder / "env" / "pyvenv.cfg"
    config.write_text(config.read_text().replace("packages = false", "packages = true"))
    words = [str(shared.python), "-c", "import site; print(site.getusersitepackages())"]
    own = {"PYTHONUSERBASE": str(shared.folder / "local")}
    folder = subprocess.run(words, env={**os.environ, **own}, text=True, capture_output=True, check=True).stdout.strip()
    Path(folder).mkdir(parents=True)
    seen = subprocess.run([str(shared.python), "-c", "import sys; print(sys.path)"], env={**os.environ, **own},
                          text=True, capture_output=True, check=True).stdout
    assert folder in seen
    os.environ.update(own)
    try:
        assert folder in find_environment(str(shared.python), []).folders
        found = find_environment(str(shared.python), [], for_all=True)
    finally:
        del os.environ["PYTHONUSERBASE"]
    assert found.folders and folder not in found.folders and found.has_user_site


def test_archive_for_all_stays_while_it_fits(shared: Shared) -> None:
    """Launches of other users leave no trace in it, so that its age says nothing."""
    stage(shared, "pack")
    packed, = archives(shared)
    settle(packed.parent, hours=100)
    assert "packed" in stage(shared, "pack", "--stage-also", str(shared.folder / "source"))
    assert packed in archives(shared) and len(archives(shared)) == 2

    (shared.packages / "heavy" / "__init__.py").write_text("VERSION = 2\n")
    settle(packed.parent, hours=100)
    stage(shared, "pack")
    assert packed not in archives(shared) and len(archives(shared)) == 1


def test_archive_of_launches_becomes_one_for_all(shared: Shared) -> None:
    get_archive(find_environment(str(shared.python), []), lambda text: None)
    assert "packed" not in stage(shared, "pack")
    packed, = archives(shared)
    assert "for all users" in lines_of(stage(shared, "list"), packed)[0]


def test_pack_where_no_other_user_would_look_is_an_error(shared: Shared) -> None:
    (shared.folder / "env" / ".ddpkit-stage").write_text("")
    output = stage(shared, "pack", status=1)
    assert "env/.ddpkit-stage cannot hold the archive" in output and "as its owner, or as root" in output
    with pytest.raises(Exception, match="belongs to the system, and holds no archives"):
        get_archive(Environment("3", "3", "/usr", "/usr/bin/python3", (str(shared.packages),)), print, for_all=True)


def test_list_names_size_owner_age_and_purpose(shared: Shared) -> None:
    (shared.packages / "heavy" / "data").write_bytes(bytes(5 << 20))
    shared.launch()
    packed, = archives(shared)
    os.utime(packed, (time.time() - 7200,) * 2)
    output = stage(shared, "list")
    archive, = lines_of(output, packed)
    assert archive.split()[:6] == ["archive", "5", "MB", "root", "2.0", "h"] and f"of {shared.folder}/env " in archive
    copy, = lines_of(output, shared.copies[0])
    assert copy.split()[:6] == ["copy", "5", "MB", "root", "0.0", "h"] and f"of {shared.folder}/env  " in copy

    (shared.packages / "heavy" / "__init__.py").write_text("VERSION = 2\n")
    assert "env, which has changed since  " in lines_of(stage(shared, "list"), packed)[0]


def test_clean_removes_what_is_unused_and_says_so(shared: Shared) -> None:
    stage(shared, "pack")
    shared.launch()
    packed, = archives(shared)
    copy, = shared.copies
    with (shared.root / f"{copy.name}.used").open() as used:
        fcntl.flock(used, fcntl.LOCK_SH)  # as a rank
        assert ", in use  " in lines_of(stage(shared, "list"), copy)[0]
        assert lines_of(stage(shared, "clean"), shared.folder) == [f"kept {copy}: a rank uses it"]
    assert copy.is_dir() and archives(shared) == [packed]

    line, = lines_of(stage(shared, "clean"), shared.folder)
    assert line.startswith(f"removed {copy}, ") and line.endswith(f" MB: a copy of {shared.folder}/env")
    assert not shared.copies and archives(shared) == [packed], "which fits"

    (shared.packages / "heavy" / "__init__.py").write_text("VERSION = 2\n")
    line, = lines_of(stage(shared, "clean"), shared.folder)
    assert line == f"kept {packed}: a launch has used it within the last hour"
    settle(packed.parent, hours=2)
    line, = lines_of(stage(shared, "clean"), shared.folder)
    assert line.startswith(f"removed {packed}, ") and "env has changed since" in line
    assert not archives(shared) and not list(packed.parent.glob("*.json"))


def test_an_archive_that_cannot_be_removed_is_told(shared: Shared) -> None:
    stage(shared, "pack")
    packed, = archives(shared)
    (shared.packages / "heavy" / "__init__.py").write_text("VERSION = 2\n")
    lock = packed.with_suffix(".lock")
    settle(packed.parent, hours=2)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert lines_of(stage(shared, "clean"), packed) == [f"kept {packed}: a launch packs it"]
    lock.unlink()
    lock.mkdir()
    settle(packed.parent, hours=2)
    line, = lines_of(stage(shared, "clean", status=1), packed.parent)
    assert line == f"{lock}: Is a directory. Its archive is kept" and packed.exists()


def test_clean_removes_no_archive_of_another_user(machine: Machine) -> None:
    shared = make_shared(machine.make("shared", VICTIM))
    environ = {"HOME": str(machine.home), "XDG_CACHE_HOME": str(machine.home)}
    stage(shared, "pack", **environ)
    os.chown(shared.folder / "env", USER, USER)
    packed, = archives(shared)
    for path in (packed, packed.with_suffix(".json")):
        os.chown(path, USER, USER)
    (shared.packages / "heavy" / "__init__.py").write_text("VERSION = 2\n")
    settle(packed.parent, hours=2)
    assert not lines_of(stage(shared, "clean", **environ), packed) and packed.exists()
    os.chown(packed, VICTIM, VICTIM)
    assert lines_of(stage(shared, "clean", **environ), packed) and not packed.exists()


def test_copies_of_another_user_are_not_removed(machine: Machine) -> None:
    shared = make_shared(machine.make("shared", VICTIM))
    shared.disk = machine.make("stage", VICTIM, 0o1777)
    other = machine.make(f"stage/ddpkit-stage-{USER}", USER, 0o700)
    machine.make(f"stage/ddpkit-stage-{USER}/key", USER)
    planted = machine.make(f"stage/ddpkit-stage-{VICTIM}", USER, 0o777)
    (planted / "key").mkdir()
    environ = {"HOME": str(machine.home), "TMPDIR": str(shared.disk)}
    output = stage(shared, "clean", status=1, **environ)
    assert f"{shared.disk}: {planted} belongs to another user, or is no folder" in output
    assert (other / "key").is_dir() and (planted / "key").is_dir()


# Copies in memory ---------------------------------------------------------------------------------

@pytest.fixture
def memory(shared: Shared) -> Iterator[Path]:
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(shared.disk)], check=True)
    yield shared.disk
    subprocess.run(["umount", "-l", str(shared.disk)], check=True)


def launch(shared: Shared) -> list[dict[str, str]]:
    """Start two ranks with --stage, and no folder for the copy; what each has printed."""
    words = [word for word in shared.words("-n", "2", "--independent", "--stage")
             if word not in ("--stage-dir", str(shared.disk))]
    done = subprocess.run(words, text=True, timeout=120, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout
    return shared.ranks(done.stdout)


@pytest.mark.usefixtures("memory")
def test_copy_in_memory_goes_with_the_launch(shared: Shared) -> None:
    assert shared.uses_copy(launch(shared)) and not list(shared.root.iterdir())
    assert shared.uses_copy(shared.launch()[0]) and shared.copies, "a named folder keeps it"


def test_copy_on_a_disk_stays(shared: Shared) -> None:
    assert shared.uses_copy(launch(shared)) and shared.copies


def test_copy_in_memory_that_another_launch_uses_stays(shared: Shared, memory: Path) -> None:
    archive = get_archive(find_environment(str(shared.python), []), lambda text: None)
    copy = Path(prepare(archive, "", [str(memory)], "1").path)  # this process uses it from now on
    launch(shared)
    assert copy.is_dir()
    remove_from_memory({IN_MEMORY: "1", "TMPDIR": str(memory)})
    assert copy.is_dir()
