"""Which launcher started this process, and as which rank: recorded and written environments."""
from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from utils.launchers import LAUNCHERS, LaunchError, Placement, detect
from utils.launchers.torchrun import Torchrun

ROOT = Path(__file__).resolve().parents[2]
RECORDINGS = ROOT / "tests" / "recordings"
FILES = sorted(str(path.relative_to(RECORDINGS)) for path in RECORDINGS.glob("*/*.json"))
WRITTEN = json.loads((RECORDINGS / "written-cases.json").read_text())
Environ = Mapping[str, str]


def variables(prefix: str, text: str, **more: str) -> dict[str, str]:
    """variables("PMI_", "RANK=1 SIZE=4") -> {"PMI_RANK": "1", "PMI_SIZE": "4"}"""
    return {f"{prefix}{word.partition('=')[0]}": word.partition("=")[2]
            for word in text.split()} | more


BY_HAND = variables("", "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2")
TORCHRUN = {**BY_HAND, "TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "h1", "MASTER_PORT": "29500"}
OPENMPI = variables("OMPI_COMM_WORLD_", "RANK=1 SIZE=2 LOCAL_RANK=0 LOCAL_SIZE=1",
                    PMIX_NAMESPACE="prterun-h1-7@1")
MPICH = variables("PMI_", "RANK=1 SIZE=4 FD=9", MPI_LOCALRANKID="1", MPI_LOCALNRANKS="2")
INTEL = {**MPICH, "I_MPI_HYDRA_UUID": "a3", "HYDRA_BSTRAP_LOCALHOST": "h1"}
PALS = variables("PALS_", "RANKID=5 LOCAL_RANKID=1 LOCAL_SIZE=4 APID=x")
CRAY_PMI = variables("PMI_", "RANK=5 SIZE=7 LOCAL_RANK=1 LOCAL_SIZE=4")
MVAPICH = variables("MV2_COMM_WORLD_", "RANK=5 SIZE=8 LOCAL_RANK=1 LOCAL_SIZE=4")
FLUX = variables("FLUX_", "TASK_RANK=5 JOB_SIZE=8 TASK_LOCAL_ID=1 JOB_NNODES=2 JOB_ID=f2")
JSRUN = variables("JSM_NAMESPACE_", "RANK=5 SIZE=8 LOCAL_RANK=1 LOCAL_SIZE=4")
SRUN = variables("SLURM_", "JOB_ID=1 STEP_ID=0 PROCID=5 LOCALID=1 NODEID=1 NTASKS=8 "
                 "STEP_NUM_TASKS=8 STEP_TASKS_PER_NODE=4(x2) GTIDS=4,5,6,7 STEP_NODELIST=n[1-2]")
SRUN_RANK_0 = {**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
               "SLURM_GTIDS": "0,1,2,3"}
SUBMITIT = variables("SUBMITIT_LOCAL_", "GLOBALID=1 NTASKS=2 LOCALID=1 JOB_ID=4711")
BATCH = variables("SLURM_", "JOB_ID=1 PROCID=0 LOCALID=0 NODEID=0 NTASKS=8 JOB_NUM_NODES=2 "
                  "GTIDS=0 TASKS_PER_NODE=4(x2)")
STALE = {"RANK": "7", "WORLD_SIZE": "8", "LOCAL_RANK": "3"}
EVERY: dict[str, dict[str, str]] = {
    "torchrun": TORCHRUN, "openmpi": OPENMPI, "mpich": MPICH, "intel-mpi": INTEL,
    "pals": {**PALS, **CRAY_PMI}, "mvapich": MVAPICH, "flux": FLUX, "jsrun": JSRUN, "slurm": SRUN,
    "submitit": SUBMITIT, "env": BY_HAND}
PLACES = {
    "torchrun": ("torchrun", 3, 4, 1, 2), "openmpi": ("openmpi", 1, 2, 0, 1),
    "mpich": ("mpich", 1, 4, 1, 2), "intel-mpi": ("intel-mpi", 1, 4, 1, 2),
    "pals": ("pals", 5, 7, 1, 4), "mvapich": ("mvapich", 5, 8, 1, 4),
    "flux": ("flux", 5, 8, 1, None), "jsrun": ("jsrun", 5, 8, 1, 4),
    "slurm": ("slurm", 5, 8, 1, 4), "submitit": ("submitit", 1, 2, 1, 2),
    "env": ("env", 3, 4, 1, 2), "single": ("single", 0, 1, 0, 1)}
SINGLE = PLACES["single"]
LAUNCHER = {name: next(one for one in LAUNCHERS if one.name == name and one.is_present(environ))
            for name, environ in EVERY.items()}

AGENT = "/opt/bin/python -u /opt/bin/torchrun --nproc-per-node 2 train.py"
HYDRA_PROXY = "/opt/mpich/bin/hydra_pmi_proxy --control-port h1:45027 --rmk user --launcher ssh"
INTEL_PROXY = "/opt/intel/bin/hydra_pmi_proxy --usize -1 --auto-cleanup 1 --abort-signal 9"
PRTED = "/opt/openmpi/bin/prted --prtemca ess env"
STEPD, BATCH_STEPD, SHELL = "slurmstepd: [44.0]", "slurmstepd: [44.batch]", "/bin/bash"


def place(environ: Environ, ancestors: Sequence[str] = (), launcher: str | None = None
          ) -> tuple[Any, ...]:
    found = detect(environ, ancestors=ancestors, launcher=launcher)
    return (found.launcher, found.rank, found.world_size, found.local_rank, found.local_world_size)


def without(environ: Environ, *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


# Recorded from real launchers, or written after the manual pages


@pytest.mark.parametrize("file", FILES)
def test_recorded_processes_get_their_ranks(file: str) -> None:
    for process in json.loads((RECORDINGS / file).read_text())["processes"]:
        fields = ("launcher", "rank", "world_size", "local_rank", "local_world_size")
        expected = tuple(process["expect"][name] for name in fields)
        for ancestors in ([], process.get("parents", [])):
            found = place(process["environ"], ancestors)
            assert found == expected, (process["hostname"], process.get("role"), ancestors)


@pytest.mark.parametrize("case", WRITTEN, ids=lambda case: case["name"])
def test_written_processes_get_their_ranks(case: dict[str, Any], tmp_path: Path) -> None:
    environ = dict(case["env"])
    if "PBS_NODEFILE" in environ:
        environ["PBS_NODEFILE"] = str(tmp_path / "nodes")
        (tmp_path / "nodes").write_text("".join(f"{line}\n" for line in case["nodefile"]))
    found, expected = detect(environ), case["expected"]
    numbers = {"rank": found.rank, "world": found.world_size, "local": found.local_rank}
    assert numbers == {name: expected[name] for name in numbers}
    assert found.notes or "warning" not in case.get("want", "")


# Nesting: the nearest parent process that is a launcher's decides


class Nested(NamedTuple):
    environ: Environ
    ancestors: Sequence[str]
    launcher: str


PYTHON_AGENT = "python3.11 -m torch.distributed.run x.py"
ACCELERATE = "/opt/bin/python /opt/bin/accelerate launch train.py"
NESTED = {
    "torchrun under Open MPI": Nested({**OPENMPI, **TORCHRUN}, [AGENT, PRTED], "torchrun"),
    "torchrun under Hydra": Nested({**MPICH, **TORCHRUN}, [PYTHON_AGENT, HYDRA_PROXY], "torchrun"),
    "torchrun with options of python under srun": Nested(
        {**SRUN, **TORCHRUN}, ["python -W ignore -m torch.distributed.run x", STEPD], "torchrun"),
    "torch.distributed.launch under srun": Nested(
        {**SRUN, **TORCHRUN}, ["python -m torch.distributed.launch x.py", STEPD], "torchrun"),
    "accelerate under srun": Nested({**SRUN, **TORCHRUN}, [ACCELERATE, STEPD], "torchrun"),
    "accelerate in a batch job": Nested(
        {**BATCH, **TORCHRUN}, [ACCELERATE, SHELL, BATCH_STEPD], "torchrun"),
    "Open MPI in a torchrun worker": Nested(
        {**TORCHRUN, **OPENMPI}, ["/bin/sh x", PRTED, SHELL, AGENT], "openmpi"),
    "Hydra in a torchrun worker": Nested(
        {**TORCHRUN, **MPICH}, [HYDRA_PROXY, "mpiexec -n 2 x", AGENT], "mpich"),
    "Intel MPI in a torchrun worker": Nested(
        {**TORCHRUN, **INTEL}, [INTEL_PROXY, AGENT], "intel-mpi"),
    "srun in a torchrun worker": Nested({**TORCHRUN, **SRUN}, [STEPD], "slurm"),
    "Open MPI in a task of srun": Nested({**SRUN, **OPENMPI}, [PRTED, STEPD], "openmpi"),
    "srun in a rank of Open MPI": Nested({**SRUN, **OPENMPI}, [STEPD, PRTED], "slurm"),
    "Hydra in a rank of Open MPI": Nested({**OPENMPI, **MPICH}, [HYDRA_PROXY, PRTED], "mpich"),
    "Open MPI in a rank of Hydra": Nested({**OPENMPI, **MPICH}, [PRTED, HYDRA_PROXY], "openmpi"),
    "Flux in a task of srun": Nested({**SRUN, **FLUX}, ["flux-shell 123", STEPD], "flux"),
    "RANK by hand in a batch job": Nested({**BATCH, **BY_HAND}, [SHELL, BATCH_STEPD], "env"),
    "submitit in a task of srun": Nested(
        {**SRUN, **SUBMITIT}, ["python -u -m submitit.local._local x", STEPD], "submitit"),
    "torchrun in a task of submitit": Nested(
        {**SUBMITIT, **TORCHRUN}, [AGENT, "python -u -m submitit.local._local x"], "torchrun"),
    "srun of components": Nested(SRUN, ["slurmstepd: [44.0+1]"], "slurm"),
    "a script called mpirun": Nested(
        {**OPENMPI, **TORCHRUN}, ["python /x/mpirun_wrapper.py", AGENT], "torchrun"),
    "a batch job of a rank": Nested({**SRUN, **OPENMPI}, [SHELL, BATCH_STEPD], "single"),
    "a batch job of a worker": Nested({**BATCH, **TORCHRUN}, [SHELL, BATCH_STEPD], "single"),
    "a PBS job of a rank": Nested(
        {"PBS_JOBID": "12.head", **OPENMPI}, [SHELL, "-bash", "/opt/pbs/sbin/pbs_mom"], "single"),
    "a PBS job of a worker": Nested(
        {"PBS_JOBID": "12.head", **TORCHRUN}, [SHELL, "-bash", "/opt/pbs/sbin/pbs_mom"], "single"),
    **{f"torchrun and {name}, unknown parents": Nested({**EVERY[name], **TORCHRUN}, [], "torchrun")
       for name in EVERY},
}


@pytest.mark.parametrize("name", NESTED)
def test_the_innermost_launcher_decides(name: str) -> None:
    environ, ancestors, launcher = NESTED[name]
    assert place(environ, ancestors) == PLACES[launcher]


@pytest.mark.parametrize("agent", [
    "python my_elastic.py", "/opt/bin/python3.11 /opt/bin/tune run", "pypy3 x.py",
    "python -m accelerate.commands.launch", "python -mtorch.distributed.run train.py"])
@pytest.mark.parametrize("outer", [SRUN, MPICH, {
    **SRUN_RANK_0, "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_GTIDS": "0",
    "SLURM_STEP_TASKS_PER_NODE": "1"}])
def test_any_python_program_may_run_the_elastic_agent(agent: str, outer: Environ) -> None:
    assert place({**outer, **TORCHRUN}, [agent, STEPD, HYDRA_PROXY]) == PLACES["torchrun"]


@pytest.mark.parametrize(("environ", "parent", "expected"), [
    ({**TORCHRUN, **MPICH}, HYDRA_PROXY, ["of torchrun was ignored", "rank 1 of 4"]),
    ({**TORCHRUN, **MPICH}, AGENT, ["PMI_RANK=1 PMI_SIZE=4", "of mpich was ignored"]),
    ({**OPENMPI, **TORCHRUN}, AGENT, ["OMPI_COMM_WORLD_RANK=1", "rank 3 of 4"])])
def test_an_ignored_launcher_is_named_once(environ: Environ, parent: str,
                                           expected: list[str]) -> None:
    (note,) = detect(environ, ancestors=[parent]).notes
    assert all(part in note for part in expected)


def test_torchrun_is_a_parent_in_a_folder_with_a_space(tmp_path: Path) -> None:
    torchrun = tmp_path / "my env" / "torchrun"
    torchrun.parent.mkdir()
    torchrun.write_text("import subprocess, sys\n"
                        "print(subprocess.check_output([sys.executable, '-c', sys.argv[1]]))")
    code = "from utils.process import parent_command_lines; print(next(parent_command_lines()))"
    done = subprocess.run([sys.executable, str(torchrun), code], cwd=ROOT, timeout=60,
                          capture_output=True, text=True)
    assert "my env/torchrun" in done.stdout
    assert Torchrun().is_parent(done.stdout.removeprefix("b'"))


# Variables set by hand, empty, incomplete, contradictory


@pytest.mark.parametrize("name", [name for name in EVERY if name not in ("torchrun", "env")])
def test_a_stale_rank_is_ignored_with_a_note(name: str) -> None:
    environ = {**EVERY[name], **STALE}
    assert place(environ) == PLACES[name]
    (note,) = detect(environ).notes
    assert "RANK=7 WORLD_SIZE=8 LOCAL_RANK=3 was ignored" in note


@pytest.mark.parametrize("name", EVERY)
def test_empty_variables_count_as_unset(name: str) -> None:
    empty = {variable: " " for one in EVERY.values() for variable in one}
    assert place({**empty, **EVERY[name]}) == PLACES[name]
    assert place(empty) == SINGLE


def test_rank_and_world_size_are_enough() -> None:
    assert place({"RANK": "3", "WORLD_SIZE": "4"}) == ("env", 3, 4, None, None)


def errors() -> dict[str, tuple[Environ, str]]:
    """Environments by name, and the pattern of the error."""
    found: dict[str, tuple[Environ, str]] = {}
    for name, one in LAUNCHER.items():
        environ = EVERY[name]
        rank = f"{one.rank_variable}='?{environ[one.rank_variable]}"
        if one.world_size_variable and name != "slurm":
            size = one.world_size_variable
            found[f"{name} without a size"] = without(environ, size), f"{size} not set.*{rank}"
        if name not in ("slurm", "pals", "env"):
            found[f"{name} without a rank"] = (
                without(environ, one.rank_variable), f"{one.rank_variable} not set")
        changes = {"pals": "PMI_SIZE"}.get(name, one.world_size_variable)
        small = {**environ, changes: "1"} | ({"SLURM_NTASKS": "1"} if name == "slurm" else {})
        found[f"{name} with a rank beyond the size"] = (
            small, f"{name}: the rank is {environ[one.rank_variable]}; expected less than 1")
        if one.local_world_size_variable:
            found[f"{name} with a local rank beyond the size"] = (
                {**environ, one.local_rank_variable: "4"}, "local rank is 4; expected less than")
    return found | {
        "RANK alone": ({"RANK": "3"}, "WORLD_SIZE not set, but RANK='3'"),
        "PMI without a size": ({"PMI_RANK": "1"}, "PMI_SIZE not set.*PMI_RANK='1'"),
        "Intel MPI without a size": (without(INTEL, "PMI_SIZE"), "intel-mpi: PMI_SIZE not set"),
        "an empty size": ({**OPENMPI, "OMPI_COMM_WORLD_SIZE": ""}, "OMPI_COMM_WORLD_SIZE not set"),
        "srun without a size": (without(SRUN, "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"),
                                "SLURM_PROCID.*SLURM_STEP_NUM_TASKS or SLURM_NTASKS is missing"),
        "two sizes of srun": ({**SRUN, "SLURM_STEP_NUM_TASKS": "6"},
                              "SLURM_NTASKS=8 but SLURM_STEP_NUM_TASKS=6"),
        "SLURM_PROCID alone": ({"SLURM_PROCID": "5"}, "missing"),
        "a malformed list of tasks": (
            without({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4(xtwo)"}, "SLURM_GTIDS"),
            r"SLURM_STEP_TASKS_PER_NODE is '4\(xtwo\)'"),
        "PALS_APID and the local size": ({"PALS_APID": "x", "PALS_LOCAL_SIZE": "4"},
                                         "PALS_APID=x is set, but PALS_RANKID is not"),
        "PALS without a node file": (PALS, "PALS_RANKID=5.*--env WORLD_SIZE="),
        "PALS with an unreadable node file": ({**PALS, "PBS_NODEFILE": "/nowhere/at/all"},
                                              "PALS_RANKID=5.*--env WORLD_SIZE="),
        "mpiexec -pmi-port": ({"PMI_ID": "0", "PMI_PORT": "h1:40123", "MPI_LOCALRANKID": "0"},
                              "PMI_PORT.*without -pmi-port"),
        **{f"{left} alone": ({left: "1"}, "not set, but") for left in (
            "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE",
            "JSM_NAMESPACE_LOCAL_RANK", "FLUX_JOB_SIZE")},
        "a torchrun without rank and size": (
            {"TORCHELASTIC_RUN_ID": "7", "LOCAL_WORLD_SIZE": "2"}, "RANK and WORLD_SIZE not set"),
        "a local size above the size": ({**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "3"},
                                        "local world size is 3; expected at most 2"),
        "a local size of 0": ({**BY_HAND, "LOCAL_WORLD_SIZE": "0"}, "local world size is 0"),
        "a local rank beyond the size": ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "4"},
                                         "local rank is 4"),
    }


ERRORS = errors()


@pytest.mark.parametrize("name", ERRORS)
def test_incomplete_or_contradictory_variables_are_an_error(name: str) -> None:
    environ, expected = ERRORS[name]
    with pytest.raises(LaunchError, match=expected):
        detect(environ)


@pytest.mark.parametrize("environ", [
    without(SRUN, "SLURM_PROCID"), {**SRUN_RANK_0, "SLURM_NTASKS": "16"},
    {**SRUN_RANK_0, "SLURM_GTIDS": "0"}])
def test_below_the_daemon_of_a_step_torn_variables_are_an_error(environ: Environ) -> None:
    with pytest.raises(LaunchError, match="slurm: "):
        detect(environ, ancestors=[STEPD])


@pytest.mark.parametrize("text", ["one", "-1", "1.5", "+1", "0x1", "1e3", "\u0663", "\u00b2", "1_0",
                                  "1 2", "nan", "9" * 30])
@pytest.mark.parametrize("name", EVERY)
def test_malformed_numbers_are_an_error(name: str, text: str) -> None:
    for variable in LAUNCHER[name].number_variables:
        with pytest.raises(LaunchError) as caught:
            detect({**EVERY[name], variable: text})
        assert variable in str(caught.value) and repr(text) in str(caught.value)


# One launcher after the other

NODE_FILE = {"PBS_NODEFILE": "NODE_FILE"}  # with the hosts a b c d
OTHER_STEP = {"SLURM_NTASKS": "13", "SLURM_STEP_NUM_TASKS": "13", "SLURM_LOCALID": "0",
              "SLURM_STEP_TASKS_PER_NODE": "2(x3),1,3(x2)", "SLURM_GTIDS": "9"}
ACCEPTED: dict[str, tuple[Environ, tuple[Any, ...]]] = {
    "hand-set variables that match": (
        {**OPENMPI, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, PLACES["openmpi"]),
    "white space around a number": ({**OPENMPI, "OMPI_COMM_WORLD_RANK": " 1\n"}, PLACES["openmpi"]),
    "jsrun with Open MPI's variables": (
        {**JSRUN, **{name.replace("JSM_NAMESPACE", "OMPI_COMM_WORLD"): value
                     for name, value in JSRUN.items()}}, PLACES["jsrun"]),
    "jsrun without a local size": (
        without(JSRUN, "JSM_NAMESPACE_LOCAL_SIZE"), ("jsrun", 5, 8, 1, None)),
    "MVAPICH2 with Hydra's variables": (
        {**MVAPICH, **MPICH, "PMI_RANK": "5", "PMI_SIZE": "8"}, PLACES["mvapich"]),
    "Flux with PMI": ({**FLUX, "PMI_RANK": "5", "PMI_SIZE": "8", "PMI_FD": "7"}, PLACES["flux"]),
    "Flux on one node": ({**FLUX, "FLUX_JOB_NNODES": "1"}, ("flux", 5, 8, 1, 8)),
    "Flux with one task per node": ({**FLUX, "FLUX_JOB_NNODES": "8", "FLUX_TASK_LOCAL_ID": "0"},
                                    ("flux", 5, 8, 0, 1)),
    "srun with PMI-2": ({**SRUN, "PMI_RANK": "5", "PMI_SIZE": "8", "PMI_FD": "7"}, PLACES["slurm"]),
    "srun of a Cray": ({**SRUN, **PALS, "PALS_APID": "1.0"}, PLACES["slurm"]),
    "a step smaller than the job": (
        {**SRUN, "SLURM_NTASKS": "6", "SLURM_STEP_NUM_TASKS": "6", "SLURM_GTIDS": "4,5",
         "SLURM_STEP_TASKS_PER_NODE": "4,2", "SLURM_TASKS_PER_NODE": "16(x8)"},
        ("slurm", 5, 6, 1, 2)),
    "the node with 1 task": ({**SRUN, **OTHER_STEP, "SLURM_NODEID": "3"}, ("slurm", 5, 13, 0, 1)),
    "a node with 3 tasks": ({**SRUN, **OTHER_STEP, "SLURM_NODEID": "5"}, ("slurm", 5, 13, 0, 3)),
    "100,000 tasks": (
        {**SRUN, **variables("SLURM_", "PROCID=99995 NTASKS=100000 STEP_NUM_TASKS=100000 LOCALID=5 "
                             "NODEID=9999 STEP_TASKS_PER_NODE=10(x10000)"),
         "SLURM_GTIDS": ",".join(map(str, range(99990, 100000)))}, ("slurm", 99995, 100000, 5, 10)),
    "PALS, and WORLD_SIZE from mpiexec --env": (
        {**PALS, **NODE_FILE, "WORLD_SIZE": "7"}, ("pals", 5, 7, 1, 4)),
    "PALS, and all variables from launch.py": (
        {**PALS, **NODE_FILE, "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1",
         "LOCAL_WORLD_SIZE": "4"}, ("pals", 5, 8, 1, 4)),
    "a Slurm job of one task": ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1"}, SINGLE),
    "a PBS job without a node file": ({"PBS_JOBID": "1", "PBS_NODEFILE": "/nowhere"}, SINGLE),
    "no variables": ({}, SINGLE),
}
_RUNS_ALONE = "holds 8.*runs alone, as rank 0 of 1"
INNER_STEP = {"SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}
NOTED: dict[str, tuple[Environ, tuple[Any, ...], str]] = {
    "PALS without PMI": ({**PALS, **NODE_FILE}, ("pals", 5, 16, 1, 4), "4 hosts of PBS_NODEFILE"),
    "PALS with another rank's PMI": (
        {**PALS, **NODE_FILE, "PMI_RANK": "0", "PMI_SIZE": "1"}, ("pals", 5, 16, 1, 4), "4 hosts"),
    "PALS with a stale RANK": (
        {**PALS, **NODE_FILE, "RANK": "5", "WORLD_SIZE": "8"}, ("pals", 5, 16, 1, 4), "4 hosts"),
    "WORLD_SIZE in a profile": ({"WORLD_SIZE": "4"}, SINGLE, "WORLD_SIZE=4 was ignored"),
    "sbatch": (BATCH, SINGLE, _RUNS_ALONE),
    "sbatch with a leaked RANK": ({**BATCH, "RANK": "7"}, SINGLE, _RUNS_ALONE),
    "salloc": (without(BATCH, "SLURM_PROCID", "SLURM_LOCALID", "SLURM_GTIDS"), SINGLE, _RUNS_ALONE),
    **{f"step {step:x} of {tasks}": (
        {**BATCH, "SLURM_STEP_ID": str(step), "SLURM_STEP_NUM_TASKS": tasks}, SINGLE, _RUNS_ALONE)
       for step, tasks in [(0xFFFFFFFA, "1"), (0xFFFFFFFA, "8"), (0xFFFFFFFB, "8"),
                           (0xFFFFFFFC, "8")]},
    "sbatch in a step of another size": (
        {**BATCH, **INNER_STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"},
        SINGLE, _RUNS_ALONE),
    "sbatch in a step of the same size": ({**BATCH, **INNER_STEP}, SINGLE, _RUNS_ALONE),
    "an LSF job": ({"LSB_JOBID": "1", "LSB_DJOB_NUMPROC": "8"}, SINGLE, _RUNS_ALONE),
    "qsub -I": ({"PBS_JOBID": "7.head", "PBS_ENVIRONMENT": "PBS_INTERACTIVE", **NODE_FILE}, SINGLE,
                "PBS job 7.head holds 4 slots"),
}


@pytest.fixture
def node_file(tmp_path: Path) -> str:
    (tmp_path / "nodes").write_text("a\nb\nc\nd\n")
    return str(tmp_path / "nodes")


def with_node_file(environ: Environ, path: str) -> dict[str, str]:
    return {name: path if value == "NODE_FILE" else value for name, value in environ.items()}


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted_without_a_note(name: str, node_file: str) -> None:
    environ, expected = ACCEPTED[name]
    environ = with_node_file(environ, node_file)
    assert place(environ) == expected and detect(environ).notes == ()


@pytest.mark.parametrize("name", NOTED)
def test_accepted_with_a_note(name: str, node_file: str) -> None:
    environ, expected, note = NOTED[name]
    environ = with_node_file(environ, node_file)
    assert place(environ) == expected
    assert re.search(note, detect(environ).notes[0])


@pytest.mark.parametrize("shell", [
    "-bash", "/bin/bash", "/usr/bin/zsh -i", "bash --init-file /x/shellIntegration.sh", "screen x",
    "bash --rcfile x -i", "bash -O checkwinsize", "tmux: server", "/usr/bin/node /x/server.js"])
def test_a_shell_of_srun_pty_is_one_process(shell: str) -> None:
    environ = {**SRUN_RANK_0, "SLURM_PTY_PORT": "4711"}
    assert place(environ, [shell, STEPD]) == SINGLE
    for script in ("bash -c 'python train.py'", "bash -lc x", "sh train.sh", "python train.py"):
        assert place(environ, [script, STEPD]) == ("slurm", 0, 8, 0, 4)


# Requested by name


@pytest.mark.parametrize("name", EVERY)
def test_a_requested_launcher_is_used(name: str) -> None:
    outer = {} if name in ("torchrun", "env") else TORCHRUN
    assert place({**OPENMPI, **EVERY[name], **outer}, [AGENT], launcher=name) == PLACES[name]
    assert place({**EVERY[name], **outer}, [AGENT], launcher="single") == SINGLE
    expected = f"launcher='{name}' was requested, but it has not set"
    with pytest.raises(LaunchError, match=expected):
        detect({}, launcher=name)


def test_an_unknown_launcher_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="launcher is 'horovod'; expected one of torchrun.*single"):
        detect({}, launcher="horovod")


# Detection is a pure function


@pytest.mark.parametrize("name", EVERY)
def test_detection_depends_on_the_mapping_alone(
        name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {**EVERY[name], **({} if name in ("torchrun", "env") else STALE)}
    for variable, value in {**OPENMPI, **TORCHRUN}.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(os, "getppid", lambda: pytest.fail("the parents were looked at"))
    found = detect(MappingProxyType(environ))
    assert found.launcher == name
    assert found == detect(environ) == detect(dict(reversed(environ.items())))


def test_placements_are_compared_and_changed_by_value() -> None:
    one = Placement("env", 1, 2, None, None)
    assert one == Placement("env", 1, 2, None, None) != one.replace(rank=0)
    assert one.replace(local_rank=1, local_world_size=2).on_one_host and not one.on_one_host
    assert repr(one).startswith("Placement(launcher='env', rank=1, world_size=2, local_rank=None")


VALUES = ["", " ", "0", "1", "2", "7", "8", "-1", "x", "\u0663", "1(x2)", "4(x2),1", "2(x", "0,1",
          ",", "1" * 40, str(0xFFFFFFFA), "4294967295", "[", "n[1-2]", "\0", "none"]
COMMANDS = [AGENT, HYDRA_PROXY, INTEL_PROXY, PRTED, STEPD, SHELL, "", "\0", BATCH_STEPD]


def mutated(chance: random.Random) -> dict[str, str]:
    """The variables of some launchers, of which some are missing and some have other values."""
    environ: dict[str, str] = {}
    for name in chance.sample(sorted(EVERY), chance.randint(1, 3)):
        environ.update(EVERY[name])
    environ.update(chance.choice([{}, {}, STALE, BATCH, {"PBS_JOBID": "1"}, {"LSB_JOBID": "1"}]))
    names = sorted(environ)
    for _ in range(chance.randint(0, 5)):
        variable = chance.choice(names)
        if chance.random() < 0.4:
            environ.pop(variable, None)
        else:
            environ[variable] = chance.choice(VALUES)
    return environ


@pytest.mark.parametrize("seed", range(5))
def test_any_environment_gives_a_consistent_placement_or_an_error(seed: int) -> None:
    chance, num_placed = random.Random(seed), 0
    for _ in range(2000):
        environ = mutated(chance)
        try:
            one = detect(environ, ancestors=chance.sample(COMMANDS, chance.randint(0, 4)))
        except LaunchError:
            continue
        num_placed += 1
        local_size = one.local_world_size or one.world_size
        assert 0 <= one.rank < one.world_size, environ
        assert 0 <= (one.local_rank or 0) < local_size <= one.world_size, environ
    assert num_placed > 500


# python -m utils.launchers


def explain(environ: Environ, *arguments: str) -> subprocess.CompletedProcess[str]:
    base = {"PATH": os.environ.get("PATH", ""), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "utils.launchers", *arguments]
    return subprocess.run(command, env={**base, **environ}, cwd=ROOT, capture_output=True,
                          text=True, timeout=60)


def test_the_explanation_names_what_decided_and_what_was_ignored() -> None:
    done = explain({**OPENMPI, **STALE})
    assert done.returncode == 0, done.stderr
    rows = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    assert [row[0] for row in rows] == ["launcher", "rank", "world_size", "local_rank",
                                        "local_world_size", "decided", "ignored", "note"]
    assert rows[0][1].startswith("openmpi: its variables are set")
    assert [row[1] for row in rows[1:5]] == ["1", "2", "0", "1"]
    assert "OMPI_COMM_WORLD_RANK=1" in rows[5][1]
    assert "RANK=7" in rows[6][1] and "RANK=7" in rows[7][1]


@pytest.mark.parametrize(("environ", "arguments", "expected"), [
    ({"RANK": "3"}, [], "the rank is unknown: env: WORLD_SIZE not set"),
    (OPENMPI, ["horovod"], "launcher is 'horovod'; expected one of")])
def test_the_explanation_reports_errors(environ: Environ, arguments: list[str],
                                        expected: str) -> None:
    done = explain(environ, *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert expected in done.stderr and "Traceback" not in done.stderr


def test_the_explanation_takes_a_launcher() -> None:
    assert explain(OPENMPI, "single").stdout.startswith("launcher          single")


def test_launchers_need_no_torch() -> None:
    code = "import sys, utils.launchers; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0
