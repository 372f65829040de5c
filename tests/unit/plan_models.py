"""Small models of the usual kinds, each with a loss for one batch: what predictions of memory are tested with."""
from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, mse_loss, scaled_dot_product_attention
from torch.optim import LBFGS, SGD, AdamW, Optimizer, SparseAdam
from torch.utils.checkpoint import checkpoint

Step = Callable[[nn.Module], Tensor]


class Bottleneck(nn.Module):
    """The block of ResNet-50."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width))
        self.short = nn.Identity() if inputs == 4 * width else nn.Sequential(
            nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu_(self.body(x) + self.short(x))


def resnet50() -> nn.Module:
    """He et al. 2015: 161 parameters with 25.6 million elements."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True),
                               nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for i in range(blocks):
            layers.append(Bottleneck(channels, width, 2 if i == 0 and width > 64 else 1))
            channels = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


class Block(nn.Module):
    """The block of GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2)
                   for part in self.qkv(self.norm1(x)).split(width, 2))
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(mixed)
        return x + self.down(gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, layers: int = 3, width: int = 64, heads: int = 4, words: int = 300, context: int = 64,
                 recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(self.norm(x))


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 64, 8, 8)
        self.places = nn.Parameter(torch.zeros(1, 16, 64))
        self.blocks = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True), 3, enable_nested_tensor=False)
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.patches(images).flatten(2).transpose(1, 2) + self.places).mean(1))


class Recurrent(nn.Module):
    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0].mean(1))


class Experts(nn.Module):
    """A mixture of experts: each sample goes to one of four layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(64, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weight, choice = self.router(x).softmax(-1).max(-1)
        output = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (choice == number).nonzero().flatten()
            output = output.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return output


class Positive(nn.Module):
    """A loss over the elements that a mask selects."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        return y[y > 0].exp()


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5000, 64, sparse=True), nn.Linear(64, 10)
        self.head.requires_grad_(False)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.table(words).mean(1))


def classify(inputs: Tensor, classes: int = 10) -> Step:
    labels = torch.zeros(len(inputs), dtype=torch.long)
    return lambda model: cross_entropy(model(inputs), labels)


def next_word(batch: int = 4, length: int = 64, dtype: torch.dtype | None = None) -> Step:
    tokens = torch.zeros(batch, length, dtype=torch.long)

    def step(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            return cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    return step


def regress(width: int) -> Step:
    inputs = torch.zeros(16, width)
    return lambda model: mse_loss(model(inputs), inputs)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 64))


def cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3),
                         nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10))


@dataclass
class Case:
    build: Callable[[], nn.Module]
    step: Step
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    accumulate: int = 1
    steps: int = 3  # until the optimizer's state grows no more


sgd = functools.partial(SGD, lr=1e-3, foreach=False)
momentum = functools.partial(SGD, lr=1e-3, momentum=0.9, foreach=True)
adamw = functools.partial(AdamW, lr=1e-3, foreach=False)
foreach_adamw = functools.partial(AdamW, lr=1e-3, foreach=True)
fused_adamw = functools.partial(AdamW, lr=1e-3, fused=True)

lbfgs = functools.partial(LBFGS, max_iter=5, history_size=20)
sparse_adam = functools.partial(SparseAdam, lr=1e-3)
RANDOM = torch.randn(256, 64, generator=torch.Generator().manual_seed(1))
SEQUENCES = torch.zeros(16, 50, 64)

CASES = {
    "MLP, SGD": Case(mlp, regress(64), sgd),
    "MLP, AdamW foreach": Case(mlp, regress(64), foreach_adamw),
    "CNN with BatchNorm, SGD momentum": Case(cnn, classify(torch.zeros(8, 3, 32, 32)), momentum),
    "ResNet-50, SGD momentum": Case(resnet50, classify(torch.zeros(2, 3, 64, 64)), momentum),
    "ViT with dropout, AdamW": Case(ViT, classify(torch.zeros(8, 3, 32, 32)), adamw),
    "GPT, AdamW": Case(GPT, next_word(), adamw),
    "GPT, AdamW foreach": Case(GPT, next_word(), foreach_adamw),
    "GPT, AdamW fused": Case(GPT, next_word(), fused_adamw),
    "GPT with activation checkpointing": Case(functools.partial(GPT, recompute=True), next_word(), adamw),
    "GPT, accumulation over 4": Case(GPT, next_word(), adamw, accumulate=4),
    "GPT, autocast to bfloat16": Case(GPT, next_word(dtype=torch.bfloat16), adamw),
    "GPT in bfloat16": Case(lambda: GPT().to(torch.bfloat16), next_word(), adamw),
    "mixture of experts": Case(Experts, lambda model: model(RANDOM).square().mean(), adamw),
    "loss over a boolean mask": Case(Positive, lambda model: model(RANDOM).mean(), adamw),
    "sparse embedding": Case(Bag, lambda model: model(torch.arange(320).view(32, 10)).sum(), sparse_adam),
    "MLP, LBFGS": Case(mlp, lambda model: mse_loss(model(RANDOM), RANDOM), lbfgs, steps=9),
}
RECURRENT = {
    "LSTM": Case(lambda: Recurrent(nn.LSTM(64, 128, 2, batch_first=True), 128), classify(SEQUENCES), adamw),
    "GRU, bidirectional": Case(lambda: Recurrent(nn.GRU(64, 128, 2, batch_first=True, bidirectional=True), 256),
                               classify(SEQUENCES), adamw),
    "RNN": Case(lambda: Recurrent(nn.RNN(64, 128, batch_first=True), 128), classify(SEQUENCES), adamw),
}


def planned_gpt(batch: int) -> tuple[nn.Module, Tensor]:
    """A factory for plan.py --model."""
    return GPT(layers=4, width=256, words=5000, context=512), torch.zeros(batch, 512, dtype=torch.long)


def gpt2_xl(batch: int) -> tuple[nn.Module, Tensor, Callable[[Tensor], Tensor]]:
    """A GPT with 1.6e9 parameters, for plan.py --model."""
    tokens = torch.zeros(batch, 1024, dtype=torch.long)
    return GPT(48, 1600, 25, 50257, 1024), tokens, lambda output: cross_entropy(output.flatten(0, 1), tokens.flatten())
