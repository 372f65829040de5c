"""utils/checkpoint on two ranks: one checkpoint of both; what goes wrong on one is known on both.

This file is also the program of the ranks: each runs the scenarios in their order.
"""
from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from utils import Distributed, setup_distributed
from utils.checkpoint import Checkpointer, CheckpointError, PerRank, disk, list_steps
from utils.checkpoint import snapshot as checkpoint_snapshot
from utils.checkpoint.format import rank_file_name
from utils.checkpoint.rank_file import read_rank_file
from utils.checkpoint.storage import read_manifest

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 60.0


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 5), nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.linear(x))
        return out


@contextlib.contextmanager
def changed_disk(**calls: Any) -> Iterator[None]:
    """The real disk, with some of its calls replaced."""
    class System:
        def __getattr__(self, name: str) -> Any:
            return calls.get(name) or getattr(os, name)

    disk.system = System()
    try:
        yield
    finally:
        disk.system = os


@contextlib.contextmanager
def captured_log() -> Iterator[list[str]]:
    """The messages of this rank."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ddpkit").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("ddpkit").removeHandler(handler)


def gather(value: Any) -> list[Any]:
    """The values of both ranks."""
    values: list[Any] = [None, None]
    torch.distributed.all_gather_object(values, value)
    return values


def state_of(rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = DDP(Model())
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, lr=0.1)
    for _ in range(2):  # the running means of the norm differ between the ranks
        model(torch.rand(8, 6) + rank).square().sum().backward()
        optimizer.step()
    mine = PerRank({"rank": rank, "hidden": torch.full((3,), float(rank))})
    return {"model": model, "optimizer": optimizer, "epoch": 3, "mine": mine}


def error_of(action: Any, *args: Any) -> str:
    with pytest.raises(CheckpointError) as error:
        action(*args)
    return str(error.value)


def tensors_by_rank(checkpoint: Path) -> list[dict[str, torch.Tensor]]:
    return [read_rank_file(checkpoint, entry)[1] for entry in read_manifest(checkpoint)["files"]]


# Scenarios ------------------------------------------------------------------------------------

def both_write_and_restore(dist: Distributed, checkpoints: Checkpointer) -> None:
    state = state_of(dist.rank)
    model = state["model"].module
    mean, weight = model.norm.running_mean.clone(), model.linear.weight.detach().clone()
    means = gather(mean.tolist())
    assert means[0] != means[1]
    torch.manual_seed(10 + dist.rank)
    checkpoints.save(1, state)
    first = torch.rand(1).item()
    checkpoints.save(2, state)
    with torch.no_grad():
        model.linear.weight.zero_()
    checkpoints.load_latest(state)  # of step 2, when the first number had been drawn
    second = torch.rand(1).item()
    checkpoints.wait()
    found = checkpoints.load_latest(
        {**state, "mine": PerRank({"rank": -1, "hidden": torch.zeros(3)})})
    assert found is not None and found.step == 2
    assert torch.equal(weight, model.linear.weight) and torch.equal(mean, model.norm.running_mean)
    mine = found.state["mine"].value
    assert mine["rank"] == dist.rank and mine["hidden"].tolist() == [dist.rank] * 3
    assert torch.rand(1).item() == second and len({*gather(first), *gather(second)}) == 4
    assert len(state["optimizer"].state_dict()["state"]) == 4

    common = [{name for name in held if name.endswith(("weight", "bias", "momentum_buffer"))}
              for held in tensors_by_rank(checkpoints.folder / "step-000000001")]
    assert all(common) and common[0].isdisjoint(common[1]), "the ranks share the work"


def only_rank_0_keeps_it_current(dist: Distributed, checkpoints: Checkpointer) -> None:
    """An average of the weights, a tuned module and frozen weights, which rank 0 alone changes."""
    model = Model()
    model.frozen = nn.Linear(4, 4).requires_grad_(False)
    ddp = DDP(model)
    average = torch.optim.swa_utils.AveragedModel(ddp, use_buffers=True)  # with a copy of the DDP
    tuned = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(tuned.parameters(), momentum=0.9, lr=0.1)
    tuned(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    changed = [*average.state_dict().values(), *tuned.parameters(), *model.frozen.parameters()]

    def momentum() -> list[torch.Tensor]:
        return list(optimizer.state_dict()["state"][0].values())

    @torch.no_grad()
    def fill(value: int, *tensors: torch.Tensor) -> None:
        for tensor in [*changed, *momentum(), *tensors]:
            tensor.fill_(value)

    fill(1 if dist.is_main else 5)
    state = {"model": model, "average": average, "optimizer": optimizer, "tuned": tuned,
             "trainer": torch.optim.SGD(ddp.parameters(), lr=0.1)}
    with Checkpointer(f"{checkpoints.folder} average", timeout=TIMEOUT) as apart:
        apart.save(1, state)
        apart.wait()
        fill(7, *model.linear.parameters())
        apart.load_latest(state)
        held = tensors_by_rank(apart.folder / "step-000000001")[1]
    assert all(bool((tensor == 1).all()) for tensor in [*changed, *momentum()])
    assert not (model.linear.weight == 7).any()
    assert all(name.startswith("model/") for name in held), "only trained parameters"
    assert any(name.endswith("weight") for name in held), "the ranks share the work"


def one_finds_damage(dist: Distributed, checkpoints: Checkpointer) -> None:
    if dist.rank == 1:
        file = checkpoints.folder / "step-000000002" / rank_file_name(1)
        file.write_bytes(file.read_bytes()[:-1])
    dist.barrier()
    with captured_log() as messages:
        found = checkpoints.load_latest(state_of(dist.rank))
    assert found is not None and found.step == 1
    names = sorted(os.listdir(checkpoints.folder))
    assert names == ["step-000000001", "step-000000002.damaged"]
    warnings = [text for text in gather(messages)[0] if "rank-00001.safetensors has" in text]
    assert len(warnings) == 1


def one_disk_is_full(dist: Distributed, checkpoints: Checkpointer) -> None:
    def write(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    state = state_of(dist.rank)
    with changed_disk(**({"write": write} if dist.rank == 1 else {})):
        checkpoints.save(3, state)
        errors = gather(error_of(checkpoints.wait))
    assert errors[0] == errors[1]
    assert all(text in errors[0] for text in ("cannot save step 3", "on rank 1 on", "no space is"))
    assert sorted(os.listdir(checkpoints.folder)) == ["step-000000001", "step-000000002.damaged"]
    dist.barrier()
    checkpoints.save(4, state)
    checkpoints.wait()
    assert list_steps(checkpoints.folder) == [1, 4]


def states_differ(dist: Distributed, checkpoints: Checkpointer) -> None:
    checkpoints.save(5, {"x": torch.zeros(2 + dist.rank)})
    errors = gather(error_of(checkpoints.wait))
    assert errors[0] == errors[1]
    assert "rank 1 saves a different step, or tensors with different names" in errors[0]


def one_has_what_cannot_be_saved(dist: Distributed, checkpoints: Checkpointer) -> None:
    with captured_log() as messages, \
            Checkpointer(f"{checkpoints.folder} refused", timeout=TIMEOUT) as apart:
        if dist.rank == 1:
            with pytest.raises(ValueError, match="function"):
                apart.save(1, {"x": lambda: 0})
        else:
            apart.save(1, {"x": 0})
        apart.save(2, {"x": 2})
        apart.wait()
        found = apart.load_latest({"x": 0})
    assert found is not None and found.step == 2, "the ranks are still in step"
    if dist.is_main:
        assert any("cannot save step 1" in text and "on rank 1 on" in text for text in messages)


def made_too_early(dist: Distributed, checkpoints: Checkpointer) -> None:
    assert "Create it after setup_distributed()" in error_of(EARLY[0].load_latest, {})


def folders_differ(dist: Distributed, checkpoints: Checkpointer) -> None:
    folder = f"{checkpoints.folder} of rank {dist.rank}"
    with Checkpointer(folder, timeout=TIMEOUT) as apart:
        assert apart.load_latest(state_of(dist.rank)) is None
        apart.save(1, state_of(dist.rank))
        assert "do not all hosts share it?" in error_of(apart.wait)


def one_is_slow(dist: Distributed, checkpoints: Checkpointer) -> None:
    """Rank 1's disk waits until both ranks have gone on: no rank waits for the other in save()."""
    go = threading.Event()

    def fsync(file: int) -> None:
        assert go.wait(30)
        os.fsync(file)

    state = state_of(dist.rank)
    with changed_disk(**({"fsync": fsync} if dist.rank == 1 else {})):
        checkpoints.save(6, state)
        dist.barrier()
        assert list_steps(checkpoints.folder) == [1, 4]
        dist.barrier()
        go.set()
        checkpoints.wait()
    assert list_steps(checkpoints.folder) == [1, 4, 6]


def one_dies(dist: Distributed, checkpoints: Checkpointer) -> None:
    state = state_of(dist.rank)
    with Checkpointer(checkpoints.folder, timeout=600.0) as patient, \
            changed_disk(**({"fsync": lambda _: os._exit(7)} if dist.rank == 1 else {})):
        patient.save(7, state)
        error = error_of(patient.wait)
    assert "lost the connection to rank 1, which has ended: rank 1 on" in error
    assert list_steps(checkpoints.folder) == [1, 4, 6]


SCENARIOS = [both_write_and_restore, only_rank_0_keeps_it_current, one_finds_damage,
             one_disk_is_full, states_differ, one_has_what_cannot_be_saved, made_too_early,
             folders_differ, one_is_slow, one_dies]
EARLY: list[Checkpointer] = []


def main(folder: str) -> None:
    checkpoint_snapshot.MIN_SHARE_BYTES = 1  # both ranks write parts of these small states
    rank = os.environ.pop("RANK")  # as under a launcher with variables of its own
    EARLY.append(Checkpointer(f"{folder} early"))
    os.environ["RANK"] = rank
    with setup_distributed("gloo", timeout=60) as dist, \
            Checkpointer(folder, timeout=TIMEOUT) as checkpoints:
        for scenario in SCENARIOS:
            scenario(dist, checkpoints)
            print(scenario.__name__, flush=True)
        os._exit(0)  # the other rank is dead


# Tests ----------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[subprocess.Popen[str]],
                                                           list[tuple[str, str]]]:
    """The folder of the checkpoints, the ended ranks, and their outputs."""
    folder = tmp_path_factory.mktemp("ranks") / "checkpoints"
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    environ = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2",
               "OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen([sys.executable, "-m", __name__, folder], cwd=ROOT, text=True,
                              env={**environ, "RANK": str(rank)}, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE) for rank in range(2)]
    try:
        return folder, ranks, [rank.communicate(timeout=200) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.parametrize("scenario", [scenario.__name__ for scenario in SCENARIOS])
def test_on_two_ranks(scenario: str, ran: Any) -> None:
    _, ranks, outputs = ran
    for out, errors in outputs[:1] if scenario == "one_dies" else outputs:
        assert scenario in out.split(), errors
    if scenario == "one_dies":
        assert [rank.returncode for rank in ranks] == [0, 7]


def test_another_number_of_ranks_restores_what_is_common(
        ran: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("ddpkit"), "propagate", True)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, lr=0.1)
    common = {"model": model, "optimizer": optimizer, "epoch": 0}
    words = "mine is PerRank and was saved under another number of ranks"
    with Checkpointer(ran[0]) as checkpoints:
        with pytest.raises(CheckpointError, match=words):
            checkpoints.load_latest({**common, "mine": PerRank(None)})
        found = checkpoints.load_latest(common)
    assert found is not None and found.step == 6 and found.state["epoch"] == 3

    zero, one = tensors_by_rank(ran[0] / "step-000000006")
    for name, tensor in model.state_dict().items():
        if "running" not in name:
            assert torch.equal(tensor, {**zero, **one}[f"model/{name}"]), name
    mean = "model/norm.running_mean"
    assert torch.equal(model.norm.running_mean, zero[mean]) and not torch.equal(zero[mean], one[mean])
    assert "was saved by 2 ranks and continues with 1" in caplog.text


if __name__ == "__main__":
    main(sys.argv[1])
