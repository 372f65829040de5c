"""utils/checkpoint.py on two real ranks: one checkpoint of both, and what goes wrong on one is known on both.

This file is also the program that each rank runs; it prints what it saw as JSON, one line for each scenario.
"""
from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from utils import Distributed, checkpoint_files, checkpoint_snapshot, setup_distributed
from utils.checkpoint import Checkpointer, CheckpointError, PerRank

ROOT = Path(__file__).resolve().parents[2]
Seen = dict[str, Any]
EARLY: list[Checkpointer] = []


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 5), nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.linear(x))
        return out


class Changed:
    """The real disk, with some of its calls replaced."""

    def __init__(self, **calls: Any) -> None:
        self.__dict__.update(calls)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


@contextlib.contextmanager
def changed_disk(**calls: Any) -> Iterator[None]:
    checkpoint_files.disk = Changed(**calls)
    try:
        yield
    finally:
        checkpoint_files.disk = os


def state_of(rank: int) -> tuple[DDP, torch.optim.Optimizer, Seen]:
    torch.manual_seed(0)
    model = DDP(Model())
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, lr=0.1)
    for _ in range(2):
        model(torch.rand(8, 6) + rank).square().sum().backward()  # the running means of the norm differ between ranks
        optimizer.step()
    mine = PerRank({"rank": rank, "hidden": torch.full((3,), float(rank))})
    return model, optimizer, {"model": model, "optimizer": optimizer, "epoch": 3, "mine": mine}


def raised(action: Any, *args: Any) -> str:
    try:
        action(*args)
    except CheckpointError as error:
        return str(error)
    return "nothing"


def both_write_and_restore(dist: Distributed, checkpoints: Checkpointer) -> Seen:
    model, _, state = state_of(dist.rank)
    mean = model.module.norm.running_mean.tolist()
    torch.manual_seed(10 + dist.rank)
    checkpoints.save(1, state)
    expected, weight = torch.rand(1).item(), model.module.linear.weight.detach().clone()
    checkpoints.save(2, state)
    with torch.no_grad():
        model.module.linear.weight.zero_()
    checkpoints.load_latest(state)  # step 2: the generator stands after the first number
    second = torch.rand(1).item()
    checkpoints.wait()
    found = checkpoints.load_latest({**state, "mine": PerRank({"rank": -1, "hidden": torch.zeros(3)})})
    assert found is not None
    mine = found.state["mine"].value
    return {"mean": mean, "restored mean": model.module.norm.running_mean.tolist(), "step": found.step,
            "weights": torch.equal(weight, model.module.linear.weight), "mine": [mine["rank"], mine["hidden"].tolist()],
            "draws": [expected, second, torch.rand(1).item()],
            "momentum": len(state["optimizer"].state_dict()["state"])}


def only_rank_0_keeps_it_current(dist: Distributed, checkpoints: Checkpointer) -> Seen:
    """An average of the weights, a module with an optimizer, and a frozen part of the model, changed on rank 0."""
    model = Model()
    model.frozen = nn.Linear(4, 4).requires_grad_(False)
    ddp = DDP(model)
    trainer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    average = torch.optim.swa_utils.AveragedModel(ddp, use_buffers=True)  # a copy of the DDP in it
    tuned = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(tuned.parameters(), momentum=0.9, lr=0.1)
    tuned(torch.ones(1, 3)).sum().backward()
    optimizer.step()

    def changed() -> list[torch.Tensor]:
        return [*average.state_dict().values(), *tuned.parameters(), *model.frozen.parameters(),
                *optimizer.state_dict()["state"][0].values()]

    with torch.no_grad():
        for tensor in changed():
            tensor.fill_(1 if dist.is_main else 5)
    state = {"model": model, "average": average, "optimizer": optimizer, "tuned": tuned, "trainer": trainer}
    with Checkpointer(f"{checkpoints.folder} average", timeout=60.0) as apart:
        apart.save(1, state)
        apart.wait()
        with torch.no_grad():
            for tensor in [*changed(), *model.linear.parameters()]:
                tensor.fill_(7)
        apart.load_latest(state)
        whole = apart.folder / "step-000000001"
        held = [sorted(checkpoint_files.read_part(whole, entry)[1]) for entry in
                checkpoint_files.read_manifest(whole)["files"]]
    return {"values": sorted({value for tensor in changed() for value in tensor.unique().tolist()}),
            "sevens": int((model.linear.weight == 7).sum()), "held": held}


def one_finds_damage(dist: Distributed, checkpoints: Checkpointer) -> Seen:
    newest = checkpoints.folder / "step-000000002"
    if dist.rank == 1:
        file = newest / checkpoint_files.part_name(1)
        file.write_bytes(file.read_bytes()[:-1])
    dist.barrier()
    found = checkpoints.load_latest(state_of(dist.rank)[2])
    assert found is not None
    return {"step": found.step, "names": sorted(os.listdir(checkpoints.folder))}


def one_disk_is_full(dist: Distributed, checkpoints: Checkpointer) -> Seen:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    state = state_of(dist.rank)[2]
    with changed_disk(**({"write": full} if dist.rank == 1 else {})):
        checkpoints.save(3, state)
        error = raised(checkpoints.wait)
    dist.barrier()
    names = sorted(os.listdir(checkpoints.folder))
    dist.barrier()
    checkpoints.save(4, state)
    checkpoints.wait()
    return {"error": error, "names": names, "then": sorted(os.listdir(checkpoints.folder))}


def states_differ(dist: Distributed, checkpoints: Checkpointer) -> Seen:
    checkpoints.save(5, {"x": torch.zeros(2 + dist.rank)})
    return {"error": raised(checkpoints.wait)}


def one_has_what_cannot_be_saved(dist: Distributed, checkpoints: Checkpointer) -> Seen:
    with Checkpointer(f"{checkpoints.folder} refused", timeout=60.0) as apart:
        error = ""
        try:
            apart.save(1, {"x": (lambda: 0) if dist.rank == 1 else 0})
        except ValueError as problem:
            error = str(problem)
        apart.save(2, {"x": 2})
        apart.wait()
        found = apart.load_latest({"x": 0})
        assert found is not None
        return {"error": error, "step": found.step}


def made_too_early(dist: Distributed, checkpoints: Checkpointer) -> Seen:
    return {"error": raised(EARLY[0].load_latest, {})}


def folders_differ(dist: Distributed, checkpoints: Checkpointer) -> Seen:
    with Checkpointer(f"{checkpoints.folder} of rank {dist.rank}", timeout=60.0) as apart:
        nothing = apart.load_latest(state_of(dist.rank)[2])
        apart.save(1, state_of(dist.rank)[2])
        return {"error": raised(apart.wait), "found": nothing}


def one_is_slow(dist: Distributed, checkpoints: Checkpointer) -> Seen:
    """Rank 1's disk waits until rank 0 has gone through its loop: no rank waits for the other in save()."""
    go = threading.Event()

    def fsync(file: int) -> None:
        assert go.wait(30)
        os.fsync(file)

    state = state_of(dist.rank)[2]
    with changed_disk(**({"fsync": fsync} if dist.rank == 1 else {})):
        start = time.monotonic()
        checkpoints.save(6, state)
        stall = time.monotonic() - start
        dist.barrier()
        before = checkpoint_files.names(checkpoints.folder)[-1]
        dist.barrier()
        go.set()
        checkpoints.wait()
    return {"stall": stall, "before": before, "after": checkpoint_files.names(checkpoints.folder)[-1]}


def one_dies(dist: Distributed, checkpoints: Checkpointer) -> Seen:
    state = state_of(dist.rank)[2]
    with Checkpointer(checkpoints.folder, timeout=2.0) as impatient:
        with changed_disk(**({"fsync": lambda _: os._exit(7)} if dist.rank == 1 else {})):
            impatient.save(7, state)
            return {"error": raised(impatient.wait), "names": checkpoint_files.names(checkpoints.folder)}


SCENARIOS = [both_write_and_restore, only_rank_0_keeps_it_current, one_finds_damage, one_disk_is_full, states_differ,
             one_has_what_cannot_be_saved, made_too_early, folders_differ, one_is_slow, one_dies]


def main(folder: str) -> None:
    checkpoint_snapshot._LEAST_SHARE = 1  # both ranks write parts of this small state
    rank = os.environ.pop("RANK")  # as under a launcher that sets other variables
    EARLY.append(Checkpointer(f"{folder} early"))
    os.environ["RANK"] = rank
    with setup_distributed("gloo", timeout=60) as dist, Checkpointer(folder, timeout=60.0) as checkpoints:
        for scenario in SCENARIOS:
            print(json.dumps({"scenario": scenario.__name__, **scenario(dist, checkpoints)}), flush=True)
        os._exit(0)  # the other rank is dead


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Seen]]]:
    """The folder of the checkpoints, and of each rank what it saw in each scenario."""
    folder = tmp_path_factory.mktemp("ranks") / "checkpoints"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environ = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2",
               "OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen([sys.executable, "-m", __name__, folder], cwd=ROOT, text=True,
                              env={**environ, "RANK": str(rank)}, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE) for rank in range(2)]
    try:
        outputs = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    seen = []
    for out, error in outputs:
        lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        seen.append({line["scenario"]: {**line, "stderr": error} for line in lines})
        assert len(lines) >= len(SCENARIOS) - 1, error
    assert [rank.returncode for rank in ranks] == [0, 7]
    return folder, seen


def of(ran: tuple[Path, list[dict[str, Seen]]], scenario: str) -> list[Seen]:
    return [seen[scenario] for seen in ran[1]]


def test_what_is_common_is_restored_as_rank_0_had_it_and_what_is_a_ranks_own_on_that_rank(ran: Any) -> None:
    zero, one = of(ran, "both_write_and_restore")
    assert zero["step"] == one["step"] == 2
    assert zero["weights"] and one["weights"] and zero["momentum"] == one["momentum"] == 4
    assert zero["mean"] != one["mean"]
    assert [zero["mine"], one["mine"]] == [[0, [0, 0, 0]], [1, [1, 1, 1]]]
    assert zero["draws"][1] == zero["draws"][2] and one["draws"][1] == one["draws"][2]
    assert len({*zero["draws"], *one["draws"]}) == 4


def test_both_ranks_write_a_part_of_what_is_common(ran: Any) -> None:
    shared = ("weight", "bias", "momentum_buffer")
    held = [{name for name in checkpoint_files.read_part(folder, entry)[1] if name.endswith(shared)} for folder in
            [ran[0] / "step-000000001"] for entry in checkpoint_files.read_manifest(folder)["files"]]
    assert len(held) == 2 and all(held) and held[0].isdisjoint(held[1])


def test_what_rank_0_alone_keeps_current_is_restored_as_rank_0_had_it(ran: Any) -> None:
    for seen in of(ran, "only_rank_0_keeps_it_current"):
        assert seen["values"] == [1] and seen["sevens"] == 0
        written_by_0, written_by_1 = seen["held"]
        assert {name for name in written_by_1 if not name.startswith("model/")} == set(), "only trained parameters"
        assert any(name.endswith("weight") for name in written_by_1), "the ranks share the work"


def test_every_rank_restores_the_buffers_it_had(ran: Any) -> None:
    zero, one = of(ran, "both_write_and_restore")
    assert zero["restored mean"] == zero["mean"] != one["mean"] == one["restored mean"]


def test_all_ranks_fall_back_when_one_finds_its_file_damaged_and_it_is_set_aside_once(ran: Any) -> None:
    seen = of(ran, "one_finds_damage")
    assert [one["step"] for one in seen] == [1, 1]
    assert "step-000000002.damaged" in seen[0]["names"] and "step-000000002.damaged-2" not in seen[0]["names"]
    assert "rank-00001.safetensors has" in seen[0]["stderr"] and "on rank 1" in seen[0]["stderr"]


def test_a_full_disk_on_one_rank_is_the_same_error_on_both_and_the_next_save_is_whole(ran: Any) -> None:
    zero, one = of(ran, "one_disk_is_full")
    assert zero["error"] == one["error"]
    assert "cannot save step 3" in zero["error"] and "on rank 1 on" in zero["error"]
    assert "no space is left" in zero["error"]
    assert zero["names"] == ["step-000000001", "step-000000002.damaged"]
    assert zero["then"] == ["step-000000001", "step-000000002.damaged", "step-000000004"]


def test_states_that_differ_between_ranks_are_refused_on_both(ran: Any) -> None:
    zero, one = of(ran, "states_differ")
    assert zero["error"] == one["error"] and "rank 1 saves another step than rank 0, or tensors" in zero["error"]


def test_after_one_ranks_valueerror_all_ranks_stay_in_step(ran: Any) -> None:
    zero, one = of(ran, "one_has_what_cannot_be_saved")
    assert zero["error"] == "" and "function" in one["error"]
    assert zero["step"] == one["step"] == 2
    assert "cannot save step 1" in zero["stderr"] and "on rank 1 on" in zero["stderr"]


def test_a_checkpointer_that_does_not_know_the_ranks_is_refused(ran: Any) -> None:
    for seen in of(ran, "made_too_early"):
        assert "Make it after setup_distributed()" in seen["error"]


def test_ranks_that_name_different_folders_are_told_so(ran: Any) -> None:
    for seen in of(ran, "folders_differ"):
        assert seen["found"] is None and "do not all hosts share it?" in seen["error"]


def test_no_rank_waits_for_another_in_save_and_the_checkpoint_is_there_only_when_all_are_done(ran: Any) -> None:
    for seen in of(ran, "one_is_slow"):
        assert seen["before"] == "step-000000004" and seen["after"] == "step-000000006"
        assert seen["stall"] < 5


def test_a_rank_that_dies_in_a_save_is_named_and_the_checkpoint_before_stays(ran: Any) -> None:
    seen = ran[1][0]["one_dies"]
    assert "rank 1 did not answer" in seen["error"]
    assert seen["names"][-1] == "step-000000006"


def test_another_number_of_ranks_gets_what_is_common_but_no_ranks_own_part(
        ran: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("ddpkit"), "propagate", True)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, lr=0.1)
    common = {"model": model, "optimizer": optimizer, "epoch": 0}
    with Checkpointer(ran[0]) as checkpoints:
        with pytest.raises(CheckpointError, match="mine is PerRank and was saved under another number of ranks"):
            checkpoints.load_latest({**common, "mine": PerRank(None)})
        found = checkpoints.load_latest(common)
    assert found is not None and found.step == 6 and found.state["epoch"] == 3
    written: dict[str, torch.Tensor] = {}
    means: list[torch.Tensor] = []
    for entry in checkpoint_files.read_manifest(ran[0] / "step-000000006")["files"]:
        written |= checkpoint_files.read_part(ran[0] / "step-000000006", entry)[1]
        means.append(written["model/norm.running_mean"])
    for name, tensor in model.state_dict().items():
        if "running" not in name:
            assert torch.equal(tensor, written[f"model/{name}"]), name
    assert torch.equal(model.norm.running_mean, means[0]) and not torch.equal(*means)
    assert "was saved by 2 ranks and goes on with 1" in caplog.text


if __name__ == "__main__":
    main(sys.argv[1])
