"""The exit status by which a job says that it has saved and is to be continued."""
from __future__ import annotations

EXIT_REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: a temporary failure, try again later
