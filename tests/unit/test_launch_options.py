"""Options that launch and submit run share: each reaches `ddpkit launch` with its value, from wherever it is given."""
from __future__ import annotations

import shlex
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.scheduler_commands import Commands
from tests.unit.submission import Login
from utils.tools.cli import defaults
from utils.tools.cli.launch_options import DEFAULTS, SHARED_OPTIONS, LaunchOptions, type_of, words_for_preflight
from utils.tools.launch import launch_cli
from utils.tools.submission import profiles

VALUES: dict[tuple[type, bool], list[Any]] = {
    (bool, False): [True], (bool, True): [True, False], (int, False): [3], (int, True): [3], (float, True): [2.5, 0.0],
    (str, False): ["srun"], (str, True): ["/a b"]}
ROWS = [(name, value) for name in SHARED_OPTIONS for value in VALUES[type_of(name)]]


@pytest.mark.parametrize(("name", "value"), ROWS)
def test_launch_parses_the_words_of_a_job(name: str, value: Any) -> None:
    words = LaunchOptions(**{name: value}).words()
    args = launch_cli.parse([*words, "--", "train.py"])
    assert LaunchOptions(**{each: getattr(args, each) for each in SHARED_OPTIONS}) == DEFAULTS._replace(**{name: value})


@pytest.mark.parametrize(("name", "value"), ROWS)
def test_submit_passes_each_option_on(name: str, value: Any, tmp_path: Path, commands: Commands,
                                      monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    words = LaunchOptions(**{name: value}).words()
    done = Login(tmp_path, commands, capsys).submit("run", "--dry-run", "--site", "generic-slurm", *words, "train.py")
    assert f" {shlex.join(words)} -- train.py\n" in done.out, done.err


def test_defaults_are_no_words() -> None:
    assert DEFAULTS.words() == []
    assert LaunchOptions(launcher="torchrun", label=True).words() == ["--torchrun", "--label"]


def test_a_preflight_neither_restarts_nor_spares_hosts() -> None:
    words = ["--jobid", "7", *LaunchOptions(ranks_per_node=2, spare=1, max_restarts=3, label=True).words()]
    assert list(words_for_preflight(words)) == ["--jobid", "7", "--ntasks-per-node", "2", "--label"]


@pytest.mark.parametrize("name", [name for name, option in SHARED_OPTIONS.items() if option.setting])
def test_a_file_of_defaults_gives_what_the_command_line_leaves_out(
        name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    option = SHARED_OPTIONS[name]
    assert option.setting is not None
    file = {defaults.CENTRE_VARIABLE: str(tmp_path / "centre.yaml")}
    monkeypatch.setenv(*next(iter(file.items())))
    monkeypatch.delenv(option.setting.variable, raising=False)
    (tmp_path / "centre.yaml").write_text(f"{option.key}: {option.setting.example}\n")
    args, environ = Namespace(**DEFAULTS._asdict()), {**file}
    defaults.fill_in(args)
    defaults.set_variables(environ)
    if option.setting.for_ranks:
        assert getattr(args, name) is None and environ == {**file, option.setting.variable: option.setting.example}
        return
    assert getattr(args, name) == type_of(name)[0](option.setting.example) and environ == file
    given = Namespace(**DEFAULTS._replace(**{name: VALUES[type_of(name)][-1]})._asdict())
    defaults.fill_in(given)
    assert getattr(given, name) == VALUES[type_of(name)][-1]


@pytest.mark.parametrize("name", [name for name, option in SHARED_OPTIONS.items() if option.in_profile])
def test_a_profile_gives_an_option(name: str, tmp_path: Path) -> None:
    value = VALUES[type_of(name)][0]
    text = f"title: T\nscheduler: slurm\n{name}: {str(value).lower() if isinstance(value, bool) else value}\n"
    assert profiles.parse(text, tmp_path / "t.yaml").launch == DEFAULTS._replace(**{name: value})
