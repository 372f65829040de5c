"""Methods that start an agent on each host: ssh, pbs_tmrsh and pbsdsh; and local, without agents.

Source: ssh(1), pbs_tmrsh(8), pbsdsh(1B).
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from ..launch_plan import Method, Plan


class Ssh(Method):
    """ssh starts an agent on each other host; this host's agent is a child of ddpkit launch."""

    name = title = "ssh"

    def reach(self, plan: Plan, host: str, words: Sequence[str]) -> list[str]:
        if host == plan.host:
            return list(words)
        options = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=30", "-T"]
        return [self.path, *options, host, shlex.join(["exec", *words])]


class PbsTmrsh(Method):
    """pbs_tmrsh starts an agent on each host as a task of the PBS job."""

    name = title = "pbs_tmrsh"
    scheduler = "pbs"
    # If a job's first host has no slots (mpiprocs=0), OpenPBS never informs it that a task on the
    # first host with slots has ended. pbs_tmrsh and pbsdsh wait for that. Seen with OpenPBS 23.
    kill_when_done = True
    # Not PBS_JOBCOOKIE: OpenPBS 23.06 makes it from the second in which a daemon connected.
    passes_secret = False

    def reach(self, plan: Plan, host: str, words: Sequence[str]) -> list[str]:
        # Python itself may need this variable, and PBS passes none on.
        library_path = plan.environ.get("LD_LIBRARY_PATH")
        env = ["/usr/bin/env", f"LD_LIBRARY_PATH={library_path}"] if library_path else []
        return [self.path, *self.host_options(host), *env, *words]

    def host_options(self, host: str) -> list[str]:
        return [host]


class Pbsdsh(PbsTmrsh):
    """pbsdsh starts an agent on each host as a task of the PBS job."""

    name = title = "pbsdsh"

    def host_options(self, host: str) -> list[str]:
        # By its line in the node file: OpenPBS v23.06.06 has no -h yet.
        lines = Path(os.environ["PBS_NODEFILE"]).read_text(encoding="utf-8").split()
        return ["-n", str(lines.index(host)), "--"]


class Local(Method):
    """ddpkit launch itself starts the ranks, on this host alone."""

    name = title = "local"
    local = True

    def describe(self) -> str:
        return ""
