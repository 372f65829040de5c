"""Find the job scripts and profiles, in a checkout or installed."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2]  # utils/ in a checkout, else site-packages/ddpkit

# The folder that holds jobs/: the package where pip installed it, the checkout otherwise.
KIT = PACKAGE if (PACKAGE / "jobs").is_dir() else PACKAGE.parent
JOBS = KIT / "jobs"


def doctor_words() -> list[str]:
    """Return the words that run doctor on a rank, in a checkout or installed by pip.

    Not "-m": Python would search the working folder first, and find the user's json.py there.
    """
    return [str(PACKAGE / "__main__.py"), "doctor"]
