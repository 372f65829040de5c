"""The pages of commands and names are those that `--help` and the docstrings give."""
from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.docs import reference


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
    assert reference.commands_without_list() == {"explain"}  # it has no options
