"""Break one line at a time in a copy of the tree, and see whether the tests that belong to it fail.

    python -m tests.mutations [--jobs N] [--only TEXT] [--limit SECONDS]

Prints a table of what was killed and what survived, and ends with 1 when more than MOST_SURVIVORS survive, when a line
is not in its file any more, or when the tests fail without a change. Takes some minutes; no part of CI.
"""
from __future__ import annotations

import argparse
import contextlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
MOST_SURVIVORS = 2
_NOT_COPIED = shutil.ignore_patterns(".git", ".venv*", ".mpi", "__pycache__", ".*_cache", "*.egg-info", "build")

# Tests by what they test: pytest's arguments.
_HANGS = "monitor/hangs/"
_UNIT = "tests/unit/test_"
DECISIONS = (f"{_UNIT}decisions.py",)
HANGS = (f"{_UNIT}hang_watch.py", f"{_UNIT}late_ranks.py")
RESTARTS = (f"{_UNIT}restarts.py", "-k", "follows or does_not_count")
OUTCOME = (f"{_UNIT}outcome.py",)
RESULT = (f"{_UNIT}launch_result.py",)
REPORTS = (f"{_UNIT}rank_checks.py",)
START = (f"{_UNIT}rendezvous.py", "-k", "does_not_match or whatever_else or limit_of_open_files or stale_rank or "
         "passed_over or refused_alone")
SECRET = (f"{_UNIT}secret.py",)
FAILURE = (f"{_UNIT}failure.py", "-k", "orderly or torchrun")
FILES = (f"{_UNIT}checkpoint_files.py", "-k", "target_of_a_link or lock_file or loses_bytes")
STATE = (f"{_UNIT}checkpoint_state.py", "-k", "another_state or averages or that_an_optimizer_trains")


class Mutation(NamedTuple):
    """A change of one line. old: occurs once in the file."""

    file: str  # below utils/
    old: str
    new: str
    tests: Sequence[str]


MUTATIONS = [
    # Which rank failed first
    Mutation("monitor/decisions.py", "self.first = self.first or cause", "self.first = cause", DECISIONS),
    Mutation("monitor/decisions.py", "if not self.departed or now < self._next_check:", "if not self.departed:",
             DECISIONS),
    Mutation("monitor/decisions.py", "_BLOCKED_SHARE if waits(calls) else _BUSY_SHARE", "_BLOCKED_SHARE", DECISIONS),
    Mutation("monitor/decisions.py", "text = text[:_LONGEST_CAUSE]", "text = str(text)", DECISIONS),
    Mutation("monitor/decisions.py", "State.LOST if host_lost else State.KILLED", "State.KILLED", DECISIONS),
    Mutation("monitor/decisions.py", "not self.hung >= set(running) or", "", DECISIONS),
    Mutation("monitor/decisions.py", "if self.first and 0 not in asked_by:", "if self.first:", DECISIONS),
    Mutation("monitor/decisions.py", '(timed_out and not self.has_ended("lost"))', "timed_out", DECISIONS),
    Mutation("monitor/decisions.py", 'and not call["group"] and not call["between_two"]', "", DECISIONS),
    Mutation("monitor/decisions.py", 'return self.rank == cause.rank', "return self.rank == 0", DECISIONS),
    # Whether the ranks hang, and which rank is late
    Mutation(f"{_HANGS}hang_cause.py", "if not threads or (group and group.thread and group.thread not in threads):",
             "if not threads:", HANGS),
    Mutation(f"{_HANGS}hang_cause.py", "is_even = most == others[0][1]", "is_even = False", HANGS),
    Mutation(f"{_HANGS}hang_cause.py", '(call["peer"],) if call["peer"] in running else ()', '(call["peer"],)', HANGS),
    Mutation(f"{_HANGS}hang_cause.py", "if len(causes) > _SHOWN_RANKS:", "if False:", HANGS),
    Mutation(f"{_HANGS}hang_cause.py", 'compares_sizes = all_sizes or call["operation"] in _EQUAL_SIZES',
             "compares_sizes = True", HANGS),
    Mutation(f"{_HANGS}hang_cause.py", "silent = {rank for rank in unreported(positions, running) if rank in found or "
             "not found}", "silent = set(unreported(positions, running))", HANGS),
    Mutation(f"{_HANGS}hang_watch.py", "if awaited & positions.keys() - first.keys():", "if False:", HANGS),
    Mutation(f"{_HANGS}hang_watch.py", "if left and not late(positions, running):", "if left:", HANGS),
    Mutation(f"{_HANGS}hang_watch.py",
             "[time_before(group.timeout) for group in groups if group and group.timeout]", "[0.0]", HANGS),
    Mutation(f"{_HANGS}hang_watch.py", "max(self.limit / 2, 2 * self.interval)", "self.limit / 2", HANGS),
    Mutation(f"{_HANGS}hang_watch.py", "min(_LEAD_SECONDS, _LEAD_SHARE * timeout)", "_LEAD_SECONDS", HANGS),
    Mutation(f"{_HANGS}hang_watch.py", "return quiet and not now.work.waits_for_disk", "return quiet", HANGS),
    # How a rank ends
    Mutation("monitor/shutdown.py", "_ORDERLY_EXITS = (None, 0, EXIT_REQUEUE)", "_ORDERLY_EXITS = (None, 0)", FAILURE),
    Mutation("launchers/torchrun.py", "(0 if is_root_cause else 60)", "0", FAILURE),
    # How a launch ends, and whether it starts again
    Mutation("tools/launch/restarts.py", "if not last.certain and len(recent) > 1", "if len(recent) > 1", RESTARTS),
    Mutation("tools/launch/restarts.py", "self._left -= not restart.without", "self._left -= 1", RESTARTS),
    Mutation("tools/launch/restarts.py", "progress.append(step > newest or", "progress.append(step >= newest or",
             RESTARTS),
    Mutation("tools/launch/outcome.py", "if evidence.stopped_by and evidence.stopped_at < losses[0].at:", "if False:",
             OUTCOME),
    Mutation("tools/launch/outcome.py", "if evidence.out_of_memory is None:", "if True:",
             OUTCOME),
    Mutation("tools/launch/outcome.py", "if len(by_signal) == 1 or killed and killed == by_signal:",
             "if len(by_signal) == 1:", OUTCOME),
    Mutation("tools/launch/outcome.py", 'kind == "killed" and waiting and end.status == 128 + signal.SIGABRT',
             'kind == "killed" and waiting', OUTCOME),
    Mutation("tools/launch/launch_result.py", "by_launch = bool(status) and self._is_ending(now)",
             "by_launch = self._is_ending(now)", RESULT),
    Mutation("tools/launch/launch_result.py", "begins = self.launcher.ended_at if self.launcher.name else self.end_at",
             "begins = self.end_at", RESULT),
    Mutation("tools/launch/launch_result.py", "at is not None and at <= now < at + _STOP_SECONDS", "at is not None",
             RESULT),
    # The start
    Mutation("startup/exchange.py", "if world_size == self._world_size <= rank:", "if False:", START),
    Mutation("startup/listener.py", "if soft != resource.RLIM_INFINITY and soft < needed:", "if False:", START),
    Mutation("startup/endpoints.py", 'if not is_required and environ.get("RANK", "").strip():', "if False:", START),
    Mutation("startup/reports.py", 'several_agents = known and len({report["local_rank"] for report in on_host}) < '
             "len(ranks)", "several_agents = False", REPORTS),
    Mutation("startup/secret.py", "if found.st_nlink == 1:", "if True:", SECRET),
    Mutation("startup/secret.py", "found.st_mode & 0o077", "found.st_mode & 0o070", SECRET),
    # Checkpoints
    Mutation("checkpoint/folder.py", "links = [self.path / name for name in kept if (self.path / name).is_symlink()]",
             "links = list[Path]()", FILES),
    Mutation("checkpoint/folder.py", 'if size != entry["size"]:', "if False:", FILES),
    Mutation("checkpoint/lock.py", "if _is_file(path, file):  # the owner has not removed it meanwhile", "if True:",
             FILES),
    Mutation("checkpoint/restore.py", "if first is not saved and not _same_bits(first, saved):", "if False:", STATE),
    Mutation("checkpoint/optimizers.py", "and now.dtype != value.dtype:", "and False:", STATE),
    Mutation("checkpoint/snapshot.py", "found |= trained & _exchanged(ddp)", "found |= _exchanged(ddp)", STATE),
    # Ranks that wait for each other; jobs; findings
    Mutation("coordination.py", "departed = departed_ranks()", "departed = {}",
             (f"{_UNIT}coordination.py",)),
    Mutation("tools/schedulers/job_checks.py", '(before.ended or before.state == "unknown")', "before.ended",
             (f"{_UNIT}schedulers_checks.py",)),
    Mutation("tools/doctor/run_checks.py", "few = 2 * len({place.node for place in places}) <= len(nodes)",
             "few = True", (f"{_UNIT}doctor_checks.py", "-k", "not processes")),
    Mutation("tools/doctor/checks/shared_storage.py",
             'able > 0 or (hosts == 1 and is_local and folder["code"] in _HOST_FAULTS)', "able > 0",
             (f"{_UNIT}doctor_storage.py",)),
]


def run_tests(tree: Path, tests: Sequence[str], limit: float) -> tuple[str, str]:
    """Run tests in a copy of the tree: "passed", "failed", "time limit" or "no tests", and the first that failed."""
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no", *tests]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(words, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               text=True, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        return "time limit", ""
    finally:
        with contextlib.suppress(ProcessLookupError):  # what a test has left
            os.killpg(process.pid, signal.SIGKILL)
    failed = next((line.split()[1] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))), "")
    return {0: "passed", 5: "no tests"}.get(process.returncode, "failed"), failed


@contextlib.contextmanager
def broken(tree: Path, mutation: Mutation) -> Iterator[None]:
    """Change a line in a copy of the tree for a while."""
    path = tree / "utils" / mutation.file
    text = path.read_text()
    path.write_text(text.replace(mutation.old, mutation.new))
    try:
        yield
    finally:
        path.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, help="copies of the tree that are tested at once")
    parser.add_argument("--only", default="", help="mutations with this text in file or line")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for the tests of a mutation")
    options = parser.parse_args()
    chosen = [mutation for mutation in MUTATIONS if options.only in f"{mutation.file}: {mutation.old}"]
    stale = [mutation for mutation in chosen
             if (ROOT / "utils" / mutation.file).read_text().count(mutation.old) != 1]
    for mutation in stale:
        print(f"not found once in utils/{mutation.file}: {mutation.old}")

    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(options.jobs):
            trees.put(shutil.copytree(ROOT, Path(folder, str(number)), ignore=_NOT_COPIED))

        def tested(mutation: Mutation | None, tests: Sequence[str]) -> tuple[str, str, float]:
            tree, begin = trees.get(), time.monotonic()
            try:
                with broken(tree, mutation) if mutation else contextlib.nullcontext():
                    return *run_tests(tree, tests, options.limit), time.monotonic() - begin
            finally:
                trees.put(tree)

        mutations = [mutation for mutation in chosen if mutation not in stale]
        sets = list(dict.fromkeys(tuple(mutation.tests) for mutation in mutations))
        with ThreadPoolExecutor(options.jobs) as pool:
            unchanged = dict(zip(sets, pool.map(lambda tests: tested(None, tests), sets), strict=True))
            wrong = [tests for tests, (status, _, _) in unchanged.items() if status != "passed"]
            for tests in wrong:
                print(f"without a change: {' '.join(unchanged[tests][:2])}: {' '.join(tests)}")
            usable = [mutation for mutation in mutations if tuple(mutation.tests) not in wrong]
            results = pool.map(lambda mutation: tested(mutation, mutation.tests), usable)
            survivors = 0
            for mutation, (status, failed, seconds) in zip(usable, results, strict=True):
                survivors += status == "passed"
                what = "survived" if status == "passed" else "killed  "
                by = failed.partition("::")[2] or status
                print(f"{what} {seconds:4.0f} s  {mutation.file}: {mutation.old}  [{by}]", flush=True)
    print(f"{len(usable) - survivors} killed, {survivors} survived, {len(stale)} not found, "
          f"{len(wrong)} sets of tests that fail unchanged")
    return int(survivors > MOST_SURVIVORS or bool(stale) or bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
