"""utils/checkpoint_files.py: whatever happens to the disk, no torn checkpoint is read, and an intact one stays."""
from __future__ import annotations

import errno
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from utils import checkpoint_files, checkpoint_sums
from utils.checkpoint import Checkpointer, CheckpointError
from utils.checkpoint_sums import BLOCK, checksum

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def log_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("ddpkit"), "propagate", True)


def state(value: float) -> dict[str, Any]:
    return {"weights": torch.full((300,), value), "counts": torch.arange(40), "value": value}


def load(folder: Path) -> tuple[int, float] | None:
    """Step and value of the newest checkpoint, whose parts all have to be of that value."""
    pattern = state(-1.0)
    with Checkpointer(folder) as checkpoints:
        found = checkpoints.load_latest(pattern)
    if found is None:
        return None
    assert bool((pattern["weights"] == found.state["value"]).all()) and torch.equal(pattern["counts"], torch.arange(40))
    return found.step, found.state["value"]


def test_a_file_is_readable_by_the_rules_of_safetensors(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        more = {"complex": torch.zeros(3, dtype=torch.complex64), "flag": torch.tensor(True)}
        checkpoints.save(7, {**state(2.5), **more})
    raw = (tmp_path / "step-000000007" / "rank-00000.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:8 + length])
    assert all(type(text) is str for text in header.pop("__metadata__").values())
    sizes = {"F32": 4, "I64": 8, "BOOL": 1, "U8": 1}
    end = 0
    for field in header.values():  # in the order of the data, without gaps
        start, next_end = field["data_offsets"]
        elements = 1
        for number in field["shape"]:
            elements *= number
        assert start == end and next_end - start == elements * sizes[field["dtype"]]
        assert (8 + length + start) % sizes[field["dtype"]] == 0
        end = next_end
    assert end == len(raw) - 8 - length
    assert set(header) == {"weights", "counts", "complex", "flag"}


# The checksum --------------------------------------------------------------------------------------------------------

def test_the_checksum_stays_the_same_in_all_releases() -> None:
    """Written down, because checkpoints are read by later releases of torch and of the kit."""
    assert checksum(torch.zeros(1, dtype=torch.uint8)) == "58e23afbc10e51114427bf6065612751"
    assert checksum(torch.arange(1 << 20, dtype=torch.int32).view(torch.uint8)) == "a2e8430fd8c2de6733dfadc4509d692d"
    assert checksum((torch.arange(10_001) % 251).to(torch.uint8)) == "35c78dae7e12144fb99fd8f993a2f6f5"


def test_all_weights_of_the_checksum_are_odd_and_differ() -> None:
    for weights in (checkpoint_sums._BY_ROW.tolist(), checkpoint_sums._BY_COLUMN.tolist()):
        assert all(weight & 1 for weight in weights) and len(set(weights)) == len(weights)


def test_every_change_within_4096_bytes_and_any_three_flipped_bits_change_the_checksum() -> None:
    rng, block = random.Random(0), torch.randint(0, 256, (BLOCK,), dtype=torch.uint8)
    expected = checksum(block)
    for trial in range(200):
        changed = block.clone()
        if trial % 2:
            start, length = rng.randrange(BLOCK - 4096), rng.randint(1, 4096)
            changed[start:start + length] = torch.randint(0, 256, (length,), dtype=torch.uint8)
            changed[start] ^= 128
        else:  # the top bits of words in one row or one column are what one sum alone would miss
            first = rng.randrange(BLOCK // 8 // 4) * 8 + 7
            for step in (0, 4096, 4096 + 8 * rng.randint(1, 400))[:rng.randint(1, 3)]:
                changed[first + step] ^= 128
        assert checksum(changed) != expected
    assert checksum(block) == expected


@pytest.mark.parametrize("change", [
    lambda block: block.view(-1, 4096).flip(0).flatten(), lambda block: block.roll(4096), lambda block: block.roll(1),
    lambda block: torch.cat([block[:BLOCK // 2], torch.zeros(BLOCK // 2, dtype=torch.uint8)]),
    lambda block: block.view(2, -1).flip(0).flatten(), lambda block: block ^ 128, lambda block: block[:-4096],
], ids=["pages reversed", "moved by a page", "moved by a byte", "half lost", "halves swapped", "all top bits", "cut"])
def test_large_changes_change_the_checksum(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    block = torch.randint(0, 256, (BLOCK,), dtype=torch.uint8)
    assert checksum(change(block).contiguous()) != checksum(block)


# Damage --------------------------------------------------------------------------------------------------------------

def test_no_checkpoint_with_a_flipped_bit_or_a_cut_file_is_loaded(
        tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpointer(tmp_path, keep=2) as checkpoints:
        checkpoints.save(1, state(1.0))
        checkpoints.save(2, state(2.0))
    newest, rng = tmp_path / "step-000000002", random.Random(0)
    for trial in range(200):
        file = newest / rng.choice([checkpoint_files.MANIFEST, "rank-00000.safetensors"])
        whole = file.read_bytes()
        where = rng.randrange(len(whole))
        if trial % 2:
            torn = whole[:where]
        else:
            torn = whole[:where] + bytes([whole[where] ^ 1 << rng.randrange(8)]) + whole[where + 1:]
        file.write_bytes(torn)
        caplog.clear()
        assert load(tmp_path) == (1, 1.0), f"{file.name}, byte {where} of {len(whole)}"
        (aside,) = tmp_path.glob("*.damaged")
        assert str(newest) in caplog.text and file.name in caplog.text and aside.name in caplog.text
        assert (aside / file.name).read_bytes() == torn, "what was set aside is as it was found"
        aside.rename(newest)
        file.write_bytes(whole)
    assert load(tmp_path) == (2, 2.0)


@pytest.mark.parametrize("name", [checkpoint_files.MANIFEST, "rank-00000.safetensors"])
def test_a_missing_file_is_damage(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state(1.0))
        checkpoints.save(2, state(2.0))
    (tmp_path / "step-000000002" / name).unlink()
    assert load(tmp_path) == (1, 1.0)
    assert f"{name} is missing" in caplog.text


def test_swapped_and_zeroed_blocks_and_bytes_too_many_are_damage(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=4) as checkpoints:
        checkpoints.save(1, {"x": torch.arange(65536)})
        checkpoints.save(2, {"x": torch.arange(65536)})
        checkpoints.save(3, {"x": torch.arange(65536)})
        checkpoints.save(4, {"x": torch.arange(65536)})
    fourth, third, second = (tmp_path / f"step-00000000{step}" / "rank-00000.safetensors" for step in (4, 3, 2))
    raw = third.read_bytes()
    fourth.write_bytes(raw + bytes(8))
    third.write_bytes(raw[:-8192] + raw[-4096:] + raw[-8192:-4096])
    second.write_bytes(raw[:-4096] + bytes(4096))
    with Checkpointer(tmp_path) as checkpoints:
        found = checkpoints.load_latest({"x": torch.zeros(65536, dtype=torch.int64)})
    assert found is not None and found.step == 1
    assert len(list(tmp_path.glob("*.damaged"))) == 3


def test_none_is_loaded_when_all_are_damaged(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state(1.0))
    (tmp_path / "step-000000001" / checkpoint_files.MANIFEST).write_bytes(b"")
    assert load(tmp_path) is None


# Power cuts ----------------------------------------------------------------------------------------------------------

class Disk:
    """Does what is asked of it on the real disk, and remembers what a disk without power would still hold.

    A file keeps what it held when it was last synced; what was written since may be there in part or not at all. A
    folder keeps the entries that it had when it was last synced; of the changes since, any first few may be there.
    """

    def __init__(self, root: Path) -> None:
        self.root: dict[str, Any] = {"synced": {}, "changes": []}
        self.top, self.moments = root, 0
        self.open_files: dict[int, dict[str, Any]] = {}
        self.after: list[Callable[[Disk], None]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def node(self, path: Path) -> dict[str, Any]:
        node = self.root
        for part in path.relative_to(self.top).parts:
            node = self.entries(node)[part]
        return node

    def entries(self, folder: dict[str, Any], changes: int | None = None) -> dict[str, Any]:
        entries = dict(folder["synced"])
        for change in folder["changes"][:changes]:
            change(entries)
        return entries

    def change(self, path: Path, what: Callable[[dict[str, Any]], object]) -> None:
        self.node(path.parent)["changes"].append(what)

    def done(self) -> None:
        for look in self.after:
            look(self)

    def mkdir(self, path: Path) -> None:
        os.mkdir(path)
        node: dict[str, Any] = {"synced": {}, "changes": []}
        self.change(path, lambda entries: entries.update({path.name: node}))
        self.done()

    def open(self, path: Path, flags: int, mode: int = 0o777) -> int:
        file = os.open(path, flags, mode)
        if flags & os.O_CREAT:
            node = {"durable": b"", "written": b""}
            self.change(path, lambda entries: entries.update({path.name: node}))
        self.open_files[file] = self.node(path)
        self.done()
        return file

    def write(self, file: int, data: memoryview) -> int:
        data = data[:max(1, len(data) // 2)] if len(data) > 600 else data  # as a system may do it
        count = os.write(file, data)
        self.open_files[file]["written"] += bytes(data[:count])
        self.done()
        return count

    def fsync(self, file: int) -> None:
        os.fsync(file)
        node = self.open_files[file]
        if "durable" in node:
            node["durable"] = node["written"]
        else:
            node["synced"], node["changes"] = self.entries(node), []
        self.done()

    def close(self, file: int) -> None:
        os.close(file)
        del self.open_files[file]

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)
        self.change(old, lambda entries: entries.update({new.name: entries.pop(old.name)}))
        self.done()

    def unlink(self, path: Path) -> None:
        os.unlink(path)
        self.change(path, lambda entries: entries.pop(path.name))
        self.done()

    def rmdir(self, path: Path) -> None:
        os.rmdir(path)
        self.change(path, lambda entries: entries.pop(path.name))
        self.done()

    def restart(self, target: Path, rng: random.Random, kind: str) -> None:
        """Write to `target` what may be on the disk after a power cut now."""
        def put(node: dict[str, Any], path: Path) -> None:
            if "durable" not in node:
                path.mkdir()
                changes = {"nothing": 0, "names": None, "mixed": rng.randint(0, len(node["changes"]))}[kind]
                for name, inner in self.entries(node, changes).items():
                    put(inner, path / name)
                return
            lost = node["written"][len(node["durable"]):]
            kept = {"nothing": b"", "names": bytes(len(lost)), "mixed": lost[:rng.randint(0, len(lost))]}[kind]
            path.write_bytes(node["durable"] + kept)
        put(self.root, target)


def test_a_power_cut_at_any_moment_of_a_save_leaves_an_intact_checkpoint(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, rng = tmp_path / "checkpoints", random.Random(0)
    folder.mkdir()
    disk = Disk(folder)
    monkeypatch.setattr(checkpoint_files, "disk", disk)
    seen: list[tuple[int, int]] = []  # the last step that was safe, the step that was found
    safe = 0

    def look(disk: Disk) -> None:
        with monkeypatch.context() as real:
            real.setattr(checkpoint_files, "disk", os)
            for number, kind in enumerate(["nothing", "names", "mixed", "mixed", "mixed"]):
                restarted = tmp_path / f"after-{len(seen)}-{number}"
                disk.restart(restarted, rng, kind)
                found = load(restarted)
                assert (found[0] if found else 0) in (safe, safe + 1) and (not found or found[1] == found[0])
                left = [name for name in os.listdir(restarted) if not checkpoint_files._NAME.fullmatch(name)]
                assert left == [], "what was cut off is removed, and nothing was damaged"
                seen.append((safe, found[0] if found else 0))

    disk.after.append(look)
    with Checkpointer(folder, keep=1) as checkpoints:  # the hardest: the only other one is deleted at each save
        for step in (1, 2, 3):
            checkpoints.save(step, state(float(step)))
            checkpoints.wait()
            safe = step
    assert len(seen) > 3 * 5 * 15
    for step in (0, 1, 2):
        assert {(step, step), (step, step + 1)} <= set(seen)


# Disks that refuse ---------------------------------------------------------------------------------------------------

class Refusing:
    """The real disk, until `room` bytes are written; then every call named fails with this error."""

    def __init__(self, number: int, calls: tuple[str, ...], room: int = 0) -> None:
        self.number, self.calls, self.room = number, calls, room

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in self.calls:
            return real

        def call(*args: Any) -> Any:
            if name == "write":
                self.room -= len(args[1])
            if self.room < 0 or name != "write":
                raise OSError(self.number, os.strerror(self.number))
            return real(*args)
        return call


@pytest.mark.parametrize("number, calls, room, words", [
    (errno.ENOSPC, ("write",), 0.5, "no space is left"),
    (errno.ENOSPC, ("write",), 0.99, "no space is left"),
    (errno.ENOSPC, ("write",), 1.001, "no space is left"),  # for the manifest
    (errno.EDQUOT, ("fsync",), 0, "quota is used up"),
    (errno.EROFS, ("mkdir",), 0, "read-only"),
    (errno.EACCES, ("mkdir",), 0, "may not write there"),
    (errno.EIO, ("fsync",), 0, "Input/output error"),
    (errno.EACCES, ("rename",), 0, "may not write there"),
    (errno.ENOENT, ("open",), 0, "another job"),
])
def test_a_disk_that_refuses_leaves_the_older_checkpoint_whole_and_the_error_names_the_cause(
        number: int, calls: tuple[str, ...], room: float, words: str, tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpointer(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state(1.0))
        checkpoints.wait()
        size = (tmp_path / "step-000000001" / "rank-00000.safetensors").stat().st_size
        with monkeypatch.context() as refusing:
            refusing.setattr(checkpoint_files, "disk", Refusing(number, calls, int(room * size)))
            checkpoints.save(2, state(2.0))
            with pytest.raises(CheckpointError, match=words) as error:
                checkpoints.wait()
            assert checkpoints.failure is error.value
            checkpoints.save(3, state(3.0))  # fails too, and raises nothing
            with pytest.raises(CheckpointError, match="cannot save step 4"):
                checkpoints.save_and_wait(4, state(4.0), retry_seconds=0)
        assert "step 2" in str(error.value) and str(tmp_path) in str(error.value) and "rank 0 on" in str(error.value)
        assert os.listdir(tmp_path) == ["step-000000001"], "the temporary folder is gone"
        checkpoints.save(5, state(5.0))
        checkpoints.wait()
        assert checkpoints.failure is None
    assert load(tmp_path) == (5, 5.0)


def test_a_failed_save_does_not_prevent_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state(1.0))
        checkpoints.wait()
        disk = Refusing(errno.ENOSPC, ("write",), 100)
        monkeypatch.setattr(checkpoint_files, "disk", disk)
        checkpoints.save(2, state(2.0))
        while checkpoints.failure is None:
            time.sleep(0.01)
        disk.room = 1 << 30
        checkpoints.save(3, state(3.0))
    assert checkpoint_files.names(tmp_path) == ["step-000000001", "step-000000003"]


def test_the_last_save_is_tried_again_until_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Refusing(errno.ENOSPC, ("write",), 100)
    monkeypatch.setattr(checkpoint_files, "disk", disk)
    with Checkpointer(tmp_path) as checkpoints:
        threading.Timer(1.0, setattr, (disk, "room", 1 << 30)).start()
        checkpoints.save_and_wait(1, state(1.0))
        assert checkpoints.failure is None
    assert load(tmp_path) == (1, 1.0)
    assert os.listdir(tmp_path) == ["step-000000001"]


def test_what_a_failed_removal_left_is_removed_before_the_next_save(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        with monkeypatch.context() as refusing:
            refusing.setattr(checkpoint_files, "disk", Refusing(errno.EIO, ("fsync", "unlink", "rmdir")))
            checkpoints.save(1, state(1.0))
            with pytest.raises(CheckpointError):
                checkpoints.wait()
        assert len(os.listdir(tmp_path)) == 1
        checkpoints.save(2, state(2.0))
    assert os.listdir(tmp_path) == ["step-000000002"]


def test_a_folder_removed_during_training_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "checkpoints"
    with Checkpointer(folder) as checkpoints:
        checkpoints.save(1, state(1.0))
        checkpoints.wait()
        shutil.rmtree(folder)
        checkpoints.save(2, state(2.0))
    assert load(folder) == (2, 2.0)
    assert "was removed during the training" in caplog.text


# Links and folders in the folder -------------------------------------------------------------------------------------

def test_retiring_a_link_leaves_its_target(tmp_path: Path) -> None:
    folder, archive = tmp_path / "checkpoints", tmp_path / "archive"
    with Checkpointer(archive) as checkpoints:
        checkpoints.save(1, state(1.0))
    folder.mkdir()
    (folder / "step-000000001").symlink_to(archive / "step-000000001")
    (folder / ".saving-0123").symlink_to(archive)
    with Checkpointer(folder, keep=1) as checkpoints:
        assert checkpoints.load_latest(state(0.0)) is not None, "a step may be a link"
        checkpoints.save(2, state(2.0))
    assert load(archive) == (1, 1.0) and load(folder) == (2, 2.0)
    assert checkpoint_files.names(folder) == ["step-000000002"]


def test_removing_a_checkpoint_follows_no_link_in_it_and_removes_its_folders(tmp_path: Path) -> None:
    target = tmp_path / "mine"
    (target / "inner").mkdir(parents=True)
    (target / "inner" / "file").write_text("x")
    folder = tmp_path / "checkpoints"
    with Checkpointer(folder, keep=1) as checkpoints:
        checkpoints.save(1, state(1.0))
        checkpoints.wait()
        step = folder / "step-000000001"
        (step / "link").symlink_to(target)
        (step / "dangling").symlink_to(tmp_path / "nowhere")
        (step / "notes" / "deep").mkdir(parents=True)
        (step / "notes" / "deep" / "link").symlink_to(target / "inner")
        (step / "notes" / "text").write_text("x")
        checkpoints.save(2, state(2.0))
    assert os.listdir(folder) == ["step-000000002"]
    assert (target / "inner" / "file").read_text() == "x"


def test_setting_a_damaged_link_aside_leaves_its_target(tmp_path: Path) -> None:
    folder, archive = tmp_path / "checkpoints", tmp_path / "archive"
    with Checkpointer(archive) as checkpoints:
        checkpoints.save(2, state(2.0))
    (archive / "step-000000002" / checkpoint_files.MANIFEST).write_text("")
    with Checkpointer(folder) as checkpoints:
        checkpoints.save(1, state(1.0))
    (folder / "step-000000002").symlink_to(archive / "step-000000002")
    (folder / "step-000000002.damaged").symlink_to(tmp_path / "nowhere")
    assert load(folder) == (1, 1.0)
    assert os.listdir(archive) == ["step-000000002"] and (folder / "step-000000002.damaged").is_symlink()
    assert (folder / "step-000000002.damaged-2").is_symlink()


def test_what_a_kept_link_points_to_is_kept(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=1, keep_every=10) as checkpoints:
        checkpoints.save(3, state(3.0))
        checkpoints.wait()
        (tmp_path / "step-000000010").symlink_to("step-000000003")
        checkpoints.save(11, state(11.0))
    assert checkpoint_files.names(tmp_path) == ["step-000000003", "step-000000010", "step-000000011"]


def test_the_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "checkpoints").symlink_to(tmp_path / "scratch")
    with Checkpointer(tmp_path / "checkpoints", keep=1) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state(float(step)))
    assert os.listdir(tmp_path / "scratch") == ["step-000000002"] and (tmp_path / "checkpoints").is_symlink()


def test_a_link_or_a_pipe_in_place_of_a_file_is_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpointer(tmp_path, keep=3) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state(float(step)))
    part = tmp_path / "step-000000003" / checkpoint_files.part_name(0)
    part.rename(tmp_path / "elsewhere")
    part.symlink_to(tmp_path / "elsewhere")
    manifest = tmp_path / "step-000000002" / checkpoint_files.MANIFEST
    manifest.unlink()
    os.mkfifo(manifest)
    assert load(tmp_path) == (1, 1.0)
    assert "expected a file" in caplog.text


# Other processes -----------------------------------------------------------------------------------------------------

def test_a_reader_leaves_the_folder_of_a_running_save_alone(tmp_path: Path) -> None:
    """The writer is another process, as an evaluation is beside a training."""
    code = ("import sys; from pathlib import Path; from utils import checkpoint_files\n"
            "print(checkpoint_files.begin(Path(sys.argv[1])), flush=True); sys.stdin.read()")
    with subprocess.Popen([sys.executable, "-c", code, tmp_path], cwd=ROOT, text=True, stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as writer:
        assert writer.stdin and writer.stdout
        temporary = Path(writer.stdout.readline().strip())
        with Checkpointer(tmp_path) as checkpoints:
            assert checkpoints.load_latest(state(0.0)) is None
            checkpoints.save(1, state(1.0))
            checkpoints.wait()
            assert temporary.is_dir()
            writer.stdin.close()
            writer.wait(30)
            checkpoints.save(2, state(2.0))
            checkpoints.wait()
            assert not temporary.exists()


def test_what_another_host_writes_is_left_alone_until_it_is_old(tmp_path: Path) -> None:
    others = [tmp_path / f".saving-elsewhere.12ab34cd.4026531836.7.99.{number:016x}" for number in range(2)]
    for other in others:
        other.mkdir()
        (other / "rank-00000.safetensors").write_text("x")
    for path in (others[0], others[0] / "rank-00000.safetensors"):
        os.utime(path, (1, 1))
    with Checkpointer(tmp_path) as checkpoints:
        assert checkpoints.load_latest(state(0.0)) is None
        assert len(os.listdir(tmp_path)) == 2
        checkpoints.save(1, state(1.0))
    assert sorted(os.listdir(tmp_path)) == [others[1].name, "step-000000001"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB. Where none can be mounted (not root), the test's own folder, whose writes are counted."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder], capture_output=True)
    try:
        yield folder
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_told_and_the_run_goes_on_after_space_is_freed(
        small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    big = {"x": torch.zeros(60_000)}  # 240 kB: three do not fit beside the ballast
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(400_000))
    with monkeypatch.context() as counted:
        if not os.path.ismount(small_disk):
            counted.setattr(checkpoint_files, "disk", Refusing(errno.ENOSPC, ("write",), 600_000))
        with pytest.raises(CheckpointError, match="no space is left on its file system"), \
                Checkpointer(small_disk) as checkpoints:
            for step in range(1, 4):
                checkpoints.save(step, big)
    assert checkpoint_files.names(small_disk) == ["step-000000001", "step-000000002"]
    assert len(os.listdir(small_disk)) == 3
    ballast.unlink()
    with Checkpointer(small_disk) as checkpoints:
        found = checkpoints.load_latest({"x": torch.ones(60_000)})
        assert found is not None and found.step == 2
        checkpoints.save(3, big)
    assert checkpoint_files.names(small_disk)[-1] == "step-000000003"
