"""Rows of a table that repeat a promise elsewhere: with every launcher, on other hosts, in every kind of job.

They run with --all, as in CI. CONTRIBUTING.md lists which ones these are, and what runs without it.
"""
from __future__ import annotations

from typing import Any

import pytest


def with_all(*rows: Any) -> list[Any]:
    """Rows of a table, each a tuple or a single value, that run with --all alone."""
    return [pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.matrix) for row in rows]
