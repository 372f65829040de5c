"""Run two torchrun agents whose workers are killed at random moments, until the training is done.

python -m tests.faults.agent_kills [--kills 100] [--rendezvous c10d|static] [--hosts] [--bare] [--seed 0]

The training makes as many kills possible as asked for: it ends some steps after the last one. Each kill is a SIGKILL
for one worker of either agent, at any moment: while it imports, starts, trains or saves. Prints the seconds from each
kill to the next step of the training, and the last line of the training, which must be that of a run without kills.
--hosts: one agent on each of two hosts (network namespaces, needs root). --bare: the worker calls
init_process_group() instead of setup_distributed(), for comparison. Exit status 0: all recovered, with the same line.
"""
from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.cluster.hosts import Hosts

ROOT = Path(__file__).resolve().parents[2]
RECOVERY_SECONDS = 120.0


# The worker -----------------------------------------------------------------------------------------------------------

def work(folder: Path, steps: int, bare: bool) -> None:
    """Train on one rank; every step is saved, and logged by rank 0."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    from utils import setup_distributed

    torch.set_num_threads(1)
    if bare:
        dist.init_process_group("gloo")
    else:
        setup_distributed("gloo", timeout=60)
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    saved, step, loss = folder / "state", 0, torch.zeros(())
    if saved.exists():
        step, weights, momenta = torch.load(saved, weights_only=True)
        model.load_state_dict(weights)
        optimizer.load_state_dict(momenta)
    dist.barrier()  # all have read the state before rank 0 writes the next one
    while step < steps or not (folder / "enough").exists():
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * min(step, steps) + dist.get_rank()))
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        if step < steps:
            optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)
        step = min(step + 1, steps)
        if dist.get_rank() == 0:
            torch.save((step, model.state_dict(), optimizer.state_dict()), folder / "state.new")
            os.replace(folder / "state.new", saved)
            with (folder / "steps").open("a") as log:
                log.write(f"{time.time()}\n")
        time.sleep(0.005)
        enough = torch.tensor(float((folder / "enough").exists() and step >= steps))
        dist.all_reduce(enough)
        if enough > 0:
            break
    if dist.get_rank() == 0:
        digest = sum(value.double().sum().item() for value in model.state_dict().values())
        (folder / "done").write_text(f"done {digest!r}\n")
    dist.barrier()


# The agents and the killer --------------------------------------------------------------------------------------------

def agents(folder: Path, steps: int, rendezvous: str, hosts: Hosts | None, bare: bool) -> list[subprocess.Popen[str]]:
    """Start one agent of one worker on each host, or both here."""
    with socket.create_server(("", 0)) as probe:
        port = probe.getsockname()[1]
    address = hosts.address[hosts.hosts[0]] if hosts else "localhost"
    started = []
    for node in range(2):
        how = (["--rdzv-backend=c10d", f"--rdzv-endpoint={address}:{port}", "--rdzv-id=kills"]
               if rendezvous == "c10d" else
               [f"--node-rank={node}", f"--master-addr={address}", f"--master-port={port}"])
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1",
                   "--max-restarts=1000", *how, "-m", "tests.faults.agent_kills", "--worker", str(folder),
                   "--steps", str(steps), *(["--bare"] if bare else [])]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        entered = [*hosts.enter(hosts.hosts[node]), *command] if hosts else command
        with (folder / f"agent.{node}").open("w") as output:
            started.append(subprocess.Popen(entered, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT,
                                            text=True, start_new_session=True, preexec_fn=end_with_parent))
    return started


def end_with_parent() -> None:
    """In a child: get SIGTERM when this script ends, however it does; an agent ends its workers then."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGTERM)


def steps_made(folder: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return (folder / "steps").read_bytes().count(b"\n")
    return 0


def run(folder: Path, kills: int, steps: int, rendezvous: str, hosts: Hosts | None, bare: bool,
        moments: random.Random) -> tuple[str, list[float]]:
    """Return the last line of one training, and the seconds from each kill to the next step."""
    running, seconds, made = agents(folder, steps, rendezvous, hosts, bare), [], 0
    try:
        while made < kills:
            before, killed_while_starting = steps_made(folder), made and moments.random() < 0.3
            limit = time.monotonic() + RECOVERY_SECONDS
            while not killed_while_starting and steps_made(folder) < before + 3:
                check(running, folder, limit)
            time.sleep(moments.uniform(0, 2.0 if killed_while_starting else 0.2))
            victim = folder / f"pid.{moments.randrange(2)}"
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                at, before = time.time(), steps_made(folder)
                os.kill(int(victim.read_text()), signal.SIGKILL)
                made += 1
                if moments.random() < 0.5:
                    limit = time.monotonic() + RECOVERY_SECONDS
                    time.sleep(0.3)  # a step that was under way
                    before = steps_made(folder)
                    while steps_made(folder) == before:
                        check(running, folder, limit)
                    if not killed_while_starting:
                        seconds.append(time.time() - at)
        (folder / "enough").touch()
        limit = time.monotonic() + RECOVERY_SECONDS
        for agent in running:
            status = agent.wait(limit - time.monotonic())
            if status:
                raise RuntimeError(f"an agent ended with status {status}:\n{outputs(folder)}")
        return (folder / "done").read_text().strip(), seconds
    finally:
        for agent in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()
        for file in folder.glob("pid.*"):  # torchrun gives each worker a session of its own
            with contextlib.suppress(ProcessLookupError, ValueError):
                os.kill(int(file.read_text()), signal.SIGKILL)


def check(running: list[subprocess.Popen[str]], folder: Path, limit: float) -> None:
    """Wait a little; RuntimeError when an agent has ended or the limit is over."""
    time.sleep(0.01)
    if any(agent.poll() is not None for agent in running):
        raise RuntimeError(f"an agent ended before its time:\n{outputs(folder)}")
    if time.monotonic() > limit:
        raise RuntimeError(f"no step within {RECOVERY_SECONDS:.0f} s after a kill:\n{outputs(folder)}")


def outputs(folder: Path) -> str:
    return "\n".join((folder / f"agent.{node}").read_text(errors="replace")[-3000:] for node in range(2))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--rendezvous", choices=["c10d", "static"], default="c10d")
    parser.add_argument("--hosts", action="store_true")
    parser.add_argument("--bare", action="store_true")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        (args.worker / f"pid.{os.environ['GROUP_RANK']}").write_text(str(os.getpid()))
        work(args.worker, args.steps, args.bare)
        return 0
    lines: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="agent-kills-") as name, contextlib.ExitStack() as stack:
        hosts = stack.enter_context(Hosts(2, prefix="e", subnet="10.78.7")) if args.hosts else None
        for what, kills in (("never killed", 0), (f"{args.kills} kills", args.kills)):
            folder = Path(name) / what.replace(" ", "-")
            folder.mkdir()
            start = time.monotonic()
            lines[what], seconds = run(folder, kills, args.steps, args.rendezvous, hosts, args.bare,
                                       random.Random(args.seed))
            print(f"{what}: {lines[what]}, {time.monotonic() - start:.1f} s", flush=True)
        if seconds:
            print(f"from a kill to the next step: median {statistics.median(seconds):.1f} s, longest "
                  f"{max(seconds):.1f} s, {len(seconds)} measured")
    same = len(set(lines.values())) == 1
    print("all the same" if same else "NOT THE SAME")
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
