"""Let the kit watch a rank whatever program it runs: Python imports this file when it starts.

`ddpkit launch` and `ddpkit watch` put this folder first in PYTHONPATH of the ranks. Where the
process is a rank, and imports torch.distributed, each default process group is watched; see
watched.py of the kit. It is loaded from the folder in WATCH under a name of its own, so that the
script may import another ddpkit. A script whose environment has no ddpkit imports the launch's.
Python 3.6 can run this file. It loads no module without need: every Python that a rank starts runs
it, too.
"""

import os
import sys

WATCH = "DDPKIT_WATCH"  # the folder of the kit's package
CLAIM = "DDPKIT_WATCHED"  # "PID RUN_ID/LOCAL_RANK": the process that is the rank, and not a child
HANG_TIMEOUT = "DDPKIT_HANG_TIMEOUT"  # seconds; "0" for none
_MODULE = "torch.distributed.distributed_c10d"
_PACKAGE = "_ddpkit_watch"
_KIT = "ddpkit"
_OLDEST = (3, 10)  # oldest Python for the kit
_RANK = ("RANK", "SLURM_PROCID", "PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
_LONGEST_SECONDS = 5.0  # at its end, a rank waits this long for a watch that is being set up


def _import_own():
    """Import the environment's own sitecustomize, which this file replaces."""
    import importlib.machinery
    import importlib.util

    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _claim(environ):
    """Return whether this process is a rank, and mark it for the processes that it starts.

    A worker of a DataLoader or a compiler is no rank; a worker of torchrun is.
    """
    run = environ.get("TORCHELASTIC_RUN_ID", "") + "/" + environ.get("LOCAL_RANK", "")
    pid, _, its_run = environ.get(CLAIM, "").partition(" ")
    is_rank = not pid or int(pid) == os.getpid() or (run != its_run and int(pid) == os.getppid())
    if is_rank:
        environ[CLAIM] = f"{os.getpid()} {run}"
    return is_rank


def _is_rank():
    """Return whether this process is the rank that was claimed, and not one that it has forked."""
    return os.environ.get(CLAIM, "").partition(" ")[0] == str(os.getpid())


def _load(name):
    """Return a module of the kit."""
    import importlib.util

    folder = os.environ[WATCH]
    if _PACKAGE not in sys.modules:
        path = os.path.join(folder, "__init__.py")
        spec = importlib.util.spec_from_file_location(
            _PACKAGE, path, submodule_search_locations=[folder]
        )
        package = importlib.util.module_from_spec(spec)
        sys.modules[_PACKAGE] = package
        spec.loader.exec_module(package)
    return importlib.import_module(f"{_PACKAGE}.{name}")


class _Finder:
    """Wrap the module that starts process groups once it is imported."""

    _is_searching = False

    def find_spec(self, name, path, target=None):
        if name != _MODULE or self._is_searching:
            return None
        import importlib.util

        self._is_searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_searching = False
        sys.meta_path.remove(self)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            _wrap(module)

        spec.loader.exec_module = exec_module
        return spec


class _Kit:
    """Find the launch's own copy of the kit where sys.path has none, and nothing else beside it.

    A folder that is named like the kit, such as a clone beside the script, is no package.
    """

    _is_searching = _has_warned = False

    def __init__(self, *, may_warn):
        self._may_warn = may_warn

    def find_spec(self, name, path, target=None):
        if name != _KIT or self._is_searching:
            return None
        import importlib.util

        self._is_searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_searching = False
        own = os.path.join(os.environ[WATCH], "__init__.py")
        if spec is not None and spec.origin is not None:
            if self._may_warn and not self._has_warned:
                self._has_warned = True
                _warn_of_versions(spec.origin, own)
            return spec
        folders = [os.path.dirname(own)]
        return importlib.util.spec_from_file_location(name, own, submodule_search_locations=folders)


def _warn_of_versions(found, own):
    """Warn on rank 0 if the script imports another version of the kit than the launch uses."""
    rank = next((os.environ[name] for name in _RANK if os.environ.get(name)), "0")
    version, its_version = _version(found), _version(own)
    if rank == "0" and version != its_version:
        folder, its_folder = os.path.dirname(found), os.path.dirname(own)
        sys.stderr.write(
            f"ddpkit: warning: the ranks import ddpkit {version} of {folder}, and were started by "
            f"ddpkit {its_version} of {its_folder}. Expected one version. Install the newer one "
            f"for {sys.executable}, too\n"
        )


def _version(path):
    """Return the version that the kit's __init__.py sets, or "of unknown version"."""
    import re

    try:
        with open(path, "rb") as file:
            found = re.search(rb"^__version__ = \"([^\"]+)\"", file.read(), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1).decode(errors="replace") if found else "of unknown version"


class _Watch:
    """The watch of one default group, from init to destroy_process_group(), beside the training."""

    def __init__(self, *group):
        import threading

        self._made = None
        self._thread = threading.Thread(target=self._run, args=group, daemon=True)
        self._thread.name = "ddpkit watch"
        self._thread.start()

    def _run(self, store, rank, world_size, backend):
        try:
            self._made = _load("watched").watch(store, rank, world_size, backend)
        except Exception as error:  # the training goes on unwatched
            if rank == 0:
                text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                sys.stderr.write(f"ddpkit: the ranks are not watched ({text})\n")

    def wait(self):
        """Return what is watched, or None. A thread in native code must not outlive the process."""
        self._thread.join(_LONGEST_SECONDS)
        return self._made


_current = []  # the watch of the default group, if there is one


def _wrap(module):
    """Watch each default group of this process."""
    import atexit
    import functools

    start, end = module.init_process_group, module.destroy_process_group

    def end_with_process():
        watched = _current[0].wait() if _current and _is_rank() else None
        if watched is not None:
            watched.at_exit()

    atexit.register(end_with_process)

    @functools.wraps(start)
    def init_process_group(*args, **kwargs):
        result = start(*args, **kwargs)
        if not module.is_initialized() or module.get_world_size() < 2:
            return result
        if not _is_rank():
            _say_unwatched(module.get_rank(), module.get_world_size())
        elif not _current:
            _prepare()
            place = module.get_rank(), module.get_world_size(), module.get_backend()
            _current.append(_Watch(module._get_default_store(), *place))
        return result

    @functools.wraps(end)
    def destroy_process_group(group=None):
        if _current and _is_rank() and (group is None or group is module.group.WORLD):
            watched = _current.pop().wait()
            if watched is not None:
                watched.close()
        return end(group)

    # The kit watches its own groups by itself.
    init_process_group.without_watch = start
    destroy_process_group.without_watch = end
    module.init_process_group = init_process_group
    module.destroy_process_group = destroy_process_group


def _say_unwatched(rank, world_size):
    """Report that --hang-timeout does not apply to a group of child processes."""
    if rank == 0 and os.environ.get(HANG_TIMEOUT, "0") != "0":
        sys.stderr.write(
            f"ddpkit: the group of {world_size} processes that a rank has started, as by "
            "mp.spawn(), is not watched: --hang-timeout does not apply to it\n"
        )


def _prepare():
    """Record what a script does while its watch is being set up: it ends, or starts workers."""
    try:
        _load("monitor.exit_calls").record()
        if os.environ.get(HANG_TIMEOUT) != "0":
            _load("monitor.worker_stacks").register()
    except Exception:  # the report then lacks the line of sys.exit()
        pass


def _report_exceptions():
    """Report exceptions that end a rank before its group is watched."""
    previous, stream = sys.excepthook, _standard_error()

    def hook(kind, error, trace):
        watched = _current[0].wait() if _current else None
        if watched is not None and watched.report(error):  # with the traceback
            return
        shown = []

        def show():
            shown.append(True)
            previous(kind, error, trace)

        is_early = watched is None and issubclass(kind, Exception)
        if is_early and os.environ.get("DDPKIT_REPORT"):
            has_stream = stream is not None and stream == _standard_error()
            is_shared = has_stream and previous is sys.__excepthook__
            try:
                if _load("early_failure").report(error, show, shares_output=is_shared):
                    return
            except Exception:  # the launch sees the exit status
                pass
        if not shown:
            show()

    sys.excepthook = hook


def _standard_error():
    """Return which file standard error is; None where the script has another one."""
    try:
        status = os.fstat(sys.stderr.fileno())
        return status.st_dev, status.st_ino, sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):
        return None


def _main():
    if not os.environ.get(WATCH):
        return
    is_rank = _claim(os.environ)
    if sys.version_info >= _OLDEST:
        sys.meta_path.insert(0, _Kit(may_warn=is_rank))
    if is_rank or os.environ.get(HANG_TIMEOUT):
        sys.meta_path.insert(0, _Finder())
    if is_rank:
        _report_exceptions()


_main()
_import_own()
