"""After a stop rank 0 tells the launch that all have saved, and only then."""
from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from utils.launch.report import VARIABLE, Report, parse, tell_saved
from utils.preemption import EXIT_REQUEUE, StopSignal

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Iterator[Report]:
    for name in ("SLURM_JOB_ID", "SLURM_JOBID", "PBS_JOBID"):
        monkeypatch.delenv(name, raising=False)
    with Report() as listens:
        monkeypatch.setenv(VARIABLE, listens.variables[VARIABLE])
        yield listens


def stopped() -> StopSignal:
    stop = StopSignal()
    stop.request("a test")
    while not stop.should_stop():
        pass
    return stop


def test_the_launch_hears_what_it_was_told_while_it_did_not_listen(report: Report) -> None:
    assert not report.saved()
    assert tell_saved(report.variables)
    assert report.saved()


def test_a_stranger_is_not_believed(report: Report) -> None:
    address, port, secret = report.variables[VARIABLE].split("/")
    assert tell_saved({VARIABLE: f"{address}/{port}/{secret[::-1]}"})
    assert not report.saved()


@pytest.mark.parametrize("value", ["", "10.0.0.1", "127.0.0.1/1/secret", "127.0.0.1/port/secret"])
def test_where_nobody_listens_nothing_is_told(value: str) -> None:
    assert not tell_saved({VARIABLE: value})


def test_after_a_stop_the_launch_knows_and_what_is_between_sees_no_failure(report: Report) -> None:
    stop = stopped()
    assert stop.exit_status == EXIT_REQUEUE  # nobody knows yet
    stop.close()
    assert (stop.exit_status, report.saved()) == (0, True)


def test_a_rank_that_fails_after_the_stop_has_not_saved(report: Report) -> None:
    with pytest.raises(OSError, match="disk full"), stopped() as stop:
        raise OSError("disk full")
    assert (stop.exit_status, report.saved()) == (1, False)


def test_a_script_may_leave_by_its_status(report: Report) -> None:
    with pytest.raises(SystemExit), stopped() as stop:
        raise SystemExit(stop.exit_status)
    assert report.saved()


def test_a_run_that_was_not_stopped_tells_nothing(report: Report) -> None:
    with StopSignal() as stop:
        assert not stop.should_stop()
    assert (stop.exit_status, report.saved()) == (0, False)


def test_the_launch_that_is_gone_leaves_the_status_to_tell(report: Report) -> None:
    report.__exit__(None, None, None)
    stop = stopped()
    stop.close()
    assert stop.exit_status == EXIT_REQUEUE and os.environ[VARIABLE]


def test_ranks_are_told_one_of_the_ports_that_they_can_reach() -> None:
    with Report(ports=range(31500, 31600)) as one, Report(ports=range(31500, 31600)) as other:
        ports = [parse(each.variables[VARIABLE])[1] for each in (one, other)]
    assert ports[0] != ports[1] and all(port in range(31500, 31600) for port in ports)
