"""Copies and archives that launches keep: their locks, and what is removed."""
from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.shared_packages import Shared, make_shared
from utils.tools.staging import Archive, StagingError, distribute, room
from utils.tools.staging.archive import get_archive
from utils.tools.staging.kept import locked
from utils.tools.staging.node_copy import prepare
from utils.tools.staging.packages import find_environment


@pytest.fixture
def shared(tmp_path: Path) -> Shared:
    return make_shared(tmp_path)


def make_copy(shared: Shared, start: str = "1") -> tuple[Archive, Path]:
    archive = get_archive(find_environment(str(shared.python), []), lambda text: None)
    return archive, Path(prepare(archive, "", [str(shared.disk)], start).path)


@pytest.fixture
def preempted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which, once a process has opened KEY.lock and before it locks it, KEY is made under a new lock."""
    lock, real_open = tmp_path / "KEY.lock", os.open

    def open_and_wait(path: str, *rest: int, **names: int) -> int:
        descriptor = real_open(path, *rest, **names)
        if str(path) == str(lock) and not (tmp_path / "KEY").exists():
            lock.unlink()  # the process that has removed the copy before ends
            fcntl.flock(real_open(lock, os.O_RDWR | os.O_CREAT), fcntl.LOCK_EX)
            (tmp_path / "KEY").mkdir()
            (tmp_path / "KEY-half").mkdir(exist_ok=True)
        return descriptor

    monkeypatch.setattr(os, "open", open_and_wait)
    return tmp_path


def test_a_copy_made_under_a_new_lock_file_is_not_removed(preempted: Path) -> None:
    (preempted / "KEY-half").mkdir()
    room.remove_old(str(preempted), "own")
    assert (preempted / "KEY").is_dir() and (preempted / "KEY-half").is_dir()


def test_a_lock_of_a_removed_file_is_none(preempted: Path) -> None:
    with pytest.raises(BlockingIOError), locked(str(preempted), "KEY", wait=False):
        pass


@pytest.mark.parametrize(("hosts", "is_sent"), [
    (["n1", "n2"], False), (["n1.pbs.lab", "n2.pbs.lab"], False), (["N2", "N1"], False), (["n3", "n2"], True)])
def test_the_archive_is_not_sent_where_this_host_has_a_copy(shared: Shared, hosts: list[str], is_sent: bool) -> None:
    (shared.packages / "mpi4py.py").write_text("")
    make_copy(shared)
    flag = shared.folder / "sent"
    assert distribute.stage(str(shared.python), hosts, "n1", {}, spares=0, one_per_host=["sh", "-c", f"touch {flag}"],
                            stage_dir=str(shared.disk), also=[], note=lambda text: None)
    assert flag.exists() == is_sent


@pytest.mark.parametrize("lost", ["bin", "bin/python", "bin/python3", "bin/activate", "pyvenv.cfg", "share", "lib64",
                                  ".ddpkit-complete"])
def test_a_copy_that_a_cleaner_has_thinned_is_made_again(shared: Shared, lost: str) -> None:
    (shared.folder / "env" / "share").mkdir()
    _, copy = make_copy(shared)
    (copy / "ddpkit-caches").mkdir()
    inode = copy.stat().st_ino
    assert make_copy(shared, "2")[1].stat().st_ino == inode
    if lost == "bin":
        shutil.rmtree(copy / lost)
    else:
        (copy / lost).unlink()
    assert make_copy(shared, "3")[1].stat().st_ino != inode and os.path.lexists(copy / lost)


@pytest.fixture
def noexec(shared: Shared) -> Iterator[Path]:
    folder = shared.folder / "noexec"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "noexec", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_folder_that_is_mounted_noexec_holds_no_copy(shared: Shared, noexec: Path) -> None:
    """The interpreter is a link out of it, and starts; libraries of packages cannot be loaded."""
    archive, copy = make_copy(shared)
    assert Path(prepare(archive, "", [str(noexec), str(shared.disk)], "2").path) == copy
    with pytest.raises(StagingError, match="mounted noexec"):
        prepare(archive, "", [str(noexec)], "3")
