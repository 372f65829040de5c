"""Communication hooks of DistributedDataParallel that also run on gloo.

ddp.register_comm_hook(None, bf16_hook)  # torch's own bf16 hook refuses gloo

# torch's PowerSGD aborts on gloo with "size mismatch" where a model has several buckets.
state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=100)
ddp.register_comm_hook(state, in_order(powerSGD_hook))

No `from __future__ import annotations` here: DistributedDataParallel compares the annotations of a
hook with types.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]

Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


def bf16_hook(
    group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Send the gradients as bfloat16: half the bytes, the range of float32, 8 bits of precision."""
    return _send_as(torch.bfloat16, group, bucket)


def fp16_hook(
    group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Send the gradients as float16: half the bytes, 11 bits of precision, at most 65,504.

    Larger sums become infinite, and gradients below 6e-8 become zero: scale the loss (torch.amp).
    """
    return _send_as(torch.float16, group, bucket)


def _send_as(
    dtype: torch.dtype, group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    gradients: torch.Tensor = bucket.buffer()
    # Divide first: the sum over many ranks may be outside the range of float16.
    sent = gradients.div(dist.get_world_size(group)).to(dtype)
    work = dist.all_reduce(sent, group=group, async_op=True)
    if work is None:
        raise RuntimeError(
            "this rank is not in the group of the communication hook. Expected one of its ranks. "
            "Register the hook with a group that contains all ranks of the model"
        )
    received = work.get_future()

    def restore(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        gradients.copy_(done.value()[0])
        return gradients

    restored: torch.futures.Future[torch.Tensor] = received.then(restore)
    return restored


def in_order(hook: Hook) -> Hook:
    """Return a hook that finishes one bucket before it starts the next.

    A hook such as powerSGD_hook starts its second all-reduce when the first one has ended. With
    gloo, ranks then start the all-reduces of different buckets in a different order, and they do
    not match. The hook runs without overlap, which costs little if it sends little.
    """

    def wait_for_bucket(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        future = hook(state, bucket)
        future.wait()
        return future

    return wait_for_bucket
