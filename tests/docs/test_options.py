"""Every option that `--help` of a command lists is in a page."""
from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.docs.pages import ROOT

PAGES = [*(ROOT / "docs").rglob("*.md"), *(ROOT / folder / "README.md" for folder in (".", "jobs", "examples"))]
COMMANDS = {"launch": [""], "submit": ["run", "doctor", "status", "list", "logs", "cancel", "resubmit"],
            "doctor": ["", "logs"], "plan": [""], "bench": ["ddp", "collectives"], "sites": ["", "new"], "plot": [""]}


@pytest.mark.parametrize(("name", "subcommand"), [(name, one) for name, all_ in COMMANDS.items() for one in all_])
def test_every_option_is_in_a_page(name: str, subcommand: str) -> None:
    words = [sys.executable, ROOT / "scripts" / f"{name}.py", *subcommand.split(), "--help"]
    text = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    options = set(re.findall(r"^ {2,8}(?:-\w(?: [\w/.]+)?, )?(--[a-z][\w-]+)", text, re.MULTILINE)) - {"--help"}
    pages = "\n".join(page.read_text() for page in PAGES)
    assert [option for option in sorted(options) if not re.search(rf"(?<![\w-]){option}(?![\w-])", pages)] == []
    assert options or (name, subcommand) == ("sites", "") or subcommand in ("resubmit", "list")
