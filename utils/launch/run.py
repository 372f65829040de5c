"""Carrying a plan out: on this host alone, by one native command, or by agents.

Not here: making the plan (plan.py).
"""
from __future__ import annotations

import os
import selectors
import time

from .commands import host_words
from .outcome import Outcome, say
from .plan import Plan
from .ports import ReservedPort
from .processes import Processes, Signals
from .report import EXIT_REQUEUE, Report


def run(plan: Plan) -> int:
    """Start the ranks and wait for them; returns the exit status of the launch, that of the first rank that failed.

    EXIT_REQUEUE when all ranks have saved after a stop, whatever the launcher between has made of it.
    """
    launch_id = f"{os.getpid()}-{os.urandom(6).hex()}"
    native = plan.means != "local" and not plan.agents
    with Report(backlog=plan.world_size + 16 if native else 16) as report, Signals() as signals:
        plan = plan._replace(environ={**plan.environ, **report.variables})
        if plan.means == "local":
            status = _run_here(plan, launch_id, signals)
        elif plan.agents:  # loaded only where needed: what launch.py loads, a short launch feels
            from .control import run_agents
            status = run_agents(plan, launch_id, signals)
        else:
            from .native import run_native
            status = run_native(plan, launch_id, signals, report)
        if report.saved():
            say(f"all ranks have saved, and the run can go on from there (exit status {EXIT_REQUEUE})")
            return EXIT_REQUEUE
        return status


def _run_here(plan: Plan, launch_id: str, signals: Signals) -> int:
    outcome = Outcome()
    port = ReservedPort()  # for as long as this process lives
    workers = plan.options.torchrun
    with Processes(launch_id) as processes:
        for words, variables in host_words(plan, 0, "127.0.0.1", str(port.port), "127.0.0.1"):
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
