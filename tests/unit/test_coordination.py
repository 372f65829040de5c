"""What a rank reports when its wait for others ends (tests/faults/test_checkpoint_ranks.py: waits that succeed)."""
from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed

from utils import coordination
from utils.coordination import RankLost, RankTimeout, StoreCommunicator, StoreLost


def make_communicators(timeout_seconds: float = 0.1) -> list[StoreCommunicator]:
    store = torch.distributed.HashStore()
    return [StoreCommunicator("test", rank, 3, store, timeout_seconds=timeout_seconds) for rank in range(3)]


def test_decide_names_the_rank_that_does_not_report_and_cancel_ends_the_wait() -> None:
    zero, one, _ = make_communicators()
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(one.decide, "save", 1, len)
        with pytest.raises(RankTimeout, match="1 of 3 ranks did not report .*: rank 2. ") as raised:
            zero.decide("save", 0, len)
        assert raised.value.ranks == [2]
        with pytest.raises(RankTimeout, match="rank 0 did not send rank 1 of .* a decision within"):
            other.result()
    zero = make_communicators(timeout_seconds=600)[0]
    zero.cancel()
    with pytest.raises(RankTimeout, match="before this rank ended: ranks 1-2"):
        zero.decide("save", 0, len)


def test_a_rank_that_has_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it has reported before."""
    monkeypatch.setattr(coordination, "departed_ranks", lambda: {1: "", 2: "rank 2 on h was killed"})
    zero, one, _ = make_communicators(timeout_seconds=5)
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(one.decide, "save", 1, len)
        with pytest.raises(RankLost, match="lost the connection to rank 2, which has ended: rank 2 on h was killed"):
            zero.decide("save", 0, len)
        one.cancel()
        with pytest.raises(RankTimeout):
            other.result()


def test_a_lost_store_is_an_error_of_its_own() -> None:
    server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = torch.distributed.TCPStore("127.0.0.1", server.port, wait_for_workers=False)
    one = StoreCommunicator("test", 1, 2, client)
    assert one.count("left") == 1 and one.count("left", 0) == 1
    del server
    with pytest.raises(StoreLost, match="rank 1 of .* lost the connection to rank 0's store"):
        one.broadcast("folder", dict)
