"""Mistakes on the command line of each command: the same words and exit status everywhere."""
from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from utils.tools.cli.main import main
from utils.tools.cli.missing_files import no_such_file, no_such_program

WRONG_USE = 2


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("train.py", "job-7.out", "lib/data.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def status_of(words: str) -> int:
    try:
        return main(shlex.split(words))
    except SystemExit as error:
        return int(error.code or 0)


@pytest.mark.parametrize(("words", "remedy"), [
    ("launch trian.py", "Did you mean train.py?"), ("launch no.py", "Check the path of the script"),
    ("launch lib/dat.py", "Did you mean lib/data.py?"),
    ("doctor logs job-6.out", "Did you mean job-7.out?"), ("doctor logs none", "Expected the output file of a job"),
    ("plot run.csv", "Expected a metrics.jsonl or its folder"),
    ("checkpoints list saved", "Expected the folder of a Checkpointer")])
def test_missing_file_has_one_wording_and_status(
        words: str, remedy: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(words) == WRONG_USE
    command, name = words.split()[0], words.split()[-1]
    assert capsys.readouterr().err.endswith(
        f"ddpkit {command}: error: no such file: {name} (in {folder}). {remedy}\n")


def test_missing_file_in_another_folder(folder: Path) -> None:
    assert no_such_file("/nowhere/x.py") == "no such file: /nowhere/x.py. Check the path"
    text = no_such_file("trian.py", folder=str(folder))
    assert text == f"no such file: trian.py (in {folder}). Did you mean train.py?"
    assert no_such_program("lib/data", str(folder)) == "no such program: lib/data. Did you mean lib/data.py?"


@pytest.mark.parametrize(("words", "message"), [
    ("sites lsit", "ddpkit sites: error: there is no 'lsit'. Expected one of: list, new, config, trust. Did you mean "
                   "list?"),
    ("bench ddpp", "ddpkit bench: error: there is no 'ddpp'. Expected one of: collectives, ddp. Did you mean ddp?"),
    ("bench foo", ".* See: ddpkit bench --help"), ("checkpoints verfy x", ".* Did you mean verify?"),
    ("plan --precision bf1 x.py", "ddpkit plan: error: --precision: there is no 'bf1'. .* Did you mean bf16?"),
    ("lanch x", ".* Did you mean: ddpkit launch x"), ("runn x", ".* Did you mean: ddpkit submit run x"),
    ("zzz", ".*, plot.")])
def test_a_word_of_almost_the_same_letters_is_suggested(
        words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(words) == WRONG_USE
    text = capsys.readouterr().err
    assert re.fullmatch(message.replace("?", "[?]"), text.rstrip("\n")), text


@pytest.mark.parametrize(("words", "text"), [
    ("help", "usage: ddpkit COMMAND"), ("help sites", "usage: ddpkit sites list"), ("version", "ddpkit 0."),
    ("-V", "ddpkit 0.")])
def test_help_and_version(words: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(words) == 0
    assert capsys.readouterr().out.startswith(text)
