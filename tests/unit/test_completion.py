"""Tab completion: what bash offers, and what is said without shtab."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from utils.tools.cli.main import COMMANDS, main

# What bash does at a tab: the function of the command reads these variables and fills COMPREPLY.
AT_A_TAB = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
function=$(complete -p ddpkit | sed 's/.*-F \\([^ ]*\\).*/\\1/')
"$function" ddpkit "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


def test_bash_completes_commands_and_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--print-completion", "bash"]) == 0
    script = tmp_path / "ddpkit.bash"
    script.write_text(capsys.readouterr().out)

    def offered(*words: str) -> set[str]:
        done = subprocess.run(["bash", "-c", AT_A_TAB, "bash", str(script), "ddpkit", *words], text=True,
                              capture_output=True, check=True, cwd=tmp_path)
        return set(done.stdout.split())
    assert offered("") >= set(COMMANDS)
    assert offered("laun") == {"launch"}
    assert offered("launch", "--hang") == {"--hang-timeout"}
    assert offered("submit", "") >= {"run", "status", "cancel"}
    assert offered("submit", "run", "--mail") == {"--mail-user", "--mail-type"}
    assert offered("sites", "con") == {"config"}
    assert offered("plan", "--optimizer", "ad") == {"adamw"}


def test_zsh_gets_a_script_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--print-completion", "zsh"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("#compdef ddpkit") and "--hang-timeout" in out


@pytest.mark.parametrize(("words", "status", "message"), [
    (["fish"], 2, "--print-completion needs a shell, one of: bash, zsh"),
    (["bash"], 1, "has no shtab, which writes the completion. Install it there: python -m pip install shtab")])
def test_what_is_missing_is_said(words: list[str], status: int, message: str, monkeypatch: pytest.MonkeyPatch,
                                 capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["--print-completion", *words]) == status
    assert message in capsys.readouterr().err
