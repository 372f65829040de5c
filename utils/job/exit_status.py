"""The exit status of a job that has saved and is to be continued by another job."""

from __future__ import annotations

EXIT_REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: a temporary failure, try again later
