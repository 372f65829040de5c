"""Pages that have to stay short, and lists that have to be whole."""
from __future__ import annotations

import re

import pytest

from tests.docs.pages import ROOT


@pytest.mark.parametrize(("page", "lines"), [("README.md", 100), ("AGENTS.md", 40), ("docs/cli.md", 150),
                                              ("docs/api.md", 110), ("docs/centres.md", 110),
                                              ("docs/decisions.md", 40)])
def test_a_page_stays_short(page: str, lines: int) -> None:
    assert len((ROOT / page).read_text().splitlines()) <= lines


def test_all_examples_are_listed() -> None:
    page = (ROOT / "examples" / "README.md").read_text()
    examples = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
    assert examples and [name for name in examples if f"]({name})" not in page] == []


def test_centres_learn_of_every_variable_and_of_no_other() -> None:
    name = r"DDPKIT_[A-Z_]+"
    in_code = {found for path in (ROOT / "utils").rglob("*.py") for found in re.findall(name, path.read_text())}
    assert in_code == set(re.findall(name, (ROOT / "docs" / "centres.md").read_text()))
