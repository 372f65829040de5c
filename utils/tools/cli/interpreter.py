"""Choose the Python that runs the ranks, and restart the kit where its own Python is too old.

On many clusters, `python3` is Python 3.6, which imports this file alone, without the package. So
the syntax must be valid in Python 3.6.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, NoReturn

OLDEST = (3, 10)
KIT = os.path.realpath(os.path.join(os.path.dirname(os.path.realpath(__file__)), *[".."] * 3))
KIT_PYTHON = os.path.join(KIT, ".venv", "bin", "python")  # made by setup_env.sh
STARTED_BY = "DDPKIT_STARTED_BY"  # set by restart(): the Python that the user started
PROBE_TIMEOUT_SECONDS = 60  # a first start from a parallel file system may take half of that
SYSTEM_FOLDERS = ("/usr/bin", "/bin", "/usr/local/bin")

# Where a Python was found; ACTIVE: the user has activated or started it.
RUNNING, PATH = "runs this script", "PATH"
ACTIVE = (RUNNING, "VIRTUAL_ENV", "CONDA_PREFIX")

# Finds torch without importing it. A folder `torch` that is no package has no origin.
PROBE = """\
import sys
sys.path[:] = [entry for entry in sys.path if entry]
spec = None
if sys.version_info >= (3, 4):
    import importlib.util
    spec = importlib.util.find_spec("torch")
torch = spec is not None and spec.origin is not None
print("\\nddpkit-probe %d.%d torch=%d" % (sys.version_info[0], sys.version_info[1], torch))
"""


class InterpreterError(RuntimeError):
    """No Python can run the ranks; the message names those found and what to do."""


class Interpreter(NamedTuple):
    """The chosen Python. passed_over: "PATH (SOURCE) has no torch" for each one before it."""

    path: str
    source: str
    passed_over: "tuple[str, ...]" = ()

    def __str__(self) -> str:
        passed_over = f". Passed over: {'; '.join(self.passed_over)}" if self.passed_over else ""
        return f"Python for the ranks: {self.path} ({self.source}){passed_over}"


def choose(
    environ: "Mapping[str, str]",
    *,
    torch: bool = True,
    default: "tuple[str, str] | None" = None,
    option: str = "",
) -> Interpreter:
    """Choose the first Python with torch.

    The order is PYTHON, active environments, the default, the running one, PATH, the kit's .venv.
    environ: the environment of the ranks. torch: whether they need torch; if not, a Python without
    torch is chosen if none has it. default: the Python that a file of defaults names, and the
    file's path. option: the value of --python, which replaces PYTHON. Raises InterpreterError if
    there is none, or if the Python that the user or the file names cannot be used.
    """
    if option:
        return _named(option, "--python", environ, torch)
    if environ.get("PYTHON"):
        return _named(environ["PYTHON"], "PYTHON", environ, torch)
    if default is not None and shutil.which(default[0]) is None:
        raise InterpreterError(
            f"{default[1]} sets python to {default[0]!r}, which is not a program. Correct it there"
        )
    passed_over = []  # type: list[str]
    usable = None
    for path, source in candidates(environ, default):
        fault, starts = _check(path, environ)
        if fault is None:
            return Interpreter(path, source, tuple(passed_over))
        if starts and usable is None:
            usable = Interpreter(path, source)
        passed_over.append(f"{path} ({source}) {fault}")
    if usable is not None and not torch:
        return usable
    found = "; ".join(passed_over) or f"there is neither python3 on PATH nor {KIT_PYTHON}"
    with_torch = " with torch" if torch else ""
    setup_env = os.path.join(KIT, "scripts", "setup_env.sh")
    remedy = f"Run {setup_env}, activate" if os.path.exists(setup_env) else "Activate"
    raise InterpreterError(
        f"no Python for the ranks: {found}. Expected Python {OLDEST[0]}.{OLDEST[1]} or newer"
        f"{with_torch}. {remedy} an environment{with_torch}, or set PYTHON=/path/to/python3"
    )


def is_python(command: "Sequence[str]") -> bool:
    """Whether the chosen Python runs a command: it is a script or a module."""
    return (
        command[0] == "-m" or tuple(command[:2]) == ("python", "-m") or command[0].endswith(".py")
    )


def _named(name: str, source: str, environ: "Mapping[str, str]", torch: bool) -> Interpreter:
    """Return the Python that the user names. source: "PYTHON" or "--python".

    Raises InterpreterError where it cannot be used: the user wants no other.
    """
    expected = (
        f"Expected Python {OLDEST[0]}.{OLDEST[1]} or newer{' with torch' if torch else ''}. "
        f"Correct {source}, or {'leave it out' if source[0] == '-' else 'unset it'}"
    )
    path = shutil.which(name, path=environ.get("PATH", os.defpath))
    if path is None:
        raise InterpreterError(f"{source} is {name!r}, which is not a program. {expected}")
    fault, starts = _check(os.path.abspath(path), environ)
    if fault is not None and (torch or not starts):
        raise InterpreterError(f"{source} is {name!r}, which {fault}. {expected}")
    return Interpreter(os.path.abspath(path), source)


def candidates(
    environ: "Mapping[str, str]", default: "tuple[str, str] | None" = None
) -> "Iterator[tuple[str, str]]":
    """Yield each Python that may be meant, once, with its source; the preferred first."""
    seen = set()
    for path, source in _possible_paths(environ, default):
        if path and os.path.isfile(path) and os.access(path, os.X_OK):
            if _identity(path) not in seen:
                seen.add(_identity(path))
                yield os.path.abspath(path), source


def is_of_prompt(path: str, environ: "Mapping[str, str]") -> bool:
    """Whether `python` (`python3` where there is none) starts this Python in the user's shell."""
    names = (shutil.which(name, path=environ.get("PATH")) for name in ("python", "python3"))
    found = next((name for name in names if name), None)
    return found is not None and _identity(found) == _identity(path)


def _identity(path: str) -> "tuple[str, str]":
    """Return folder and real path, which python and python3 of one environment share."""
    return os.path.realpath(os.path.dirname(path)), os.path.realpath(path)


def _possible_paths(
    environ: "Mapping[str, str]", default: "tuple[str, str] | None"
) -> "Iterator[tuple[str | None, str]]":
    on_path = shutil.which("python3", path=environ.get("PATH", os.defpath))
    running = environ.get(STARTED_BY) or sys.executable
    folders = environ.get("PATH", "").split(os.pathsep)
    names = [name for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if environ.get(name)]
    bins = {name: os.path.join(environ[name], "bin") for name in names}
    # An environment is active if it is on PATH. Set-up lines of a job may have left one.
    active = [name for name in names if bins[name] in folders]
    for name in sorted(active, key=lambda name: folders.index(bins[name])):
        yield os.path.join(bins[name], "python"), name
    if default is not None:
        yield shutil.which(default[0]), default[1]
    if not _of_system(running):
        yield running, RUNNING
    for name in names:
        yield os.path.join(bins[name], "python"), name
    if environ.get("PBS_JOBID") and environ.get("PBS_O_PATH"):  # PBS passes PATH under this name
        submitted = shutil.which("python3", path=environ["PBS_O_PATH"])
        if submitted is not None and not _of_system(submitted):
            yield submitted, "PATH at submission"
    if on_path is not None and not _of_system(on_path):
        yield on_path, PATH
    yield KIT_PYTHON, "the kit's .venv"
    yield on_path, PATH
    yield running, RUNNING


def _of_system(path: str) -> bool:
    """Whether a Python came with the operating system, so that nobody chose it."""
    return os.path.dirname(path) in SYSTEM_FOLDERS


def _check(path: str, environ: "Mapping[str, str]") -> "tuple[str | None, bool]":
    """Return what is wrong with a Python ("has no torch"; None: nothing), and whether it starts."""
    if path == sys.executable and dict(environ) == dict(os.environ) and _has_torch_here():
        return None, True
    try:
        done = subprocess.run(
            [path, "-c", PROBE],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=PROBE_TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"does not respond within {PROBE_TIMEOUT_SECONDS} seconds", False
    except OSError as error:
        return f"cannot be started ({error.strerror})", False
    output = done.stdout.decode(errors="replace")
    match = re.search(r"^ddpkit-probe (\d+)\.(\d+) torch=([01])$", output, re.MULTILINE)
    if match is None:
        lines = [line.strip() for line in output.splitlines() if line.strip()] or [
            f"exit status {done.returncode}"
        ]
        home = " with PYTHONHOME=" + environ["PYTHONHOME"] if environ.get("PYTHONHOME") else ""
        return f"does not start{home} ({lines[-1][:160]})", False
    version = int(match.group(1)), int(match.group(2))
    if version < OLDEST:
        return f"is Python {version[0]}.{version[1]}, older than {OLDEST[0]}.{OLDEST[1]}", False
    return (None, True) if match.group(3) == "1" else ("has no torch", True)


def _has_torch_here() -> bool:
    """Whether this Python is new enough and finds torch; starting a second one takes 0.1 s."""
    if sys.version_info[:2] < OLDEST:
        return False
    spec = importlib.util.find_spec("torch")
    return spec is not None and spec.origin is not None


def restart_under_newer_python() -> NoReturn:
    """Start this command again under a Python that is new enough, or exit with status 1."""
    try:
        newer = choose(os.environ, torch=False).path
    except InterpreterError as error:
        version = ".".join(map(str, sys.version_info[:3]))
        # The package was started by the path of its folder, as by scripts/launch.py.
        command = f"ddpkit {sys.argv[1]}" if os.path.isdir(sys.argv[0]) else "ddpkit"
        sys.exit(f"{command}: error: this is Python {version} ({sys.executable}). {error}")
    restart(newer)


def restart(python: str) -> NoReturn:
    """Start this command of the kit again under another Python.

    Raises InterpreterError if pip has installed the command, which works under one Python only.
    """
    if os.path.basename(sys.argv[0]) == "ddpkit":
        raise InterpreterError(
            f"{sys.executable} has no torch, and ddpkit is installed for it alone. Expected both "
            f"in one Python. Install torch there, or ddpkit for {python}"
        )
    os.environ.setdefault(STARTED_BY, sys.executable)
    sys.stdout.flush()
    os.execv(python, [python] + sys.argv)


def import_path(name: str, file: str) -> "tuple[str, str]":
    """Return the folder for sys.path and the name under which to import a module of this package.

    Both work without site-packages: an editable installation gives the package another name than
    its folder has.

    name, file: __name__ and __file__ of the module.
    """
    folder, last = os.path.split(os.path.splitext(os.path.abspath(file))[0])
    for _ in range(name.count(".")):
        folder, package = os.path.split(folder)
        last = package + "." + last
    return folder, last
