"""Example 07: gradients as without FSDP, checkpoints for any number of ranks, memory as predicted."""
from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.unit.programs import ROOT, python
from utils.tools.plan import plan_cli as cli

MODEL = {"layers": 2, "heads": 2, "width": 32, "context": 16}
LARGE = {"layers": 6, "heads": 4, "width": 128, "context": 16}
COMMANDS = {4: ["save", "load", "refuse", "memory", "train"], 2: ["load", "memory"], 1: ["load", "train"]}


def words_of(model: dict[str, int]) -> list[str]:
    return [word for name, value in model.items() for word in (f"--{name}", str(value))]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """The output and results of COMMANDS, functions of fsdp_ranks.py, by the number of ranks."""
    folder, results = tmp_path_factory.mktemp("fsdp"), {}
    (folder / "trained" / "step-000000005").mkdir(parents=True)  # of a save that was killed
    for number, commands in COMMANDS.items():
        done = python("-m", "tests.unit.fsdp_ranks", str(folder), *commands, ranks=number)
        assert done.returncode == 0, done.stderr
        results[number] = {"output": done.stdout, **json.loads(done.stdout.splitlines()[-1])}
    return results


def test_checkpoint_of_4_ranks_loads_bit_for_bit_on_4_2_and_1(found: dict[int, dict[str, Any]]) -> None:
    saved = dict(found[4]["save"])
    assert saved.pop("gradient error") < 1e-5
    assert [found[number]["load"] for number in (4, 2, 1)] == [{**saved, "step": 2}] * 3


def test_training_resumes_with_hsdp_on_other_ranks(found: dict[int, dict[str, Any]]) -> None:
    whole = python("examples/07_fsdp.py", *words_of(MODEL), "--batch-size", "8", "--steps", "6")
    assert whole.returncode == 0, whole.stderr
    assert "parameters on 2 shards" in found[4]["output"] and "resuming after step 4" in found[1]["output"]
    losses = [re.findall(r"step 6/6: loss ([0-9.]+)", output) for output in (found[1]["output"], whole.stdout)]
    assert float(losses[0][0]) == pytest.approx(float(losses[1][0]), abs=2e-4)


def test_checkpointer_refuses_sharded_states_in_one_sentence(found: dict[int, dict[str, Any]]) -> None:
    refused = dict(found[4]["refuse"])
    assert refused.pop("files") == []
    assert set(refused) == {"model", "optimizer", "tensor"}
    for name, messages in refused.items():
        assert [message.split(":")[0] for message in messages] == ["CheckpointError", "StateError"]
        for message in messages:
            assert re.search(f"{name}.* sharded over the ranks.*; expected .* whole on every rank. Save sharded "
                             "states with torch.distributed.checkpoint, as examples/07_fsdp.py does", message), message


@pytest.mark.parametrize("number", [2, 4])
def test_peak_memory_of_a_rank_is_as_planned(found: dict[int, dict[str, Any]], number: int,
                                             capfd: pytest.CaptureFixture[str]) -> None:
    example = str(ROOT / "examples" / "07_fsdp.py")
    assert cli.main(["--json", "--gpus", str(number), example, *words_of(LARGE), "--batch-size", str(8 // number)]) == 0
    planned = sum(json.loads(capfd.readouterr().out)["memory"].values())
    assert found[number]["memory"]["peak"] == pytest.approx(planned, rel=0.1)
