"""A training that goes wrong without an error is reported, with rank and remedy; a right one never is."""
from __future__ import annotations

import json

import pytest

from tests.faults.mistakes import HEALTHY, MISTAKES
from tests.unit.programs import python


@pytest.fixture(scope="module")
def said() -> dict[str, list[str]]:
    """What two ranks have said about each scenario."""
    done = python("tests/faults/mistakes.py", ranks=2)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_reported(said: dict[str, list[str]], name: str) -> None:
    assert any(MISTAKES[name][1] in message for message in said[name]), said[name]


@pytest.mark.parametrize("name", HEALTHY)
def test_a_right_training_is_no_mistake(said: dict[str, list[str]], name: str) -> None:
    assert not said[name]
