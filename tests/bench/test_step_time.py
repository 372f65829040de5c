"""The prediction of a DDP step against a measurement, where the network decides and not the load of the machine."""
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.bench.step_time import PAYLOAD, Grid, measure, predict
from utils.tools.plan import plan_cli as cli

WIDE = 2  # of CASES: the longest communication for its computation


def test_predicted_step_on_links_of_known_rate(
        need: Callable[[str], object], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """predict() is what plan.py prints, and that is about right."""
    need("hosts")
    rows = list(measure(Grid((WIDE,), (50, 100), (1.0,), (2,))))
    assert [row.rate for row in rows] == [50, 100]
    assert [predict(row) for row in rows] == pytest.approx([row.measured for row in rows], rel=0.2)
    row = rows[1]
    links = tmp_path / "links.json"
    between = {"bandwidth_bytes_per_second": PAYLOAD * 100e6 / 8, "latency_seconds": 1e-3}
    links.write_text(json.dumps({"format": 1, "hosts": 2, "inside": None, "between": between}))
    cli.main(["--model", "tests.bench.step_time:wide_mlp", "--batch", "128", "--optimizer", "sgd", "--gpus", "2",
              "--gpus-per-node", "1", "--ring", "--links", str(links), "--bucket-cap-mb", "4", "--compute-seconds",
              str(row.computed), "--json"])
    point, = (point for point in json.loads(capsys.readouterr().out)["scaling"] if point["gpus"] == 2)
    assert predict(row) == pytest.approx(point["step_seconds"])
