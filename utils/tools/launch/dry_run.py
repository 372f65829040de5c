"""Render a plan as shell commands that do the same as the launch."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from . import remote_shell
from .host_ranks import host_processes
from .launch_plan import HOST_FILE, REMOTE_SHELL, Plan
from .rank_environment import clean


def shell_lines(plan: Plan, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the commands of a plan for a shell that has `environ`.

    Values that are known only at the start are in <angle brackets>.
    """
    if plan.method.is_native_launcher:
        yield _native_launcher_line(plan, environ)
    if plan.native_launcher_starts_ranks:
        return

    address = "127.0.0.1" if len(plan.hosts) == 1 else f"<{plan.hosts[0]}>"
    for index, host in enumerate(plan.hosts):
        for words, variables in host_processes(plan, index, address, "<free port>", f"<{host}>"):
            settings = [f"{name}={value}" for name, value in variables.items()]
            command = ["env", *settings, *words]
            if plan.method.is_native_launcher:
                yield f"# on {host}: {shlex.join(command)}"
            else:
                yield shlex.join(plan.method.reach(plan, host, command))


def _native_launcher_line(plan: Plan, environ: Mapping[str, str]) -> str:
    program = ["<agent>"] if plan.uses_agents else plan.program
    words = plan.method.command(plan, program)
    line = shlex.join([*_env_words(plan, environ), *words])
    for variable, mark, text, mode in (
        ("remote_shell", REMOTE_SHELL, remote_shell.script(plan.python), "700"),
        ("hosts", HOST_FILE, plan.method.host_file(plan), "600"),
    ):
        if mark in line:
            escaped = text.replace("\\", "\\\\").replace("%", "%%").replace("\n", "\\n")
            line = line.replace(mark, f'"${variable}"')
            make_file = f'{variable}=$(mktemp) && printf {shlex.quote(escaped)} >"${variable}"'
            line = f'{make_file} && chmod {mode} "${variable}" && {line}'
    return line


def _env_words(plan: Plan, environ: Mapping[str, str]) -> list[str]:
    """Return the env command that sets the plan's environment; [] if the shell has it already."""
    wanted = {**plan.environ, **plan.method.variables(plan)}
    kept = clean(environ)
    unset = [
        name
        for name in environ
        if name not in wanted and (name in kept or not plan.method.sets_variable(name))
    ]
    changed = [f"{name}={value}" for name, value in wanted.items() if environ.get(name) != value]
    if not unset and not changed:
        return []
    return ["env", *(word for name in unset for word in ("-u", name)), *changed]
