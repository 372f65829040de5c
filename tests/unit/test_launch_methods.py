"""The command line and environment of each launch method: srun, mpiexecs, agents."""
from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.launch_plans import INTEL, MPICH, OPENMPI4, OPENMPI5, PALS, Programs, het, line, make, pbs, slurm
from utils.launch import remote_shell
from utils.launch.methods.srun import Srun, srun_ports, step_of
from utils.launch.plan import Mpiexec, Plan, PlanError
from utils.launch.srun_errors import SrunErrors, TaskFailure
from utils.schedulers import current_allocation

RECORDINGS = Path(__file__).resolve().parents[1] / "recordings" / "slurm-25.11"
END = "/env/bin/python -u train.py --name 'a b'"


def recorded(name: str, gpus: tuple[int, ...] = (), **options: object) -> Callable[[], Plan]:
    """Plans a launch in the batch shell of a job recorded on Slurm 25.11. gpus: of each host."""
    environ = json.loads((RECORDINGS / f"{name}.json").read_text())["processes"][0]["environ"]
    allocation = current_allocation(environ, query=False)
    allocation = allocation._replace(gpus_per_host=gpus) if gpus else allocation
    return functools.partial(make, allocation, environ, host="node1", **options)


OF_HOST = {"CUDA_VISIBLE_DEVICES": "0", "HOSTNAME": "n1", "FOO": "1"}


@pytest.mark.parametrize(("plan", "expected"), [
    # The job asked for these very tasks: they are left to Slurm.
    (slurm({"SLURM_NTASKS": "3"}, ranks=(2, 1), cores=(8, 4)),
     "/bin/srun --kill-on-bad-exit=1 --cpus-per-task=4 " + END),
    (slurm({"SLURM_NTASKS": "4", "SLURM_CPUS_PER_TASK": "3"}, cores=(8, 8)), "--cpus-per-task=3 "),
    (slurm({"SLURM_NTASKS": "4"}, nodes=2), "/bin/srun --kill-on-bad-exit=1 " + END),
    # One rank for each GPU, of which a step gets none by itself on nodes asked for whole.
    (slurm(ranks=(1, 1), gpus=(4, 4), cores=(32, 32)),
     "--nodes=2 --ntasks=8 --ntasks-per-node=4 --distribution=block --cpus-per-task=8 --gres=gpu:4"),
    (slurm({"SLURM_GPUS_PER_NODE": "4"}, ranks=(1, 1), gpus=(4, 4)),
     "--ntasks-per-node=4 --distribution=block " + END),
    # Without --nodes, which is refused together with a list of hosts since Slurm 23.11.
    (slurm(ranks=(1, 1), gpus=(2, 1)),
     "=1 --ntasks=3 --nodelist=@hosts@ --distribution=arbitrary --gpus=3 " + END),
    # Requests of the job for its own tasks do not apply to other tasks.
    (slurm({"SLURM_NTASKS": "2", "SLURM_GPUS_PER_TASK": "4"}, ranks=(1, 1), gpus=(4, 4)),
     "--ntasks=8 --ntasks-per-node=4 --distribution=block --gres=gpu:4 "),
    (slurm({"SLURM_NTASKS": "2", "SLURM_TRES_PER_TASK": "cpu:8"}, ranks=(1, 1), gpus=(1, 1)),
     "/bin/srun --kill-on-bad-exit=1 --gres=gpu:1 "),
    (slurm({"SLURM_NTASKS": "2", "SLURM_TRES_PER_TASK": "cpu=8,gres/gpu=1"}, ranks=(1, 1), gpus=(1, 1)),
     "/bin/srun --kill-on-bad-exit=1 " + END),
    (slurm(ranks=(1, 1), cores=(1, 1), ntasks_per_node=2), "--overcommit"),
    (slurm({"SLURM_EXPORT_ENV": "NONE"}), "--export=ALL"),
    (slurm(label=True), "/bin/srun --label "),
    # A step inside a step shares its resources and forgets its shape.
    (slurm({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "1", "SLURM_CPU_BIND": "mask_cpu:1"}),
     "--nodes=2 --ntasks=4 --ntasks-per-node=2 --distribution=block --overlap"),
    # A torchrun agent gets all cores of its host.
    (slurm({"SLURM_NTASKS": "4", "SLURM_GPUS_PER_TASK": "1"}, cores=(8, 8), torchrun=True),
     "--nodes=2 --ntasks=2 --ntasks-per-node=1 --distribution=block --cpus-per-task=8"),
    # Tasks of all components of a heterogeneous job are one step.
    (het(), "--kill-on-bad-exit=1 --het-group=0,1 " + END),
    (het(gpus=(2, 2, 2)), "--kill-on-bad-exit=1 --gres=gpu:2 --het-group=0,1 " + END),
    (het(gpus=(1, 2, 2)), "--kill-on-bad-exit=1 --het-group=0,1 " + END),
    # Other ranks are spelled out for each component.
    (het({"SLURM_NTASKS_PER_NODE": "2"}, ranks=(1, 1, 1), gpus=(0, 2, 2), cores=(2, 8, 8), command=("a",)),
     "/bin/srun --het-group=0 --kill-on-bad-exit=1 --nodes=1 --ntasks=1 --ntasks-per-node=1 "
     "--distribution=block --cpus-per-task=2 a : --het-group=1 --kill-on-bad-exit=1 --nodes=2 "
     "--ntasks=4 --ntasks-per-node=2 --distribution=block --cpus-per-task=4 --gres=gpu:2 a"),
    (het(torchrun=True), "--het-group=1 --kill-on-bad-exit=1 --nodes=2 --ntasks=2 --ntasks-per-node=1 "),
    (recorded("sbatch_het_gpus_per_node", (1, 2, 2), torchrun=True), "--cpus-per-task=2 --gres=gpu:2 "),
    # Hydra
    (pbs(ranks=(2, 1), mpiexec=MPICH), "/mpich/mpiexec -launcher ssh -launcher-exec @remote-shell@ -f @hosts@ -n 3 "),
    (pbs(ranks=(2, 1), mpiexec=MPICH, programs=Programs({})), "/mpich/mpiexec -f @hosts@ -n 3 "),
    (pbs(mpiexec=MPICH, label=True), "-prepend-rank -f @hosts@"),
    (slurm(ranks=(2, 1), mpiexec=INTEL), "/intel/mpiexec -launcher slurm -machinefile @hosts@ -n 3 "),
    (pbs(mpiexec=INTEL, torchrun=True), "-genv I_MPI_PIN off -machinefile @hosts@ -n 2 "),
    # Variables of one host are not passed on, nor is its GPU mask where each host has its own.
    (slurm(OF_HOST, mpiexec=MPICH), "-genvlist FOO,PATH -"),
    (slurm(OF_HOST, mpiexec=INTEL), "-genvlist FOO,PATH -"),
    (pbs(OF_HOST, mpiexec=MPICH, programs=Programs({})), "/mpich/mpiexec -f @hosts@"),  # by plain ssh
    # Open MPI
    (slurm({"CUDA_VISIBLE_DEVICES": "0"}, mpiexec=OPENMPI5), "--hostfile @hosts@ -x PATH -n 4"),
    (pbs({"FOO": "a\nb", "HOSTNAME": "n1", "TMPDIR": "/tmp/1", "SSH_TTY": "x", "OMPI_MCA_x": "1"}, mpiexec=OPENMPI5),
     "--bind-to none --hostfile @hosts@ -x FOO -x PATH -n 4"),
    (pbs(mpiexec=OPENMPI4), "/o4/mpiexec --mca "),
    (pbs(mpiexec=OPENMPI4), "--mca plm_rsh_agent '/env/bin/python -I "),
    (pbs(mpiexec=OPENMPI5), "--prtemca plm_ssh_agent '/env/bin/python -I "),
    (pbs(mpiexec=OPENMPI4, root=True), "/o4/mpiexec --allow-run-as-root "),
    (pbs(mpiexec=OPENMPI4, label=True), "--tag-output"),
    (pbs(mpiexec=OPENMPI5, label=True), "--output tag"),
    (slurm(mpiexec=OPENMPI4), "/o4/mpiexec --bind-to none"),
    (slurm(mpiexec=OPENMPI4._replace(other_srun=True)), "/o4/mpiexec --noprefix"),
    # PALS
    (pbs(ranks=(4, 4), cores=(32, 32), mpiexec=PALS), f"{PALS.path} -n 8 --ppn 4 --depth 8 --cpu-bind depth {END}"),
    (pbs({"PBS_NODEFILE": ""}, mpiexec=PALS), "--hosts n1,n2"),
    (pbs(ranks=(2, 2, 2), mpiexec=PALS, nodes=2), "--hosts n1,n2"),
    (pbs(ranks=(4, 4), mpiexec=PALS, torchrun=True), "-n 2 --ppn 1 --cpu-bind none")])
def test_command_line(plan: Callable[[], Plan], expected: str) -> None:
    assert expected in line(plan())


@pytest.mark.parametrize(("plan", "expected", "absent"), [
    (slurm({"SLURM_NTASKS": "3", "SLURM_DISTRIBUTION": "cyclic"}, ranks=(2, 1)),
     {"SLURM_DISTRIBUTION": "cyclic", "SLURM_NTASKS": "3"}, ""),
    (slurm({"SLURM_NTASKS": "2", "SLURM_GPUS_PER_TASK": "4", "SLURM_NTASKS_PER_GPU": "1"}, ranks=(1, 1), gpus=(4, 4)),
     {}, "SLURM_(NTASKS|GPUS_PER).*"),
    (slurm({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "1", "SLURM_CPU_BIND": "x", "SLURM_PROCID": "0"}),
     {}, "SLURM_(STEP_ID|NTASKS|CPU_BIND|PROCID)"),
    (slurm({"SLURM_JOB_NUM_NODES": "4"}, ranks=(1, 1), gpus=(2, 1)),
     {"SLURM_JOB_NUM_NODES": "2", "SLURM_NNODES": "2"}, ""),
    (het({"SLURM_NTASKS_PER_NODE": "2"}, ranks=(1, 1, 1), gpus=(0, 2, 2)), {}, "SLURM_NTASKS_PER_NODE"),
    # srun applies SLURM_NTASKS=1 to every component, then the number of the component itself.
    (recorded("sbatch_het_gpus_per_task"),
     {"SLURM_NTASKS_HET_GROUP_0": "1", "SLURM_NTASKS_PER_NODE_HET_GROUP_1": "2"},
     "SLURM_(NTASKS|NPROCS|TRES_PER_TASK)"),
    (recorded("sbatch_het_cpus_per_task"),
     {"SLURM_CPUS_PER_TASK_HET_GROUP_0": "4"}, "SLURM_(CPUS|TRES)_PER_TASK"),
    *((recorded("sbatch_het_gpus_per_task", (1, 2, 2), **options), {}, "SLURM_(TRES|NTASKS|NPROCS).*")
      for options in ({"torchrun": True}, {"mpiexec": MPICH}, {"ntasks_per_node": 2})),
    (recorded("sbatch_het_gpus_per_node", (1, 2, 2), torchrun=True), {}, "SLURM_GPUS_PER_NODE.*"),  # options claim them
    # What Slurm tells an mpiexec is kept.
    *((recorded(name, mpiexec=mpiexec), {
        "OMPI_MCA_plm_slurm_args": "--external-launcher", "PRTE_MCA_plm_slurm_args": "--external-launcher",
        "HYDRA_LAUNCHER_EXTRA_ARGS": "--external-launcher", "HYDRA_BOOTSTRAP": "slurm",
        "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS": "--external-launcher", "I_MPI_HYDRA_BOOTSTRAP": "slurm"}, "")
      for name, mpiexec in (("sbatch_2x2", MPICH), ("sbatch_2x2", OPENMPI4), ("sbatch_het", OPENMPI5))),
    # The daemons of an mpiexec on nodes asked for whole, on some GPUs, in a step
    (slurm(gpus=(4, 4), mpiexec=MPICH), {"SLURM_GPUS_PER_NODE": "4"}, "SLURM_GPUS"),
    (slurm({"SLURM_GPUS": "8"}, gpus=(4, 4), mpiexec=MPICH), {"SLURM_GPUS": "8"}, "SLURM_GPUS_PER_NODE"),
    (slurm(gpus=(4, 2), mpiexec=MPICH), {"SLURM_GPUS": "6"}, "SLURM_GPUS_PER_NODE"),
    (slurm(gpus=(0, 0), mpiexec=MPICH), {}, "SLURM_(GPUS|OVERLAP|CPU_BIND|EXPORT).*"),
    (slurm({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_EXPORT_ENV": "NONE"}, mpiexec=MPICH),
     {"SLURM_OVERLAP": "1", "SLURM_CPU_BIND": "none", "SLURM_EXPORT_ENV": "ALL"}, "SLURM_(STEP_ID|PROCID)"),
    # Its srun leaves this host out; it starts no more ranks than SLURM_TASKS_PER_NODE allows.
    (slurm({"SLURM_GPUS": "10"}, ranks=(1, 1, 1), gpus=(2, 4, 4), mpiexec=OPENMPI5),
     {"SLURM_TASKS_PER_NODE": "2,4,4", "SLURM_GPUS_PER_NODE": "4"}, "SLURM_GPUS"),
    # The srun of an Open MPI beside another Slurm is found last.
    (slurm(mpiexec=OPENMPI4._replace(path="/usr/bin/mpiexec", other_srun=True)), {"PATH": "/bin:/usr/bin"}, ""),
    (pbs(mpiexec=PALS), {"WORLD_SIZE": "4"}, ""), (pbs(mpiexec=PALS, torchrun=True), {}, "WORLD_SIZE")])
def test_environment_of_the_command(plan: Callable[[], Plan], expected: dict[str, str], absent: str) -> None:
    environ = plan().environ
    assert expected.items() <= environ.items()
    assert not [name for name in environ if re.fullmatch(absent, name)]


@pytest.mark.parametrize(("plan", "message"), [
    (het(ranks=(1, 1, 1), nodes=2), "--nodes or --nodelist was given in a heterogeneous job"),
    (het(ranks=(1, 1, 1), gpus=(1, 2, 1)), r"n2, n3 are one component .* different numbers of ranks \(2, 1\)"),
    (pbs(ranks=(2, 1), mpiexec=PALS), "different numbers of ranks .2, 1..*--launcher pbs_tmrsh"),
    (pbs(mpiexec=OPENMPI5, python="/no such folder/python"), "PYTHON"),
    # Hydra would wait for ever, unless nothing starts on the first host with slots.
    (pbs(ranks=(0, 2, 2), cores=(1, 2, 2), mpiexec=MPICH), "n1 has no slot"),
    (pbs(ranks=(0, 2, 2), cores=(1, 2, 2), mpiexec=MPICH, nodelist="n3"), ""),
    (pbs(ranks=(0, 2, 2), cores=(4, None, None), mpiexec=MPICH), ""),  # other names of the same hosts
    (pbs(ranks=(2, 2, 0), cores=(2, 2, 1), mpiexec=MPICH), ""),
    (pbs(ranks=(0, 0, 0), cores=(2, 2, 1), mpiexec=MPICH, ntasks_per_node=2), "")])
def test_what_a_method_cannot_start_is_refused(plan: Callable[[], Plan], message: str) -> None:
    with pytest.raises(PlanError, match=message) if message else contextlib.nullcontext():
        line(plan())


@pytest.mark.parametrize(("plan", "text"), [
    (slurm(ranks=(1, 1), gpus=(2, 1)), "n1\nn1\nn2\n"), (pbs(ranks=(2, 1), mpiexec=MPICH), "n1:2\nn2:1\n"),
    (pbs(ranks=(2, 1), mpiexec=OPENMPI5), "n1 slots=2\nn2 slots=1\n")])
def test_host_file(plan: Callable[[], Plan], text: str) -> None:
    found = plan()
    assert found.method.host_file(found) == text


@pytest.mark.parametrize("nodelist", ["n2,n4", "n[4,2]", "n4,n2.cluster"])
def test_srun_on_a_part_of_the_job_names_its_hosts(nodelist: str) -> None:
    environ = {"SLURM_NTASKS": "8", "SLURM_GPUS": "8"}  # srun would ask for 8 again
    plan = slurm(environ, ranks=(2,) * 4, gpus=(2,) * 4, nodelist=nodelist)()
    assert (plan.hosts, plan.ranks) == (("n2", "n4"), (2, 2))
    options = "--nodes=2 --ntasks=4 --ntasks-per-node=2 --distribution=block --nodelist=n2,n4"
    assert options in line(plan) and "--gres" not in line(plan)
    assert "SLURM_GPUS" not in plan.environ and plan.environ["SLURM_GPUS_PER_NODE"] == "2"


@pytest.mark.parametrize(("mpiexec", "options"), [
    (MPICH, "-launcher ssh -launcher-exec @remote-shell@"),
    (OPENMPI5, "--prtemca ras ^slurm,tm,pbs --prtemca plm ssh"),
    (OPENMPI4, "--mca ras ^slurm,tm,pbs --mca plm rsh")])
def test_mpiexec_reaches_every_component_with_srun(mpiexec: Mpiexec, options: str) -> None:
    plan = het(gpus=(1, 2, 2), mpiexec=mpiexec)()
    assert "main('/bin/srun', sys.argv[1:], [1, 2])" in plan.method.variables(plan)[remote_shell.VARIABLE]
    assert options in line(plan).replace("'", "")


def test_openmpi_with_a_python_in_a_folder_with_a_space(tmp_path: Path) -> None:
    python = tmp_path / "a folder" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    found = line(pbs(mpiexec=OPENMPI5, python=str(python))())
    assert f"plm_ssh_agent '{os.path.realpath(sys.executable)} -I " in found


# Agents, and pbs_tmrsh and srun as remote shells


@pytest.mark.parametrize(("launcher", "words"), [
    ("pbs_tmrsh", ["/bin/pbs_tmrsh", "n2", "/usr/bin/env", "LD_LIBRARY_PATH=/lib", "agent", "1"]),
    ("pbsdsh", ["/bin/pbsdsh", "-h", "n2", "--", "/usr/bin/env", "LD_LIBRARY_PATH=/lib", "agent", "1"]),
    ("ssh", ["/bin/ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=30", "-T", "n2", "exec agent 1"])])
def test_agent_is_out_of_reach_of_the_stops_of_pbs(launcher: str, words: list[str]) -> None:
    plan = pbs({"LD_LIBRARY_PATH": "/lib"}, launcher=launcher)()
    starts = plan.method.agent_starts(plan, lambda index: ["agent", index], {"SECRET": "s"})
    shell, option, script, _, *rest = starts[1].words
    assert (shell, option) == ("/bin/sh", "-c") and script.startswith("trap '' TERM INT USR1 USR2")
    assert (rest, starts[1].hosts, starts[1].stdin) == (words, (1,), b"s\n")
    assert "SECRET" not in starts[1].environ


@pytest.mark.parametrize("mpiexec", [None, OPENMPI5])
def test_native_launcher_starts_all_agents(mpiexec: Mpiexec | None) -> None:
    plan = slurm(mpiexec=mpiexec, torchrun=True)()
    [start] = plan.method.agent_starts(plan, lambda index: ["agent", index], {"SECRET": "s"})
    assert (start.hosts, start.words[-2:], start.environ["SECRET"]) == ((0, 1), ["agent", "rank"], "s")
    assert mpiexec is None or "SECRET" in start.words  # -x SECRET


@pytest.mark.parametrize(("arguments", "words"), [
    (["-x", "n2", "cd / && exec orted"], ["n2.pbs.lab", "/bin/sh", "-c", "cd / && exec orted"]),
    (["-o", "A=b", "n1.pbs.lab", '"proxy"', "--id", "1"], ["n1.pbs.lab", "/bin/sh", "-c", '"proxy" --id 1']),
    (["elsewhere", "true"], ["elsewhere", "/bin/sh", "-c", "true"])])
def test_pbs_tmrsh_gets_the_name_in_the_node_file(arguments: list[str], words: list[str]) -> None:
    assert remote_shell.pbs_tmrsh_words(arguments, ["n1.pbs.lab\n", "n2.pbs.lab\n"]) == words


def test_srun_gets_the_component_of_the_host() -> None:
    words = remote_shell.srun_words(["-x", "n3", "exec proxy"], [["n1"], ["n2", "n3"]], [0, 2])
    assert words[:2] == ["--het-group=1", "--nodelist=n3"]
    assert words[-4:] == ["--gres=gpu:2", "/bin/sh", "-c", "exec proxy"]


def test_remote_shell_survives_splitting_and_double_quotes() -> None:
    assert not set("".join(remote_shell.words("/env/bin/python"))) & set(' "$`\\')


# What srun and scontrol report


@pytest.mark.parametrize(("text", "first"), [
    ("srun: error: node2: task 2: Exited with exit code 7\nsrun: error: node1: tasks 0-1: Killed\n",
     TaskFailure(7, "node2", "2")),
    ("srun: error: node2: task 2: Killed\nsrun: error: node1: tasks 0-1: Terminated\n",
     TaskFailure(137, "node2", "2")),
    ("srun: error: node2: tasks 2-3: Segmentation fault (core dumped)\n", TaskFailure(139, "node2", "2-3")),
    ("srun: error: Unable to create step for job 7: More processors requested than permitted\n", None)])
def test_first_task_that_failed(text: str, first: TaskFailure | None, capfd: pytest.CaptureFixture[str]) -> None:
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


def test_srun_passes_a_request_to_end_on_with_scancel(program: Callable[[str, str], None], tmp_path: Path) -> None:
    step = "StepId=7.{} UserId=0 State=RUNNING SrunHost:Pid=node1:{} CPUFreqReq=x"
    program("scontrol", f"cat <<'END'\n{step.format(0, 100)}\n{step.format(1, 10)}\nEND")
    program("scancel", f'echo "$*" > "{tmp_path}/words"')
    assert (step_of("7", 10), step_of("7", 11)) == ("7.1", "7")
    Srun("srun").send_signal(signal.SIGTERM, 10, slurm()(), None)
    assert (tmp_path / "words").read_text() == "--signal=TERM 7.1\n"


@pytest.mark.parametrize(("value", "ports"), [("60001-60010", range(60001, 60011)), ("0-0", range(0))])
def test_ports_that_compute_nodes_reach(program: Callable[[str, str], None], value: str, ports: range) -> None:
    program("scontrol", f"echo 'SlurmctldPort = 6817'; echo 'SrunPortRange           = {value}'")
    on_login, in_job = slurm(host="login")(), slurm()()
    assert srun_ports() == on_login.method.listen_ports(on_login) == ports
    assert not in_job.method.listen_ports(in_job)
