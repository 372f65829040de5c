"""The index of staged packages: which changes it notices, and when it is read instead of all files."""
from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from utils.tools.staging.index import find_key
from utils.tools.staging.packages import Environment


def settle(folder: Path) -> None:
    """Let all files below a folder be older than the seconds in which an index is not written."""
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (time.time() - 60,) * 2, follow_symlinks=False)


@dataclass
class Packages:
    """A folder of packages, and the folder of its index."""

    folder: Path
    cache: Path

    def key(self, *, owner: int | None = None) -> str:
        """The key, where the files of this owner are trusted: by default, this user's."""
        environment = Environment("3.10", "3.10", str(self.folder.parent), "/usr/bin/python3", (str(self.folder),))
        return find_key(environment, [str(self.cache)], {os.geteuid() if owner is None else owner})

    @property
    def index(self) -> Path:
        index, = self.cache.glob("*.index")
        return index


@pytest.fixture
def packages(tmp_path: Path) -> Packages:
    folder = tmp_path / "site-packages"
    (folder / "heavy" / "inner").mkdir(parents=True)
    for name in ("__init__.py", "part.py", "part.so", "part.json", "other.py", "part.h"):
        (folder / "heavy" / name).write_text("")
    (folder / "link").symlink_to("heavy")
    (folder / "editable.pth").write_text("import os\n")
    settle(folder)
    return Packages(folder, tmp_path / "cache")


@pytest.mark.parametrize("change", ["module in place", "extension in place", ".pth in place", "data in place", "new",
                                    "removed", "renamed", "folder removed", "link"])
def test_a_change_is_noticed_without_a_walk_over_all_files(packages: Packages, change: str) -> None:
    heavy = packages.folder / "heavy"
    key, index = packages.key(), packages.index.stat().st_ino
    assert packages.key() == key and packages.index.stat().st_ino == index  # which a walk writes anew
    files = {"module": heavy / "part.py", "extension": heavy / "part.so", "data": heavy / "part.json",
             ".pth": packages.folder / "editable.pth"}
    if change.endswith("in place"):
        with files[change.split()[0]].open("a") as file:
            file.write("\n")
    elif change == "new":
        (heavy / "inner" / "new.py").write_text("")
    elif change == "removed":
        (heavy / "other.py").unlink()
    elif change == "renamed":
        (heavy / "other.py").rename(heavy / "part.py")
    elif change == "folder removed":
        (heavy / "inner").rmdir()
    else:
        (packages.folder / "link").unlink()
        (packages.folder / "link").symlink_to("torch")
    assert packages.key() != key


def test_a_header_edited_in_place_is_not_looked_at(packages: Packages) -> None:
    key = packages.key()
    (packages.folder / "heavy" / "part.h").write_text("edited")
    assert packages.key() == key
    packages.index.unlink()
    assert packages.key() != key


def test_a_file_that_is_younger_than_two_seconds_is_not_indexed(packages: Packages) -> None:
    """It may change again without another time, on a file system that counts in seconds."""
    (packages.folder / "heavy" / "part.py").touch()
    key = packages.key()
    assert not list(packages.cache.glob("*.index")) and packages.key() == key


@pytest.mark.parametrize("content", ["", "a b c", "key 0 9999", "torn"])
def test_a_damaged_index_is_written_again(packages: Packages, content: str) -> None:
    key, whole = packages.key(), packages.index.read_bytes()
    packages.index.write_bytes(whole[:-3] if content == "torn" else content.encode())
    assert packages.key() == key and packages.index.read_bytes() == whole


def test_an_index_of_another_user_is_not_used(packages: Packages) -> None:
    key = packages.key()
    packages.index.write_bytes(b"forged " + packages.index.read_bytes().partition(b" ")[2])
    assert packages.key() == "forged"
    assert packages.key(owner=os.geteuid() + 1) == key
