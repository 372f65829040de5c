"""Every option that `--help` prints is in a page."""
from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.docs.pages import ROOT

PAGES = [*(ROOT / "docs").rglob("*.md"), *(ROOT / folder / "README.md" for folder in (".", "jobs", "examples"))]


@pytest.mark.parametrize("command", ["submit run", "submit doctor", "sites new"])
def test_every_option_is_in_a_page(command: str) -> None:
    name, subcommand = command.split()
    text = subprocess.run([sys.executable, ROOT / "scripts" / f"{name}.py", subcommand, "--help"], check=True,
                          capture_output=True, text=True).stdout
    options = set(re.findall(r"(?<![\w=-])--[a-z][a-z-]+", text))
    assert len(options) > 1
    pages = "\n".join(page.read_text() for page in PAGES)
    assert [option for option in sorted(options) if not re.search(rf"(?<![\w-]){option}(?![\w-])", pages)] == []
