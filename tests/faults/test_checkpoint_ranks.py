"""utils/checkpoint on two ranks: one checkpoint of both; what goes wrong on one is known on both.

This file is also the program of the ranks: each runs the scenarios in their order, those of a model in each of FORMS.
"""
from __future__ import annotations

import contextlib
import copy
import errno
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel

from tests.faults.programs import run_ranks
from tests.unit.checkpoint_states import ChangedDisk, slow_disk
from utils import Distributed, setup_distributed
from utils.checkpoint import Checkpointer, CheckpointError, PerRank, disk, list_steps
from utils.checkpoint import snapshot as checkpoint_snapshot
from utils.checkpoint.folder import read_manifest
from utils.checkpoint.format import rank_file_name
from utils.checkpoint.rank_file import read_tensors

TIMEOUT = 60.0
LARGE_BYTES = 20_000_000
LOG = BufferingHandler(10_000)


def with_activation_checkpointing(model: nn.Module) -> nn.Module:
    for name in ("linear", "norm"):
        setattr(model, name, checkpoint_wrapper(model.get_submodule(name)))
    return DDP(model)


FORMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": DDP,
    "compiled inside": lambda model: DDP(torch.compile(model, backend="aot_eager")),
    "compiled outside": lambda model: torch.compile(DDP(model), backend="aot_eager"),
    "activation checkpointing": with_activation_checkpointing,
}
wrap = DDP  # the form of this run


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 5), nn.BatchNorm1d(5)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("mask", torch.zeros((1 << 18) + 1))  # too large for one of each rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))  # type: ignore[no-any-return]


def logged(words: str) -> int:
    """In how many messages of this rank these words are."""
    return sum(words in record.getMessage() for record in LOG.buffer)


def gather(value: Any) -> list[Any]:
    values: list[Any] = [None, None]
    torch.distributed.all_gather_object(values, value)
    return values


def state_of(rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = wrap(Model())
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, lr=0.1)
    model(torch.rand(8, 6) + rank).square().sum().backward()  # the running means of the norm differ between the ranks
    optimizer.step()
    mine = PerRank({"rank": rank, "hidden": torch.full((3,), float(rank))})
    return {"model": model, "optimizer": optimizer, "epoch": 3, "mine": mine}


def error_of(action: Any, *args: Any) -> str:
    with pytest.raises(CheckpointError) as error:
        action(*args)
    return str(error.value)


@torch.no_grad()
def fill(value: int, tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.fill_(value)


def common_error(checkpoints: Checkpointer) -> str:
    """The error of a save, which is the same on both ranks."""
    error, = set(gather(error_of(checkpoints.wait)))
    return str(error)


def tensors_by_rank(checkpoint: Path) -> list[dict[str, torch.Tensor]]:
    return [read_tensors(checkpoint, entry) for entry in read_manifest(checkpoint)["files"]]


def each_rank_gets_back_what_differs(dist: Distributed, checkpoints: Checkpointer) -> None:
    state, other = state_of(dist.rank), state_of(1 - dist.rank)
    torch.manual_seed(dist.rank)
    with Checkpointer(f"{checkpoints.folder} own", timeout=TIMEOUT) as apart:
        apart.save_and_wait(1, state)
        expected = torch.rand(3)
        apart.load_latest(other)
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(other["mine"].value["hidden"], state["mine"].value["hidden"])


def rank_1_writes_what_ddp_keeps_equal(dist: Distributed, checkpoints: Checkpointer) -> None:
    """All other parameters are restored as rank 0 had them, and small buffers as each rank had them."""
    groups = [torch.distributed.new_group([rank]) for rank in range(2)]

    def ignoring(model: nn.Module) -> DDP:
        DDP._set_params_and_buffers_to_ignore_for_model(model, ["linear.weight"])
        return DDP(model)

    def after(change: Callable[[nn.Module, DDP], object]) -> Callable[[nn.Module], DDP]:
        def form(model: nn.Module) -> DDP:
            ddp = DDP(model)
            change(model, ddp)
            return ddp
        return form

    shared: list[Callable[[nn.Module], Any]] = [
        *FORMS.values(), ignoring, lambda model: nn.ModuleDict({"net": DDP(model)})]
    of_rank_0: list[Callable[[nn.Module], Any]] = [
        after(lambda model, _: model.get_submodule("frozen").requires_grad_(True)),
        after(lambda _, ddp: ddp.register_comm_hook(None, fp16_compress_hook)),
        lambda model: DDP(model).module, lambda model: wrap(model).state_dict(),
        lambda model: copy.deepcopy(wrap(model)), lambda model: DDP(model, process_group=groups[dist.rank]),
        lambda model: AveragedModel(wrap(model), use_buffers=True)]

    with Checkpointer(f"{checkpoints.folder} forms", timeout=TIMEOUT) as apart:
        for step, form in enumerate([*shared, *of_rank_0]):
            model = Model()
            part = form(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            optimizer.state[model.linear.weight] = {"momentum_buffer": torch.ones(5, 6)}
            tensors = part if isinstance(part, dict) else part.state_dict()
            saved = {**tensors, "momentum of linear.weight": optimizer.state[model.linear.weight]["momentum_buffer"]}
            differing = {name for name in saved if form in of_rank_0 or "running" in name or "mask" in name
                         or "frozen" in name or form is ignoring and "linear.weight" in name}
            fill(1, saved.values())
            fill(2 + dist.rank, [saved[name] for name in differing])
            state = {"part": part, "optimizer": optimizer}
            apart.save_and_wait(step, state)
            fill(0, saved.values())
            apart.load_latest(state)
            saved["momentum of linear.weight"] = optimizer.state[model.linear.weight]["momentum_buffer"]
            for name, tensor in saved.items():
                is_buffer = part is not tensors and any(word in name for word in ("running", "batches", "n_averaged"))
                expected = 2 + dist.rank * is_buffer if name in differing else 1
                assert bool((tensor == expected).all()), (step, name, tensor)
            held = tensors_by_rank(apart.folder / f"step-{step:09d}")[1]
            assert any(name.endswith(("weight", "bias")) for name in held) == (form in shared), (step, *held)
            assert not any("frozen" in name for name in held), (step, *held)


def one_finds_damage(dist: Distributed, checkpoints: Checkpointer) -> None:
    if dist.rank == 1:
        file = checkpoints.folder / "step-000000002" / rank_file_name(1)
        file.write_bytes(file.read_bytes()[:-1])
    dist.barrier()
    found = checkpoints.load_latest(state_of(dist.rank))
    assert found is not None and found.step == 1
    assert sorted(os.listdir(checkpoints.folder)) == [".lock", "step-000000001", "step-000000002.damaged"]
    assert gather(logged("rank-00001.safetensors has"))[0] == 1


def one_reads_wrong_bits(dist: Distributed, checkpoints: Checkpointer) -> None:
    """Rank 0 reads the same file: the checkpoint is intact, and stays."""
    preadv = os.preadv

    def wrong(file: int, views: list[memoryview], position: int) -> int:
        count = preadv(file, views, position)
        views[0][0] ^= 1
        return count

    os.preadv = wrong if dist.rank == 1 else preadv
    error, = set(gather(error_of(checkpoints.load_latest, state_of(dist.rank))))
    os.preadv = preadv
    assert "rank 1 on" in error and "finds rank-00000.safetensors damaged, and rank 0 on" in error
    assert sorted(os.listdir(checkpoints.folder)) == [".lock", "step-000000001", "step-000000002"]


def one_disk_is_full(dist: Distributed, checkpoints: Checkpointer) -> None:
    def write(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    state = state_of(dist.rank)
    disk.system = ChangedDisk(write=write) if dist.rank == 1 else os
    checkpoints.save(3, state)
    error = common_error(checkpoints)
    disk.system = os
    assert all(text in error for text in ("cannot save step 3", "on rank 1 on", "No space left"))
    assert sorted(os.listdir(checkpoints.folder)) == [".lock", "step-000000001", "step-000000002.damaged"]
    dist.barrier()
    checkpoints.save_and_wait(4, state)
    assert list_steps(checkpoints.folder) == [1, 4]


def rank_0_has_no_memory(dist: Distributed, checkpoints: Checkpointer) -> None:
    """Rank 1 gets the cause from rank 0, not a time-out."""
    def mkdir(*_: Any) -> None:
        raise MemoryError

    disk.system = ChangedDisk(mkdir=mkdir) if dist.is_main else os
    for step in (4, 5):
        checkpoints.save(step, state_of(dist.rank))
        error = common_error(checkpoints)
        assert f"cannot save step {step}" in error and "on rank 0 on" in error and "MemoryError" in error
    disk.system = os
    dist.barrier()
    checkpoints.save_and_wait(4, state_of(dist.rank))


def only_what_is_needed_is_read(dist: Distributed, checkpoints: Checkpointer) -> None:
    """The parts of the other rank are not read; on one rank, no part is: see resume_on_one_rank()."""
    state: dict[str, Any] = {"x": torch.ones(1000), "mine": PerRank(torch.full((LARGE_BYTES // 4,), float(dist.rank)))}
    checkpoints.save_and_wait(2, state)
    dist.barrier()
    read = bytes_read()
    checkpoints.load_latest(state)
    assert LARGE_BYTES <= bytes_read() - read < 1.5 * LARGE_BYTES


def bytes_read() -> int:
    """What this process has read from files so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def states_differ(dist: Distributed, checkpoints: Checkpointer) -> None:
    checkpoints.save(5, {"x": torch.zeros(2 + dist.rank)})
    assert "rank 1 saves a different step, or tensors with different names" in common_error(checkpoints)


def one_has_what_cannot_be_saved(dist: Distributed, checkpoints: Checkpointer) -> None:
    with Checkpointer(f"{checkpoints.folder} refused", timeout=TIMEOUT) as apart:
        if dist.rank == 1:
            with pytest.raises(ValueError, match="function"):
                apart.save(1, {"x": lambda: 0})
        else:
            apart.save(1, {"x": 0})
        apart.save(2, {"x": 2})
        found = apart.load_latest({"x": 0})
    assert found is not None and found.step == 2, "the ranks are still in step"
    assert not dist.is_main or logged("cannot save step 1") and logged("on rank 1 on")


def made_too_early(dist: Distributed, checkpoints: Checkpointer) -> None:
    assert "Create it after setup_distributed()" in error_of(EARLY[0].load_latest, {})


def folders_differ(dist: Distributed, checkpoints: Checkpointer) -> None:
    """As where each rank names its folder by its own clock."""
    folders = [f"{checkpoints.folder} of rank {rank}" for rank in range(2)]
    for call in (lambda one: one.load_latest({"x": 0}), lambda one: one.save_and_wait(1, {"x": 0})):
        with Checkpointer(folders[dist.rank], timeout=TIMEOUT) as apart:
            error, = set(gather(error_of(call, apart)))
            assert f"2 different folders for checkpoints (rank 0: {folders[0]}; rank 1: {folders[1]})" in error

    link = Path(f"{checkpoints.folder} by another name")
    if dist.is_main:
        link.symlink_to(checkpoints.folder)
    dist.barrier()
    with Checkpointer(link if dist.is_main else checkpoints.folder, timeout=TIMEOUT) as together:
        assert together.load_latest(state_of(dist.rank)) is not None


def folder_is_not_shared(dist: Distributed, checkpoints: Checkpointer) -> None:
    """One name for two folders, as on the disks of two hosts."""
    working_folder, own_folder = Path.cwd(), Path(f"{checkpoints.folder} of host {dist.rank}")
    own_folder.mkdir()
    os.chdir(own_folder)
    with Checkpointer("/proc/self/cwd/checkpoints", timeout=TIMEOUT) as apart:
        assert apart.load_latest(state_of(dist.rank)) is None
        apart.save(1, state_of(dist.rank))
        assert "do not all hosts share it?" in error_of(apart.wait)
    os.chdir(working_folder)


def one_is_slow(dist: Distributed, checkpoints: Checkpointer) -> None:
    """Rank 1's disk waits until both ranks have gone on: no rank waits for the other in save()."""
    go, state = threading.Event(), state_of(dist.rank)
    disk.system = slow_disk(lambda: go.wait(30)) if dist.rank == 1 else os
    checkpoints.save(6, state)
    dist.barrier()
    assert list_steps(checkpoints.folder) == [1, 4]
    dist.barrier()
    go.set()
    checkpoints.wait()
    assert list_steps(checkpoints.folder) == [1, 4, 6]


def one_calls_save(dist: Distributed, checkpoints: Checkpointer) -> None:
    """As under `if job.is_main`, at some steps and at the end; known while the training goes on."""
    state = state_of(dist.rank)

    def train(steps: int) -> None:
        for _ in range(steps):
            state["optimizer"].zero_grad()
            state["model"](torch.rand(8, 6)).sum().backward()
            state["optimizer"].step()

    for loaded in (True, False):
        begun = time.monotonic()
        with contextlib.ExitStack() as stack:
            apart = stack.enter_context(Checkpointer(f"{checkpoints.folder} alone {loaded}", timeout=TIMEOUT))
            if loaded:
                apart.load_latest(state)
            train(2)
            if dist.is_main:
                apart.save(3, {"x": 0})
            train(3)
            if dist.is_main:
                error = error_of(apart.save, 5, {"x": 0})
                assert "rank 0 calls save() at step 3, rank 1 does not" in error and "not under `if job.is_" in error
                assert logged("rank 0 calls save() at step 3") == 1 + (not loaded)
            dist.barrier()
            if dist.is_main:
                assert "save() at step 7, rank 1 does not" in error_of(apart.save_and_wait, 7, {"x": 0})
        dist.barrier()
        assert time.monotonic() - begun < 20 and not logged("has ended")


def one_is_late_for_save(dist: Distributed, checkpoints: Checkpointer) -> None:
    """Its call comes, although rank 0 has gone on: without a collective, nothing shows that it does not."""
    state = state_of(dist.rank)
    with Checkpointer(f"{checkpoints.folder} late", timeout=TIMEOUT) as apart:
        time.sleep(4 * dist.rank)
        apart.save(1, {"x": 0})
        for _ in range(3):
            state["optimizer"].step()
        apart.wait()


def one_dies(dist: Distributed, checkpoints: Checkpointer) -> None:
    state = state_of(dist.rank)
    disk.system = ChangedDisk(fsync=lambda _: os._exit(0)) if dist.rank == 1 else os
    with Checkpointer(checkpoints.folder, timeout=600.0) as patient:
        patient.save(7, state)
        error = error_of(patient.wait)
    assert "lost the connection to rank 1, which has ended: rank 1 on" in error
    assert list_steps(checkpoints.folder) == [1, 4, 6]


# The folder of a run, whose name is that of a form for models; the steps that are saved first; the scenarios.
RUNS = [*((form, [6], [each_rank_gets_back_what_differs, rank_1_writes_what_ddp_keeps_equal]) for form in FORMS),
        ("large", [], [only_what_is_needed_is_read]),
        ("faults", [1, 2], [one_reads_wrong_bits, one_finds_damage, one_disk_is_full, rank_0_has_no_memory,
                            states_differ, one_has_what_cannot_be_saved, made_too_early, folders_differ,
                            folder_is_not_shared, one_calls_save, one_is_late_for_save, one_is_slow,
                            one_dies])]
EARLY: list[Checkpointer] = []


def resume_on_one_rank(folder: Path) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, lr=0.1)
    common = {"model": model, "optimizer": optimizer, "epoch": 0}
    with Checkpointer(folder) as checkpoints:
        error = error_of(checkpoints.load_latest, {**common, "mine": PerRank(None)})
        assert "mine is PerRank and was saved under another number of ranks" in error
        found = checkpoints.load_latest(common)
    assert found is not None and found.step == 6 and found.state["epoch"] == 3
    assert logged("was saved by 2 ranks and continues with 1")

    zero, one = tensors_by_rank(folder / "step-000000006")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, {**one, **zero}[f"model/{name}"]), name
    assert not torch.equal(zero["model/norm.running_mean"], one["model/norm.running_mean"])


def read_little(folder: Path) -> None:
    state, read = {"x": torch.zeros(1000)}, bytes_read()
    with Checkpointer(folder) as checkpoints:
        assert checkpoints.load_latest(state) is not None
    assert bool(state["x"].all()) and bytes_read() - read < LARGE_BYTES / 2
    assert logged("the generators stay as they are")


def main(folder: Path) -> None:
    global wrap
    logging.getLogger("ddpkit").addHandler(LOG)
    if os.environ["WORLD_SIZE"] == "1":
        for form in FORMS:
            resume_on_one_rank(folder / form)
        return read_little(folder / "large")

    checkpoint_snapshot.MIN_SHARE_BYTES = 1  # both ranks write parts of these small states
    rank = os.environ.pop("RANK")  # as under a launcher with variables of its own
    EARLY.append(Checkpointer(f"{folder} early"))
    os.environ["RANK"] = rank
    with setup_distributed("gloo", timeout=60) as dist:
        logging.getLogger("ddpkit").addHandler(LOG)  # setup_distributed() has removed it
        for name, steps, scenarios in RUNS:
            wrap = FORMS.get(name, DDP)  # type: ignore[assignment, misc]
            with Checkpointer(folder / name, timeout=TIMEOUT) as checkpoints:
                for step in steps:
                    checkpoints.save_and_wait(step, state_of(dist.rank))
                for scenario in scenarios:
                    scenario(dist, checkpoints)
                    print(f"rank {rank}: {name}, {scenario.__name__}\n", end="", flush=True)  # in one piece
        os._exit(0)  # the other rank is dead


def test_two_ranks_agree_and_one_rank_resumes(tmp_path: Path) -> None:
    output = run_ranks(tmp_path, __file__, *[(ranks, [str(tmp_path / "checkpoints")]) for ranks in (2, 1)])
    printed = [line for line in output.splitlines() if line.startswith("rank ")]
    expected = [f"rank {rank}: {name}, {scenario.__name__}" for name, _, scenarios in RUNS for scenario in scenarios
                for rank in range(1 if scenario is one_dies else 2)]
    assert sorted(printed) == sorted(expected), output


if __name__ == "__main__":
    main(Path(sys.argv[1]))
