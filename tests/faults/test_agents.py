"""Two torchrun agents: on one host over localhost, and with restarts after workers of either agent were killed."""
from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("rendezvous", ["c10d", "static"])
def test_two_agents_on_one_host_train_over_localhost(rendezvous: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    agents = []
    for node in range(2):
        how = (["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}"] if rendezvous == "c10d" else
               [f"--node-rank={node}", "--master-addr=localhost", f"--master-port={port}"])
        agents.append(subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", *how,
             str(ROOT / "tests" / "rank_program.py"), "--torch"], env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    outputs = [agent.communicate(timeout=120)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(outputs)
    assert sorted(re.findall(r"rank \d of 4", "".join(outputs))) == [f"rank {rank} of 4" for rank in range(4)]
    assert "4 ranks on 1 host by torchrun" in "".join(outputs)


@pytest.mark.parametrize("where", ["one host", "two hosts"])
@pytest.mark.parametrize("rendezvous", ["c10d", "static"])
def test_two_agents_recover_from_every_kill(need: Callable[[str], Path], rendezvous: str, where: str) -> None:
    """tests/faults/agent_kills.py does it as often as it is asked to."""
    if where == "two hosts":
        need("hosts")
    command = [sys.executable, "-m", "tests.faults.agent_kills", "--kills", "3", "--steps", "20",
               "--rendezvous", rendezvous, *(["--hosts"] if where == "two hosts" else [])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0 and "all the same" in done.stdout, done.stdout + done.stderr
