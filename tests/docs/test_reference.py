"""The pages of commands and names are those that `--help` and the docstrings give."""
from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs import reference
from utils.tools.cli.main import COMMANDS

SUBCOMMANDS = {*itertools.chain(*reference.LISTS), *(f"sites {name}" for name in ("new", "list", "config"))}


@pytest.mark.parametrize("page", reference.PAGES, ids=lambda page: page.name)
def test_reference_is_up_to_date(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To write it again: python -m tests.docs.reference --write."""
    monkeypatch.setitem(os.environ, "COLUMNS", "40")
    monkeypatch.setitem(os.environ, "DDPKIT_SITE", "lumi")
    assert page.read_text() == reference.PAGES[page]()


def test_every_option_and_command_is_listed() -> None:
    page = (reference.ROOT / "docs" / "cli.md").read_text()
    for option in ("--nodes N", "--launcher NAME", "--requeue", "--no-requeue", "--bucket-cap-mb MIB", "--png FILE"):
        assert f"`{option}`" in page
    assert not reference.commands_without_list()


def commands_of(page: Path) -> Iterator[list[str]]:
    """The words of each command of the kit in a page, from the command's name to its script."""
    text = page.read_text().replace("\\\n", " ")
    names = "|".join(COMMANDS)
    for command in re.findall(rf"(?=(?:\bddpkit\s|\bscripts/)((?:{names})\b[^`\n]*))", text):
        words = re.sub(r"^(\w+)\.py", r"\1", command).split()
        ends = (index for index, word in enumerate(words) if re.search(r"\.py$|^(#|\.\.\.|\|\|)", word))
        if words[0] == "watch":  # the command of another launcher follows
            ends = (index for index, word in enumerate(words) if index and not word.startswith("-"))
        yield words[:next(ends, len(words))]


@pytest.mark.parametrize("page", sorted({*reference.ROOT.glob("*.md"), *reference.ROOT.glob("[dje]*/**/*.md")}),
                         ids=lambda page: str(page.relative_to(reference.ROOT)))
def test_every_command_of_a_page_has_its_options(page: Path) -> None:
    for words in commands_of(page):
        if "-m" in words:  # of another command of the kit, which is found by itself
            words = words[:words.index("-m")]
        two_words = " ".join(words[:2])
        command = two_words if two_words in SUBCOMMANDS else words[0]
        known = {"--help", *re.findall(r"(?<![\w-])--?[a-z][\w-]*", reference.help_of(command), re.IGNORECASE)}
        used = {word.partition("=")[0].strip(".,)(;:") for word in words if re.match(r"--?[a-zA-Z]", word)}
        assert used <= known, f"{page.name}: {' '.join(words)}"
