"""What a GPU prints that is broken itself, whatever the program does.

Source: the table of Xid errors of NVIDIA, and messages of the CUDA runtime and nvidia-smi.
"""

from __future__ import annotations

GPU_ERRORS = (
    "NVRM: Xid",
    "SXid (",
    "uncorrectable ECC error",
    "fallen off the bus",
    "Unable to determine the device handle for GPU",
    "GPU is lost",
)
