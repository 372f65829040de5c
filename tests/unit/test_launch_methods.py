"""The command line and environment of each launch method: srun, mpiexecs, agents."""
from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.unit.launch_plans import (
    HET,
    INTEL,
    MPICH,
    OPENMPI4,
    OPENMPI5,
    PALS,
    PBS,
    PYTHON,
    SLURM,
    Programs,
    job,
    line,
    make,
)
from utils.launch import remote_shell
from utils.launch.methods.srun import Srun, srun_ports, step_of
from utils.launch.plan import Mpiexec, Plan, PlanError
from utils.launch.srun_errors import SrunErrors, TaskFailure
from utils.schedulers import current_allocation

RECORDINGS = Path(__file__).resolve().parents[1] / "recordings" / "slurm-25.11"
END = "/env/bin/python -u train.py --name 'a b'"

# srun


@pytest.mark.parametrize(("job_has", "environ", "options", "expected"), [
    # The job asked for these very tasks: they are left to Slurm.
    ({"ranks": (2, 1), "cores": (8, 4)}, {"SLURM_NTASKS": "3"}, {},
     "/bin/srun --kill-on-bad-exit=1 --cpus-per-task=4 " + END),
    ({"cores": (8, 8)}, {"SLURM_NTASKS": "4", "SLURM_CPUS_PER_TASK": "3"}, {}, "--cpus-per-task=3 "),
    ({}, {"SLURM_NTASKS": "4"}, {"nodes": 2}, "/bin/srun --kill-on-bad-exit=1 " + END),
    # One rank for each GPU, of which a step gets none by itself on nodes asked for whole.
    ({"ranks": (1, 1), "gpus": (4, 4), "cores": (32, 32)}, {}, {},
     "--nodes=2 --ntasks=8 --ntasks-per-node=4 --distribution=block --cpus-per-task=8 --gres=gpu:4"),
    ({"ranks": (1, 1), "gpus": (4, 4)}, {"SLURM_GPUS_PER_NODE": "4"}, {},
     "--ntasks-per-node=4 --distribution=block " + END),
    ({"ranks": (1, 1), "gpus": (2, 1)}, {}, {},
     "--ntasks=3 --nodelist=@hosts@ --distribution=arbitrary --gpus=3 " + END),
    # Requests of the job for its own tasks do not apply to other tasks.
    ({"ranks": (1, 1), "gpus": (4, 4)}, {"SLURM_NTASKS": "2", "SLURM_GPUS_PER_TASK": "4"}, {},
     "--ntasks=8 --ntasks-per-node=4 --distribution=block --gres=gpu:4 "),
    ({"ranks": (1, 1), "gpus": (1, 1)}, {"SLURM_NTASKS": "2", "SLURM_TRES_PER_TASK": "cpu:8"}, {},
     "/bin/srun --kill-on-bad-exit=1 --gres=gpu:1 "),
    ({"ranks": (1, 1), "gpus": (1, 1)},
     {"SLURM_NTASKS": "2", "SLURM_TRES_PER_TASK": "cpu=8,gres/gpu=1"}, {},
     "/bin/srun --kill-on-bad-exit=1 " + END),
    ({"ranks": (1, 1), "cores": (1, 1)}, {}, {"ntasks_per_node": 2}, "--overcommit"),
    ({}, {"SLURM_EXPORT_ENV": "NONE"}, {}, "--export=ALL"),
    ({}, {}, {"label": True}, "/bin/srun --label "),
    # A step inside a step shares its resources and forgets its shape.
    ({}, {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "1", "SLURM_CPU_BIND": "mask_cpu:1"}, {},
     "--nodes=2 --ntasks=4 --ntasks-per-node=2 --distribution=block --overlap"),
    # A torchrun agent gets all cores of its host.
    ({"cores": (8, 8)}, {"SLURM_NTASKS": "4", "SLURM_GPUS_PER_TASK": "1"}, {"torchrun": True},
     "--nodes=2 --ntasks=2 --ntasks-per-node=1 --distribution=block --cpus-per-task=8"),
])
def test_srun_options(job_has: dict[str, tuple[int, ...]], environ: dict[str, str],
                      options: dict[str, object], expected: str) -> None:
    assert expected in line(make(job(**job_has), {**SLURM, **environ}, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize(("environ", "ranks", "gpus", "kept", "dropped"), [
    ({"SLURM_NTASKS": "3", "SLURM_DISTRIBUTION": "cyclic"}, (2, 1), (None, None),
     "SLURM_DISTRIBUTION SLURM_NTASKS", ""),
    ({"SLURM_NTASKS": "2", "SLURM_GPUS_PER_TASK": "4", "SLURM_NTASKS_PER_GPU": "1"}, (1, 1), (4, 4),
     "", "SLURM_NTASKS SLURM_GPUS_PER_TASK SLURM_NTASKS_PER_GPU"),
    ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "1", "SLURM_CPU_BIND": "x", "SLURM_PROCID": "0"},
     (2, 2), (None, None), "", "SLURM_STEP_ID SLURM_NTASKS SLURM_CPU_BIND SLURM_PROCID")])
def test_srun_environment(environ: dict[str, str], ranks: tuple[int, ...],
                          gpus: tuple[int | None, ...], kept: str, dropped: str) -> None:
    found = set(make(job(ranks=ranks, gpus=gpus), {**SLURM, **environ}).environ)
    assert set(kept.split()) <= found and not set(dropped.split()) & found


def test_srun_places_uneven_ranks_by_a_host_file() -> None:
    plan = make(job(ranks=(1, 1), gpus=(2, 1)), {**SLURM, "SLURM_JOB_NUM_NODES": "4"})
    assert plan.method.host_file(plan) == "n1\nn1\nn2\n"
    assert "--nodes" not in line(plan)  # refused together since Slurm 23.11
    assert plan.environ["SLURM_JOB_NUM_NODES"] == plan.environ["SLURM_NNODES"] == "2"


@pytest.mark.parametrize("nodelist", ["n2,n4", "n[4,2]", "n4,n2.cluster"])
def test_srun_on_a_part_of_the_job_names_its_hosts(nodelist: str) -> None:
    environ = {**SLURM, "SLURM_NTASKS": "8", "SLURM_GPUS": "8"}  # srun would ask for 8 again
    plan = make(job(ranks=(2,) * 4, gpus=(2,) * 4), environ, nodelist=nodelist)
    assert (plan.hosts, plan.ranks) == (("n2", "n4"), (2, 2))
    options = "--nodes=2 --ntasks=4 --ntasks-per-node=2 --distribution=block --nodelist=n2,n4"
    assert options in line(plan) and "--gres" not in line(plan)
    assert "SLURM_GPUS" not in plan.environ and plan.environ["SLURM_GPUS_PER_NODE"] == "2"


# Heterogeneous jobs of Slurm


@pytest.mark.parametrize(("gpus", "claim"), [
    ((None, None, None), ""), ((2, 2, 2), "--gres=gpu:2 "), ((1, 2, 2), ""), ((0, 0, 0), "")])
def test_tasks_of_all_components_are_one_step(gpus: tuple[int | None, ...], claim: str) -> None:
    plan = make(job(ranks=(1, 2, 2), gpus=gpus), HET)
    assert f"--kill-on-bad-exit=1 {claim}--het-group=0,1 {END}" in line(plan)


def test_other_ranks_are_spelled_out_for_each_component() -> None:
    allocation = job(ranks=(1, 1, 1), gpus=(0, 2, 2), cores=(2, 8, 8))
    plan = make(allocation, {**HET, "SLURM_NTASKS_PER_NODE": "2"}, command=("a",))
    assert plan.ranks == (1, 2, 2) and "SLURM_NTASKS_PER_NODE" not in plan.environ
    assert line(plan) == (
        "/bin/srun --het-group=0 --kill-on-bad-exit=1 --nodes=1 --ntasks=1 --ntasks-per-node=1 "
        "--distribution=block --cpus-per-task=2 a : --het-group=1 --kill-on-bad-exit=1 --nodes=2 "
        "--ntasks=4 --ntasks-per-node=2 --distribution=block --cpus-per-task=4 --gres=gpu:2 a")


def test_one_torchrun_agent_for_each_host_of_every_component() -> None:
    plan = make(job(ranks=(1, 2, 2)), HET, torchrun=True)
    words = shlex.join(plan.method.command(plan, ["agent"])).split(" : ")
    assert [part.split(" --dist")[0] for part in words] == [
        "/bin/srun --het-group=0 --kill-on-bad-exit=1 --nodes=1 --ntasks=1 --ntasks-per-node=1",
        "--het-group=1 --kill-on-bad-exit=1 --nodes=2 --ntasks=2 --ntasks-per-node=1"]


@pytest.mark.parametrize(("options", "gpus", "message"), [
    ({"nodes": 2}, None, "--nodes or --nodelist was given in a heterogeneous job"),
    ({}, (1, 2, 1), r"n2, n3 are one component .* different numbers of ranks \(2, 1\)")])
def test_impossible_in_a_heterogeneous_job(
        options: dict[str, object], gpus: tuple[int, ...] | None, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        line(make(job(ranks=(1, 1, 1), gpus=gpus), HET, **options))  # type: ignore[arg-type]


def recorded(name: str, gpus: tuple[int, ...] = (), mpiexec: Mpiexec | None = None,
             **options: object) -> Plan:
    """The plan in the batch shell of a job recorded on Slurm 25.11. gpus: of each host."""
    text = (RECORDINGS / f"{name}.json").read_text()
    environ = json.loads(text)["processes"][0]["environ"]
    allocation = current_allocation(environ, query=False)
    assert allocation is not None
    if gpus:
        allocation = allocation._replace(gpus_per_host=gpus)
    return make(allocation, environ, mpiexec=mpiexec, host="node1", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "dropped", "kept"), [
    # srun applies SLURM_NTASKS=1 to every component, then the number of the component itself.
    ("sbatch_het", "SLURM_NTASKS SLURM_NPROCS SLURM_TRES_PER_TASK",
     {"SLURM_NTASKS_HET_GROUP_0": "1", "SLURM_NTASKS_PER_NODE_HET_GROUP_1": "2"}),
    ("sbatch_het_gpus_per_task", "SLURM_NTASKS SLURM_NPROCS SLURM_TRES_PER_TASK",
     {"SLURM_NTASKS_HET_GROUP_0": "1", "SLURM_NTASKS_PER_NODE_HET_GROUP_1": "2"}),
    ("sbatch_het_cpus_per_task", "SLURM_CPUS_PER_TASK SLURM_TRES_PER_TASK",
     {"SLURM_CPUS_PER_TASK_HET_GROUP_0": "4"})])
def test_requests_of_the_first_component_are_not_for_others(
        name: str, dropped: str, kept: dict[str, str]) -> None:
    plan = recorded(name)
    assert plan.ranks == (1, 2, 2) and "--het-group=0,1" in line(plan)
    assert not set(dropped.split()) & set(plan.environ) and kept.items() <= plan.environ.items()


@pytest.mark.parametrize(("mpiexec", "options"), [
    (None, {"torchrun": True}), (MPICH, {}), (None, {"ntasks_per_node": 2})])
def test_requests_for_tasks_of_components_are_not_for_other_tasks(
        mpiexec: Mpiexec | None, options: dict[str, object]) -> None:
    plan = recorded("sbatch_het_gpus_per_task", (1, 2, 2), mpiexec, **options)
    prefixes = ("SLURM_TRES", "SLURM_NTASKS", "SLURM_NPROCS")
    assert not [name for name in plan.environ if name.startswith(prefixes)]


def test_gpus_of_a_component_are_asked_for_once() -> None:
    plan = recorded("sbatch_het_gpus_per_node", (1, 2, 2), torchrun=True)
    assert "--gres=gpu:1" in line(plan) and "--gres=gpu:2" in line(plan)
    assert not [name for name in plan.environ if name.startswith("SLURM_GPUS_PER_NODE")]


# mpiexec in Slurm


@pytest.mark.parametrize("name", ["sbatch_2x2", "sbatch_het"])
@pytest.mark.parametrize("mpiexec", [MPICH, OPENMPI4, OPENMPI5])
def test_what_slurm_tells_an_mpiexec_is_kept(name: str, mpiexec: Mpiexec) -> None:
    environ = recorded(name, mpiexec=mpiexec).environ
    for variable in ("OMPI_MCA_plm_slurm_args", "PRTE_MCA_plm_slurm_args",
                     "HYDRA_LAUNCHER_EXTRA_ARGS", "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"):
        assert environ[variable] == "--external-launcher"
    assert environ["HYDRA_BOOTSTRAP"] == environ["I_MPI_HYDRA_BOOTSTRAP"] == "slurm"


@pytest.mark.parametrize(("mpiexec", "ranks", "gpus", "environ", "expected"), [
    (MPICH, (4, 4), (4, 4), {}, {"SLURM_GPUS_PER_NODE": "4"}),  # nodes asked for whole
    (MPICH, (4, 4), (4, 4), {"SLURM_GPUS": "8"}, {"SLURM_GPUS": "8"}),
    (MPICH, (4, 4), (4, 2), {}, {"SLURM_GPUS": "6"}),
    (MPICH, (4, 4), (0, 0), {}, {}),
    (MPICH, (2, 2), None, {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_EXPORT_ENV": "NONE"},
     {"SLURM_OVERLAP": "1", "SLURM_CPU_BIND": "none", "SLURM_EXPORT_ENV": "ALL"}),
    # Its srun leaves this host out; it starts no more ranks than SLURM_TASKS_PER_NODE allows.
    (OPENMPI5, (1, 1, 1), (2, 4, 4), {"SLURM_GPUS": "10"},
     {"SLURM_TASKS_PER_NODE": "2,4,4", "SLURM_GPUS_PER_NODE": "4"})])
def test_environment_of_the_daemons(
        mpiexec: Mpiexec, ranks: tuple[int, ...], gpus: tuple[int, ...] | None,
        environ: dict[str, str], expected: dict[str, str]) -> None:
    plan = make(job(ranks=ranks, gpus=gpus), {**SLURM, **environ}, mpiexec=mpiexec)
    of_slurm = {name for name in plan.environ if name.startswith("SLURM_")} - set(SLURM)
    assert {name: plan.environ[name] for name in of_slurm} == expected


def test_openmpi_starts_its_daemons_with_the_srun_on_path() -> None:
    other = OPENMPI4._replace(path="/usr/bin/mpiexec", other_srun=True)  # beside another Slurm
    plan = make(job(), mpiexec=other)
    assert "/usr/bin/mpiexec --noprefix" in line(plan) and plan.environ["PATH"] == "/bin:/usr/bin"
    assert "--noprefix" not in line(make(job(), mpiexec=OPENMPI4))


@pytest.mark.parametrize(("mpiexec", "options"), [
    (MPICH, "-launcher ssh -launcher-exec @remote-shell@"),
    (OPENMPI5, "--prtemca ras ^slurm,tm,pbs --prtemca plm ssh"),
    (OPENMPI4, "--mca ras ^slurm,tm,pbs --mca plm rsh")])
def test_mpiexec_reaches_every_component_with_srun(mpiexec: Mpiexec, options: str) -> None:
    plan = make(job(ranks=(1, 2, 2), gpus=(1, 2, 2)), HET, mpiexec=mpiexec)
    code = plan.method.variables(plan)[remote_shell.VARIABLE]
    assert "main('/bin/srun', sys.argv[1:], [1, 2])" in code
    assert options in line(plan).replace("'", "")


# mpiexec


@pytest.mark.parametrize(("mpiexec", "environ", "options", "expected"), [
    (MPICH, PBS, {}, "/mpich/mpiexec -launcher ssh -launcher-exec @remote-shell@ -f @hosts@ -n 3 "),
    (MPICH, PBS, {"programs": Programs({})}, "/mpich/mpiexec -f @hosts@ -n 3 "),
    (MPICH, PBS, {"label": True}, "-prepend-rank -f @hosts@"),
    (INTEL, SLURM, {}, "/intel/mpiexec -launcher slurm -machinefile @hosts@ -n 3 "),
    (INTEL, PBS, {"torchrun": True}, "-genv I_MPI_PIN off -machinefile @hosts@ -n 2 "),
    # Variables of one host are not passed on, nor is its GPU mask where each host has its own.
    (MPICH, {**SLURM, "CUDA_VISIBLE_DEVICES": "0", "HOSTNAME": "n1", "FOO": "1"}, {},
     "-genvlist FOO,PATH -"),
    (INTEL, {**SLURM, "CUDA_VISIBLE_DEVICES": "0", "HOSTNAME": "n1", "FOO": "1"}, {},
     "-genvlist FOO,PATH -"),
    (MPICH, {**PBS, "CUDA_VISIBLE_DEVICES": "0"}, {"programs": Programs({})},  # by plain ssh
     "/mpich/mpiexec -f @hosts@"),
    (OPENMPI5, {**SLURM, "CUDA_VISIBLE_DEVICES": "0"}, {}, "--hostfile @hosts@ -x PATH -n 3"),
    (OPENMPI5, {**PBS, "FOO": "a\nb", "HOSTNAME": "n1", "TMPDIR": "/tmp/1", "SSH_TTY": "x",
                "OMPI_MCA_x": "1"}, {}, "--bind-to none --hostfile @hosts@ -x FOO -x PATH -n 3"),
    (OPENMPI4, PBS, {}, f"--mca plm_rsh_agent '{PYTHON} -I "),
    (OPENMPI5, PBS, {}, f"--prtemca plm_ssh_agent '{PYTHON} -I "),
    (OPENMPI4, PBS, {"root": True}, "/o4/mpiexec --allow-run-as-root "),
    (OPENMPI4, PBS, {}, "/o4/mpiexec --mca "),
    (OPENMPI4, PBS, {"label": True}, "--tag-output"),
    (OPENMPI5, PBS, {"label": True}, "--output tag")])
def test_mpiexec_options(mpiexec: Mpiexec, environ: Mapping[str, str], options: dict[str, object],
                         expected: str) -> None:
    scheduler = "slurm" if "SLURM_JOB_ID" in environ else "pbs"
    plan = make(job(scheduler, (2, 1)), environ, mpiexec=mpiexec, **options)  # type: ignore[arg-type]
    assert expected in line(plan)


@pytest.mark.parametrize(("mpiexec", "text"), [
    (MPICH, "n1:2\nn2:1\n"), (INTEL, "n1:2\nn2:1\n"), (OPENMPI5, "n1 slots=2\nn2 slots=1\n")])
def test_host_file(mpiexec: Mpiexec, text: str) -> None:
    plan = make(job("pbs", (2, 1)), mpiexec=mpiexec)
    assert plan.method.host_file(plan) == text


def test_openmpi_with_a_python_in_a_folder_with_a_space(tmp_path: Path) -> None:
    python = tmp_path / "a folder" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    found = line(make(job("pbs"), mpiexec=OPENMPI5, python=str(python)))
    assert f"plm_ssh_agent '{os.path.realpath(sys.executable)} -I " in found
    with pytest.raises(PlanError, match="PYTHON"):
        line(make(job("pbs"), mpiexec=OPENMPI5, python="/no such folder/python"))


@pytest.mark.parametrize(("ranks", "cores", "options", "refused"), [
    ((0, 2, 2), (1, 2, 2), {}, True),
    ((0, 2, 2), (1, 2, 2), {"nodelist": "n3"}, False),  # nothing starts on the first one with slots
    ((0, 2, 2), (4, None, None), {}, False),  # other names of the same hosts
    ((2, 2, 0), (2, 2, 1), {}, False),
    ((0, 0, 0), (2, 2, 1), {"ntasks_per_node": 2}, False)])
def test_hydra_is_refused_where_it_would_wait_for_ever(
        ranks: tuple[int, ...], cores: tuple[int | None, ...], options: dict[str, object],
        refused: bool) -> None:
    expectation = pytest.raises(PlanError, match="n1 has no slot")
    with expectation if refused else contextlib.nullcontext():
        make(job("pbs", ranks, cores=cores), mpiexec=MPICH, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("ranks", "environ", "options", "expected"), [
    ((4, 4), PBS, {}, f"{PALS.path} -n 8 --ppn 4 --depth 8 --cpu-bind depth {END}"),
    ((2, 2), {**PBS, "PBS_NODEFILE": ""}, {}, "--hosts n1,n2"),
    ((2, 2, 2), PBS, {"nodes": 2}, "--hosts n1,n2"),
    ((4, 4), PBS, {"torchrun": True}, "-n 2 --ppn 1 --cpu-bind none")])
def test_pals_options(ranks: tuple[int, ...], environ: Mapping[str, str],
                      options: dict[str, object], expected: str) -> None:
    plan = make(job("pbs", ranks, cores=(32,) * len(ranks)), environ, mpiexec=PALS, **options)  # type: ignore[arg-type]
    assert expected in line(plan)
    assert plan.environ.get("WORLD_SIZE") == (None if options.get("torchrun") else str(plan.world_size))


def test_pals_cannot_start_uneven_ranks() -> None:
    with pytest.raises(PlanError, match="different numbers of ranks .2, 1..*--launcher pbs_tmrsh"):
        line(make(job("pbs", (2, 1)), mpiexec=PALS))


# Agents


@pytest.mark.parametrize(("launcher", "words"), [
    ("pbs_tmrsh", ["/bin/pbs_tmrsh", "n2", "/usr/bin/env", "LD_LIBRARY_PATH=/lib", "agent", "1"]),
    ("pbsdsh", ["/bin/pbsdsh", "-h", "n2", "--", "/usr/bin/env", "LD_LIBRARY_PATH=/lib", "agent", "1"]),
    ("ssh", ["/bin/ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=30", "-T", "n2",
             "exec agent 1"])])
def test_agent_is_out_of_reach_of_the_stops_of_pbs(launcher: str, words: list[str]) -> None:
    plan = make(job("pbs"), {**PBS, "LD_LIBRARY_PATH": "/lib"}, launcher=launcher)
    starts = plan.method.agent_starts(plan, lambda index: ["agent", index], {"SECRET": "s"})
    shell, option, script, _, *rest = starts[1].words
    assert (shell, option) == ("/bin/sh", "-c") and script.startswith("trap '' TERM INT USR1 USR2")
    assert (rest, starts[1].hosts, starts[1].stdin) == (words, (1,), b"s\n")
    assert "SECRET" not in starts[1].environ


@pytest.mark.parametrize("mpiexec", [None, OPENMPI5])
def test_native_launcher_starts_all_agents(mpiexec: Mpiexec | None) -> None:
    plan = make(job(), mpiexec=mpiexec, torchrun=True)
    [start] = plan.method.agent_starts(plan, lambda index: ["agent", index], {"SECRET": "s"})
    assert (start.hosts, start.words[-2:], start.environ["SECRET"]) == ((0, 1), ["agent", "rank"], "s")
    assert mpiexec is None or "SECRET" in start.words  # -x SECRET


# pbs_tmrsh and srun as remote shells


@pytest.mark.parametrize(("arguments", "words"), [
    (["-x", "n2", "cd / && exec orted"], ["n2.pbs.lab", "/bin/sh", "-c", "cd / && exec orted"]),
    (["-o", "A=b", "n1.pbs.lab", '"proxy"', "--id", "1"],
     ["n1.pbs.lab", "/bin/sh", "-c", '"proxy" --id 1']),
    (["elsewhere", "true"], ["elsewhere", "/bin/sh", "-c", "true"])])
def test_pbs_tmrsh_gets_the_name_in_the_node_file(arguments: list[str], words: list[str]) -> None:
    assert remote_shell.pbs_tmrsh_words(arguments, ["n1.pbs.lab\n", "n2.pbs.lab\n"]) == words


def test_srun_gets_the_component_of_the_host() -> None:
    words = remote_shell.srun_words(["-x", "n3", "exec proxy"], [["n1"], ["n2", "n3"]], [0, 2])
    assert words[:2] == ["--het-group=1", "--nodelist=n3"]
    assert words[-4:] == ["--gres=gpu:2", "/bin/sh", "-c", "exec proxy"]


def test_remote_shell_survives_splitting_and_double_quotes() -> None:
    for word in remote_shell.words(PYTHON):
        assert not set(word) & set(' "$`\\')


# What srun reports


@pytest.mark.parametrize(("text", "first"), [
    ("srun: error: node2: task 2: Exited with exit code 7\nsrun: error: node1: tasks 0-1: Killed\n",
     TaskFailure(7, "node2", "2")),
    ("srun: error: node2: task 2: Killed\nsrun: error: node1: tasks 0-1: Terminated\n",
     TaskFailure(137, "node2", "2")),
    ("srun: error: node2: tasks 2-3: Segmentation fault (core dumped)\n",
     TaskFailure(139, "node2", "2-3")),
    ("srun: error: Unable to create step for job 7: More processors requested than permitted\n", None)])
def test_first_task_that_failed(text: str, first: TaskFailure | None,
                                capfd: pytest.CaptureFixture[str]) -> None:
    read_end, write_end = os.pipe()
    os.write(write_end, text.encode())
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        errors = SrunErrors(pipe)
        errors.drain()
    assert errors.first == first and capfd.readouterr().err == text


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Puts a shell script of that name first on PATH."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def write(name: str, text: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)

    return write


STEPS = """cat <<'END'
StepId=7.0 UserId=0 State=RUNNING SrunHost:Pid=node1:100 CPUFreqReq=x
StepId=7.1 UserId=0 State=RUNNING SrunHost:Pid=node1:10 CPUFreqReq=x
END"""


def test_step_of_an_srun_is_found_by_its_process(program: Callable[[str, str], None]) -> None:
    program("scontrol", STEPS)
    assert (step_of("7", 10), step_of("7", 11)) == ("7.1", "7")


def test_srun_passes_a_request_to_end_on_with_scancel(
        program: Callable[[str, str], None], tmp_path: Path) -> None:
    program("scontrol", STEPS)
    program("scancel", f'echo "$*" > "{tmp_path}/words"')
    plan = make(job())
    Srun("srun").send_signal(signal.SIGTERM, 10, plan, None)  # type: ignore[arg-type]
    assert (tmp_path / "words").read_text() == "--signal=TERM 7.1\n"


@pytest.mark.parametrize(("value", "ports"), [
    ("60001-60010", range(60001, 60011)), ("0-0", range(0))])
def test_ports_that_compute_nodes_reach(program: Callable[[str, str], None], value: str,
                                        ports: range) -> None:
    program("scontrol", f"echo 'SlurmctldPort = 6817'; echo 'SrunPortRange           = {value}'")
    assert srun_ports() == ports
    assert make(job(), host="login").method.listen_ports(make(job(), host="login")) == ports
    assert not make(job()).method.listen_ports(make(job()))  # on a host of the job
