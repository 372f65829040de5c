"""Text that the kit did not write: no command prints what a terminal would obey."""
from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.unit.scheduler_commands import Commands
from tests.unit.submission import Login
from utils.tools.cli.main import main
from utils.tools.launch.launch_result import Ended
from utils.tools.launch.outcome import Outcome
from utils.visible_text import visible

ATTACK = "\x1b]0;TITLE\x07\x1b[2J\x1b]52;c;ZXZpbA==\x07\x9b31m\u202e"
SHOWN = r"\x1b]0;TITLE\x07\x1b[2J\x1b]52;c;ZXZpbA==\x07\x9b31m\u202e"


@pytest.mark.parametrize(("text", "one_line", "expected"), [
    (ATTACK, False, SHOWN), ("a\tb\nc\r\n", False, "a\tb\nc\\x0d\n"), ("a\tb\nc\n", True, r"a\tb\nc\n"),
    ("é 漢字 👍 \\x1b", True, "é 漢字 👍 \\x1b"), ("\udc9b\ud800\x7f\x00", False, r"\x9b\ud800\x7f\x00")])
def test_what_a_terminal_obeys_is_shown_as_its_code(text: str, one_line: bool, expected: str) -> None:
    assert visible(text, one_line=one_line) == expected


def is_harmless(text: str) -> bool:
    return text == visible(text)


def test_doctor_logs_shows_the_line_of_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "job.out"
    output.write_text(f"Traceback (most recent call last):\nRuntimeError: CUDA out of memory. {ATTACK}\n")
    assert main(["doctor", "logs", str(output)]) in (1, 3)
    text = capsys.readouterr().out
    assert "CUDA out of memory" in text and r"\x1b[2J" in text and is_harmless(text)


def test_submit_list_shows_names_and_hosts_that_others_wrote(
        tmp_path: Path, commands: Commands, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "jobs-out" / "train-1"
    folder.mkdir(parents=True)
    record = {"scheduler": "slurm", "job_ids": [f"7{ATTACK}"], "submitted": f"2026{ATTACK}",
              "job": {"name": f"a\n{ATTACK}"}}
    (folder / "submission.json").write_text(json.dumps(record))
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    (folder.parent / "bad-hosts.txt").write_text(f"n1{ATTACK} {now} storage: {ATTACK}\n")
    done = Login(tmp_path, commands, capsys).submit("list", "--folder", str(folder.parent))
    assert rf"a\n{SHOWN}" in done.out and len(done.out.splitlines()) == 2 and is_harmless(done.out), done
    assert f"n1{SHOWN} until" in done.err and is_harmless(done.err)


def test_sites_config_shows_values(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "ddpkit.yaml").write_text(f"account: a\npython: /x{ATTACK}\n")
    assert main(["sites", "config"]) == 0
    out = capsys.readouterr().out
    assert f"/x{SHOWN}" in out and is_harmless(out)


def test_launch_shows_the_name_of_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", str(tmp_path / f"no{ATTACK}.py")])
    err = capsys.readouterr().err
    assert SHOWN in err and is_harmless(err)


def test_last_line_of_a_launch_shows_what_an_exception_says(capsys: pytest.CaptureFixture[str]) -> None:
    Ended(Outcome(1, "exception", f"rank 1: ValueError: {ATTACK}")).report()
    err = capsys.readouterr().err
    assert SHOWN in err and is_harmless(err)
