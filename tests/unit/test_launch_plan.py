"""What launch.py decides: means, hosts, ranks, command lines and environment, from an allocation and what is here."""
from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from utils.launch import remote_shell
from utils.launch.commands import HOST_FILE, gpus_of_components, host_file, host_words, native_command, printed, starter
from utils.launch.plan import MEANS, Here, Options, Plan, PlanError, clean, describe, plan
from utils.launch.programs import Mpiexec
from utils.schedulers.allocation import Allocation, current_allocation

PYTHON = "/env/bin/python"
TOOLS = {name: f"/bin/{name}" for name in ("srun", "pbs_tmrsh", "pbsdsh", "ssh")}
SLURM = {"SLURM_JOB_ID": "7", "PATH": "/bin"}
PBS = {"PBS_JOBID": "7.head", "PBS_NODEFILE": "/aux/7", "PBS_JOBCOOKIE": "c", "PATH": "/bin"}
MPICH = Mpiexec("/mpich/mpiexec", "mpich", 5)
OPENMPI4, OPENMPI5 = Mpiexec("/o4/mpiexec", "openmpi", 4), Mpiexec("/o5/mpiexec", "openmpi", 5)
PALS = Mpiexec("/opt/cray/pals/default/bin/mpiexec", "pals")


@dataclasses.dataclass
class Programs:
    """Programs that are here."""

    paths: Mapping[str, str] = dataclasses.field(default_factory=lambda: dict(TOOLS))
    mpiexec: Mpiexec | None = None
    pals: Mpiexec | None = None

    def find(self, name: str) -> str | None:
        return self.paths.get(name)


def job(scheduler: str = "slurm", ranks: tuple[int, ...] = (2, 2), gpus: tuple[int | None, ...] | None = None,
        cores: tuple[int | None, ...] | None = None, hosts: tuple[str, ...] | None = None) -> Allocation:
    hosts = hosts or tuple(f"n{i + 1}" for i in range(len(ranks)))
    return Allocation(scheduler, "7", hosts, ranks, gpus or (None,) * len(ranks), cores or (None,) * len(ranks))


def make(allocation: Allocation | None, environ: Mapping[str, str], options: Options = Options(), *,  # noqa: B008
         command: tuple[str, ...] = ("train.py", "--name", "a b"), programs: Programs | None = None, gpus: int = 0,
         host: str = "n1", root: bool = False) -> Plan:
    return plan(command, options, allocation, Here(host, gpus, PYTHON, programs or Programs(), root), environ)


def line(made: Plan) -> str:
    return shlex.join(native_command(made, made.program))


def test_a_restart_and_what_the_allocation_notes_are_said_first() -> None:
    allocation = job()._replace(restart_count=2, notes=("a note",))
    assert make(allocation, {}).notes[:2] == ("restart 2 of Slurm job 7", "a note")
    assert make(job()._replace(restart_count=0), {}).notes == ()


# Which means ----------------------------------------------------------------------------------------------------------

def test_without_an_allocation_every_gpu_of_this_host_gets_a_rank() -> None:
    made = make(None, {}, gpus=3, host="laptop")
    assert (made.means, made.hosts, made.ranks) == ("local", ("laptop",), (3,))


def test_without_an_allocation_and_without_gpus_there_is_one_rank() -> None:
    assert make(None, {}).ranks == (1,)


def test_ranks_per_node_overrules_the_gpus_of_this_host() -> None:
    assert make(None, {}, Options(ranks_per_node=2), gpus=8).ranks == (2,)


@pytest.mark.parametrize(("scheduler", "missing", "means"), [
    ("slurm", "", "srun"), ("slurm", "srun", "ssh"), ("pbs", "", "pbs_tmrsh"), ("pbs", "pbs_tmrsh", "pbsdsh"),
    ("pbs", "pbs_tmrsh pbsdsh", "ssh")])
def test_the_best_means_that_is_here_is_taken(scheduler: str, missing: str, means: str) -> None:
    programs = Programs({name: path for name, path in TOOLS.items() if name not in missing.split()})
    made = make(job(scheduler), SLURM if scheduler == "slurm" else PBS, programs=programs)
    assert (made.means, made.path) == (means, f"/bin/{means}")


def test_on_a_cray_with_pbs_only_its_own_mpiexec_is_right() -> None:
    made = make(job("pbs"), PBS, programs=Programs(mpiexec=PALS, pals=PALS))
    assert (made.means, made.path) == ("mpiexec", PALS.path)


def test_a_pbs_job_on_this_host_alone_needs_nothing_to_start_its_ranks() -> None:
    made = make(job("pbs", (2,), hosts=("n1.pbs.lab",)), PBS, host="n1")
    assert (made.means, made.ranks) == ("local", (2,))


def test_by_local_takes_the_ranks_of_this_host_only() -> None:
    made = make(job("pbs", (2, 3)), PBS, Options(by="local"), host="n2.cluster")
    assert (made.hosts, made.ranks) == (("n2.cluster",), (3,))


@pytest.mark.parametrize("means", [means for means in MEANS if means != "local"])
def test_a_means_that_needs_a_job_says_so_outside_of_one(means: str) -> None:
    with pytest.raises(PlanError, match=f"--by {means} needs an allocation"):
        make(None, {}, Options(by=means))


@pytest.mark.parametrize(("options", "environ", "allocation", "says"), [
    (Options(by="magic"), PBS, job("pbs"), "--by is 'magic'; expected auto, srun, mpiexec"),
    (Options(by="srun"), PBS, job("pbs"), "--by srun was asked for in PBS job 7"),
    (Options(by="pbs_tmrsh"), SLURM, job(), "--by pbs_tmrsh was asked for in Slurm job 7"),
    (Options(by="mpiexec"), SLURM, job(), "no mpiexec of PALS, Open MPI, Intel MPI, MPICH is on PATH"),
    (Options(hosts="3"), SLURM, job(), r"--hosts is 3; expected 1 or more, .* \(2 with ranks: n1, n2\)"),
    (Options(hosts="0"), SLURM, job(), "--hosts is 0; expected 1 or more"),
    (Options(hosts="2"), {}, None, r"--hosts is 2; .* \(1 with ranks: n1\)"),
    (Options(hosts="n1,n9"), SLURM, job(), "--hosts is 'n1,n9', but n9 is none of the hosts"),
    (Options(hosts="n2"), PBS, job("pbs", (1, 0)), "--hosts is 'n2', but n2 is none of the hosts"),
    (Options(hosts="n[1"), SLURM, job(), "--hosts: node list 'n.1'"),
    (Options(hosts=""), SLURM, job(), "--hosts is '', but no name is none"),
    (Options(ranks_per_node=0), SLURM, job(), "--ranks-per-node is 0; expected 1 or more"),
    (Options(restarts=-1), SLURM, job(), "--restarts is -1; expected 0 or more")])
def test_what_cannot_be_done_is_said(options: Options, environ: Mapping[str, str], allocation: Allocation | None,
                                     says: str) -> None:
    with pytest.raises(PlanError, match=says):
        make(allocation, environ, options)


def test_a_missing_program_is_named() -> None:
    with pytest.raises(PlanError, match="ssh was not found on PATH, and is needed to start ranks on 2 hosts"):
        make(job("pbs"), PBS, Options(by="ssh"), programs=Programs({}))


# How many ranks -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("slots", "gpus", "ranks"), [
    ((1, 1), (4, 4), (4, 4)),          # one task on each node, as for torchrun: one rank for each GPU
    ((1, 1), (4, 2), (4, 2)),
    ((2, 2), (4, 4), (2, 2)),          # as many as were asked for
    ((2, 1), (None, None), (2, 1)),
    ((1, 1), (0, 0), (1, 1)),
    ((1, 1), (None, 4), (1, 4))])
def test_ranks_are_the_slots_asked_for_or_else_the_gpus(slots: tuple[int, ...], gpus: tuple[int | None, ...],
                                                        ranks: tuple[int, ...]) -> None:
    assert make(job("pbs", slots, gpus), PBS).ranks == ranks


def test_a_host_without_a_slot_gets_no_rank() -> None:
    made = make(job("pbs", (2, 0, 2), (1, 1, 1)), PBS)
    assert (made.hosts, made.ranks) == (("n1", "n3"), (2, 2))


def test_gpus_that_the_scheduler_does_not_count_are_counted_here_and_that_is_said() -> None:
    made = make(job("pbs", (1, 1)), PBS, gpus=4)
    assert made.ranks == (4, 4)
    assert any("PBS job 7 does not say how many GPUs it has: 4 for each host" in note for note in made.notes)


def test_gpus_are_not_counted_on_a_login_host() -> None:
    assert make(job("slurm", (1, 1)), SLURM, gpus=4, host="login").ranks == (1, 1)


def test_more_slots_than_gpus_are_started_with_a_note() -> None:
    made = make(job("pbs", (8, 8), (4, 4)), PBS)
    assert made.ranks == (8, 8)
    assert any("--ranks-per-node 4" in note for note in made.notes)


def test_a_job_without_any_slot_is_an_error() -> None:
    with pytest.raises(PlanError, match="no host of PBS job 7 gets a rank"):
        make(job("pbs", (0, 0)), PBS)


@pytest.mark.parametrize(("environ", "allocation", "hosts", "ranks"), [
    ({}, None, None, (6,)), (SLURM, job(ranks=(1, 1, 1)), None, (2, 2, 2)), (PBS, job("pbs", (4, 4, 4)), "2", (3, 3))])
def test_a_number_of_ranks_is_shared_by_the_hosts(environ: Mapping[str, str], allocation: Allocation | None,
                                                  hosts: str | None, ranks: tuple[int, ...]) -> None:
    assert make(allocation, environ, Options(hosts=hosts, ranks=6)).ranks == ranks


@pytest.mark.parametrize(("options", "says"), [
    (Options(ranks=5), "-n is 5, but there are 2 hosts, .* Expected a multiple of 2"),
    (Options(ranks=1), "-n is 1, but there are 2 hosts"), (Options(ranks=0), "-n is 0; expected 1 or more"),
    (Options(ranks=4, ranks_per_node=2), "both -n and --ranks-per-node")])
def test_a_number_of_ranks_that_the_hosts_cannot_share_is_said(options: Options, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        make(job(), SLURM, options)


def test_ranks_that_share_cores_are_said() -> None:
    made = make(job(ranks=(2, 2), cores=(2, 1)), SLURM)
    assert "the 2 ranks on n2 share 1 core, all that the job has there" in " ".join(describe(made))
    assert not any("share" in note for note in make(job(ranks=(2, 2), cores=(2, 2)), SLURM).notes)


# What a rank runs -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("command", "program"), [
    (("-m", "package.module", "-x"), (PYTHON, "-u", "-m", "package.module", "-x")),
    (("python", "-m", "x"), (PYTHON, "-m", "x")), (("python3", "a.py"), (PYTHON, "a.py")), (("sh", "-c", "x"),) * 2])
def test_modules_and_python_are_run_by_the_chosen_python(command: tuple[str, ...], program: tuple[str, ...]) -> None:
    assert make(job(), SLURM, command=command).program == program


@pytest.mark.parametrize(("command", "words"), [
    (("-m", "package.module", "-x"), ["-m", "package.module", "-x"]), (("train.py",), ["train.py"]),
    (("python", "-m", "x"), ["--no-python", PYTHON, "-m", "x"])])
def test_torchrun_runs_modules_and_programs(command: tuple[str, ...], words: list[str]) -> None:
    made = make(job(), SLURM, Options(torchrun=True), command=command)
    [(found, variables)] = host_words(made, 1, "10.0.0.1", "29500", "10.0.0.2")
    assert found[-len(words):] == words and variables["NODE_RANK"] == "1"


# srun -----------------------------------------------------------------------------------------------------------------

def test_tasks_that_the_job_asked_for_are_left_to_slurm() -> None:
    environ = {**SLURM, "SLURM_NTASKS": "3", "SLURM_DISTRIBUTION": "cyclic"}
    made = make(job(ranks=(2, 1), cores=(8, 4)), environ)
    assert line(made) == "/bin/srun --kill-on-bad-exit=1 --cpus-per-task=4 /env/bin/python -u train.py --name 'a b'"
    assert made.environ["SLURM_DISTRIBUTION"] == "cyclic"


def test_srun_is_told_the_cores_of_a_rank_that_the_job_asked_for() -> None:
    environ = {**SLURM, "SLURM_NTASKS": "4", "SLURM_CPUS_PER_TASK": "3"}
    assert "--cpus-per-task=3 " in line(make(job(cores=(8, 8)), environ))


def test_one_rank_for_each_gpu_is_spelled_out_for_srun() -> None:
    made = make(job(ranks=(1, 1), gpus=(4, 4), cores=(32, 32)), SLURM)
    assert ("--nodes=2 --ntasks=8 --ntasks-per-node=4 --distribution=block --cpus-per-task=8 --gres=gpu:4"
            in line(made))


def test_gpus_that_a_step_gets_by_itself_are_not_asked_for_again() -> None:
    assert "--gres" not in line(make(job(ranks=(1, 1), gpus=(4, 4)), {**SLURM, "SLURM_GPUS_PER_NODE": "4"}))


def test_uneven_ranks_are_placed_by_a_host_file() -> None:
    made = make(job(ranks=(1, 1), gpus=(2, 1)), SLURM)
    assert "--gpus=3" in line(made)  # of nodes that were asked for whole a step gets none by itself
    assert f"--ntasks=3 --nodelist={HOST_FILE} --distribution=arbitrary" in line(made).replace("'", "")
    assert host_file(made) == "n1\nn1\nn2\n"


@pytest.mark.parametrize("hosts", ["n2,n4", "n[4,2]", "n4,n2.cluster"])
def test_a_step_on_a_part_of_the_job_names_its_hosts(hosts: str) -> None:
    environ = {**SLURM, "SLURM_NTASKS": "8", "SLURM_GPUS": "8"}  # which srun would ask for again
    made = make(job(ranks=(2, 2, 2, 2), gpus=(2, 2, 2, 2)), environ, Options(hosts=hosts))
    assert (made.hosts, made.ranks) == (("n2", "n4"), (2, 2))
    assert "--nodes=2 --ntasks=4 --ntasks-per-node=2 --distribution=block --nodelist=n2,n4" in line(made)
    assert "SLURM_GPUS" not in made.environ and made.environ["SLURM_GPUS_PER_NODE"] == "2"
    assert "--gres" not in line(made)


@pytest.mark.parametrize("by", ["auto", "mpiexec", "ssh"])
def test_the_first_hosts_of_a_job_are_a_part_of_it(by: str) -> None:
    made = make(job("pbs", (2, 0, 1, 1)), PBS, Options(by=by, hosts="2"), programs=Programs(mpiexec=MPICH))
    assert (made.hosts, made.ranks, made.node_file) == (("n1", "n3"), (2, 1), "")


def test_all_hosts_are_no_part() -> None:
    environ = {**SLURM, "SLURM_NTASKS": "4"}
    assert line(make(job(), environ, Options(hosts="2"))) == line(make(job(), environ))


def test_more_ranks_than_cores_share_them() -> None:
    assert "--overcommit" in line(make(job(ranks=(1, 1), cores=(1, 1)), SLURM, Options(ranks_per_node=2)))


def test_a_step_inside_a_step_shares_its_resources_and_forgets_its_shape() -> None:
    environ = {**SLURM, "SLURM_STEP_ID": "0", "SLURM_NTASKS": "1", "SLURM_CPU_BIND": "mask_cpu:1", "SLURM_PROCID": "0"}
    made = make(job(ranks=(2, 2)), environ)
    assert "--nodes=2 --ntasks=4 --ntasks-per-node=2 --distribution=block --overlap" in line(made)
    assert not {"SLURM_NTASKS", "SLURM_CPU_BIND", "SLURM_STEP_ID", "SLURM_PROCID"} & set(made.environ)


HET = {**SLURM, "SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST_HET_GROUP_0": "n1",
       "SLURM_JOB_NODELIST_HET_GROUP_1": "n[2-3]"}


def test_the_tasks_of_all_components_of_a_heterogeneous_job_are_one_step() -> None:
    assert "--kill-on-bad-exit=1 --het-group=0,1 /env/bin/python" in line(make(job(ranks=(1, 2, 2)), HET))


def test_other_ranks_of_a_heterogeneous_job_are_spelled_out_for_each_component() -> None:
    environ = {**HET, "SLURM_NTASKS_PER_NODE": "2"}
    made = make(job(ranks=(1, 1, 1), gpus=(0, 2, 2), cores=(2, 8, 8)), environ, command=("a",))
    assert made.ranks == (1, 2, 2) and "SLURM_NTASKS_PER_NODE" not in made.environ
    assert line(made) == (
        "/bin/srun --het-group=0 --kill-on-bad-exit=1 --nodes=1 --ntasks=1 --ntasks-per-node=1 --distribution=block "
        "--cpus-per-task=2 a : --het-group=1 --kill-on-bad-exit=1 --nodes=2 --ntasks=4 --ntasks-per-node=2 "
        "--distribution=block --cpus-per-task=4 --gres=gpu:2 a")


def test_one_agent_for_each_host_of_every_component_of_a_heterogeneous_job() -> None:
    made = make(job(ranks=(1, 2, 2)), HET, Options(torchrun=True))
    assert [words.split(" --dist")[0] for words in shlex.join(native_command(made, ["agent"])).split(" : ")] == [
        "/bin/srun --het-group=0 --kill-on-bad-exit=1 --nodes=1 --ntasks=1 --ntasks-per-node=1",
        "--het-group=1 --kill-on-bad-exit=1 --nodes=2 --ntasks=2 --ntasks-per-node=1"]


def recorded(name: str, options: Options = Options(), gpus: tuple[int, ...] = (),  # noqa: B008
             programs: Programs | None = None) -> Plan:
    """The plan in the batch shell of a job that was recorded on Slurm 25.11. gpus: of each host, as scontrol tells."""
    text = (Path(__file__).resolve().parents[1] / "recordings" / "slurm-25.11" / f"{name}.json").read_text()
    environ = json.loads(text)["processes"][0]["environ"]
    allocation = current_allocation(environ, ask=False)
    assert allocation is not None
    if gpus:
        allocation = allocation._replace(gpus_per_host=gpus)
    return make(allocation, environ, options, programs=programs, host="node1")


@pytest.mark.parametrize("name", ["sbatch_het", "sbatch_het_gpus_per_task"])
def test_no_component_gets_the_number_of_tasks_of_the_first_one(name: str) -> None:
    made = recorded(name)  # srun reads SLURM_NTASKS=1 for every component, then those of the component itself
    assert made.ranks == (1, 2, 2) and "--het-group=0,1" in line(made)
    assert not {"SLURM_NTASKS", "SLURM_NPROCS", "SLURM_TRES_PER_TASK"} & set(made.environ)
    assert made.environ["SLURM_NTASKS_HET_GROUP_0"] == "1"
    assert made.environ["SLURM_NTASKS_PER_NODE_HET_GROUP_1"] == "2"


def test_no_component_gets_the_cores_for_a_task_of_the_first_one() -> None:
    made = recorded("sbatch_het_cpus_per_task")
    assert not {"SLURM_CPUS_PER_TASK", "SLURM_TRES_PER_TASK"} & set(made.environ)
    assert made.environ["SLURM_CPUS_PER_TASK_HET_GROUP_0"] == "4"


@pytest.mark.parametrize("options", [Options(torchrun=True), Options(by="mpiexec"), Options(ranks_per_node=2)])
def test_requests_for_the_tasks_of_a_component_are_none_for_other_tasks(options: Options) -> None:
    made = recorded("sbatch_het_gpus_per_task", options, (1, 2, 2), Programs(mpiexec=MPICH))
    assert made.gpus_to_claim == (1, 2, 2)
    names = {name for name in made.environ if name.startswith(("SLURM_TRES", "SLURM_NTASKS", "SLURM_NPROCS"))}
    assert names == set()


def test_the_gpus_of_a_component_are_asked_for_once() -> None:
    made = recorded("sbatch_het_gpus_per_node", Options(torchrun=True), (1, 2, 2))
    assert "--gres=gpu:1" in line(made) and "--gres=gpu:2" in line(made)
    assert not {name for name in made.environ if name.startswith("SLURM_GPUS_PER_NODE")}


@pytest.mark.parametrize("name", ["sbatch_2x2", "sbatch_het"])
@pytest.mark.parametrize("mpiexec", [MPICH, OPENMPI4, OPENMPI5])
def test_the_daemons_of_an_mpiexec_are_told_to_srun_as_slurm_wants_it(name: str, mpiexec: Mpiexec) -> None:
    made = recorded(name, Options(by="mpiexec"), programs=Programs(mpiexec=mpiexec))
    assert {made.environ.get(name) for name in (
        "OMPI_MCA_plm_slurm_args", "PRTE_MCA_plm_slurm_args", "HYDRA_LAUNCHER_EXTRA_ARGS",
        "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS")} == {"--external-launcher"}
    assert made.environ["HYDRA_BOOTSTRAP"] == made.environ["I_MPI_HYDRA_BOOTSTRAP"] == "slurm"


def test_open_mpi_starts_its_daemons_by_the_srun_on_path() -> None:
    other = Mpiexec("/usr/bin/mpiexec", "openmpi", 4, other_srun=True)  # /usr/bin/srun is of another Slurm
    made = make(job(), SLURM, Options(by="mpiexec"), programs=Programs(mpiexec=other))
    assert "/usr/bin/mpiexec --noprefix" in line(made) and made.environ["PATH"] == "/bin:/usr/bin"
    assert "--noprefix" not in line(make(job(), SLURM, Options(by="mpiexec"), programs=Programs(mpiexec=OPENMPI4)))


@pytest.mark.parametrize(("gpus", "claim"), [((2, 2, 2), "--gres=gpu:2 "), ((1, 2, 2), ""), ((0, 0, 0), "")])
def test_the_tasks_of_all_components_claim_their_gpus_where_all_have_the_same(gpus: tuple[int, ...],
                                                                              claim: str) -> None:
    made = make(job(ranks=(1, 2, 2), gpus=gpus), HET)
    assert f"--kill-on-bad-exit=1 {claim}--het-group=0,1 " in line(made)


def test_requests_for_tasks_are_none_for_other_tasks() -> None:
    environ = {**SLURM, "SLURM_NTASKS": "2", "SLURM_GPUS_PER_TASK": "4", "SLURM_NTASKS_PER_GPU": "1"}
    made = make(job(ranks=(1, 1), gpus=(4, 4)), environ)
    assert "--ntasks=8 --ntasks-per-node=4" in line(made) and "--gres=gpu:4" in line(made)
    assert not {"SLURM_NTASKS", "SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU"} & set(made.environ)


@pytest.mark.parametrize(("request_", "claims"), [("cpu:8", True), ("cpu=8,gres/gpu=1", False)])
def test_cores_for_a_task_are_no_request_for_gpus(request_: str, claims: bool) -> None:
    environ = {**SLURM, "SLURM_NTASKS": "2", "SLURM_TRES_PER_TASK": request_}
    assert ("--gres=gpu:1" in line(make(job(ranks=(1, 1), gpus=(1, 1)), environ))) == claims


def test_uneven_ranks_are_listed_without_a_number_of_nodes() -> None:
    made = make(job(ranks=(1, 1), gpus=(2, 1)), {**SLURM, "SLURM_JOB_NUM_NODES": "4"})  # refused since Slurm 23.11
    assert "--ntasks=3 --nodelist=@hosts@ --distribution=arbitrary" in line(made) and "--nodes" not in line(made)
    assert made.environ["SLURM_JOB_NUM_NODES"] == made.environ["SLURM_NNODES"] == "2"


def test_open_mpi_is_told_the_ranks_of_each_host_and_the_gpus_of_the_other_hosts() -> None:
    made = make(job(ranks=(1, 1, 1), gpus=(2, 4, 4)), {**SLURM, "SLURM_GPUS": "10"}, Options(by="mpiexec"),
                programs=Programs(mpiexec=OPENMPI5))
    told = {name: value for name, value in made.environ.items() if name.startswith("SLURM_") and name not in SLURM}
    assert told == {"SLURM_TASKS_PER_NODE": "2,4,4", "SLURM_GPUS_PER_NODE": "4"}


def test_the_daemons_of_an_mpiexec_share_a_surrounding_step_and_get_the_environment() -> None:
    environ = {**SLURM, "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_EXPORT_ENV": "NONE"}
    made = make(job(ranks=(2, 2)), environ, Options(by="mpiexec"), programs=Programs(mpiexec=MPICH))
    assert {name: made.environ[name] for name in ("SLURM_OVERLAP", "SLURM_CPU_BIND", "SLURM_EXPORT_ENV")} == {
        "SLURM_OVERLAP": "1", "SLURM_CPU_BIND": "none", "SLURM_EXPORT_ENV": "ALL"}


@pytest.mark.parametrize(("ranks", "cores", "options", "refused"), [
    ((0, 2, 2), (1, 2, 2), Options(by="mpiexec"), True),
    ((0, 2, 2), (1, 2, 2), Options(by="mpiexec", hosts="n3"), False),  # nothing is started on the first one with slots
    ((0, 2, 2), (4, None, None), Options(by="mpiexec"), False),  # other names of the same hosts
    ((2, 2, 0), (2, 2, 1), Options(by="mpiexec"), False),
    ((0, 0, 0), (2, 2, 1), Options(by="mpiexec", ranks_per_node=2), False)])
def test_hydra_is_refused_where_the_first_host_of_a_pbs_job_would_wait_for_ever(
        ranks: tuple[int, ...], cores: tuple[int | None, ...], options: Options, refused: bool) -> None:
    with pytest.raises(PlanError, match="n1 has no slot") if refused else contextlib.nullcontext():
        make(job("pbs", ranks, cores=cores), PBS, options, programs=Programs(mpiexec=MPICH))


def test_of_a_heterogeneous_job_a_part_cannot_be_chosen() -> None:
    with pytest.raises(PlanError, match="--hosts was given in a heterogeneous job"):
        make(job(ranks=(1, 2, 2)), HET, Options(hosts="2"))


def test_uneven_ranks_within_a_component_cannot_be_told_to_srun() -> None:
    with pytest.raises(PlanError, match=r"n2, n3 are one component .* different numbers of ranks \(2, 1\)"):
        line(make(job(ranks=(1, 1, 1), gpus=(1, 2, 1)), HET))


@pytest.mark.parametrize(("mpiexec", "options"), [
    (MPICH, "-launcher ssh -launcher-exec @remote-shell@"), (OPENMPI5, "--prtemca ras ^slurm,tm,pbs --prtemca plm ssh"),
    (OPENMPI4, "--mca ras ^slurm,tm,pbs --mca plm rsh")])
def test_an_mpiexec_reaches_every_component_by_a_srun_of_its_own(mpiexec: Mpiexec, options: str) -> None:
    made = make(job(ranks=(1, 2, 2), gpus=(1, 2, 2)), HET, Options(by="mpiexec"), programs=Programs(mpiexec=mpiexec))
    assert made.remote_shell == "/bin/srun" and gpus_of_components(made) == [1, 2]
    assert options in line(made).replace("'", "")


def test_export_none_of_sbatch_does_not_keep_the_environment_from_the_ranks() -> None:
    assert "--export=ALL" in line(make(job(), {**SLURM, "SLURM_EXPORT_ENV": "NONE"}))


def test_under_srun_torchrun_agents_get_all_cores_of_their_host() -> None:
    environ = {**SLURM, "SLURM_NTASKS": "4", "SLURM_GPUS_PER_TASK": "1"}
    made = make(job(ranks=(2, 2), cores=(8, 8)), environ, Options(torchrun=True))
    assert made.agents
    assert "--nodes=2 --ntasks=2 --ntasks-per-node=1 --distribution=block --cpus-per-task=8" in line(made)
    assert "SLURM_GPUS_PER_TASK" not in made.environ


@pytest.mark.parametrize(("gpus", "environ", "asked"), [
    ((4, 4), {}, "4"), ((4, 4), {"SLURM_GPUS": "8"}, None), ((4, 2), {}, None), ((0, 0), {}, None)])
def test_the_step_of_an_mpiexec_asks_for_the_gpus_of_whole_nodes(gpus: tuple[int, ...], environ: dict[str, str],
                                                                 asked: str | None) -> None:
    made = make(job(ranks=(4, 4), gpus=gpus), {**SLURM, **environ}, Options(by="mpiexec"),
                programs=Programs(mpiexec=MPICH))
    assert made.environ.get("SLURM_GPUS_PER_NODE") == asked


# mpiexec --------------------------------------------------------------------------------------------------------------

def by_mpiexec(mpiexec: Mpiexec, environ: Mapping[str, str] = PBS, *, tools: Mapping[str, str] = TOOLS,
               ranks: tuple[int, ...] = (2, 1), cores: tuple[int | None, ...] | None = None, root: bool = False,
               torchrun: bool = False) -> Plan:
    scheduler = "slurm" if "SLURM_JOB_ID" in environ else "pbs"
    return make(job(scheduler, ranks, cores=cores), environ, Options(by="mpiexec", torchrun=torchrun),
                programs=Programs(tools, mpiexec), root=root)


def test_hydra_gets_hosts_with_their_ranks_and_pbs_tmrsh_in_place_of_ssh() -> None:
    made = by_mpiexec(MPICH)
    assert line(made).startswith("/mpich/mpiexec -launcher ssh -launcher-exec @remote-shell@ -f @hosts@ -n 3 ")
    assert host_file(made) == "n1:2\nn2:1\n"


def test_hydra_uses_ssh_by_itself_where_there_is_no_pbs_tmrsh() -> None:
    assert line(by_mpiexec(MPICH, tools={})).startswith("/mpich/mpiexec -f @hosts@ -n 3 ")


def test_hydra_starts_its_daemons_by_srun_in_a_slurm_job() -> None:
    assert "-launcher slurm" in line(by_mpiexec(MPICH._replace(kind="intel-mpi"), SLURM))


def test_open_mpi_is_told_every_variable_but_those_of_this_host() -> None:
    environ = {**PBS, "FOO": "a\nb", "HOSTNAME": "n1", "TMPDIR": "/tmp/1", "SSH_TTY": "x", "OMPI_MCA_x": "1"}
    made = by_mpiexec(OPENMPI5, environ)
    assert "--bind-to none --hostfile @hosts@ -x FOO -x PATH -n 3" in line(made)
    assert host_file(made) == "n1 slots=2\nn2 slots=1\n"


def test_open_mpi_gives_no_host_the_gpu_mask_of_another_that_the_scheduler_sets() -> None:
    environ = {**SLURM, "CUDA_VISIBLE_DEVICES": "0"}
    assert "CUDA_VISIBLE_DEVICES" not in line(by_mpiexec(OPENMPI5, environ))


@pytest.mark.parametrize("kind", ["mpich", "intel-mpi"])
def test_hydra_gives_no_host_the_gpu_mask_of_another_either(kind: str) -> None:
    environ = {**SLURM, "CUDA_VISIBLE_DEVICES": "0", "HOSTNAME": "n1", "FOO": "1"}
    assert "-genvlist FOO,PATH -" in line(by_mpiexec(MPICH._replace(kind=kind), environ))
    assert "-genvlist" not in line(by_mpiexec(MPICH, {**PBS, "CUDA_VISIBLE_DEVICES": "0"}, tools={}))  # by plain ssh


@pytest.mark.parametrize(("mpiexec", "option"), [(OPENMPI4, "--mca plm_rsh"),
                                                 (OPENMPI5, "--prtemca plm_ssh")])
def test_each_open_mpi_names_its_remote_shell_differently(mpiexec: Mpiexec, option: str) -> None:
    made = by_mpiexec(mpiexec)
    assert f"{option}_agent '{made.python} -I " in line(made)


def test_a_python_in_a_folder_with_a_space_is_a_remote_shell_by_the_one_behind_it(tmp_path: Path) -> None:
    (tmp_path / "a folder").mkdir()
    (tmp_path / "a folder" / "python").symlink_to(sys.executable)
    made = by_mpiexec(OPENMPI5)._replace(python=str(tmp_path / "a folder" / "python"))
    assert f"plm_ssh_agent '{os.path.realpath(sys.executable)} -I " in line(made)
    with pytest.raises(PlanError, match="PYTHON"):
        line(made._replace(python="/no such folder/python"))


def test_open_mpi_lets_the_superuser_pass() -> None:
    assert "--allow-run-as-root" in line(by_mpiexec(OPENMPI4, root=True))
    assert "--allow-run-as-root" not in line(by_mpiexec(OPENMPI4))


def test_pals_gets_the_cores_of_a_rank_and_ranks_get_the_world_size() -> None:
    made = by_mpiexec(PALS, ranks=(4, 4), cores=(32, 32))
    assert line(made).startswith(f"{PALS.path} -n 8 --ppn 4 --depth 8 --cpu-bind depth /env/bin/python -u train.py")
    assert made.environ["WORLD_SIZE"] == "8"


def test_pals_is_told_the_hosts_where_the_node_file_does_not_list_them() -> None:
    assert "--hosts n1,n2" in line(by_mpiexec(PALS, {**PBS, "PBS_NODEFILE": ""}, ranks=(2, 2)))


def test_pals_does_not_bind_torchrun_to_a_core() -> None:
    assert "-n 2 --ppn 1 --cpu-bind none" in line(by_mpiexec(PALS, ranks=(4, 4), cores=(32, 32), torchrun=True))


def test_pals_cannot_start_uneven_ranks_and_says_what_can() -> None:
    with pytest.raises(PlanError, match="different numbers of ranks .2, 1..*--by pbs_tmrsh"):
        line(by_mpiexec(PALS))


# Agents ---------------------------------------------------------------------------------------------------------------

def test_agents_number_the_ranks_host_by_host() -> None:
    made = make(job("pbs", (1, 2)), PBS)
    (first, second) = host_words(made, 1, "10.0.0.1", "29500", "10.0.0.2")
    assert first[0] == [PYTHON, "-u", "train.py", "--name", "a b"]
    assert first[1] == {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "1",
                        "GROUP_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    assert second[1]["RANK"] == "2" and second[1]["LOCAL_RANK"] == "1"


@pytest.mark.parametrize(("means", "words"), [
    ("pbs_tmrsh", ["/bin/pbs_tmrsh", "n2", "agent", "x y"]),
    ("pbsdsh", ["/bin/pbsdsh", "-h", "n2", "--", "agent", "x y"]),
    ("ssh", ["/bin/ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=30", "-T", "n2", "exec agent 'x y'"])])
def test_an_agent_is_started_out_of_reach_of_the_stops_of_pbs(means: str, words: list[str]) -> None:
    made = make(job("pbs"), PBS, Options(by=means))
    shell, option, script, _, *rest = starter(made, "n2", ["agent", "x y"])
    assert (shell, option) == ("/bin/sh", "-c") and script.startswith("trap '' TERM INT USR1 USR2 HUP; exec")
    assert rest == words


def test_python_finds_its_libraries_although_pbs_passes_nothing_on() -> None:
    made = make(job("pbs"), {**PBS, "LD_LIBRARY_PATH": "/env/lib"})
    assert starter(made, "n2", ["agent"])[-3:] == ["/usr/bin/env", "LD_LIBRARY_PATH=/env/lib", "agent"]


def test_a_program_that_is_no_script_is_run_as_it_is() -> None:
    assert make(None, {}, command=("bash", "-c", "echo")).program == ("bash", "-c", "echo")


def test_torchrun_agents_are_numbered_by_host() -> None:
    made = make(job("pbs", (1, 1), (2, 3)), PBS, Options(torchrun=True))
    ((words, _),) = host_words(made, 1, "10.0.0.1", "29500", "10.0.0.2")
    assert words == [PYTHON, "-m", "torch.distributed.run", "--nproc-per-node=3", "--max-restarts=0", "--nnodes=2",
                     "--node-rank=1", "--master-addr=10.0.0.1", "--master-port=29500", "--local-addr=10.0.0.2",
                     "train.py", "--name", "a b"]


def test_restarts_need_torchrun_and_a_store_that_one_host_is_told_to_keep() -> None:
    made = make(job("pbs"), PBS, Options(restarts=2))
    assert made.options.torchrun
    words = [host_words(made, host, "10.0.0.1", "29500", "10.0.0.9")[0][0] for host in (0, 1)]
    assert all({"--rdzv-backend=c10d", "--max-restarts=2"} <= set(each) for each in words)
    assert "--rdzv-conf=is_host=1" in words[0] and "--rdzv-conf=is_host=0" in words[1]


def test_torchrun_on_one_host_finds_its_own_port() -> None:
    made = make(None, {}, Options(torchrun=True, ranks_per_node=2), command=("./program", "x"))
    ((words, _),) = host_words(made, 0, "127.0.0.1", "1", "127.0.0.1")
    assert words[3:] == ["--nproc-per-node=2", "--max-restarts=0", "--standalone", "--no-python", "./program", "x"]


# The environment ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("omp", "ncpus", "cores", "threads"), [
    ("8", "8", 8, 2), ("8", "8", None, 2), ("2", "2", 16, 2), ("1", "1", 4, 1), ("64", "64", 2, 1),
    ("7", "8", 8, None),  # a person's
    ("", "8", 8, None)])
def test_threads_that_pbs_counts_for_a_chunk_are_divided_among_its_ranks(
        omp: str, ncpus: str, cores: int | None, threads: int | None) -> None:
    made = make(job("pbs", (4, 4), cores=(cores, cores)), {**PBS, "OMP_NUM_THREADS": omp, "NCPUS": ncpus})
    assert made.threads == (threads, threads)


def test_one_command_for_all_hosts_takes_the_fewest_threads() -> None:
    made = by_mpiexec(MPICH, {**PBS, "OMP_NUM_THREADS": "8", "NCPUS": "8"}, ranks=(2, 4), cores=(8, 8))
    assert made.environ["OMP_NUM_THREADS"] == "2"


def test_torchrun_is_kept_from_one_thread_for_each_rank() -> None:
    assert make(job("slurm", (4, 4), cores=(16, 16)), SLURM, Options(torchrun=True)).threads == (4, 4)


def test_what_other_launches_left_behind_is_removed() -> None:
    environ = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "x", "MASTER_PORT": "1", "PMI_RANK": "0", "PMI_FD": "9",
               "OMPI_COMM_WORLD_RANK": "1", "SLURM_PROCID": "0", "TORCHELASTIC_RUN_ID": "x", "PALS_RANKID": "0",
               "PBS_NODEFILE": "/aux/7", "SLURM_NTASKS": "4", "MINE": "1"}
    assert clean(environ) == {"PBS_NODEFILE": "/aux/7", "SLURM_NTASKS": "4", "MINE": "1"}


def test_an_address_that_a_person_has_chosen_is_kept() -> None:
    assert clean({"MASTER_ADDR": "x", "MASTER_PORT": "1"}) == {"MASTER_ADDR": "x", "MASTER_PORT": "1"}


# For a person ---------------------------------------------------------------------------------------------------------

def test_what_starts_where_is_told_in_one_line() -> None:
    assert next(describe(make(job("pbs", (2, 1)), PBS))) == "3 ranks on 2 hosts (1 to 2 each) by pbs_tmrsh"
    assert next(describe(make(None, {}, host="laptop"))) == "1 rank on laptop alone"
    assert next(describe(by_mpiexec(OPENMPI5, torchrun=True))) == (
        "3 ranks on 2 hosts (1 to 2 each) by Open MPI's mpiexec, with one torchrun agent on each")


def test_the_printed_command_of_a_native_means_can_be_pasted() -> None:
    plain = by_mpiexec(MPICH, tools={})
    [line] = printed(plain, {**plain.environ, "STALE": "1", "CHANGED": "1"})
    assert line == ("""hosts=$(mktemp) && printf 'n1:2\\nn2:1\\n' >"$hosts" && chmod 600 "$hosts" && """
                    "env -u STALE -u CHANGED /mpich/mpiexec -f \"$hosts\" -n 3 "
                    "/env/bin/python -u train.py --name 'a b'")


def test_the_printed_command_of_agents_is_that_of_each_rank() -> None:
    lines = list(printed(make(job("pbs", (1, 1)), PBS), PBS))
    assert len(lines) == 2
    assert lines[1] == ("/bin/pbs_tmrsh n2 env RANK=1 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 NODE_RANK=1 "
                        "GROUP_RANK=1 'MASTER_ADDR=<n1>' 'MASTER_PORT=<free port>' "
                        "/env/bin/python -u train.py --name 'a b'")


# pbs_tmrsh as a remote shell ------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("arguments", "words"), [
    (["-x", "n2", "cd / && exec orted"], ["n2.pbs.lab", "/bin/sh", "-c", "cd / && exec orted"]),
    (["-o", "A=b", "n1.pbs.lab", '"proxy"', "--id", "1"], ["n1.pbs.lab", "/bin/sh", "-c", '"proxy" --id 1']),
    (["elsewhere", "true"], ["elsewhere", "/bin/sh", "-c", "true"])])
def test_pbs_tmrsh_gets_the_name_in_the_node_file_and_a_line_of_shell(arguments: list[str], words: list[str]) -> None:
    assert remote_shell.translate(arguments, ["n1.pbs.lab\n", "n2.pbs.lab\n"]) == words


def test_srun_as_a_remote_shell_is_told_the_component_of_the_host() -> None:
    words = remote_shell.step_words(["-x", "n3", "exec proxy --id 2"], [["n1"], ["n2", "n3"]], [0, 2])
    assert words[:2] == ["--het-group=1", "--nodelist=n3"]
    assert words[-4:] == ["--gres=gpu:2", "/bin/sh", "-c", "exec proxy --id 2"]


def test_the_words_of_the_remote_shell_survive_an_mpiexec_that_splits_and_double_quotes_them() -> None:
    words = remote_shell.words(PYTHON)
    assert not any(character in word for word in words for character in ' "$`\\')


# GPUs that PBS shares out without saying which ------------------------------------------------------------------------

def test_a_part_of_the_gpus_of_a_pbs_host_without_a_mask_gets_a_note_with_the_cure() -> None:
    made = make(job("pbs", gpus=(2, 2)), PBS, gpus=4)
    assert any("holds 2 of the 4 GPUs of n1" in note and "scatter:excl" in note for note in made.notes)


@pytest.mark.parametrize(("scheduler", "gpus", "environ"), [
    ("pbs", 2, PBS), ("pbs", 4, {**PBS, "CUDA_VISIBLE_DEVICES": "0,1"}), ("slurm", 4, SLURM)])
def test_all_the_gpus_of_a_host_or_a_mask_get_no_such_note(scheduler: str, gpus: int,
                                                            environ: Mapping[str, str]) -> None:
    made = make(job(scheduler, gpus=(2, 2)), environ, gpus=gpus)
    assert not any("GPUs of n1, and PBS" in note for note in made.notes)
