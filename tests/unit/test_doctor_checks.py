"""What the checks of `doctor` conclude from facts, and how they run on the ranks of a launch."""
from __future__ import annotations

import dataclasses
import json
import os
import py_compile
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.unit.programs import ROOT
from utils.tools.doctor.check import Check, Finding, Level, RankPlace, Reported
from utils.tools.doctor.checks import equality, installation, limits, placement
from utils.tools.doctor.doctor_exchange import Exchange, Server
from utils.tools.doctor.report import FindingsOfCheck, Report, fold
from utils.tools.doctor.run_checks import merge

DOCTOR = [sys.executable, str(ROOT / "scripts" / "doctor.py")]
LAUNCH = [sys.executable, str(ROOT / "scripts" / "launch.py")]
GIB = 1 << 30


def places(*hosts: str) -> list[RankPlace]:
    """The ranks 0, 1, ... on these hosts."""
    nodes = list(dict.fromkeys(hosts))
    return [RankPlace(rank, host, nodes.index(host), hosts[:rank].count(host)) for rank, host in enumerate(hosts)]


def conclude(check: Check[Any], facts: Sequence[Any], where: Sequence[RankPlace]) -> list[Finding]:
    """What rank 0 concludes when the facts have travelled as JSON."""
    kind = check.facts
    travelled = [kind(**json.loads(json.dumps(dataclasses.asdict(one)))) for one in facts]
    return list(check.conclude([Reported(place, one) for place, one in zip(where, travelled, strict=True)]))


def alarms(check: Check[Any], facts: Sequence[Any], where: Sequence[RankPlace]) -> list[tuple[str, str]]:
    """The messages of findings that are not good, each with what it is at fault: hosts or ranks."""
    return [(one.message, ",".join(map(str, one.hosts))) for one in conclude(check, facts, where)
            if one.level is not Level.GOOD]


# placement -------------------------------------------------------------------------------------------------------

PLACE = placement.PlacementFacts(notes=[], mask="ff", cpus=8, topology="0:0,1,2,3,4,5,6,7", binding="", openmp="",
                                 gpus=[], gpu_nodes=[], allowed_gpus=[], device_masks="no device mask is set",
                                 threads=0, threads_variable="")
TWO_GPUS = dataclasses.replace(PLACE, gpus=["GPU-a", "GPU-b"], gpu_nodes=[0, 0], allowed_gpus=["GPU-a", "GPU-b"])
JOB = dataclasses.replace(PLACE, job_id="7", job_hosts=["a", "b", "c"], job_gpus=[None] * 3, job_cores=[8] * 3)


def place(*changes: dict[str, Any], of: placement.PlacementFacts = PLACE) -> list[placement.PlacementFacts]:
    return [dataclasses.replace(of, **one) for one in changes]


def test_placement_names_hosts_with_one_name() -> None:
    where = [RankPlace(node, "a", node, 0) for node in (0, 1)]
    assert "2 hosts have the name a: ranks 0, 1 on a" in alarms(placement.PlacementCheck(), place({}, {}), where)[0][0]


@pytest.mark.parametrize("facts", [
    place({}, {}, {}, {}), place({}, {}, {}, {}, of=TWO_GPUS),
    place({"gpus": ["GPU-a"]}, {"gpus": ["GPU-b"]}, *[{}] * 2, of=TWO_GPUS),
    place(*[{"mask": "1"}, {"mask": "2"}] * 2, of=dataclasses.replace(PLACE, cpus=2)),  # a core each, of two
    place(*[{"mask": "1"}, {"mask": "2"}] * 2,
          of=dataclasses.replace(JOB, job_hosts=["a", "b"], job_cores=[2, None])),  # the job has no more
    place(*[{"threads": 4, "threads_variable": "OMP_NUM_THREADS"}] * 4)])
def test_placement_without_a_problem_is_good(facts: list[placement.PlacementFacts]) -> None:
    found = conclude(placement.PlacementCheck(), facts, places("a", "a", "b", "b"))
    assert [one.level for one in found] == [Level.GOOD]


@pytest.mark.parametrize(("facts", "message", "hosts"), [
    (place(*[{"mask": "4"}] * 2, {}, {}), "all 2 ranks of a may run on core 2 only, of 8", "a"),
    (place({}, {}, {"mask": "3"}, {"mask": "c"}), "the 2 ranks of b may run on 4 of its 8 CPUs, 2 for each", "b"),
    (place({}, {}, *[{"threads": 64, "threads_variable": "OMP_NUM_THREADS"}] * 2),
     "2 ranks on b would start 128 threads (OMP_NUM_THREADS=64) on 8 CPUs", "b"),
    (place({}, {}, *[{"gpus": ["GPU-a"], "device_masks": "CUDA_VISIBLE_DEVICES=0"}] * 2, of=TWO_GPUS),
     "ranks 2, 3 on b share GPU GPU-a (CUDA_VISIBLE_DEVICES=0)", "b"),
    (place({}, {}, {}, {"gpus": [], "device_masks": "CUDA_VISIBLE_DEVICES="}, of=TWO_GPUS),
     "rank 3 on b sees no GPU (CUDA_VISIBLE_DEVICES=), but the host has 2", "b"),
    (place({}, {}, *[{"allowed_gpus": ["GPU-a", "GPU-b", "GPU-c"]}] * 2, of=TWO_GPUS),
     "2 ranks use 2 of the 3 GPUs on b", "b"),
    (place({}, {}, {}, {}, of=JOB), "no rank runs on c: 1 of the 3 hosts of job 7", "c"),
    (place({}, {"notes": ["RANK=7 of env was ignored"]}, {}, {}), "rank 1 on a: RANK=7 of env was ignored", "a")])
def test_placement_names_problem_and_host(facts: list[placement.PlacementFacts], message: str, hosts: str) -> None:
    (found, at_fault), = alarms(placement.PlacementCheck(), facts, places("a", "a", "b", "b"))
    assert message in found and at_fault == hosts


# equality --------------------------------------------------------------------------------------------------------

SAME = equality.EqualityFacts(software={"Python": "3.12.1", "torch": "2.6.0"}, code={"code of the kit": "1"}, files={},
                      variables={"NCCL_DEBUG": "INFO"})


OF_ONE_FILE = {name: dataclasses.replace(SAME, code={"code of the kit": name}, files={
    "code of the kit": {"train.py": name, "x.py": "5"}}) for name in "12"}


@pytest.mark.parametrize(("common", "change", "level", "message"), [
    (SAME, {"software": {"Python": "3.12.1", "torch": "2.5.1"}}, Level.BAD,
     "torch differs. c: 2.5.1; the other ranks: 2.6.0"),
    (SAME, {"software": {"torch": "2.6.0"}}, Level.BAD, "Python differs. c: none; the other ranks: 3.12.1"),
    (SAME, {"variables": {"NCCL_DEBUG": "WARN"}}, Level.WARNING,
     "NCCL_DEBUG differs. c: WARN; the other ranks: INFO"),
    (SAME, {"variables": {}}, Level.WARNING, "NCCL_DEBUG differs. c: (unset); the other ranks: INFO"),
    (SAME, {"software": {"Python": "3.12.1", "torch": "2.6.0", "sys.flags.optimize": "1"}}, Level.WARNING,
     "sys.flags.optimize differs. c: 1; the other ranks: none"),
    (OF_ONE_FILE["1"], vars(OF_ONE_FILE["2"]), Level.BAD,
     "code of the kit (train.py) differs. c: 2; the other ranks: 1")])
def test_equality_names_the_odd_host(common: equality.EqualityFacts, change: dict[str, Any], level: Level,
                                     message: str) -> None:
    odd = dataclasses.replace(common, **change)
    found, = conclude(equality.Equality(), [common, common, common, odd, odd], places("a", "a", "b", "c", "c"))
    assert (found.level, found.message, found.hosts) == (level, message, ("c",))


def test_equality_names_the_odd_rank_of_a_host_and_what_is_the_same() -> None:
    odd = dataclasses.replace(SAME, variables={})
    found, = conclude(equality.Equality(), [SAME, odd, SAME, SAME], places("a", "a", "b", "b"))
    assert "rank 1 on a: (unset)" in found.message and found.ranks == (1,)
    good, = conclude(equality.Equality(), [SAME] * 3, places("a", "b", "c"))
    assert good.message.startswith("Python 3.12.1, torch 2.6.0; the same code and variables")


def write(folder: Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_checksums_cover_scripts_and_packages(tmp_path: Path) -> None:
    write(tmp_path, {name: name for name in (
        "train.py", "model/__init__.py", "model/layers/__init__.py", "data/raw.py", "notes.txt")})
    assert sorted(equality.checksums(tmp_path)) == ["model/__init__.py", "model/layers/__init__.py", "train.py"]


def test_items_that_differ_on_other_hosts_are_other_findings() -> None:
    items = [{"numpy": "2.1", "scipy": "1.0"}, {"numpy": "1.26", "scipy": "1.0"}, {"numpy": "2.1"}] + [
        {"numpy": "2.1", "scipy": "1.0"}] * 2
    found = equality.compare_items("packages", dict(zip(places("a", "b", "c", "d", "e"), items, strict=True)),
                                   Level.WARNING, "")
    assert [one.message for one in found] == ["packages (numpy) differs. b: 1.26; the other ranks: 2.1",
                                              "packages (scipy) differs. c: none; the other ranks: 1.0"]


def test_versions_of_packages_are_those_that_python_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, name, version in (("first", "numpy", "1.26.4"), ("second", "numpy", "2.1.0"), ("second", "wheel", "1"),
                                  ("second", "scipy", "1.0")):
        (tmp_path / folder / f"{name}-{version}.dist-info").mkdir(parents=True)
    write(tmp_path, {"second/scipy/version.py": '"""Made."""\nversion: str = "1.14.1"\n'})
    monkeypatch.setattr(sys, "path", [str(tmp_path / "first"), "/nowhere", str(tmp_path / "second")])
    assert equality.packages() == {"numpy": "1.26.4", "wheel": "1", "scipy": "1.14.1"}


def test_files_that_hide_modules_are_named(tmp_path: Path) -> None:
    write(tmp_path, dict.fromkeys(("random.py", "numpy/__init__.py", "utils.py", "test.py", "time.py", "os.py",
                                   "model.py", "data/x.py"), ""))
    found = equality.traps(tmp_path)
    assert sorted(one.partition(" ")[0] for one in found) == ["numpy", "random.py", "utils.py"], found
    assert not equality.traps(ROOT)


@pytest.mark.parametrize(("source", "mode", "is_stale"), [
    ("WIDTH = 512\n", py_compile.PycInvalidationMode.TIMESTAMP, True),
    ("WIDTH = 512\n", py_compile.PycInvalidationMode.UNCHECKED_HASH, True),
    ("WIDTH = 512\n", py_compile.PycInvalidationMode.CHECKED_HASH, False),  # Python compiles the file again
    ("WIDTH = 1024\n", py_compile.PycInvalidationMode.TIMESTAMP, False),  # as for another size
    ("WIDTH = 256\n", py_compile.PycInvalidationMode.TIMESTAMP, False)])
def test_compiled_code_of_another_file_is_noticed(tmp_path: Path, source: str, mode: py_compile.PycInvalidationMode,
                                                  is_stale: bool) -> None:
    model = tmp_path / "net" / "model.py"
    model.parent.mkdir()
    model.write_text("WIDTH = 256\n")
    date = model.stat().st_mtime_ns
    compiled = Path(str(py_compile.compile(str(model), doraise=True, invalidation_mode=mode)))
    before = compiled.read_bytes()
    model.write_text(source)
    os.utime(model, ns=(date, date))
    assert [("model.py" in one) for one in equality.traps(tmp_path)] == [True] * is_stale
    assert compiled.read_bytes() == before


def test_options_of_python_and_the_locale_are_compared() -> None:
    program = "import json; from utils.tools.doctor.checks import equality; print(json.dumps(equality.software()))"

    def software(*options: str, **environ: str) -> dict[str, str]:
        done = subprocess.run([sys.executable, *options, "-c", program], cwd=ROOT, capture_output=True, text=True,
                              check=True, env={"PATH": os.environ["PATH"], **environ})
        found: dict[str, str] = json.loads(done.stdout)
        return found
    usual = software(LANG="C.UTF-8")
    assert software() == software(LANG="tr_TR.UTF-8") == software(PYTHONDONTWRITEBYTECODE="1") == usual  # no difference
    for odd, name in ((software("-O"), "sys.flags.optimize"), (software("-X", "utf8"), "Python's UTF-8 mode"),
                      (software(PYTHONUTF8="1"), "Python's UTF-8 mode"),
                      (software(LC_ALL="C"), "text encoding of the locale")):
        assert [one for one in usual if odd[one] != usual[one]] == [name]


def test_empty_and_repeated_entries_of_paths_are_no_difference() -> None:
    entries = [equality.relevant_variables({"LD_LIBRARY_PATH": text}) for text in ("/a:/b:/b", ":/a:/b:")]
    assert entries[0] == entries[1] == {"LD_LIBRARY_PATH": "/a:/b"}


# limits ----------------------------------------------------------------------------------------------------------

LIMITS = limits.LimitFacts(ranks=2, world_size=8, fabric="", has_gpu=False, locked_bytes=-1, open_files=1024,
                      shared_bytes=8 * GIB, shared_free_bytes=8 * GIB, memory_bytes=16 * GIB, free_bytes=9 * GIB,
                      processes_left=None, seconds_left=None)


@pytest.mark.parametrize(("change", "message"), [
    ({}, ""), ({"open_files": 4096, "locked_bytes": 8 << 20, "fabric": ""}, "locked memory (ulimit -l) of c: 8.0 MiB"),
    ({"fabric": "mlx5_0", "locked_bytes": 64 << 10}, "c may lock 64.0 KiB of memory (ulimit -l), but mlx5_0 needs it"),
    ({"open_files": 64}, "a process on c may open 64 files (ulimit -n). Expected at least 288"),
    ({"shared_bytes": 1 << 20, "shared_free_bytes": 1 << 20}, "/dev/shm of c has 1.0 MiB free of 1.0 MiB"),
    ({"memory_bytes": 1 << 28, "free_bytes": 1 << 28}, "the processes on c may use 256.0 MiB of memory in all"),
    ({"free_bytes": 1 << 28}, "c has 256.0 MiB of memory free"),
    ({"memory_bytes": 6 * GIB, "free_bytes": 6 * GIB}, "memory of c: 6.0 GiB. Most hosts: 16.0 GiB"),
    ({"processes_left": 9}, "c allows 9 processes and threads (ulimit -u, or the control group)"),
    ({"cpu_quota": 1.5}, "the control group on c allows the time of 1.5 CPUs. Expected at least one for each of 2")])
def test_limits_names_host_value_and_expected_value(change: dict[str, Any], message: str) -> None:
    facts = [LIMITS, LIMITS, dataclasses.replace(LIMITS, **change)]
    found = alarms(limits.Limits(), facts, places("a", "b", "c"))
    assert [hosts for _, hosts in found] == (["c"] if message else [])
    assert not message or found[0][0].startswith(message)


def test_little_time_left_is_reported() -> None:
    facts = [dataclasses.replace(LIMITS, seconds_left=90.0)]
    assert alarms(limits.Limits(), facts, places("a"))[0][0].startswith("the job has 90 s left")


def test_quota_and_memory_are_the_smallest_of_the_control_groups(tmp_path: Path) -> None:
    groups = "sys/fs/cgroup"
    write(tmp_path, {"proc/self/cgroup": "4:cpu,cpuacct:/job\n0::/job/step\n",
                     f"{groups}/job/step/cpu.max": "max 100000\n"})
    assert limits.cpu_quota(tmp_path) is None
    write(tmp_path, {f"{groups}/{name}": text for name, text in {
        "job/cpu.max": "300000 100000\n", "cpu/job/cpu.cfs_quota_us": "50000\n",
        "cpu/job/cpu.cfs_period_us": "100000\n", "cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n",
        "job/step/memory.max": "max\n", "job/memory.max": "4096000\n", "job/memory.current": "1096000\n",
        "job/memory.stat": "anon 5\ninactive_file 96000\n"}.items()})
    write(tmp_path, {"proc/meminfo": "MemTotal:  8000 kB\nMemAvailable:  7000 kB\n"})
    assert limits.cpu_quota(tmp_path) == 0.5 and limits.memory_limit(tmp_path) == (4096000, 3096000)


# installation ----------------------------------------------------------------------------------------------------

INSTALLED = installation.InstallationFacts(launcher="single", mpi_launcher="", scheduler="slurm", stale="",
                                           torch="2.6.0", cuda="", hip="", driver="", pci_gpus={}, has_devices=False,
                                           mpiexec="", mpi4py="")


@pytest.mark.parametrize(("change", "message"), [
    ({}, ""), ({"cuda": "12.4"}, ""), ({"pci_gpus": {"NVIDIA": 2}}, ""),  # a container without devices
    ({"torch": ""}, "the Python of a has no torch"),
    ({"cuda": "12.4", "pci_gpus": {"NVIDIA": 2}}, "a: 2 GPU(s) of NVIDIA on the PCI bus, but no driver"),
    ({"pci_gpus": {"NVIDIA": 2}, "driver": "550.54", "has_devices": True},
     "a: 2 GPU(s) of NVIDIA, but torch 2.6.0 is not built for CUDA"),
    ({"cuda": "12.4", "pci_gpus": {"NVIDIA": 2}, "driver": "470.82", "has_devices": True},
     "the driver of a is 470.82, but torch 2.6.0 is built for CUDA 12.4, which needs 525 or newer"),
    ({"stale": "RANK=3 WORLD_SIZE=8"}, "RANK=3 WORLD_SIZE=8 is set on a, but no launcher"),
    ({"mpi4py": "libmpi.so.40", "mpiexec": "Open MPI (/usr/bin/mpiexec)"}, ""),
    ({"mpi4py": "libmpi.so.40", "mpiexec": "MPICH (/usr/bin/mpiexec)"},
     "mpi4py on a loads libmpi.so.40 (Open MPI), but mpiexec is MPICH (/usr/bin/mpiexec)"),
    ({"mpi4py": "libmpi.so.12", "launcher": "openmpi", "mpi_launcher": "Open MPI"},
     "mpi4py on a loads libmpi.so.12 (MPICH)")])
def test_installation(change: dict[str, Any], message: str) -> None:
    found = alarms(installation.Installation(False), [dataclasses.replace(INSTALLED, **change)], places("a"))
    assert [hosts for _, hosts in found] == (["a"] if message else [])
    assert not message or found[0][0].startswith(message)


# one cause, one finding ------------------------------------------------------------------------------------------


def test_findings_that_say_the_same_of_several_hosts_are_one() -> None:
    found = merge([Finding(Level.BAD, f"{host} may open 64 files", f"ulimit -n on {host}", (rank,), (host,))
                   for rank, host in enumerate(("n1", "n10", "n2"))]
                  + [Finding(Level.BAD, "n1 is slow", hosts=("n1",))])
    assert [(one.message, one.hosts, one.ranks) for one in found] == [
        ("n1, n10 and n2 may open 64 files", ("n1", "n10", "n2"), (0, 1, 2)), ("n1 is slow", ("n1",), ())]


@pytest.mark.parametrize(("cause", "effect", "is_below"), [
    ({"hosts": ("a",)}, {"hosts": ("a", "b"), "follows": ("limits",)}, True),
    ({"hosts": ("a",)}, {"hosts": ("b",), "follows": ("limits",)}, False),  # another host
    ({"hosts": ("a",)}, {"hosts": ("a",), "follows": ("names",)}, False),
    ({"hosts": ("a",)}, {"follows": ("limits",)}, False),  # a failure of all, after a warning for one
    ({"hosts": ("a",), "subject": "X"}, {"hosts": ("b",), "subject": "X", "follows": ("X",)}, True),  # the odd one is b
    ({"hosts": ("a",), "subject": "X", "follows": ("network",)}, {"hosts": ("a",), "follows": ("X",)}, True)])
def test_finding_that_follows_from_another_is_listed_below_it(cause: dict[str, Any], effect: dict[str, Any],
                                                              is_below: bool) -> None:
    results = [FindingsOfCheck("network", [Finding(Level.BAD, "slow", "", exclude=True, **effect)]),
               FindingsOfCheck("limits", [Finding(Level.WARNING, "few cores", "Ask", **cause)])]
    fold(results)
    report = Report(places("a", "b"), "srun", results, 1.0)
    below = [one.effects for result in results for one in result.findings if one.level is not Level.GOOD]
    assert below == ([("BAD network: slow",)] if is_below else [(), ()])
    assert report.level is Level.BAD and bool(report.hosts_to_exclude) is (not is_below and bool(effect.get("hosts")))
    assert ("  Possible effect: BAD network: slow." in report.as_text()) is is_below


# the exchange ----------------------------------------------------------------------------------------------------


def test_exchange_gathers_values_and_notices_missing_ranks() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(listener, 3, "t")
    ranks = [Exchange(rank, 3, "127.0.0.1", listener.getsockname()[1], "t") for rank in range(3)]

    def gather(topic: str, seconds: float, *members: int, of: list[int] | None = None) -> list[list[Any]]:
        with ThreadPoolExecutor() as pool:
            return [*pool.map(lambda rank: ranks[rank].gather(topic, rank * 10, seconds, of).values, members)]

    assert gather("all", 30, 0, 1, 2) == [[0, 10, 20]] * 3
    assert gather("some", 30, 0, 2, of=[0, 2]) == [[0, None, 20]] * 2
    assert gather("without 1", 0.1, 0, 2)[0] == [0, None, 20]
    assert gather("without 1", 30, 1) == [[0, None, 20]]  # a late rank gets the same values
    ranks[2].close()
    assert gather("ended", 600, 0, 1)[0] == [0, 10, None]
    server.close()


# the command -----------------------------------------------------------------------------------------------------


def doctor(*words: str, environ: dict[str, str] | None = None, launch: Sequence[str] = (),
           stdout: Any = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*launch, *DOCTOR[bool(launch):], *words], cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE,
                          text=True, timeout=120, env={**os.environ, **(environ or {})})


def test_ranks_report_and_rank_0_prints_json(tmp_path: Path) -> None:
    done = doctor("--quick", "--json", "--exclude-file", str(tmp_path / "bad"), launch=[*LAUNCH, "-n", "2"])
    report = json.loads(done.stdout)
    assert done.returncode == report["exit_status"], done
    assert [one["local_rank"] for one in report["ranks"]] == [0, 1]
    assert {"launch", "placement", "equality", "limits", "installation"} <= {one["name"] for one in report["checks"]}
    assert not (tmp_path / "bad").exists()


@pytest.mark.parametrize(("options", "environ", "words"), [
    ("--quick", {"RANK": "3"}, ["WORLD_SIZE not set, but RANK='3'", "RANK=3 are set, and no launcher has set them",
                                "unset RANK"]),
    ("--timeout 0.5", {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29871"},
     ["2 of 3 ranks did not join: ranks 1-2"]),
    ("--only weather", {}, ["there is no check 'weather'"])], ids=["stale rank", "missing ranks", "unknown check"])
def test_mistake_is_named(options: str, environ: dict[str, str], words: list[str]) -> None:
    done = doctor(*options.split(), environ=environ)
    output = done.stderr if "weather" in options else done.stdout
    assert done.returncode == 2 and all(word in output for word in words), done


def test_status_of_a_doctor_that_fails_is_not_that_of_a_warning() -> None:
    with open("/dev/full", "w") as full:
        done = doctor("--only", "limits", stdout=full)
    assert done.returncode > 2 and "No space left on device" in done.stderr, done
