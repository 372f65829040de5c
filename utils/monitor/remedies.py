"""Add what to do to errors of torch that do not say it. Loaded when an error ends a rank."""

from __future__ import annotations

import re

# Pattern of torch's message; replacement for the message, "" to keep it; advice.
_REMEDIES = (
    # "DistributedDataParallel device_ids and output_device arguments only work with single-device/
    # multiple-device GPU modules or CPU modules, but got device_ids [1], output_device 1, and
    # module parameters {device(type='cpu')}."
    (
        r"device_ids and output_device arguments only work with .*device\(type='cpu'\)",
        "the model is on the CPU, and DistributedDataParallel got device_ids",
        "Pass device_ids=job.device_ids, which is None on a CPU",
    ),
    (
        r"trying to initialize the default process group twice",
        "the process group exists already",
        "Leave out init_process_group(): setup_distributed() or an earlier call did it",
    ),
    # "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB ..."
    (
        r"(CUDA|HIP|XPU) out of memory",
        "",
        "Use a smaller batch, or accumulate gradients over several; then activation checkpointing",
    ),
)


def add_remedy(description: str, text: str) -> str:
    """Return the description of an error with advice added, where there is any.

    description: "ValueError: ...", possibly cut off. text: the complete message of the error.
    """
    for pattern, meaning, remedy in _REMEDIES:
        if re.search(pattern, text, re.DOTALL):
            name = description.partition(":")[0]
            shown = f"{name}: {meaning}" if meaning else description.rstrip(". ")
            return f"{shown}. {remedy}"
    return description
