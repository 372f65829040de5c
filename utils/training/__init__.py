"""Tools for the training loop: global batch, learning rate, gradient noise, step times."""

from __future__ import annotations

from .batch import BatchSplit as BatchSplit
from .batch import accumulate as accumulate
from .batch import batched as batched
from .batch import linear_warmup as linear_warmup
from .batch import prime_ddp_buckets as prime_ddp_buckets
from .batch import scale_lr as scale_lr
from .batch import split_batch as split_batch
from .noise_scale import GradientNoiseScale as GradientNoiseScale
from .noise_scale import recommend as recommend
from .step_timer import StepTimer as StepTimer
