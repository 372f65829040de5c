"""The commands of the kit, as `ddpkit COMMAND` where it is installed by pip."""

from __future__ import annotations

import difflib
import importlib.util
import os
import sys
from collections.abc import Sequence

from .. import __version__
from . import interpreter

COMMANDS = {
    "launch": "start a training script on every GPU of every host of this job",
    "submit": "submit a training script as a Slurm or PBS job, and query submitted jobs",
    "sites": "list and write profiles of clusters",
    "doctor": "find out what is wrong with a job",
    "bench": "measure collectives, links between hosts, how a training scales, and its settings",
    "plan": "predict memory, step time and scaling of a training",
    "checkpoints": "list, verify and export the checkpoints of a training",
    "plot": "draw the logs of training runs, or step times, as a picture",
    "explain": "print which launcher started this process, and why",
}


def main(words: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status. words: its name and arguments; None: sys.argv."""
    words = sys.argv[1:] if words is None else list(words)
    name, arguments = (words[0], words[1:]) if words else ("", [])
    if name == "launch":
        from .launch import launch_cli as launch

        return launch.main(arguments)
    if name == "submit":
        _restart_where_installed("yaml")
        from .submission import submit_cli as submission

        return submission.main(arguments)
    if name == "sites":
        _restart_where_installed("yaml")
        from .submission import sites_cli as sites

        return sites.main(arguments)
    if name == "doctor":
        from .doctor import doctor_cli as doctor

        return doctor.main(arguments)
    if name == "plan":
        _restart_where_installed("yaml", "torch")
        from .plan import plan_cli as plan

        return plan.main(arguments)
    if name == "job":  # used by job scripts
        from .submission import job_start as in_job

        return in_job.main(arguments)
    if name == "bench":
        _restart_with_torch(name)
        from .bench import bench_cli as bench

        return bench.main(arguments)
    if name == "checkpoints":
        _restart_with_torch(name)
        from . import checkpoints_cli as checkpoints

        return checkpoints.main(arguments)
    if name == "plot":
        from . import charts

        return charts.main(arguments)
    if name == "explain":
        from ..launchers import __main__ as explain

        return explain.main(arguments)
    if name in ("-h", "--help"):
        print(_usage())
        return 0
    if name == "--version":
        print(f"ddpkit {__version__}")
        return 0
    print(f"{_usage()}\n\nddpkit: error: {_unknown(name)}", file=sys.stderr)
    return 2


def _usage() -> str:
    commands = "\n".join(f"  {name:<11} {text}" for name, text in COMMANDS.items())
    options = "Options: ddpkit COMMAND --help. Version: ddpkit --version"
    return f"usage: ddpkit COMMAND ...\n\ncommands:\n{commands}\n\n{options}"


def _unknown(name: str) -> str:
    if not name:
        return f"a command is missing. Expected one of: {', '.join(COMMANDS)}"
    near = difflib.get_close_matches(name.lower(), COMMANDS, 1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return f"{name!r} is not a command. Expected one of: {', '.join(COMMANDS)}.{hint}"


def _restart_where_installed(*modules: str) -> None:
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
        interpreter.restart(interpreter.choose(os.environ).path)
    except interpreter.InterpreterError as error:
        sys.exit(f"ddpkit {name}: error: {error}")
