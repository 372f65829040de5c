"""`doctor logs`: the cause of a failure in the output of a job."""
from __future__ import annotations

import errno
import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from tests.unit.programs import ROOT
from utils.checkpoint import CheckpointError
from utils.checkpoint.disk import explain
from utils.checkpoint.entries import StateError
from utils.errors import LaunchError
from utils.log import get_logger, setup_logging
from utils.monitor import shutdown as failure
from utils.tools.doctor import doctor_cli as cli
from utils.tools.doctor.causes import CAUSES
from utils.tools.doctor.failure_cause import FailureCause
from utils.tools.doctor.lines import read_restart
from utils.tools.doctor.logs import diagnose, exit_status, summary
from utils.tools.launch.launch_result import Ended, LaunchResult

NAMES = set("""watchdog_timeout client_socket_timeout ipv6_addresses duplicate_gpu no_socket_interface store_key_timeout
libfabric_not_found unhandled_system_error invalid_device_ordinal peer_died cuda_oom host_oom xid lustre_eviction quota
walltime node_failure mpi_init_segfault version_mismatch ssh_refused""".split())
Found = tuple[str, int | None, str | None, bool | None]


def find(*files: tuple[str, str]) -> Found | None:
    """Cause, rank, host and restart of a job with these files: name and text."""
    found = diagnose([(io.BytesIO(text.encode()), name) for name, text in files])
    assert found is None or all(one.cause.name != "unknown" for one in found.others)
    return found and (found.cause.name, found.rank, found.host, found.cause.restart)


OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
LOST = "RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:57993\n"
HANGS = "The ranks hang: no progress for 7 s. Where each rank is, and its stacks: /home/u/hang-20260601-120000\n"
EVEN = ("rank 0 on n1 (pid 3) entered a different collective 2: barrier at a.py, line 3; rank 1 on n2 (pid 4) entered "
        "a different collective 2: all_reduce at a.py, line 4. One of these is a collective that only some ranks call; "
        "which one cannot be told")
CIRCLE = "which rank is wrong cannot be told: every rank that others wait for also waits"
IPV6 = "[W socket.cpp:601] [c10d] The IPv6 network addresses of (n1, 29500) cannot be retrieved (gai error: -2).\n"
HANG = "rank 5 on n3 did not enter collective 7, in which ranks 0-4,6-7 wait. It is at train.py, line 4, in main"
WATCHDOG = "[rank{0}]:[E724 {1} ProcessGroupNCCL.cpp:616] [Rank {0}] Watchdog caught collective operation timeout: W\n"
TORCHRUN = "Root Cause (first observed failure):\n[0]:\n  time      : 2026-07-24_08:33:05\n  host      : n7\n" \
           "  rank      : 5 (local_rank: 1)\n  exitcode  : -9 (pid: 77)\n  traceback: Signal 9 (SIGKILL) received\n"


def said(kind: str, cause: str, rank: int | None = None, host: str | None = None) -> str:
    """The line that the kit writes about a failure."""
    return f"ddpkit-failure {json.dumps({'kind': kind, 'rank': rank, 'host': host, 'cause': cause})}\n"


ENDED = "the others will be ended"


@pytest.mark.parametrize(("text", "expected"), [
    (f"Traceback (most recent call last):\n{OOM}\n"
     + said("exception", "rank 3 on n2 failed: OutOfMemoryError: CUDA out of memory.", 3, "n2")
     + "rank 1 on n1 stops, because rank 3 on n2 failed: OutOfMemoryError: CUDA out of memory.\n"
     + said("status", "rank 3 ended with exit status 1", 3, "n2"), ("cuda_oom", 3, "n2", False)),
    ("ValueError: 7\nrank 1 on n1 failed: ValueError: 7\n"
     + said("exception", "rank 1 on n1 failed: ValueError: 7", 1, "n1")
     + "rank 0 on n1 stops, because rank 1 on n1 failed: ValueError: 7", ("python_exception", 1, "n1", None)),
    (LOST + said("killed", "rank 2 on n2 ended without a report. It was killed (out of memory, or a signal)", 2, "n2")
     + said("status", "rank 2 on n2 was ended by SIGKILL (exit status 137)", 2, "n2"), ("killed", 2, "n2", None)),
    (said("killed", "rank 2 on n2 ended without a report", 2, "n2"), ("kit_message", 2, "n2", None)),
    (said("status", "rank 2 on n2 was ended by SIGSEGV (exit status 139)", 2, "n2"), ("crash", 2, "n2", None)),
    ("/usr/bin/python3: No module named x", ("program_error", None, None, False)),
    ("/spool/slurm_script: line 19: exec: ddpkit: not found", ("program_error", None, None, False)),
    (said("hang", HANG, 5, "n3") + f"rank 0 on n1 stops, because {HANG}", ("hang", 5, "n3", None)),
    (said("hang", "rank 3 on n2 (pid 7) does not respond: its process is stopped by a signal", 3, "n2")
     + said("status", "rank 0 on n1 ended with exit status 1", 0, "n1"), ("hang", 3, "n2", None)),
    (said("uneven", "rank 3 on n2 left by sys.exit(). The ranks run different numbers of steps: give each", 3, "n2"),
     ("uneven_work", 3, "n2", False)),
    (WATCHDOG.format(0, "08:34:00") + TORCHRUN, ("watchdog_timeout", None, None, None)),
    (LOST + TORCHRUN.replace("n7", "n6").replace("_08", "_09") + TORCHRUN, ("killed", 5, "n7", None)),
    (TORCHRUN.replace("n7", "n6").replace("5 (", "0 (").replace("SIGKILL", "SIGTERM") + TORCHRUN
     + said("status", f"torchrun on n7 ended with exit status 1, {ENDED}", None, "n7"), ("killed", 5, "n7", None)),
    (IPV6 + WATCHDOG.format(0, "08:34:00"), ("watchdog_timeout", None, None, None)),
    ("n1:1:9 [0] NCCL WARN socketProgress: Connection closed by remote peer n2<5912>\n"
     "[n1:1 :0:98] Caught signal 11 (Segmentation fault)\n", ("peer_died", None, "n2", None)),
    ("n1:1:9 [0] NCCL WARN socketProgress: Connection closed by remote peer n2<5912>\n"
     "srun: error: n2: task 4: Segmentation fault (core dumped)\n", ("crash", 4, "n2", None)),
    # The announcement of a hang says less than its cause, which is the last line on a terminal.
    (f"{HANGS}ddpkit launch: {EVEN}\n", ("hang", None, None, None)),
    (f"{HANGS}ddpkit launch: rank 1 on n2 (pid 4) entered a different collective 7: barrier at a.py, line 3. The other "
     "ranks entered all_reduce\n", ("hang", 1, "n2", None)),
    (f"The ranks hang: no progress for 7 s.\n  {CIRCLE}. Check: rank 0 on n1 (pid 4) waits in broadcast\n"
     + said("hang", f"{CIRCLE}: rank 0 on n1"),
     ("hang", None, None, None)),
    (said("exception", "rank 0 on n1 failed: RuntimeError: [enforce fail at inline_container.cc:747] . open file "
          "failed with strerror: Permission denied", 0, "n1"), ("file_permission", 0, "n1", False)),
    (said("command", "no such file: nothere.py (in /home/u). Check the path of the script"),
     ("command_error", None, None, False)),
    ("[rank3]: RuntimeError: [../gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:4711\n"
     + said("status", f"rank 3 on n4 ended with exit status 1, {ENDED}", 3, "n4")
     + said("left", "before that, rank 1 on n2 had ended with exit status 0", 1, "n2"), ("left_early", 1, "n2", False)),
    (f"[rank3]: {OOM}\n" + said("status", f"rank 3 on n4 ended with exit status 1, {ENDED}", 3, "n4")
     + said("left", "before that, rank 1 on n2 had ended with exit status 0", 1, "n2"), ("cuda_oom", 3, "n4", False)),
    (said("status", "rank 0 on n1 ended with exit status 2", 0, "n1")
     + said("bad host", "preflight: the training is not started on n3. bad-hosts.txt lists bad hosts", host="n3"),
     ("bad_host", None, "n3", True)),
    (said("status", "rank 0 on n1 ended with exit status 2", 0, "n1")
     + said("preflight", "preflight: the training is not started, because of the findings marked BAD above"),
     ("preflight", None, None, False)),
    ("LaunchError: this rank (n1, pid 7) does not start. Look for the message of rank 0\n"
     + said("start", "rank 3 on n2 (pid 8) cannot start: CUDA error: out of memory", 3, "n2"),
     ("cuda_oom", 3, "n2", None)),
    (said("stop", "SIGTERM: ddpkit launch has received it: the job was cancelled"), ("terminated", None, None, None)),
    (f"10%|#\r[rank4]: {OOM}\r20%", ("cuda_oom", 4, None, False)),
    ("CUDA out of memory. Tried to allocate 20 MiB. GPU 0 has a total capacity of 79.10 GiB of which 5.00 MiB is free. "
     "Process 7 has 78 GiB memory in use. Of the allocated memory 300.00 MiB is allocated by PyTorch",
     ("cuda_oom", None, None, None)),
    *((f"ddpkit-failure {text}\nValueError: 7", ("python_exception", None, None, None)) for text in (
        "{torn", "[7]", '{"kind": "hang"}', '{"kind": "hang", "rank": "3", "host": 5, "cause": "x"}')),
])
def test_cause_rank_host_and_restart(text: str, expected: Found) -> None:
    assert find(("job.out", text)) == expected


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.name)
def test_each_pattern_finds_its_cause(cause: FailureCause) -> None:
    """No other row of the table comes first."""
    for pattern in cause.patterns:
        line = pattern.replace("[rank ...", "[rank 3/8 n2").replace("{host}", "n1").replace("{name}", "Other")
        line = line.replace("{status}", " 7").replace("...", "x")
        found = find(("job.out", line.lstrip("^")))
        assert found and (found[0], found[3]) == (cause.name, cause.restart), line


RECORDINGS = {path.stem: json.loads(path.read_text()) for path in (ROOT / "tests/recordings/deaths").rglob("*.json")}


def quoted(recording: dict[str, Any]) -> Found:
    return find(("job.out", "\n".join(recording["lines"]))) or pytest.fail("no cause")


@pytest.mark.parametrize("name", sorted(RECORDINGS))
def test_quoted_log(name: str) -> None:
    """The cause of a log that was quoted in public, and no restart discouraged that makes sense."""
    expected = RECORDINGS[name]["expected"]
    cause, rank, host, restart = quoted(RECORDINGS[name])
    assert (cause if cause in NAMES else "other") == expected["cause"]
    assert restart == expected["restart"] or restart is None, "a wrong answer is worse than none"
    assert rank in (expected["rank"], None) and host in (expected["host"], None)


def test_rank_and_host_are_found_in_most_quoted_logs() -> None:
    found = [(quoted(one), one["expected"]) for one in RECORDINGS.values()]
    assert sum(rank == expected["rank"] for (_, rank, _, _), expected in found if expected["rank"] is not None) >= 11
    assert sum(host == expected["host"] for (_, _, host, _), expected in found if expected["host"]) >= 42


def test_first_in_time_of_several_files_or_the_last_line_of_a_long_one_is_the_cause() -> None:
    files = [("rank-0.log", f"08:50:00\n{OOM}"), ("rank-1.log", "08:10:00\nOSError: 7"), ("rank2", f"08:10:00\n{OOM}")]
    assert find(*files) == ("cuda_oom", 2, None, False)
    assert find(*files[:2]) == ("cuda_oom", 0, None, False), "an exact message counts more"
    survivor = said("exception", f"rank 2 on n2 failed: {OOM}", 2, "n2")
    assert find(("rank-0.log", survivor), ("rank-2.log", OOM)) == ("cuda_oom", 2, "n2", False)
    assert find(("rank-0.log", OOM), ("rank-2.log", OOM)) == ("cuda_oom", None, None, False), "which was first is open"
    line = b"step 1 loss 0.5\n"  # output longer than a block is read to its end
    found = diagnose([(io.BytesIO(line * 200_000 + b"[rank3]: " + OOM.encode()), "job.out")])
    assert found and (found.rank, found.finding.line_number) == (3, 200_001)


@pytest.mark.parametrize(("text", "status"), [
    ("loss\nTraining finished\n", 0), ("loss", 4), ("", 4),
    ("Node failure on n1", 1), (OOM, 3), ("srun: error: n1: task 3: Exited with exit code 1", 4)])
def test_exit_status(text: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.out").write_text(text)
    assert cli.main(["logs", str(tmp_path / "job.out")]) == status
    assert cli.main(["logs", "--json", str(tmp_path / "job.out")]) == status
    out, names = capsys.readouterr().out, {0: None, 1: "node_failure", 3: "cuda_oom", 4: "unknown"}
    assert json.loads(out[out.index("{"):])["cause"] == names[status]
    assert cli.main(["logs", str(tmp_path / "missing")]) == 2


def test_streams_of_another_encoding_or_none(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.out").write_bytes(b"caf\xe9 " + OOM.encode())
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="latin-1"))  # as with LANG=en_US
    assert cli.main(["logs", str(tmp_path / "job.out")]) == 3
    assert b"caf\\ufffd torch.OutOfMemoryError" in written.getvalue()
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["logs", "-"])
    assert "standard input is closed. Expected the output of a job" in capsys.readouterr().err


@pytest.mark.parametrize("words", [
    ["utils", "doctor", "--only", "installation"], ["scripts/launch.py", "--dry-run", "ls"],
    ["utils", "plan", "--parameters", "1e9"], ["-m", "utils.launchers"], ["utils", "--print-completion", "bash"],
    ["utils", "--help"], ["utils", "sites", "list"], ["utils", "launch", "--help"]], ids=" ".join)
def test_reader_that_has_ended_is_no_error(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, *words], cwd=ROOT, text=True, timeout=60,
                          stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


START = "4 ranks on 2 hosts by launch.py, backend gloo, rank 0 at 10.0.0.1:29500\n"


@pytest.mark.parametrize("text", [
    "slurm epilog: State: FAILED (exit code 1)", "Exit_status = 271", "ExitCode=1:0", "  exitcode  : 1 (pid: 7)",
    "mpirun detected that one or more processes exited with non-zero status", "MPI_ABORT was invoked on rank 0",
    said("status", "torchrun on n2 ended with exit status 1"), "ddpkit submit: job 7: failed, exit status 2",
    "2026-11-22 12:00:00 ERROR trainer: gave up", "train.py: error: argument --lr: invalid float value: 'x'",
    said("exception", "rank 3 on n2 failed: SystemExit: 7"), said("exception", "rank 3 on n2 failed: Unusual: 7"),
    "FATAL: no such module", "terminate called without an active exception"])
def test_sign_of_a_failure_is_never_no_failure(text: str) -> None:
    found = diagnose([(io.BytesIO(f"step 1\n{text}\n".encode()), "job.out")])
    assert found is not None and exit_status(found) != 0


@pytest.mark.parametrize("text", [
    "", START, IPV6 + 300 * "step\n", "srun: error: unpack_header: protocol_version 65363 not supported",
    "n1:1:2 [0] NCCL INFO NET/Plugin: dlerror=libnccl-net.so: cannot open shared object file: No such file or "
    "directory No plugin found (libnccl-net.so), using internal implementation",
    "ddpkit launch: 4 ranks on 2 hosts (n1, n2) by srun\n", "Exit_status = 0", "finished with exit status 0",
    "rank 0 on n1 starts step 1", "  ranks 0-3 on n1, n2: in collective 7", "[rank 3/8 n2] WARNING: slow",
    "12:00:00 ERROR retry\n" + 300 * "step\n", "[rank 0/8 n1] ERROR: cannot save step 5\n" + 300 * "step\n"])
def test_job_that_went_well_has_no_failure(text: str) -> None:
    """Its own end is in the output. Without one, the output tells nothing, and says so."""
    assert find(("job.out", f"{text}\nTraining finished\n")) is None
    if not text.startswith(("Exit_status", "finished")):
        found = find(("job.out", text))
        assert found and (found[0], found[3]) == ("unknown", None)


# The kit's own messages -----------------------------------------------------------------------------------------------
# In them rank 3 on n2 is at fault, and rank 1 on n1 reports it.

MESSAGES = {  # what a rank raises or logs, or launch.py prints: the message, its cause, rank and host
    "raised": [
        (ValueError("keep_best is -1; expected 0 or more"), "python_exception", 3, "n2"),
        (CheckpointError("cannot write /x: No space left on device. Free some space"), "disk_full", 3, "n2"),
        (CheckpointError("cannot restore step 5 in /x on rank 3 on n2: damaged"), "kit_message", 3, "n2"),
        (StateError("model.w is on the meta device and has no values. Give it memory"), "kit_message", 3, "n2")],
    "at the start": [(message, "launch_error", rank, host) for message, rank, host in (
        ("rank 3 on n2 (pid 77) ended while the ranks were starting. Look for its message", 3, "n2"),
        ("rank 1 of 8 on n1 did not find rank 0 within 60 s. Does it run? (look for its message)", 0, None),
        ("the ranks disagree on the world size: rank 0 of 8 on n1 (pid 7), rank 3 of 8 on n2 (pid 77)", None, None),
        ("backend nccl was requested, but torch 2.9 sees no CUDA device on n2 (x). Request GPUs", None, "n2"),
        ("MASTER_PORT is x; expected a port from 1 to 65535. Correct or unset it", None, None))] + [
        ("rank 3 (local rank 1) on n2 sees 1 GPUs for 2 ranks (x); expected one", "invalid_device_ordinal", 3, "n2"),
        ("several ranks on n2 use the same GPU; expected a GPU for each rank:\nx", "duplicate_gpu", None, "n2")],
    "launch.py": [
        ("on n2 /data is missing. Expected the same folders and files on every host", "launch_error", None, "n2"),
        ("--nodes is 9. Expected 1 to 8, out of Slurm job 7", "command_error", None, None),
        ("ssh ended with exit status 255 before an agent has connected from n2. See its message above",
         "launch_error", None, "n2"),
        ("SIGTERM: all will be ended", "terminated", None, None),
        ("rank 3 ended with exit status 1", "unknown", 3, None)],
    "logged": [
        ("the process group could not be destroyed within 60 s: a collective waits", "kit_message", 3, "n2"),
        *(("cannot save step 5 in /ckpt on rank 3 on n2: " + explain(OSError(code, os.strerror(code))), name, 3, "n2")
          for code, name in ((errno.ENOSPC, "disk_full"), (errno.EDQUOT, "quota")))]}


@pytest.mark.parametrize("with_json", [True, False], ids=["json", "people"])
@pytest.mark.parametrize(("kind", "text", "cause", "rank", "host"), [
    pytest.param(kind, *row, id=f"{kind}: {str(row[0])[:40]}") for kind, rows in MESSAGES.items() for row in rows])
def test_message_of_the_kit_is_understood(
        kind: str, text: Any, cause: str, rank: int | None, host: str | None, with_json: bool,
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """From the line for programs, or from what people read alone."""
    if with_json:
        monkeypatch.setenv("DDPKIT_FAILURE_FILE", str(tmp_path / "failure"))
    monkeypatch.setattr(socket, "gethostname", lambda: "n2")
    if kind == "raised":
        error = type(text)(*text.args)
        failure.Shutdown(3, 8, "gloo", HashStore(), None).report(error)
    elif kind == "at the start":
        monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
        failure.print_without_traceback(refused := LaunchError(text, rank=rank, host=host))
        sys.excepthook(LaunchError, refused, None)
    elif kind == "launch.py":
        kinds = {"terminated": "stop", "unknown": "status", "command_error": "command"}
        result = LaunchResult()
        result.fail(text, 0.0, kind=kinds.get(cause, "launch"), rank=rank, host=host)
        Ended(result.conclude()).report()
    else:
        setup_logging(3, 8)
        get_logger("test").error("%s", text)
    output = capsys.readouterr().err
    assert "ddpkit-failure " not in output  # people read one line
    if with_json and (tmp_path / "failure").exists():
        output += (tmp_path / "failure").read_text()
    # The cause comes before its consequences.
    ended = said("status", "rank 1 on n1 ended with exit status 1", 1, "n1")
    ended *= kind != "launch.py" and with_json
    found = diagnose([(io.BytesIO((output + ended).encode()), "job.out")])
    assert found is not None and exit_status(found) != 0, output
    assert (found.cause.name, found.rank, found.host) == (cause, rank, host), output
    if found.cause.reporter == "kit":
        assert found.cause.meaning[:100] in output, "the cause in the kit's own words"
    if cause in ("disk_full", "quota"):
        assert found.cause.restart is False


RESTARTED = """\
ddpkit-failure {"kind": "launch", "rank": null, "host": "n2", "cause": "the connection to n2 was lost", "restart": 1, \
"without": ["n2"]}
ddpkit launch: the connection to n2 was lost. The host, its network or the agent there has failed
ddpkit launch: restart 1 without n2, with n9 instead; 0 spare hosts left
final loss: 0.4
"""


def test_a_failure_after_which_the_launch_went_on_is_no_cause() -> None:
    recorded = RESTARTED.splitlines()[0] + "\n"
    for files in ([("job.out", RESTARTED)], [("job.out", RESTARTED), ("7.failure", recorded)]):
        assert diagnose([(io.BytesIO(text.encode()), name) for name, text in files]) is None
    output = RESTARTED + "Traceback (most recent call last):\nKeyError: 'labels'\n"
    last = 'ddpkit-failure {"kind": "exception", "rank": 3, "host": "n4", "cause": "rank 3 on n4 failed: KeyError"}\n'
    found = diagnose([(io.BytesIO(output.encode()), "job.out"), (io.BytesIO((recorded + last).encode()), "7.failure")])
    assert found is not None and (found.rank, found.host) == (3, "n4")
    assert read_restart(recorded) == "restart 1 without n2: the connection to n2 was lost"
    assert read_restart(last) == ""


@pytest.mark.parametrize("line", [f"ddpkit launch: {EVEN}\n", said("hang", EVEN)])
def test_cause_of_a_hang_is_its_meaning(line: str) -> None:
    found = diagnose([(io.BytesIO((HANGS + line).encode()), "job.out")])
    assert found is not None and found.cause.meaning == EVEN and found.finding.line_number == 2 and not found.others
    assert f"hang. {EVEN}. Let every rank" in summary(found) and "told" not in summary(found, after_output=True)
