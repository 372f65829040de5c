"""Both parts of scripts/test.sh --gpu on CPUs, small; the tables that they write."""
from __future__ import annotations

import datetime
import re
import sys
from pathlib import Path

from tests.gpu.conftest import ROOT, Table, figures, run, torchrun

NAMES = ("placement", "collectives", "train", "checkpoint", "sharded", "hold", "hang")


def test_programs_run_with_gloo(tmp_path: Path) -> None:
    (tmp_path / "seen").touch()  # hold need not wait
    words = ["--backend", "gloo", "--small", "--folder", str(tmp_path), *NAMES]
    found = figures(*run(torchrun(2, *words), env={"OMP_NUM_THREADS": "1"}))
    assert found["world_size"] == 2 and set(NAMES) < set(found)
    cpus = [set(rank["cpus"]) for rank in found["placement"]["ranks"]]
    assert len(cpus) == 2 and all(cpus)
    assert found["checkpoint"]["bytes"] > 0
    assert set(found["train"]) == {"fp32", "bf16"}


def test_table_replaces_the_one_of_the_page(tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    page.write_text((ROOT / "docs" / "performance.md").read_text(encoding="utf-8"), encoding="utf-8")
    before = page.read_text(encoding="utf-8").count("\n## ")
    for figure in ("1.2 s", "3.4 s"):
        rows = [("test_nccl_starts[torchrun]", "setup_distributed()", figure), ("test_hang[loop]", "passed", ""),
                ("test_nccl_starts[direct]", "setup_distributed()", "5 s"), ("test_hang[stopped]", "passed", "")]
        Table("1 x H100", rows).write(page, datetime.date(2026, 11, 22))
    text = page.read_text(encoding="utf-8")
    assert "`scripts/test.sh --gpu correctness`, 2026-11-22: 1 x H100." in text
    assert "- setup_distributed(): torchrun 3.4 s; direct 5 s." in text and "1.2 s" not in text
    assert "- Passed: hang [loop]; hang [stopped]." in text
    assert text.count("\n## ") == before and "Not measured yet" not in text


def test_speed_is_written_to_the_page(tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    page.write_text((ROOT / "docs" / "performance.md").read_text(encoding="utf-8"), encoding="utf-8")
    status, output = run([sys.executable, "-m", "tests.bench.speed", "--small", "--modes", "eager", "--turns", "2",
                          "--steps", "2", "--page", str(page)], env={"OMP_NUM_THREADS": "1"})
    assert status == 0, output
    rows = re.findall(r"^[|] (\d+) [|] eager [|] [\d,]+ [|]  [|] [\d.]+ ms [|]  [|]  [|] 0\.\d\d GB [|]  [|]  [|]$",
                      output, re.MULTILINE)
    assert rows == ["128", "256"]
    text = page.read_text(encoding="utf-8")
    part = text.partition("<!-- gpu speed -->\n")[2].partition("<!-- end of gpu speed -->")[0]
    assert part and part in output and "Example 03, 1,6" in part


def test_speed_after_its_time_starts_nothing(tmp_path: Path) -> None:
    status, output = run([sys.executable, "-m", "tests.bench.speed", "--small", "--modes", "eager", "--seconds", "0"],
                         env={"OMP_NUM_THREADS": "1"})
    assert status == 0 and output.count("not measured: the time was over") == 2, output
