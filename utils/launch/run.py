"""Carrying a plan out: on this host alone, by one native command, or by agents.

Not here: making the plan (plan.py).
"""
from __future__ import annotations

import os
import selectors
import time

from .agent import free_port
from .commands import host_words
from .control import run_agents
from .native import run_native
from .outcome import Outcome
from .plan import Plan
from .processes import Processes, Signals


def run(plan: Plan) -> int:
    """Start the ranks and wait for them; returns the exit status of the launch, that of the first rank that failed."""
    launch_id = f"{os.getpid()}-{os.urandom(6).hex()}"
    if plan.means == "local":
        return _run_here(plan, launch_id)
    return run_agents(plan, launch_id) if plan.agents else run_native(plan, launch_id)


def _run_here(plan: Plan, launch_id: str) -> int:
    outcome = Outcome()
    workers = plan.options.torchrun
    with Signals() as signals, Processes(launch_id) as processes:
        for words, variables in host_words(plan, 0, "127.0.0.1", str(free_port()), "127.0.0.1"):
            # A stop of PBS goes to the whole session, and torchrun would die of it.
            processes.start(words, {**plan.environ, **variables}, new_session=workers)
        while processes.running:
            now = time.monotonic()
            for index, status in processes.ended():
                who = "torchrun" if workers else f"rank {index}"
                outcome.ended(who, status, now, others=processes.running)
            for number in signals.take():
                if outcome.is_last_stop(number, now):
                    outcome.end_now(number, now)
                else:
                    processes.signal(number, to_their_children=workers and not plan.options.restarts)
            due = None
            if outcome.end_at is not None:
                due = max(0.0, outcome.end_at - now)
                if not due:
                    processes.end(now)
                    due = processes.kill_late(now)
            if processes.running:
                with selectors.DefaultSelector() as selector:
                    selector.register(signals, selectors.EVENT_READ)
                    selector.select(due)
    return outcome.status
