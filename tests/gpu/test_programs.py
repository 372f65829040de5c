"""The programs of the GPU tests, on CPUs; the table that the GPU tests write."""
from __future__ import annotations

from pathlib import Path

from tests.gpu.conftest import MARKS, run, torchrun

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("placement", "collectives", "train", "memory", "checkpoint")


def test_programs_run_with_gloo(tmp_path: Path) -> None:
    done = run(torchrun(2, "--backend", "gloo", "--small", "--folder", str(tmp_path), *NAMES),
               env={"OMP_NUM_THREADS": "1"})
    figures = done.figures()
    assert figures["world_size"] == 2 and set(NAMES) < set(figures)
    cpus = [set(rank["cpus"]) for rank in figures["placement"]["ranks"]]
    assert len(cpus) == 2 and all(cpus)
    assert figures["memory"]["predicted"] > 0 and figures["checkpoint"]["bytes"] > 0
    assert set(figures["train"]) == {"fp32", "bf16"}


def test_page_has_a_place_for_the_table() -> None:
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert len(MARKS.findall(page)) == 1
