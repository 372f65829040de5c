"""Two torchrun agents: on one host over localhost, and with restarts after workers of either agent were killed."""
from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.programs import ENVIRONMENT, ROOT


def test_two_agents_on_one_host_train_over_localhost() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d",
               f"--rdzv-endpoint=localhost:{port}", str(ROOT / "tests" / "rank_program.py"), "--torch"]
    agents = [subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
              for _ in range(2)]
    output = "".join(agent.communicate(timeout=120)[0] for agent in agents)
    assert [agent.returncode for agent in agents] == [0, 0], output
    assert sorted(re.findall(r"rank (\d) of 4", output)) == list("0123")
    assert "4 ranks on 1 host by torchrun" in output


@pytest.mark.parametrize("options", [["--rendezvous", "c10d", "--hosts"], ["--rendezvous", "static"]], ids=" ".join)
def test_two_agents_recover_from_every_kill(need: Callable[[str], Path], options: list[str]) -> None:
    """agent_kills.py does it as often as it is asked to."""
    if "--hosts" in options:
        need("hosts")
    command = [sys.executable, "-m", "tests.faults.agent_kills", "--kills", "2", "--steps", "20", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0 and "all the same" in done.stdout, done.stdout + done.stderr
