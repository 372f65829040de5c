"""How a rank leaves utils/distributed.py, without a launch: what the end of NCCL asks for, which no CPU has."""
from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch._C._distributed_c10d import HashStore, PrefixStore

from utils import distributed
from utils.distributed import Distributed


@pytest.fixture
def ranks() -> Callable[[str], list[Distributed]]:
    """Two ranks of one job, as far as their store goes."""
    def make(backend: str) -> list[Distributed]:
        store = HashStore()
        return [Distributed(rank, 2, rank, 2, 0, 1, "env", backend, torch.device("cpu"), "127.0.0.1", 1,
                            PrefixStore("job", store)) for rank in range(2)]
    return make


def leaving(job: Distributed) -> threading.Thread:
    thread = threading.Thread(target=job.close, daemon=True)
    thread.start()
    thread.join(0.5)
    return thread


def test_a_rank_with_a_gpu_waits_for_one_that_still_saves(ranks: Callable[[str], list[Distributed]]) -> None:
    zero, one = ranks("nccl")
    thread = leaving(one)
    assert thread.is_alive()
    zero.close()
    thread.join(5)
    assert not thread.is_alive()


def test_a_rank_with_a_gpu_does_not_wait_after_a_failure(ranks: Callable[[str], list[Distributed]]) -> None:
    zero, one = ranks("nccl")
    thread = leaving(one)
    with pytest.raises(ValueError), zero:
        raise ValueError("it fails")
    thread.join(5)
    assert not thread.is_alive()


def test_a_rank_without_one_waits_for_nobody(ranks: Callable[[str], list[Distributed]]) -> None:
    assert not leaving(ranks("gloo")[1]).is_alive()


def test_a_mean_is_where_the_tensor_was(ranks: Callable[[str], list[Distributed]],
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    job = ranks("nccl")[0]
    job.device = torch.device("meta")  # stands for a GPU: what is reduced has to be there
    reduced: list[torch.device] = []
    monkeypatch.setattr(distributed.dist, "all_reduce", lambda tensor: reduced.append(tensor.device))
    value = torch.ones(2, device="meta")
    assert job.all_reduce_mean(value).device == value.device
    with pytest.raises(NotImplementedError, match="meta"):  # back from there to the CPU
        job.all_reduce_mean(torch.ones(2))
    assert reduced == [torch.device("meta")] * 2
