"""The storage check of doctor: real folders of several "hosts", in turns, and what is concluded of them."""
from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.unit.doctor_findings import conclude, exchanged, only, places, problems
from utils.tools.doctor.check import Level, Ranks
from utils.tools.doctor.checks.shared_storage import Folder, StorageCheck, StorageFacts
from utils.tools.doctor.checks.torch_import import ImportFacts, TorchImportCheck

GIB = 1 << 30


def collected(checks: Sequence[StorageCheck], during: Callable[[], None] = lambda: None) -> list[StorageFacts]:
    """Collect on as many hosts as there are checks. during: called at each exchange."""
    everyone = tuple(places(*(f"h{number}" for number in range(1, len(checks) + 1))))

    def values(sent: list[Any]) -> list[Any]:
        during()
        return sent

    return exchanged([check.collect(Ranks(me, everyone)) for check, me in zip(checks, everyone, strict=True)], values)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "shared").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_hosts_write_and_read_and_leave_nothing_behind(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    written: list[str] = []
    facts = collected([StorageCheck("shared") for _ in range(3)],
                      lambda: written.extend(map(str, folder.glob("*/.doctor-*/*/mark"))))
    assert len(set(written)) == 6
    assert sorted(folder.rglob("*")) == before
    assert [one["purpose"] for one in facts[0].folders] == ["checkpoints", "temporary"]
    assert [one.folders[0]["shared"] for one in facts] == [True] * 3
    assert all(one["seconds"] is not None and not one["problem"] for host in facts for one in host.folders)
    free = facts[0].folders[0]["free_bytes"] or 0
    assert free == pytest.approx(os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize, rel=0.1)


def test_folder_that_is_not_shared_or_missing_is_named(folder: Path) -> None:
    (folder / "own").mkdir()
    checks = [StorageCheck(name) for name in ("shared", "shared", "own", "missing")]
    findings = problems(StorageCheck(), collected(checks))
    assert [(one.level, one.hosts, one.exclude) for one in findings] == [
        (Level.BAD, ("h4",), True), (Level.WARNING, ("h3",), False)]
    assert "h4 cannot write in the checkpoint folder" in findings[0].message
    assert "No such file or directory; 3 other hosts can" in findings[0].message
    assert "h3 does not see files that h1 has written" in findings[1].message
    assert not list(folder.rglob(".doctor-*"))


def test_checkpoint_folder_may_be_made_later(folder: Path) -> None:
    facts = collected([StorageCheck("shared/run-7/weights") for _ in range(2)])
    assert [one.folders[0]["path"] for one in facts] == [str(folder / "shared")] * 2
    assert not problems(StorageCheck(), facts)
    assert not list((folder / "shared").iterdir())


def test_lack_of_inodes_is_told_from_a_full_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    space = os.statvfs(folder)
    monkeypatch.setattr(os, "mkdir", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result([*space[:7], 0, *space[8:]]))  # f_favail
    found = problems(StorageCheck(), collected([StorageCheck("shared")]))[0]
    assert found.level is Level.BAD and "No space left on device, because all inodes are in use" in found.message


def test_quota_is_told_from_a_full_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a project, Lustre and XFS report it as "No space left"."""
    monkeypatch.setattr(os, "mkdir", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    space = os.statvfs(folder)
    for blocks, words in ((1 << 24, "blocks are free: a quota of the user, group or project"), (0, "")):
        changed = [*space[:4], blocks, 10**6, 10**6, 10**6, *space[8:]]
        monkeypatch.setattr(os, "statvfs", lambda path, changed=changed: os.statvfs_result(changed))
        found = problems(StorageCheck(), collected([StorageCheck("shared")]))[0]
        assert "No space left on device" in found.message and (words in found.message)
        assert ("blocks are free" in found.message) == bool(words) and "lfs quota" in found.remedy


# What is concluded ------------------------------------------------------------------------------------------------

def one(purpose: str = "checkpoints", **values: Any) -> Folder:
    code = values.get("code", 0)
    problem = os.strerror(code) if code else ""
    return {"purpose": purpose, "path": "/scratch", "problem": problem, "code": 0, "seconds": None if code else 0.02,
            "free_bytes": 100 * GIB, "free_files": 10**6, "file_system": "nfs4", "shared": None if code else True,
            **values}  # type: ignore[typeddict-item]


FULL, READ_ONLY = {"code": errno.ENOSPC}, {"code": errno.EROFS}


@pytest.mark.parametrize(("hosts", "level", "named", "exclude"), [
    ([one(), one(**READ_ONLY), one()], Level.BAD, ("h2",), True),
    ([one(**READ_ONLY)] * 3, Level.BAD, ("h1", "h2", "h3"), False),
    ([one("working", **READ_ONLY)] * 3, None, (), False),
    ([one("working", **READ_ONLY), one("working")], Level.BAD, ("h1",), True),
    ([one(), one(), one(**FULL)], Level.BAD, ("h3",), False),  # the space of a shared file system
    ([one("temporary", file_system="ext4"), one("temporary", file_system="ext4", **FULL)], Level.BAD, ("h2",), True),
    ([one("temporary", file_system="ext4", **FULL)], Level.BAD, ("h1",), True),  # a job of one host
    ([one("temporary", file_system="ext4", **READ_ONLY)], Level.BAD, ("h1",), True),
    ([one("temporary", file_system="ext4", code=errno.EACCES)], Level.BAD, ("h1",), False),
    ([one("temporary", **FULL)], Level.BAD, ("h1",), False),
    ([one("temporary", file_system="ext4", **FULL)] * 2, Level.BAD, ("h1", "h2"), False),
    ([one("temporary", code=errno.ENOENT), one("temporary")], Level.WARNING, ("h1",), False),
    ([one(code=errno.EDQUOT)] * 2, Level.BAD, ("h1", "h2"), False),
    ([one(free_bytes=GIB), one(free_bytes=GIB)], Level.WARNING, ("h1", "h2"), False),
    ([one("temporary", free_bytes=GIB), one("temporary", free_bytes=1000)], Level.WARNING, ("h2",), False),
    ([one(), one(free_files=10, free_bytes=99 * GIB)], Level.WARNING, ("h2",), False),
    ([one(free_files=None)], None, (), False),  # a file system without a table of inodes
    ([one(shared=False), one(shared=False)], None, (), False),  # the first host's facts are missing
])
def test_conclusion(hosts: list[Folder], level: Level | None, named: tuple[str, ...], exclude: bool) -> None:
    found = problems(StorageCheck(), [StorageFacts([host]) for host in hosts])
    assert [(one.level, one.hosts, one.exclude) for one in found] == ([(level, named, exclude)] if level else [])
    assert all(one.remedy for one in found)


@pytest.mark.parametrize(("seconds", "named", "level"), [
    ([0.1, 9.0, 0.2], ("h2",), Level.WARNING), ([30.0, 25.0, 28.0], (), Level.WARNING),
    ([0.1, 3.0, 0.2], (), Level.GOOD), ([None, 9.0], (), Level.GOOD)])
def test_slow_import_of_torch(seconds: list[float | None], named: tuple[str, ...], level: Level) -> None:
    found = only(conclude(TorchImportCheck(), [ImportFacts(value) for value in seconds]))
    assert (found.level, found.hosts) == (level, named) and "torch waited" in found.message
