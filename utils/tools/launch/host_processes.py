"""The processes that an agent, or launch.py itself, starts on one host: ranks or one torchrun."""

from __future__ import annotations

import signal
from typing import NamedTuple

from .launch_plan import Plan
from .rank_environment import rank_variables

# Run by each worker of a torchrun that may restart: only there the number of its host is known.
# One word with its option: torchrun's summary names the first word without a hyphen.
_SET_NODE_RANK = (
    "-cimport os, sys; os.environ['NODE_RANK'] = os.environ['GROUP_RANK']; "
    "words = {} + sys.argv[1:]; os.execvp(words[0], words)"
)


class HostProcess(NamedTuple):
    """One process on a host: its words and the variables that only it has."""

    words: list[str]
    variables: dict[str, str]


def host_processes(
    plan: Plan, host: int, address: str, port: str, own_address: str
) -> list[HostProcess]:
    """Return the processes of the host with this index in the plan.

    address, port: where rank 0 or torchrun's store listens. own_address: of this host.
    """
    threads = plan.threads[host]
    common = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    if plan.options.torchrun:
        if not plan.options.max_restarts:  # else torchrun itself numbers the hosts
            common["NODE_RANK"] = str(host)
        return [HostProcess(torchrun_words(plan, host, address, port, own_address), common)]

    return [
        HostProcess(
            list(plan.program),
            rank_variables(
                rank=plan.first_rank(host) + local_rank,
                world_size=plan.world_size,
                local_rank=local_rank,
                local_world_size=plan.ranks[host],
                node_rank=host,
                address=address,
                port=port,
            )
            | common,
        )
        for local_rank in range(plan.ranks[host])
    ]


def torchrun_words(plan: Plan, host: int, address: str, port: str, own_address: str) -> list[str]:
    """Return the command of the torchrun agent of a host; arguments as in host_processes()."""
    options = [
        f"--nproc-per-node={plan.ranks[host]}",
        f"--max-restarts={plan.options.max_restarts}",
    ]
    if plan.options.output_dir:
        options += [f"--log-dir={plan.options.output_dir}/{plan.hosts[host]}", "--redirects=3"]
    elif plan.options.label:
        options += ["--tee=3"]  # torchrun puts the local rank before each line: "[default0]:"

    if len(plan.hosts) == 1:
        options += ["--standalone"]
    elif plan.options.max_restarts:
        # Restarted ranks meet again, which needs a store that outlives them.
        options += [
            f"--nnodes={len(plan.hosts)}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={address}:{port}",
            f"--rdzv-id={port}",
            f"--rdzv-conf=is_host={int(host == 0)}",
            f"--local-addr={own_address}",
        ]
    else:
        options += [
            f"--nnodes={len(plan.hosts)}",
            f"--node-rank={host}",
            f"--master-addr={address}",
            f"--master-port={port}",
            f"--local-addr={own_address}",
        ]

    if plan.options.max_restarts:
        python = [word for word in plan.program[:1] if word == plan.python]
        words = plan.program[len(python) :]
        command = ["--no-python", plan.python, _SET_NODE_RANK.format(python), *words]
    elif plan.is_script:
        command = list(plan.command)
    else:
        command = ["--no-python", *plan.program]
    return [plan.python, "-m", "torch.distributed.run", *options, *command]


def signals_workers(plan: Plan, number: int) -> bool:
    """Return whether a stop signal is for torchrun's workers instead of torchrun itself.

    torchrun passes on neither SIGUSR1 nor SIGUSR2, and after SIGTERM it ends its workers within
    30 seconds. Where it may restart workers it has to get a request to end, or it would restart
    those that obey one.
    """
    ends = number in (signal.SIGTERM, signal.SIGINT)
    return plan.options.torchrun and not (ends and plan.options.max_restarts > 0)
