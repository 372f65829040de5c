"""Compare what DistributedDataParallel keeps equal on all ranks, by samples of every tensor.

Ranks diverge when a script calls model(x) instead of ddp(x), or when an optimizer has another
learning rate on one rank. Almost every element differs then, so a sample of each tensor shows it.
Buffers are not compared: the running statistics of BatchNorm differ between ranks.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Sequence

from ..consistency import DIGITS, digests, take_sample
from .pack import Packed


class ReplicaSample:
    """A sample of the replicated settings and tensors of this rank, taken when it is made.

    names: the entries that are compared, by their paths in the state.
    """

    def __init__(self, packed: Packed) -> None:
        common = packed.of("common")
        self.names = [*packed.settings, *common]
        self._settings = [
            zlib.crc32(json.dumps(setting).encode()) for setting in packed.settings.values()
        ]
        self._count = len(common)
        self._samples = take_sample(list(common.values()))

    def digests(self) -> str:
        """Wait for the copies from a GPU, and return the digests of all entries in one string."""
        of_settings = "".join(f"{checksum:0{DIGITS}x}" for checksum in self._settings)
        return of_settings + digests(self._samples, self._count)[0]


def find_divergence(names: Sequence[str], digests: Sequence[str]) -> str:
    """Return which rank has diverged from rank 0, and where first; "" if none has.

    names: of rank 0. digests: of all ranks, from ReplicaSample.digests().
    """
    expected = digests[0]
    for rank, found in enumerate(digests):
        if found == expected:
            continue
        if not (found and expected):
            return (
                f"DistributedDataParallel does not average the same parameters on rank {rank} as "
                "on rank 0. Freeze or unfreeze parameters before the model is wrapped, on all ranks"
            )
        number = len(os.path.commonprefix([found, expected])) // DIGITS
        name = names[min(number, len(names) - 1)]
        return (
            f"{name} of rank {rank} differs from that of rank 0; expected equal parameters, "
            "optimizer states and settings. Train with ddp(x), not model(x); give all ranks the "
            "same learning rate, and step their optimizers and schedulers alike"
        )
    return ""
