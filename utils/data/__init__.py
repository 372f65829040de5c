"""Divide samples among the ranks in a repeatable order, and resume within an epoch."""

from __future__ import annotations

from .loader import ResumableDataLoader as ResumableDataLoader
from .loader import resumable_loader as resumable_loader
from .permutation import Permutation as Permutation
from .sampler import ResumableDistributedSampler as ResumableDistributedSampler
from .sampler import sample_seed as sample_seed
