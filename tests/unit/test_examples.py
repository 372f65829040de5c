"""The examples run on CPU ranks, and do what their texts claim."""
from __future__ import annotations

import argparse
import importlib.util
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed

from tests.unit.programs import ROOT, python

SMALL = ["--layers", "1", "--heads", "2", "--width", "32", "--context", "32", "--warmup", "5"]


def run(name: str, *options: str, cwd: Path, ranks: int = 1) -> str:
    done = python(str(ROOT / "examples" / name), *options, cwd=cwd, ranks=ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def text_lm() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example", ROOT / "examples" / "03_text_lm.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_01_trains_from_any_directory_and_writes_nothing(tmp_path: Path) -> None:
    output = run("01_ddp_minimal.py", "--epochs", "2", cwd=tmp_path)
    losses = [float(text) for text in re.findall(r"^epoch ./2: loss ([0-9.]+)$", output, re.MULTILINE)]
    assert len(losses) == 2 and losses[1] < losses[0]
    assert output.splitlines()[-1].startswith(f"final loss: {losses[1]:.6f}"[:-1])
    assert not list(tmp_path.iterdir())


def test_02_shows_what_each_rank_gets(tmp_path: Path) -> None:
    ranks = 3
    samples: dict[str, list[list[int]]] = {}
    title = ""
    for line in run("02_distributed_sampler.py", cwd=tmp_path, ranks=ranks).splitlines():
        if found := re.fullmatch(r"  rank (\d+): ([0-9 ]*)", line):
            samples.setdefault(title, []).append([int(word) for word in found[2].split()])
            assert len(samples[title]) == int(found[1]) + 1
        else:
            title = line.partition(":")[0]
    counts = {title: Counter(sum(parts, [])) for title, parts in samples.items()}
    assert all(len(parts) == ranks for parts in samples.values())

    assert {len(part) for part in samples["padded, the default"]} == {11}
    assert {len(part) for part in samples["drop_last=True"]} == {10}
    assert set(counts["padded, the default"]) == set(range(10 * ranks + 1))
    assert max(counts["drop_last=True"].values()) == 1

    epochs = [samples[title] for title in (
        "epoch 0", "without set_epoch() the next epoch has the same order", "after set_epoch(1)")]
    assert epochs[0] == epochs[1] != epochs[2]
    assert all(sorted(sum(parts, [])) == list(range(10 * ranks)) for parts in epochs)

    assert samples["uneven inputs under Join"] == [list(range(rank + 1)) for rank in range(ranks)]
    assert counts["a stream, divided by rank and worker"] == Counter(range(12 * ranks + 1))
    in_shards = [10 * n + sample for n in range(5 * ranks) for sample in range(1 + n % 9)]
    assert counts["shards, resumed after 3 batches without workers"] == Counter(in_shards)


def final_losses(output: str) -> tuple[float, float]:
    found = re.search(r"^held-out loss ([0-9.]+) nats per byte; unigram entropy ([0-9.]+)$", output, re.MULTILINE)
    assert found, output
    return float(found[1]), float(found[2])


def test_03_learns_from_context_and_repeats_itself(tmp_path: Path) -> None:
    text = tmp_path / "text of mine.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 4000)
    outputs = [run("03_text_lm.py", "--text", str(text), "--steps", "60", *SMALL, cwd=tmp_path) for _ in range(2)]
    loss, entropy = final_losses(outputs[0])
    assert loss < entropy - 0.8 and final_losses(outputs[1]) == (loss, entropy)
    progress = r"^step +25/60  loss [0-9.]+  lr 2.28e-03  [0-9,]+ tokens/s$"  # in the cosine decay of 3e-3
    assert re.search(progress, outputs[0], re.MULTILINE)


def test_03_reads_the_standard_library_stops_in_time_and_resumes(tmp_path: Path) -> None:
    options = [*SMALL, "--max-seconds", "0.01", "--log-every", "2", "--precision", "bfloat16",
               "--checkpoints", str(tmp_path)]
    output = run("03_text_lm.py", *options, cwd=tmp_path)
    assert re.search("step     2/600  loss [0-9.]+  lr 1.20e-03", output)  # in the warm-up
    assert "step     4/600" not in output
    assert 2.5 < final_losses(output)[1] < 3.8
    again = run("03_text_lm.py", *options, cwd=tmp_path)
    assert "resuming after step 2" in again and "step     4/600" in again


@pytest.fixture
def alone() -> Iterator[Any]:
    """What setup_distributed() gives a single process, and its process group."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu"))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("content", [None, b"too short"])
def test_03_names_the_rank_and_the_missing_or_short_text(
        text_lm: ModuleType, alone: Any, tmp_path: Path, content: bytes | None) -> None:
    text = tmp_path / "text"
    if content is not None:
        text.write_bytes(content)
    with pytest.raises(RuntimeError, match=f"^rank 0 on .*{re.escape(str(text))}"):
        text_lm.read_text(argparse.Namespace(text=text, context=32), alone)


def test_03_reads_the_library_in_one_order_without_tests(
        text_lm: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("os.py", "json/decoder.py", "test/test_os.py", "site-packages/numpy.py", "a.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{name};")
    monkeypatch.setattr(text_lm.sysconfig, "get_path", {"stdlib": str(tmp_path)}.get)
    text = text_lm.standard_library()
    assert sorted(text.decode().split(";")) == ["", "json/decoder.py", "os.py"]
    (tmp_path / "os.py").rename(tmp_path / "away")
    (tmp_path / "away").rename(tmp_path / "os.py")
    assert text_lm.standard_library() == text
    monkeypatch.setattr(text_lm, "LIBRARY_BYTES", 10)
    assert text_lm.standard_library() == text[:10]


def test_03_predicts_the_next_byte_and_decays_matrices_only(text_lm: ModuleType) -> None:
    inputs, targets = text_lm.windows(torch.arange(100, dtype=torch.uint8), torch.tensor([0, 90]), 5)
    assert inputs.tolist() == [[0, 1, 2, 3, 4], [90, 91, 92, 93, 94]] and (targets == inputs + 1).all()

    model = text_lm.GPT(layers=2, heads=2, width=16, context=8)
    tokens = torch.arange(8)[None]
    changed = tokens.clone()
    changed[0, 5] = 200
    with torch.no_grad():
        different = (model(tokens) != model(changed)).any(-1)[0]
    assert different.tolist() == [False] * 5 + [True] * 3

    optimizer = text_lm.make_optimizer(model, 1e-3, torch.device("cpu"))
    decayed = {parameter for group in optimizer.param_groups if group["weight_decay"] for parameter in group["params"]}
    assert decayed == {parameter for parameter in model.parameters() if parameter.dim() == 2}
