"""Durations, sizes and numbers."""
from __future__ import annotations

import pytest

from utils.schedulers import JobError, format_walltime, parse_walltime
from utils.schedulers.units import parse_duration, parse_number, parse_size


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


def test_a_plain_number_of_pbs_is_seconds() -> None:
    assert parse_duration("90", plain_number_seconds=1) == 90


@pytest.mark.parametrize(("text", "size"), [
    ("64G", 64 << 30), ("24684096kb", 24684096 << 10), ("4gb", 4 << 30), ("512", 512), ("1mw", None), ("x", None)])
def test_a_size_is_read(text: str, size: int | None) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(("text", "signed", "number"), [
    (" 7 ", False, 7), ("-29", True, -29), ("-29", False, None), ("4+", False, None), ("\u00b2", False, None),
    ("", False, None), ("9" * 5000, False, None)])
def test_a_number_is_read(text: str, signed: bool, number: int | None) -> None:
    assert parse_number(text, signed=signed) == number
