"""utils/checkpoint on disk: whatever happens to it, an intact checkpoint stays and no torn one is read."""
from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cluster.hosts import killed_at_end
from tests.unit.checkpoint_states import read_safetensors
from utils import process
from utils.checkpoint import Checkpointer, CheckpointError, disk, owner
from utils.checkpoint.checksums import BLOCK_BYTES, COLUMN_WEIGHTS, ROW_WEIGHTS, checksum
from utils.checkpoint.format import MANIFEST, rank_file_name

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


def test_a_file_follows_the_rules_of_safetensors(tmp_path: Path) -> None:
    more = {"complex": torch.zeros(3, dtype=torch.complex64), "flag": torch.tensor(True)}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(7, {**state(2.5), **more})
    metadata, arrays = read_safetensors(tmp_path / "step-000000007" / FILE)
    assert all(type(text) is str for text in metadata.values())
    assert {name: (array.dtype.kind, array.shape) for name, array in arrays.items()} == {
        "weights": ("f", (300,)), "counts": ("i", (40,)), "complex": ("u", (24,)), "flag": ("b", ())}
    assert arrays["weights"].tolist() == [2.5] * 300


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


def changed_blocks(block: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    rng, pages = random.Random(0), block.view(-1, 4096)
    yield "pages reversed", pages.flip(0).flatten()
    yield "two pages swapped", torch.cat([pages[1], pages[0], *pages[2:]])
    yield "moved by a page", block.roll(4096)
    yield "moved by a byte", block.roll(1)
    yield "halves swapped", block.view(2, -1).flip(0).flatten()
    yield "half lost", block * (torch.arange(BLOCK_BYTES) < BLOCK_BYTES // 2)
    yield "all top bits", block ^ 128
    yield "cut", block[:-4096]
    for trial in range(100):
        changed = block.clone()
        start, length = rng.randrange(BLOCK_BYTES - 4096), rng.randint(1, 4096)
        changed[start:start + length] = torch.randint(0, 256, (length,), dtype=torch.uint8)
        changed[start] = block[start] ^ 128
        yield f"within 4096 bytes, {trial}", changed

        # up to three top bits of words in one row or one column: one sum alone misses them
        changed = block.clone()
        first = rng.randrange(BLOCK_BYTES // 8 // 4) * 8 + 7
        for step in (0, 4096, 4096 + 8 * rng.randint(1, 400))[:rng.randint(1, 3)]:
            changed[first + step] ^= 128
        yield f"top bits, {trial}", changed


def test_every_change_changes_the_checksum() -> None:
    block = torch.randint(0, 256, (BLOCK_BYTES,), dtype=torch.uint8)
    expected = checksum(block)
    assert [name for name, changed in changed_blocks(block) if checksum(changed) == expected] == []


def test_a_flipped_bit_or_a_cut_file_is_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 1, 2)
    newest, rng = tmp_path / "step-000000002", random.Random(0)
    for trial in range(60):
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


def make_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("name, replace, words", [
    (FILE, Path.unlink, f"{FILE} is missing"), (MANIFEST, Path.unlink, f"{MANIFEST} is missing"),
    (FILE, make_link, "expected a file"), (MANIFEST, make_pipe, "expected a file")])
def test_a_missing_file_a_link_and_a_pipe_are_damage(
        name: str, replace: Callable[[Path], None], words: str, tmp_path: Path,
        caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 1, 2)
    replace(tmp_path / "step-000000002" / name)
    assert load(tmp_path) == 1
    assert words in caplog.text
    (tmp_path / "step-000000001" / MANIFEST).write_bytes(b"")
    assert load(tmp_path) == 0, "all are damaged"


class RecordingDisk:
    """The real disk, with a list of the calls that have changed it."""

    def __init__(self, after_each_call: Callable[[list[Any]], None]) -> None:
        self.after_each_call = after_each_call
        self.calls: list[tuple[str, Any, Any]] = []  # name, arguments, result

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            if name == "write":
                file, data = args
                args = file, bytes(data[:len(data) // 2] if len(data) > 600 else data)  # a system may do so
            result = getattr(os, name)(*args)
            self.calls.append((name, args, result))
            if name != "close":
                self.after_each_call(self.calls)
            return result
        return call


def after_power_cut(calls: list[Any], top: Path, target: Path, names: bool, data: bool) -> None:
    """Write to `target` what may be in `top` after these calls and a power cut.

    A file keeps what it held, and a folder the entries that it had, when they were last synced. names, data: whether
    later changes of folders, and later data of files, are there as well. After a kill both are.
    """
    def new_folder() -> dict[str, Any]:
        return {"synced": {}, "changes": []}

    def entries(folder: dict[str, Any], changes: int | None = None) -> dict[str, Any]:
        found = dict(folder["synced"])
        for old, new, node in folder["changes"][:changes]:
            found.pop(old, None)
            found |= {new: node} if new else {}
        return found

    def find(path: Path) -> dict[str, Any]:
        return entries(find(path.parent))[path.name] if path != top else root

    root, opened = new_folder(), {}
    for name, args, result in calls:
        changes = find(args[0].parent)["changes"] if isinstance(args[0], Path) and args[0] != top else []
        if name == "mkdir":
            changes.append(("", args[0].name, new_folder()))
        elif name == "open":
            if args[1] & os.O_CREAT:
                changes.append(("", args[0].name, {"durable": b"", "written": b""}))
            opened[result] = find(args[0])
        elif name == "write":
            opened[args[0]]["written"] += args[1]
        elif name == "rename":
            changes.append((args[0].name, args[1].name, find(args[0])))
        elif name in ("unlink", "rmdir"):
            changes.append((args[0].name, "", None))
        elif name == "fsync" and "durable" in opened[args[0]]:
            opened[args[0]]["durable"] = opened[args[0]]["written"]
        elif name == "fsync":
            opened[args[0]].update(synced=entries(opened[args[0]]), changes=[])

    def put(node: dict[str, Any], path: Path) -> None:
        if "durable" in node:
            path.write_bytes(node["written"] if data else node["durable"].ljust(len(node["written"]) * names, b"\0"))
            return
        path.mkdir()
        for name, inner in entries(node, None if names else 0).items():
            put(inner, path / name)

    put(root, target)


def test_a_power_cut_or_a_kill_at_any_moment_leaves_an_intact_checkpoint(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    seen: list[tuple[int, int]] = []  # the last step that was safe, the step that was found
    safe = 0

    def stop_here(calls: list[Any]) -> None:
        with monkeypatch.context() as real:
            real.setattr(disk, "system", os)
            for names, data in itertools.product((False, True), repeat=2):
                restarted = tmp_path / f"after-{len(seen)}"
                after_power_cut(calls, folder, restarted, names, data)
                found = load(restarted)
                assert found in (safe, safe + 1)
                assert all(name.startswith("step-") and not name.endswith(".damaged")
                           for name in os.listdir(restarted)), "nothing is left or damaged"
                seen.append((safe, found))

    monkeypatch.setattr(disk, "system", RecordingDisk(stop_here))
    with Checkpointer(folder, keep=1) as checkpoints:  # each save deletes the only other one
        for step in (1, 2, 3):
            checkpoints.save(step, state(float(step)))
            checkpoints.wait()
            safe = step
    assert len(seen) > 3 * 4 * 15
    for step in (0, 1, 2):
        assert {(step, step), (step, step + 1)} <= set(seen)


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


@pytest.mark.parametrize("number, calls, room, words", [
    (errno.ENOSPC, ["write"], 0.5, "no space is left"),
    (errno.ENOSPC, ["write"], 1.001, "no space is left"),  # for the manifest
    (errno.EDQUOT, ["fsync"], 0, "quota is used up"), (errno.EROFS, ["mkdir"], 0, "read-only"),
    (errno.EIO, ["fsync", "unlink", "rmdir"], 0, "Input/output error"),
    (errno.EACCES, ["rename"], 0, "may not write there"), (errno.ENOENT, ["open"], 0, "another job"),
])
def test_a_refusing_disk_is_explained_and_costs_one_save(
        number: int, calls: list[str], room: float, words: str, tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpointer(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state(1.0))
        checkpoints.wait()
        size = (tmp_path / "step-000000001" / FILE).stat().st_size
        with monkeypatch.context() as refusing:
            refusing.setattr(disk, "system", RefusingDisk(number, *calls, room=int(room * size)))
            checkpoints.save(2, state(2.0))
            with pytest.raises(CheckpointError, match=words) as error:
                checkpoints.wait()
            assert checkpoints.failure is error.value
            checkpoints.save(3, state(3.0))  # fails too, and raises nothing
            with pytest.raises(CheckpointError, match="cannot save step 4"):
                checkpoints.save_and_wait(4, state(4.0), retry_seconds=0)
        assert all(text in str(error.value) for text in ("step 2", str(tmp_path), "rank 0 on"))
        assert "unlink" in calls or os.listdir(tmp_path) == ["step-000000001"], "the temporary folder is gone"
        checkpoints.save(5, state(5.0))
        checkpoints.wait()
        assert checkpoints.failure is None
    assert os.listdir(tmp_path) == ["step-000000005"] and load(tmp_path) == 5


def test_the_last_save_is_tried_again_until_there_is_room(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = RefusingDisk(errno.ENOSPC, "write", room=100)
    monkeypatch.setattr(disk, "system", refusing)
    with Checkpointer(tmp_path) as checkpoints:
        threading.Timer(1.0, setattr, (refusing, "room", 1 << 30)).start()
        checkpoints.save_and_wait(1, state(1.0))
        assert checkpoints.failure is None
    assert load(tmp_path) == 1 and os.listdir(tmp_path) == ["step-000000001"]


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


def test_links_are_deleted_and_their_targets_stay(tmp_path: Path) -> None:
    archive, scratch, folder = tmp_path / "archive", tmp_path / "scratch", tmp_path / "checkpoints"
    save(archive, 1)
    scratch.mkdir()
    folder.symlink_to(scratch)
    (folder / "step-000000001").symlink_to(archive / "step-000000001")
    (folder / ".deleting-0123").symlink_to(archive)
    assert load(folder) == 1, "a step may be a link"

    save(folder, 2)
    for name, leads_to in (("link", archive), ("dangling", tmp_path / "nowhere"), ("notes/deep/link", archive)):
        link = folder / "step-000000002" / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(leads_to)
    save(folder, 3, keep=1)
    assert os.listdir(scratch) == ["step-000000003"] and folder.is_symlink()
    assert load(archive) == 1


def test_quarantined_links_and_targets_of_kept_links_stay(tmp_path: Path) -> None:
    folder, archive = tmp_path / "checkpoints", tmp_path / "archive"
    save(archive, 20)
    (archive / "step-000000020" / MANIFEST).write_text("")
    save(folder, 3)
    (folder / "step-000000010").symlink_to("step-000000003")
    (folder / "step-000000020").symlink_to(archive / "step-000000020")
    (folder / "step-000000020.damaged").symlink_to(tmp_path / "nowhere")
    with Checkpointer(folder, keep=1, keep_every=10) as checkpoints:
        with pytest.raises(CheckpointError, match="step is 3; expected 10"):
            checkpoints.load_latest(state(0.0))
        checkpoints.save(11, state(11.0))
    assert os.listdir(archive) == ["step-000000020"]
    assert sorted(os.listdir(folder)) == ["step-000000003", "step-000000010", "step-000000011",
                                          "step-000000020.damaged", "step-000000020.damaged-2"]


def test_interrupted_saves_are_removed_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fields = dict(zip(("host", "boot", "namespace", "pid", "start"), owner.owner().split("."), strict=True))

    def saving(**changes: Any) -> str:
        return f".saving-{'.'.join(map(str, {**fields, **changes}.values()))}.0123"

    ended = subprocess.Popen(["true"])
    ended.wait()
    with killed_at_end(subprocess.Popen(["sleep", "60"], text=True, start_new_session=True)) as running:
        of_running = saving(pid=running.pid, start=process.start_time(running.pid))
        old = saving(host="elsewhere")
        kept = [of_running, old, saving(host="there"), saving(namespace="1"), ".mine", "step-1", "notes"]
        removed = [saving(), saving(pid=ended.pid), saving(pid=running.pid), saving(boot="00000000"), ".deleting-0123"]
        for name in (*kept, *removed):
            (tmp_path / name).mkdir()
            (tmp_path / name / "file").write_text("x")
        for path in (tmp_path / old / "file", tmp_path / old):
            os.utime(path, (1, 1))
        assert load(tmp_path) == 0
        assert sorted(os.listdir(tmp_path)) == sorted(kept)

        save(tmp_path, 1)  # the time of its own folder shows that another one is old
        kept[kept.index(old)] = "step-000000001"
        assert sorted(os.listdir(tmp_path)) == sorted(kept)
        assert "another process is saving" in caplog.text
    save(tmp_path, 2)
    assert of_running not in os.listdir(tmp_path)


def test_a_process_that_cannot_be_looked_up_may_be_running(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = owner.owner().replace(f".{os.getpid()}.", f".{1 << 30}.")
    assert owner.is_running(hidden) is False

    def kill(pid: int, number: int) -> None:
        raise PermissionError

    with monkeypatch.context() as other_user:  # whose process /proc hides
        other_user.setattr(os, "kill", kill)
        assert owner.is_running(hidden) is None

    monkeypatch.setattr(process, "boot_id", str)  # as without /proc
    assert owner.is_running(owner.owner()) is None
