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

from tests.unit.launch_plans import INTEL, MPICH, OPENMPI4, OPENMPI5, PALS, line, make, pbs, slurm
from tests.unit.scheduler_commands import Commands
from utils.tools.launch import remote_shell
from utils.tools.launch.launch_plan import Plan, PlanError
from utils.tools.launch.launcher_lines import LauncherErrors, TaskFailure
from utils.tools.launch.methods.srun import Srun
from utils.tools.schedulers import current_allocation

RECORDINGS = Path(__file__).resolve().parents[1] / "recordings" / "slurm-25.11"
END = "/env/bin/python -u train.py --name 'a b'"


def recorded(name: str, **options: object) -> Callable[[], Plan]:
    """Plans a launch in the batch shell of a job recorded on Slurm 25.11."""
    environ = json.loads((RECORDINGS / f"{name}.json").read_text())["processes"][0]["environ"]
    return functools.partial(make, current_allocation(environ, query=False), environ, host="node1", **options)


@pytest.mark.parametrize(("plan", "expected"), [
    # The job asked for these very tasks: they are left to Slurm.
    (slurm({"SLURM_NTASKS": "3"}, ranks=(2, 1), cores=(8, 4)),
     "/bin/srun --kill-on-bad-exit=1 --cpu-bind=none --cpus-per-task=4 " + END),
    (slurm({"SLURM_NTASKS": "4", "SLURM_CPUS_PER_TASK": "3"}, cores=(8, 8)), "--cpus-per-task=3 "),
    # A batch script and an interactive step of Slurm 26.05
    (slurm({"SLURM_NTASKS": "4", "SLURM_STEP_ID": "-5"}, cores=(8, 8)), "--cpu-bind=none --cpus-per-task=4 " + END),
    (slurm({"SLURM_NTASKS": "4", "SLURM_STEP_ID": "-6"}, cores=(8, 8)), "--overlap --mem=0 --cpus-per-task=4 " + END),
    # Without --nodes, which is refused together with a list of hosts since Slurm 23.11.
    (slurm(ranks=(1, 1), gpus=(2, 1)), "=none --ntasks=3 --nodelist=@hosts@ --distribution=arbitrary --gpus=3 " + END),
    # Requests of the job for its own tasks do not apply to other tasks.
    (slurm({"SLURM_NTASKS": "2", "SLURM_TRES_PER_TASK": "cpu:8"}, ranks=(1, 1), gpus=(1, 1)),
     "/bin/srun --kill-on-bad-exit=1 --cpu-bind=none --gres=gpu:1 "),
    (slurm(ranks=(1, 1), cores=(1, 1), ranks_per_node=2), "--overcommit"),
    (slurm({"SLURM_EXPORT_ENV": "NONE"}), "--export=ALL"),
    (slurm({"SLURM_NTASKS": "4", "SLURM_CPU_BIND": "cores"}), "/bin/srun --kill-on-bad-exit=1 " + END),  # the user's
    (slurm(label=True, input=True), "/bin/srun --label --input=0 "),
    # A torchrun agent gets all cores of its host.
    (slurm({"SLURM_NTASKS": "4", "SLURM_GPUS_PER_TASK": "1"}, cores=(8, 8), torchrun=True),
     "--nodes=2 --ntasks=2 --ntasks-per-node=1 --distribution=block --cpus-per-task=8"),
    # Hydra
    (pbs(mpiexec=INTEL, torchrun=True), "-genv I_MPI_PIN off -machinefile @hosts@ -n 2 "),
    (slurm(ranks=(2, 1), mpiexec=INTEL), "-launcher slurm -genv I_MPI_PIN off -machinefile @hosts@ -n 3 "),
    (pbs({"I_MPI_PIN_DOMAIN": "numa"}, mpiexec=INTEL), "-launcher-exec @remote-shell@ -machinefile @hosts@ -n 4 "),
    # Variables of one host are not passed on, nor is its GPU mask where each host has its own.
    (slurm({"CUDA_VISIBLE_DEVICES": "0", "HOSTNAME": "n1", "FOO": "1"}, mpiexec=MPICH), "-genvlist FOO,PATH -"),
    # Open MPI
    (slurm({"CUDA_VISIBLE_DEVICES": "0"}, mpiexec=OPENMPI5), "--hostfile @hosts@ -x PATH -n 4"),
    (pbs({"FOO": "a\nb", "HOSTNAME": "n1", "TMPDIR": "/tmp/1", "SSH_TTY": "x", "OMPI_MCA_x": "1"}, mpiexec=OPENMPI5),
     "--bind-to none --hostfile @hosts@ -x FOO -x PATH -n 4"),
    (pbs(mpiexec=OPENMPI4), "--mca ras '^slurm,tm,pbs' --mca plm rsh"),
    (slurm(mpiexec=OPENMPI4._replace(other_srun=True)), "/o4/mpiexec --noprefix"),
    # PALS
    (pbs(ranks=(4, 4), cores=(32, 32), mpiexec=PALS), f"{PALS.path} -n 8 --ppn 4 --cpu-bind none {END}"),
    (pbs({"PBS_NODEFILE": ""}, mpiexec=PALS), "--hosts n1,n2"),
    (pbs(ranks=(2, 2, 2), mpiexec=PALS, nodes=2), "--hosts n1,n2"),
    (pbs(ranks=(4, 4), mpiexec=PALS, torchrun=True), "-n 2 --ppn 1 --cpu-bind none")])
def test_command_line(plan: Callable[[], Plan], expected: str) -> None:
    assert expected in line(plan())


@pytest.mark.parametrize(("plan", "expected", "absent"), [
    (slurm({"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_GPU": "1"}, ranks=(1, 1), gpus=(4, 4)), {}, "SLURM_NTASKS.*"),
    (slurm({"SLURM_JOB_NUM_NODES": "4"}, ranks=(1, 1), gpus=(2, 1)),
     {"SLURM_JOB_NUM_NODES": "2", "SLURM_NNODES": "2"}, ""),
    # What Slurm tells an mpiexec is kept.
    *((recorded("sbatch_2x2", mpiexec=mpiexec), {
        "OMPI_MCA_plm_slurm_args": "--external-launcher", "PRTE_MCA_plm_slurm_args": "--external-launcher",
        "HYDRA_LAUNCHER_EXTRA_ARGS": "--external-launcher", "I_MPI_HYDRA_BOOTSTRAP": "slurm"}, "")
      for mpiexec in (MPICH, OPENMPI4)),
    # --cpus-per-task is given, or not known
    (slurm({"SLURM_CPUS_PER_TASK": "1"}, ranks=(1,), cores=(4,), ranks_per_node=1), {}, "SLURM_CPUS_PER_TASK"),
    (slurm({"SLURM_CPUS_PER_TASK": "1"}, ranks_per_node=1), {"SLURM_CPUS_PER_TASK": "1"}, ""),
    # The daemons of an mpiexec on some GPUs, on none, and in a step
    (slurm(gpus=(4, 2), mpiexec=MPICH), {"SLURM_GPUS": "6"}, "SLURM_GPUS_PER_NODE"),
    (slurm(gpus=(0, 0), mpiexec=MPICH), {}, "SLURM_(GPUS|OVERLAP|CPU_BIND|EXPORT).*"),
    (slurm({"SLURM_STEP_ID": "0", "SLURM_EXPORT_ENV": "NONE"}, mpiexec=MPICH),
     {"SLURM_OVERLAP": "1", "SLURM_CPU_BIND": "none", "SLURM_EXPORT_ENV": "ALL"}, "SLURM_STEP_ID"),
    (slurm({"SLURM_STEP_ID": "-5"}, mpiexec=MPICH), {}, "SLURM_(OVERLAP|CPU_BIND|STEP_ID)"),
    # Slurm may keep the step of a start before, which holds the memory of the job.
    (slurm({"SLURM_MEM_PER_CPU": "4000"}, restarted=True), {}, "SLURM_MEM_PER_.*"),
    (slurm({"SLURM_MEM_PER_CPU": "4000"}), {"SLURM_MEM_PER_CPU": "4000"}, ""),
    (slurm({"SLURM_MEM_PER_GPU": "4000"}, mpiexec=MPICH, restarted=True),
     {"SLURM_OVERLAP": "1", "SLURM_MEM_PER_NODE": "0"}, "SLURM_MEM_PER_(GPU|CPU)"),
    # The srun of an Open MPI beside another Slurm is found last.
    (slurm(mpiexec=OPENMPI4._replace(path="/usr/bin/mpiexec", other_srun=True)), {"PATH": "/bin:/usr/bin"}, ""),
    (pbs(mpiexec=PALS), {"WORLD_SIZE": "4"}, ""), (pbs(mpiexec=PALS, torchrun=True), {}, "WORLD_SIZE")])
def test_environment_of_the_command(plan: Callable[[], Plan], expected: dict[str, str], absent: str) -> None:
    environ = plan().environ
    assert expected.items() <= environ.items()
    assert not [name for name in environ if re.fullmatch(absent, name)]


@pytest.mark.parametrize(("plan", "by_option"), [
    (recorded("sbatch_2x2"), False),
    (recorded("sbatch_2x2", ranks_per_node=1), False), (recorded("sbatch_2x2", nodes=1), False),
    (recorded("sbatch_2x2", torchrun=True), False), (slurm({"SLURM_GPUS": "4"}, gpus=(2, 2), nodes=1), False),
    (slurm(gpus=(2, 2)), True)])
def test_gpus_are_requested_in_one_way(plan: Callable[[], Plan], by_option: bool) -> None:
    """Slurm 26.05 refuses --gres=gpu together with --gpus-per-node or its variable."""
    found = plan()
    assert ("--gres=gpu:" in line(found)) == by_option
    assert any(name.startswith("SLURM_GPUS_PER_NODE") for name in found.environ) == (not by_option)


@pytest.mark.parametrize(("plan", "message"), [
    (pbs(ranks=(2, 1), mpiexec=PALS), "different numbers of ranks .2, 1..*--launcher pbs_tmrsh"),
    (pbs(mpiexec=OPENMPI5, python="/no such folder/python"), "PYTHON"),
    # Hydra would wait for ever, unless nothing starts on the first host with slots.
    (pbs(ranks=(0, 2, 2), cores=(1, 2, 2), mpiexec=MPICH), "n1 has no slot"),
    (pbs(ranks=(0, 2, 2), cores=(1, 2, 2), mpiexec=MPICH, nodelist="n3"), ""),
    (pbs(ranks=(0, 2, 2), cores=(4, None, None), mpiexec=MPICH), "")])  # other names of the same hosts
def test_what_a_method_cannot_start_is_refused(plan: Callable[[], Plan], message: str) -> None:
    with pytest.raises(PlanError, match=message) if message else contextlib.nullcontext():
        line(plan())


@pytest.mark.parametrize(("environ", "torchrun", "kept"), [
    ({}, False, True), ({"SLURM_STEP_ID": "0"}, False, False), ({}, True, False)],
    ids=["of the user", "of an outer step", "torchrun"])
def test_slurm_cpu_bind_of_the_user_is_kept(environ: dict[str, str], torchrun: bool, kept: bool) -> None:
    """Also where the job has requested other tasks than these."""
    plan = slurm({"SLURM_CPU_BIND": "cores", **environ}, ranks_per_node=4, torchrun=torchrun)()
    assert (plan.environ.get("SLURM_CPU_BIND") == "cores") == ("--cpu-bind=none" not in line(plan)) == kept


def test_files_of_srun_and_of_openmpi_with_a_python_in_a_folder_with_a_space(tmp_path: Path) -> None:
    plan = slurm(ranks=(1, 1), gpus=(2, 1))()
    assert plan.method.host_file(plan) == "n1\nn1\nn2\n"
    python = tmp_path / "a folder" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    found = line(pbs(mpiexec=OPENMPI5, python=str(python))())
    assert f"plm_ssh_agent '{os.path.realpath(sys.executable)} -I " in found


def test_agent_is_out_of_reach_of_the_stops_of_pbs_and_an_mpiexec_starts_all() -> None:
    plan = pbs({"LD_LIBRARY_PATH": "/lib"})()
    _, start = plan.method.agent_starts(plan, lambda index: ["agent", index], {"SECRET": "s"})
    shell, option, script, _, *words = start.words
    assert (shell, option) == ("/bin/sh", "-c") and script.startswith("trap '' TERM INT USR1 USR2")
    assert words == ["/bin/pbs_tmrsh", "n2", "/usr/bin/env", "LD_LIBRARY_PATH=/lib", "agent", "1"]
    assert start.stdin == b"s\n" and "SECRET" not in start.environ
    plan = slurm(mpiexec=OPENMPI5, torchrun=True)()
    [start] = plan.method.agent_starts(plan, lambda index: ["agent", index], {"SECRET": "s"})
    assert (start.hosts, start.words[-2:], start.environ["SECRET"]) == ((0, 1), ["agent", "rank"], "s")
    assert "SECRET" in start.words  # -x SECRET
    # pbs_tmrsh gets the name in the node file.
    words = remote_shell.pbs_tmrsh_words(["-x", "n2", "cd / && exec orted"], ["n1.pbs.lab\n", "n2.pbs.lab\n"])
    assert words == ["n2.pbs.lab", "/bin/sh", "-c", "cd / && exec orted"]


def test_first_task_that_failed(capfd: pytest.CaptureFixture[str]) -> None:
    text = ("srun: error: Unable to create step for job 7: More processors requested than permitted\n"
            "srun: error: node2: tasks 2-3: Segmentation fault (core dumped)\n"
            "srun: error: node1: tasks 0-1: Terminated\n")
    read_end, write_end = os.pipe()
    os.write(write_end, text.encode())
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        errors = LauncherErrors(pipe)
        errors.drain()
    assert errors.first == TaskFailure(139, "node2", "2-3") and capfd.readouterr().err == text


# What the launchers print of ranks 0 and 1, where rank 1 on n2 fails.
PRRTE = """--------------------------------------------------------------------------
prterun noticed that process rank 1 with PID 6013 on node n2 exited on
signal 9 (Killed).
--------------------------------------------------------------------------
"""
PRRTE_LONG_NAME = PRRTE.replace("n2 exited on\nsignal", "n2.cluster.example\nexited on signal")
PRRTE_STATUS = """--------------------------------------------------------------------------
prterun detected that one or more processes exited with non-zero status,
thus causing the job to be terminated. The first process to do so was:

   Process name: [prterun-n1-6506@1,1]
   Exit code:    3
--------------------------------------------------------------------------
"""
ORTE = "mpiexec noticed that process rank 1 with PID 0 on node n2 exited on signal 11 (Segmentation fault).\n"
ORTE_STATUS = PRRTE_STATUS.replace("prterun-n1-6506@1", "[28950,1]").replace("   Process", "  Process")
PRRTE_DAEMON = """PRTE has lost communication with a remote daemon.

  HNP daemon   : [prterun-n1-6506@0,0] on node n1
  Remote daemon: [prterun-n1-6506@0,1] on node n2

This is usually due to either a failure of the TCP network connection to the node, or possibly an internal failure
"""


@pytest.mark.parametrize(("text", "failed", "lost"), [
    (PRRTE, {1: (137, "n2")}, []), (PRRTE_LONG_NAME, {1: (137, "n2.cluster.example")}, []),
    (PRRTE_STATUS, {1: (3, "")}, []), (ORTE, {1: (139, "n2")}, []), (ORTE_STATUS, {1: (3, "")}, []),
    ("n2: rank 1 died from signal 15\n", {1: (143, "n2")}, []), (PRRTE_DAEMON, {}, ["n2"]),
    ("rank 1 died from signal 9\nthe loss on node n2 exited on signal 9\n", {}, [])],
    ids=["PRRTE", "PRRTE, a long name", "PRRTE, status", "ORTE", "ORTE, status", "PALS", "PRRTE, daemon", "others"])
def test_what_an_mpiexec_prints_of_its_ranks(text: str, failed: dict[int, tuple[int, str]], lost: list[str],
                                             capfd: pytest.CaptureFixture[str]) -> None:
    read_end, write_end = os.pipe()
    os.write(write_end, text.encode())
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        errors = LauncherErrors(pipe)
        errors.drain()
    assert (errors.failed, errors.daemons_lost) == (failed, lost) and capfd.readouterr().err == text


def test_srun_passes_a_request_to_end_on_with_scancel(commands: Commands) -> None:
    step = "StepId=7.{} UserId=0 State=RUNNING SrunHost:Pid=node1:{} CPUFreqReq=x\n"
    commands.add("scontrol", step.format(0, 100) + step.format(1, 10))
    commands.add("scancel")
    for pid in (10, 11):
        Srun("srun").send_signal(signal.SIGTERM, pid, slurm()(), None)
    assert commands.calls("scancel") == [["scancel", "--signal=TERM", step] for step in ("7.1", "7")]


@pytest.mark.parametrize(("value", "ports"), [("60001-60010", range(60001, 60011)), ("0-0", range(0))])
def test_ports_that_compute_nodes_reach(commands: Commands, value: str, ports: range) -> None:
    commands.add("scontrol", f"SlurmctldPort = 6817\nSrunPortRange           = {value}\n")
    on_login, in_job = slurm(host="login")(), slurm()()
    assert on_login.method.listen_ports(on_login) == ports and not in_job.method.listen_ports(in_job)
