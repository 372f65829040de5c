"""The examples run as one process, and refuse bad input with a message and a status."""
from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(name: str, *options: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(EXAMPLES / name), *options], capture_output=True, text=True, timeout=120,
                          cwd=cwd)


def test_minimal_trains_and_saves_from_any_directory(tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    done = run("01_ddp_minimal.py", "--epochs", "2", "--save", "model.pt", cwd=folder)
    assert done.returncode == 0, done.stderr
    losses = [float(text) for text in re.findall(r"loss ([0-9.]+), mean", done.stdout)]
    assert losses[1] < losses[0]
    assert re.search(r"^final loss: [0-9]+\.[0-9]{10}$", done.stdout, re.MULTILINE)
    assert (folder / "model.pt").stat().st_size > 1000
    assert not list(folder.glob("*.tmp"))


def test_minimal_gives_the_same_loss_twice() -> None:
    final = {re.findall("final loss: .*", run("01_ddp_minimal.py", "--epochs", "1").stdout)[0] for _ in range(2)}
    assert len(final) == 1


@pytest.mark.parametrize("options, words", [
    (["--epochs", "0"], "--epochs must be at least 1"), (["--lr", "-1"], "--lr must be a positive number"),
    (["--save", "."], "--save must name a file"), (["--backend", "smoke"], "backend is 'smoke'")])
def test_minimal_refuses_bad_options(options: list[str], words: str) -> None:
    done = run("01_ddp_minimal.py", *options)
    assert done.returncode != 0
    assert words in done.stderr


def test_sampler_example_checks_its_own_claims() -> None:
    done = run("02_distributed_sampler.py")
    assert done.returncode == 0, done.stderr


SMALL = ["--layers", "1", "--width", "32", "--context", "32", "--steps", "60", "--warmup", "5"]


def test_text_model_learns_from_a_file(tmp_path: Path) -> None:
    text = tmp_path / "text of mine.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 4000)
    done = run("03_text_lm.py", "--text", str(text), *SMALL)
    assert done.returncode == 0, done.stderr
    assert "unigram" in done.stdout
    assert "tokens/s" in done.stdout


@pytest.mark.parametrize("content", [None, b"", b"too short"])
def test_text_model_refuses_a_missing_or_short_text(tmp_path: Path, content: bytes | None) -> None:
    text = tmp_path / "text"
    if content is not None:
        text.write_bytes(content)
    done = run("03_text_lm.py", "--text", str(text), *SMALL)
    assert done.returncode != 0
    assert str(text) in done.stderr + done.stdout
