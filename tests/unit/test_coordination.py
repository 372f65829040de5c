"""utils/coordination.py with threads as ranks, which share one store."""
from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed

from utils.coordination import RankLost, RankTimeout, StoreCommunicator, StoreLost


def make_communicators(ranks: int = 3, timeout_seconds: float = 20.0) -> list[StoreCommunicator]:
    store = torch.distributed.HashStore()
    return [StoreCommunicator("test", rank, ranks, store, timeout_seconds=timeout_seconds) for rank in range(ranks)]


def on_all_ranks(communicators: list[StoreCommunicator], action: Callable[[StoreCommunicator], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(communicators)) as threads:
        return list(threads.map(action, communicators))


def test_broadcast_and_decide_give_all_ranks_one_value() -> None:
    communicators = make_communicators()
    made = on_all_ranks(communicators, lambda ranks: ranks.broadcast("folder", lambda: {"name": ranks.rank}))
    assert made == [{"name": 0}] * 3
    for topic in ("first", "second"):
        decisions = on_all_ranks(communicators, lambda ranks, topic=topic: ranks.decide(
            topic, ranks.rank * 10, lambda reports: {"seen": reports}))
        assert decisions == [{"seen": [0, 10, 20]}] * 3


def test_decide_names_the_rank_that_does_not_report() -> None:
    zero, one, _ = make_communicators(timeout_seconds=0.2)
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(one.decide, "save", 1, len)
        with pytest.raises(RankTimeout, match="1 of 3 ranks did not report .*: 2. ") as raised:
            zero.decide("save", 0, len)
        assert raised.value.ranks == [2]
        with pytest.raises(RankTimeout, match="rank 0 did not send rank 1 on .* a decision within"):
            other.result()


def test_at_most_16_missing_ranks_are_named() -> None:
    zero = make_communicators(20, timeout_seconds=0.05)[0]
    with pytest.raises(RankTimeout, match=r"19 of 20 ranks did not .*: 1, 2, .*, 15, 16 \.\.\.\. "):
        zero.decide("save", 0, len)


def test_decide_does_not_wait_for_a_rank_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    zero, one, two = communicators = make_communicators(timeout_seconds=600)
    assert on_all_ranks(communicators, lambda ranks: ranks.decide("first", 0, len)) == [3] * 3
    monkeypatch.setattr("utils.coordination.departed_ranks", lambda: {1: "rank 1 on n1 was killed"})
    with ThreadPoolExecutor(1) as threads:
        reported = threads.submit(two.decide, "second", 2, len)
        with pytest.raises(RankLost, match="lost the connection to rank 1, .*: rank 1 on n1 was killed"):
            zero.decide("second", 0, len)
        two.cancel()
        with pytest.raises(RankTimeout, match="before this rank ended"):
            reported.result()


def test_a_lost_store_is_an_error_of_its_own() -> None:
    server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = torch.distributed.TCPStore("127.0.0.1", server.port, wait_for_workers=False)
    one = StoreCommunicator("test", 1, 2, client)
    assert one.count("left") == 1 and one.count("left", 0) == 1
    del server
    with pytest.raises(StoreLost, match="rank 1 on .* lost the connection to rank 0's store"):
        one.broadcast("folder", dict)
