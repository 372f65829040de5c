"""How many collectives a rank has entered, also where torch counts them for each device alone."""
from __future__ import annotations

from typing import Any

import pytest

from utils.monitor.counts import sequence_number


class Backend:
    def __init__(self, entered: int | None) -> None:
        self._entered = entered

    def _get_sequence_number_for_group(self) -> int:
        if self._entered is None:
            raise RuntimeError("ProcessGroup undefined does not yet support sequence numbers.")
        return self._entered


class Group(Backend):
    def __init__(self, entered: int | None, backends: dict[str, Backend]) -> None:
        super().__init__(entered)
        self._backends, self._device_types = backends, list(backends)

    def _get_backend(self, device: str) -> Backend:
        return self._backends[device]


GLOO, NCCL, NONE = Backend(18), Backend(4), Backend(None)


@pytest.mark.parametrize(("entered", "backends", "number"), [
    (7, {"cpu": GLOO}, 7), (None, {"cpu": GLOO}, 18), (None, {"cpu": GLOO, "cuda": NCCL}, 22),
    (None, {"cpu": GLOO, "cuda": GLOO}, 18), (None, {"cpu": NONE}, None)])
def test_the_number_of_a_group(entered: int | None, backends: dict[str, Backend], number: int | None) -> None:
    group: Any = Group(entered, backends)
    assert sequence_number(group) == number
