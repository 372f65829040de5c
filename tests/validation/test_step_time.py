"""The prediction of a DDP step against a measurement, where the network decides and not the load of the machine."""
from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.validation.step_time import Fit, measure, predict

FITTED = Fit(share=0.93, latency=3e-4, cpu_rate=4e8, delayed=0.3)  # docs/performance.md
WIDE = 2  # of MODELS: the longest communication for its computation


def test_predicted_step_on_links_of_known_rate(need: Callable[[str], object]) -> None:
    need("hosts")
    rows = list(measure((2,), (50, 100), (1.0,), (WIDE,)))
    predicted = [predict(row, FITTED, row.computed) for row in rows]
    assert [row.rate for row in rows] == [50, 100]
    assert predicted == pytest.approx([row.measured for row in rows], rel=0.2)
