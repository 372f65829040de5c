"""Fixtures of the unit tests."""
from __future__ import annotations

import logging

import pytest


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """pytest's own, with the log of the kit also where setup_logging() was called in this process."""
    monkeypatch.setattr(logging.getLogger("ddpkit"), "propagate", True)
    return caplog
