"""What the checks of `doctor` conclude from facts, and how they run on the ranks of a launch."""
from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.unit.doctor_findings import conclude, only, places, problems
from tests.unit.programs import ROOT
from utils.tools.doctor import doctor_cli
from utils.tools.doctor.check import Check, Finding, Level
from utils.tools.doctor.checks import equality, installation, limits, placement
from utils.tools.doctor.report import FindingsOfCheck, Report
from utils.tools.doctor.run_checks import merge, run_check

GIB = 1 << 30


def check_odd_host(check: Check[Any], usual: Any, change: dict[str, Any], message: str) -> None:
    """There is a finding about host c, which alone has the change; without a message there is none."""
    found = problems(check, [dataclasses.replace(usual, **change), usual, usual], places("c", "a", "b"))
    assert [one.hosts for one in found] == [("c",)] * bool(message)
    assert all(one.message.startswith(message) for one in found)


# placement -------------------------------------------------------------------------------------------------------

PLACE = placement.PlacementFacts(notes=[], mask="ff", cpus=8, topology="0:0,1,2,3,4,5,6,7", binding="", openmp="",
                                 gpus=[], gpu_nodes=[], allowed_gpus=[], device_masks="no device mask is set",
                                 threads=0, threads_variable="")
TWO_GPUS = dataclasses.replace(PLACE, gpus=["GPU-a", "GPU-b"], gpu_nodes=[0, 0], allowed_gpus=["GPU-a", "GPU-b"])
JOB = dataclasses.replace(PLACE, job_id="7", job_hosts=["a", "b", "c"], job_gpus=[None] * 3, job_cores=[8] * 3)


def place(*changes: dict[str, Any], of: placement.PlacementFacts = PLACE) -> list[placement.PlacementFacts]:
    return [dataclasses.replace(of, **one) for one in changes]


@pytest.mark.parametrize(("facts", "message", "host"), [
    *((facts, "", "") for facts in (
        place({}, {}, {}, {}), place({}, {}, {}, {}, of=TWO_GPUS),
        place({"gpus": ["GPU-a"]}, {"gpus": ["GPU-b"]}, *[{}] * 2, of=TWO_GPUS),
        place(*[{"mask": "1"}, {"mask": "2"}] * 2, of=dataclasses.replace(PLACE, cpus=2)),  # a core each, of two
        place(*[{"mask": "1"}, {"mask": "2"}] * 2,
              of=dataclasses.replace(JOB, job_hosts=["a", "b"], job_cores=[2, None])),  # the job has no more
        place(*[{"threads": 4, "threads_variable": "OMP_NUM_THREADS"}] * 4))),
    (place({}, {}, {"mask": "3"}, {"mask": "c"}), "the 2 ranks of b may run on 4 of its 8 CPUs, 2 for each", "b"),
    (place({}, {}, *[{"gpus": ["GPU-a"], "device_masks": "CUDA_VISIBLE_DEVICES=0"}] * 2, of=TWO_GPUS),
     "ranks 2, 3 on b share GPU GPU-a (CUDA_VISIBLE_DEVICES=0)", "b"),
    (place({}, {}, *[{"allowed_gpus": ["GPU-a", "GPU-b", "GPU-c"]}] * 2, of=TWO_GPUS),
     "2 ranks use 2 of the 3 GPUs on b", "b"),
    (place({}, {"notes": ["RANK=7 of env was ignored"]}, {}, {}), "rank 1 on a: RANK=7 of env was ignored", "a")])
def test_placement_names_problem_and_host(facts: list[placement.PlacementFacts], message: str, host: str) -> None:
    found = problems(placement.PlacementCheck(), facts, places("a", "a", "b", "b"))
    assert [one.hosts for one in found] == [(host,)] * bool(host) and all(message in one.message for one in found)


# equality --------------------------------------------------------------------------------------------------------

SAME = equality.EqualityFacts(software={"Python": "3.12.1", "torch": "2.6.0"},
                              variables={"NCCL_DEBUG": "INFO"})


@pytest.mark.parametrize(("change", "level", "message"), [
    ({"software": {"Python": "3.12.1"}}, Level.BAD, "torch differs. c: none; the other ranks: 2.6.0"),
    ({"variables": {}}, Level.WARNING, "NCCL_DEBUG differs. c: (unset); the other ranks: INFO"),
    ({"software": {**SAME.software, "sys.flags.optimize": "1"}}, Level.WARNING,
     "sys.flags.optimize differs. c: 1; the other ranks: none")])
def test_equality_names_the_odd_host(change: dict[str, Any], level: Level, message: str) -> None:
    odd = dataclasses.replace(SAME, **change)
    found = only(conclude(equality.Equality(), [SAME, SAME, SAME, odd, odd], places("a", "a", "b", "c", "c")))
    assert (found.level, found.message, found.hosts) == (level, message, ("c",))


def test_equality_names_the_odd_rank_of_a_host_and_what_is_the_same() -> None:
    odd = dataclasses.replace(SAME, variables={})
    found = only(conclude(equality.Equality(), [SAME, odd, SAME, SAME], places("a", "a", "b", "b")))
    assert "rank 1 on a: (unset)" in found.message and found.ranks == (1,)
    good = only(conclude(equality.Equality(), [SAME] * 3))
    assert good.message.startswith("Python 3.12.1, torch 2.6.0; the same variables")


def test_entries_of_paths_are_compared_once() -> None:
    entries = [equality.relevant_variables({"LD_LIBRARY_PATH": text}) for text in ("/a:/b:/b", ":/a:/b:")]
    assert entries[0] == entries[1] == {"LD_LIBRARY_PATH": "/a:/b"}


# limits ----------------------------------------------------------------------------------------------------------

LIMITS = limits.LimitFacts(world_size=8, fabric="", locked_bytes=-1, open_files=1024,
                      shared_bytes=8 * GIB, shared_free_bytes=8 * GIB, seconds_left=None)


@pytest.mark.parametrize(("change", "message"), [
    ({}, ""), ({"open_files": 4096, "locked_bytes": 8 << 20, "fabric": ""}, ""),
    ({"fabric": "mlx5_0", "locked_bytes": 64 << 10}, "c may lock 64.0 KiB of memory (ulimit -l), but mlx5_0 needs it"),
    ({"ignored_signals": ["SIGTERM"]}, "processes on c are started to ignore SIGTERM"),
    ({"ignored_signals": ["SIGINT"]}, ""),
    ({"shared_bytes": 1 << 20, "shared_free_bytes": 1 << 20}, "/dev/shm of c has 1.0 MiB free of 1.0 MiB")])
def test_limits(change: dict[str, Any], message: str) -> None:
    check_odd_host(limits.Limits(), LIMITS, change, message)
    found = only(conclude(limits.Limits(), [dataclasses.replace(LIMITS, seconds_left=90.0)]))
    assert found.message.startswith("the job has 90 s left")


@pytest.mark.parametrize(("trap", "expected"), [("trap '' TERM;", ["SIGTERM"]), ("", [])])
def test_signals_that_a_job_script_ignores_are_collected(trap: str, expected: list[str]) -> None:
    code = ("from unittest.mock import Mock; from utils.tools.doctor.checks.limits import Limits; "
            "print(Limits().collect(Mock(everyone=[1], me=Mock(rank=1))).ignored_signals)")
    done = subprocess.run(["/bin/sh", "-c", f'{trap} exec "$@"', "job", sys.executable, "-c", code], cwd=ROOT,
                          stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    assert done.stdout.strip() == str(expected)


# installation ----------------------------------------------------------------------------------------------------

INSTALLED = installation.InstallationFacts(scheduler="slurm", stale="", torch="2.6.0", cuda="", hip="", driver="",
                                           gpus=0, gpu_vendor="", mpiexec="")


@pytest.mark.parametrize(("change", "message"), [
    ({}, ""), ({"cuda": "12.4"}, ""), ({"gpus": 2, "gpu_vendor": "intel"}, ""),
    ({"torch": ""}, "the Python of c has no torch. Expected an environment with torch"),
    ({"gpus": 2, "gpu_vendor": "nvidia", "driver": "550.54"}, "c: 2 GPU(s), but torch 2.6.0 is not built for CUDA"),
    ({"cuda": "12.4", "gpus": 2, "gpu_vendor": "nvidia", "driver": "470.82"},
     "the driver of c is 470.82, but torch 2.6.0 is built for CUDA 12.4, which needs 525 or newer"),
    *(({"gpus": 2, "gpu_vendor": "nvidia", "cuda": "12.8", "driver": "570.1", **change}, message)
      for change, message in (
        ({"nccl": "2.28.9", "features": ["aarch64"]}, "c has NCCL 2.28.9, which may hang without a message with"),
        ({"nccl": "2.28.9", "features": ["x86_64"]}, ""), ({"nccl": "2.29.3", "features": ["aarch64"]}, ""),
        ({"nccl": "2.28.3", "features": ["x86_64"]}, "c has NCCL 2.28.3, which may crash"),
        ({"nccl": "2.28.8"}, "c has NCCL 2.28.8, which may crash"),
        ({"ofi_plugin": "1.6.0", "features": ["cxi"]}, "c has aws-ofi-nccl 1.6.0, which may hang"),
        ({"ofi_plugin": "1.6.0", "features": ["x86_64"]}, ""), ({"ofi_plugin": "1.7.1", "features": ["cxi"]}, ""))),
    ({"nccl": "2.28.9", "features": ["aarch64"]}, ""),  # no GPU
    ({"stale": "RANK=3 WORLD_SIZE=8"}, "RANK=3 WORLD_SIZE=8 is set on c, but no launcher")])
def test_installation(change: dict[str, Any], message: str) -> None:
    check_odd_host(installation.Installation(False), INSTALLED, change, message)


# findings -------------------------------------------------------------------------------------------------------

def test_findings_that_say_the_same_of_several_hosts_are_one() -> None:
    found = merge([Finding(Level.BAD, f"{host} may open 64 files", f"ulimit -n on {host}", (rank,), (host,))
                   for rank, host in enumerate(("n1", "n10", "n2"))]
                  + [Finding(Level.BAD, "n1 is slow", hosts=("n1",))])
    assert [(one.message, one.hosts, one.ranks) for one in found] == [
        ("n1, n10 and n2 may open 64 files", ("n1", "n10", "n2"), (0, 1, 2)), ("n1 is slow", ("n1",), ())]


def test_report_lists_hosts_to_exclude_and_the_most_serious_level() -> None:
    results = [FindingsOfCheck("network", [Finding(Level.BAD, "slow", hosts=("a",), exclude=True)]),
               FindingsOfCheck("limits", [Finding(Level.WARNING, "few cores", "Ask", hosts=("b",), exclude=True)])]
    report = Report(places("a", "b"), "slurm", results, 1.0)
    assert "doctor: BAD: 2 ranks on 2 hosts, started by srun (Slurm), 1.0 s" in report.as_text()
    assert report.level is Level.BAD and report.hosts_to_exclude == {"a": "network: slow"}
    assert "BAD network: slow." in report.as_text() and "WARNING limits: few cores." in report.as_text()


@pytest.mark.parametrize(("bad", "hosts", "excluded"), [
    (1, 1, 1), (1, 2, 1), (2, 2, 0), (2, 4, 2), (3, 4, 0), (3, 8, 3)])
def test_most_hosts_of_a_job_are_not_excluded(bad: int, hosts: int, excluded: int) -> None:
    names = [f"h{number}" for number in range(hosts)]
    finding = Finding(Level.BAD, "slow", hosts=tuple(names[:bad]), exclude=True)
    results = [FindingsOfCheck("storage", [finding])]
    for report in (Report(places(*names), "slurm", results, 1.0), Report((), "", results, 1.0, hosts)):
        assert list(report.hosts_to_exclude) == names[:excluded]
        assert json.loads(report.as_json())["exclude"] == names[:excluded]
        assert (f"No host is excluded: {bad} are bad, most of the job" in report.as_text()) == (not excluded)


@pytest.mark.parametrize(("silent", "exclude", "remedy"), [
    ({2}, True, "Log in there"), ({1, 2}, False, "Find out what is slow on all hosts")])
def test_hosts_that_do_not_respond_are_excluded_where_they_are_few(
        silent: set[int], exclude: bool, remedy: str) -> None:
    lead = Mock(everyone=places("a", "b", "c"))
    lead.request = lambda ranks, *_: {rank: {"facts": dataclasses.asdict(LIMITS)} for rank in ranks - silent}
    lead.has_ended.return_value, lead.responding.return_value = False, set()
    missing: set[int] = set()
    found = [one for one in run_check(limits.Limits(), lead, missing).findings if one.level is Level.BAD]
    assert {(one.exclude, one.ranks) for one in found} == {(exclude, tuple(sorted(silent)))} and missing == silent
    assert all(remedy in one.remedy and "did not respond" in one.message for one in found)


# the command -----------------------------------------------------------------------------------------------------

def doctor(*words: str, environ: dict[str, str] | None = None, launch: Sequence[str] = (),
           stdout: Any = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    command = [*launch, str(ROOT / "utils" / "__main__.py"), "doctor", *words]
    return subprocess.run([sys.executable, *command], cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, text=True,
                          timeout=120, env={**os.environ, **(environ or {})})


def test_ranks_report_and_rank_0_prints_json(tmp_path: Path) -> None:
    done = doctor("--quick", "--json", "--exclude-file", str(tmp_path / "bad"), launch=["scripts/launch.py", "-n", "2"])
    report = json.loads(done.stdout)
    assert done.returncode == report["exit_status"], done
    assert [one["local_rank"] for one in report["ranks"]] == [0, 1]
    assert {"launch", "placement", "equality", "limits", "installation"} <= {one["name"] for one in report["checks"]}
    assert not (tmp_path / "bad").exists()


@pytest.mark.parametrize(("options", "environ", "words"), [
    ("--quick", {"RANK": "3"}, ["WORLD_SIZE not set, but RANK='3'"]),
    ("--timeout 0.5", {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29871"},
     ["2 of 3 ranks did not join: ranks 1-2"])], ids=["stale rank", "missing ranks"])
def test_launch_that_fails_is_explained(options: str, environ: dict[str, str], words: list[str]) -> None:
    done = doctor(*options.split(), environ=environ)
    assert done.returncode == 2 and all(word in done.stdout for word in words), done


def test_unknown_check_is_named_and_the_status_of_a_doctor_that_fails_is_not_that_of_a_warning(
        capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        doctor_cli.main(["--only", "weather"])
    assert "there is no check 'weather'" in capsys.readouterr().err
    with open("/dev/full", "w") as full:
        done = doctor("--only", "limits", stdout=full)
    assert done.returncode > 2 and "No space left on device" in done.stderr, done


def test_library_that_holds_the_interpreter_while_it_loads_excludes_no_host(tmp_path: Path) -> None:
    """As a library of torch does on a slow file system: no thread of that process runs meanwhile."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/version.py").write_text("__version__ = '2.13.0'\n")
    (tmp_path / "torch/distributed.py").touch()
    (tmp_path / "torch/__init__.py").write_text(
        "import ctypes, os\nif os.environ['RANK'] == '1':\n    ctypes.PyDLL(None).sleep(12)\n")
    done = doctor("--only", "import", environ={"PYTHONPATH": str(tmp_path)}, launch=["scripts/launch.py", "-n", "2"])
    assert done.returncode == 0 and "did not respond" not in done.stdout, done
