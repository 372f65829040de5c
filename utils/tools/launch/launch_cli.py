"""The command `launch`: start a training script on every GPU of every host of this job."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import shlex
import shutil
import socket
import stat
import sys
import termios
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

from ...errors import LaunchError
from ...host.cores import available_cpus
from ...host.gpus import count_gpus, gpu_vendor
from ...job.commands import SchedulerError
from ...launch_protocol import FAILURE_FILE, HANG_TIMEOUT, Failure, Kind, may_have
from ...launchers.detect import find_launcher
from ...launchers.rank_variables import INDEPENDENT
from ..cli import defaults, interpreter
from ..cli.arguments import ArgumentParser
from ..cli.launch_options import add_options
from ..cli.missing_files import no_such_file, no_such_program
from ..schedulers import current_allocation
from ..schedulers.allocation import AllocationError
from .bootstrap import module_command
from .child_processes import LAUNCH_VARIABLE
from .dry_run import shell_lines
from .launch_plan import HostInfo, Options, Plan, PlanError, ProgramFinder
from .launch_result import print_error, print_status
from .methods import MPIEXECS, NAMES
from .methods.mpiexec import MpiexecMethod
from .nested import refusal
from .outcome import Outcome
from .planner import RANKS_PER_CORE, RANKS_PER_GPU, describe, make_plan
from .programs import Programs
from .rank_environment import RANK_VARIABLES, unwatched_line, why_unwatched
from .run_plan import run

_DESCRIPTION = """\
Start a training script on every GPU of every host of this job.

ddpkit launch train.py --epochs 3          in a job of Slurm or PBS, or on a laptop
ddpkit launch -m package.module --lr 0.1   a module, as python -m would
ddpkit launch --torchrun train.py          one torchrun agent on each host
ddpkit launch --nodes 2 train.py           on the first two hosts of the job
ddpkit launch --jobid 1234 train.py        in a job held elsewhere, such as by salloc --no-shell
ddpkit launch --launcher ssh train.py      with this launcher instead of the best available one
ddpkit launch --container a.sif train.py   in an image, with Apptainer or Singularity
ddpkit launch --dry-run train.py           print the exact commands and start nothing

Without -n or --ntasks-per-node, the tasks that the job requested start; one rank per GPU where it
requested none, or one on each host, as job scripts of torchrun do. Each rank has RANK, WORLD_SIZE,
LOCAL_RANK, LOCAL_WORLD_SIZE, NODE_RANK, GROUP_RANK, MASTER_ADDR and MASTER_PORT in its environment,
as torchrun sets them. A command whose first word does not end in .py is run as
it is; "python" is the Python chosen for the ranks. Under srun and on this host alone, rank 0 reads
a file or pipe that is the standard input of ddpkit launch. The exit status is that of the rank that
failed first, and 75 when all ranks have saved after a stop.
"""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; exit with status 2 and a message where it is wrong."""
    parser = ArgumentParser(
        prog="ddpkit launch",
        usage="%(prog)s [OPTION ...] SCRIPT [ARGUMENT ...]\n"
        "       %(prog)s [OPTION ...] -m MODULE [ARGUMENT ...]",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument_group("how the ranks are started").add_argument
    add_options(add, "launcher", launchers=", ".join(NAMES))
    torchrun = "start one torchrun agent on each host; --launcher torchrun is the same"
    add("--torchrun", action="store_true", help=torchrun)
    add_options(add, "restarts")
    module = "MODULE [ARGUMENT ...]: run a module instead of a script, as python -m does"
    add("-m", nargs=argparse.REMAINDER, dest="module", help=module)
    independent = "each rank is a program of its own, which may start ranks itself"
    add("--independent", action="store_true", help=independent)
    python = "of the ranks; default: that of the active environment"
    add("--python", metavar="PATH", help=python)
    add_options(add, "hangs")
    watch = "do not watch scripts that do not call setup_distributed()"
    add("--no-watch", action="store_false", dest="watch", help=watch)
    add("--dry-run", action="store_true", help="print the exact commands and start nothing")

    add = parser.add_argument_group("packages on the disk of each node").add_argument
    add_options(add, "packages")
    also = "another folder of packages, in PYTHONPATH or installed as editable; repeatable"
    add("--stage-also", action="append", default=[], metavar="FOLDER", help=also)

    add = parser.add_argument_group("where and how many").add_argument
    ranks = "ranks in all, the same number on each host"
    add("-n", "-np", "--ntasks", type=int, metavar="N", help=ranks)
    add_options(add, "ranks", ranks_per_gpu=RANKS_PER_GPU, ranks_per_core=RANKS_PER_CORE)
    add("-N", "--nodes", type=int, metavar="N", help="use only the first N hosts of the job")
    names = "use only these hosts of the job: node3,node4 or node[3-4]"
    add("-w", "--nodelist", metavar="NAMES", help=names)

    other = "start in this running job of Slurm, from outside, beside its steps"
    add("--jobid", metavar="ID", help=other)

    add_options(parser.add_argument_group("container").add_argument, "container")

    add = parser.add_argument_group("output").add_argument
    add_options(add, "output")
    add("-v", "--verbose", action="store_true", help="print the command that starts the ranks")
    failure = "append what failed first, as JSON, to this file"
    add("--failure-file", metavar="PATH", help=failure)
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)

    args = parser.parse_args(arguments)
    args.command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if args.launcher == "torchrun":  # its agents are started by the best available launcher
        args.launcher, args.torchrun = "auto", True
    if args.module is not None:
        args.command = ["-m", *args.module]
    if args.command == ["-m"]:
        parser.error("-m needs the name of a module, for example: ddpkit launch -m package.module")
    if args.hang_timeout is not None:
        if not 0 <= args.hang_timeout < 1e6:
            parser.error(f"--hang-timeout is {args.hang_timeout:g}; expected seconds, or 0")
    if not args.command:
        parser.error("no script is given. Expected one, as in: ddpkit launch train.py --epochs 3")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ddpkit launch; return its exit status."""
    return launch(arguments).status


def launch(arguments: Sequence[str] | None = None) -> Outcome:
    """Run ddpkit launch; return how it has ended."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words and os.environ.get("PBS_ENVIRONMENT") == "PBS_BATCH":
        try:
            words = words_of_pbs_job(os.environ.get("ARGS", ""))
        except PlanError as error:
            print_error(str(error))
            return Outcome(2, "command", str(error))
    args = parse(words)
    args.independent = args.independent or bool(os.environ.get(INDEPENDENT))
    if args.failure_file:
        os.environ[FAILURE_FILE] = os.path.abspath(args.failure_file)
    if args.hang_timeout is not None:
        os.environ[HANG_TIMEOUT] = f"{args.hang_timeout:g}"
    try:
        _set_defaults(args)
        _check_started_once()
        _check_command(args)
        replan = _planner(args)
        plan = replan(())
        lines = list(shell_lines(plan, os.environ))
    except (
        AllocationError,
        LaunchError,
        PlanError,
        SchedulerError,
        interpreter.InterpreterError,
    ) as error:
        kind: Kind = "command" if isinstance(error, PlanError) else "launch"
        Failure(str(error), kind).write()
        print_error(str(error))
        return Outcome(2, kind, str(error))

    for line in describe(plan):
        print_status(line)
    if args.hang_timeout and args.watch and not args.container:
        if reason := why_unwatched(args.command):
            print_status(unwatched_line(reason))
    if args.stage and args.container:
        print_status("--stage is not used: the packages are those of the image")
        args.stage = False
    if args.dry_run:
        from ...log import print_result  # loading logging would slow down every launch

        print_result("\n".join(lines))
        if plan.native_launcher_starts_ranks:
            print_status(
                f"ddpkit launch itself also gives each rank {', '.join(RANK_VARIABLES)}; "
                f"{os.path.basename(plan.method.path)} alone does not"
            )
        if args.stage:
            print_status("--stage: the ranks start from copies of their packages on each node")
        return Outcome(0, "complete")
    if args.verbose:
        print_status(lines[0])
        if len(lines) > 1:
            print_status(f"and {len(lines) - 1} more like this; --dry-run shows all")
    try:
        with _stage(args, plan) if args.stage else nullcontext(lambda plan: plan) as staged:
            return run(staged(plan), lambda hosts: staged(replan(hosts)))
    except LaunchError as error:  # it cannot listen
        Failure(str(error), "launch").write()
        print_error(str(error))
        return Outcome(2, "launch", str(error))


@contextmanager
def _stage(args: argparse.Namespace, plan: Plan) -> Iterator[Callable[[Plan], Plan]]:
    """Distribute the packages; yield a function that makes the ranks of a plan use them."""
    from ..staging import IN_MEMORY, distribute  # loading it would slow down every launch
    from ..staging.node_copy import remove_from_memory

    def one_per_host(hosts: Sequence[str], *options: str) -> list[str]:
        options += ("--nodelist", ",".join(hosts), "--ntasks-per-node", "1", "--independent")
        return module_command(sys.executable, "launch_cli", [*options, "--no-stage"])

    # A program that uses MPI itself has to be a child of an mpiexec, not of an agent.
    mpiexec = plan.method.path if isinstance(plan.method, MpiexecMethod) else MpiexecMethod.name
    starter = distribute.stage(
        plan.python,
        plan.hosts,
        plan.host,
        plan.environ,
        spares=len(plan.spares),
        one_per_host=one_per_host(plan.hosts, "--launcher", mpiexec),
        stage_dir=args.stage_dir or "",
        also=args.stage_also,
        note=print_status,
    )
    variables = {IN_MEMORY: "1"} if starter and not args.stage_dir else {}

    def staged(plan: Plan) -> Plan:
        return plan._replace(starter=tuple(starter), environ={**plan.environ, **variables})

    try:
        with (
            distribute.on_spares(one_per_host(plan.spares), starter, variables)
            if starter and plan.spares
            else nullcontext()
        ):
            yield staged
    finally:
        remove_from_memory({**plan.environ, **variables})


def _set_defaults(args: argparse.Namespace) -> None:
    """Set the options that variables or files give. Raises DefaultsError."""
    defaults.set_variables(os.environ)
    if args.stage_dir is not None and args.stage is None:
        args.stage = True
    defaults.fill_in(args)
    args.stage = bool(args.stage)


def ranks_of_hosts(arguments: Sequence[str]) -> tuple[int, ...]:
    """Return how many ranks these words would start on each host. Raises LaunchError."""
    try:
        _check_started_once()
        return _planner(parse(arguments))(()).ranks
    except (AllocationError, PlanError, interpreter.InterpreterError) as error:
        raise LaunchError(str(error)) from None


def words_of_pbs_job(args: str) -> list[str]:
    """Return the words of ARGS, which `qsub` passes to a script instead of arguments.

    They are quoted as for a shell; nothing is expanded or run. Raises PlanError where the words
    cannot be recovered: "qsub -v" turns each quote into a backslash, and drops what follows a comma
    between quotes.
    """
    with_words = "qsub OPTIONS -- /path/to/pbs.sh train.py --epochs 3"
    if "\\" in args:
        raise PlanError(
            f"ARGS is {args}. qsub changes quotes and backslashes in ARGS, and the words cannot be "
            f"recovered. Expected words without them. Submit with: {with_words}"
        )
    try:
        words = shlex.split(args)
    except ValueError as error:
        problem = f"ARGS is {args!r}: {error}. Expected words quoted as for a shell"
        raise PlanError(problem) from None
    if not words or not words[0]:
        raise PlanError(
            f"there is nothing to run: ARGS is {args.strip() or 'empty or not set'}, and the job "
            'script has no arguments. qsub passes ARGS by the "#PBS -v" line of the script, which '
            '"qsub -v" replaces, and "qsub -V" passes nothing in OpenPBS v23.06.06. Submit with: '
            f'env ARGS="train.py --epochs 3" qsub OPTIONS /path/to/pbs.sh, or with: {with_words}'
        )
    return words


def _python_for_ranks(args: argparse.Namespace) -> str:
    """Choose the Python for the ranks. InterpreterError where they need torch and none has it."""
    is_script = not args.container and interpreter.is_python(args.command)
    # An image brings its own Python, but no torchrun.
    needs_torch = is_script or args.torchrun
    environ = dict(os.environ)
    if args.container and not needs_torch:
        environ.pop("PYTHON", None)  # PYTHON is for the image
    default, option = defaults.python(), args.python or ""
    chosen = interpreter.choose(environ, torch=needs_torch, default=default, option=option)
    os.environ.pop(interpreter.STARTED_BY, None)  # it applies to this start only
    if needs_torch and (chosen.passed_over or not interpreter.is_of_prompt(chosen.path, environ)):
        print_status(str(chosen))
    return chosen.path


def _environment(args: argparse.Namespace) -> Mapping[str, str]:
    """Return the environment of this process; with --jobid, as it would be in that job."""
    if args.jobid is None:
        return os.environ
    from ..schedulers.slurm_allocation import enter_job

    return enter_job(args.jobid, os.environ)


def _planner(args: argparse.Namespace) -> Callable[[tuple[str, ...]], Plan]:
    """Return a function that plans the launch. Its argument is the hosts to leave out."""
    path = os.path.abspath(args.launcher) if os.sep in args.launcher else None
    programs = Programs(mpiexec=path)
    if path is not None and programs.mpiexec is None:
        titles = ", ".join(method.title for method in MPIEXECS)
        found = f"is not an mpiexec of {titles}" if os.path.exists(path) else "does not exist"
        raise PlanError(
            f"--launcher is {args.launcher}, which {found}. Expected the path of an mpiexec. "
            "Check it, or leave --launcher out"
        )
    command = args.command
    if args.container:
        command = in_container(args.container, command, gpu_vendor(), programs)
    args.launcher = "mpiexec" if path else args.launcher
    args.output_dir = os.path.abspath(args.output_dir) if args.output_dir else ""
    args.input, args.input_waits = _own_input()
    args.without, args.restarted = (), False
    args.watch = args.watch and may_have("monitor") and not args.independent
    options = Options(*(getattr(args, name) for name in Options._fields))
    environ = _environment(args)
    allocation = current_allocation(environ)
    is_root = os.geteuid() == 0
    python = _python_for_ranks(args)
    cores = len(available_cpus())
    host_info = HostInfo(socket.gethostname(), count_gpus(), python, programs, is_root, cores)
    if args.independent:
        environ = {**environ, INDEPENDENT: "1"}

    made: list[tuple[str, ...]] = []

    def make(without: tuple[str, ...]) -> Plan:
        chosen = options._replace(without=without, restarted=bool(made))
        made.append(without)
        return make_plan(command, chosen, allocation, host_info, environ)

    return make


def _own_input() -> tuple[bool, bool]:
    """Return whether our standard input is a file or pipe for us alone, and has bytes to read.

    An input that we share with our parent process is not ours to read: a shell may read its script
    from there, or a loop its list.
    """
    try:
        own = os.fstat(0)
    except OSError:  # it is closed
        return False, False
    if not (stat.S_ISREG(own.st_mode) or stat.S_ISFIFO(own.st_mode) or stat.S_ISSOCK(own.st_mode)):
        return False, False
    try:
        shared = os.path.samestat(own, os.stat(f"/proc/{os.getppid()}/fd/0"))
    except OSError:  # our parent belongs to another user
        shared = False
    waiting = bytearray(4)  # a C int: number of bytes that can be read
    with contextlib.suppress(OSError):  # a socket that listens
        fcntl.ioctl(0, termios.FIONREAD, waiting)
    if shared and any(waiting):
        print_status(
            "no rank reads the standard input, which ddpkit launch shares with the program that "
            "started it. Redirect it from the file that rank 0 is to read, or from /dev/null"
        )
    return not shared, any(waiting)


def _check_started_once() -> None:
    """Raise LaunchError where a launcher has started several of us: each would start all ranks."""
    found = find_launcher()
    placement, by_launcher = found.placement, found.launcher.starts_processes
    if placement.world_size > 1 and (by_launcher or os.environ.get(LAUNCH_VARIABLE)):
        name = placement.launcher if by_launcher else "ddpkit launch"
        raise LaunchError(
            f"ddpkit launch was started as rank {placement.rank} of {placement.world_size} by "
            f"{name}. It starts all ranks itself. Run it once, without a launcher"
        )
    # PBS_TASKNUM is 1 in the job script, and for example 20000001 in processes started by pbsdsh.
    task = os.environ.get("PBS_TASKNUM", "")
    if os.environ.get("PBS_JOBID") and task not in ("", "1"):
        raise LaunchError(
            f"ddpkit launch was started by pbsdsh or pbs_tmrsh (PBS_TASKNUM={task}). It starts "
            "all ranks itself. Run it once, in the job script; --nodelist chooses hosts"
        )


def _check_command(args: argparse.Namespace) -> None:
    """Raise PlanError where the command is no script or program of one rank."""
    command = args.command
    if not args.independent and (problem := refusal(command, "ddpkit launch", "--independent")):
        raise PlanError(problem)
    if command[0].startswith("-") and command[0] != "-m":
        raise PlanError(
            f"the command starts with the option {command[0]}. Expected a script or a program. "
            "Options of sbatch and qsub go before the job script, those of launch before the "
            "script"
        )
    if command[0] == "-m" or command[:2] == ["python", "-m"]:
        _check_module(command[command.index("-m") + 1 :])
    elif not args.container and command[0].endswith(".py"):
        if not os.path.isfile(command[0]):
            raise PlanError(no_such_file(command[0], "Check the path of the script"))
    elif not args.container and args.jobid is None and command[0] not in ("python", "python3"):
        if shutil.which(command[0]) is None:
            raise PlanError(no_such_program(command[0]))


def _check_module(words: Sequence[str]) -> None:
    """Raise PlanError if a path follows -m. words: the words after -m."""
    path = words[0] if words else ""
    if path.endswith(".py") or os.sep in path:
        module = os.path.normpath(path).removesuffix(".py").replace(os.sep, ".").lstrip(".")
        raise PlanError(
            f"-m takes a module, such as {module}, and {path} is the path of a script. Give -m "
            f"{module}, or leave -m out"
        )


_PROGRAMS = ("apptainer", "singularity")  # two names of one program; the newer name first
# Options that make the host's GPU libraries available. Intel's libraries come with the image.
_GPU_OPTIONS = {"nvidia": ["--nv"], "amd": ["--rocm"]}


def in_container(
    image: str, command: Sequence[str], vendor: str | None, programs: ProgramFinder
) -> list[str]:
    """Return the command that runs a script or program in an image.

    vendor: vendor of the GPUs, one of masks.VENDORS; None without GPUs. PlanError where PATH has
    neither Apptainer nor Singularity.
    """
    path = next((found for name in _PROGRAMS if (found := programs.find(name))), None)
    if path is None:
        raise PlanError(
            f"neither {' nor '.join(_PROGRAMS)} is on PATH, and one of them is needed to run "
            f"{image}. Load its module, or leave --container out"
        )
    is_script = command[0] == "-m" or command[0].endswith(".py")
    interpreter = ["python", "-u"] if is_script else []
    return [path, "exec", *_GPU_OPTIONS.get(vendor or "", []), image, *interpreter, *command]
