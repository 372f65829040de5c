"""The benchmarks run and print their tables; the time of a predicted step is checked on links of a known rate."""
from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.bench import bench_binding, bench_startup
from tests.bench.step_time import PAYLOAD, Grid, measure, predict
from tests.unit.programs import python
from utils.tools.plan import plan_cli

WIDE = 2  # of CASES: the longest communication for its computation


def test_ranks_join_where_rank_0_may_open_few_files() -> None:
    done = python("tests/bench/bench_rendezvous.py", "--ranks", "2", "40")
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^ *(\d+) +\d+\.\d{3} .* (\d+) -> (\d+)$", done.stdout, re.MULTILINE)
    assert [row[0] for row in rows] == ["2", "40", "40"]
    assert int(rows[2][1]) == 256 < int(rows[2][2])


def test_launch_and_agents_are_measured() -> None:
    done = python("tests/bench/bench_scale.py", "--ranks", "16")
    assert re.search(r"^ +16 +2 +\d+\.\d\d(?: +[\d.]+ +[\d.]+ +\d+ +[\d.]+ %){2}$", done.stdout, re.MULTILINE), done


def test_the_way_of_an_archive_is_measured(need: Callable[[str], Path]) -> None:
    for each in ("hosts", "sshd", "mpich", "mpi4py"):
        need(each)
    done = python("tests/bench/bench_staging.py", "--hosts", "3", "--megabytes", "20", "--by", "mpich5")
    assert re.search(r"^mpich5( +\d+\.\d){3} +\d+\.\d\d$", done.stdout, re.MULTILINE), done


def test_startup_tables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench_startup, "DETECT_PROCESSES", 1)
    monkeypatch.setattr(bench_startup, "IMPORT_PAIRS", 2)
    monkeypatch.setattr(bench_startup, "FIRST_PAIRS", 0)
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
    bench_binding.main(["--ranks", "1", "--pairs", "2", "--steps", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["host", "topology", "choose", "bind", "steps"]


def test_saves_are_measured_with_their_spread() -> None:
    done = python("tests/bench/bench_checkpoint.py", "--megabytes", "8", "--runs", "2")
    for name in ("save(), first", "save()", "comparison"):
        assert re.search(rf"^{re.escape(name)} +[\d.]+ +[\d,]+(  +\d+\.\d{{3}}){{3}}$", done.stdout, re.MULTILINE), done


def test_manifest_of_1024_ranks_needs_little_memory() -> None:
    done = python("tests/bench/bench_manifest.py")
    rows = dict(re.findall(r"^(.*?) +\d+\.\d{3} +([\d.]+)$", done.stdout, re.MULTILINE))
    assert list(rows) == ["rank 0 writes", "a rank reads", "half as many", "one rank"], done
    assert all(float(megabytes) < 50 for megabytes in rows.values()), rows


def test_predicted_step_on_links_of_known_rate(
        need: Callable[[str], object], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """predict() is what plan.py prints, and that is about right."""
    need("hosts")
    row, = measure(Grid((WIDE,), (100,), (1.0,), (2,)))
    assert row.rate == 100 and predict(row) == pytest.approx(row.measured, rel=0.2)
    links = tmp_path / "links.json"
    between = {"bandwidth_bytes_per_second": PAYLOAD * 100e6 / 8, "latency_seconds": 1e-3}
    links.write_text(json.dumps({"format": 1, "hosts": 2, "inside": None, "between": between}))
    plan_cli.main(["--model", "tests.bench.step_time:wide_mlp", "--batch", "128", "--optimizer", "sgd", "--gpus", "2",
                   "--gpus-per-node", "1", "--ring", "--links", str(links), "--bucket-cap-mb", "4", "--compute-seconds",
                   str(row.computed), "--json"])
    point, = (point for point in json.loads(capsys.readouterr().out)["scaling"] if point["gpus"] == 2)
    assert predict(row) == pytest.approx(point["step_seconds"])
