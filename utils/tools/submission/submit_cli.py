"""`submit`: submit training scripts as Slurm or PBS jobs, and query the jobs submitted."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence

from ...job.commands import SchedulerError
from ..schedulers import get_scheduler
from ..schedulers.job_spec import JobError
from . import queries
from . import submissions as records
from .build_job import UsageError, choose_profile
from .paths import PROGRAM
from .profiles import ProfileError
from .submit import resubmit, run
from .submit_options import OPTION_OF_FIELD, parse


def main(words: Sequence[str] | None = None) -> int:
    """Run a subcommand; return 0 for success, 1 for an error, or the exit status of a job.

    words: the command line without the name of the command; None: that of this process.
    """
    args = parse(sys.argv[1:] if words is None else words)
    try:
        return _run(args)
    except JobError as error:
        option = OPTION_OF_FIELD.get(error.field)
        return _error(f"{error}" + (f" (option {option}, or the site file)" if option else ""))
    except (UsageError, SchedulerError, ProfileError) as error:
        return _error(str(error))
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except OSError as error:  # a full disk, a folder that may not be read
        return _error(
            f"{error.filename or 'writing the output'}: {error.strerror or error}. Nothing more "
            "was done. Check the free space and the permissions there."
        )
    except KeyboardInterrupt:
        print(f"\n{PROGRAM}: stopped watching; submitted jobs go on", file=sys.stderr)
        return 130


def _error(text: str) -> int:
    with contextlib.suppress(OSError):  # standard error may be on the full disk
        print(f"{PROGRAM}: error: {text}", file=sys.stderr)
    return 1


def _run(args: argparse.Namespace) -> int:
    if args.subcommand in ("run", "doctor"):
        return run(args)
    if args.subcommand == "list":
        return queries.print_list(args.folder, get_scheduler)
    if args.subcommand == "resubmit":
        return resubmit(args)
    return queries.combined_exit_status([_query(args, job_id) for job_id in args.job_ids])


def _query(args: argparse.Namespace, job_id: str) -> int:
    submission = records.find(args.folder, job_id)
    name = submission.scheduler if submission else choose_profile(args.site).scheduler
    scheduler = get_scheduler(name)
    if args.subcommand == "status":
        return queries.print_status(scheduler, submission, job_id)
    if args.subcommand == "logs":
        return queries.print_logs(scheduler, submission, job_id, args.follow)
    return queries.cancel(scheduler, submission, job_id)
