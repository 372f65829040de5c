"""Small models of the usual kinds, each with a loss for one batch: what predictions of memory are tested with."""
from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, max_pool2d, mse_loss, normalize, scaled_dot_product_attention
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.nn.utils.rnn import pack_padded_sequence
from torch.optim import SGD, Adadelta, Adagrad, Adamax, AdamW, NAdam, Optimizer, RMSprop, SparseAdam
from torch.utils.checkpoint import checkpoint

Step = Callable[[nn.Module], Tensor]


class Model(nn.Module):
    """Layers and parameters, and the forward pass that uses them."""

    def __init__(self, call: Callable[..., Tensor], parts: dict[str, Any]) -> None:
        super().__init__()
        self.call = call
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Tensor, **named: object) -> Tensor:
        return self.call(self, *inputs, **named)


def model(parts: Callable[..., dict[str, Any]]) -> Callable[[Callable[..., Tensor]], Callable[..., nn.Module]]:
    """Turn a forward pass into a factory of models with these parts, which are the same each time."""
    def factory(call: Callable[..., Tensor], *arguments: Any, **options: Any) -> nn.Module:
        torch.manual_seed(0)
        return Model(call, parts(*arguments, **options))
    return lambda call: functools.partial(factory, call)


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


def encoder(width: int, layers: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, width, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


@model(lambda: {"patches": nn.Conv2d(3, 64, 8, 8), "places": nn.Parameter(torch.zeros(1, 16, 64)),
                "blocks": encoder(128, 3), "head": nn.Linear(64, 10)})
def vit(m: Any, images: Tensor) -> Tensor:
    return m.head(m.blocks(m.patches(images).flatten(2).transpose(1, 2) + m.places).mean(1))


@model(lambda kind, width, **options: {"layer": kind(64, 128, batch_first=True, **options),
                                       "head": nn.Linear(width, 10)})
def recurrent(m: Any, x: Tensor) -> Tensor:
    return m.head(m.layer(x)[0].mean(1))


@model(lambda: {"router": nn.Linear(64, 4), "experts": nn.ModuleList(
    nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))})
def experts(m: Any, x: Tensor) -> Tensor:
    """A mixture of experts: each sample goes to one of four layers."""
    weight, choice = m.router(x).softmax(-1).max(-1)
    output = torch.zeros_like(x)
    for number, expert in enumerate(m.experts):
        rows = (choice == number).nonzero().flatten()
        output = output.index_add(0, rows, expert(x[rows]) * weight[rows, None])
    return output


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 64))


def cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3),
                         nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10))


def classify(inputs: Tensor) -> Step:
    labels = torch.zeros(len(inputs), dtype=torch.long)
    return lambda model: cross_entropy(model(inputs), labels)


def regress(inputs: Tensor) -> Step:
    return lambda model: mse_loss(model(inputs), inputs)


def next_word(batch: int = 4, length: int = 64, dtype: torch.dtype | None = None) -> Step:
    tokens = torch.zeros(batch, length, dtype=torch.long)

    def step(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            return cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    return step


@dataclass
class Case:
    build: Callable[[], nn.Module]
    step: Step
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    accumulate: int = 1


sgd = functools.partial(SGD, lr=1e-3, foreach=False)
momentum = functools.partial(SGD, lr=1e-3, momentum=0.9, foreach=True)
adamw = functools.partial(AdamW, lr=1e-3, foreach=False)
foreach_adamw = functools.partial(AdamW, lr=1e-3, foreach=True)
fused_adamw = functools.partial(AdamW, lr=1e-3, fused=True)

sparse_adam = functools.partial(SparseAdam, lr=1e-3)
RANDOM = torch.randn(256, 64, generator=torch.Generator().manual_seed(1))
SEQUENCES = torch.zeros(16, 50, 64)

CASES = {
    "MLP, SGD": Case(mlp, regress(torch.zeros(16, 64)), sgd),
    "CNN with BatchNorm, SGD momentum": Case(cnn, classify(torch.zeros(8, 3, 32, 32)), momentum),
    "ViT with dropout, AdamW": Case(vit, classify(torch.zeros(8, 3, 32, 32)), adamw),
    "GPT, AdamW": Case(GPT, next_word(), adamw),
    "GPT, AdamW foreach": Case(GPT, next_word(), foreach_adamw),
    "GPT, AdamW fused": Case(GPT, next_word(), fused_adamw),
    "GPT with activation checkpointing": Case(functools.partial(GPT, recompute=True), next_word(), adamw),
    "GPT, accumulation over 4": Case(GPT, next_word(), adamw, accumulate=4),
    "GPT, autocast to bfloat16": Case(GPT, next_word(dtype=torch.bfloat16), adamw),
    "GPT in bfloat16": Case(lambda: GPT().to(torch.bfloat16), next_word(), adamw),
    "LSTM": Case(lambda: recurrent(nn.LSTM, 128, num_layers=2), classify(SEQUENCES), adamw),
    "GRU, bidirectional": Case(lambda: recurrent(nn.GRU, 256, num_layers=2, bidirectional=True), classify(SEQUENCES),
                               adamw),
    "GRU of packed sequences": Case(
        lambda: Model(lambda m, x: m.head(m.layer(pack_padded_sequence(
            x, torch.arange(10, 26), batch_first=True, enforce_sorted=False))[1][-1]), {
                "layer": nn.GRU(64, 128, 2, dropout=0.1), "head": nn.Linear(128, 10)}), classify(SEQUENCES), adamw),
    "RNN": Case(lambda: recurrent(nn.RNN, 128), classify(SEQUENCES), adamw),
}


# --- written after the tracer was finished, and not used while it was written

def block(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU())


@model(lambda: {"down1": block(3, 16), "down2": block(16, 32), "middle": block(32, 64),
                "up2": nn.ConvTranspose2d(64, 32, 2, 2), "up1": nn.ConvTranspose2d(32, 16, 2, 2),
                "join2": block(64, 32), "join1": block(32, 16), "head": nn.Conv2d(16, 1, 1)})
def unet(m: Any, x: Tensor) -> Tensor:
    a = m.down1(x)
    b = m.down2(max_pool2d(a, 2))
    c = m.join2(torch.cat([m.up2(m.middle(max_pool2d(b, 2))), b], 1))
    return m.head(m.join1(torch.cat([m.up1(c), a], 1)))


@model(lambda: {"words": nn.Embedding(1000, 64), "head": nn.Linear(64, 1000), "body": encoder(256, 2)})
def masked(m: Any, words: Tensor) -> Tensor:
    """A language model whose loss is over 15 % of the places."""
    hidden = torch.rand(words.shape, generator=torch.Generator().manual_seed(0)) < 0.15
    x = m.body(m.words(words.masked_fill(hidden, 0)))
    return cross_entropy(m.head(x[hidden]), words[hidden])


@model(lambda: {"tables": nn.ModuleList(nn.EmbeddingBag(n, 32, mode="sum", sparse=True) for n in (2000, 500, 50)),
                "bottom": nn.Linear(13, 32),
                "top": nn.Sequential(nn.Linear(38, 64), nn.ReLU(), nn.Linear(64, 1))})
def clicks(m: Any, dense: Tensor, categories: Tensor) -> Tensor:
    """Sparse tables of categories beside dense features."""
    parts = torch.stack([m.bottom(dense), *(t(categories[i]) for i, t in enumerate(m.tables))], 1)
    rows, columns = torch.triu_indices(4, 4, 1)
    products = (parts @ parts.transpose(1, 2))[:, rows, columns]
    return m.top(torch.cat([parts[:, 0], products], 1))


@model(lambda: {"body": mlp(), "scale": nn.Parameter(torch.tensor(2.0))})
def contrast(m: Any, x: Tensor) -> Tensor:
    one, other = (normalize(m.body(x + 0.1 * torch.randn_like(x)), dim=-1) for _ in range(2))
    return cross_entropy(one @ other.T * m.scale.exp(), torch.arange(len(x)))


@model(lambda: {"words": nn.Embedding(500, 64), "head": nn.Linear(64, 500),
                "body": nn.Transformer(64, 4, 2, 2, 128, batch_first=True)})
def translator(m: Any, words: Tensor) -> Tensor:
    x, mask = m.words(words), nn.Transformer.generate_square_subsequent_mask(words.shape[1])
    return m.head(m.body(x, x, tgt_mask=mask))


@model(lambda: {"layers": nn.ModuleList(nn.Linear(64, 64) for _ in range(3)),
                "edges": torch.randint(256, (2, 2000), generator=torch.Generator().manual_seed(0))})
def graph(m: Any, x: Tensor) -> Tensor:
    source, target = m.edges
    degree = torch.bincount(target, minlength=256).clamp(min=1)[:, None]
    for layer in m.layers:
        x = x + torch.zeros_like(x).index_add(0, target, layer(x)[source]).div(degree).relu()
    return x


@model(lambda: {"encoder": nn.Linear(64, 32),
                "decoder": nn.Sequential(nn.Linear(16, 200), nn.ELU(), nn.Linear(200, 64))})
def vae(m: Any, x: Tensor) -> Tensor:
    mean, log_variance = m.encoder(x).chunk(2, -1)
    latent = mean + torch.randn_like(mean) * (log_variance / 2).exp()
    divergence = (mean.square() + log_variance.exp() - log_variance - 1).sum(-1).mean()
    return mse_loss(m.decoder(latent), x) + divergence


def depthwise(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, inputs, 3, 2, 1, groups=inputs, bias=False), nn.BatchNorm2d(inputs),
            nn.Hardswish(inplace=True), nn.Conv2d(inputs, outputs, 1), nn.Dropout2d(0.1)]


@model(lambda: {"body": nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.Hardswish(inplace=True), *depthwise(32, 64),
                                      *depthwise(64, 96), *depthwise(96, 128)), "head": nn.Linear(128, 10)})
def mobile(m: Any, x: Tensor) -> Tensor:
    return m.head(m.body(x).mean((2, 3)))


@model(lambda: {"router": nn.Linear(64, 8), "up": nn.Parameter(torch.randn(8, 64, 128) / 8),
                "down": nn.Parameter(torch.randn(8, 128, 64) / 8)})
def top_two(m: Any, x: Tensor) -> Tensor:
    """A mixture of experts with two experts for each word, and a capacity that drops the rest."""
    weights, choices = m.router(x).softmax(-1).topk(2)
    output = torch.zeros_like(x)
    for number in range(8):
        rows, places = (found[:96] for found in torch.where(choices == number))
        if rows.numel():
            y = gelu(x[rows] @ m.up[number]) @ m.down[number]
            output = output.index_put((rows,), y * weights[rows, places, None], accumulate=True)
    return output


@model(lambda: {"body": nn.Conv2d(3, 32, 3, 2, 1), "head": nn.Conv2d(32, 5, 3, 2, 1)})
def detector(m: Any, images: Tensor) -> Tensor:
    """Boxes with a score above a threshold, without those that overlap with a better one."""
    found = m.head(m.body(images).relu()).flatten(2).transpose(1, 2)
    total = found.square().mean()
    for boxes in found:
        boxes = boxes[boxes[:, 4] > boxes[:, 4].mean()]
        left = boxes[:, 4].argsort(descending=True)
        while left.numel():
            best, left = boxes[left[0]], left[1:]
            total = total + best[:4].abs().sum()
            left = left[(boxes[left, :4] - best[:4]).abs().sum(1) > 0.5]
    return total


@model(lambda: {"body": nn.Sequential(weight_norm(nn.Conv1d(1, 16, 3, dilation=2)), nn.Softplus(), nn.Flatten(),
                                      spectral_norm(nn.Linear(16 * 60, 1)))})
def critic(m: Any, x: Tensor) -> Tensor:
    """A loss with a penalty for the norm of the gradient."""
    x = x[:, None].requires_grad_()
    score = m.body(x).sum()
    slope, = torch.autograd.grad(score, x, create_graph=True)
    return score + slope.square().sum()


def loss_of(*inputs: Tensor) -> Step:
    return lambda model: model(*inputs).square().mean()


WORDS = torch.arange(8 * 32).view(8, 32)
HELD_OUT = {
    "U-Net, RMSprop": Case(unet, loss_of(torch.zeros(2, 3, 32, 32)), RMSprop),
    "contrastive loss, Adagrad": Case(contrast, loss_of(RANDOM), Adagrad),
    "encoder and decoder, AMSGrad": Case(translator, loss_of(WORDS), functools.partial(AdamW, amsgrad=True)),
    "VAE, Adamax": Case(vae, loss_of(RANDOM), Adamax),
    "depthwise convolutions, Nesterov": Case(
        mobile, classify(torch.zeros(4, 3, 64, 64).to(memory_format=torch.channels_last)),
        functools.partial(SGD, lr=0.1, momentum=0.9, nesterov=True)),
    "gradient penalty, Adadelta": Case(critic, loss_of(RANDOM), Adadelta),
}

# --- values decide how their steps go on

NEED_VALUES = {
    "mixture of experts": Case(experts, lambda model: model(RANDOM).square().mean(), adamw),
    "loss over a boolean mask": Case(mlp, lambda model: (y := model(RANDOM))[y > 0].exp().mean(), adamw),
    "sparse embedding": Case(
        lambda: Model(lambda m, words: m.head(m.table(words).mean(1)), {
            "table": nn.Embedding(5000, 64, sparse=True), "head": nn.Linear(64, 10).requires_grad_(False)}),
        lambda model: model(torch.arange(320).view(32, 10)).sum(), sparse_adam),
    "masked language model, AdamW": Case(masked, loss_of(WORDS), adamw),
    "sparse tables, SGD": Case(clicks, loss_of(torch.zeros(64, 13), torch.arange(50).repeat(3, 64, 1)), sgd),
    "graph, NAdam": Case(graph, loss_of(RANDOM), NAdam),
    "two of eight experts, AdamW": Case(top_two, loss_of(RANDOM), adamw),
    "detector with suppression, SGD": Case(
        detector, loss_of(RANDOM.view(2, 2, 64, 64).repeat(1, 2, 1, 1)[:, :3]), momentum),
}


def planned_gpt(batch: int) -> tuple[nn.Module, Tensor]:
    """A factory for plan.py --model."""
    return GPT(layers=4, width=256, words=5000, context=512), torch.zeros(batch, 512, dtype=torch.long)


# --- factories for the largest micro-batch, in which the batch is in other places than the first dimension

Made = tuple[nn.Module, Tensor | tuple[Tensor, ...] | dict[str, object]]


@model(lambda: {"into": nn.Linear(8, 32), "message": nn.Linear(32, 32)})
def graphs(m: Any, nodes: Tensor, edges: Tensor, graph: Tensor) -> Tensor:
    """Graphs of 20 nodes and 60 edges in one: the edge index is 2 x edges."""
    x = m.into(nodes)
    x = x + torch.zeros_like(x).index_add(0, edges[1], m.message(x[edges[0]]).relu())
    return x.new_zeros(len(nodes) // 20, x.shape[1]).index_add(0, graph, x)


@model(lambda: {"body": nn.Conv2d(3, 64, 3), "head": nn.Conv2d(64, 4, 3)})
def detection(m: Any, images: list[Tensor], boxes: list[Tensor]) -> Tensor:
    """A list of images of two sizes, with a list of boxes each."""
    found = [m.head(m.body(image[None]).relu()).mean((2, 3)) for image in images]
    return torch.stack([(one - box).square().mean() for one, box in zip(found, boxes, strict=True)])


def made(call: Callable[..., Tensor], *inputs: Tensor, **layers: nn.Module) -> Made:
    return Model(call, layers), inputs


LARGEST: dict[str, tuple[Callable[[int], Made], int, bool]] = {  # the least micro-batch; is the answer confirmed?
    "images": (lambda n: (cnn(), torch.zeros(n, 3, 32, 32)), 1, True),
    "sequence_first": (lambda n: (nn.TransformerEncoderLayer(64, 4, 128), torch.zeros(40, n, 64)), 1, True),
    "batch_last": (lambda n: made(lambda m, x: m.down(m.up(x.T).relu()), torch.zeros(32, n), up=nn.Linear(32, 200),
                                  down=nn.Linear(200, 1)), 4, True),
    "two_views": (lambda n: (contrast(), torch.zeros(n, 64)), 3, True),
    "all_pairs": (lambda n: made(  # their distances, each with 16 numbers before they are summed
        lambda m, x: (m.body(x)[:, None] - m.body(x)[None]).square().sum(-1).exp(), torch.zeros(n, 64),
        body=nn.Linear(64, 16)), 1, True),
    "bag_with_offsets": (lambda n: made(
        lambda m, words, offsets: m.down(gelu(m.up(m.bag(words, offsets)))), torch.zeros(n * 7, dtype=torch.long),
        torch.arange(0, n * 7, 7), bag=nn.EmbeddingBag(900, 64, mode="sum"), up=nn.Linear(64, 256),
        down=nn.Linear(256, 1)), 8, True),
    "edge_index": (lambda n: (graphs(), (torch.zeros(20 * n, 8), torch.arange(120 * n).view(2, -1) % (20 * n),
                                         torch.arange(20 * n) // 20)), 2, True),
    "lists": (lambda n: (detection(), {"images": [torch.zeros(3, 48, 48 + 32 * (i % 2)) for i in range(n)],
                                       "boxes": [torch.zeros(1 + i % 3, 4) for i in range(n)]}), 1, True),
    "masked_attention": (lambda n: made(
        lambda m, x, mask: (m.q(x) @ m.k(x).transpose(1, 2) + mask).softmax(-1) @ m.v(x), torch.zeros(n, 64, 32),
        torch.zeros(n, 64, 64), **{name: nn.Linear(32, 32) for name in "qkv"}), 2, True),
    "even_only": (lambda n: made(  # two views of each sample lie beside each other
        lambda m, x: m.body(x).view(-1, 2, 64).prod(1), torch.zeros(n, 64), body=mlp()), 2, True),
    "large_table": (lambda n: made(  # the optimizer's temporary tensors are the peak of small batches
        lambda m, words: m.up(m.table(words)).tanh(), torch.zeros(n, 10, dtype=torch.long),
        table=nn.Embedding(5000, 32), up=nn.Linear(32, 512)), 1, True),
    "more_if_even": (lambda n: made(
        lambda m, x: m.body(x) + (0 if len(x) % 2 else m.more(x.repeat(3, 1))[:len(x)]), torch.zeros(n, 64),
        body=mlp(), more=mlp()), 2, False),
    "batch_is_ignored": (lambda n: (mlp(), torch.zeros(8, 64)), 8, False)}
globals().update({name: make for name, (make, _, _) in LARGEST.items()})  # factories for plan.py --model
