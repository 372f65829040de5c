"""The commands of the kit, as `ddpkit COMMAND` where it is installed by pip."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shlex
import sys
from collections.abc import Sequence
from typing import NamedTuple

from ... import __version__
from . import defaults, interpreter
from .missing_files import closest

TOOLS = __package__.rpartition(".")[0]


class Command(NamedTuple):
    """A command, and the module whose main() runs it."""

    description: str
    module: str
    kit_needs: tuple[str, ...] = ()  # modules; without one of them, restarts under the kit's .venv
    needs_torch: bool = False  # restarts under the Python that ddpkit launch would choose


COMMANDS = {
    "launch": Command(
        "start a training script on every GPU of every host of this job", "launch.launch_cli"
    ),
    "watch": Command(
        "watch ranks that srun, mpiexec or torchrun starts: who fails, who hangs and where",
        "launch.watch_cli",
    ),
    "submit": Command(
        "submit a training script as a Slurm or PBS job, and query submitted jobs",
        "submission.submit_cli",
        kit_needs=("yaml",),
    ),
    "stage": Command(
        "pack an environment once for all its users, list and remove copies of packages",
        "staging.stage_cli",
    ),
    "sites": Command(
        "list and write profiles of clusters, print defaults",
        "submission.sites_cli",
        kit_needs=("yaml",),
    ),
    "doctor": Command("find out what is wrong with a job", "doctor.doctor_cli"),
    "bench": Command(
        "measure collectives, links between hosts, and how a training scales",
        "bench.bench_cli",
        needs_torch=True,
    ),
    "plan": Command(
        "predict memory, step time and scaling of a training",
        "plan.plan_cli",
        kit_needs=("yaml", "torch"),
    ),
    "checkpoints": Command(
        "list, verify and export the checkpoints of a training",
        "cli.checkpoints_cli",
        needs_torch=True,
    ),
    "plot": Command("draw the logs of training runs, or step times, as a picture", "bench.charts"),
}
_SUBCOMMANDS = {  # word typed as a command -> where it is
    **{name: f"submit {name}" for name in ("run", "status", "list", "logs", "stop", "cancel")},
    **{name: f"sites {name}" for name in ("new", "config", "trust")},
}
_OF_JOB_SCRIPTS = {"job": Command("", "submission.job_start")}


def main(words: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status. words: its name and arguments; None: sys.argv."""
    words = sys.argv[1:] if words is None else list(words)
    try:
        status = _run(words)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # as in `ddpkit --help | head`: whoever read it has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(words: list[str]) -> int:
    name, arguments = (words[0], words[1:]) if words else ("", [])
    command = (COMMANDS | _OF_JOB_SCRIPTS).get(name)
    if command is not None:
        _restart_where_installed(command.kit_needs)
        if command.needs_torch:
            _restart_with_torch(name)
        module = importlib.import_module(f"{TOOLS}.{command.module}")
        status: int = module.main(arguments)
        return status
    if name in ("help", "-h", "--help"):
        if arguments and arguments[0] in COMMANDS:
            return _run([*arguments, "--help"])
        print(_usage())
        return 0
    if name == "--print-completion":
        completion = importlib.import_module(f"{__package__}.completion")
        modules = {
            name: (f"{TOOLS}.{command.module}", command.description)
            for name, command in COMMANDS.items()
        }
        return int(completion.main(arguments, modules))
    if name in ("version", "-V", "--version"):
        print(f"ddpkit {__version__}")
        return 0
    if not name:
        print(f"{_usage()}\n", file=sys.stderr)
    print(f"ddpkit: error: {_unknown(words)}", file=sys.stderr)
    return 2


def _usage() -> str:
    commands = "\n".join(
        f"  {name:<11} {command.description}" for name, command in COMMANDS.items()
    )
    options = (
        "Options: ddpkit COMMAND --help, or ddpkit help COMMAND. Version: ddpkit --version\n"
        "Tab completion (needs shtab): ddpkit --print-completion bash, or zsh"
    )
    return f"usage: ddpkit COMMAND ...\n\ncommands:\n{commands}\n\n{options}"


def _unknown(words: Sequence[str]) -> str:
    if not words:
        return f"a command is missing. Expected one of: {', '.join(COMMANDS)}"
    name, *arguments = words
    if name in _SUBCOMMANDS:
        meant = [f"ddpkit {shlex.join([*_SUBCOMMANDS[name].split(), *arguments])}"]
    elif name.endswith(".py") or os.path.isfile(name):
        meant = [f"ddpkit {command} {shlex.join(words)}" for command in ("launch", "submit run")]
    else:
        near = closest(name.lower(), [*COMMANDS, *_SUBCOMMANDS])
        near = _SUBCOMMANDS.get(near, near)
        meant = [f"ddpkit {shlex.join([*near.split(), *arguments])}"] if near else []
    hint = f" Did you mean: {', or '.join(meant)}" if meant else ""
    return f"{name!r} is not a command. Expected one of: {', '.join(COMMANDS)}.{hint}"


def _restart_where_installed(modules: Sequence[str]) -> None:
    """Restart under the kit's .venv where this Python lacks one of the modules."""
    if all(importlib.util.find_spec(name) is not None for name in modules):
        return
    if os.path.exists(interpreter.KIT_PYTHON) and sys.executable != interpreter.KIT_PYTHON:
        interpreter.restart(interpreter.KIT_PYTHON)


def _restart_with_torch(name: str) -> None:
    """Restart under the Python that ddpkit launch would choose where this one has no torch."""
    if importlib.util.find_spec("torch") is not None:
        return
    try:
        default = defaults.python()
        interpreter.restart(interpreter.choose(os.environ, default=default).path)
    except (interpreter.InterpreterError, defaults.DefaultsError) as error:
        sys.exit(f"ddpkit {name}: error: {error}")
