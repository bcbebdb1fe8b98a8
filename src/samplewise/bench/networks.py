"""Networks of real size with random weights, made with torch alone: ResNet-18 with GroupNorm, ViT-S, GPT-2 small.

No dropout, so that all methods compute the same gradients. Each parameter belongs to one module and position ids have
shape (B, T), so that libraries with rules per module support the networks: benchmarks/ compares with them. The
exception is the tied head of the language model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Scale = Literal["quick", "cpu", "accelerator"]
Batch = tuple[Tensor, Tensor]

IMAGENET_CLASSES = 1000
GPT2_WORDS = 50257


@dataclass(frozen=True)
class Work:
    """A network, and a batch and a loss function for it."""

    model: nn.Module
    batch: Batch
    loss_fn: Callable[[nn.Module, Batch], Tensor]  # one loss per sample

    def losses(self) -> Tensor:
        return self.loss_fn(self.model, self.batch)

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> Work:
        """Work on the device, with floating point numbers of `dtype`; the module is moved in place."""
        inputs, targets = (t.to(device) for t in self.batch)
        inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
        return Work(self.model.to(device, dtype), (inputs, targets), self.loss_fn)


# --- works ------------------------------------------------------------------------------------------------------------


def resnet18(scale: Scale) -> Work:
    width, image, samples = {"quick": (32, 16, 4), "cpu": (64, 32, 16), "accelerator": (64, 64, 64)}[scale]
    model = resnet18_model(width)
    return Work(model, (torch.randn(samples, 3, image, image), labels(samples, IMAGENET_CLASSES)), classification)


def vit_s(scale: Scale) -> Work:
    if scale == "quick":
        return Work(VisionTransformer(32, 8, 48, 2, 2), (torch.randn(4, 3, 32, 32), labels(4)), classification)
    samples = 4 if scale == "cpu" else 32
    return Work(VisionTransformer(), (torch.randn(samples, 3, 224, 224), labels(samples)), classification)


def gpt2_small(scale: Scale) -> Work:
    words = 64 if scale == "quick" else GPT2_WORDS
    length, samples = {"quick": (16, 4), "cpu": (64, 2), "accelerator": (256, 8)}[scale]
    width, layers, heads = (32, 2, 2) if scale == "quick" else (768, 12, 12)
    model = LanguageModel(Transformer(words, length, True, width, layers, heads))
    tokens = torch.randint(words, (samples, length + 1))
    return Work(model, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), next_token)


def small_vit(scale: Scale) -> Work:
    """ViT of 4 layers on 65 tokens, for the comparison of transforms."""
    if scale == "quick":
        return vit_s(scale)
    samples = 16 if scale == "cpu" else 128
    model = VisionTransformer(image=64, patch=8, width=192, layers=4, heads=3)
    return Work(model, (torch.randn(samples, 3, 64, 64), labels(samples)), classification)


NETWORKS: dict[str, Callable[[Scale], Work]] = {
    "ResNet-18 (GroupNorm)": resnet18,
    "ViT-S": vit_s,
    "GPT-2 small": gpt2_small,
}


# --- losses -----------------------------------------------------------------------------------------------------------


def labels(samples: int, classes: int = IMAGENET_CLASSES) -> Tensor:
    return torch.randint(classes, (samples,))


def classification(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def next_token(model: nn.Module, batch: Batch) -> Tensor:
    logits, tokens = model(batch[0]), batch[1]
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none").view(tokens.shape).mean(1)


# --- ResNet-18 --------------------------------------------------------------------------------------------------------


def convolution(channels_in: int, channels_out: int, size: int, stride: int) -> nn.Sequential:
    """Convolution without bias, followed by a GroupNorm of 32 groups."""
    layer = nn.Conv2d(channels_in, channels_out, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(layer, nn.GroupNorm(32, channels_out))


class BasicBlock(nn.Module):
    def __init__(self, channels_in: int, channels_out: int, stride: int):
        super().__init__()
        first = convolution(channels_in, channels_out, 3, stride)
        self.branch = nn.Sequential(first, nn.ReLU(), convolution(channels_out, channels_out, 3, 1))
        same = stride == 1 and channels_in == channels_out
        self.shortcut = nn.Identity() if same else convolution(channels_in, channels_out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.branch(x) + self.shortcut(x))


def resnet18_model(width: int = 64) -> nn.Module:
    blocks: list[nn.Module] = []
    channels_in = width
    for factor in (1, 2, 4, 8):
        channels_out = factor * width
        blocks += [BasicBlock(channels_in, channels_out, 1 if factor == 1 else 2)]
        blocks += [BasicBlock(channels_out, channels_out, 1)]
        channels_in = channels_out
    stem = [convolution(3, width, 3, 1), nn.ReLU()]  # of small images, without pooling
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, IMAGENET_CLASSES)]
    return nn.Sequential(*stem, *blocks, *head)


# --- transformers -----------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool):
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Residual(nn.Module):
    def __init__(self, width: int, branch: nn.Module):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(self.norm(x))


def feed_forward(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def residual_blocks(width: int, layers: int, heads: int, causal: bool) -> nn.Sequential:
    blocks = [[Attention(width, heads, causal), feed_forward(width)] for _ in range(layers)]
    return nn.Sequential(*[Residual(width, branch) for block in blocks for branch in block])


class VisionTransformer(nn.Module):
    """ViT-S of patches of 16 × 16: the class token is a patch of zeros plus its position's vector."""

    def __init__(self, image: int = 224, patch: int = 16, width: int = 384, layers: int = 12, heads: int = 6):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Embedding(1 + (image // patch) ** 2, width)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.blocks = residual_blocks(width, layers, heads, causal=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, IMAGENET_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = F.pad(self.patches(images).flatten(2).transpose(1, 2), (0, 0, 1, 0))
        positions = torch.arange(x.shape[1], device=x.device).repeat(len(x), 1)
        return self.head(self.norm(self.blocks(x + self.positions(positions)))[:, 0])


class Transformer(nn.Module):
    """Embeddings and blocks of a transformer, with a LayerNorm at the end. Returns (B, T, width)."""

    def __init__(self, vocabulary: int, length: int, causal: bool, width: int = 256, layers: int = 4, heads: int = 4):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)  # the default of 1 makes a tied head's logits explode
        self.blocks = residual_blocks(width, layers, heads, causal)
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device).repeat(len(tokens), 1)
        return self.norm(self.blocks(self.tokens(tokens) + self.positions(positions)))


class LanguageModel(nn.Module):
    """Transformer with a head that has the weight of its token embedding."""

    def __init__(self, body: Transformer):
        super().__init__()
        words, width = body.tokens.weight.shape
        self.body = body
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = body.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(tokens))
