"""A pseudo-random order of any length, computed index by index in constant memory."""

from __future__ import annotations

import hashlib
import random

import torch

# Saved in every state. Raise it whenever Permutation gives another order for the same key.
ORDER_VERSION = 2

MAX_LENGTH = 1 << 60

ROUNDS = 6
ROUNDS_SMALL = 12  # halves of few bits need more rounds to be mixed well
SMALL_LENGTH = 1 << 17


class Permutation:
    """Map positions 0 .. length-1 to indices 0 .. length-1, each index once, in constant memory.

    This is a Feistel network on pairs of numbers (Black and Rogaway, Ciphers with Arbitrary Finite
    Domains, CT-RSA 2002, section 4). A position is left * 2**right_bits + right, with left below
    left_size. Each round changes one half by a keyed hash of the other half. A round can be undone,
    so the network is a bijection of left_size * 2**right_bits numbers.

    Permutes a slightly larger domain; out-of-range results are permuted again (cycle walking,
    section 3). left_size is even: rotating an odd number of values is an even permutation, and the
    network would then be an even permutation for every key.

    length: 1 to 2**60, else ValueError is raised. key: integers, such as a seed and an epoch.
    """

    def __init__(self, length: int, *key: int) -> None:
        if not 0 < length <= MAX_LENGTH:
            raise ValueError(f"length is {length}; expected 1 to {MAX_LENGTH}")

        self.length = length
        self._right_bits = max(1, (length - 1).bit_length() // 2)
        self._left_size = 2 * -(-length // (2 << self._right_bits))

        words = random.Random(hashlib.sha256(repr(key).encode()).digest())
        self._round_keys = [
            (
                _as_int32(words.getrandbits(32) | 1),
                _as_int32(words.getrandbits(32)),
                _as_int32(words.getrandbits(32) | 1),
            )
            for _ in range(ROUNDS_SMALL if length < SMALL_LENGTH else ROUNDS)
        ]

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the indices at these positions; both are int64 tensors of the same shape."""
        indices = self._permute(positions)
        out_of_range = (indices >= self.length).nonzero().flatten()
        while out_of_range.numel():
            permuted_again = self._permute(indices[out_of_range])
            indices[out_of_range] = permuted_again
            out_of_range = out_of_range[permuted_again >= self.length]
        return indices

    def _permute(self, numbers: torch.Tensor) -> torch.Tensor:
        """Permute numbers below left_size * 2**right_bits. In-place operations, for speed."""
        right_mask = (1 << self._right_bits) - 1
        left = (numbers >> self._right_bits).to(torch.int32)
        right = (numbers & right_mask).to(torch.int32)

        for turn, (factor, offset, last_factor) in enumerate(self._round_keys):
            changes_right = turn % 2 == 1
            mixed = (left if changes_right else right) * factor  # wraps around at 32 bits
            mixed += offset
            mixed ^= mixed >> 15
            mixed *= last_factor

            if changes_right:
                mixed >>= 32 - self._right_bits
                mixed &= right_mask
                right ^= mixed
            else:
                step = mixed.to(torch.int64)
                step &= 0xFFFFFFFF  # a hash: an unsigned fraction of 2**32 ...
                step *= self._left_size
                step >>= 32  # ... scaled to 0 .. left_size-1
                left += step.to(torch.int32)
                left -= self._left_size
                left += (left >> 31) & self._left_size  # a negative sum wraps around

        return (left.to(torch.int64) << self._right_bits) | right


def _as_int32(word: int) -> int:
    """Return the signed number that has the same 32 bits."""
    return word - (1 << 32) if word >= 1 << 31 else word
