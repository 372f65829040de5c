"""After a stop, rank 0 reports to launch.py that all ranks have saved, and only then."""
from __future__ import annotations

import pytest

from utils.launch_report import VARIABLE, ReportListener, parse_address, report_saved


def test_a_notice_is_kept_until_it_is_read() -> None:
    with ReportListener() as listener:
        assert not listener.saved()
        assert report_saved(listener.variables)
        assert listener.saved()


@pytest.mark.parametrize("wrong", ["0123456789abcdef", "\u00e9", "\udcff"])
def test_a_notice_with_another_secret_is_ignored(wrong: str) -> None:
    with ReportListener() as listener:
        address, port, _ = listener.variables[VARIABLE].split("/")
        assert report_saved({VARIABLE: f"{address}/{port}/{wrong}"})
        assert not listener.saved()


@pytest.mark.parametrize("value", ["", "10.0.0.1", "127.0.0.1/1/secret", "127.0.0.1/port/secret"])
def test_without_a_listener_nothing_is_reported(value: str) -> None:
    assert not report_saved({VARIABLE: value})


def test_the_listener_takes_one_of_the_given_ports() -> None:
    ports = range(31500, 31600)
    with ReportListener(ports=ports) as one, ReportListener(ports=ports) as other:
        taken = [parse_address(each.variables[VARIABLE])[1] for each in (one, other)]
    assert taken[0] != taken[1] and all(port in ports for port in taken)
