"""Which rank failed first, as a table: what the ranks report, and what rank 0 then sends."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from utils.launch_protocol import Failure
from utils.monitor.decisions import Action, Decisions, ReportToLauncher, Send, State
from utils.monitor.hangs.positions import Collective, Group, Position

HOSTS = {0: "h0 (pid 1)", 1: "h1 (pid 2)", 2: "h2 (pid 3)"}
BAD = Failure("rank 1 failed: ValueError", "exception", 1, "h1")
OTHER = Failure("rank 2 failed: KeyError", "exception", 2, "h2")
LEFT = Failure("rank 1 left normally", "uneven", 1, "h1")


def decisions(rank: int = 0) -> Decisions:
    """Those of a rank after the start."""
    of = Decisions(rank, HOSTS if rank == 0 else {0: HOSTS[0], rank: HOSTS[rank]})
    for connected in of.states:
        of.connected(connected)
    assert of.all_started
    return of


def position(entered: int) -> Position:
    return Position(entered, f"train.py, line {entered}", groups={"": Group("0-2", entered)})


def call(number: int) -> Collective:
    return Collective(group="", number=number, operation="all_reduce", sizes="", between_two=False, peer=None,
                      location="", thread=1, pending=True, blocks=True)


def killed(of: Decisions, rank: int = 1, lost: bool = False) -> None:
    of.connection_ended(rank, host_lost=lost)


def test_the_first_rank_that_fails_is_the_cause_for_those_that_fail_later() -> None:
    of = decisions()
    of.failed(1, BAD)
    [answer] = of.failed(2, OTHER)
    assert isinstance(answer, Send) and answer.message["cause"] == BAD == of.first


@pytest.mark.parametrize(("events", "state", "kind", "text"), [
    ([lambda of: of.failed(1, BAD)], State.FAILED, "exception", "rank 1 failed: ValueError"),
    ([lambda of: of.failed(1, BAD), lambda of: of.left(1, BAD, None, 3)], State.LEFT, "exception", "ValueError"),
    ([lambda of: of.left(1, LEFT, None, 3)], State.LEFT, "uneven", "rank 1 left normally"),
    ([killed], State.KILLED, "killed", "rank 1 on h1 (pid 2) ended without a report"),
    ([lambda of: killed(of, lost=True)], State.LOST, "lost", "rank 1 on h1 (pid 2) does not respond to h0"),
    ([lambda of: of.left(1, None, OTHER, 3), killed], State.LEFT, "exception", "rank 2 failed: KeyError"),
    ([lambda of: of.failed(2, OTHER), killed], State.KILLED, "exception", "rank 2 failed: KeyError"),
], ids=["failed", "failed and left", "left", "killed", "lost", "left with another's cause", "killed after a failure"])
def test_events_move_a_rank_on(events: list[Callable[[Decisions], object]], state: State, kind: str, text: str) -> None:
    of = decisions()
    for event in events:
        event(of)
    cause = of.known_cause()
    assert of.states[1] is state and cause and (cause.kind, text in cause.text) == (kind, True)
    of.query(2, "lost", now=0.0)
    for now, rank in ((1.0, 1), (1.0, 2)):  # where the running ranks are, if it asks for that
        of.respond(now)
        of.positions[rank] = of.positions[0] = position(4)
    of.query(2, "lost", now=0.0)
    [sent, report] = of.respond(4.0)  # rank 0 has not asked: it might leave, too
    assert isinstance(sent, Send) and sent.message["cause"].kind == kind and list(sent.ranks) == [2]
    assert isinstance(report, ReportToLauncher) and report.cause == of.first


def test_a_rank_that_ends_during_the_start_fails_it_on_all() -> None:
    of = Decisions(0, HOSTS)
    of.connected(0)
    [sent] = of.connection_ended(2, host_lost=False)
    assert isinstance(sent, Send) and sent.message["kind"] == "start_failed" and list(sent.ranks) == [1, 2]
    assert of.start_failure and "rank 2 on h2 (pid 3) died while torch was connecting" in of.start_failure.text
    assert not of.departed


def test_all_ranks_are_told_when_the_last_is_connected() -> None:
    of = Decisions(0, HOSTS)
    assert of.connected(2) == [] == of.connected(0) and not of.all_started
    assert of.connected(1) == [Send({"kind": "connected"}, [1, 2])] and of.all_started


@pytest.mark.parametrize(("reported", "waited", "expected"), [
    ({0: 4, 1: 3, 2: 4}, 1.0, "rank 1 on h1 (pid 2) did not enter collective 4"),
    ({0: 4, 2: 4}, 1.0, None),  # rank 1 may still report
    ({0: 4, 2: 4}, 4.0, "rank 1 on h1 (pid 2) does not respond"),
    ({0: 4, 1: 4, 2: 4}, 1.0, "all ranks have entered collective 4 by now"),
])
def test_a_collective_that_times_out_is_explained_by_positions(
        reported: dict[int, int], waited: float, expected: str | None) -> None:
    of = decisions()
    of.query(2, "timeout", now=0.0)
    assert of.respond(0.1) == [Send({"kind": "ask_position", "ends": True}, [0, 1, 2])]
    of.positions.update({rank: position(entered) for rank, entered in reported.items()})
    actions: list[Action] = of.respond(waited)
    assert (of.first is None) == (not actions) == (expected is None)
    assert expected is None or (of.first and expected in of.first.text)


def test_ranks_that_torch_names_are_at_fault() -> None:
    """Of a monitored_barrier(), whose messages count as collectives that all have entered."""
    of = decisions()
    of.query(0, "timeout", 0.0, "monitored_barrier() at train.py, line 10, in <module>", [1, 2])
    of.respond(0.1)
    of.positions.update({0: position(4), 1: position(4)})
    of.respond(4.0)
    assert of.first and of.hung == {1, 2} and of.first.text == (
        "rank 1 on h1 did not enter monitored_barrier() at train.py, line 10, in <module>. It is at train.py, line 4; "
        "rank 2 on h2 did not enter monitored_barrier() at train.py, line 10, in <module>. It does not respond")


def test_a_lost_host_explains_a_collective_that_times_out() -> None:
    of = decisions()
    killed(of, lost=True)
    of.query(2, "timeout", now=0.0)
    [sent, _] = of.respond(0.1)  # the ranks are not asked where they are
    assert isinstance(sent, Send) and sent.message["cause"].kind == "lost"


def test_rank_0_that_asks_itself_reports_to_the_launcher_when_it_ends() -> None:
    of = decisions()
    of.failed(1, BAD)
    of.query(0, "lost", now=0.0)
    of.query(2, "lost", now=0.0)
    assert of.respond(0.1) == [Send({"kind": "cause", "cause": BAD}, [0, 2])]


def test_ranks_that_hang_are_ended_when_no_other_runs() -> None:
    of = decisions()
    of.query(2, "timeout", now=0.0)
    of.respond(0.1)
    of.positions.update({0: position(4), 1: position(3), 2: position(4)})
    of.respond(0.2)
    assert of.hung == {1} and of.end_hung(of.running()) == []
    of.left(2, None, None, 4)
    [sent] = of.end_hung(running=())  # rank 0 leaves, too
    assert isinstance(sent, Send) and sent.message["kind"] == "end" and sent.ranks == {1} and not of.hung


@pytest.mark.parametrize(("event", "entered", "after", "message"), [
    (lambda of: killed(of, lost=True), 3, 19, None),
    (lambda of: killed(of, lost=True), 3, 21, "A host is lost: no response for 60 s, then no collective for 21 s"),
    (lambda of: of.left(1, LEFT, None, 4), 4, 400, None),  # it has entered what this rank waits in
    (lambda of: of.left(1, LEFT, None, 3), 4, 21, "A rank has ended: no collective for 21 s since then"),
    (lambda of: of.left(1, None, None, 3), 4, 400, None),  # another rank's failure stopped it
])
def test_a_rank_that_waits_for_ended_ones_is_stuck(
        event: Callable[[Decisions], object], entered: int, after: float, message: str | None) -> None:
    of = decisions()
    event(of)
    assert of.find_stuck(0.0, progress=5, read_collectives=lambda: [call(entered)]) is None
    stuck = of.find_stuck(after, progress=5, read_collectives=lambda: [call(entered)])
    assert (stuck.message.partition(".\n")[0] if stuck else None) == message


def test_collectives_are_read_once_a_second_at_most() -> None:
    """Not for each message of thousands of ranks that leave."""
    of, reads = decisions(), []

    def read() -> list[Collective]:
        reads.append(1)
        return [call(3)]
    killed(of, lost=True)
    numbers = []
    for now in (0.0, 0.4, 0.8, 1.2):
        of.find_stuck(now, 5, read)
        numbers.append(len(reads))
    assert numbers == [1, 1, 1, 2]


def test_rank_that_computes_has_longer_than_one_that_waits() -> None:
    of = decisions()
    killed(of, lost=True)
    computes = {**call(3), "blocks": False}
    found = [of.find_stuck(now, 5, lambda: [computes]) for now in (0.0, 21.0, 299.0, 301.0)]
    assert [stuck is not None for stuck in found] == [False, False, False, True]


def test_text_of_a_hang_is_cut() -> None:
    assert len(decisions().hang("x" * 100_000, [1]).text) == 1 << 14


@pytest.mark.parametrize("changes", [{"group": "1 (ranks 0,2)"}, {"between_two": True, "peer": 2}])
def test_a_rank_that_waits_in_a_group_or_for_a_peer_is_not_stuck_by_a_rank_that_left(changes: dict[str, Any]) -> None:
    """The numbers of these do not count the collectives of all ranks."""
    of, waits = decisions(), [Collective(**{**call(9), **changes})]
    of.left(1, LEFT, None, 4)
    assert of.find_stuck(0.0, 5, lambda: waits) is None
    assert of.find_stuck(400.0, 5, lambda: waits) is None


def test_progress_begins_the_limit_of_a_lost_host_again() -> None:
    of = decisions()
    killed(of, lost=True)
    assert of.find_stuck(0.0, 5, lambda: [call(3)]) is None
    assert of.find_stuck(19.0, 6, lambda: [call(4)]) is None
    assert of.find_stuck(38.0, 6, lambda: [call(4)]) is None
    assert of.find_stuck(40.0, 6, lambda: [call(4)]) is not None


@pytest.mark.parametrize(("rank", "rank_0_left", "expected"), [
    (0, False, True), (1, False, True), (2, False, False), (2, True, True)])
def test_rank_0_and_the_one_at_fault_report_to_the_launcher(rank: int, rank_0_left: bool, expected: bool) -> None:
    of = decisions(rank)
    if rank_0_left:
        of.left(0, None, None, 3)
    assert of.reports(BAD) == expected


@pytest.mark.parametrize(("rank", "cause", "expected"), [
    (0, BAD, False), (1, BAD, True), (2, BAD, False),  # a traceback is there already
    (0, LEFT, True), (1, LEFT, False), (2, LEFT, False)])
def test_one_rank_prints_the_cause_where_there_is_no_launcher(rank: int, cause: Failure, expected: bool) -> None:
    of = decisions(rank)
    assert of.prints(cause) == expected


def left_rank(of: Decisions, rank: int, cause: Failure | None = None) -> None:
    of.left(rank, cause or Failure(f"rank {rank} left normally", "uneven", rank, f"h{rank}"), None, 16)


@pytest.mark.parametrize(("left", "asking", "rank", "text"), [
    ([1, 2], {0: "barrier() at train.py, line 9, in save"}, 0,
     "rank 0 on h0 called barrier() at train.py, line 9, in save, and ranks 1-2 left normally after 16 collectives. "
     "It is a collective that only some ranks call: call it on all ranks, or on none"),
    ([1], {0: "all_reduce() at a", 2: "all_reduce() at a"}, 1, "rank 1 left normally"),  # most ranks need it
    ([1, 2], {0: ""}, 1, "rank 1 left normally"),  # what has failed is unknown
], ids=["one rank calls one more", "one rank left early", "no place"])
def test_ranks_that_call_one_collective_more_are_at_fault(
        left: list[int], asking: dict[int, str], rank: int, text: str) -> None:
    """Collectives pair up by number: of an extra one, the last of that rank remains alone."""
    of = decisions()
    for one in left:
        left_rank(of, one)
    for one, place in asking.items():
        of.query(one, "lost", 0.0, place)
    of.respond(0.1)
    assert of.first and (of.first.kind, of.first.rank, of.first.text) == ("uneven", rank, text)


def test_of_two_ranks_it_cannot_be_told_which_is_wrong() -> None:
    of = Decisions(0, {0: "h0 (pid 1)", 1: "h1 (pid 2)"})
    left_rank(of, 1)
    of.query(0, "lost", 0.0, "barrier() at train.py, line 9, in save")
    of.respond(0.1)
    assert of.first and of.first.rank is None and of.first.text.startswith(
        "rank 0 on h0 called barrier() at train.py, line 9, in save, and rank 1 on h1 left normally after 16 "
        "collectives. It is a collective that only some ranks call, such as a barrier under `if is_main`, or the ranks "
        "run different numbers of steps.")


def test_ranks_that_may_still_leave_are_waited_for() -> None:
    of = decisions()
    left_rank(of, 1)
    of.query(0, "lost", 0.0, "barrier() at a")
    assert of.respond(1.0) == [] and of.first is None
    left_rank(of, 2)
    of.respond(1.1)
    assert of.first and of.first.rank == 0


def test_rank_0_that_leaves_knows_who_calls_one_more() -> None:
    of = decisions()
    left_rank(of, 1)
    of.query(2, "lost", 0.0, "barrier() at a")
    cause = of.last_cause(Failure("rank 0 left normally", "uneven", 0, "h0"), 16, "left normally")
    assert cause and (cause.kind, cause.rank) == ("uneven", 2)
    assert cause.text.startswith("rank 2 on h2 called barrier() at a, and ranks 0-1 left normally after 16 collectives")


IN_BUCKET = "all_reduce of [[5050]] at train.py, line 12, in <module>"


def in_bucket(of: Decisions) -> None:
    """Rank 0 and 2 wait in the gradients of a step that rank 1 does not run."""
    waits = Collective(**{**call(4), "sizes": "[[5050]]", "location": "train.py, line 12, in <module>"})
    of.positions.update({rank: position(4)._replace(last=(waits,)) for rank in (0, 2)})


def asked_after_death(backend: str, place: str = "") -> Failure:
    """What rank 0 finds when rank 1 has died and rank 2 asks. place: where rank 2 was, without a record."""
    of = decisions()
    of.backend = backend
    killed(of)
    of.query(2, "lost", 0.0, place)
    of.respond(0.1)
    if not place:
        in_bucket(of)
    of.respond(4.0)
    assert of.first
    return of.first


@pytest.mark.parametrize(("place", "waiting"), [
    ("", f"rank 0 waits in {IN_BUCKET}"),
    ("backward() at train.py, line 12, in <module>", "rank 2 was in backward() at train.py, line 12, in <module>")])
def test_rank_that_gloo_may_have_aborted_is_reported_with_where_another_one_waits(place: str, waiting: str) -> None:
    cause = asked_after_death("gloo", place)
    assert (cause.kind, cause.rank, cause.waiting) == ("killed", 1, waiting)
    assert cause.text.endswith(
        "The launcher's output has its exit status. If that is 134 (SIGABRT), gloo has aborted it: "
        f"{waiting}, and rank 1 entered another, smaller collective. Different numbers of batches on the ranks do "
        "this: use drop_last=True or DistributedDataParallel.join(). So do tensors of different sizes")


def test_gloo_aborts_no_rank_of_nccl() -> None:
    """There, an abort is that of torch's watchdog."""
    cause = asked_after_death("nccl")
    assert not cause.waiting and "gloo" not in cause.text


def test_rank_0_that_gloo_may_have_aborted_is_explained_by_the_others() -> None:
    of = decisions(1)
    of.backend = "gloo"
    killed(of, 0)
    cause = of.known_cause()
    assert cause
    explained = of.explain_without_rank_0(cause, "backward() at train.py, line 12, in <module>")
    assert explained.waiting == "rank 1 was in backward() at train.py, line 12, in <module>"
    assert "gloo has aborted it: rank 1 was in backward() at" in explained.text
