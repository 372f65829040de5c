"""The benchmarks run and print their tables; no time is checked."""
from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.bench import bench_binding, bench_startup
from tests.unit.programs import python


def test_ranks_join_where_rank_0_may_open_few_files() -> None:
    done = python("tests/bench/bench_rendezvous.py", "--ranks", "2", "40")
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^ *(\d+) +\d+\.\d{3} .* (\d+) -> (\d+)$", done.stdout, re.MULTILINE)
    assert [row[0] for row in rows] == ["2", "40", "40"]
    assert int(rows[2][1]) == 256 < int(rows[2][2])


def test_startup_tables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench_startup, "DETECT_PROCESSES", 1)
    monkeypatch.setattr(bench_startup, "IMPORT_PAIRS", 2)
    bench_startup.main(["--pairs", "0"])
    bench_startup.bench_launches([bench_startup.direct()], 1)
    printed = capsys.readouterr().out
    for row, count in ((r"(?:srun|PALS), .* +\d+\.\d{3} +\d+\.\d{3}", 4),
                       (r"bytecode (?:cached|not cached.*?)  +\S+ +\S+ +\S+ +\S+ to \S+", 1),
                       (r"direct +(?:first all-reduce|end)(?: +\d+\.\d{3}){4} to \d+\.\d{3}", 2)):
        assert len(re.findall(f"^{row}$", printed, re.MULTILINE)) == count, printed
    pairs = [(1.0, 1.0), (2.0, 2.2), (4.0, 8.0)]
    assert bench_startup.compare(pairs) == ("2.000", "2.200", "1.100", "1.050 to 1.550")


def test_failed_launch_is_an_error_with_its_output(tmp_path: Path) -> None:
    program = tmp_path / "bare.py"
    program.write_text("raise ValueError('no such rank')")
    with pytest.raises(SystemExit, match=r"(?s)bare\.py ended with status 1 and 1\..*no such rank"):
        bench_startup.run("direct", bench_startup.direct().bare, program, tmp_path)


def test_costs_and_steps_of_the_binding_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    bench_binding.main(["--pairs", "2", "--steps", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["host", "topology", "choose", "bind", "steps"]


def test_saves_are_measured_with_their_spread() -> None:
    done = python("tests/bench/bench_checkpoint.py", "--megabytes", "8", "--runs", "2")
    for name in ("save(), first", "save()", "comparison"):
        assert re.search(rf"^{re.escape(name)} +[\d.]+ +[\d,]+(  +\d+\.\d{{3}}){{3}}$", done.stdout, re.MULTILINE), done
