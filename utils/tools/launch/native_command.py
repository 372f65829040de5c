"""Start the one command of a native launcher, with the files that its words stand for."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from . import remote_shell
from .child_processes import Processes
from .launch_plan import HOST_FILE, REMOTE_SHELL, Plan


class NativeCommand:
    """srun or an mpiexec. A context manager, which removes the files."""

    def __init__(self, plan: Plan, processes: Processes) -> None:
        self._plan, self._processes = plan, processes
        self._pid = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> NativeCommand:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._folder is not None:
            self._folder.cleanup()

    def start(
        self, words: Sequence[str], environ: Mapping[str, str], stderr: int | None = None
    ) -> subprocess.Popen[bytes] | None:
        """Start the command; None where that is not possible."""
        method = self._plan.method
        with tempfile.TemporaryFile() as file:  # has no name, so nothing of it can be left
            file.write(method.host_file(self._plan).encode())
            file.flush()
            host_file = f"/proc/self/fd/{file.fileno()}"
            words = [word.replace(HOST_FILE, host_file) for word in words]
            if REMOTE_SHELL in words:
                script = self._make_remote_shell()
                words = [script if word == REMOTE_SHELL else word for word in words]
            child = self._processes.start(
                words,
                {**environ, **method.variables(self._plan)},
                stderr=stderr,
                stdin=0 if self._plan.rank_0_reads_input else b"",
                pass_fds=[file.fileno()],
            )
        self._pid = child.pid if child else 0
        return child

    def signal(self, number: int) -> None:
        """Pass a stop signal on to the ranks."""
        self._plan.method.send_signal(number, self._pid, self._plan, self._processes)

    def _make_remote_shell(self) -> str:
        self._folder = tempfile.TemporaryDirectory(prefix="launch-")
        script = Path(self._folder.name) / "remote-shell"
        script.write_text(remote_shell.script(self._plan.python))
        script.chmod(0o700)
        return str(script)
