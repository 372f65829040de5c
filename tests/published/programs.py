"""Build the model, the loss and the optimizer of each published program, for a trace with fake tensors.

A program is one line: the family, the model, the micro-batch and what else decides on its operations. The networks come
from torchvision, timm and transformers, which only this folder needs.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from utils.tools.plan.trace import Trace, trace_training

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


def autocast(kind: str) -> torch.autocast:
    return torch.autocast("cpu", HALF.get(kind, torch.bfloat16), enabled=kind in HALF)


@contextmanager
def tf32_permitted(kind: str) -> Iterator[None]:
    """Permit TF32 as NVIDIA's containers do, but not where "fp32" was measured."""
    torch.set_float32_matmul_precision("highest" if kind == "fp32" else "high")
    torch.backends.cudnn.allow_tf32 = kind != "fp32"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = True


def images(model: str, batch: int, size: int, kind: str, channels_last: bool, optimizer: str) -> Trace:
    """Trace an image classifier of torchvision, or of timm ("timm:NAME"), on cross-entropy."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    library, _, name = model.rpartition(":")
    made: dict[str, Tensor] = {}

    def build() -> nn.Module:
        if library:
            import timm
            network = timm.create_model(name)
        else:
            import torchvision
            network = getattr(torchvision.models, name)()
        return network.to(memory_format=layout).train()

    def inputs() -> None:
        made["images"] = torch.zeros(batch, 3, size, size).to(memory_format=layout)
        made["labels"] = torch.zeros(batch, dtype=torch.long)

    def loss(network: nn.Module) -> Tensor:
        with autocast(kind):
            return F.cross_entropy(network(made["images"]), made["labels"])

    optimizers: dict[str, Callable[..., Any]] = {
        "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-4),
        "nesterov": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
        "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.1, momentum=0.9)}
    return traced(build, inputs, loss, optimizers[optimizer], kind)


def bert(size: str, task: str, batch: int, length: int, kind: str, predictions: int = 0) -> Trace:
    """Trace BERT of transformers. task: "squad", or "pretraining" with so many predicted words in a sequence.

    kind "o2" is that of apex: the parameters are float16, and the optimizer has copies in float32.
    """
    from transformers import BertConfig, BertForPreTraining, BertForQuestionAnswering
    sizes = {"base": (768, 12, 12, 3072), "large": (1024, 24, 16, 4096)}
    width, layers, heads, inner = sizes[size]
    config = BertConfig(hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=inner,
                        attn_implementation="eager")
    made: dict[str, Tensor] = {}
    pure = kind == "o2"

    def build() -> nn.Module:
        network = (BertForQuestionAnswering if task == "squad" else BertForPreTraining)(config).train()
        return network.half() if pure else network

    def inputs() -> None:
        made["tokens"] = torch.zeros(batch, length, dtype=torch.long)
        made["labels"] = torch.zeros(batch, dtype=torch.long)
        made["places"] = torch.zeros(batch, predictions, width, dtype=torch.long)
        made["words"] = torch.zeros(batch * predictions, dtype=torch.long)

    def loss(network: Any) -> Tensor:
        with autocast(kind):
            if task == "squad":
                return network(made["tokens"], start_positions=made["labels"], end_positions=made["labels"]).loss
            hidden, pooled = network.bert(made["tokens"])[:2]
            words, order = network.cls(hidden.gather(1, made["places"]), pooled)
            return F.cross_entropy(words.flatten(0, 1).float(), made["words"]) + F.cross_entropy(
                order.float(), made["labels"])
    return traced(build, inputs, loss, lambda parameters: torch.optim.AdamW(parameters, fused=True), kind)


class Block(nn.Module):
    """The block of GPT-2."""

    def __init__(self, width: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=bias), nn.LayerNorm(width, bias=bias)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=bias), nn.Linear(width, width, bias=bias)
        self.up, self.down = nn.Linear(width, 4 * width, bias=bias), nn.Linear(4 * width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2)
                   for t in self.qkv(self.norm1(x)).split(width, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, words: int, context: int, bias: bool) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, bias) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width, bias=bias), nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))


def gpt(layers: int, width: int, heads: int, words: int, batch: int, length: int, bias: bool = True) -> Trace:
    """Trace a GPT under autocast to bfloat16, with clipping and fused AdamW."""
    made: dict[str, Tensor] = {}

    def inputs() -> None:
        made["tokens"] = torch.zeros(batch, length, dtype=torch.long)

    def build() -> nn.Module:
        return GPT(layers, width, heads, words, length, bias)

    def loss(network: nn.Module) -> Tensor:
        with autocast("bf16"):
            return F.cross_entropy(network(made["tokens"]).flatten(0, 1), made["tokens"].flatten())
    return traced(build, inputs, loss, lambda parameters: torch.optim.AdamW(parameters, fused=True), "bf16")


def traced(build: Callable[[], nn.Module], inputs: Callable[[], None], loss: Callable[[nn.Module], Tensor],
           optimizer: Callable[..., Any], kind: str) -> Trace:
    """Trace a model with inputs that are fake, too: no batch is in memory."""
    network = build()  # real, because some read values while they are built

    def fake() -> nn.Module:
        known: dict[int, nn.Parameter] = {}
        for module in network.modules():
            for name, old in module._parameters.items():
                if old is not None:
                    new = known.setdefault(id(old), nn.Parameter(torch.empty_like(old.detach())))
                    module._parameters[name] = new
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = torch.empty_like(buffer)
        inputs()
        return network

    def run(network: nn.Module) -> Tensor:
        with next(network.parameters()).fake_mode:  # type: ignore[attr-defined]
            return loss(network)
    with tf32_permitted(kind):
        return trace_training(fake, run, optimizer)


FAMILIES: dict[str, Callable[..., Trace]] = {"images": images, "bert": bert, "gpt": gpt}
