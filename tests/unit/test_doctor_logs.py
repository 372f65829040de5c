"""`doctor logs`: the cause of a failure in the output of a job."""
from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.programs import ROOT
from utils.doctor import cli
from utils.doctor.causes import CAUSES, Cause
from utils.doctor.logs import diagnose

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
HANG = "rank 5 on n3 did not enter collective 7, in which the other ranks wait. It is at train.py, line 4, in main"
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
    (f"rank 0 on n1 stops, because {HANG}", ("collective_not_entered", 5, "n3", None)),
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
        line = pattern.replace("{host}", "n1").replace("{name}", "Other").replace("...", " x ").replace("{status}", " 7")
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
    ["doctor.py", "--only", "installation"], ["doctor.py", "logs", "--list-causes"], ["launch.py", "--dry-run", "ls"],
    ["plan.py", "--parameters", "1e9"], ["../utils", "explain"]], ids=" ".join)
def test_reader_that_has_ended_is_no_error(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, f"scripts/{words[0]}", *words[1:]], cwd=ROOT, text=True, timeout=60,
                          stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


def test_documentation_has_the_table() -> None:
    assert cli.table() in (ROOT / "docs/troubleshooting.md").read_text()
