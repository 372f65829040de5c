"""`doctor logs`: one small log for each kind of cause, what is no cause, and an output that tells nothing."""
from __future__ import annotations

import io

import pytest

from tests.unit.test_doctor_logs import OOM, Found, find
from utils.tools.doctor.logs import Diagnosis, as_dict, describe, diagnose, exit_status

FRAMES = 'Traceback (most recent call last):\n  File "fit.py", line 8, in main\n    step()\n'
SRUN = "srun: error: {}: task {}: Exited with exit code 1\n"


def found_in(text: str) -> Diagnosis | None:
    return diagnose([(io.BytesIO(text.encode()), "job.out")])


@pytest.mark.parametrize(("text", "expected"), [
    # A space that is none of a disk.
    ("libfabric:77:1::cxi:ep_ctrl:cxip_ep_enable():9 x1: no LE, ret: -28:No space left on device\n4: "
     "RuntimeError: NCCL error, unhandled system error\n", ("network_resources", None, None, None)),
    ("c3: c3:9:9 [1] NCCL WARN NET/OFI fi_domain failed: No space left on device\n",
     ("network_resources", None, "c3", None)),
    ("[rank2]: OSError: inotify watch limit reached\n", ("kernel_resources", 2, None, None)),
    ("slurmstepd-c4: error: mkdir of cgroup /sys/fs/cgroup/job_7 failed: No space left on device\n",
     ("kernel_resources", None, "c4", None)),
    ("[rank1]: Traceback (most recent call last):\n[rank1]:     self._semlock = _multiprocessing.SemLock(\n"
     "[rank1]: OSError: [Errno 28] No space left on device\n", ("shared_memory", 1, None, None)),
    ("[rank1]: OSError: [Errno 28] No space left on device: '/dev/shm/psm_7'\n", ("shared_memory", 1, None, None)),
    ("[rank1]: OSError: [Errno 28] No space left on device: '/data/out'\n", ("disk_full", 1, None, False)),
    # Files of checkpoints and of caches.
    ("[rank0]: RuntimeError: [enforce fail at inline_container.cc:1] . unexpected pos 64 vs 8\n",
     ("checkpoint_write", 0, None, False)),
    ("[rank0]: RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory\n",
     ("checkpoint_damaged", 0, None, False)),
    ("[rank6]: OSError: [Errno 116] Stale file handle: '/home/a/.triton/cache/K/kernel.json'\n",
     ("compile_cache", 6, None, None)),
    ("[rank6]: FileNotFoundError: [Errno 2] No such file or directory: '/tmp/torchinductor_a/fx/k'\n",
     ("compile_cache", 6, None, None)),
    ("5: FileExistsError: [Errno 17] File exists: '/runs/08-00-01'\n4: FileNotFoundError: [Errno 2] No such file or "
     f"directory: '/runs/08-00-02/a'\n{SRUN.format('n8', 4)}", ("folder_exists", 5, None, False)),
    ("[rank1]: sqlite3.OperationalError: database is locked\n", ("lock_timeout", 1, None, None)),
    ("[rank2]: filelock.Timeout: The file lock '/h/m.lock' could not be acquired.\n", ("lock_timeout", 2, None, None)),
    ("[rank0]: RuntimeError: Unexpected key in checkpoint state_dict: head.bias.\n", ("state_keys", 0, None, False)),
    ("[rank0]: ValueError: loaded state dict contains a parameter group that doesn't match the size of optimizer's "
     "group\n", ("state_keys", 0, None, False)),
    # The job script.
    ("/spool/script: line 3: $'\\r': command not found\n/usr/bin/python3: No module named fit\n",
     ("line_ends", None, None, False)),
    ("/spool/script: line 9: module: command not found\nModuleNotFoundError: No module named 'torch'\n",
     ("environment", None, None, False)),
    ("EnvironmentNameNotFound: Could not find conda environment: ddp\n" + SRUN.format("n1", 0),
     ("environment", None, "n1", False)),
    ("ModuleCmd_Load.c(213):ERROR:105: Unable to locate a modulefile for 'gcc/99'\npython: command not found\n",
     ("module_unknown", None, None, False)),
    ("/spool/script: line 4: mpiexec: command not found\n", ("program_error", None, None, False)),
    ("FATAL:   could not open image /img/t.sif: no such file\n", ("container", None, None, False)),
    ("slurmstepd: error: switch_g_job_init failed\nsrun: error: Application launch failed: Error configuring "
     "interconnect\n", ("interconnect", None, None, None)),
    ("srun: error: Task launch for StepId=9.0 failed on node c17: Job credential expired\n",
     ("step_launch", None, "c17", None)),
    ("srun: error: Prolog hung on node c3\n", ("step_launch", None, "c3", None)),
    ("[rank1]: FloatingPointError: Loss is nan, stopping training\n", ("not_finite", 1, None, None)),
    # The network and servers on it.
    ("[rank2]: RuntimeError: Gloo connectFullMesh failed with connect timed out\n", ("gloo_mesh", 2, None, False)),
    ("[rank2]: RuntimeError: [gloo/transport/tcp/pair.cc:9] timed out connecting: SO_ERROR: Connection timed out, "
     "remote=[127.0.1.1]:4\n", ("gloo_mesh", 2, None, False)),
    ("[rank4]: requests.exceptions.HTTPError: 429 Client Error: Too Many Requests for url: https://h/x\n",
     ("too_many_requests", 4, None, False)),
    ("[rank4]: huggingface_hub.errors.GatedRepoError: 403 Client Error\n", ("hub_access", 4, None, False)),
    ("[rank4]: requests.exceptions.HTTPError: 503 Server Error: Service Unavailable\n",
     ("server_error", 4, None, None)),
    # The program.
    ("n3: [rank5]: ncclInvalidUsage: wrong\nn3: [rank5]: Mismatched collective detected, please check your collective "
     "calls at and around rank 5.\n", ("different_collectives", 5, "n3", False)),
    ("[rank1]: what(): op.preamble.length <= op.nbytes. 8 vs 4. Received data size doesn't match\n",
     ("different_collectives", None, None, False)),
    ("c5: subprocess.TimeoutExpired: Command 'lscpu' timed out after 9 seconds\n",
     ("program_timeout", None, "c5", None)),
    ("[rank0]: ValueError: trying to initialize the default process group twice!\n",
     ("initialized_twice", 0, None, False)),
    ("[rank0]: ValueError: DistributedDataParallel device_ids and output_device arguments only work with GPUs\n",
     ("device_ids", 0, None, False)),
    ("[rank1]: EOFError: EOF when reading a line\n", ("no_terminal", 1, None, False)),
    ("[rank0]: RuntimeError: Cannot re-initialize CUDA in forked subprocess.\n", ("forked_cuda", 0, None, False)),
    # GPUs.
    ("Memory access fault by GPU node-2 (Agent handle: 0x1) on address 0x2.\nsrun: error: c8: task 6: Aborted (core "
     "dumped)\n", ("gpu_memory_fault", 6, "c8", None)),
    ("[rank3]: RuntimeError: CUDA error: device-side assert triggered\n", ("index_out_of_range", 3, None, False)),
    ("[rank0]:[F08 08:00:00.1 ProcessGroupNCCL.cpp:9] due to ProcessGroupNCCL watchdog hang.\nFatal Python error: "
     "Aborted\nsrun: error: c1: task 0: Aborted (core dumped)\n", ("watchdog_timeout", None, None, None)),
    ("[rank3]: ValueError: bad batch\nterminate called after throwing an instance of 'c10::Error'\n",
     ("python_exception", 3, None, None)),
    ("train: fit.cc:9: int f(): Assertion `n > 0' failed.\n", ("abort", None, None, None)),
    # An exception that says more, before or after a general one of the same rank.
    ("[rank2]: CheckpointException: ranks 2\n[rank2]: OSError: [Errno 5] Input/output error\n",
     ("file_system", 2, None, None)),
    ("[rank2]: KeyError: 'q'\n[rank2]: During handling of it\n[rank2]: ModuleNotFoundError: No module named 'p'\n",
     ("program_error", 2, None, False)),
    ("[rank2]: KeyError: 'q'\n[rank5]: OSError: [Errno 5] Input/output error\n", ("python_exception", 2, None, None)),
])  # fmt: skip
def test_cause_of_a_kind(text: str, expected: Found) -> None:
    assert find(("job.out", text)) == expected


def test_crash_or_watchdog_is_not_explained_by_mixed_versions_first() -> None:
    found = found_in("Memory access fault by GPU node-2 on address 0x2\nsrun: error: c8: task 6: Aborted\n")
    assert found and "versions" not in describe(found)


@pytest.mark.parametrize(("label", "rank", "host"), [
    (" 3: ", 3, None), ("  3: ", 3, None), ("[1]:[rank9]: ", 9, None), ("worker/2 [rank9]: ", 9, None),
    ("worker/2 ", None, None), ("train/2 [3]:", None, None), ("2026-10-14T10:22:41.1Z [rank9]: ", 9, None),
    ("10:22:41 9: ", 9, None),
    ("2026-10-14 10:22:41,123 gpu-b14 [rank9]: ", 9, "gpu-b14"), ("[2026-10-14 10:22:41] c7: ", None, "c7"),
    ("2026-10-14T10:22:41 c7 9: ", 9, "c7"), ("Oct 14 10:22:41 c7 fit[812]: [rank9]: ", 9, "c7"),
    ("1760430161.52 [rank9]: ", 9, None), ("[ 9] ", 9, None), ("[1,9]<stdout>: ", 9, None), ("Rank 9: ", 9, None),
    ("rank9 | ", 9, None), ("gpu-3 [rank9]: ", 9, "gpu-3"), ("(rank 9) ", 9, None),
    ("[rank 9]: ", 9, None), ("[1,mpirank:9,algo-2]<stderr>:", 9, "algo-2"),
    ("Tue Oct 14 10:22:41 2026[1,9]<stderr>:", 9, None), ("[pod/fit-2/main] ", None, "fit-2"), ("c-7  | ", None, "c-7"),
    ("(Worker pid=71, ip=10.1.2.3) ", None, "10.1.2.3")])
@pytest.mark.parametrize(("message", "cause"), [
    (OOM, "cuda_oom"), ("ValueError: bad batch", "python_exception"), ("queue.Empty", "python_exception")])
def test_label_before_each_line(label: str, rank: int | None, host: str | None, message: str, cause: str) -> None:
    lines = [*FRAMES.splitlines(), message]
    found = find(("job.out", "".join(f"{label}{line}\n" for line in lines)))
    assert found and found[:3] == (cause, rank, host)


def test_exceptions_of_ranks_whose_tracebacks_are_mixed() -> None:
    lines = [" 1: Traceback (most recent call last):", "12: Traceback (most recent call last):", ' 1:   File "fit.py"',
             '12:   File "fit.py"', "12: queue.Full", " 1: Timeout: lost"]
    found = found_in("\n".join(lines))
    assert found and (found.cause.name, found.rank, found.finding.line) == ("python_exception", 12, "12: queue.Full")


TORCHRUN = """\
1: E1014 10:22:42.551000 41822 torch/distributed/elastic/multiprocessing/api.py:984] failed (exitcode: 1) local_rank: 0
1: {}
srun: error: c4: task 1: Exited with exit code 1
"""


def test_task_of_srun_is_an_agent_under_torchrun() -> None:
    assert find(("job.out", TORCHRUN.format("ValueError: 7"))) == ("python_exception", None, "c4", None)
    assert find(("job.out", TORCHRUN.format("[rank5]: ValueError: 7"))) == ("python_exception", 5, "c4", None)
    killed = ("slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some tasks have been OOM Killed.\n"
              "srun: error: c4: task 1: Out Of Memory\n")
    assert find(("job.out", TORCHRUN.format("") + killed)) == ("host_oom", None, "c4", False)
    summary = ("Root Cause (first observed failure):\n[0]:\n  time      : 2026-10-14_10:22:41\n  host      : c4.org\n"
               "  rank      : 6 (local_rank: 2)\n")
    assert find(("job.out", TORCHRUN.format("") + summary + killed)) == ("host_oom", 6, "c4", False)
    assert find(("job.out", f"[default2]:{OOM}\n" + summary)) == ("cuda_oom", 6, "c4.org", False)


@pytest.mark.parametrize(("text", "rank", "host"), [
    ("3: ValueError: 7\nsrun: error: c2: task 1: Exited with exit code 1\n", 3, None),
    ("3: ValueError: 7\nsrun: error: c2: tasks 1-3: Exited with exit code 1\n", 3, "c2"),
    ("3: ValueError: 7\nsrun: error: c2: tasks 0,2: Exited with exit code 1\n", 3, None),
    ("c1\n[rank3]: ValueError: 7\n", 3, None),
    ("[rank3]: ValueError: 7\nslurmstepd-c2: error: *** STEP 7.0 ON c2 CANCELLED AT 2026-10-14 ***\n", 3, None)])
def test_rank_gets_no_host_of_another_rank(text: str, rank: int, host: str | None) -> None:
    found = find(("job.out", text))
    assert found and found[1:3] == (rank, host)


# An output that tells nothing ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "line"), [
    ("starting\nrequest to the daemon refused\nbye bye world\n", "request to the daemon refused"),
    ("WARNING: no plugin found\nusage: fit.py [-h]\nlicence server not found\n", "licence server not found"),
    ("step 1\ngot a fatal signal\n", "got a fatal signal"), ("the error is in line 7\n", "the error is in line 7"),
    ("loading\ncannot open the display\n", "cannot open the display"),
    ("epoch 1 val_error 0.31\nerrors: 0\nepoch 2 step 7\n", "epoch 2 step 7"), ("", ""), ("\n\n", "")])
def test_job_without_its_own_end_is_unknown(text: str, line: str) -> None:
    found = found_in(text)
    assert found and (found.cause.name, found.finding.line, exit_status(found)) == ("unknown", line, 4)
    assert as_dict(found)["cause"] == "unknown" and "unknown" in describe(found)
    if not line:
        assert "The output is empty" in describe(found)


@pytest.mark.parametrize("end", [
    "Training completed.", "training finished in 90 s", "epoch 4/4: loss 0.3", "step 500/500", "done", "final loss: 1",
    "Exit_status = 0", "State: COMPLETED (exit code 0)", "ddpkit submit: job 7: completed, exit status 0",
    "`Trainer.fit` stopped: `max_epochs=3` reached.", "{'train_runtime': 8.1}", "100%|##########| 9/9", "All done!"])
def test_own_end_of_a_job_is_no_failure(end: str) -> None:
    warnings = "WARNING: error in a plugin, not used\n12:00:00 ERROR retry\nConnection reset by peer\n"
    assert found_in(f"step 1\n{warnings}{end}\n") is None
    assert exit_status(None) == 0 and "shows the end of the job" in describe(None)


@pytest.mark.parametrize("text", [
    "epoch 3/3 step 10/500", "Epoch 1 finished\nstep 7", "epoch 2/2\nepoch 1/2", "100%|###| 9/9\nsaving",
    "ddpkit launch: rank 1 on n2 ended with exit status 0 before the others: os._exit(0)", "Training started",
    "training failed, all done", "test error 0.2", "saved\nstep 9"])
def test_what_is_no_end_of_a_job(text: str) -> None:
    assert found_in(text) is not None


# Restarts --------------------------------------------------------------------------------------------------------

FIRST = ("ddpkit launch: rank 1 on n2 failed: ValueError: bad batch 7\n"
         "ddpkit launch: restart 1 on the same hosts; 0 more allowed\nstep 1\n")
LAST = "ddpkit launch: no restart: {}\nddpkit launch: rank 1 on n2 failed: {}\n"


def test_restart_that_happened_or_failed_is_known_from_what_the_launch_prints() -> None:
    twice = LAST.format("the same failure twice, without a new checkpoint in between", "ValueError: 7")
    assert find(("job.out", FIRST + twice)) == ("python_exception", 1, "n2", False)
    found = found_in(FIRST + twice)
    assert found
    assert "started again 1 time before it (restart 1 on the same hosts; 0 more allowed)" in describe(found)
    assert "did not start them again: the same failure twice" in describe(found)
    assert as_dict(found)["restarts"] == ["restart 1 on the same hosts; 0 more allowed"]
    assert found_in(f"{FIRST}final loss: 0.3\n") is None
    assert found_in(FIRST + "step 2\n") is not None
    spare = found_in(LAST.format("no spare host is left in the place of n2", "ValueError: 7"))
    assert spare and spare.cause.restart is None and "no spare host is left" in describe(spare)


def test_failure_before_torchrun_has_restarted_its_workers_is_overcome() -> None:
    again = "[default] Worker group FAILED. 1/2 attempts left; will restart worker group\n"
    assert find(("job.out", f"[rank1]: {OOM}\n{again}[rank2]: ValueError: 7\n")) == ("python_exception", 2, None, None)
