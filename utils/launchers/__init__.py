"""Find out which launcher started this process, and as which rank. Standard library only.

`python -m utils.launchers` explains the decision.
"""

from __future__ import annotations

from ..errors import LaunchError as LaunchError
from .detect import LAUNCHERS as LAUNCHERS
from .detect import detect as detect
from .launcher import Placement as Placement
