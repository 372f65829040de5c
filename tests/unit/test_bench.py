"""The benchmarks run and print their tables. No time is judged here."""
from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import bench_startup

ROOT = Path(__file__).resolve().parents[2]
MEET = """\
import pathlib, sys, time
for rank in range({ranks}):
    (pathlib.Path(sys.argv[1]) / str(rank)).write_text(repr(time.monotonic()))
"""


def test_ranks_meet_also_when_rank_0_may_open_few_files(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "bench_rendezvous.py"), "--ranks", "2", "40"],
                          cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^ *(\d+) +\d+\.\d{3} .* (\d+) -> (\d+)$", done.stdout, re.MULTILINE)
    assert [row[0] for row in rows] == ["2", "40", "40"]
    assert int(rows[2][1]) == 256 < int(rows[2][2])


def test_both_sides_launch_two_ranks(tmp_path: Path) -> None:
    for side, text in (("bare", bench_startup.BARE), ("kit", bench_startup.KIT)):
        program = tmp_path / f"{side}.py"
        program.write_text(text)
        first_all_reduce, end = bench_startup.run("direct", bench_startup.direct().kit, program, tmp_path)
        assert 0 < first_all_reduce < end


def test_every_pair_is_counted_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for side in ("BARE", "KIT"):
        monkeypatch.setattr(bench_startup, side, MEET.format(ranks=2))
    bench_startup.bench_launches([bench_startup.direct()], 3)
    assert "direct: pair 3 of 3" in (printed := capsys.readouterr().out)
    for until in ("first all-reduce", "end"):
        assert re.search(rf"^direct +{until}( +\d+\.\d{{3}}){{4}} to \d+\.\d{{3}}$", printed, re.MULTILINE)


def test_a_failed_launch_is_an_error_with_its_output(tmp_path: Path) -> None:
    program = tmp_path / "bare.py"
    program.write_text("raise ValueError('no such rank')")
    with pytest.raises(SystemExit, match=r"(?s)bare\.py ended with status 1 and 1\..*no such rank"):
        bench_startup.run("direct", bench_startup.direct().bare, program, tmp_path)
    program.write_text(MEET.format(ranks=1))
    with pytest.raises(SystemExit, match="rank 1 did no all-reduce"):
        bench_startup.run("direct", bench_startup.direct().bare, program, tmp_path)


def test_detection_and_import_are_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench_startup, "DETECT_PROCESSES", 1)
    monkeypatch.setattr(bench_startup, "IMPORT_PAIRS", 2)
    bench_startup.main(["--pairs", "0"])
    printed = capsys.readouterr().out
    assert len(re.findall(r"^(?:srun|PALS), .* +\d+\.\d{3} +\d+\.\d{3}$", printed, re.MULTILINE)) == 4
    assert re.search(r"^bytecode (cached|not cached.*?)  +\S+ +\S+ +\S+ +\S+ to \S+$", printed, re.MULTILINE)


def test_ratio_is_the_median_of_the_pairs() -> None:
    assert bench_startup.compare([(1.0, 1.0), (2.0, 2.2), (4.0, 8.0)]) == ("2.000", "2.200", "1.100", "1.050 to 1.550")
