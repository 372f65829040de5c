"""All exceptions of the kit, as a tree. A star marks errors that a training script may see.

All others are caught inside the kit, or end one of its commands with one line.

RuntimeError
    LaunchError *                   errors: this process cannot start as part of its launch
        DefaultsError               tools.cli.defaults: a file of defaults cannot be used
    CheckpointError *               checkpoint.load: not written, read or restored
        PermanentError *            checkpoint.load: every later save would fail in the same way
    TrainingError *                 training_hooks: wrong, and check_training="error" ends it
    CoordinationError               coordination: the ranks could not exchange reports
        RankLost                    coordination: a rank has ended without its report
        RankTimeout                 coordination: some ranks did not report in time
        StoreLost                   coordination: the process that serves the store has ended
    TrackerMissing                  metrics.trackers: not installed, or it cannot start
    NameServiceUnavailable          launchers.launcher: the launcher's name service cannot be used
    SchedulerError                  job.commands: not installed, no response in time, or refused
    AllocationError                 tools.schedulers.allocation: variables or node file contradict
    PlanError                       tools.launch.launch_plan: ranks cannot be started in this way
    InterpreterError                tools.cli.interpreter: no Python can run the ranks
    Rank0Lost                       tools.doctor.doctor_exchange: rank 0 ended or does not respond
    NvidiaSmiError                  tools.doctor.checks.gpu_health: nvidia-smi fails
    TrialFailed                     tools.bench.trials: a rank of a trial failed
ValueError
    StateError *                    checkpoint.entries: a state cannot be saved or restored
    JobError                        tools.schedulers.job_spec: a value of a job cannot be used
    ProfileError                    tools.submission.profiles: a profile is missing or wrong
    PredictionError                 tools.plan.hardware: something needed is missing or wrong
        TooFewSteps                 tools.plan.hardware: the script ended before two steps
        ValueNeeded                 tools.plan.trace: values decide how the steps go on
Exception
    Damaged                         checkpoint.format: a file differs from what was written
    Unreadable                      checkpoint.format: perhaps intact, but not for this process
    FolderInUse                     checkpoint.lock: another job saves into the folder
    LaterStep                       checkpoint.folder: a later step is in the folder
    NotRank0                        startup.exchange: rank 0 does not listen at an address
    ProtocolError                   channel: the peer sent what is no message
    StagingError                    tools.staging: the packages cannot be staged
    UsageError                      tools.submission.build_job: a mistake of the user
ConnectionError
    Unresponsive                    channel: a program accepts connections and sends nothing
PermissionError
    NotTrusted                      host.trust: another user owns a file, or may replace it

Wrong arguments raise ValueError or TypeError. should_stop() raises RuntimeError if the ranks
cannot agree. StepsTraced (SystemExit) and ParserFound (BaseException) end a program inside
`ddpkit plan` and completion.
"""

from __future__ import annotations


class LaunchError(RuntimeError):
    """This process cannot start as part of its launch. The message gives cause and remedy.

    rank, host: where the error is; None if unknown, or if more than one is at fault.
    reported_by_rank_0: rank 0 reports the same error, so this rank need not print it.
    """

    def __init__(self, message: str, *, rank: int | None = None, host: str | None = None) -> None:
        super().__init__(message)
        self.rank, self.host = rank, host
        self.reported_by_rank_0 = False
