#!/usr/bin/env python3
"""Start a training script on every GPU of every host of this job, by the best means there is here.

python scripts/launch.py train.py --epochs 3           inside a job of Slurm or PBS, batch or interactive, or on a
                                                       laptop: one rank for each GPU (or slot asked for)
python scripts/launch.py -m package.module --lr 0.1    a module, as python -m would
python scripts/launch.py --torchrun train.py           one torchrun agent on each host instead
python scripts/launch.py --hosts 2 train.py            on a part of the job's hosts
python scripts/launch.py --by ssh train.py             not by the best means, but by this one
python scripts/launch.py --container a.sif train.py    in an image, by apptainer or singularity
python scripts/launch.py --print train.py              print the exact command and start nothing

A command whose first word does not end in .py is run as it is; python in it is the one chosen for the ranks. Each rank
has RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, NODE_RANK, GROUP_RANK, MASTER_ADDR and MASTER_PORT in its
environment, as torchrun sets them. The exit status is that of the rank that failed first.
"""
import interpreter

if __name__ == "__main__":
    interpreter.restart_if_too_old(__file__)

import argparse
import os
import re
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository: `utils` is found from any directory
from utils.launch.commands import RANK_VARIABLES, printed
from utils.launch.container import in_container
from utils.launch.gpus import VENDORS, count_gpus, gpu_vendor
from utils.launch.outcome import say
from utils.launch.plan import MEANS, Here, Options, PlanError, describe, plan
from utils.launch.processes import MARK
from utils.launch.programs import KINDS, Programs
from utils.launch.run import run
from utils.launchers import LaunchError, detect
from utils.schedulers.allocation import AllocationError, current_allocation

SHOWN_LINES = 1  # of the commands, before the start; --print shows all


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--by", default="auto", metavar="MEANS",
                        help=f"auto (the default), {', '.join(MEANS)}, or the path of an mpiexec")
    parser.add_argument("--torchrun", action="store_true", help="one torchrun agent on each host")
    parser.add_argument("--ranks-per-node", type=int, metavar="N", help="instead of one for each GPU or slot")
    parser.add_argument("-n", type=int, dest="ranks", metavar="N",
                        help="this many ranks in all, the same number on each host")
    parser.add_argument("-N", "--hosts", metavar="N|NAMES", help="on the first N hosts of the job alone, or on these: "
                                                           "node3,node4 or node[3-4]")
    parser.add_argument("--restarts", type=int, default=0, metavar="N",
                        help="how often torchrun may start the ranks again after a failure; implies --torchrun")
    parser.add_argument("--container", metavar="IMAGE", help="run in this image, by apptainer or singularity")
    parser.add_argument("--gpu-vendor", choices=VENDORS, help="whose GPUs the container is to be shown; without it "
                                                              "those of this host")
    parser.add_argument("--prefix-output", action="store_true", help="put the rank before each line of output")
    parser.add_argument("--output-dir", metavar="FOLDER",
                        help="write the output of each rank to FOLDER/rank-N.log instead of here")
    parser.add_argument("--print", action="store_true", dest="only_print",
                        help="print the exact command and start nothing")
    parser.add_argument("-m", nargs=argparse.REMAINDER, dest="module", metavar="MODULE ...",
                        help="a module and its arguments, in place of a script")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="script.py or a program, and its arguments")
    args = parser.parse_args(arguments)
    args.command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if args.module is not None:
        args.command = ["-m", *args.module]
    if args.command == ["-m"]:
        parser.error("-m needs the name of a module, for example: launch.py -m package.module")
    if not args.command:
        parser.error("what is to be started? Name a script, for example: launch.py train.py --epochs 3")
    return args


def check_started_once() -> None:
    """LaunchError where a launcher has started several of us, each of which would start all ranks."""
    placement = detect()
    launcher = "launch.py" if placement.launcher == "env" and os.environ.get(MARK) else placement.launcher
    if launcher not in ("single", "env") and placement.world_size > 1:
        raise LaunchError(f"launch.py itself was started as rank {placement.rank} of {placement.world_size} by "
                          f"{launcher}. It starts all ranks by itself: run it once, without a launcher")
    task = os.environ.get("PBS_TASKNUM", "")  # 1 is the job script, 20000001 what pbsdsh has started
    if os.environ.get("PBS_JOBID") and task not in ("", "1"):
        raise LaunchError(f"launch.py itself was started by pbsdsh or pbs_tmrsh (PBS_TASKNUM={task}). It starts all "
                          "ranks by itself: run it once, in the job script; --hosts chooses a part of the hosts")


def check_no_launcher(command: Sequence[str]) -> None:
    """PlanError where the command is itself one that starts ranks: each rank would start all of them again."""
    name = os.path.basename(command[0])
    what = {"srun": "--by srun", "torchrun": "--torchrun", "pbs_tmrsh": "--by pbs_tmrsh", "pbsdsh": "--by pbsdsh",
            "launch.py": ""}.get(name, "--by mpiexec" if re.match(r"mpi(exec|run)(\W|$)", name) else None)
    module = command[1] if command[0] == "-m" and len(command) > 1 else ""
    if module in ("torch.distributed.run", "torch.distributed.launch"):
        name, what = f"-m {module}", "--torchrun"
    if what is not None:
        raise PlanError(f"the command is {name}, which starts ranks itself, as launch.py does. Expected the script or "
                        f"program of one rank: leave {name} and its options out, as in "
                        f"{' '.join(filter(None, ['launch.py', what, 'train.py']))}")


def python_for_ranks(args: argparse.Namespace) -> str:
    """Choose the Python for the ranks. InterpreterError where they need torch and none has it."""
    script = not args.container and interpreter.is_python(args.command)
    torch = script or args.torchrun or args.restarts > 0  # an image brings its own Python, but no torchrun
    of_image = {"PYTHON"} if args.container and not torch else set()
    chosen = interpreter.choose({name: os.environ[name] for name in os.environ if name not in of_image}, torch=torch)
    for name in (interpreter.AT_START, interpreter.STARTED_BY):
        os.environ.pop(name, None)  # for this start only
    if torch:
        say(str(chosen))
    return chosen.path


def main() -> int:
    args = parse()
    path = os.path.abspath(args.by) if os.sep in args.by else None
    command = args.command
    try:
        check_started_once()
        check_no_launcher(args.command)
        programs = Programs(mpiexec=path)
        if path is not None and programs.mpiexec is None:
            found = f"none of {', '.join(KINDS.values())}" if os.path.exists(path) else "not there"
            raise PlanError(f"--by is {args.by}, which is {found}. Expected the path of an mpiexec: check "
                            "it, or leave --by out")
        if args.command[0].startswith("-") and args.command[0] != "-m":
            raise PlanError(f"the command starts with the option {args.command[0]}. Expected a script or a program. "
                            "Options of sbatch and qsub go before the job script, those of launch.py before the script")
        if args.container:
            command = in_container(args.container, args.command, args.gpu_vendor or gpu_vendor(), programs)
        elif args.command[0].endswith(".py") and not os.path.isfile(args.command[0]):
            raise PlanError(f"there is no file {args.command[0]} in {os.getcwd()}. Expected the script to start: check "
                            "its path")
        options = Options("mpiexec" if path else args.by, args.torchrun, args.restarts, args.ranks_per_node,
                          args.hosts, args.ranks, args.prefix_output,
                          os.path.abspath(args.output_dir) if args.output_dir else "")
        allocation = current_allocation()
        here = Here(socket.gethostname(), count_gpus(), python_for_ranks(args), programs, os.geteuid() == 0)
        made = plan(command, options, allocation, here, os.environ)
        lines = list(printed(made, os.environ))
    except (AllocationError, LaunchError, PlanError, interpreter.InterpreterError) as error:
        say(str(error))
        return 2
    for line in describe(made):
        say(line)
    if args.only_print:
        print("\n".join(lines))
        if not made.agents and made.means != "local":
            say(f"launch.py itself also gives each rank {', '.join(RANK_VARIABLES)}; {os.path.basename(made.path)} "
                "alone does not")
        return 0
    for line in lines[:SHOWN_LINES]:
        say(line)
    if len(lines) > SHOWN_LINES:
        say(f"and {len(lines) - SHOWN_LINES} more like this; --print shows all")
    return run(made)


if __name__ == "__main__":
    sys.exit(main())
