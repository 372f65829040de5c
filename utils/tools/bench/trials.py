"""Run a training script on some of the ranks of this launch, again and again.

The ranks of ddpkit bench do not train. Each starts a process, which is a rank of a new
launch (RANK, WORLD_SIZE, ...), and waits for it. A trial can therefore have fewer ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from ...distributed import Distributed, setup_distributed
from .. import child_ranks
from ..operations import gather_objects
from .worker import VARIABLE, Phase, Trial, TrialReport

_FOLLOWER = "ended because another rank has failed"


class TrialFailed(RuntimeError):
    """A rank of a trial failed; the message is its last output."""


@contextlib.contextmanager
def start_trials(command: Sequence[str], timeout: float) -> Iterator[tuple[Distributed, Trials]]:
    """Join the ranks of this launch, which will run trials of a script."""
    threads = os.environ.get("OMP_NUM_THREADS")
    with setup_distributed("gloo", bind=False) as job:  # gloo: the GPUs stay free for the trials
        if threads is None:
            del os.environ["OMP_NUM_THREADS"]  # the script chooses as it would by itself
        # An exception lets _wait() end the rank of a trial.
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        yield job, Trials(job, command, timeout)


class Trials:
    """Runs of one script. Every rank of the launch creates a Trials; all call run() together."""

    def __init__(self, job: Distributed, command: Sequence[str], timeout: float) -> None:
        self._job, self._command = job, list(command)
        self._timeout, self._count = timeout, 0
        self._place = (job.node_rank, job.local_rank, job.rank)
        self._places = sorted(gather_objects(self._place))  # host by host

    def hosts(self, ranks: int) -> int:
        """Return the number of hosts that the first `ranks` ranks are on."""
        return len({node for node, _, _ in self._places[:ranks]})

    def run(self, ranks: int, batch: int, phases: Sequence[tuple[str, int]]) -> list[TrialReport]:
        """Run the script on the first `ranks` ranks; return their reports.

        batch: for {batch} in its arguments. phases: as in Trial. Raises TrialFailed on all ranks.
        """
        self._count += 1
        port = gather_objects(child_ranks.free_port())[0]  # rank 0 is on the first host
        chosen = self._places[:ranks]
        result: tuple[int, str, str] | None = None
        if self._place in chosen:
            number, nodes = chosen.index(self._place), [node for node, _, _ in chosen]
            environ = child_ranks.environment(nodes, number, self._job.master_addr, port)
            with tempfile.TemporaryDirectory(prefix="ddpkit-trial-") as folder:
                trial = Trial(list(phases), f"{folder}/report")
                result = (number, *self._run_rank(trial, batch, environ))
        found = sorted(one for one in gather_objects(result) if one is not None)
        failed = [(number, error) for number, _, error in found if error]
        if failed:
            number, error = min(failed, key=lambda one: one[1].startswith(_FOLLOWER))
            raise TrialFailed(f"rank {number} of {ranks}: {error}")
        return [_read_report(text) for _, text, _ in found]

    def _run_rank(self, trial: Trial, batch: int, environ: dict[str, str]) -> tuple[str, str]:
        """Run this rank's process. Returns its report, or "" and an error."""
        command = [word.replace("{batch}", str(batch)) for word in self._command]
        environ[VARIABLE] = json.dumps(asdict(trial))
        output = Path(f"{trial.output}.out")
        words = [*child_ranks.words(f"{__package__}.worker"), *command]
        with output.open("w") as file:
            process = subprocess.Popen(
                words, env=environ, stdout=file, stderr=file, start_new_session=True
            )
        error = self._wait(process)
        report, text = Path(trial.output), output.read_text(errors="replace").strip()
        if not report.exists():
            return "", "\n".join([error, *text.splitlines()[-8:]])
        return report.read_text(), ""

    def _wait(self, process: subprocess.Popen[bytes]) -> str:
        """Wait for a rank, and end it when another one has failed. Returns an error or ""."""
        key, limit = f"trial/{self._count}", time.monotonic() + self._timeout
        error = ""
        try:
            while process.poll() is None:
                if self._job.store.check([key]):
                    error = _FOLLOWER
                    break
                if time.monotonic() > limit:
                    error = f"did not end within {self._timeout:.0f} s. Raise --trial-timeout"
                    break
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.2)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.returncode and not error:
            error = f"exit status {process.returncode}"
        if error:
            self._job.store.set(key, error)
        return error


def _read_report(text: str) -> TrialReport:
    content = json.loads(text)
    phases = {kind: Phase(**phase) for kind, phase in content.pop("phases").items()}
    return TrialReport(**content, phases=phases)
