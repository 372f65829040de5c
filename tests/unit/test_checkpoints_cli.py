"""ddpkit checkpoints: what it lists, finds damaged and exports."""
from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from utils.checkpoint import Checkpointer
from utils.tools.cli.main import main


def saved(folder: Path, steps: int = 2) -> torch.nn.Module:
    model = torch.nn.Linear(3, 2)
    with Checkpointer(folder) as checkpoints:
        for step in range(1, steps + 1):
            checkpoints.save_and_wait(step, {"model": model, "epoch": step}, metric=0.5 * step)
    return model


def test_list_verify_and_export(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = saved(tmp_path / "a")
    assert main(["checkpoints", "list", "--json", str(tmp_path / "a")]) == 0
    rows = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [(row["step"], row["ranks"], row["metric"]) for row in rows] == [(1, 1, 0.5), (2, 1, 1.0)]
    assert main(["checkpoints", "verify", str(tmp_path / "a"), "--step", "2"]) == 0
    assert capfd.readouterr().out.count("intact") == 1
    assert main(["checkpoints", "export", str(tmp_path / "a"), str(tmp_path / "m")]) == 0
    assert torch.equal(load_file(tmp_path / "m")["weight"], model.weight)


def test_damage_and_a_wrong_folder_have_exit_status_1(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path / "a")
    file = tmp_path / "a" / "step-000000001" / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\7")
    assert main(["checkpoints", "verify", str(tmp_path / "a")]) == 1
    first, second = capfd.readouterr().out.splitlines()
    assert "damaged: rank-00000.safetensors: bytes" in first and second.endswith("intact")
    for words, problem in (([str(tmp_path)], f"is no checkpoint in '{tmp_path}'"),
                           ([str(tmp_path / "a"), "--step", "7"], "there is no checkpoint of step 7")):
        assert main(["checkpoints", "list", *words]) == 1
        assert problem in capfd.readouterr().err
