"""The storage check of doctor: real folders of several "hosts", which are threads, and what is concluded of them."""
from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from utils.tools.doctor.check import Finding, Level, RankPlace, Ranks, Reported
from utils.tools.doctor.checks.shared_storage import Folder, StorageCheck, StorageFacts
from utils.tools.doctor.checks.torch_import import ImportFacts, TorchImportCheck

GIB = 1 << 30


def places(count: int) -> tuple[RankPlace, ...]:
    return tuple(RankPlace(rank, f"n{rank + 1}", rank, 0) for rank in range(count))


def collected(checks: Sequence[StorageCheck], during: Callable[[], None] = lambda: None) -> list[StorageFacts]:
    """Collect on as many hosts as there are checks. during: called when all have written."""
    everyone = places(len(checks))
    gathered: dict[str, list[Any]] = {}
    barrier = threading.Barrier(len(checks))
    found: list[Any] = [None] * len(checks)

    def run(me: RankPlace) -> None:
        def all_gather(topic: str, value: Any) -> list[Any]:
            gathered.setdefault(topic, [None] * len(checks))[me.rank] = value
            if barrier.wait(30) == 0 and topic == "written":
                during()
            barrier.wait(30)
            return gathered[topic]

        found[me.rank] = checks[me.rank].collect(Ranks(me, everyone, all_gather))

    threads = [threading.Thread(target=run, args=(me,)) for me in everyone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def concluded(facts: Sequence[StorageFacts]) -> list[Finding]:
    reported = [Reported(place, one) for place, one in zip(places(len(facts)), facts, strict=True)]
    return list(StorageCheck().conclude(reported))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "shared").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_hosts_write_and_read_and_leave_nothing_behind(folder: Path) -> None:
    (folder / "data").mkdir()
    (folder / "data" / "sample").write_bytes(b"1" * 5000)
    before = sorted(folder.rglob("*"))
    written: list[str] = []
    facts = collected([StorageCheck("shared", "data") for _ in range(3)],
                      lambda: written.extend(path.name for path in folder.glob("*/.doctor-*/*/mark")))
    assert len(written) == 6
    assert sorted(folder.rglob("*")) == before
    assert [one["purpose"] for one in facts[0].folders] == ["checkpoints", "data", "temporary"]
    assert [one.folders[0]["shared"] for one in facts] == [True] * 3
    assert all(one["seconds"] is not None and not one["problem"] for host in facts for one in host.folders)
    free = facts[0].folders[0]["free_bytes"] or 0
    assert free == pytest.approx(os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize, rel=0.1)


def test_folder_that_is_not_shared_or_missing_is_named(folder: Path) -> None:
    (folder / "own").mkdir()
    checks = [StorageCheck(name) for name in ("shared", "shared", "own", "missing")]
    findings = [one for one in concluded(collected(checks)) if one.level is not Level.GOOD]
    assert [(one.level, one.hosts, one.exclude) for one in findings] == [
        (Level.BAD, ("n4",), True), (Level.WARNING, ("n3",), False)]
    assert "n4 cannot write in the checkpoint folder" in findings[0].message
    assert "No such file or directory; 3 other hosts can" in findings[0].message
    assert "n3 does not see files that n1 has written" in findings[1].message
    assert not list(folder.rglob(".doctor-*"))


def test_checkpoint_folder_may_be_made_later(folder: Path) -> None:
    facts = collected([StorageCheck("shared/run-7/weights") for _ in range(2)])
    assert [one.folders[0]["path"] for one in facts] == [str(folder / "shared")] * 2
    assert [one.level for one in concluded(facts)] == [Level.GOOD]
    assert not list((folder / "shared").iterdir())


@pytest.mark.parametrize(("content", "message"), [
    (b"1" * 4000, "(b.bin) differs. n3: 4000 bytes"), (b"2" * 5000, "(b.bin) differs. n3: 5000 bytes, checksum"),
    (None, "(b.bin) differs. n3: none"), (b"1" * 5000, "")])
def test_data_files_that_differ_on_one_host(folder: Path, content: bytes | None, message: str) -> None:
    for name in ("data", "other"):
        (folder / name).mkdir()
        for file in ("a.bin", "b.bin"):
            (folder / name / file).write_bytes(b"1" * 5000)
    if content is None:
        (folder / "other" / "b.bin").unlink()
    else:
        (folder / "other" / "b.bin").write_bytes(content)
    facts = collected([StorageCheck("shared", name) for name in ("data", "data", "other")])
    found = [one for one in concluded(facts) if one.level is not Level.GOOD]
    assert [one.hosts for one in found] == [("n3",)] * bool(message)
    assert all(message in one.message for one in found)
    assert all(bool(one.folders[1]["files"]) is bool(message) for one in facts)  # sent where hosts differ


def test_data_may_be_a_file_or_missing(folder: Path) -> None:
    (folder / "samples.bin").write_bytes(b"1" * 5000)
    [facts] = collected([StorageCheck(data="samples.bin")])
    assert facts.folders[1]["problem"] == "" and not facts.folders[1]["empty"]
    [facts] = collected([StorageCheck(data="nowhere")])
    [finding] = [one for one in concluded([facts]) if one.level is Level.BAD]
    assert "n1 cannot read in the data folder" in finding.message and not finding.exclude


def test_lack_of_inodes_is_told_from_a_full_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_inodes(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    space = os.statvfs(folder)
    values = [*space[:7], 0, *space[8:]]  # f_favail
    monkeypatch.setattr(os, "makedirs", no_inodes)
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(values))
    [facts] = collected([StorageCheck("shared")])
    found = concluded([facts])[0]
    assert found.level is Level.BAD and "No space left on device, because all inodes are in use" in found.message


# What is concluded ------------------------------------------------------------------------------------------------


def one(purpose: str = "checkpoints", **values: Any) -> Folder:
    code = values.get("code", 0)
    problem = f"write: {os.strerror(code)}" if code else ""
    return {"purpose": purpose, "path": "/scratch", "problem": problem, "code": 0, "seconds": None if code else 0.02,
            "free_bytes": 100 * GIB, "free_files": 10**6, "file_system": "nfs4", "shared": None if code else True,
            "empty": False, "files": {}, **values}  # type: ignore[typeddict-item]


def findings_of(*hosts: Folder) -> list[Finding]:
    return [finding for finding in concluded([StorageFacts([host]) for host in hosts])
            if finding.level is not Level.GOOD]


FULL = {"code": errno.ENOSPC}
READ_ONLY = {"code": errno.EROFS}


@pytest.mark.parametrize(("hosts", "level", "named", "exclude"), [
    ([one(), one(**READ_ONLY), one()], Level.BAD, ("n2",), True),
    ([one(**READ_ONLY)] * 3, Level.BAD, ("n1", "n2", "n3"), False),
    ([one("working", **READ_ONLY)] * 3, None, (), False),
    ([one("working", **READ_ONLY), one("working")], Level.BAD, ("n1",), True),
    ([one(), one(), one(**FULL)], Level.BAD, ("n3",), False),  # the space of a shared file system
    ([one("temporary", file_system="ext4"), one("temporary", file_system="ext4", **FULL)], Level.BAD, ("n2",), True),
    ([one("temporary", file_system="ext4", **FULL)], Level.BAD, ("n1",), True),
    ([one("temporary", code=errno.ENOENT), one("temporary")], Level.WARNING, ("n1",), False),
    ([one(code=errno.EDQUOT)] * 2, Level.BAD, ("n1", "n2"), False),
    ([one(free_bytes=GIB), one(free_bytes=GIB)], Level.WARNING, ("n1", "n2"), False),
    ([one("temporary", free_bytes=GIB), one("temporary", free_bytes=1000)], Level.WARNING, ("n2",), False),
    ([one(), one(free_files=10, free_bytes=99 * GIB)], Level.WARNING, ("n2",), False),
    ([one(free_files=None)], None, (), False),  # a file system without a table of inodes
    ([one("data", empty=True), one("data"), one("data")], Level.BAD, ("n1",), True),
    ([one("data", empty=True)] * 2, Level.WARNING, (), False),
    ([one(seconds=0.9), one(seconds=0.1), one(seconds=0.2)], Level.WARNING, ("n1",), False),
    ([one(seconds=0.2), one(seconds=0.01), one(seconds=0.01)], None, (), False),  # other programs use the disk
    ([one(seconds=30)], None, (), False), ([one(seconds=3), one(seconds=2.5)], None, (), False),
    ([one(shared=False), one(shared=False)], None, (), False),  # the first host's facts are missing
])
def test_conclusion(hosts: list[Folder], level: Level | None, named: tuple[str, ...], exclude: bool) -> None:
    found = findings_of(*hosts)
    assert [(one.level, one.hosts, one.exclude) for one in found] == ([(level, named, exclude)] if level else [])
    assert all(one.remedy for one in found)


@pytest.mark.parametrize(("seconds", "named", "level"), [
    ([0.1, 9.0, 0.2], ("n2",), Level.WARNING), ([30.0, 25.0, 28.0], (), Level.WARNING),
    ([0.1, 3.0, 0.2], (), Level.GOOD), ([None, 9.0], (), Level.GOOD)])
def test_slow_import_of_torch(seconds: list[float | None], named: tuple[str, ...], level: Level) -> None:
    reported = [Reported(place, ImportFacts(value)) for place, value in zip(places(len(seconds)), seconds, strict=True)]
    [found] = TorchImportCheck().conclude(reported)
    assert (found.level, found.hosts) == (level, named) and "torch waited" in found.message
