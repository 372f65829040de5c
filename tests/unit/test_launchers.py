"""Which launcher started this process, and as which rank: recorded and written environments."""
from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.unit.programs import ROOT
from utils.launchers import LAUNCHERS, LaunchError, Placement, detect

RECORDINGS = ROOT / "tests" / "recordings"
FOLDERS = ("mpi", "pbs", "slurm", "slurm-25.11", "slurm-26.05")
FILES = sorted(f"{folder}/{path.name}" for folder in FOLDERS for path in (RECORDINGS / folder).glob("*.json"))
WRITTEN = {case["name"]: case for case in json.loads((RECORDINGS / "written-cases.json").read_text())}
# The variables of each launcher alone
EVERY = {one.name: WRITTEN[one.name]["env"] for one in LAUNCHERS if one.name != "single"}
TORCHRUN, OPENMPI, SRUN = EVERY["torchrun"], EVERY["openmpi"], EVERY["slurm"]
SLURM = next(one for one in LAUNCHERS if one.name == "slurm")
SRUN_RANK_0 = SRUN | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_GTIDS": "0,1,2,3"}
STALE = {"RANK": "7", "WORLD_SIZE": "8", "LOCAL_RANK": "3"}
SINGLE = Placement("single", 0, 1, 0, 1)

AGENT = "/opt/bin/python -u /opt/bin/torchrun --nproc-per-node 2 train.py"
STEPD = "slurmstepd: [44.0]"
Environ = Mapping[str, str]


def place(environ: Environ, ancestors: Sequence[str] = (), launcher: str | None = None) -> Placement:
    return detect(environ, ancestors=ancestors, launcher=launcher).replace(notes=())


def expected_place(case: dict[str, Any]) -> Placement:
    fields = ("launcher", "rank", "world_size", "local_rank", "local_world_size")
    return Placement(*(case["expect"][name] for name in fields))


@pytest.mark.parametrize("file", FILES)
def test_recorded_processes_get_their_ranks_and_tasks_of_srun_the_host_of_rank_0(file: str) -> None:
    for process in json.loads((RECORDINGS / file).read_text())["processes"]:
        for ancestors in ([], process.get("parents", [])):
            assert place(process["environ"], ancestors) == expected_place(process), (process["hostname"], ancestors)
        if process["expect"]["launcher"] == "slurm":
            hosts, _ = SLURM.candidate_hosts(process["environ"])
            assert process["expect"]["rank0_host"] in hosts, process["hostname"]


@pytest.mark.parametrize("name", WRITTEN)
def test_written_processes_get_their_ranks(
        name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = WRITTEN[name]
    environ, ancestors = case["env"], case.get("parents", [])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nodes").write_text("".join(f"{line}\n" for line in case.get("nodefile", [])))
    if "error" in case["expect"]:
        with pytest.raises(LaunchError, match=case["expect"]["error"]):
            detect(environ, ancestors=ancestors)
        return

    assert place(environ, ancestors) == expected_place(case)
    notes = detect(environ, ancestors=ancestors).notes
    patterns = case["expect"].get("notes", [])
    assert len(notes) == len(patterns) and all(map(re.search, patterns, notes)), notes


@pytest.mark.parametrize("shell", [
    "-bash", "/usr/bin/zsh -i", "bash --init-file /x/shellIntegration.sh", "tmux: server",
    "/usr/bin/node /x/server.js"])
def test_a_shell_of_srun_pty_is_one_process(shell: str) -> None:
    environ = {**SRUN_RANK_0, "SLURM_PTY_PORT": "4711"}
    assert place(environ, [shell, STEPD]) == SINGLE
    for script in ("bash -c 'python train.py'", "bash -lc x", "sh train.sh", "python train.py"):
        assert place(environ, [script, STEPD]) == Placement("slurm", 0, 8, 0, 4)


@pytest.mark.parametrize("name", EVERY)
def test_each_launcher_among_other_variables(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environ, expected = EVERY[name], expected_place(WRITTEN[name])
    by_hand = name in ("torchrun", "env")
    empty = {variable: " " for one in EVERY.values() for variable in one}
    assert place({**empty, **environ}) == expected and place(empty) == SINGLE
    assert place({**environ, **TORCHRUN}) == expected_place(WRITTEN["torchrun"])  # the parents are unknown

    found = detect({**environ, **({} if by_hand else STALE)})
    assert found.replace(notes=()) == expected
    assert by_hand or "RANK=7 WORLD_SIZE=8 LOCAL_RANK=3 was ignored" in found.notes[0]

    outer = {**OPENMPI, **environ, **({} if by_hand else TORCHRUN)}
    assert place(outer, [AGENT], launcher=name) == expected
    assert place(outer, [AGENT], launcher="single") == SINGLE
    with pytest.raises(LaunchError, match=f"launcher='{name}' was requested, but it has not set"):
        detect({}, launcher=name)

    for variable, value in {**OPENMPI, **TORCHRUN}.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(os, "getppid", lambda: pytest.fail("the parents were looked at"))
    assert detect(environ) == detect(dict(reversed(environ.items()))) == expected


@pytest.mark.parametrize("name", EVERY)
def test_numbers_that_are_missing_malformed_or_too_large(name: str) -> None:
    environ = EVERY[name]
    one = next(one for one in LAUNCHERS if one.name == name and one.is_present(environ))
    wrong = [({variable: text}, f"{re.escape(variable)} is {re.escape(repr(text))}") for text in (
        "one", "-1", "1.5", "+1", "0x1", "1e3", "\u0663", "\u00b2", "1_0", "1 2", "nan", "9" * 30)
        for variable in one.number_variables]
    if name not in ("pals", "slurm"):
        rank, size = one.rank_variable, one.world_size_variable
        wrong += [({size: ""}, f"{size} not set.*{rank}='{environ[rank]}"),
                  ({size: "1"}, f"{name}: the rank is {environ[rank]}; expected less than 1")]
        wrong += [({rank: ""}, f"{rank} not set")] if name != "env" else []
    if one.local_world_size_variable:
        wrong += [({one.local_rank_variable: "4"}, "local rank is 4; expected less than")]

    for changes, expected in wrong:
        with pytest.raises(LaunchError, match=expected):
            detect({**environ, **changes})


@pytest.mark.parametrize("outer", ["openmpi", "slurm"])
def test_torchrun_of_its_own_in_each_task_is_an_error(outer: str) -> None:
    parent = {"openmpi": "prted --debug", "slurm": STEPD}[outer]
    one = {**EVERY[outer], **TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
           "GROUP_WORLD_SIZE": "1"}
    tasks = {"openmpi": 2, "slurm": 8}[outer]
    with pytest.raises(LaunchError, match=f"{outer} has started {tasks} tasks.* by one agent.*--nnodes={tasks}"):
        detect(one, ancestors=[AGENT, "/bin/sh run.sh", parent])
    for healthy, ancestors in (
            ({**one, "GROUP_WORLD_SIZE": str(tasks)}, [AGENT, parent]),
            ({**one, "DDPKIT_INDEPENDENT": "1"}, [AGENT, parent]),
            (one, [AGENT, "/bin/bash job.sh", "slurmstepd: [44.batch]"]), (one, [AGENT, "tmux"])):
        assert place(healthy, ancestors) == Placement("torchrun", 0, 1, 0, 1)


def explain(environ: Environ, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "utils.launchers", *arguments]
    return subprocess.run(command, env={"PATH": os.environ["PATH"], **environ}, cwd=ROOT,
                          capture_output=True, text=True, timeout=60)


def test_the_explanation_names_what_decided_what_was_ignored_and_errors() -> None:
    done = explain({**OPENMPI, **STALE})
    rows = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    expected = [("launcher", "openmpi: its variables are set"), ("rank", "1"), ("world_size", "2"), ("local_rank", "0"),
                ("local_world_size", "1"), ("decided", "OMPI_COMM_WORLD_RANK=1"), ("ignored", "RANK=7"),
                ("note", "RANK=7")]
    for (name, text), (expected_name, part) in zip(rows, expected, strict=True):
        assert name == expected_name and part in text, done
    assert explain(OPENMPI, "single").stdout.startswith("launcher          single")
    found = json.loads(explain(OPENMPI, "--json").stdout)
    assert (found["launcher"], found["rank"], found["world_size"]) == ("openmpi", 1, 2) and found["reason"]
    for done, expected in ((explain({"RANK": "3"}), "the rank is unknown: env: WORLD_SIZE not set"),
                           (explain(OPENMPI, "horovod"), "launcher is 'horovod'; expected one of torchrun")):
        assert (done.returncode, done.stdout) == (1, "")
        assert expected in done.stderr and "Traceback" not in done.stderr
