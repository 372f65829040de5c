"""The examples run as one process, refuse bad input with a message and a status, and do what their texts claim."""
from __future__ import annotations

import argparse
import importlib.util
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = ("--layers", "1", "--heads", "2", "--width", "32", "--context", "32", "--steps", "60", "--warmup", "5")


def run(name: str, *options: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(EXAMPLES / name), *options], capture_output=True, text=True, timeout=120,
                          cwd=cwd, env={**os.environ, "OMP_NUM_THREADS": "1"})  # threads that wait for a busy core spin


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("example", EXAMPLES / name)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_minimal_trains_and_saves_from_any_directory(tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    done = run("01_ddp_minimal.py", "--epochs", "2", "--save", "new/model.pt", cwd=folder)
    assert done.returncode == 0, done.stderr
    losses = [float(text) for text in re.findall(r"loss ([0-9.]+), mean", done.stdout)]
    assert losses[1] < losses[0]
    assert re.fullmatch(r"final loss: [0-9]+\.[0-9]{10}", done.stdout.splitlines()[-1])
    assert [file.name for file in (folder / "new").iterdir()] == ["model.pt"]
    assert set(torch.load(folder / "new" / "model.pt")) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_minimal_gives_the_same_loss_twice_and_writes_nothing_unless_asked(tmp_path: Path) -> None:
    first, again = (run("01_ddp_minimal.py", "--epochs", "1", cwd=tmp_path).stdout.splitlines()[-1] for _ in range(2))
    assert first == again
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name, options, words", [
    ("01_ddp_minimal.py", ["--epochs", "0"], "--epochs must be at least 1, got 0"),
    ("01_ddp_minimal.py", ["--lr", "nan"], "--lr must be a positive number, got nan"),
    ("01_ddp_minimal.py", ["--save", "."], "--save must name a file"),
    ("02_distributed_sampler.py", ["--num-workers", "-1"], "--num-workers must not be negative, got -1"),
    ("03_text_lm.py", ["--batch-size", "0"], "--batch-size must be at least 1, got 0"),
    ("03_text_lm.py", ["--max-seconds", "0"], "--max-seconds must be positive, got 0.0"),
    ("03_text_lm.py", ["--width", "100", "--heads", "3"], "--width must be a multiple of --heads, got 100 and 3"),
])
def test_bad_options_are_refused_by_name(name: str, options: list[str], words: str, monkeypatch: pytest.MonkeyPatch,
                                         capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [name, *options])
    with pytest.raises(SystemExit) as stop:
        load(name).main()
    assert stop.value.code == 2
    assert words in capsys.readouterr().err


def test_sampler_example_proves_its_claims() -> None:
    done = run("02_distributed_sampler.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("  ok: ") == 12
    assert done.stdout.splitlines()[-1] == "all claims hold on 1 rank(s)"


def test_a_claim_that_does_not_hold_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="every sample exactly once"):
        load("02_distributed_sampler.py").check("every sample exactly once", False)


@pytest.mark.parametrize("length, world_size", [(7, 1), (25, 2), (13, 4), (2, 4)])
def test_a_sharded_stream_loses_and_repeats_nothing(length: int, world_size: int) -> None:
    stream = load("02_distributed_sampler.py").ShardedStream
    indices = [index for rank in range(world_size) for index in stream(length, rank, world_size)]
    assert sorted(indices) == list(range(length))


def final_losses(output: str) -> tuple[float, float]:
    found = re.fullmatch(r"held-out loss ([0-9.]+) nats per byte; unigram entropy ([0-9.]+)", output.splitlines()[-1])
    assert found, output
    return float(found[1]), float(found[2])


def test_text_model_learns_from_a_file_by_context(tmp_path: Path) -> None:
    text = tmp_path / "text of mine.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 4000)
    done = run("03_text_lm.py", "--text", str(text), *SMALL)
    assert done.returncode == 0, done.stderr
    loss, entropy = final_losses(done.stdout)
    assert loss < entropy - 0.8
    assert re.search(r"^step +25/60  loss [0-9.]+  lr [0-9.e-]+  [0-9,]+ tokens/s$", done.stdout, re.MULTILINE)
    assert final_losses(run("03_text_lm.py", "--text", str(text), *SMALL).stdout) == (loss, entropy)


def test_text_model_reads_the_standard_library_and_stops_in_time(tmp_path: Path) -> None:
    words = [*SMALL, "--max-seconds", "0.01", "--log-every", "2", "--precision", "bfloat16", "--checkpoints",
             str(tmp_path)]
    done = run("03_text_lm.py", *words)
    assert done.returncode == 0, done.stderr
    assert "step     2/60" in done.stdout
    assert "step     4/60" not in done.stdout
    assert 2.5 < final_losses(done.stdout)[1] < 3.8
    again = run("03_text_lm.py", *words)
    assert "resuming after step 2" in again.stdout and "step     4/60" in again.stdout, again.stdout


@pytest.mark.parametrize("content", [None, b"", b"too short"])
def test_text_model_refuses_a_missing_or_short_text(tmp_path: Path, content: bytes | None) -> None:
    text = tmp_path / "text"
    if content is not None:
        text.write_bytes(content)
    done = run("03_text_lm.py", "--text", str(text), *SMALL)
    assert done.returncode != 0
    assert re.search(f"rank 0 on .*{re.escape(str(text))}", done.stderr)


def test_the_standard_library_is_read_in_one_order_and_without_tests(tmp_path: Path,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    example = load("03_text_lm.py")
    for name in ("os.py", "json/decoder.py", "test/test_os.py", "site-packages/numpy.py", "json/readme.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{name};")
    monkeypatch.setattr(example.sysconfig, "get_path", {"stdlib": str(tmp_path)}.get)
    text = example.standard_library()
    assert sorted(text.decode().split(";")) == ["", "json/decoder.py", "os.py"]
    (tmp_path / "os.py").rename(tmp_path / "away")
    (tmp_path / "away").rename(tmp_path / "os.py")
    assert example.standard_library() == text
    monkeypatch.setattr(example, "LIBRARY_BYTES", 10)
    assert example.standard_library() == text[:10]


def test_unigram_entropy_of_four_equally_frequent_bytes_is_log_4() -> None:
    data = torch.tensor([0, 50, 100, 255] * 8, dtype=torch.uint8)
    assert load("03_text_lm.py").unigram_entropy(data) == pytest.approx(math.log(4))


def test_windows_are_followed_by_their_targets() -> None:
    data = torch.arange(100, dtype=torch.uint8)
    inputs, targets = load("03_text_lm.py").windows(data, torch.tensor([0, 90]), 5)
    assert inputs.tolist() == [[0, 1, 2, 3, 4], [90, 91, 92, 93, 94]]
    assert (targets == inputs + 1).all()


def test_learning_rate_warms_up_linearly_then_falls_to_a_tenth() -> None:
    args = argparse.Namespace(lr=2.0, warmup=10, steps=110)
    rates = [load("03_text_lm.py").learning_rate(step, args) for step in (0, 4, 9, 10, 60, 110)]
    assert rates == pytest.approx([0.2, 1.0, 2.0, 2.0, 1.1, 0.2])


def test_the_model_sees_no_byte_of_the_future() -> None:
    model = load("03_text_lm.py").GPT(layers=2, heads=2, width=16, context=8)
    tokens = torch.arange(8)[None]
    changed = tokens.clone()
    changed[0, 5] = 200
    with torch.no_grad():
        different = (model(tokens) != model(changed)).any(-1)[0]
    assert different.tolist() == [False] * 5 + [True] * 3
