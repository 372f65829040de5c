"""`doctor logs`: the cause of a failure in the output of a job."""
from __future__ import annotations

import ast
import errno
import io
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch.distributed import HashStore

from tests.unit.programs import ROOT
from utils.checkpoint.disk import explain
from utils.launch_error import LaunchError
from utils.log import get_logger, setup_logging
from utils.monitor import shutdown as failure
from utils.tools.doctor import doctor_cli as cli
from utils.tools.doctor.causes import CAUSES, Cause
from utils.tools.doctor.logs import diagnose
from utils.tools.launch.launch_result import LaunchResult

NAMES = set("""watchdog_timeout client_socket_timeout ipv6_addresses duplicate_gpu no_socket_interface store_key_timeout
libfabric_not_found unhandled_system_error invalid_device_ordinal peer_died cuda_oom host_oom xid lustre_eviction quota
walltime node_failure mpi_init_segfault version_mismatch ssh_refused""".split())
Found = tuple[str, int | None, str | None, bool | None]


def find(*files: tuple[str, str]) -> Found | None:
    """Cause, rank, host and restart of a job with these files: name and text."""
    found = diagnose([(io.BytesIO(text.encode()), name) for name, text in files])
    return found and (found.cause.name, found.rank, found.host, found.cause.restart)


OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
LOST = "RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:57993\n"
IPV6 = "[W socket.cpp:601] [c10d] The IPv6 network addresses of (n1, 29500) cannot be retrieved (gai error: -2).\n"
HANG = "rank 5 on n3 did not enter collective 7, in which rank 0-4,6-7 waits. It is at train.py, line 4, in main"
WATCHDOG = "[rank{0}]:[E724 {1} ProcessGroupNCCL.cpp:616] [Rank {0}] Watchdog caught collective operation timeout: W\n"
TORCHRUN = "Root Cause (first observed failure):\n[0]:\n  time      : 2026-07-24_08:33:05\n  host      : n7\n" \
           "  rank      : 5 (local_rank: 1)\n  exitcode  : -9 (pid: 77)\n  traceback: Signal 9 (SIGKILL) received\n"


@pytest.mark.parametrize(("text", "expected"), [
    ("step 1 loss 0.5\nstep 2 loss 0.4\n", None), ("", None),
    (f"Traceback (most recent call last):\n{OOM}\nrank 3 on n2 failed: OutOfMemoryError: CUDA out of memory.\n"
     "rank 1 on n1 stops, because rank 3 on n2 failed: OutOfMemoryError: CUDA out of memory.\n"
     "launch.py: rank 3 ended with exit status 1\n", ("cuda_oom", 3, "n2", False)),
    ("ValueError: 7\nrank 1 on n1 failed: ValueError: 7\n"
     "rank 0 on n1 stops, because rank 1 on n1 failed: ValueError: 7", ("python_exception", 1, "n1", None)),
    (f"{LOST}rank 0 on n1 stops, because rank 2 on n2 (pid 7) died without a message. It was probably killed\n"
     "launch.py: rank 2 was ended by SIGKILL (exit status 137)\n", ("killed", 2, "n2", None)),
    ("launch.py: rank 2 on n2 was ended by SIGSEGV (exit status 139)", ("crash", 2, "n2", None)),
    (f"rank 0 on n1 stops, because {HANG}", ("kit_message", 5, "n3", None)),
    (LOST + "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.\nsrun: error: n2: task 6: Out Of Memory\n",
     ("host_oom", 6, "n2", False)),
    (WATCHDOG.format(0, "08:34:00") + TORCHRUN, ("watchdog_timeout", None, None, None)),
    (LOST + TORCHRUN.replace("n7", "n6").replace("_08", "_09") + TORCHRUN, ("killed", 5, "n7", None)),
    (IPV6 + WATCHDOG.format(0, "08:34:00"), ("watchdog_timeout", None, None, None)),
    (IPV6, ("ipv6_addresses", None, "n1", False)), (IPV6 + 300 * "step\n", None),
    ("srun: error: unpack_header: protocol_version 65363 not supported\nmax locked memory (kbytes) unlimited", None),
    ("n1:1:9 [0] NCCL WARN socketProgress: Connection closed by remote peer n2<5912>\n"
     "[n1:1 :0:98] Caught signal 11 (Segmentation fault)\n", ("peer_died", None, "n2", None)),
    ("n1:1:9 [0] NCCL WARN socketProgress: Connection closed by remote peer n2<5912>\n"
     "srun: error: n2: task 4: Segmentation fault (core dumped)\n", ("crash", 4, "n2", None)),
    (f"10%|#\r[rank4]: {OOM}\r20%", ("cuda_oom", 4, None, False)),
    ("CUDA out of memory. Tried to allocate 20 MiB. GPU 0 has a total capacity of 79.10 GiB of which 5.00 MiB is free. "
     "Process 7 has 78 GiB memory in use. Of the allocated memory 300.00 MiB is allocated by PyTorch",
     ("cuda_oom", None, None, None)),
    ("n1:1:2 [0] NCCL INFO NET/Plugin: dlerror=libnccl-net.so: cannot open shared object file: No such file or "
     "directory No plugin found (libnccl-net.so), using internal implementation\n", None),
])
def test_cause_rank_host_and_restart(text: str, expected: Found | None) -> None:
    assert find(("job.out", text)) == expected


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.name)
def test_each_pattern_finds_its_cause(cause: Cause) -> None:
    """No other row of the table, and of docs/troubleshooting.md, comes first."""
    for pattern in cause.patterns:
        if cause.reporter == "kit":
            pattern = pattern.replace("[rank ...", "[rank 3/8 n2").replace("rank ... on ...", "rank 3 on n2") + "7) "
        line = pattern.replace("{host}", "n1").replace("{name}", "Other").replace("{status}", " 7").replace("...", "x")
        found = find(("job.out", line.lstrip("^")))
        assert found and (found[0], found[3]) == (cause.name, cause.restart), line


RECORDINGS = sorted((ROOT / "tests/recordings/deaths").rglob("*.json"))


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_quoted_log(path: Path) -> None:
    """The cause of a log that was quoted in public, and no restart discouraged that makes sense."""
    recording = json.loads(path.read_text())
    expected = recording["expected"]
    cause, rank, host, restart = find(("job.out", "\n".join(recording["lines"]))) or pytest.fail("no cause")
    assert (cause if cause in NAMES else "other") == expected["cause"]
    assert restart == expected["restart"] or restart is None, "a wrong answer is worse than none"
    assert rank in (expected["rank"], None) and host in (expected["host"], None)


def test_first_in_time_of_several_files_is_the_cause() -> None:
    files = [("rank-0.log", f"08:50:00\n{OOM}"), ("rank-1.log", "08:10:00\nOSError: 7"), ("rank2", f"08:10:00\n{OOM}")]
    assert find(*files) == ("cuda_oom", 2, None, False)
    assert find(*files[:2]) == ("cuda_oom", 0, None, False), "an exact message counts more"
    survivor = f"rank 0 on n1 stops, because rank 2 on n2 failed: {OOM}"
    assert find(("rank-0.log", survivor), ("rank-2.log", OOM)) == ("cuda_oom", 2, "n2", False)
    assert find(("rank-0.log", OOM), ("rank-2.log", OOM)) == ("cuda_oom", None, None, False), "which was first is open"


def test_output_longer_than_a_block_is_read_to_its_end() -> None:
    line = b"step 1 loss 0.5\n"
    found = diagnose([(io.BytesIO(line * 200_000 + b"[rank3]: " + OOM.encode()), "job.out")])
    assert found and (found.rank, found.finding.line_number) == (3, 200_001)


@pytest.mark.parametrize(("text", "status"), [
    ("loss", 0), ("Node failure on n1", 1), (OOM, 3), ("srun: error: n1: task 3: Exited with exit code 1", 4)])
def test_exit_status(text: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.out").write_text(text)
    assert cli.main(["logs", str(tmp_path / "job.out")]) == status
    assert cli.main(["logs", "--json", str(tmp_path / "job.out")]) == status
    out, names = capsys.readouterr().out, {0: None, 1: "node_failure", 3: "cuda_oom", 4: "unknown"}
    assert json.loads(out[out.index("{"):])["cause"] == names[status]
    assert cli.main(["logs", str(tmp_path / "missing")]) == 2


def doctor(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "scripts/doctor.py", *words], cwd=ROOT, stderr=subprocess.PIPE, text=True,
                          timeout=60, **options)


def test_output_that_the_locale_cannot_encode_is_escaped(tmp_path: Path) -> None:
    (tmp_path / "job.out").write_bytes(b"caf\xe9 " + OOM.encode())
    environ = {**os.environ, "PYTHONIOENCODING": "latin-1:strict"}  # as with LANG=en_US
    done = doctor("logs", str(tmp_path / "job.out"), env=environ, stdout=subprocess.PIPE)
    assert done.returncode == 3 and "caf\\ufffd torch.OutOfMemoryError" in done.stdout


def test_closed_standard_input_is_a_mistake_of_the_command_line() -> None:
    done = doctor("logs", "-", preexec_fn=lambda: os.close(0))
    assert done.returncode == 2 and "standard input is closed. Expected the output of a job" in done.stderr


@pytest.mark.parametrize("words", [
    ["doctor.py", "--only", "installation"], ["launch.py", "--dry-run", "ls"],
    ["plan.py", "--parameters", "1e9"], ["../utils", "explain"]], ids=" ".join)
def test_reader_that_has_ended_is_no_error(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, f"scripts/{words[0]}", *words[1:]], cwd=ROOT, text=True, timeout=60,
                          stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


def test_documentation_has_the_table() -> None:
    page, restart = (ROOT / "docs/troubleshooting.md").read_text(), {True: "yes", False: "no", None: "maybe"}
    for cause in CAUSES:
        symptoms = "<br>".join(f"`{text.lstrip('^').strip()}`" for text in cause.patterns[:4])
        cells = symptoms, f"**{cause.name}**: {cause.meaning}", cause.check, cause.remedy, restart[cause.restart]
        assert f"\n| {' | '.join(text.replace('|', chr(92) + '|') for text in cells)} |\n" in page, cause.name


START = "4 ranks on 2 hosts by launch.py, backend gloo, rank 0 at 10.0.0.1:29500\n"
TERMINATE = "terminate called without an active exception\n"
ABORTED = "launch.py: error: rank 3 on n2 was ended by SIGABRT (exit status 134)"
RANK_LOST = "rank 0 on n1 stops, because rank 3 on n2 (pid 7) died without a message. It was probably killed"


@pytest.mark.parametrize(("text", "cause", "status", "words"), [
    (f"{START}{TERMINATE}{ABORTED}\n", "std_terminate", 1, "The training had ended"),
    (f"{START}{TERMINATE}srun: error: n2: task 3: Aborted (core dumped)\n", "std_terminate", 1, "training had ended"),
    (f"{START}{TERMINATE}{ABORTED}, the others will be ended\n", "std_terminate", 4, "does not show whether"),
    (f"{TERMINATE}{ABORTED}\n", "std_terminate", 4, "does not show whether"),
    (f"{START}{4 * TERMINATE}{ABORTED}\n", "std_terminate", 4, "does not show whether"),
    (f"{START}{TERMINATE}{RANK_LOST}\n{ABORTED}, the others will be ended\n", "kit_message", 1, "rank 3 on n2"),
    (f"{START}{TERMINATE}srun: error: n2: task 3: Segmentation fault (core dumped)\n", "crash", 1, "crashed in native"),
], ids=["launch.py", "srun", "others were ended", "no start", "all ranks", "in the training", "crash"])
def test_abort_at_the_end_of_the_interpreter(text: str, cause: str, status: int, words: str) -> None:
    found = diagnose([(io.BytesIO(text.encode()), "job.out")])
    assert found and (found.cause.name, found.rank, found.host) == (cause, 3, "n2")
    assert cli.exit_status(found) == status and words in found.cause.meaning


@pytest.mark.parametrize("text", [
    "slurm epilog: State: FAILED (exit code 1)", "Exit_status = 271", "ExitCode=1:0", "  exitcode  : 1 (pid: 7)",
    "mpirun detected that one or more processes exited with non-zero status", "MPI_ABORT was invoked on rank 0",
    "launch.py: error: torchrun on n2 ended with exit status 1", "submit.py: job 7: failed, exit status 2",
    "2026-11-22 12:00:00 ERROR trainer: gave up", "train.py: error: argument --lr: invalid float value: 'x'",
    "rank 3 on n2 failed: SystemExit: 7", "rank 3 on n2 failed: Unusual: 7", "FATAL: no such module"])
def test_sign_of_a_failure_is_never_no_failure(text: str) -> None:
    found = diagnose([(io.BytesIO(f"step 1\n{text}\n".encode()), "job.out")])
    assert found is not None and cli.exit_status(found) != 0


@pytest.mark.parametrize("text", [
    START, "launch.py: 4 ranks on 2 hosts (n1, n2) by srun\n", "Exit_status = 0", "finished with exit status 0",
    "rank 0 on n1 starts step 1", "  rank 0-3 on n1, n2: in collective 7", "[rank 3/8 n2] WARNING: slow",
    "12:00:00 ERROR retry\n" + 300 * "step\n", "[rank 0/8 n1] ERROR: cannot save step 5\n" + 300 * "step\n"])
def test_job_that_went_well_has_no_failure(text: str) -> None:
    assert find(("job.out", text)) is None


# The kit's own messages -----------------------------------------------------------------------------------------------
# Collected from the code. In them rank 3 on n2 is at fault, and rank 1 on n1 reports it.

OUTSIDE_JOBS = ("plan", "bench", "doctor", "submission")
ERRORS_OF_LAUNCH = ("PlanError", "AllocationError", "InterpreterError")
ERRORS_OF_RANKS = ("CheckpointError", "PermanentError", "StateError", "CoordinationError", "RankTimeout", "RankLost",
                   "StoreLost")
BUILT_IN_ERRORS = ("ValueError", "RuntimeError", "TypeError", "NotImplementedError")
ERRORS = ("LaunchError", *ERRORS_OF_LAUNCH, *ERRORS_OF_RANKS, *BUILT_IN_ERRORS)
CAUSE = "rank 3 on n2 (pid 77) does not respond: its process is stopped by a signal"
VALUES = {  # what an expression in a message stands for, by a regular expression
    r"^len\(|^size$|world_size|num_ranks": "8",
    r"plan\.hosts\[part|allocation": "x",
    r"seconds|timeout|^waited": "60",
    r"(self\._|^)rank_name|ranks\.name|_this_rank$": "rank 3 on n2",
    r"_reporter": "rank 1 of 8 on n1",
    r"placement\.rank|self\._rank$|self\.rank$": "1",
    r"gethostname": "n1",
    r"silent\.get|^state$": "its process is stopped by a signal",
    r"^first$|first_cause|^cause$|departed\[|^mismatch$|known_cause": CAUSE,
    r"^how$": "left by sys.exit() at /home/me/train.py, line 7, in main",
    r"describe_status": "ended with exit status 1",
    r"Signals\(": "SIGTERM",
    r"_missing_hosts\(|^missing$|planned\[|plan\.hosts\[": "n2",
    r"^self\.missing\(|ranks\.missing\(": "1 of 8 ranks did not join: rank 3",
    r"^who$": "rank 3",
    r"peer\.rank|first\.ranks|^rank$|^index$|report\['rank'\]": "3",
    r"^where$": " on n2",
    r"peer\.host|^hosts\[rank\]|_host\((report|self\._reports\[rank\])\)": "n2 (pid 77)",
    r"_host\(": "n1 (pid 7)",
    r"^host(\[0\])?$|report\['host'\]|reports\[rank\]\['host'\]|reports\[next": "n2",
    r"disk\.explain": "No space left on device. Free some space on its file system",
}


def spell(node: ast.expr) -> str:
    """A message with plausible values; "" if it is written elsewhere."""
    if isinstance(node, ast.BinOp):
        return spell(node.left)
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    text = ""
    for part in parts:
        if isinstance(part, ast.FormattedValue):
            expression = ast.unparse(part.value)
            value = next((value for pattern, value in VALUES.items() if re.search(pattern, expression)), "x")
            value = "x" if text.endswith("=") else value
            text += "rank 3 on n2 (pid 77)" if expression == "rank" and not text else value
        elif isinstance(part, ast.Constant):
            text += str(part.value)
    return text if any(isinstance(part, ast.Constant) and " " in str(part.value) for part in parts) else ""


class Message(NamedTuple):
    place: str  # "rendezvous/exchange.py:84"
    kind: str  # what prints it: the name of an exception, or of a function
    text: str


def collect() -> Iterator[Message]:
    """Messages that the code can print about a failure: whatever is raised, logged as an error, or found."""
    for path in sorted((ROOT / "utils").rglob("*.py")):
        place = path.relative_to(ROOT / "utils")
        if place.parts[0] in OUTSIDE_JOBS:
            continue
        printed: set[ast.expr] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args:
                name = ast.unparse(node.func)
                kind = name.rpartition(".")[2]
                if name in ("sys.stderr.write", "_log.error") or kind in ("fail", "_fail", "print_error", *ERRORS):
                    printed.add(node.args[0])
                    text = spell(node.args[0])
                    if text and text != "%s":
                        yield Message(f"{place}:{node.lineno}", kind, re.sub("%[.0-9]*[a-z]", "x", text))
            elif isinstance(node, ast.JoinedStr) and node not in printed:  # what the ranks find out about each other
                text = spell(node)
                if place.name == "coordination.py" and re.match(r"rank [01] .{30}|8 of ", text):
                    yield Message(f"{place}:{node.lineno}", "RankTimeout", text)
                elif place.parts[0] == "rendezvous" or place.name == "failure.py":
                    if re.match(r"(rank 3 on n2( \(pid 77\))? |a collective )\w.{9}", text) and " failed:" not in text:
                        yield Message(f"{place}:{node.lineno}", "found", text)


MESSAGES = list(collect())


def print_message(message: Message, monkeypatch: pytest.MonkeyPatch) -> None:
    """Print it as the kit does."""
    kind, text = message.kind, message.text
    in_launch = message.place.startswith("launch/")
    if kind == "write" or " stops" in text:
        sys.stderr.write(text)
    elif message.place.startswith("launch/rank_start"):
        sys.stderr.write(f"launch.py: error: on n2: {text}\n")
    elif kind in ("fail", "_fail", "print_error", *ERRORS_OF_LAUNCH) or kind == "LaunchError" and in_launch:
        LaunchResult().fail(text, 0.0)
    elif kind == "found":
        sys.stderr.write(f"rank 1 on n1 stops, because {text}\nrank 0 on n0 stops, because {text}\n")
    elif kind == "LaunchError":
        error = LaunchError(text)
        monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
        failure.print_without_traceback(error)
        sys.excepthook(LaunchError, error, None)
    elif kind == "error":
        setup_logging(3, 8)
        get_logger("test").error("%s", text)
    else:
        error_class = type(kind, (Exception,), {})
        failure.Shutdown(3, 8, "gloo", HashStore(), None).report(error_class(text))


def named(message: Message) -> tuple[int | None, str | None]:
    """The rank and the host that a message blames: those that its first sentence is about, or who prints it."""
    kind, text = message.kind, re.sub(r"rank \d of \d( on n\d)?", "", message.text)
    if kind in BUILT_IN_ERRORS:
        return 3, "n2"
    printed_by_rank = (3, "n2") if kind == "error" or kind in ERRORS_OF_RANKS else None
    if "message" in text or "launcher's output" in text:  # another one says more
        printed_by_rank, text = None, text.removeprefix("[rank 3/8 n1] ERROR: ")
    text = text.partition(" stops, because ")[2] or text
    found = re.sub(r" \([^()]*\)", "", text if kind == "write" else text.partition(". ")[0])
    if " stops: " in found:
        return None, None
    if rank := re.search(r"rank (\d)(?:/8| on) (n\d)", found) or re.search(r"rank (\d)(?!')()", found):
        return int(rank[1]), rank[2] or None
    host = re.search(r"\b(?:on|from|to) (n\d)", found)
    return printed_by_rank or (None, "n2" if message.place.startswith("launch/rank_start") else host and host[1])


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: f"{message.place}-{message.kind}")
def test_message_of_the_kit_is_understood(
        message: Message, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "n2")
    print_message(message, monkeypatch)
    output = capsys.readouterr().err
    found = diagnose([(io.BytesIO(output.encode()), "job.out")])
    assert found is not None and cli.exit_status(found) != 0, f"a failure: {output}"
    assert (found.rank, found.host) == named(message), output
    reports_exit = "exit status" in output or "SIG" in output
    assert found.cause.name not in ("unknown", "terminated") or reports_exit, output
    if found.cause.reporter == "kit":
        assert found.cause.meaning[:100] in output, "the cause in the kit's own words"


FULL_DISK = "[rank 0/8 n1] ERROR: cannot save step 5 in /ckpt on rank 3 on n2: {}"


@pytest.mark.parametrize(("text", "expected"), [
    (f"rank 1 on n1 stops, because {CAUSE} (SIGSTOP)", ("kit_message", 3, "n2", None)),
    ("The ranks hang: no progress for 36 s.\n  rank 3 on n2 (pid 7) does not respond: no rank of this host does, so "
     "the host is down or its network is cut. Its last report: 7 collectives entered, at train.py\n"
     "  rank 0-2 on n1: in collective 7, all_reduce; at train.py\n", ("kit_message", 3, "n2", None)),
    ("rank 1 on n1 stops, because rank 3 on n2 (pid 7) entered another collective 7: broadcast of [[4]] at train.py. "
     "The other ranks entered all_reduce of [[4]] at train.py", ("kit_message", 3, "n2", None)),
    ("rank 1 on n1 stops, because rank 3 on n2 (pid 7) is idle. It is at train.py", ("kit_message", 3, "n2", None)),
    ("rank 1 on n1 stops, because rank 3 on n2 left by sys.exit() at train.py after 7 collectives, and other ranks "
     "need it for more. The ranks have uneven work: give each the same", ("uneven_work", 3, "n2", False)),
    ("launch.py: error: ssh ended with exit status 255 before an agent has connected from n2. See its message above, "
     "and check that host", ("launch_error", None, "n2", None)),
    (FULL_DISK.format(explain(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))), ("disk_full", 3, "n2", False)),
    (FULL_DISK.format(explain(OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)))), ("quota", 3, "n2", False)),
    ("launch.py: the ranks report what failed first: rank 3 on n2 failed: ValueError: 7. Rank 3 on n2 ended with "
     "exit status 1", ("python_exception", 3, "n2", None)),
    ("LaunchError: this rank (n1, pid 7) does not start. Look for the message of rank 0\n"
     "LaunchError: rank 3 on n2 (pid 8) cannot start: CUDA error: out of memory", ("cuda_oom", 3, "n2", None)),
    ("LaunchError: the ranks differ in torch version; expected the same everywhere:",
     ("version_mismatch", None, None, False)),
])
def test_cause_in_the_words_of_the_kit(text: str, expected: Found) -> None:
    """The first cause comes before its consequences, and advice on a restart is given where it is known."""
    ended = "launch.py: error: rank 1 on n1 ended with exit status 1, the others will be ended\n"
    assert find(("job.out", f"{text}\n{ended}")) == expected
