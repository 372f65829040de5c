"""Find a launcher below a launcher: in the command before the start, then in running ranks.

A command may hide what it starts. So /proc is searched for torchrun workers below a rank, for torch
in the memory of the ranks, and for the threads of a process group. torch names these threads; torch
2.8 does not name gloo's.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import shlex
import time
from collections.abc import Iterable, Iterator, Sequence

from ...channel import Message
from ...host import process
from ...launchers.rank_variables import LAUNCH_RANK
from .child_processes import LAUNCH_VARIABLE
from .launch_plan import Plan
from .launch_result import LaunchResult, print_status

# Programs and modules that start ranks. The name of a group is the --launcher to use instead.
_LAUNCHER = re.compile(
    r"(?P<torchrun>torchrun|torch\.distributed\.(?:run|launch))"
    r"|(?P<mpiexec>(?:mpi(?:exec|run)|orterun|prterun|prun)(?:\W.*)?)"
    r"|(?P<srun>srun)|(?P<pbs_tmrsh>pbs_tmrsh)|(?P<pbsdsh>pbsdsh)|aprun|horovodrun|launch\.py"
    r"|accelerate(?:\.commands\.(?:launch|accelerate_cli))?"
    r"|deepspeed(?:\.launcher\.(?:runner|launch))?"
)
_SHELLS = ("sh", "bash", "dash", "zsh", "ksh")
_WRAPPER = re.compile(r"-m|env|nice|(python|pypy)[\d.]*")
_BEFORE_COMMAND = re.compile(r"-.*|\d+|\w+=.*|exec|then|do", re.DOTALL)

_FIRST_SECONDS = 0.5  # seconds between the first looks; the interval grows
LONGEST_SECONDS = 10.0  # longest interval between two looks
LATE_SECONDS = 120.0  # warns this long after all ranks have loaded torch, if no group has formed
_GROUP_THREADS = ("pt_gloo", "pt_nccl", "pt_xccl")


def launcher_in(words: Sequence[str]) -> tuple[str, str] | None:
    """Return the launcher that a command runs, and the --launcher to use instead; None for none.

    It is found behind env, nice, python -m and the "--" of another program, and in `bash -c`.
    """
    name = os.path.basename(words[0]) if words else ""
    if found := _LAUNCHER.fullmatch(name):
        return name, found.lastgroup or ""
    if name in _SHELLS:
        pairs = zip(words[1:], words[2:], strict=False)
        text = next((text for option, text in pairs if re.fullmatch("-[a-z]*c", option)), "")
        return next(filter(None, map(launcher_in, _shell_commands(text))), None)
    if _WRAPPER.fullmatch(name):
        return launcher_in(_without_options(words[1:]))
    before = list(itertools.takewhile(lambda word: word != "--", words))
    if any(word == "-m" or word.endswith(".py") for word in before):  # its own arguments follow
        return None
    return launcher_in(words[len(before) + 1 :]) if before else None


def _without_options(words: Iterable[str]) -> list[str]:
    return list(itertools.dropwhile(_BEFORE_COMMAND.fullmatch, words))


def _shell_commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command in a shell's text."""
    lexer = shlex.shlex(text.replace("\n", " ; "), posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        words = list(lexer)
    except ValueError:  # an open quotation mark: the shell reports it
        return
    for ends, command in itertools.groupby(words, lambda word: set(word) <= set("();<>|&")):
        if not ends:
            yield _without_options(command)


def refusal(words: Sequence[str], program: str, option: str) -> str:
    """Return why a command is no script or program of one rank; "" where it may be one.

    program: the command that the user has typed. option: the option that allows it.
    """
    found = launcher_in(words)
    if found is None:
        return ""
    name, launcher = found
    instead = f"--launcher {launcher}" if launcher else ""
    if launcher == "torchrun" and program == "ddpkit launch":
        instead = "--torchrun"
    example = " ".join(filter(None, [program, instead, "train.py"]))
    verb = "is" if os.path.basename(words[0]) == name else "runs"
    return (
        f"the command {verb} {name}, which starts ranks itself, as ddpkit launch does. Expected "
        f"the script or program of one rank. Leave {name} and its options out, as in {example}; "
        f"or give {option} if each rank is a program of its own"
    )


class GroupWatch:
    """Watch from outside whether the ranks of this host form a process group of torch.

    next_look: seconds until the next look; None if there is nothing left to see. formed: whether a
    rank has had a group, or a socket has had the port that ddpkit launch gave to rank 0; true if
    the ranks are not watched.
    """

    def __init__(self, launch_id: str, ranks: int) -> None:
        """launch_id: id in the ranks' environment. ranks: number of ranks here; 0: do not watch."""
        self.next_look: float | None = None
        self.formed = not ranks
        self._id, self._ranks = launch_id.encode(), ranks
        self._port = self._rank_0 = 0  # rank 0's port and process id; 0: unknown
        self._in_group: set[int] = set()  # ranks that have a process group
        self._with_torch: set[int] = set()
        self._start = time.monotonic()
        self._due = self._start + _FIRST_SECONDS
        self._late_at = math.inf  # known when all ranks have loaded torch
        self._reported = False

    def messages(self, now: float) -> Iterator[Message]:
        """Look if it is time; yield messages for ddpkit launch."""
        if len(self._in_group) < self._ranks and now >= self._due:
            yield from self._look()
            seconds = (now - self._start) / 20
            self._due = now + min(max(seconds, _FIRST_SECONDS), LONGEST_SECONDS)
        self.next_look = self._due - now if len(self._in_group) < self._ranks else None
        if not self.formed and not self._reported and now >= self._late_at:
            self._reported = True
            yield {"kind": "copies", "running": True}

    def ended_without_group(self) -> bool:
        """Return whether the ranks, which have all ended, loaded torch and had no group.

        False if this was reported before. A group that lived between two looks has left a
        connection to its store in TIME_WAIT. A group of less than half a second is missed if the
        script chose its own address.
        """
        self.formed = self.formed or process.uses_tcp_port(self._port)
        return not self.formed and not self._reported and self._all_have_torch()

    def _all_have_torch(self) -> bool:
        return len(self._with_torch) >= self._ranks  # more where hosts share a PID namespace

    def _look(self) -> Iterator[Message]:
        nested: dict[int, int] = {}  # rank -> number of workers of its own
        for pid in process.process_ids():
            environ = process.environment(pid)
            text, _, count = environ.get(LAUNCH_RANK.encode(), b"").partition(b"/")
            launches = environ.get(LAUNCH_VARIABLE.encode(), b"").split(b"/")
            if launches[-1] != self._id or not count:
                continue
            rank, port = int(text), environ.get(b"MASTER_PORT", b"")
            if rank == 0 and not self._port and port.isdigit():
                self._port, self._rank_0 = int(port), pid
            agents = environ.get(b"GROUP_WORLD_SIZE", count)
            if b"TORCHELASTIC_RUN_ID" in environ and int(agents) < int(count):
                nested[rank] = int(environ.get(b"WORLD_SIZE", b"1"))
            elif rank not in self._in_group and _has_group(pid):
                self._in_group.add(rank)
            if rank not in self._with_torch and process.has_loaded_torch(pid):
                self._with_torch.add(rank)
        if self._all_have_torch() and self._late_at == math.inf:
            self._late_at = time.monotonic() + LATE_SECONDS
        has_port = process.uses_tcp_port(self._port, self._rank_0)
        self.formed = self.formed or has_port or bool(self._in_group)
        # Workers of rank 0, or of a rank with a group, are allowed: they may run an evaluation.
        last = max(nested.keys() - self._in_group, default=0)
        if last > 0:
            yield {"kind": "group", "rank": last, "size": nested[last]}


def _has_group(pid: int) -> bool:
    return any(name.startswith(_GROUP_THREADS) for name in process.thread_names(pid))


def note_groups(message: Message, plan: Plan, result: LaunchResult, *, of_rank_0: bool) -> str:
    """Note what a GroupWatch reports; return what is wrong with the groups, or "".

    of_rank_0: whether the message comes from rank 0's host. If no rank has formed a group, a
    warning is printed at once while the ranks run, otherwise only if they succeed.
    """
    if message["kind"] == "copies" and of_rank_0:
        running = message["running"]
        words = [word for word in plan.command if word != "-m"]
        name = next((word for word in words if word.endswith(".py")), words[0])
        verb, formed = ("are running", "has formed") if running else ("ran", "formed")
        warning = (
            f"{plan.world_size} independent copies of {os.path.basename(name)} {verb}: no rank "
            f"{formed} a process group of torch. Expected one group of all ranks. Call "
            "setup_distributed() or init_process_group() in the script, or give --independent if "
            "each rank is a program of its own"
        )
        if running:
            print_status(warning)
        else:
            result.warning = warning
    if message["kind"] != "group":
        return ""
    rank, size = message["rank"], message["size"]
    return (
        f"rank {rank} of {plan.world_size} has formed a process group of {size} "
        f"process{'es' * (size > 1)} without the other ranks. Expected one group of all "
        f"{plan.world_size} ranks. Leave out what starts ranks in the script or program, such as "
        "torchrun, or give --independent if each rank is a program of its own"
    )
