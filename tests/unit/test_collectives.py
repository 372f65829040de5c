"""What is read of torch's flight recorders, and what is said where none records."""
from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake", which needs no other rank

from tests.unit.programs import python
from utils.monitor.hangs.collectives import has_recorder, read_collectives

CONFIG = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
ENTRY = {"record_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": 3, "p2p_seq_id": 0,
         "profiling_name": "fake:all_reduce", "time_created_ns": 1, "input_sizes": [[4]], "is_p2p": False}


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def test_recorder_of_each_backend_is_read(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """From torch 2.15 on, each backend such as nccl2 has a recorder, and gloo's is that without a name.

    A backend that is called nothing, as the fake one of torch 2.8, hides no other.
    """
    def of_backend(collectives: bool, stacks: bool, active: bool, backend: str = "gloo") -> bytes:
        return pickle.dumps({"pg_config": CONFIG, "entries": [ENTRY]} if backend == "fake" else {})

    names = itertools.chain([RuntimeError("getBackendName is not implemented")], itertools.repeat("fake"))
    monkeypatch.setattr(torch._C._distributed_c10d.FakeProcessGroup, "name", Mock(side_effect=names))
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_fr_trace", of_backend)
    calls, groups = read_collectives()
    assert [(call["number"], call["operation"], call["pending"]) for call in calls] == [(3, "all_reduce", True)]
    assert groups[""].entered == 3 and has_recorder()


@pytest.mark.parametrize("trace", [{"pg_config": CONFIG, "entries": [ENTRY]}, {"pg_config": {}, "entries": []}])
def test_torch_with_one_recorder_for_all(group: None, trace: dict[str, object],
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_fr_trace", lambda c, s, a: pickle.dumps(trace))
    assert len(read_collectives()[0]) == len(trace["entries"])
    assert has_recorder() == bool(trace["pg_config"])


@pytest.mark.parametrize(("limit", "times"), [("60", 1), ("None", 0)])
def test_missing_recorder_is_reported_once(limit: str, times: int) -> None:
    program = f"from utils import setup_distributed\nsetup_distributed('gloo', hang_timeout={limit}).close()"
    done = python("-c", program, ranks=2, env={"TORCH_FR_BUFFER_SIZE": "0"}, warm=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("does not record the collectives of gloo") == times, done.stderr
