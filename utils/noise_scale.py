"""Measure the gradient noise scale: how large a global batch is worth its samples.

noise = GradientNoiseScale(ddp, micro_batch=split.micro_batch)  # after prime_ddp_buckets()
for ...:  # each optimizer step: forward and backward passes as usual, then
    noise.update()  # before gradients are unscaled or clipped
    optimizer.step()
    optimizer.zero_grad()
log.info(recommend(noise.value, batch=split.global_batch))

McCandlish, Kaplan, Amodei et al. 2018, "An Empirical Model of Large-Batch Training",
arXiv:1812.06162. The simple noise scale is trace(C) / |G|^2, with the mean G and the covariance C
of the gradients of single samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle


class GradientNoiseScale:
    """Estimate the gradient noise scale of a training from gradients that it computes anyway.

    The squared norm of a gradient over b samples has the mean |G|^2 + trace(C) / b. This class
    compares the gradients of the micro-batches, on all ranks, with the gradient of the whole step:
    two sizes b, two unknowns (appendix A.1 of the paper). Ranks and accumulation count alike.

    In a measured step, tensor hooks take the norm of each parameter's gradient before it is
    accumulated or exchanged, so that DDP's options and communication hooks are as usual. One
    all-reduce of three numbers follows. Other steps cost nothing. A lossy communication hook
    changes the gradient of the step, and the estimate with it.

    model: DistributedDataParallel, or any module in a single process.
    micro_batch: samples of one backward pass on one rank. The loss is their mean.
    every: measure one of so many optimizer steps.
    decay: of the exponential moving averages, per measured step.
    """

    def __init__(
        self, model: torch.nn.Module, micro_batch: float, *, every: int = 10, decay: float = 0.99
    ) -> None:
        if not (0 < micro_batch < math.inf and every >= 1 and 0 <= decay < 1):
            raise ValueError(
                f"micro_batch={micro_batch} every={every} decay={decay}; expected a micro_batch "
                "above 0, every from 1, a decay from 0 to below 1. Correct them"
            )
        self._model, self._micro_batch, self._every, self._decay = model, micro_batch, every, decay
        self._group = model.process_group if isinstance(model, DistributedDataParallel) else None
        self._steps = 0
        # Averages of the estimates of |G|^2 and trace(C). Both start at 0 with the same weights, so
        # that the bias of the start cancels in their ratio.
        self._squared_mean = self._trace = 0.0
        self._pending: tuple[Tensor, Tensor] | None = None  # sums over ranks, |step gradient|^2
        self._handles: list[RemovableHandle] = []
        self._norms: list[list[Tensor]] = []  # per parameter, one for each backward pass
        self._watch_if_due()

    def update(self, sizes: Sequence[float] | None = None) -> None:
        """Count an optimizer step, and measure it if it is due. Call it on all ranks.

        Call it after the last backward pass and before gradients are unscaled, clipped or zeroed.

        sizes: samples of each micro-batch of this rank in this step, where they are not all
            micro_batch. The loss then has the weights of accumulate().
        Raises RuntimeError where there are no gradients, ValueError where sizes do not match.
        """
        self._steps += 1
        if self._handles:
            self._measure(sizes)
        self._watch_if_due()

    @property
    def value(self) -> float:
        """The noise scale in samples, the same on all ranks.

        It is nan before the first measured step, and as long as each step has one micro-batch in
        all. It is inf where the noise hides the gradient: measure more steps.
        """
        self._take_pending()
        if self._squared_mean == self._trace == 0:
            return math.nan
        return max(self._trace, 0.0) / self._squared_mean if self._squared_mean > 0 else math.inf

    def state_dict(self) -> dict[str, float]:
        self._take_pending()
        return {"steps": self._steps, "squared_mean": self._squared_mean, "trace": self._trace}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self._steps = int(state["steps"])
        self._squared_mean, self._trace = state["squared_mean"], state["trace"]
        self._pending = None
        self._watch_if_due()

    def _watch_if_due(self) -> None:
        """Register the hooks if the next step is to be measured, and remove old ones."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._norms.clear()
        if (self._steps + 1) % self._every:
            return
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                norms: list[Tensor] = []
                self._norms.append(norms)
                self._handles.append(parameter.register_hook(partial(_record, norms)))

    def _measure(self, sizes: Sequence[float] | None) -> None:
        passes = max(map(len, self._norms))
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        if not passes or not gradients:
            raise RuntimeError(
                f"update() found {passes} backward pass(es) and {len(gradients)} gradient(s) in "
                "this step. Expected some of both. Call it after backward(), before zero_grad()"
            )
        if sizes is None:
            sizes = [self._micro_batch] * passes
        if len(sizes) != passes or not all(size > 0 for size in sizes):
            raise ValueError(
                f"sizes is {list(sizes)}; expected {passes} numbers above 0, one for each backward "
                "pass. Correct it"
            )

        squares = _sum_of_squares([norm for norms in self._norms for norm in norms])
        samples = squares.new_full((), sum(sizes))
        squared_sizes = squares.new_full((), sum(size * size for size in sizes))
        sums = torch.stack([squares, samples, squared_sizes])
        if self._group is not None:
            dist.all_reduce(sums, group=self._group)
        self._take_pending()
        # Read in a later step: a GPU need not be waited for.
        self._pending = sums, _sum_of_squares([_norm(gradient) for gradient in gradients])

    def _take_pending(self) -> None:
        """Add the last measured step to the averages."""
        if self._pending is None:
            return
        sums, step = self._pending
        self._pending = None
        squares, samples, squared_sizes = sums.tolist()
        large, large_batch = step.item(), samples
        # A micro-batch of b samples on one of n ranks has the weight n b / samples in its rank's
        # gradient. With these weights, this is the mean of the squared norms of micro-batches:
        ranks = 1 if self._group is None else self._group.size()
        small = squares * (samples / ranks) ** 2 / squared_sizes
        small_batch = squared_sizes / samples
        if large_batch < 1.001 * small_batch or not math.isfinite(small + large):
            return  # a single micro-batch, or a loss scale that overflowed

        squared_mean = (large_batch * large - small_batch * small) / (large_batch - small_batch)
        trace = (small - large) / (1 / small_batch - 1 / large_batch)
        self._squared_mean += (1 - self._decay) * (squared_mean - self._squared_mean)
        self._trace += (1 - self._decay) * (trace - self._trace)


def _record(norms: list[Tensor], gradient: Tensor) -> None:
    """Append the norm of a gradient: a tensor hook."""
    norms.append(_norm(gradient))


def _norm(gradient: Tensor) -> Tensor:
    """Return the norm in float32 or better, also of half precision."""
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    return torch.linalg.vector_norm(gradient.detach(), dtype=dtype)


def _sum_of_squares(norms: list[Tensor]) -> Tensor:
    return torch.stack(norms).square().sum()


# What follows from it -----------------------------------------------------------------------------


def lr_factor(noise_scale: float, batch: float, new_batch: float, exponent: float = 1.0) -> float:
    """Return the factor of the best learning rate from one global batch to another.

    The rate is proportional to 1 / (1 + noise_scale / batch) ** exponent: linear far below the
    noise scale, constant far above. exponent: 1 for SGD; 0.5 for Adam, for which the paper found
    0.5 to 1.
    """
    if not all(0 < number < math.inf for number in (noise_scale, batch, new_batch)):
        raise ValueError(
            f"noise_scale={noise_scale} batch={batch} new_batch={new_batch}; expected finite "
            "numbers above 0. Correct them; where the noise scale is nan or inf, measure more steps"
        )
    return float(((1 + noise_scale / batch) / (1 + noise_scale / new_batch)) ** exponent)


def recommend(noise_scale: float, batch: float | None = None) -> str:
    """Return in words which global batches are worth their samples, with their learning rates.

    Training at a batch b takes 1 + noise_scale / b times the fewest steps, and 1 + b / noise_scale
    times the fewest samples (section 2 of the paper).

    batch: the global batch today. Raises ValueError as lr_factor() does.
    """
    linear = noise_scale / 4  # here a fifth of the samples is spent on fewer steps
    batch = linear if batch is None else batch
    sgd = lr_factor(noise_scale, batch, linear)
    lines = [
        f"Noise scale {noise_scale:,.0f} samples: up to about {linear:,.0f} samples per step the "
        f"speed-up is nearly linear; beyond {noise_scale:,.0f}, more than half of the samples are "
        "wasted."
    ]
    if batch != linear:
        lines += [
            f"{batch:,.0f} samples per step take {1 + noise_scale / batch:.3g} times the fewest "
            f"steps and {1 + batch / noise_scale:.3g} times the fewest samples.",
            f"From {batch:,.0f} to {linear:,.0f} samples, multiply the learning rate of SGD by "
            f"{sgd:.3g} (linear rule), that of Adam by {math.sqrt(sgd):.3g} (square-root rule).",
        ]
    return "\n".join([*lines, LARGE_BATCHES])


LARGE_BATCHES = """\
Larger batches need rates per layer, LARS for SGD and LAMB for Adam: pip install pytorch-optimizer
    from pytorch_optimizer import LARS, Lamb
    optimizer = Lamb(model.parameters(), lr=2e-3, weight_decay=0.01)"""
