"""Carrying a plan out: on this host alone, by one native command, or by agents.

Not here: making the plan (plan.py).
"""
from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
import time

from ..schedulers.pbs import short
from .commands import host_words
from .outcome import Outcome, say
from .output import Output, open_file, prefixed
from .plan import Plan
from .ports import ReservedPort
from .processes import Processes, Signals
from .report import EXIT_REQUEUE, Report

_DRAIN_SECONDS = 1.0


def run(plan: Plan) -> int:
    """Start the ranks and wait for them; returns the exit status of the launch, that of the first rank that failed.

    EXIT_REQUEUE when all ranks have saved after a stop, whatever the launcher between has made of it.
    """
    launch_id = f"{os.getpid()}-{os.urandom(6).hex()}"
    native = plan.means != "local" and not plan.agents
    ports = range(0)
    if native and plan.means == "srun" and short(plan.host) not in map(short, plan.hosts):
        # a login host, perhaps behind a firewall
        from .native import srun_ports
        ports = srun_ports()
    with Report(plan.world_size + 16 if native else 16, ports) as report, Signals() as signals:
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
    outputs: list[Output] = []  # of the ranks, where each line is to start with the rank
    port = ReservedPort()  # for as long as this process lives
    workers = plan.options.torchrun
    with Processes(launch_id) as processes:
        for words, variables in host_words(plan, 0, "127.0.0.1", str(port.port), "127.0.0.1"):
            file = open_file(plan.options.output_dir, variables["RANK"]) if (
                plan.options.output_dir and not workers) else None
            pipe = subprocess.PIPE if plan.options.prefix_output and file is None and not workers else file
            # A stop of PBS goes to the whole session, and torchrun would die of it.
            child = processes.start(words, {**plan.environ, **variables}, new_session=workers, stdout=pipe, stderr=pipe,
                                    hold_signals=True)
            if file is not None:
                os.close(file)
            outputs += [Output(stream, number, int(variables["RANK"])) for number, stream in (
                (1, child.stdout), (2, child.stderr)) if stream is not None] if child else []
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
                    for output in outputs:
                        selector.register(output, selectors.EVENT_READ)
                    for key, _ in selector.select(due):
                        if isinstance(key.fileobj, Output):
                            _pass_on(key.fileobj, outputs)
        limit = time.monotonic() + _DRAIN_SECONDS
        while outputs and time.monotonic() < limit:  # what the ranks left behind may hold their streams open
            for output in list(outputs):
                _pass_on(output, outputs)
            time.sleep(0.01)
    return outcome.status


def _pass_on(output: Output, outputs: list[Output]) -> None:
    """Write the lines that a rank has written; take it off the list at its end."""
    text = output.read()
    if text is None:
        outputs.remove(output)
        text = output.rest()
        output.close()
    if text:
        with contextlib.suppress(OSError):  # whoever read it is gone
            target = (sys.stdout if output.stream == 1 else sys.stderr).buffer
            target.write(prefixed(text, output.index))
            target.flush()
