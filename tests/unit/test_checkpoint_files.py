"""utils/checkpoint on disk: whatever happens to it, an intact checkpoint stays and no torn one is read."""
from __future__ import annotations

import errno
import json
import logging
import math
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

from utils import process
from utils.checkpoint import Checkpointer, CheckpointError, disk, owner, storage
from utils.checkpoint.checksums import BLOCK_BYTES, COLUMN_WEIGHTS, ROW_WEIGHTS, checksum
from utils.checkpoint.format import MANIFEST, rank_file_name

ROOT = Path(__file__).resolve().parents[2]
FILE = rank_file_name(0)


@pytest.fixture(autouse=True)
def log_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("ddpkit"), "propagate", True)


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


def test_a_file_follows_the_rules_of_safetensors(tmp_path: Path) -> None:
    more = {"complex": torch.zeros(3, dtype=torch.complex64), "flag": torch.tensor(True)}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(7, {**state(2.5), **more})
    raw = (tmp_path / "step-000000007" / FILE).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:8 + length])
    assert all(type(text) is str for text in header.pop("__metadata__").values())
    sizes, end = {"F32": 4, "I64": 8, "BOOL": 1, "U8": 1}, 0
    for field in header.values():  # in the order of the data, without gaps
        start, next_end = field["data_offsets"]
        size = sizes[field["dtype"]]
        assert start == end and next_end - start == math.prod(field["shape"]) * size
        assert (8 + length + start) % size == 0
        end = next_end
    assert end == len(raw) - 8 - length
    assert set(header) == {"weights", "counts", "complex", "flag"}


# The checksum ---------------------------------------------------------------------------------

def test_the_checksum_is_the_same_in_all_releases() -> None:
    """Constants, because later releases of torch and of the kit read today's checkpoints."""
    words = torch.arange(1 << 20, dtype=torch.int32).view(torch.uint8)
    for block, expected in (
            (torch.zeros(1, dtype=torch.uint8), "58e23afbc10e51114427bf6065612751"),
            (words, "a2e8430fd8c2de6733dfadc4509d692d"),
            ((torch.arange(10_001) % 251).to(torch.uint8), "35c78dae7e12144fb99fd8f993a2f6f5")):
        assert checksum(block) == expected
    for weights in (ROW_WEIGHTS.tolist(), COLUMN_WEIGHTS.tolist()):
        assert all(weight & 1 for weight in weights) and len(set(weights)) == len(weights)


def test_small_changes_change_the_checksum() -> None:
    rng, block = random.Random(0), torch.randint(0, 256, (BLOCK_BYTES,), dtype=torch.uint8)
    expected = checksum(block)
    for trial in range(200):
        changed = block.clone()
        if trial % 2:  # any change within 4096 bytes
            start, length = rng.randrange(BLOCK_BYTES - 4096), rng.randint(1, 4096)
            random_bytes = torch.randint(0, 256, (length,), dtype=torch.uint8)
            changed[start:start + length] = random_bytes
            changed[start] = block[start] ^ 128
        else:  # up to three top bits of words in one row or one column: one sum alone misses them
            first = rng.randrange(BLOCK_BYTES // 8 // 4) * 8 + 7
            for step in (0, 4096, 4096 + 8 * rng.randint(1, 400))[:rng.randint(1, 3)]:
                changed[first + step] ^= 128
        assert checksum(changed) != expected
    assert checksum(block) == expected


@pytest.mark.parametrize("change", [
    lambda block: block.view(-1, 4096).flip(0).flatten(), lambda block: block.roll(4096),
    lambda block: block.roll(1), lambda block: block.view(2, -1).flip(0).flatten(),
    lambda block: block * (torch.arange(BLOCK_BYTES) < BLOCK_BYTES // 2),
    lambda block: block ^ 128, lambda block: block[:-4096],
], ids=["pages reversed", "moved by a page", "moved by a byte", "halves swapped", "half lost",
        "all top bits", "cut"])
def test_large_changes_change_the_checksum(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    block = torch.randint(0, 256, (BLOCK_BYTES,), dtype=torch.uint8)
    assert checksum(change(block).contiguous()) != checksum(block)


# Damage ---------------------------------------------------------------------------------------

def test_a_flipped_bit_or_a_cut_file_is_damage(
        tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 1, 2)
    newest, rng = tmp_path / "step-000000002", random.Random(0)
    for trial in range(100):
        file = newest / rng.choice([MANIFEST, FILE])
        intact = file.read_bytes()
        where = rng.randrange(len(intact))
        damaged = intact[:where]
        if trial % 2:
            damaged += bytes([intact[where] ^ 1 << rng.randrange(8)]) + intact[where + 1:]
        file.write_bytes(damaged)
        caplog.clear()
        assert load(tmp_path) == 1, f"{file.name}, byte {where} of {len(intact)}"
        (quarantined,) = tmp_path.glob("*.damaged")
        assert all(text in caplog.text for text in (str(newest), file.name, quarantined.name))
        assert (quarantined / file.name).read_bytes() == damaged
        quarantined.rename(newest)
        file.write_bytes(intact)
    assert load(tmp_path) == 2


def test_swapped_zeroed_and_surplus_bytes_are_damage(tmp_path: Path) -> None:
    pattern = {"x": torch.arange(65536)}
    with Checkpointer(tmp_path, keep=4) as checkpoints:
        for step in (1, 2, 3, 4):
            checkpoints.save(step, pattern)
    second, third, fourth = (tmp_path / f"step-00000000{step}" / FILE for step in (2, 3, 4))
    raw = third.read_bytes()
    fourth.write_bytes(raw + bytes(8))
    third.write_bytes(raw[:-8192] + raw[-4096:] + raw[-8192:-4096])
    second.write_bytes(raw[:-4096] + bytes(4096))
    with Checkpointer(tmp_path) as checkpoints:
        found = checkpoints.load_latest(pattern)
    assert found is not None and found.step == 1
    assert len(list(tmp_path.glob("*.damaged"))) == 3


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def make_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


@pytest.mark.parametrize("name", [MANIFEST, FILE])
@pytest.mark.parametrize("replace, words", [
    (Path.unlink, "{} is missing"), (make_pipe, "expected a file"), (make_link, "expected a file")])
def test_a_missing_file_a_link_and_a_pipe_are_damage(
        replace: Callable[[Path], None], words: str, name: str, tmp_path: Path,
        caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 1, 2)
    replace(tmp_path / "step-000000002" / name)
    assert load(tmp_path) == 1
    assert words.format(name) in caplog.text


def test_none_is_loaded_when_all_are_damaged(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "step-000000001" / MANIFEST).write_bytes(b"")
    assert load(tmp_path) == 0


# Power cuts -----------------------------------------------------------------------------------

class RecordingDisk:
    """The real disk, with a record of what it would still hold after a power cut.

    A file keeps what it held when it was last synced; what was written since may be there in part
    or not at all. A folder keeps the entries that it had when it was last synced; of the changes
    since, any first few may be there.
    """

    def __init__(self, top: Path, after_each_call: Callable[[RecordingDisk], None]) -> None:
        self.top, self.after_each_call = top, after_each_call
        self.root: dict[str, Any] = {"synced": {}, "changes": []}
        self.open_files: dict[int, dict[str, Any]] = {}

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
        self.after_each_call(self)

    def mkdir(self, path: Path) -> None:
        os.mkdir(path)
        node: dict[str, Any] = {"synced": {}, "changes": []}
        self.change(path, lambda entries: entries.update({path.name: node}))

    def open(self, path: Path, flags: int, mode: int = 0o777) -> int:
        file = os.open(path, flags, mode)
        if flags & os.O_CREAT:
            node = {"durable": b"", "written": b""}
            self.change(path, lambda entries: entries.update({path.name: node}))
        self.open_files[file] = self.node(path)
        return file

    def write(self, file: int, data: memoryview) -> int:
        data = data[:max(1, len(data) // 2)] if len(data) > 600 else data  # a system may do so
        count = os.write(file, data)
        self.open_files[file]["written"] += bytes(data[:count])
        self.after_each_call(self)
        return count

    def fsync(self, file: int) -> None:
        os.fsync(file)
        node = self.open_files[file]
        if "durable" in node:
            node["durable"] = node["written"]
        else:
            node["synced"], node["changes"] = self.entries(node), []
        self.after_each_call(self)

    def close(self, file: int) -> None:
        os.close(file)
        del self.open_files[file]

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)
        self.change(old, lambda entries: entries.update({new.name: entries.pop(old.name)}))

    def unlink(self, path: Path) -> None:
        os.unlink(path)
        self.change(path, lambda entries: entries.pop(path.name))

    def rmdir(self, path: Path) -> None:
        os.rmdir(path)
        self.change(path, lambda entries: entries.pop(path.name))

    def restart(self, target: Path, rng: random.Random, kind: str) -> None:
        """Write to `target` what may be on the disk after a power cut now.

        kind: of what was not synced, "nothing" is there, "names" alone, or a "mixed" part.
        """
        def put(node: dict[str, Any], path: Path) -> None:
            if "durable" in node:
                lost = node["written"][len(node["durable"]):]
                kept = {"nothing": b"", "names": bytes(len(lost)),
                        "mixed": lost[:rng.randint(0, len(lost))]}[kind]
                path.write_bytes(node["durable"] + kept)
                return
            path.mkdir()
            some = rng.randint(0, len(node["changes"]))
            changes = {"nothing": 0, "names": None, "mixed": some}[kind]
            for name, inner in self.entries(node, changes).items():
                put(inner, path / name)
        put(self.root, target)


def test_a_power_cut_at_any_moment_leaves_an_intact_checkpoint(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, rng = tmp_path / "checkpoints", random.Random(0)
    folder.mkdir()
    seen: list[tuple[int, int]] = []  # the last step that was safe, the step that was found
    safe = 0

    def cut_power(recording: RecordingDisk) -> None:
        with monkeypatch.context() as real:
            real.setattr(disk, "system", os)
            for number, kind in enumerate(["nothing", "names", "mixed", "mixed"]):
                restarted = tmp_path / f"after-{len(seen)}-{number}"
                recording.restart(restarted, rng, kind)
                found = load(restarted)
                assert found in (safe, safe + 1)
                assert all(name.startswith("step-") and not name.endswith(".damaged")
                           for name in os.listdir(restarted)), "nothing is left or damaged"
                seen.append((safe, found))

    monkeypatch.setattr(disk, "system", RecordingDisk(folder, cut_power))
    with Checkpointer(folder, keep=1) as checkpoints:  # each save deletes the only other one
        for step in (1, 2, 3):
            checkpoints.save(step, state(float(step)))
            checkpoints.wait()
            safe = step
    assert len(seen) > 3 * 4 * 15
    for step in (0, 1, 2):
        assert {(step, step), (step, step + 1)} <= set(seen)


# Disks that refuse ----------------------------------------------------------------------------

class RefusingDisk:
    """The real disk until `room` bytes are written; then every call named fails."""

    def __init__(self, number: int, *calls: str, room: int = 0) -> None:
        self.number, self.calls, self.room = number, calls, room

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)

        def call(*args: Any) -> Any:
            if name == "write":
                self.room -= len(args[1])
            if self.room < 0 or name != "write":
                raise OSError(self.number, os.strerror(self.number))
            return real(*args)
        return call if name in self.calls else real


@pytest.mark.parametrize("number, call, room, words", [
    (errno.ENOSPC, "write", 0.5, "no space is left"),
    (errno.ENOSPC, "write", 0.99, "no space is left"),
    (errno.ENOSPC, "write", 1.001, "no space is left"),  # for the manifest
    (errno.EDQUOT, "fsync", 0, "quota is used up"), (errno.EROFS, "mkdir", 0, "read-only"),
    (errno.EACCES, "mkdir", 0, "may not write there"), (errno.EIO, "fsync", 0, "Input/output error"),
    (errno.EACCES, "rename", 0, "may not write there"), (errno.ENOENT, "open", 0, "another job"),
])
def test_a_refusing_disk_is_explained_and_costs_one_save(
        number: int, call: str, room: float, words: str, tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpointer(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state(1.0))
        checkpoints.wait()
        size = (tmp_path / "step-000000001" / FILE).stat().st_size
        with monkeypatch.context() as refusing:
            refusing.setattr(disk, "system", RefusingDisk(number, call, room=int(room * size)))
            checkpoints.save(2, state(2.0))
            with pytest.raises(CheckpointError, match=words) as error:
                checkpoints.wait()
            assert checkpoints.failure is error.value
            checkpoints.save(3, state(3.0))  # fails too, and raises nothing
            with pytest.raises(CheckpointError, match="cannot save step 4"):
                checkpoints.save_and_wait(4, state(4.0), retry_seconds=0)
        assert all(text in str(error.value) for text in ("step 2", str(tmp_path), "rank 0 on"))
        assert os.listdir(tmp_path) == ["step-000000001"], "the temporary folder is gone"
        checkpoints.save(5, state(5.0))
        checkpoints.wait()
        assert checkpoints.failure is None
    assert load(tmp_path) == 5


def test_a_failed_save_does_not_prevent_the_next_one(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = RefusingDisk(errno.ENOSPC, "write", room=100)
    monkeypatch.setattr(disk, "system", refusing)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(2, state(2.0))
        while checkpoints.failure is None:
            time.sleep(0.01)
        refusing.room = 1 << 30
        checkpoints.save(3, state(3.0))
    assert os.listdir(tmp_path) == ["step-000000003"]


def test_the_last_save_is_tried_again_until_there_is_room(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = RefusingDisk(errno.ENOSPC, "write", room=100)
    monkeypatch.setattr(disk, "system", refusing)
    with Checkpointer(tmp_path) as checkpoints:
        threading.Timer(1.0, setattr, (refusing, "room", 1 << 30)).start()
        checkpoints.save_and_wait(1, state(1.0))
        assert checkpoints.failure is None
    assert load(tmp_path) == 1 and os.listdir(tmp_path) == ["step-000000001"]


def test_what_a_failed_removal_left_is_removed_by_the_next_save(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        with monkeypatch.context() as refusing:
            refusing.setattr(disk, "system", RefusingDisk(errno.EIO, "fsync", "unlink", "rmdir"))
            checkpoints.save(1, state(1.0))
            with pytest.raises(CheckpointError):
                checkpoints.wait()
        assert len(os.listdir(tmp_path)) == 1
        checkpoints.save(2, state(2.0))
    assert os.listdir(tmp_path) == ["step-000000002"]


def test_a_folder_removed_during_training_is_made_again(
        tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "checkpoints"
    with Checkpointer(folder) as checkpoints:
        checkpoints.save(1, state(1.0))
        checkpoints.wait()
        shutil.rmtree(folder)
        checkpoints.save(2, state(2.0))
    assert load(folder) == 2
    assert "was removed during the training" in caplog.text


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB; without root an ordinary folder, whose writes the test counts."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)]
    mounted = subprocess.run(mount, capture_output=True)
    try:
        yield folder
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", folder], check=True)


def test_saves_continue_after_space_is_freed(
        small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    big = {"x": torch.zeros(60_000)}  # 240 kB: there is no room for three and the ballast
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(400_000))
    with monkeypatch.context() as counted:
        if not os.path.ismount(small_disk):
            counted.setattr(disk, "system", RefusingDisk(errno.ENOSPC, "write", room=600_000))
        with pytest.raises(CheckpointError, match="no space is left on its file system"), \
                Checkpointer(small_disk) as checkpoints:
            for step in range(1, 4):
                checkpoints.save(step, big)
    assert storage.checkpoint_names(small_disk) == ["step-000000001", "step-000000002"]
    assert len(os.listdir(small_disk)) == 3
    ballast.unlink()
    with Checkpointer(small_disk) as checkpoints:
        found = checkpoints.load_latest({"x": torch.ones(60_000)})
        assert found is not None and found.step == 2
        checkpoints.save(3, big)
    assert storage.checkpoint_names(small_disk)[-1] == "step-000000003"


# Links and folders ----------------------------------------------------------------------------

def test_deleting_a_link_leaves_its_target(tmp_path: Path) -> None:
    folder, archive = tmp_path / "checkpoints", tmp_path / "archive"
    save(archive, 1)
    folder.mkdir()
    (folder / "step-000000001").symlink_to(archive / "step-000000001")
    (folder / ".saving-0123").symlink_to(archive)
    assert load(folder) == 1, "a step may be a link"
    save(folder, 2, keep=1)
    assert load(archive) == 1 and load(folder) == 2
    assert storage.checkpoint_names(folder) == ["step-000000002"]


def test_deleting_a_checkpoint_follows_no_link_in_it(tmp_path: Path) -> None:
    target, folder = tmp_path / "mine", tmp_path / "checkpoints"
    (target / "inner").mkdir(parents=True)
    (target / "inner" / "file").write_text("x")
    save(folder, 1)
    step = folder / "step-000000001"
    (step / "notes" / "deep").mkdir(parents=True)
    (step / "notes" / "text").write_text("x")
    for name, leads_to in (("link", target), ("dangling", tmp_path / "nowhere"),
                           ("notes/deep/link", target / "inner")):
        (step / name).symlink_to(leads_to)
    save(folder, 2, keep=1)
    assert os.listdir(folder) == ["step-000000002"]
    assert (target / "inner" / "file").read_text() == "x"


def test_quarantining_a_link_leaves_its_target(tmp_path: Path) -> None:
    folder, archive = tmp_path / "checkpoints", tmp_path / "archive"
    save(archive, 2)
    (archive / "step-000000002" / MANIFEST).write_text("")
    save(folder, 1)
    (folder / "step-000000002").symlink_to(archive / "step-000000002")
    (folder / "step-000000002.damaged").symlink_to(tmp_path / "nowhere")
    assert load(folder) == 1
    assert os.listdir(archive) == ["step-000000002"]
    assert all((folder / f"step-000000002.damaged{end}").is_symlink() for end in ("", "-2"))


def test_the_target_of_a_kept_link_is_kept(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=1, keep_every=10) as checkpoints:
        checkpoints.save(3, state(3.0))
        checkpoints.wait()
        (tmp_path / "step-000000010").symlink_to("step-000000003")
        checkpoints.save(11, state(11.0))
    assert list(map(storage.step_of, storage.checkpoint_names(tmp_path))) == [3, 10, 11]


def test_the_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "checkpoints").symlink_to(tmp_path / "scratch")
    save(tmp_path / "checkpoints", 1, 2, keep=1)
    assert os.listdir(tmp_path / "scratch") == ["step-000000002"]
    assert (tmp_path / "checkpoints").is_symlink()


# Other processes ------------------------------------------------------------------------------

def test_interrupted_saves_are_removed_and_nothing_else(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    dead = owner.owner().replace(f".{os.getpid()}.", f".{ended.pid}.")
    for name in (f".saving-{dead}.0123", f".saving-{owner.owner()}.0123", ".deleting-0123", ".mine",
                 "step-1", "notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    assert load(tmp_path) == 0
    assert sorted(os.listdir(tmp_path)) == [".mine", "notes", "step-1"]


def test_a_running_save_of_another_process_is_left_alone(tmp_path: Path) -> None:
    code = ("import sys; from pathlib import Path; from utils.checkpoint import storage\n"
            "print(storage.begin(Path(sys.argv[1])), flush=True); sys.stdin.read()")
    with subprocess.Popen([sys.executable, "-c", code, tmp_path], cwd=ROOT, text=True,
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdin and writer.stdout
        temporary = Path(writer.stdout.readline().strip())
        assert load(tmp_path) == 0
        save(tmp_path, 1)
        assert temporary.is_dir()
        writer.stdin.close()
        writer.wait(30)
    save(tmp_path, 2)
    assert not temporary.exists()


def test_a_save_on_another_host_is_left_alone_until_it_is_old(tmp_path: Path) -> None:
    others = [tmp_path / f".saving-elsewhere.12ab34cd.4026531836.7.99.{number:016x}"
              for number in range(2)]
    for other in others:
        other.mkdir()
        (other / FILE).write_text("x")
    for path in (others[0] / FILE, others[0]):
        os.utime(path, (1, 1))
    assert load(tmp_path) == 0 and len(os.listdir(tmp_path)) == 2
    save(tmp_path, 1)
    assert sorted(os.listdir(tmp_path)) == [others[1].name, "step-000000001"]


def test_a_save_stays_where_its_process_cannot_be_looked_up(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host, boot, namespace, _, start = owner.owner().split(".")
    hidden = f"{host}.{boot}.{namespace}.{1 << 30}.{start}"
    assert owner.is_running(hidden) is False

    def kill(pid: int, number: int) -> None:
        raise PermissionError

    with monkeypatch.context() as other_user:  # whose process /proc hides
        other_user.setattr(os, "kill", kill)
        assert owner.is_running(hidden) is None

    monkeypatch.setattr(process, "boot_id", str)  # as without /proc
    other = owner.owner().replace(f".{os.getpid()}.", f".{os.getppid()}.")
    (tmp_path / f".saving-{other}.0123").mkdir()
    assert load(tmp_path) == 0
    assert os.listdir(tmp_path) == [f".saving-{other}.0123"]
