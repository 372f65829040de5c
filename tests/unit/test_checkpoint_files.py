"""utils/checkpoint on disk: whatever happens to it, an intact checkpoint stays and no torn one is read."""
from __future__ import annotations

import errno
import itertools
import json
import os
import random
import shutil
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.distributed import HashStore

from tests.cluster.hosts import killed_at_end
from tests.unit.checkpoint_states import ChangedDisk
from tests.unit.programs import ROOT
from utils.checkpoint import Checkpointer, CheckpointError, disk, list_steps, load_part, lock
from utils.checkpoint.folder import ReadFolder
from utils.checkpoint.format import FORMAT, MANIFEST, Damaged, rank_file_name, render_manifest
from utils.checkpoint.load import load_newest
from utils.checkpoint.rank_file import checksum, memory
from utils.coordination import StoreCommunicator

FILE = rank_file_name(0)


def state(value: float) -> dict[str, Any]:
    return {"weights": torch.full((300,), value), "counts": torch.arange(40), "value": value}


def save(folder: Path, *steps: int, keep: int = 9) -> None:
    with Checkpointer(folder, keep=keep) as checkpoints:
        for step in steps:
            checkpoints.save(step, state(float(step)))


def load(folder: Path) -> int:
    """The step of the newest checkpoint, whose parts all have to be of that step; 0 for none."""
    pattern = state(-1.0)
    with Checkpointer(folder) as checkpoints:
        found = checkpoints.load_latest(pattern)
    if found is None:
        return 0
    assert found.state["value"] == found.step and bool((pattern["weights"] == found.step).all())
    assert torch.equal(pattern["counts"], torch.arange(40))
    return found.step


def test_the_checksum_is_the_same_in_all_releases() -> None:
    """CRC-32, as zlib and others compute it: constants, because later releases read today's checkpoints."""
    words = torch.arange(1 << 20, dtype=torch.int32).view(torch.uint8)
    for block, expected in (
            (torch.zeros(1, dtype=torch.uint8), "d202ef8d"),
            (words, "05b0360d"),
            ((torch.arange(10_001) % 251).to(torch.uint8), "ea7f9679")):
        assert checksum(memory(block)) == expected


def flip_or_cut(path: Path, rng: random.Random) -> None:
    raw = bytearray(path.read_bytes())
    where = rng.randrange(len(raw))
    raw[where] ^= 1 << rng.randrange(8)
    path.write_bytes(raw if rng.random() < 0.5 else raw[:where])


def make_link(path: Path, _: random.Random) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def make_pipe(path: Path, _: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def overwrite(content: bytes) -> Callable[[Path, random.Random], object]:
    return lambda path, _: path.write_bytes(content)


@pytest.mark.parametrize("name, damage, times, words", [
    *((name, *row) for name in (FILE, MANIFEST) for row in (
        (flip_or_cut, 30, ""), (lambda path, _: path.unlink(), 1, "is missing"), (make_link, 1, "expected a file"),
        (make_pipe, 1, "expected a file"))),
    *((MANIFEST, overwrite(content), 1, "manifest.json: its text does not match its checksum") for content in (
        b"", b"{}", b"[" * 100_000, b"null", b"\xff\xfe", b'{"manifest": {"format": 3}, "crc32": "0"}\n'))])
def test_a_damaged_checkpoint_is_quarantined_and_the_one_before_is_loaded(
        name: str, damage: Any, times: int, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 1, 2)
    newest, rng = tmp_path / "step-000000002", random.Random(0)
    shutil.copytree(newest, tmp_path / "intact")
    for _ in range(times):
        damage(newest / name, rng)
        caplog.clear()
        assert load(tmp_path) == 1
        (quarantined,) = tmp_path.glob("*.damaged")
        assert all(text in caplog.text for text in (str(newest), name, words, quarantined.name))
        shutil.rmtree(quarantined)
        shutil.copytree(tmp_path / "intact", newest)
    assert load(tmp_path) == 2
    for step in tmp_path.glob("step-*"):
        damage(step / name, rng)
    for _ in range(2):  # also where they were found damaged before: the training must not start at step 0
        with pytest.raises(CheckpointError, match=r"all checkpoints in .* are damaged \(step-000000001\S*, step-0"):
            load(tmp_path)
        with pytest.raises(CheckpointError, match="Copy one from a backup"):
            load_part(tmp_path, {"weights": torch.zeros(300)})
    assert not [*tmp_path.glob("step-00000000?")] and list_steps(tmp_path) == []


@pytest.mark.parametrize("hosts, finds_damage, reader, suspect", [
    ("aabb", {1}, "rank 2 on b finds", "rank 1 on a"), ("aabb", {1, 2}, "rank 3 on b finds", "rank 1 on a"),
    ("aaaa", {0}, "rank 1 on a finds", "rank 0 on a"), ("aaaa", {3}, "rank 0 on a finds", "rank 3 on a"),
    ("ab", {0, 1}, "rank 1 on b finds", "rank 0 on a"), ("a", {0}, "a second time, it finds", "rank 0 on a")])
@pytest.mark.parametrize("name", [FILE, MANIFEST])
def test_a_rank_that_reads_wrong_bits_is_the_suspect(
        name: str, hosts: str, finds_damage: set[int], reader: str, suspect: str, tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank, on another host where there is one, reads the file before a checkpoint is renamed."""
    save(tmp_path, 1, 2)
    store = HashStore()

    def load_on(rank: int) -> str:
        threading.current_thread().name = hosts[rank]

        def load_from(path: Path, manifest: Any) -> str:
            if rank in finds_damage:
                raise Damaged(name, "wrong bits")
            return path.name

        ranks = StoreCommunicator("x", rank, len(hosts), store, timeout_seconds=20)
        folder = ReadFolder(tmp_path, ranks.name)
        with pytest.raises(CheckpointError) as error:
            load_newest("load", ranks, folder, load_from, None)
        return str(error.value)

    monkeypatch.setattr(socket, "gethostname", lambda: threading.current_thread().name)
    with ThreadPoolExecutor(len(hosts)) as pool:
        error, = set(pool.map(load_on, range(len(hosts))))
    assert f"step-000000002: {suspect} finds {name} damaged, and {reader} it intact" in error
    assert f"Suspect {suspect[-1]}" in error and list_steps(tmp_path) == [1, 2]


@pytest.mark.parametrize("changes, words", [
    ({"format": FORMAT + 1}, f"format {FORMAT + 1}, of a later version of the kit; expected format {FORMAT}"),
    ({"format": 1}, f"format 1, of an earlier version of the kit; expected format {FORMAT}"),
    ({"step": 3}, "manifest.json: step is 3; expected 2, as in the name")])
def test_another_format_or_step_is_refused_and_not_called_damaged(
        changes: dict[str, int], words: str, tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    file = tmp_path / "step-000000002" / MANIFEST
    manifest = json.loads(file.read_text())["manifest"]
    file.write_bytes(render_manifest({**manifest, **changes}))
    with pytest.raises(CheckpointError, match=words):
        load(tmp_path)
    assert file.exists()


class UnsafeDisk:
    """The real disk, and what of it is left after a power cut: what was synced."""

    def __init__(self, after_each_call: Callable[[], None]) -> None:
        self.after_each_call = after_each_call
        self.opened: dict[int, int] = {}  # a descriptor of each inode, whose number is then not used again
        self.synced: dict[int, Any] = {}  # what content() was when the inode was synced

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            if name == "write":
                file, data = args
                args = file, data[:len(data) // 2] if len(data) > 600 else data  # a system may do so
            result = getattr(os, name)(*args)
            if name in ("mkdir", "open"):
                self.inode(args[0])
            if name == "fsync":
                inode = os.fstat(args[0]).st_ino
                self.synced[inode] = self.content(inode)
            if name != "close":
                self.after_each_call()
            return result
        return call

    def inode(self, path: Path) -> int:
        found = path.stat().st_ino
        if found not in self.opened:
            self.opened[found] = os.open(path, os.O_RDONLY)
        return found

    def content(self, inode: int) -> Any:
        """The bytes of a file, or the inodes in a folder by their names."""
        file = self.opened[inode]
        if stat.S_ISDIR(os.fstat(file).st_mode):
            return {entry.name: entry.stat().st_ino for entry in os.scandir(file) if entry.name != lock.NAME}
        return os.pread(file, 1 << 20, 0)

    def restart(self, inode: int, target: Path, names: bool) -> None:
        """Write to `target` what a power cut leaves of a file or folder. names: also later changes of folders."""
        if stat.S_ISDIR(os.fstat(self.opened[inode]).st_mode):
            target.mkdir()
            entries = self.content(inode) if names else self.synced.get(inode, {})
            for name, inner in entries.items():
                self.restart(inner, target / name, names)
        else:
            size = os.fstat(self.opened[inode]).st_size
            target.write_bytes(self.synced.get(inode, b"").ljust(size * names, b"\0"))


def test_a_power_cut_or_a_kill_at_any_moment_leaves_an_intact_checkpoint(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    seen: list[tuple[int, int]] = []  # the last step that was safe, the step that was found
    safe = 0

    def stop_here() -> None:
        with monkeypatch.context() as real:
            real.setattr(disk, "system", os)
            for end in ("kill", "power cut", "power cut after changes of folders"):
                restarted = tmp_path / f"after-{len(seen)}"
                if end == "kill":
                    shutil.copytree(folder, restarted)
                else:
                    unsafe.restart(unsafe.inode(folder), restarted, names=end != "power cut")
                found = load(restarted)
                assert found in (safe, safe + 1)
                assert all(name.startswith("step-") and not name.endswith(".damaged")
                           for name in os.listdir(restarted)), "nothing is left or damaged"
                seen.append((safe, found))

    unsafe = UnsafeDisk(stop_here)
    monkeypatch.setattr(disk, "system", unsafe)
    with Checkpointer(folder, keep=1) as checkpoints:  # each save deletes the only other one
        for step in (1, 2, 3):
            checkpoints.save_and_wait(step, state(float(step)))
            safe = step
    assert len(seen) > 3 * 3 * 15
    for step in (0, 1, 2):
        assert {(step, step), (step, step + 1)} <= set(seen)


@pytest.mark.parametrize("number, calls, writes, words", [
    (errno.ENOSPC, ["write"], 1, "No space left"),
    (errno.ENOSPC, ["write"], 2, "No space left"),  # for the manifest
    (errno.EROFS, ["mkdir"], 0, "Read-only"), (errno.EIO, ["fsync", "unlink", "rmdir"], 0, "Input/output error"),
    (errno.EACCES, ["rename"], 0, "Permission denied"), (errno.ENOENT, ["open"], 0, "another job"),
])
def test_a_refusing_disk_is_explained_and_costs_one_save(
        number: int, calls: list[str], writes: int, words: str, tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch) -> None:
    """calls: those that fail after so many writes."""
    remaining = iter(range(writes))

    def refuse(*args: Any) -> int:
        if next(remaining, None) is None:
            raise OSError(number, os.strerror(number))
        return os.write(*args)

    with Checkpointer(tmp_path, keep=1) as checkpoints:
        checkpoints.save_and_wait(1, state(1.0))
        with monkeypatch.context() as refusing:
            refusing.setattr(disk, "system", ChangedDisk(**dict.fromkeys(calls, refuse)))
            checkpoints.save(2, state(2.0))
            with pytest.raises(CheckpointError, match=words) as error:
                checkpoints.wait()
            assert checkpoints.failure is error.value
            checkpoints.save(3, state(3.0))  # fails too, and raises nothing
            with pytest.raises(CheckpointError, match="cannot save step 4"):
                checkpoints.save_and_wait(4, state(4.0), retry_seconds=0)
        assert all(text in str(error.value) for text in ("step 2", str(tmp_path), "rank 0 on"))
        assert "unlink" in calls or sorted(os.listdir(tmp_path)) == [lock.NAME, "step-000000001"], "no folder is left"
        checkpoints.save_and_wait(5, state(5.0))
        assert checkpoints.failure is None
    assert os.listdir(tmp_path) == ["step-000000005"] and load(tmp_path) == 5


def test_a_save_that_is_tried_again_on_a_full_disk_logs_its_failure_once(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def errors() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]

    tries = itertools.count()

    def full(*_: Any) -> int:
        next(tries)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Checkpointer(tmp_path) as checkpoints:
        for number, step in ((1, 10), (2, 20)):
            with monkeypatch.context() as patch:
                patch.setattr(disk, "system", ChangedDisk(write=full))
                with pytest.raises(CheckpointError, match="No space left"):
                    checkpoints.save_and_wait(step, state(1.0), retry_seconds=2)
            assert len(errors()) == number and "Trying again for 2 s" in errors()[-1]
            checkpoints.save_and_wait(step + 1, state(1.0))
    assert next(tries) >= 6


def test_a_folder_removed_during_training_is_made_again(
        tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "checkpoints"
    with Checkpointer(folder) as checkpoints:
        checkpoints.save_and_wait(1, state(1.0))
        shutil.rmtree(folder)
        checkpoints.save(2, state(2.0))
    assert load(folder) == 2
    assert "was removed during the training" in caplog.text


def test_links_are_deleted_and_their_targets_stay(tmp_path: Path) -> None:
    archive, scratch, folder = tmp_path / "archive", tmp_path / "scratch", tmp_path / "checkpoints"
    save(archive, 1)
    scratch.mkdir()
    folder.symlink_to(scratch)
    save(folder, 2)
    for name, target in (("step-000000001", archive / "step-000000001"), (".deleting-0123", archive),
                         ("step-000000002/link", archive), ("step-000000002/dangling", tmp_path / "nowhere")):
        (folder / name).symlink_to(target)
    save(folder, 3, keep=1)
    assert os.listdir(scratch) == ["step-000000003"] and folder.is_symlink()
    assert load(archive) == 1


def test_target_of_a_link_that_is_kept_is_not_deleted(tmp_path: Path) -> None:
    """As where somebody has put the first save of a step back in the place of the second."""
    save(tmp_path, 1)
    (tmp_path / "step-000000001-2").symlink_to("step-000000001")
    save(tmp_path, 2, 3, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["step-000000002", "step-000000003"]
    (tmp_path / "step-000000003-2").symlink_to("step-000000003")
    save(tmp_path, 4, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["step-000000003", "step-000000003-2", "step-000000004"]
    with Checkpointer(tmp_path) as checkpoints:
        assert checkpoints.load_step(3, state(0.0)).state["value"] == 3.0


def test_a_file_that_loses_bytes_before_the_commit_is_no_checkpoint(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system whose servers fail: sizes are compared with what was written."""
    def fsync(file: int) -> None:
        if stat.S_ISREG(os.fstat(file).st_mode):
            os.ftruncate(file, os.fstat(file).st_size - 1)
        os.fsync(file)

    save(tmp_path, 1)
    monkeypatch.setattr(disk, "system", ChangedDisk(fsync=fsync))
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(2, state(2.0))
        with pytest.raises(CheckpointError, match=rf"{FILE} has \d+ bytes after \d+ were written"):
            checkpoints.wait()
    assert list_steps(tmp_path) == [1]


def test_interrupted_saves_are_removed_and_nothing_else(tmp_path: Path) -> None:
    kept, removed = [".mine", "step-1", "notes"], [".saving-0123", ".deleting-0123"]
    for name in (*kept, *removed):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    assert load(tmp_path) == 0
    assert sorted(os.listdir(tmp_path)) == sorted(kept)


JOB = """\
import os, shutil, sys, time
from utils.checkpoint import Checkpointer
checkpoints = Checkpointer(sys.argv[1])
checkpoints.save(1, {})
checkpoints.wait()
shutil.copytree(sys.argv[1], sys.argv[1] + " backup")  # opens and closes the lock file
if os.fork() == 0:  # as a worker that outlives its parent
    time.sleep(60)
    os._exit(0)
print("saved", flush=True)
time.sleep(60)
"""


def test_second_job_in_a_folder_is_refused_until_the_first_has_ended(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed, it leaves its lock file, which does not stand in the way, and neither does a forked child."""
    monkeypatch.setattr(lock, "_WAIT_SECONDS", 0.3)
    tmp_path = tmp_path / "checkpoints"
    command = [sys.executable, "-c", JOB, str(tmp_path)]
    environ = {**os.environ, "SLURM_JOB_ID": "4711"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True, start_new_session=True)
    with killed_at_end(process) as first:
        assert first.stdout.readline() == "saved\n"
        (tmp_path / ".saving-0123").mkdir()  # of that job
        words = rf"is in use by pid {first.pid} on \S+, job 4711; expected one job"
        with Checkpointer(tmp_path) as checkpoints, pytest.raises(CheckpointError, match=words):
            checkpoints.load_latest({})
        with pytest.raises(CheckpointError, match=words), Checkpointer(tmp_path) as checkpoints:
            checkpoints.save_and_wait(2, {})
        assert sorted(os.listdir(tmp_path)) == [".lock", ".saving-0123", "step-000000001"]
        assert list_steps(tmp_path) == [1]
        first.kill()
        first.wait()
    with Checkpointer(tmp_path) as checkpoints:
        assert checkpoints.load_latest({}).step == 1
    assert os.listdir(tmp_path) == ["step-000000001"]


def test_lock_is_shared_within_a_process_and_made_again_with_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with Checkpointer(folder) as one:
        one.save_and_wait(1, {})
        with Checkpointer(folder) as other:
            other.save_and_wait(2, {})
        assert lock.is_held(folder)
        shutil.rmtree(folder)
        one.save_and_wait(3, {})
        assert lock.is_held(folder)
    assert os.listdir(folder) == ["step-000000003"]


def test_lock_is_shared_by_all_names_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with Checkpointer(tmp_path) as one, Checkpointer(tmp_path / "link") as other:
        one.save_and_wait(1, {})
        other.save_and_wait(2, {})
        other.close()
        assert lock.is_held(tmp_path)
        one.save_and_wait(3, {})
    assert lock.NAME not in os.listdir(tmp_path)


def test_lock_file_that_its_owner_removes_meanwhile_is_not_held(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the open() and the lock of this process: the next one would lock a file of the same name."""
    real, calls = lock.fcntl.fcntl, itertools.count()

    def remove_first(*args: Any) -> Any:
        if next(calls) == 0:
            (tmp_path / lock.NAME).unlink()
        return real(*args)

    monkeypatch.setattr(lock.fcntl, "fcntl", remove_first)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.load_latest({})
        assert lock.is_held(tmp_path) and next(calls) == 2


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS])
def test_file_system_without_locks_of_open_files_has_those_of_processes(
        number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock.fcntl, "fcntl", Mock(side_effect=OSError(number, "no OFD locks")))
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save_and_wait(1, {})
        test = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        second = subprocess.run([sys.executable, "-c", test, tmp_path / lock.NAME], capture_output=True, text=True)
        assert "BlockingIOError" in second.stderr


def test_file_system_without_locks_is_used_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an interrupted save left stays there: another job might be saving."""
    for name in ("fcntl", "lockf"):
        monkeypatch.setattr(lock.fcntl, name, Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    (tmp_path / ".saving-0123").mkdir()
    save(tmp_path, 1)
    assert load(tmp_path) == 1 and (tmp_path / ".saving-0123").exists()

