"""Derive advice from a prediction: stay with DDP, accumulate, compress or shard."""

from __future__ import annotations

from collections.abc import Mapping

from .communication import Link, Network
from .predict import Workload, holds_up_to, scaling

GOOD, LEAST = 0.8, 0.7  # target efficiency; efficiency below which to shard
GB = 1e9


def memory_advice(memory: Mapping[str, float], capacity: float, gpus: int, name: str) -> list[str]:
    """Return what to do about memory. memory: predicted bytes by category; capacity: usable."""
    total = sum(memory.values())
    used = f"{total / GB:.1f} GB of the {capacity / GB:.1f} GB that are usable on {name}"
    if total <= capacity:
        return [f"The training fits: {used}."]
    texts = [f"The training does not fit: {used}."]
    states = sum(memory.get(key, 0.0) for key in ("parameters", "gradients", "optimizer"))
    buckets, activations = memory.get("buckets", 0.0), memory.get("activations", 0.0)
    saved = min(buckets, memory.get("gradients", 0.0))
    if saved and total - saved <= capacity:
        texts.append(
            f"DDP(gradient_as_bucket_view=True) saves {saved / GB:.1f} GB, the second copy of the "
            "gradients. Then it fits."
        )
    elif activations > total - capacity:
        texts.append(
            f"Activations need {activations / GB:.1f} GB. Use a smaller micro-batch with "
            "accumulation, or torch.utils.checkpoint, which recomputes them."
        )
    if states + buckets > capacity and buckets:
        sharded = states / gpus
        texts.append(
            f"Parameters, gradients and optimizer need {states / GB:.1f} GB on each GPU with any "
            f"batch size. Use FSDP2 (fully_shard): {sharded / GB:.1f} GB on each of {gpus} GPUs, "
            "or HSDP, which shards within a node only."
        )
    return texts


def scaling_advice(work: Workload, network: Network, gpus: int, gradient_bytes: int) -> list[str]:
    """Return what to do about scaling. gradient_bytes: of one element of a gradient."""
    step = work.step(network, gpus)
    found = (
        f"On {gpus} GPUs the efficiency is {step.efficiency:.0%}: each GPU waits "
        f"{step.exposed:.3f} s of {step.total:.3f} s per step for communication"
    )
    if step.efficiency >= GOOD:
        return [f"{found}. Stay with DDP."]
    texts = [f"{found}. The target is {GOOD:.0%}."]
    curve = scaling(work, network, _sizes(gpus))
    limit = holds_up_to(curve, GOOD)
    if limit is not None and limit > 1:
        texts.append(f"The efficiency is at least {GOOD:.0%} on up to {limit} GPUs.")
    for factor in (2, 4, 8, 16, 32):
        efficiency = work.accumulated(factor).step(network, gpus).efficiency
        if efficiency >= GOOD:
            texts.append(
                f"Accumulate {work.accumulate_steps * factor} micro-steps under no_sync(): "
                f"{efficiency:.0%}, if training converges with {factor} times the global batch."
            )
            break
    if gradient_bytes == 4:
        efficiency = work.compressed(2).step(network, gpus).efficiency
        texts.append(f"A bf16 or fp16 communication hook halves the bytes: {efficiency:.0%}.")
    if step.efficiency < LEAST:
        texts.append(
            f"Below {LEAST:.0%}, consider sharding: FSDP2 or HSDP free memory for a larger "
            "micro-batch, which computes longer between exchanges. Each GPU then sends 1.5 times "
            "the bytes of DDP in a step."
        )
    return texts


def first_checks(work: Workload, network: Network, gpus: int, measured: float) -> list[str]:
    """Return the likeliest causes of a measured efficiency, the best match first.

    Each cause is a change of the model; the efficiency that it predicts is compared with the
    measured one.
    """
    expected = work.step(network, gpus).efficiency
    if measured >= expected * 0.95:
        return [f"Measured {measured:.0%}, predicted {expected:.0%}: no problem found."]

    def with_links(inside: Link, between: Link) -> float:
        changed = Network(inside, between, network.gpus_per_node, network.tree)
        return work.step(changed, gpus).efficiency

    slow_port = Link(network.between.bandwidth / network.gpus_per_node, network.between.latency)
    causes = [
        (
            with_links(network.inside, Link(1.1e9, 40e-6)),
            "NCCL uses TCP sockets instead of the fabric. Set NCCL_DEBUG=INFO: the line 'Using "
            "network' must name IB or the plugin of the site, not Socket",
        ),
        (
            with_links(network.inside, slow_port),
            "only one network port of each node is used. NCCL_DEBUG=INFO lists the ports after "
            "'NET/'; check NCCL_IB_HCA and NCCL_CROSS_NIC",
        ),
        (
            with_links(Link(12e9, 10e-6), network.between),
            "the GPUs of a node communicate over PCIe instead of NVLink. `nvidia-smi topo -m` must "
            "show NV; check NCCL_P2P_DISABLE",
        ),
        (
            work.step(network, gpus, overlap=False).efficiency,
            "communication does not overlap with the backward pass: find_unused_parameters=True, "
            "a communication hook that waits, or one bucket for all gradients",
        ),
    ]
    causes = [cause for cause in causes if cause[0] < expected * 0.95]
    causes.sort(key=lambda cause: abs(cause[0] - measured))
    texts = [f"{text} (predicts {efficiency:.0%})." for efficiency, text in causes]
    texts.append(
        "A slow rank, or ranks that wait for data, have the same effect. `bench.py ddp` measures "
        "both."
    )
    return [
        f"Measured {measured:.0%}, predicted {expected:.0%}. Check first:",
        *(f"{i}. {text}" for i, text in enumerate(texts, 1)),
    ]


def _sizes(gpus: int) -> list[int]:
    sizes = [1]
    while sizes[-1] * 2 < gpus:
        sizes.append(sizes[-1] * 2)
    return [*sizes, gpus]
