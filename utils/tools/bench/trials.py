"""Run a training script repeatedly on some ranks of this job, with `ddpkit launch`."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import asdict

from ...launch_protocol import FAILURE
from ..launch import child_ranks
from ..launch.launch_cli import ranks_of_hosts
from .worker import RESULT, Phase, Trial, TrialReport

_LAUNCH = child_ranks.words(f"{__package__.rpartition('.')[0]}.launch.launch_cli")
_WORKER = child_ranks.words(f"{__package__}.worker")
_SHOWN_LINES = 12


class TrialFailed(RuntimeError):
    """A rank of a trial failed; the message is the end of its output."""


class Trials:
    """Repeated runs of one script.

    world_size: number of ranks that `ddpkit launch` starts here. A trial may have fewer, on the
    first hosts.
    """

    def __init__(self, command: Sequence[str], options: Sequence[str], timeout: float) -> None:
        """options: for `ddpkit launch`. Raises LaunchError if it would start no ranks."""
        self._command, self._options, self._timeout = list(command), list(options), timeout
        self._ranks_of_hosts = ranks_of_hosts([*options, "--", *_WORKER])
        self.world_size = sum(self._ranks_of_hosts)

    def hosts(self, ranks: int) -> int:
        """Return the number of hosts that this number of ranks needs."""
        counts = range(1, len(self._ranks_of_hosts) + 1)
        return next(count for count in counts if sum(self._ranks_of_hosts[:count]) >= ranks)

    def can_run(self, ranks: int) -> bool:
        """Whether all used hosts get the same number of ranks, as `ddpkit launch` starts them."""
        return ranks == self.world_size or ranks % self.hosts(ranks) == 0

    def run(self, ranks: int, batch: int, phases: Sequence[tuple[str, int]]) -> list[TrialReport]:
        """Run the script on the first `ranks` ranks; return their reports.

        batch: replaces {batch} in its arguments. phases: as in Trial. Raises TrialFailed.
        """
        options = self._options
        if ranks < self.world_size:
            options = [*options, "-n", str(ranks)]
            if len(self._ranks_of_hosts) > 1:
                options += ["--nodes", str(self.hosts(ranks))]
        trial = json.dumps(asdict(Trial(list(phases))))
        command = [word.replace("{batch}", str(batch)) for word in self._command]
        status, output = self._start([*_LAUNCH, *options, "--", *_WORKER, trial, *command])
        results = [line for line in output.splitlines() if line.startswith(RESULT)]
        if results:
            return [_read_report(report) for report in json.loads(results[0].removeprefix(RESULT))]
        lines = [line for line in output.splitlines() if line.strip() and FAILURE not in line]
        raise TrialFailed("\n".join([f"{ranks} ranks: {status}", *lines[-_SHOWN_LINES:]]))

    def _start(self, words: Sequence[str]) -> tuple[str, str]:
        """Run `ddpkit launch`; return how it ended, and its output."""
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        problem = ""
        try:
            output, _ = process.communicate(timeout=self._timeout)
        except subprocess.TimeoutExpired:
            problem = f"they did not end within {self._timeout:.0f} s. Raise --trial-timeout"
            process.terminate()
            output, _ = process.communicate()
        except BaseException:
            process.terminate()
            process.wait()
            raise
        finally:
            signal.signal(signal.SIGTERM, before)
        return problem or f"exit status {process.returncode}", output


def _read_report(content: dict[str, object]) -> TrialReport:
    phases: dict[str, dict[str, float]] = content.pop("phases")  # type: ignore[assignment]
    of_kinds = {kind: Phase(**phase) for kind, phase in phases.items()}  # type: ignore[arg-type]
    return TrialReport(**content, phases=of_kinds)  # type: ignore[arg-type]
