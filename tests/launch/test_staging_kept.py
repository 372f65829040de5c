"""Copies and archives that launches keep: their locks, and what is removed."""
from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from utils.tools.staging import room
from utils.tools.staging.kept import locked


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
