"""The examples run on CPU ranks, and do what their texts claim."""
from __future__ import annotations

import argparse
import re
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.unit.programs import ROOT, load_example, python
from utils.metrics.run_log import read_run

ONE_RANK = SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu"))

SMALL = ["--layers", "1", "--heads", "2", "--width", "32", "--context", "32", "--warmup", "5"]


def run(name: str, *options: str, cwd: Path, ranks: int = 1) -> str:
    done = python(str(ROOT / "examples" / name), *options, cwd=cwd, ranks=ranks, warm=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def text_lm() -> ModuleType:
    return load_example("03_text_lm")


@pytest.fixture
def run_03(text_lm: ModuleType, one_rank: None, monkeypatch: pytest.MonkeyPatch,
           capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[..., str]]:
    def run_it(*options: str) -> str:
        monkeypatch.setattr(sys, "argv", ["03_text_lm.py", *options])
        assert text_lm.main() == 0
        return capfd.readouterr().out

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that wait for a busy core would spin
    yield run_it
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("highest")


def test_01_trains_from_any_directory_and_writes_nothing(tmp_path: Path) -> None:
    output = run("01_ddp_minimal.py", "--epochs", "2", cwd=tmp_path)
    losses = [float(text) for text in re.findall(r"^epoch ./2: loss ([0-9.]+)$", output, re.MULTILINE)]
    assert len(losses) == 2 and losses[1] < losses[0]
    assert output.splitlines()[-1].startswith(f"final loss: {losses[1]:.6f}"[:-1])
    assert not list(tmp_path.iterdir())


def test_02_shows_what_each_rank_gets(tmp_path: Path) -> None:
    output = run("02_distributed_sampler.py", cwd=tmp_path, ranks=2)
    blocks = re.findall(r"^(\w[^:\n]*).*\n  rank 0: (.*)\n  rank 1: (.*)", output, re.MULTILINE)
    samples = {title: [list(map(int, words.split())) for words in ranks] for title, *ranks in blocks}
    everything = {title: sorted(sum(ranks, [])) for title, ranks in samples.items()}

    assert [len(rank) for rank in samples["padded, the default"]] == [11, 11]
    assert set(everything["padded, the default"]) == set(range(21))
    assert [len(rank) for rank in samples["drop_last=True"]] == [10, 10]
    assert len(set(everything["drop_last=True"])) == 20

    same = "without set_epoch() the next epoch has the same order"
    assert samples["epoch 0"] == samples[same] != samples["after set_epoch(1)"]
    assert everything["epoch 0"] == everything["after set_epoch(1)"] == list(range(20))

    assert samples["uneven inputs under Join"] == [[0], [0, 1]]
    assert everything["a stream, divided by rank and worker"] == list(range(25))


def final_losses(output: str) -> tuple[float, float]:
    found = re.search(r"^held-out loss ([0-9.]+) nats per byte; unigram entropy ([0-9.]+)$", output, re.MULTILINE)
    assert found, output
    return float(found[1]), float(found[2])


def test_03_learns_from_context_and_repeats_itself(run_03: Callable[..., str], tmp_path: Path) -> None:
    text = tmp_path / "text of mine.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 4000)
    outputs = [run_03("--text", str(text), "--steps", "90", *SMALL) for _ in range(2)]
    loss, entropy = final_losses(outputs[0])
    assert loss < entropy - 0.8 and final_losses(outputs[1]) == (loss, entropy)
    progress = r"^step +25/90  loss [0-9.]+  lr 2.68e-03  [0-9,]+ tokens/s$"  # in the cosine decay of 3e-3
    assert re.search(progress, outputs[0], re.MULTILINE)
    sample = outputs[0].partition("\nsample:\n")[2]
    assert sample.startswith("the quick brown ")


def test_03_reads_the_standard_library_stops_in_time_and_resumes(run_03: Callable[..., str], tmp_path: Path) -> None:
    options = [*SMALL, "--max-seconds", "0.01", "--log-every", "2", "--precision", "bfloat16",
               "--checkpoints", str(tmp_path)]
    output = run("03_text_lm.py", *options, cwd=tmp_path)
    assert re.search("step     2/600  loss [0-9.]+  lr 1.20e-03", output)  # in the warm-up
    assert "step     4/600" not in output
    assert 2.5 < final_losses(output)[1] < 3.8
    again = run_03(*options)
    assert "resuming after step 2" in again and "step     4/600" in again
    run_log = read_run(tmp_path)
    assert run_log.columns["loss"][0] == [1, 2, 3, 4] and run_log.seams == [2]
    assert run_log.columns["held_out_loss"][0] == [2, 4]


@pytest.mark.parametrize("content", [None, b"too short"])
def test_03_names_the_missing_or_short_text(text_lm: ModuleType, tmp_path: Path, content: bytes | None) -> None:
    text = tmp_path / "text"
    if content is not None:
        text.write_bytes(content)
    with pytest.raises((OSError, ValueError), match=re.escape(str(text))):
        text_lm.read_data(argparse.Namespace(text=text, tokens=None, context=32), ONE_RANK)


def test_03_refuses_other_sources_on_another_host(text_lm: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="the hosts have different sources of Python"):
        text_lm.standard_library(SimpleNamespace(all_reduce_mean=lambda value: value + 1))


def test_03_reads_the_token_files_of_nanogpt(text_lm: ModuleType, tmp_path: Path) -> None:
    for name, tokens in (("train.bin", range(50_000, 50_100)), ("val.bin", range(10))):
        (tmp_path / name).write_bytes(struct.pack(f"={len(tokens)}H", *tokens))
    data, held_out = text_lm.read_data(argparse.Namespace(text=None, tokens=tmp_path, context=8), ONE_RANK)
    inputs, targets = text_lm.windows(data, torch.tensor([0, 90]), 3, ONE_RANK.device)
    assert inputs.tolist() == [[50_000, 50_001, 50_002], [50_090, 50_091, 50_092]] and (targets == inputs + 1).all()
    assert held_out.tolist() == list(range(10))


def test_03_shares_the_windows_of_a_step_among_the_ranks(text_lm: ModuleType) -> None:
    def drawn(step: int, world_size: int) -> list[list[int]]:
        args = argparse.Namespace(seed=0, context=4, batch_size=2, accumulate=4 // world_size)
        ranks = [SimpleNamespace(**{**vars(ONE_RANK), "rank": n, "world_size": world_size}) for n in range(world_size)]
        batches = [batch for rank in ranks for batch in text_lm.micro_batches(data, step, args, rank)]
        return sorted(window for inputs, _ in batches for window in inputs.tolist())

    data = torch.arange(200, dtype=torch.uint8)
    assert drawn(7, 1) == drawn(7, 2) == drawn(7, 4) != drawn(8, 1) and len(drawn(7, 1)) == 8


def test_03_predicts_the_next_token_and_decays_matrices_only(text_lm: ModuleType) -> None:
    model = text_lm.GPT(vocabulary=256, layers=2, heads=2, width=16, context=8)
    tokens = torch.arange(8)[None]
    changed = tokens.clone()
    changed[0, 5] = 200
    with torch.no_grad():
        different = [(model(tokens[:, :n]) != model(changed[:, :n])).any().item() for n in range(1, 9)]
        losses = torch.stack([cross_entropy(model(tokens[:, :n]), tokens[:, n]) for n in range(1, 8)])
        assert model(tokens[:, :-1], tokens[:, 1:]).item() == pytest.approx(losses.mean().item(), rel=1e-5)
    assert different == [False] * 5 + [True] * 3

    optimizer = text_lm.make_optimizer(model, 1e-3)
    decayed = {parameter for group in optimizer.param_groups if group["weight_decay"] for parameter in group["params"]}
    assert decayed == {parameter for parameter in model.parameters() if parameter.dim() == 2}


def test_03_has_the_parameters_of_gpt2(text_lm: ModuleType) -> None:
    with torch.device("meta"):
        model = text_lm.GPT(text_lm.GPT2_VOCABULARY, *text_lm.MODELS["gpt2"])
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_373_760  # without biases
    assert model.flops_per_token() == 6 * (124_373_760 - 1024 * 768) + 12 * 12 * 768 * 1024


READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__")


def test_03_reads_no_tensor_between_two_progress_lines(
        text_lm: ModuleType, run_03: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each read would wait for all that the GPU has been given."""
    steps, reads, train_step = 0, [], text_lm.train_step

    def count_step(*arguments: Any) -> Any:
        nonlocal steps
        steps += 1
        return train_step(*arguments)

    def noted(name: str) -> Callable[..., Any]:
        read = getattr(torch.Tensor, name)

        def note(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            reads.append((steps, name))
            return read(tensor, *arguments, **options)
        return note

    monkeypatch.setattr(text_lm, "train_step", count_step)
    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, noted(name))
    run_03("--steps", "42", "--log-every", "21", "--precision", "bfloat16", "--sample", "0", *SMALL)
    reads_of_steps = {step: [name for at, name in reads if at == step] for step in range(1, 43)}
    assert steps == 42 and reads_of_steps.pop(21) and reads_of_steps.pop(42)
    assert not any(reads_of_steps.values()), reads_of_steps


def test_03_compiles_one_graph_for_one_rank(
        run_03: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Training is one graph, evaluation another; hooks that measure the noise scale compile nothing anew."""
    graphs, compile_module = [], torch.nn.Module.compile

    def count(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(torch.is_grad_enabled())
        return graph.forward

    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compile_module(module, backend=count))
    torch._dynamo.reset()
    # Its own patch(): what monkeypatch restores is hidden afterwards. 5 MB of parameters: several of DDP's buckets
    with torch._dynamo.config.patch(optimize_ddp=True):
        run_03("--steps", "21", "--log-every", "21", "--compile", "--sample", "0", "--layers", "12", "--heads", "2",
               "--width", "96", "--context", "8", "--batch-size", "1")
    assert graphs.count(True) == 1 and graphs.count(False) == 1
