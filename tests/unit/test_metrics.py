"""The log of a run has every step once, whatever a kill or a full disk leaves; progress lines; the picture."""
from __future__ import annotations

import errno
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.faults.programs import run_ranks
from tests.unit.programs import ROOT, python
from utils.distributed import StartTimes
from utils.launch_protocol import RESTART, RestartNotice
from utils.metrics import Metrics
from utils.metrics.run_log import FILE_NAME, read_run
from utils.metrics.trackers import TensorBoard
from utils.tools.bench import charts

ONE_RANK: Any = SimpleNamespace(rank=0, world_size=1, is_main=True, device=torch.device("cpu"),
                                start_times=StartTimes(0, 2.5, 0.1, 0.2))


def train(folder: Path, first: int, last: int, save_every: int = 100, **options: Any) -> None:
    """Log steps as a training that saves would, and end as if killed."""
    metrics = Metrics(ONE_RANK, folder, unit="tokens", per_step=100, **options)
    for step in range(first, last + 1):
        with metrics.data_wait():
            pass
        metrics.log(step, loss=torch.tensor(10.0 - step), lr=0.1)
        if step % save_every == 0:
            metrics.state_dict()


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / FILE_NAME).read_text().splitlines()]


def steps(folder: Path) -> list[int]:
    return [line["step"] for line in lines(folder) if "event" not in line]


def test_line_has_all_columns(tmp_path: Path) -> None:
    train(tmp_path, 1, 2, save_every=1, flops=2e12, peak_flops=4e12)
    start, first, _ = lines(tmp_path)
    assert start["event"] == "start" and start["step"] == 0 and start["world_size"] == 1 and "restart" not in start
    assert start["started_in"] == {"staging": 0, "imports": 2.5, "exchange": 0.1, "process_group": 0.2}
    assert first["loss"] == 9.0 and first["lr"] == 0.1 and first["memory_bytes"] > 1e6
    assert first["tokens_per_second"] == pytest.approx(100 / first["step_seconds"])
    assert first["mfu"] == pytest.approx(0.5 / first["step_seconds"]) and first["data_seconds"] < first["step_seconds"]


def test_a_restart_of_the_launch_is_in_the_line_of_the_start(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path, 1, 8, save_every=4)
    cause = RestartNotice(1, "the connection to n2 was lost", ("n2",), time.time() - 9)
    monkeypatch.setenv(RESTART, cause.variables()[RESTART])
    train(tmp_path, 5, 9, save_every=4)
    [restart] = [line["restart"] for line in lines(tmp_path) if "restart" in line]
    assert 9 <= restart.pop("seconds") < 30
    assert restart == {"number": 1, "cause": cause.cause, "without": ["n2"], "steps_lost": 4}


@pytest.mark.parametrize(("first", "tail"), [
    (4, b""), (4, b'{"step": 7, "lo'), (4, b"\0\0\0\0\n\0\0"), (4, b'{"step": 7}\n{"st'), (1, b"")])
def test_restart_drops_later_steps_and_a_torn_line(tmp_path: Path, first: int, tail: bytes) -> None:
    train(tmp_path, 1, 6, save_every=3)
    run = lines(tmp_path)[0]["run"]
    with (tmp_path / FILE_NAME).open("ab") as file:
        file.write(tail)
    train(tmp_path, first, first + 2, save_every=first + 2)
    assert steps(tmp_path) == list(range(1, first + 3))
    assert {line["run"] for line in lines(tmp_path) if "event" in line} == {run}
    assert read_run(tmp_path).seams == [3] * (first == 4)


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_save_writes_the_steps_before_it_and_close_the_rest(error: type[BaseException], tmp_path: Path) -> None:
    """Also where a training fails, or stops by sys.exit()."""
    train(tmp_path, 1, 7, save_every=5)
    assert steps(tmp_path) == [1, 2, 3, 4, 5]
    with pytest.raises(error), Metrics(ONE_RANK, tmp_path) as metrics:
        metrics.log(6, loss=torch.tensor(float("nan")))
        metrics.log(6, held_out_loss=2.0)
        raise error
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert lines(tmp_path)[-1]["held_out_loss"] == 2.0 and lines(tmp_path)[-1]["loss"] is None


def test_completed_and_missing_steps_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path, 1, 3, save_every=3)
    metrics = Metrics(ONE_RANK, tmp_path)
    metrics.log(6, loss=1.0)
    metrics.state_dict()
    assert "ends with step 3. Expected step 5" in caplog.text
    with pytest.raises(ValueError, match="step 6 was logged after step 6 was complete"):
        metrics.log(6, held_out_loss=1.0)


def test_full_disk_delays_lines(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    write, is_full = os.pwrite, True

    def full(file: int, data: bytes, position: int) -> int:
        if is_full and position:
            write(file, data[:5], position)
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data, position)

    monkeypatch.setattr(os, "pwrite", full)
    metrics = Metrics(ONE_RANK, tmp_path, every=1)
    for step in range(1, 7):
        is_full = 2 < step < 5
        metrics.log(step, loss=1.0)
    metrics.close()
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6] and caplog.text.count("cannot write") == 1


def test_progress_lines_are_means(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ddpkit")
    metrics = Metrics(ONE_RANK, unit="tokens", per_step=10, last_step=5, print_every=2)
    for step in range(1, 6):
        metrics.log(step, loss=torch.tensor(float(step)), lr=step / 10)
    metrics.close()
    found = [record.getMessage().rpartition("  ")[0] for record in caplog.records]
    assert found == ["step     2/5  loss 1.5000  lr 2.00e-01", "step     4/5  loss 3.5000  lr 4.00e-01",
                     "step     5/5  loss 5.0000  lr 5.00e-01"]
    assert metrics.summary().startswith("50 tokens in ") and "\r" not in capsys.readouterr().out  # no terminal


PROGRAM = """\
import sys, torch
from utils import setup_distributed
from utils.metrics import Metrics
with setup_distributed("gloo") as dist, Metrics(dist, sys.argv[1]) as metrics:
    for step in range(1, 4):
        metrics.log(step, loss=torch.tensor(float(step + dist.rank)), rank=dist.rank)
"""


def test_tensors_are_means_and_numbers_are_those_of_rank_0(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    run_ranks(tmp_path, str(tmp_path / "program.py"), (2, [str(tmp_path)]))
    assert [(line["loss"], line["rank"]) for line in lines(tmp_path)[1:]] == [(1.5, 0), (2.5, 0), (3.5, 0)]


def test_missing_packages_are_reported_and_a_wandb_run_keeps_its_id(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
    train(tmp_path / "none", 1, 1, save_every=1, tensorboard=True, wandb="project")
    assert steps(tmp_path / "none") == [1]
    assert "pip install tensorboard" in caplog.text and "pip install wandb" in caplog.text
    started: list[dict[str, Any]] = []
    run = SimpleNamespace(log=lambda values, step: None, finish=lambda: None)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **words: started.append(words) or run))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    for first in (1, 3):
        train(tmp_path, first, first + 1, save_every=2, wandb="project")
    assert started[0] == started[1] and started[0]["mode"] == "offline"
    assert started[0]["id"] == lines(tmp_path)[0]["run"]


def test_event_files_hide_what_is_trained_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, last in ((1, 3), (2, 4)):
        board = TensorBoard(tmp_path, first)
        for step in range(first, last + 1):
            board.log(step, {"loss": first + step / 10})
        board.close()
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("loss")
    assert [(event.step, round(event.value, 1)) for event in events] == [(1, 1.1), (2, 2.2), (3, 2.3), (4, 2.4)]


def test_text_that_the_locale_cannot_encode_is_logged_with_escapes() -> None:
    text = "from utils.log import *; setup_logging(0, 1); get_logger('any').info('loss \u2248 1')"
    done = python("-c", text, env={"PYTHONIOENCODING": "latin-1:strict"})
    assert (done.stdout, done.stderr) == ("loss \\u2248 1\n", "")


def test_log_goes_to_a_pipe_that_replaces_a_file(tmp_path: Path) -> None:
    """Python takes its standard output for a file then, and asks for a position."""
    text = "import os; from utils.log import *; reader, writer = os.pipe(); os.dup2(writer, 1); setup_logging(0, 1); " \
           "get_logger('any').info('loss \u2248 1'); os.write(2, os.read(reader, 99))"
    with (tmp_path / "output").open("w") as output:
        done = subprocess.run([sys.executable, "-c", text], cwd=ROOT, stdout=output, stderr=subprocess.PIPE, text=True,
                              env={**os.environ, "PYTHONIOENCODING": "latin-1:strict"}, timeout=60)
    assert (done.returncode, done.stderr) == (0, "loss \\u2248 1\n")


@pytest.mark.parametrize("shell", ["{} | true; exit ${{PIPESTATUS[0]}}", "{} >&-"])
def test_output_that_nobody_reads_is_no_error(shell: str) -> None:
    text = "from utils.log import *; setup_logging(0, 1); log = get_logger('any'); " \
           "log.info('loss'); log.info('loss'); show_progress('loss')"
    words = shell.format(f'{shlex.quote(sys.executable)} -c "{text}"')
    done = subprocess.run(["bash", "-c", words], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_plot_names_what_is_missing(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert charts.main([str(tmp_path)]) == 2
    assert f"no such file: {tmp_path / FILE_NAME}. Expected a {FILE_NAME}" in capsys.readouterr().err
    (tmp_path / FILE_NAME).write_text('{"event": "start", "step": 0}\n')
    assert charts.main([str(tmp_path)]) == 2 and "has no step" in capsys.readouterr().err
    train(tmp_path, 1, 1, save_every=1)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert charts.main([str(tmp_path)]) == 2 and "pip install matplotlib" in capsys.readouterr().err


def test_plot_draws_runs_with_their_seams_and_other_numbers(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.axes import Axes

    drawn: list[float] = []
    with monkeypatch.context() as patched:
        patched.setattr(Axes, "axvline", lambda axes, x, **options: drawn.append(x))
        train(tmp_path / "a", 1, 60, save_every=30)
        train(tmp_path / "a", 31, 80, save_every=40)
        train(tmp_path / "b", 1, 20, save_every=10)
        assert charts.main([str(tmp_path / "a"), str(tmp_path / "b"), "--output", str(tmp_path / "runs.png")]) == 0
    assert (tmp_path / "runs.png").read_bytes().startswith(b"\x89PNG") and set(drawn) == {30.5}

    titles: list[str] = []
    monkeypatch.setattr(Axes, "set_title", lambda axes, title, **options: titles.append(title))
    log, picture = tmp_path / "log.jsonl", tmp_path / "log.png"
    for value in ('null', '"0.5"', 'NaN'):
        log.write_text(f'{{"step": 1, "time": 5.0, "loss": {value}}}\n')
        assert charts.main([str(log), "--output", str(picture)]) == 2 and not picture.exists()
        assert "no column can be drawn; found loss, time. Expected finite numbers" in capsys.readouterr().err
    log.write_text('{"step": 1, "val_acc": 0.5}\n{"step": 2, "val_acc": 0.7}\n')
    assert charts.main([str(log), "--output", str(picture)]) == 0 and titles == ["val acc"]
