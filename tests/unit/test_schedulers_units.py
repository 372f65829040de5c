"""Durations and sizes."""
from __future__ import annotations

import pytest

from utils.schedulers import JobError, format_walltime, parse_walltime
from utils.schedulers.units import parse_duration, parse_size


@pytest.mark.parametrize(("text", "seconds"), [
    ("2:00:00", 7200), ("90", 5400), ("30:00", 1800), ("0:07", 7), ("1-12", 129600), ("1-12:30:15", 131415),
    ("1-02:03", 93780), ("120:00:00", 432000), ("30m", 1800), ("1h30m", 5400), ("1.5h", 5400),
    ("1d 12h", 129600), ("90 min", 5400), ("45s", 45), ("2 Days", 172800), ("1 hour 30 minutes", 5400)])
def test_a_walltime_is_read_in_every_form(text: str, seconds: int) -> None:
    assert parse_walltime(text) == parse_walltime(format_walltime(seconds)) == seconds


@pytest.mark.parametrize("text", [
    "", "1x", "h", "1h1h", "-5", "1:2:3:4", "1-", "\u0663", "9" * 5000, "infinite", "UNLIMITED", "NOT_SET", "0",
    "00:00:00", "0h"])
def test_a_walltime_that_is_no_time_is_refused(text: str) -> None:
    assert not parse_duration(text)
    with pytest.raises(JobError, match="walltime"):
        parse_walltime(text)


@pytest.mark.parametrize(("text", "size"), [
    ("64G", 64 << 30), ("24684096kb", 24684096 << 10), ("4gb", 4 << 30), ("512", 512), ("1mw", None), ("x", None)])
def test_a_size_is_read(text: str, size: int | None) -> None:
    assert parse_size(text) == size
