"""Example 07: gradients as without FSDP, checkpoints for any number of ranks, memory as predicted."""
from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.unit.programs import ROOT, python

MODEL = {"layers": 2, "heads": 2, "width": 32, "context": 16}
SMALL = [word for name, value in MODEL.items() for word in (f"--{name}", str(value))]


def load_example() -> Any:
    spec = importlib.util.spec_from_file_location("example07", ROOT / "examples" / "07_fsdp.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ranks(command: str, folder: object, number: int, groups: int = 1) -> dict[str, Any]:
    """Run a function of fsdp_ranks.py on this number of ranks; return the result of rank 0."""
    done = python("-m", "tests.unit.fsdp_ranks", command, str(folder), str(groups), ranks=number)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def test_checkpoint_of_4_ranks_loads_bit_for_bit_on_4_2_and_1(tmp_path: Path) -> None:
    saved = ranks("save", tmp_path, 4)
    assert saved.pop("gradient error") < 1e-5
    for number, groups in ((4, 2), (2, 1), (1, 1)):
        assert ranks("load", tmp_path, number, groups) == {**saved, "step": 2}, (number, groups)


def test_training_resumes_with_hsdp_on_other_ranks(tmp_path: Path) -> None:
    options = [*SMALL, "--batch-size", "8", "--checkpoints", str(tmp_path), "--save-every", "2"]
    first = python("examples/07_fsdp.py", *options, "--steps", "4", "--replicate", "2", ranks=4)
    assert first.returncode == 0, first.stderr
    (tmp_path / "step-000000005").mkdir()  # of a save that was killed
    resumed = python("examples/07_fsdp.py", *options, "--steps", "6", ranks=2)
    whole = python("examples/07_fsdp.py", *options[:-4], "--steps", "6")
    assert "resuming after step 4" in resumed.stdout, resumed.stderr
    losses = [re.findall(r"step 6/6: loss ([0-9.]+)", done.stdout) for done in (resumed, whole)]
    assert float(losses[0][0]) == pytest.approx(float(losses[1][0]), abs=2e-4)


def test_checkpointer_refuses_sharded_states_in_one_sentence(tmp_path: Path) -> None:
    found = ranks("refuse", tmp_path, 2)
    assert found.pop("files") == []
    assert set(found) == {"model", "optimizer", "tensor"}
    for name, messages in found.items():
        assert [message.split(":")[0] for message in messages] == ["CheckpointError", "StateError"]
        for message in messages:
            assert re.search(f"{name}.* sharded over the ranks.*; expected .* whole on every rank. Save sharded "
                             "states with torch.distributed.checkpoint, as examples/07_fsdp.py does", message), message


@pytest.mark.parametrize("number", [2, 4])
def test_peak_memory_of_a_rank_is_as_planned(number: int) -> None:
    model = {"layers": 6, "heads": 4, "width": 128, "context": 16}
    words = [word for name, value in model.items() for word in (f"--{name}", str(value))]
    done = python("scripts/plan.py", "--json", "--gpus", str(number), "examples/07_fsdp.py", *words,
                  "--batch-size", str(8 // number))
    assert done.returncode == 0, done.stderr
    planned = sum(json.loads(done.stdout)["memory"].values())
    assert ranks("memory", json.dumps(model), number)["peak"] == pytest.approx(planned, rel=0.1)
