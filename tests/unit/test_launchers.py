"""Which launcher started this process, and as which rank: recorded, written and mutated environments."""
from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from utils.launchers import LAUNCHERS, LaunchError, Placement, detect

ROOT = Path(__file__).resolve().parents[2]
RECORDINGS = ROOT / "tests" / "recordings"
FILES = sorted(str(path.relative_to(RECORDINGS)) for path in RECORDINGS.glob("*/*.json"))
WRITTEN = json.loads((RECORDINGS / "written-cases.json").read_text())

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none",
            "MASTER_ADDR": "h1", "MASTER_PORT": "29500"}
OPENMPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
           "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "PMIX_NAMESPACE": "prterun-h1-7@1"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_FD": "9"}
INTEL = {**MPICH, "I_MPI_HYDRA_UUID": "a3", "HYDRA_BSTRAP_LOCALHOST": "h1"}
PALS = {"PALS_RANKID": "5", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "4", "PALS_APID": "x"}
CRAY_PMI = {"PMI_RANK": "5", "PMI_SIZE": "7", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "4"}
MVAPICH = {"MV2_COMM_WORLD_RANK": "5", "MV2_COMM_WORLD_SIZE": "8", "MV2_COMM_WORLD_LOCAL_RANK": "1",
           "MV2_COMM_WORLD_LOCAL_SIZE": "4"}
FLUX = {"FLUX_TASK_RANK": "5", "FLUX_JOB_SIZE": "8", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_NNODES": "2",
        "FLUX_JOB_ID": "f2"}
JSRUN = {"JSM_NAMESPACE_RANK": "5", "JSM_NAMESPACE_SIZE": "8", "JSM_NAMESPACE_LOCAL_RANK": "1",
         "JSM_NAMESPACE_LOCAL_SIZE": "4"}
SRUN = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
        "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
        "SLURM_GTIDS": "4,5,6,7", "SLURM_STEP_NODELIST": "n[1-2]"}
BATCH = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "8",
         "SLURM_JOB_NUM_NODES": "2", "SLURM_GTIDS": "0", "SLURM_TASKS_PER_NODE": "4(x2)"}
BY_HAND = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
EVERY = {"torchrun": TORCHRUN, "openmpi": OPENMPI, "mpich": MPICH, "intel-mpi": INTEL, "pals": {**PALS, **CRAY_PMI},
         "mvapich": MVAPICH, "flux": FLUX, "jsrun": JSRUN, "slurm": SRUN, "env": BY_HAND}

TORCHRUN_AGENT = "/opt/bin/python -u /opt/bin/torchrun --nproc-per-node 2 train.py"
HYDRA_PROXY = "/opt/mpich/bin/hydra_pmi_proxy --control-port h1:45027 --rmk user --launcher ssh"
INTEL_PROXY = "/opt/intel/bin/hydra_pmi_proxy --usize -1 --auto-cleanup 1 --abort-signal 9"
PRTED = "/opt/openmpi/bin/prted --prtemca ess env"
STEPD = "slurmstepd: [44.0]"
BATCH_STEPD = "slurmstepd: [44.batch]"
SHELL = "/bin/bash"
STALE = {"RANK": "7", "WORLD_SIZE": "8", "LOCAL_RANK": "3"}


def numbers(placement: Placement) -> tuple[Any, ...]:
    return (placement.launcher, placement.rank, placement.world_size, placement.local_rank,
            placement.local_world_size)


def without(environ: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


# Recorded from real launchers ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("file", FILES)
def test_every_process_of_a_recorded_launch_gets_its_rank_with_and_without_its_parents(file: str) -> None:
    for process in json.loads((RECORDINGS / file).read_text())["processes"]:
        expect = process["expect"]
        expected = tuple(expect[name] for name in ("launcher", "rank", "world_size", "local_rank", "local_world_size"))
        for ancestors in ([], process.get("parents", [])):
            found = detect(process["environ"], ancestors=ancestors)
            assert numbers(found) == expected, (process["hostname"], process.get("role"), ancestors)


@pytest.mark.parametrize("case", WRITTEN, ids=lambda case: case["name"])
def test_every_written_case_gets_the_rank_that_the_manual_pages_tell(case: dict[str, Any], tmp_path: Path) -> None:
    environ = dict(case["env"])
    if "PBS_NODEFILE" in environ:
        environ["PBS_NODEFILE"] = str(tmp_path / "nodes")
        (tmp_path / "nodes").write_text("".join(f"{line}\n" for line in case["nodefile"]))
    placement, expected = detect(environ), case["expected"]
    found = {"rank": placement.rank, "world": placement.world_size, "local": placement.local_rank}
    assert found == {name: expected[name] for name in found}
    if "warning" in case.get("want", ""):
        assert placement.notes


# Nesting -------------------------------------------------------------------------------------------------------------

NESTED = {
    "torchrun under Open MPI": ({**OPENMPI, **TORCHRUN}, [TORCHRUN_AGENT, PRTED], "torchrun"),
    "torchrun -m under Hydra": ({**MPICH, **TORCHRUN}, ["python3.11 -m torch.distributed.run x.py", HYDRA_PROXY],
                                "torchrun"),
    "torch.distributed.launch under srun": ({**SRUN, **TORCHRUN}, ["python -m torch.distributed.launch x.py", STEPD],
                                            "torchrun"),
    "Open MPI in a torchrun worker": ({**TORCHRUN, **OPENMPI}, ["/bin/sh x", PRTED, SHELL, TORCHRUN_AGENT], "openmpi"),
    "Hydra in a torchrun worker": ({**TORCHRUN, **MPICH}, [HYDRA_PROXY, "mpiexec -n 2 x", TORCHRUN_AGENT], "mpich"),
    "Intel MPI in a torchrun worker": ({**TORCHRUN, **INTEL}, [INTEL_PROXY, TORCHRUN_AGENT], "intel-mpi"),
    "srun in a torchrun worker": ({**TORCHRUN, **SRUN}, [STEPD], "slurm"),
    "Open MPI in a task of srun": ({**SRUN, **OPENMPI}, [PRTED, STEPD], "openmpi"),
    "srun in a rank of Open MPI": ({**SRUN, **OPENMPI}, [STEPD, PRTED], "slurm"),
    "Hydra in a rank of Open MPI": ({**OPENMPI, **MPICH}, [HYDRA_PROXY, PRTED], "mpich"),
    "Open MPI in a rank of Hydra": ({**OPENMPI, **MPICH}, [PRTED, HYDRA_PROXY], "openmpi"),
    "Flux in a task of srun": ({**SRUN, **FLUX}, ["flux-shell 123", "flux-broker", STEPD], "flux"),
    "torchrun with options of python": ({**SRUN, **TORCHRUN}, ["python -W ignore -m torch.distributed.run x", STEPD],
                                        "torchrun"),
    "accelerate launch in a task of srun": ({**SRUN, **TORCHRUN},
                                            ["/opt/bin/python /opt/bin/accelerate launch train.py", STEPD], "torchrun"),
    "accelerate launch in a batch job": ({**BATCH, **TORCHRUN},
                                         ["/opt/bin/python /opt/bin/accelerate launch train.py", SHELL, BATCH_STEPD],
                                         "torchrun"),
    "RANK set by hand in a batch script": ({**BATCH, **BY_HAND}, [SHELL, BATCH_STEPD], "env"),
    "srun of MPMD components": (SRUN, ["slurmstepd: [44.0+1]"], "slurm"),
}


@pytest.mark.parametrize("name", NESTED)
def test_of_nested_launchers_the_nearest_parent_is_the_one_that_counts(name: str) -> None:
    environ, ancestors, launcher = NESTED[name]
    placement = detect(environ, ancestors=ancestors)
    assert numbers(placement) == numbers(detect(EVERY[launcher]))


@pytest.mark.parametrize("outer", ["openmpi", "mpich", "intel-mpi", "slurm", "pals", "flux", "jsrun", "mvapich"])
def test_without_parents_to_look_at_torchrun_is_the_inner_launcher(outer: str) -> None:
    assert numbers(detect({**EVERY[outer], **TORCHRUN})) == ("torchrun", 3, 4, 1, 2)


@pytest.mark.parametrize("agent", ["python my_elastic.py", "/opt/bin/python3.11 /opt/bin/tune run",
                                   "python -m accelerate.commands.launch", "python -mtorch.distributed.run train.py"])
@pytest.mark.parametrize("outer", [{**SRUN, "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1",
                                    "SLURM_LOCALID": "0", "SLURM_GTIDS": "0", "SLURM_STEP_TASKS_PER_NODE": "1",
                                    "SLURM_NODEID": "0"}, SRUN, MPICH])
def test_a_program_of_any_name_may_run_the_elastic_agent(agent: str, outer: dict[str, str]) -> None:
    placement = detect({**outer, **TORCHRUN}, ancestors=[agent, STEPD, HYDRA_PROXY])
    assert numbers(placement) == ("torchrun", 3, 4, 1, 2)


def test_what_one_launch_left_behind_is_named_once() -> None:
    notes = detect({**TORCHRUN, **MPICH}, ancestors=[HYDRA_PROXY]).notes
    assert len(notes) == 1 and "of torchrun was ignored" in notes[0]
    notes = detect({**TORCHRUN, **MPICH}, ancestors=[TORCHRUN_AGENT]).notes
    assert len(notes) == 1 and "of mpich was ignored" in notes[0]


def test_the_launcher_that_lost_is_named_with_its_variables() -> None:
    (note,) = detect({**OPENMPI, **TORCHRUN}, ancestors=[TORCHRUN_AGENT, PRTED]).notes
    assert "OMPI_COMM_WORLD_RANK=1" in note and "rank 3 of 4" in note


def test_a_script_that_has_mpirun_in_its_own_name_is_no_launcher() -> None:
    environ = {**OPENMPI, **TORCHRUN}
    assert detect(environ, ancestors=["python /x/mpirun_wrapper.py", TORCHRUN_AGENT]).launcher == "torchrun"


def test_a_batch_shell_below_which_nothing_started_ranks_is_one_process_whatever_was_inherited() -> None:
    environ = {**SRUN, **OPENMPI}
    assert numbers(detect(environ, ancestors=[SHELL, BATCH_STEPD])) == ("single", 0, 1, 0, 1)


# Stale and hand-set variables ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", [name for name in EVERY if name not in ("torchrun", "env")])
def test_a_stale_rank_is_ignored_and_the_note_names_every_stale_variable(name: str) -> None:
    clean, placement = detect(EVERY[name]), detect({**EVERY[name], **STALE})
    assert numbers(placement) == numbers(clean)
    assert any("RANK=7 WORLD_SIZE=8 LOCAL_RANK=3" in note and "ignored" in note for note in placement.notes)


def test_hand_set_variables_that_agree_with_the_launcher_get_no_note() -> None:
    assert detect({**OPENMPI, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}).notes == ()


def test_rank_and_world_size_set_by_hand_are_believed_where_there_is_no_launcher() -> None:
    assert numbers(detect({"RANK": "3", "WORLD_SIZE": "4"})) == ("env", 3, 4, None, None)
    assert numbers(detect(BY_HAND)) == ("env", 3, 4, 1, 2)


def test_world_size_alone_in_a_profile_is_one_process_with_a_note() -> None:
    placement = detect({"WORLD_SIZE": "4"})
    assert numbers(placement) == ("single", 0, 1, 0, 1)
    assert "WORLD_SIZE=4" in placement.notes[0]


def test_rank_alone_is_an_error_that_names_what_is_missing() -> None:
    with pytest.raises(LaunchError, match=r"WORLD_SIZE not set.*RANK='3'"):
        detect({"RANK": "3"})


# Empty, half-set, contradictory --------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", EVERY)
def test_empty_strings_are_as_good_as_unset(name: str) -> None:
    empty = {variable: " " for one in EVERY.values() for variable in one}
    assert numbers(detect({**empty, **EVERY[name]})) == numbers(detect(EVERY[name]))
    assert numbers(detect(empty)) == ("single", 0, 1, 0, 1)


HALF = {
    "torchrun without a size": (without(TORCHRUN, "WORLD_SIZE"), "WORLD_SIZE", "RANK='3'"),
    "torchrun without a rank": (without(TORCHRUN, "RANK"), "RANK", "WORLD_SIZE='4'"),
    "openmpi without a size": (without(OPENMPI, "OMPI_COMM_WORLD_SIZE"), "OMPI_COMM_WORLD_SIZE",
                               "OMPI_COMM_WORLD_RANK='1'"),
    "openmpi without a rank": (without(OPENMPI, "OMPI_COMM_WORLD_RANK"), "OMPI_COMM_WORLD_RANK",
                               "OMPI_COMM_WORLD_SIZE='2'"),
    "mpich without a size": (without(MPICH, "PMI_SIZE"), "PMI_SIZE", "PMI_RANK='1'"),
    "mpich without a rank": (without(MPICH, "PMI_RANK"), "PMI_RANK", "PMI_SIZE='4'"),
    "intel-mpi without a size": (without(INTEL, "PMI_SIZE"), "PMI_SIZE", "PMI_RANK='1'"),
    "PMI without a size": ({"PMI_RANK": "1"}, "PMI_SIZE", "PMI_RANK='1'"),
    "mvapich without a size": (without(MVAPICH, "MV2_COMM_WORLD_SIZE"), "MV2_COMM_WORLD_SIZE",
                               "MV2_COMM_WORLD_RANK='5'"),
    "flux without a size": (without(FLUX, "FLUX_JOB_SIZE"), "FLUX_JOB_SIZE", "FLUX_TASK_RANK='5'"),
    "jsrun without a size": (without(JSRUN, "JSM_NAMESPACE_SIZE"), "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK='5'"),
    "srun without a size": (without(SRUN, "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"), "SLURM_STEP_NUM_TASKS",
                            "SLURM_PROCID"),
    "an empty size": ({**OPENMPI, "OMPI_COMM_WORLD_SIZE": ""}, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK='1'"),
}


@pytest.mark.parametrize("name", HALF)
def test_half_a_set_is_an_error_that_names_what_is_missing_and_what_was_found(name: str) -> None:
    environ, missing, found = HALF[name]
    with pytest.raises(LaunchError) as caught:
        detect(environ)
    assert missing in str(caught.value) and found in str(caught.value)


CHOSEN = {name: next(one for one in LAUNCHERS if one.name == name and one.present(EVERY[name])) for name in EVERY}
RANK_AND_SIZE = {name: (one.rank, one.world_size, one.local_rank, one.local_world_size) for name, one in CHOSEN.items()}


@pytest.mark.parametrize("left", [{"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, {"MPI_LOCALNRANKS": "2"},
                                  {"PALS_APID": "x", "PALS_LOCAL_SIZE": "4"}, {"MV2_COMM_WORLD_LOCAL_SIZE": "4"},
                                  {"JSM_NAMESPACE_LOCAL_RANK": "0"}, {"FLUX_JOB_SIZE": "8"}, {"SLURM_PROCID": "5"},
                                  {"TORCHELASTIC_RUN_ID": "7", "LOCAL_WORLD_SIZE": "2"}])
def test_a_set_without_rank_and_size_is_an_error_and_no_single_run(left: dict[str, str]) -> None:
    with pytest.raises(LaunchError, match="not set|missing|is not"):
        detect(left)


@pytest.mark.parametrize("torn", [without(SRUN, "SLURM_PROCID"), {**SRUN, "SLURM_PROCID": "0", "SLURM_NTASKS": "16"},
                                  {**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_GTIDS": "0"}])
def test_below_the_daemon_of_a_step_a_torn_set_of_srun_is_an_error_also_on_rank_0(torn: dict[str, str]) -> None:
    with pytest.raises(LaunchError, match="slurm: "):
        detect(torn, ancestors=[STEPD])


@pytest.mark.parametrize("name", EVERY)
def test_a_rank_beyond_the_world_size_is_an_error_that_names_launcher_rank_and_limit(name: str) -> None:
    size = "PMI_SIZE" if name == "pals" else RANK_AND_SIZE[name][1]
    environ = {**EVERY[name], size: "1"}
    if name == "slurm":
        environ["SLURM_NTASKS"] = "1"
    with pytest.raises(LaunchError) as caught:
        detect(environ)
    rank = EVERY[name][RANK_AND_SIZE[name][0]]
    assert f"{name}: the rank is {rank}" in str(caught.value) and "less than 1" in str(caught.value)


@pytest.mark.parametrize("name", [one for one in EVERY if RANK_AND_SIZE[one][3]])
def test_a_local_rank_beyond_the_local_size_is_an_error_that_names_both(name: str) -> None:
    local_rank = RANK_AND_SIZE[name][2]
    with pytest.raises(LaunchError, match="local rank is 4; expected less than"):
        detect({**EVERY[name], local_rank: "4"})


def test_a_local_size_above_the_world_size_is_an_error() -> None:
    with pytest.raises(LaunchError, match="local world size is 3; expected at most 2"):
        detect({**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "3"})


def test_a_local_size_of_zero_is_an_error() -> None:
    with pytest.raises(LaunchError, match="local world size is 0"):
        detect({"RANK": "3", "WORLD_SIZE": "7", "LOCAL_WORLD_SIZE": "0"})


def test_a_local_rank_beyond_the_world_size_is_an_error_where_no_local_size_is_told() -> None:
    with pytest.raises(LaunchError, match="local rank is 4"):
        detect({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "4"})


def test_srun_whose_two_sizes_differ_on_a_rank_above_zero_is_an_error_that_names_both() -> None:
    with pytest.raises(LaunchError, match="SLURM_NTASKS=8 but SLURM_STEP_NUM_TASKS=6"):
        detect({**SRUN, "SLURM_STEP_NUM_TASKS": "6"})


NO_NUMBERS = ["one", "-1", "1.5", "+1", "0x1", "1e3", "\u0663", "\u00b2", "1_0", "1 2", "nan", "9" * 30]


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("text", NO_NUMBERS)
def test_what_is_no_whole_number_is_an_error_that_names_variable_and_value(name: str, text: str) -> None:
    for variable in RANK_AND_SIZE[name]:
        if variable:
            with pytest.raises(LaunchError) as caught:
                detect({**EVERY[name], variable: text})
            assert variable in str(caught.value) and repr(text) in str(caught.value)


def test_white_space_around_a_number_does_no_harm() -> None:
    assert detect({**OPENMPI, "OMPI_COMM_WORLD_RANK": " 1\n"}).rank == 1


# One launcher after the other ----------------------------------------------------------------------------------------

def test_mpiexec_with_pmi_port_is_an_error_that_tells_what_to_leave_out() -> None:
    environ = {"PMI_ID": "0", "PMI_PORT": "h1:40123", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
    with pytest.raises(LaunchError, match="PMI_PORT.*without -pmi-port"):
        detect(environ)


def test_jsrun_with_the_variables_of_open_mpi_is_jsrun_without_a_note() -> None:
    ompi = {name.replace("JSM_NAMESPACE", "OMPI_COMM_WORLD"): value for name, value in JSRUN.items()}
    placement = detect({**JSRUN, **ompi})
    assert numbers(placement) == ("jsrun", 5, 8, 1, 4) and placement.notes == ()


def test_jsrun_without_a_local_size_leaves_it_open() -> None:
    assert numbers(detect(without(JSRUN, "JSM_NAMESPACE_LOCAL_SIZE"))) == ("jsrun", 5, 8, 1, None)


def test_mvapich_with_the_variables_of_its_hydra_is_mvapich_without_a_note() -> None:
    hydra = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
    placement = detect({**MVAPICH, **hydra})
    assert numbers(placement) == ("mvapich", 5, 8, 1, 4) and placement.notes == ()


def test_pals_with_cray_pmi_takes_the_world_size_from_it_also_with_uneven_hosts() -> None:
    placement = detect({**PALS, **CRAY_PMI})
    assert numbers(placement) == ("pals", 5, 7, 1, 4) and placement.notes == ()


def test_pals_without_pmi_counts_the_hosts_of_the_node_file_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("n1\nn1\nn2\nn2\nn1\n")
    placement = detect({**PALS, "PBS_NODEFILE": str(tmp_path / "nodes")})
    assert numbers(placement) == ("pals", 5, 8, 1, 4)
    assert "2 hosts of PBS_NODEFILE" in placement.notes[0]


def test_pals_without_pmi_and_with_uneven_hosts_takes_the_world_size_that_was_passed(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("n1\nn2\n")
    environ = {**PALS, "PBS_NODEFILE": str(tmp_path / "nodes"), "WORLD_SIZE": "7"}
    assert numbers(detect(environ)) == ("pals", 5, 7, 1, 4)


@pytest.mark.parametrize("node_file", [{}, {"PBS_NODEFILE": ""}, {"PBS_NODEFILE": "/nowhere/at/all"}])
def test_pals_without_pmi_and_without_a_node_file_is_an_error_that_tells_what_to_pass(
        node_file: dict[str, str]) -> None:
    with pytest.raises(LaunchError, match="PALS_RANKID=5.*--env WORLD_SIZE="):
        detect({**PALS, **node_file})


def test_pals_does_not_take_the_world_size_of_another_ranks_stale_pmi(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("n1\nn2\n")
    stale = {"PMI_RANK": "0", "PMI_SIZE": "1", "PBS_NODEFILE": str(tmp_path / "nodes")}
    assert detect({**PALS, **stale}).world_size == 8


def test_srun_of_a_cray_that_sets_the_variables_of_pals_is_srun_without_a_note() -> None:
    placement = detect({**SRUN, "PALS_RANKID": "5", "PALS_LOCAL_RANKID": "1", "PALS_APID": "1.0"})
    assert numbers(placement) == ("slurm", 5, 8, 1, 4) and placement.notes == ()


def test_pals_without_pmi_does_not_take_the_world_size_beside_a_stale_rank(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes"
    nodes.write_text("a\nb\nc\nd\n")
    stale = {"RANK": "5", "WORLD_SIZE": "8", "PBS_NODEFILE": str(nodes)}
    assert detect({**PALS, **stale}).world_size == 16


def test_pals_without_pmi_takes_the_world_size_beside_the_rank_that_launch_py_has_set(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes"
    nodes.write_text("a\nb\nc\nd\n")  # of which launch.py --hosts 2 uses two
    ours = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "PBS_NODEFILE": str(nodes)}
    assert numbers(detect({**PALS, **ours})) == ("pals", 5, 8, 1, 4)


def test_flux_tells_the_local_size_only_where_it_follows() -> None:
    assert numbers(detect(FLUX)) == ("flux", 5, 8, 1, None)
    assert detect({**FLUX, "FLUX_JOB_NNODES": "1"}).local_world_size == 8
    assert detect({**FLUX, "FLUX_JOB_NNODES": "8", "FLUX_TASK_LOCAL_ID": "0"}).local_world_size == 1


def test_flux_with_its_pmi_is_flux_without_a_note() -> None:
    placement = detect({**FLUX, "PMI_RANK": "5", "PMI_SIZE": "8", "PMI_FD": "7"})
    assert placement.launcher == "flux" and placement.notes == ()


def test_srun_with_pmi2_is_srun_without_a_note() -> None:
    placement = detect({**SRUN, "PMI_RANK": "5", "PMI_SIZE": "8", "PMI_FD": "7"})
    assert numbers(placement) == ("slurm", 5, 8, 1, 4) and placement.notes == ()


def test_srun_of_a_step_smaller_than_the_job_counts_the_step() -> None:
    environ = {**SRUN, "SLURM_NTASKS": "6", "SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "4,2",
               "SLURM_GTIDS": "4,5", "SLURM_TASKS_PER_NODE": "16(x8)"}
    assert numbers(detect(environ)) == ("slurm", 5, 6, 1, 2)


def test_srun_reads_the_local_size_of_uneven_nodes() -> None:
    environ = without({**SRUN, "SLURM_NODEID": "3", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1,3(x2)",
                       "SLURM_NTASKS": "13", "SLURM_STEP_NUM_TASKS": "13", "SLURM_LOCALID": "0"}, "SLURM_GTIDS")
    assert detect(environ).local_world_size == 1
    assert detect({**environ, "SLURM_NODEID": "5"}).local_world_size == 3


def test_srun_with_a_broken_list_of_tasks_is_an_error_that_names_it() -> None:
    environ = without({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4(xtwo)"}, "SLURM_GTIDS")
    with pytest.raises(LaunchError, match=r"SLURM_STEP_TASKS_PER_NODE is '4\(xtwo\)'"):
        detect(environ)


# No launcher ---------------------------------------------------------------------------------------------------------

SHELLS = {
    "sbatch": BATCH,
    "sbatch with a leaked RANK": {**BATCH, "RANK": "7"},
    "salloc": {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_JOB_NUM_NODES": "2"},
    "srun --interactive": {**BATCH, "SLURM_STEP_ID": str(0xFFFFFFFA), "SLURM_STEP_NUM_TASKS": "1"},
    "srun --interactive with eight tasks": {**BATCH, "SLURM_STEP_ID": str(0xFFFFFFFA), "SLURM_STEP_NUM_TASKS": "8"},
    "a batch step": {**BATCH, "SLURM_STEP_ID": str(0xFFFFFFFB), "SLURM_STEP_NUM_TASKS": "8"},
    "an IDE on a node with an adopted shell": {**BATCH, "SLURM_STEP_ID": str(0xFFFFFFFC)},
    "sbatch inside an srun step of another size": {**BATCH, "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "2",
                                                   "SLURM_STEP_TASKS_PER_NODE": "1(x2)"},
    "sbatch inside an srun step of the same size": {**BATCH, "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "8",
                                                    "SLURM_STEP_TASKS_PER_NODE": "4(x2)"},
    "an LSF job": {"LSB_JOBID": "1", "LSB_DJOB_NUMPROC": "8"},
}


@pytest.mark.parametrize("name", SHELLS)
def test_a_shell_of_a_job_is_one_process_and_a_note_tells_what_the_job_holds(name: str) -> None:
    placement = detect(SHELLS[name])
    assert numbers(placement) == ("single", 0, 1, 0, 1)
    assert "holds 8" in placement.notes[0] and "runs alone, as rank 0 of 1" in placement.notes[0]


def test_qsub_interactive_is_one_process_and_a_note_counts_the_slots(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("n1\nn1\nn2\nn2\n")
    environ = {"PBS_JOBID": "7.head", "PBS_ENVIRONMENT": "PBS_INTERACTIVE", "PBS_NODENUM": "0", "PBS_TASKNUM": "1",
               "PBS_NODEFILE": str(tmp_path / "nodes")}
    placement = detect(environ)
    assert numbers(placement) == ("single", 0, 1, 0, 1)
    assert "PBS job 7.head holds 4 slots" in placement.notes[0]


@pytest.mark.parametrize("leaked", [TORCHRUN, OPENMPI, {**TORCHRUN, **OPENMPI}])
@pytest.mark.parametrize("parents", [[SHELL, BATCH_STEPD], [SHELL, "-bash", "/opt/pbs/sbin/pbs_mom"]])
def test_a_job_that_a_rank_submitted_is_one_process_in_its_shell(leaked: dict[str, str], parents: list[str]) -> None:
    job = BATCH if parents[-1] == BATCH_STEPD else {"PBS_JOBID": "12.head"}
    assert numbers(detect({**job, **leaked}, ancestors=parents)) == ("single", 0, 1, 0, 1)


@pytest.mark.parametrize("shell", ["-bash", "/bin/bash", "/usr/bin/zsh -i", "bash --init-file /x/shellIntegration.sh",
                                   "bash --rcfile x -i", "bash -O checkwinsize", "tmux: server"])
def test_a_shell_of_srun_with_a_terminal_is_one_process(shell: str) -> None:
    typed = {**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_GTIDS": "0,1,2,3",
             "SLURM_PTY_PORT": "4711"}
    assert numbers(detect(typed, ancestors=[shell, STEPD])) == ("single", 0, 1, 0, 1)
    assert numbers(detect(typed, ancestors=["bash -c 'python train.py'", STEPD])) == ("slurm", 0, 8, 0, 4)


def test_a_job_of_one_process_gets_no_note() -> None:
    assert detect({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1"}).notes == ()
    assert detect({"PBS_JOBID": "1", "PBS_NODEFILE": "/nowhere"}).notes == ()
    assert detect({}).notes == ()


# Asked for by name ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", EVERY)
def test_a_launcher_that_is_asked_for_is_taken_though_another_would_win(name: str) -> None:
    environ = {**OPENMPI, **(EVERY[name] if name != "env" else BY_HAND)}
    if name not in ("torchrun", "env"):
        environ.update(TORCHRUN)
    assert numbers(detect(environ, launcher=name, ancestors=[TORCHRUN_AGENT])) == numbers(detect(EVERY[name]))


def test_single_can_be_asked_for_under_any_launcher() -> None:
    assert numbers(detect({**SRUN, **TORCHRUN}, launcher="single")) == ("single", 0, 1, 0, 1)


@pytest.mark.parametrize("name", EVERY)
def test_a_launcher_that_did_not_start_the_process_is_an_error_when_asked_for(name: str) -> None:
    with pytest.raises(LaunchError, match=f"launcher='{name}' was asked for, but it did not start this process"):
        detect({}, launcher=name)


def test_an_unknown_launcher_is_a_value_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="launcher is 'horovod'; expected one of torchrun.*single") as caught:
        detect({}, launcher="horovod")
    assert not isinstance(caught.value, LaunchError)


# Purity --------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", EVERY)
def test_the_same_mapping_gives_the_same_answer_and_stays_as_it_is(name: str) -> None:
    environ = {**EVERY[name], **STALE} if name not in ("torchrun", "env") else dict(EVERY[name])
    before = dict(environ)
    assert detect(environ) == detect(environ) == detect(dict(reversed(environ.items())))
    assert environ == before


def test_the_process_environment_and_its_parents_are_not_read_when_a_mapping_is_given(
        monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in OPENMPI.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr("utils.launchers.parent_commands", lambda: pytest.fail("the parents were looked at"))
    assert detect({}).launcher == "single"
    assert detect(MPICH).launcher == "mpich"


def test_a_mapping_that_only_reads_is_enough() -> None:
    class ReadOnly(Mapping[str, str]):
        def __getitem__(self, name: str) -> str:
            return OPENMPI[name]

        def __iter__(self) -> Iterator[str]:
            return iter(OPENMPI)

        def __len__(self) -> int:
            return len(OPENMPI)

    assert detect(ReadOnly()).launcher == "openmpi"


# Anything at all -----------------------------------------------------------------------------------------------------

VALUES = ["", " ", "0", "1", "2", "7", "8", "-1", "x", "\u0663", "1(x2)", "4(x2),1", "2(x", "0,1", ",", "1" * 40,
          str(0xFFFFFFFA), "4294967295", "[", "n[1-2]", "\0", "none"]


def mutated(chance: random.Random) -> dict[str, str]:
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
def test_a_mutated_environment_gives_a_consistent_placement_or_a_launch_error(seed: int) -> None:
    chance = random.Random(seed)
    commands = [TORCHRUN_AGENT, HYDRA_PROXY, INTEL_PROXY, PRTED, STEPD, SHELL, "", "\0", BATCH_STEPD]
    placed = 0
    for _ in range(2000):
        environ = mutated(chance)
        ancestors = chance.sample(commands, chance.randint(0, 4))
        try:
            one = detect(environ, ancestors=ancestors)
        except LaunchError as error:
            assert str(error)
            continue
        placed += 1
        assert 0 <= one.rank < one.world_size, environ
        assert one.local_rank is None or 0 <= one.local_rank < (one.local_world_size or one.world_size), environ
        assert one.local_world_size is None or 1 <= one.local_world_size <= one.world_size, environ
        assert all(isinstance(note, str) and note for note in one.notes)
    assert placed > 500


# As a program --------------------------------------------------------------------------------------------------------

def explain(environ: Mapping[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    base = {"PATH": os.environ.get("PATH", ""), "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-m", "utils.launchers", *words], env={**base, **environ}, cwd=ROOT,
                          capture_output=True, text=True, timeout=60)


def test_the_program_prints_the_choice_what_decided_and_what_was_ignored() -> None:
    done = explain({**OPENMPI, **STALE})
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("launcher          openmpi: ")
    assert [line.split()[1] for line in lines[1:5]] == ["1", "2", "0", "1"]
    assert "OMPI_COMM_WORLD_RANK=1" in next(line for line in lines if line.startswith("decided by"))
    assert "RANK=7" in next(line for line in lines if line.startswith("ignored"))
    assert any(line.startswith("note") and "RANK=7" in line for line in lines)


def test_the_program_exits_1_with_the_error_on_standard_error() -> None:
    done = explain({"RANK": "3"})
    assert done.returncode == 1 and done.stdout == ""
    assert "WORLD_SIZE not set" in done.stderr and "Traceback" not in done.stderr


def test_the_program_takes_the_name_of_a_launcher() -> None:
    assert explain(OPENMPI, "single").stdout.startswith("launcher          single")
    assert explain(OPENMPI, "horovod").returncode == 1


def test_importing_the_launchers_imports_no_torch() -> None:
    code = "import sys, utils.launchers; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


def test_torchrun_is_recognised_as_parent_also_where_its_folder_has_a_space(tmp_path: Path) -> None:
    torchrun = tmp_path / "my env" / "torchrun"
    torchrun.parent.mkdir()
    torchrun.write_text("import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', sys.argv[1]]))")
    code = ("import sys; from utils.launchers import Torchrun; from utils.parents import parent_commands\n"
            "sys.exit(not Torchrun().started(next(parent_commands())))")
    assert subprocess.run([sys.executable, str(torchrun), code], cwd=ROOT, timeout=60).returncode == 0


def test_a_job_of_100_000_tasks_on_10_000_nodes_is_no_slower() -> None:
    environ = {**SRUN, "SLURM_PROCID": "99995", "SLURM_NTASKS": "100000", "SLURM_STEP_NUM_TASKS": "100000",
               "SLURM_NODEID": "9999", "SLURM_STEP_TASKS_PER_NODE": "10(x10000)", "SLURM_LOCALID": "5",
               "SLURM_GTIDS": ",".join(str(rank) for rank in range(99990, 100000)),
               "SLURM_STEP_NODELIST": "n[00001-10000]", "SLURM_JOB_NODELIST": "n[00001-10000]"}
    assert numbers(detect(environ)) == ("slurm", 99995, 100000, 5, 10)
    took = []
    for _ in range(20):
        start = time.perf_counter()
        detect(environ)
        took.append(time.perf_counter() - start)
    assert min(took) < 0.001
