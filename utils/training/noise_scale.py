"""Measure the gradient noise scale, which shows how large a global batch is efficient.

noise = GradientNoiseScale(ddp, micro_batch=split.micro_batch)  # after prime_ddp_buckets()
for ...:  # each optimizer step: forward and backward passes as usual, then
    noise.update()  # before gradients are unscaled or clipped
    optimizer.step()
    optimizer.zero_grad()
log.info(recommend(noise.value, batch=split.global_batch))

McCandlish, Kaplan, Amodei et al. 2018, "An Empirical Model of Large-Batch Training",
arXiv:1812.06162. The simple noise scale is trace(C) / |G|^2, where G is the mean and C the
covariance of the gradients of single samples.
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
    """Estimate the gradient noise scale from the gradients of a training.

    The squared norm of a gradient over b samples has the expected value |G|^2 + trace(C) / b. This
    class compares the gradients of the micro-batches, on all ranks, with the gradient of the whole
    step. Two batch sizes b give two equations for the two unknowns (appendix A.1 of the paper).
    Micro-batches may be spread over ranks or accumulated on one.

    In a measured step, tensor hooks take the norm of each parameter's gradient before it is
    accumulated or exchanged. DDP's options and communication hooks therefore work as usual. One
    all-reduce of three numbers follows. Other steps have no overhead. A lossy communication hook
    changes the gradient of the step, and therefore the estimate.

    model: DistributedDataParallel, or any module in a single process.
    micro_batch: samples of one backward pass on one rank. The loss is their mean.
    every: optimizer steps from one measured step to the next.
    decay: factor of the exponential moving averages, per measured step.
    """

    def __init__(
        self, model: torch.nn.Module, micro_batch: float, *, every: int = 10, decay: float = 0.99
    ) -> None:
        if not (0 < micro_batch < math.inf and every >= 1 and 0 <= decay < 1):
            raise ValueError(
                f"micro_batch={micro_batch} every={every} decay={decay}; expected micro_batch > 0, "
                "every >= 1 and 0 <= decay < 1. Correct them"
            )
        self._model, self._micro_batch, self._every, self._decay = model, micro_batch, every, decay
        self._group = model.process_group if isinstance(model, DistributedDataParallel) else None
        self._steps = 0
        # Averages of |G|^2 and trace(C), on the device: reading them waits for it. Both start at 0
        # and have the same weights, so the initial bias cancels in their ratio.
        self._averages = torch.zeros(2, dtype=torch.float64)
        self._handles: list[RemovableHandle] = []
        self._norms: list[list[Tensor]] = []  # parameter -> norm in each backward pass
        self._watch_if_due()

    def update(self, sizes: Sequence[float] | None = None) -> None:
        """Count an optimizer step, and measure it if it is due. Call it on all ranks.

        Call it after the last backward pass and before gradients are unscaled, clipped or zeroed.

        sizes: samples of each micro-batch of this rank in this step, if they differ from
            micro_batch. The loss then has the weights of accumulate().
        Raises RuntimeError if there are no gradients, ValueError if sizes do not match.
        """
        self._steps += 1
        if self._handles:
            self._measure(sizes)
        self._watch_if_due()

    @property
    def value(self) -> float:
        """The noise scale in samples, the same on all ranks.

        It is nan before the first measured step, and if each step has a single micro-batch. It is
        inf if noise hides the gradient; then measure more steps.
        """
        squared_mean, trace = self._averages.tolist()
        if squared_mean == trace == 0:
            return math.nan
        return max(trace, 0.0) / squared_mean if squared_mean > 0 else math.inf

    def state_dict(self) -> dict[str, float]:
        squared_mean, trace = self._averages.tolist()
        return {"steps": self._steps, "squared_mean": squared_mean, "trace": trace}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self._steps = int(state["steps"])
        self._averages = torch.tensor([state["squared_mean"], state["trace"]], dtype=torch.float64)
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
                handle = parameter.register_hook(partial(_record, norms))  # type: ignore[no-untyped-call]
                self._handles.append(handle)

    def _measure(self, sizes: Sequence[float] | None) -> None:
        passes = max(map(len, self._norms), default=0)
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        if not passes or not gradients:
            raise RuntimeError(
                f"update() found {passes} backward passes and {len(gradients)} gradients in this "
                "step. Expected at least one of each. Call it after backward(), before zero_grad()"
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
        whole: list[Tensor] = []
        for gradient in gradients:
            _record(whole, gradient)
        self._average(sums, _sum_of_squares(whole))

    def _average(self, sums: Tensor, step: Tensor) -> None:
        """Add a measured step to the averages. sums: over all ranks; step: its squared norm."""
        squares, samples, squared_sizes = sums.double()
        large, large_batch = step.double(), samples
        # A micro-batch of b samples on one of n ranks has the weight n b / samples in its rank's
        # gradient. With these weights, this is the mean of the squared norms of micro-batches:
        ranks = 1 if self._group is None else self._group.size()
        small = squares * (samples / ranks).square() / squared_sizes
        small_batch = squared_sizes / samples

        squared_mean = (large_batch * large - small_batch * small) / (large_batch - small_batch)
        trace = (small - large) / (1 / small_batch - 1 / large_batch)
        # Not usable: a single micro-batch, or a loss scale that overflowed.
        is_usable = (large_batch >= 1.001 * small_batch) & torch.isfinite(small + large)
        old = self._averages.to(step.device, non_blocking=True)
        new = old + (1 - self._decay) * (torch.stack([squared_mean, trace]) - old)
        self._averages = torch.where(is_usable, new, old)


def _record(norms: list[Tensor], gradient: Tensor) -> None:
    """Append a gradient's norm, in float32 or better. Used as a tensor hook."""
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    norms.append(torch.linalg.vector_norm(gradient.detach(), dtype=dtype))


def _sum_of_squares(norms: list[Tensor]) -> Tensor:
    return torch.stack(norms).square().sum()


# What follows from it -----------------------------------------------------------------------------


def recommend(noise_scale: float, batch: float) -> str:
    """Return a text that recommends global batches, and their learning rates.

    Training with a batch of b samples takes 1 + noise_scale / b times the minimum of steps, and
    1 + b / noise_scale times the minimum of samples (section 2 of the paper). SGD's best learning
    rate is proportional to 1 / (1 + noise_scale / b). For Adam the paper found a power of it, with
    an exponent from 0.5 to 1. Far below the noise scale these become the linear and the square-root
    rule.

    batch: the global batch of the present learning rate.
    """
    if not (0 < noise_scale < math.inf and 0 < batch < math.inf):
        raise ValueError(
            f"noise_scale={noise_scale} batch={batch}; expected finite numbers above 0. Correct "
            "them; where the noise scale is nan or inf, measure more steps"
        )
    linear = noise_scale / 4  # costs 1.25 times the minimum of samples
    growth = linear / batch
    factor = (1 + noise_scale / batch) / (1 + noise_scale / linear)
    return f"""\
Up to about {linear:,.0f} samples per step the speed-up is nearly linear. Beyond {noise_scale:,.0f}
(the noise scale), training needs more than twice the fewest samples.
{batch:,.0f} samples per step take {1 + noise_scale / batch:.3g} times the fewest steps and \
{1 + batch / noise_scale:.3g} times the fewest samples.
From {batch:,.0f} to {linear:,.0f} samples, multiply the learning rate of SGD by {factor:.3g} \
(linear rule: {growth:.3g}), that of Adam by {factor**0.5:.3g} (square root: {growth**0.5:.3g})."""
