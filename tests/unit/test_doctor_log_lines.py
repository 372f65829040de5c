"""`doctor logs`: labels before lines, what Slurm and launch.py print at the end, and messages of libraries."""
from __future__ import annotations

import io
import re

import pytest

from tests.unit.programs import ROOT
from tests.unit.test_doctor_logs import OOM, Found, find, said
from utils.tools.doctor.logs import describe, diagnose

EXITED = "srun: error: n9: task 0: Exited with exit code 1\n"


@pytest.mark.parametrize(("label", "rank", "host"), [
    ("[1] ", 1, None), ("gpu07: ", None, "gpu07"), ("gpu07: [rank1]: ", 1, "gpu07"), ("jean-zay-ia801: ", None,
     "jean-zay-ia801"), ("node-a: [rank1]: ", 1, "node-a"), ("x3004c0s7b0n0 1: ", 1, "x3004c0s7b0n0"),
    ("gpu07.cluster.org: 3: ", 3, "gpu07.cluster.org"), ("[trainer2]:", 2, None), ("[default2]:[rank2]: ", 2, None),
    ("n1: [trainer0]:[rank4]: ", 4, "n1"), ("[1,3]<stderr>: ", 3, None), ("[prterun-n1-77@1,3]<stderr>: ", 3, None),
    ("03: ", 3, None), ("[1] [rank5]: ", 5, None), ("[2@n3] ", 2, "n3")])
@pytest.mark.parametrize(("message", "cause"), [(OOM, "cuda_oom"), ("ValueError: bad batch", "python_exception")])
def test_label_before_a_line_names_rank_and_host(
        label: str, rank: int | None, host: str | None, message: str, cause: str) -> None:
    found = find(("job.out", f"step 1\n{label}Traceback (most recent call last):\n{label}{message}\n"))
    assert found and found[:3] == (cause, rank, host)


def test_number_of_a_rank_on_its_host_is_not_its_rank_where_there_are_several_hosts() -> None:
    text = f"n1: [trainer2]:{OOM}\nsrun: error: n2: task 1: Exited with exit code 1\n"
    assert find(("job.out", text)) == ("cuda_oom", None, "n1", False)


@pytest.mark.parametrize("line", ["python3: can't open file 'x.py'", "train2.py: error: x", "gcc-12: fatal error: x"])
def test_program_before_a_message_is_no_host(line: str) -> None:
    found = find(("job.out", line))
    assert found and found[2] is None


KILLED = said("status", "rank 0 on node1 was ended by SIGKILL (exit status 137)", 0, "node1")
NEW = "[2026-11-28T08:43:46.113] error: "
OVER = "StepId=41.0 exceeded memory limit (2092810240 > 629145600), being killed\n"
EVENTS = "Detected 1 oom_kill event in StepId=41.0. Some of the step tasks have been OOM Killed.\n"


@pytest.mark.parametrize(("text", "rank", "host"), [
    (f"slurmstepd-node2: error: {OVER}slurmstepd-node1: error: Exceeded job memory limit\n" + KILLED, None, "node2"),
    (f"slurmstepd-node2: error: {EVENTS}" + KILLED, None, "node2"),
    (f"{NEW}{OVER}{NEW}Exceeded job memory limit\n" + KILLED, None, None),
    (f"{NEW}{EVENTS}srun: error: node2: task 1: Out Of Memory\n" + KILLED, 1, "node2"),
    (f"slurmstepd-node2: error: {OVER}" + said("killed", "rank 0 on node1 was ended by SIGKILL. Slurm reports: out of "
     f"memory on node2: {OVER.strip()}", 0, "node1"), None, "node2"),
    (said("status", f"rank 1 on node2 was ended by SIGKILL. Slurm reports: out of memory on node2: {OVER.strip()}", 1,
          "node2"), 1, "node2")])
def test_host_without_memory_is_the_one_that_slurm_names(text: str, rank: int | None, host: str | None) -> None:
    """Slurm ends the ranks of all hosts; the first one to end need not be on that host."""
    assert find(("job.out", text)) == ("host_oom", rank, host, False)


@pytest.mark.parametrize("begin", ["slurmstepd-node3: error: ", "[2026-11-28T08:43:46.113] error: "])
@pytest.mark.parametrize(("end", "cause"), [
    ("DUE TO TIME LIMIT ***", "walltime"), ("DUE TO PREEMPTION ***", "preempted"),
    ("DUE to SIGNAL Terminated ***", "cancelled"), ("DUE TO TASK FAILURE ***", "terminated"),
    ("DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***", "node_failure")])
def test_reason_why_slurm_ends_a_step(begin: str, end: str, cause: str) -> None:
    line = f"{begin}*** STEP 23.0 ON node3 CANCELLED AT 2026-11-28T08:43:46 {end}\n"
    stop = said("stop", "SIGTERM: ddpkit launch has received it: the job was cancelled, or has reached its time limit")
    found = find(("job.out", line + stop))
    assert found and found[0] == cause


def test_preemption_after_its_grace_time_is_no_cancellation() -> None:
    line = "[2026-11-28T08:4{}:46.113] error: *** JOB 23 ON node3 CANCELLED AT 2026-11-28T08:43:46 {} ***\n"
    found = find(("job.out", line.format(3, "DUE to SIGNAL Terminated") + line.format(4, "DUE TO PREEMPTION")))
    assert found and found[0] == "preempted"


PEOPLE = "ddpkit launch: 2 ranks on 2 hosts (n1, n2) by srun\n{}\nddpkit launch: {}\n"


@pytest.mark.parametrize(("last", "expected"), [
    ("rank 1 on n2 failed: ValueError: bad batch 17", ("python_exception", 1, "n2", None)),
    (f"rank 1 on n2 failed: {OOM}", ("cuda_oom", 1, "n2", False)),
    ("rank 1 on n2 was ended by SIGKILL (exit status 137), perhaps because its host ran out of memory",
     ("killed", 1, "n2", None)),
    ("rank 1 on n2 ended with exit status 7 and without an exception, as by os._exit(7)",
     ("exit_status", 1, "n2", None)),
    ("rank 1 on n2 ended with exit status 0 before the others: os._exit(0)", ("left_early", 1, "n2", False)),
    ("rank 5 on n3 did not enter collective 7, in which ranks 0-4 wait. It is at train.py, line 4, in main",
     ("hang", 5, "n3", None)),
    ("error: on n2 /data is missing. Expected the same folders and files on every host",
     ("launch_error", None, "n2", None)),
    ("error: torchrun on n2 ended with exit status 1", ("unknown", None, "n2", None)),
    ("error: the connection to n2 was lost. The host, its network or the agent there has failed",
     ("launch_error", None, "n2", None)),
    ("error: no agent has connected from n2 within 60 s. Expected pbsdsh to start one there",
     ("launch_error", None, "n2", None)),
    ("error: rank 0 on n1, rank 2 on n1 had ended with exit status 0 before rank 1 on n2 ended with exit status 1",
     ("left_early", 0, "n1", False)),
    ("rank 0 on n1 called barrier at a.py, line 3, and rank 1 on n2 left normally after 7 collectives. It is a "
     "collective that only some ranks call", ("uneven_work", None, None, False)),
    ("rank 1 on n2 left normally after 7 collectives, and other ranks still wait for it. The ranks run different "
     "numbers of steps", ("uneven_work", 1, "n2", False)),
    ("rank 1 on n2 was aborted by gloo (SIGABRT, exit status 134): rank 0 waits in all_reduce at a.py, line 3, and "
     "rank 1 entered another, smaller collective", ("different_collectives", 1, "n2", False)),
    ("rank 1 on n2 failed: RuntimeError: NaN. Rank 1 ended with exit status 9", ("python_exception", 1, "n2", None)),
    ("rank 1 on n2 was ended by SIGKILL (exit status 137), perhaps because its host ran out of memory. Slurm reports: "
     "out of memory on n3: oom_kill event in StepId=4.0", ("host_oom", None, "n3", False)),
    ("error: SIGTERM: ddpkit launch has received it: the job was cancelled", ("terminated", None, None, None))])
def test_last_line_of_the_launch_tells_what_a_file_of_failures_would(last: str, expected: Found) -> None:
    earlier = "ddpkit launch: rank 0 on n1 ended with exit status 1, the others will be ended"
    assert find(("job.out", PEOPLE.format(earlier, last))) == expected
    kinds = {"python_exception": "exception", "killed": "status", "exit_status": "killed"}
    if kind := kinds.get(str(expected and expected[0])):  # beside the file, it says nothing else
        file = said(kind, last, 1, "n2")
        assert find(("job.out", PEOPLE.format(earlier, last)), ("7.failure", file)) == expected
        assert find(("7.failure", file)) == expected


def test_launch_that_went_well_has_no_failure() -> None:
    text = PEOPLE.format("step 1", "the ranks are not bound to cores: no cores")
    assert find(("job.out", f"{text}epoch 3/3: loss 0.5\n")) is None
    stopped = "ddpkit launch: rank 1 on n2 ended with exit status 1, the others will be ended\n"
    assert find(("job.out", stopped)) is not None


def test_rank_that_could_not_start_is_found_without_the_line_for_programs() -> None:
    found = find(("job.out", "LaunchError: this rank (n1, pid 7) does not start. Look for the message of rank 0\n"
                             "LaunchError: the ranks disagree on the world size: rank 0 of 8 on n1\n"))
    assert found and found[0] == "launch_error"


@pytest.mark.parametrize(("text", "expected"), [
    ("    raise RendezvousTimeoutError\ntorch.distributed.elastic.rendezvous.api.RendezvousTimeoutError\n" + EXITED,
     ("rendezvous_timeout", None, None, None)),
    ("n1: [rank1]: RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one\n"
     "n1: [rank1]: Parameter indices which did not receive grad for rank 1: 0 1\n",
     ("unused_parameters", 1, "n1", False)),
    ("[rank1]: RuntimeError: DDP expects same model across all ranks, but Rank 1 has 382 params, while rank 0 has "
     "inconsistent 0 params.\n" + EXITED, ("different_models", None, None, False)),
    ("terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  [enforce fail at pair.cc:456] "
     "op.preamble.length <= op.nbytes. 90 vs 56. Received data size doesn't match\nFatal Python error: Aborted\n",
     ("different_collectives", None, None, False)),
    ("n2: [rank6]: BlockingIOError: [Errno 11] Unable to synchronously open file (unable to lock file, errno = 11)\n",
     ("file_lock", 6, "n2", None)),
    ("WARNING: Retrying (Retry(total=4)) after connection broken by 'NewConnectionError'\nERROR: Could not find a "
     "version that satisfies the requirement x\n", ("no_internet", None, None, False)),
    ("wandb: Network error (ConnectionError), entering retry loop.\n", ("no_internet", None, None, False)),
    ("n2: /tmp/x/cuda_utils.c:6:10: fatal error: Python.h: No such file or directory\n" + EXITED,
     ("no_compiler", None, "n2", False)),
    ("n2: [rank1]: RuntimeError: unable to open shared memory object </torch_7> in read-write mode: Too many open "
     "files (24)\n", ("open_files", 1, "n2", False)),
    ("srun: Job 7 step creation temporarily disabled, retrying (Requested nodes are busy)\nslurmstepd: error: *** JOB "
     "7 ON n1 CANCELLED AT 2026-08-20T04:00:12 DUE TO TIME LIMIT ***\n", ("step_waits", None, "n1", False)),
    ("[rank3]: RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed. \n",
     ("worker_killed", 3, None, None)),
    ('RuntimeError: Error(s) in loading state_dict for Net:\n\tMissing key(s) in state_dict: "a". \n'
     '\tUnexpected key(s) in state_dict: "_orig_mod.a". \n', ("wrapped_keys", None, None, False)),
    ("ValueError: Error initializing torch.distributed using env:// rendezvous: environment variable RANK expected, "
     "but not set\n", ("rank_variables", None, None, False)),
    ("node-a: RuntimeError: Maximum number of nodes reached\n", ("max_nodes", None, None, False))])
def test_message_of_a_library(text: str, expected: Found) -> None:
    assert find(("job.out", text)) == expected


def test_parameters_that_a_message_names_are_shown() -> None:
    for line in ("Parameter indices which did not receive grad for rank 1: 0 1", "Rank 1 has 382 params, while rank 0 "
                 "has inconsistent 0 params"):
        begin = "RuntimeError: " + ("DDP expects same model across all ranks, but " if line.startswith("Rank") else "")
        text = f"{begin}{line}.\n"
        assert line in describe(diagnose([(io.BytesIO(text.encode()), "job.out")]))


def messages() -> list[str]:
    """The messages in the first columns of the page: what begins a cell, and is more than a name."""
    found = []
    text = (ROOT / "docs/when-it-fails.md").read_text().partition("## It hangs")[0]
    for cell in re.findall(r"^\| ([^|]*`[^|]*) \|", text, re.MULTILINE):
        is_message = cell.startswith("`") or cell.startswith("Slurm: `R")
        found += [one for one in re.findall(r"`([^`]+)`", cell) if is_message and re.search(r"\W", one)]
    return found


@pytest.mark.parametrize("message", messages())
def test_message_of_the_page_has_a_row(message: str) -> None:
    """As the program prints it, or as the kit logs it."""
    text = message.replace("...", "x")
    lines = (text, f"[rank 0/2 n1] ERROR: {text}", f"ddpkit launch: {text}")
    found = [find(("job.out", line)) for line in lines]
    assert any(one and one[0] not in ("unknown", "python_exception") for one in found)


def test_page_lists_messages() -> None:
    assert len(messages()) > 15
