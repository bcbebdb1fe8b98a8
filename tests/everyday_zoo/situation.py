"""Situation: a small transformer with one ordinary line of user code, the data of each step and what surrounds it."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SITUATIONS: dict[str, type[Situation]] = {}


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model and of its data. The defaults are those of the benchmark."""

    samples: int = 16
    tokens: int = 32
    width: int = 64
    heads: int = 4
    hidden: int = 256
    vocabulary: int = 128
    classes: int = 10
    layers: int = 2


class Situation(nn.Module):
    """Model that maps a batch to one loss per sample: `losses = situation(*situation.prepare(step))`.

    Dim 0 of each tensor of a batch is the sample. Data depend on the number of the step only. A subclass replaces one
    method; the first line of its docstring describes the situation.
    """

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.sizes = sizes
        self.step = 0
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Embedding(sizes.tokens, sizes.width)
        self.blocks = nn.ModuleList(self.block() for _ in range(sizes.layers))
        self.head = nn.Linear(sizes.width, sizes.classes)

    # ------------------------------------------------------------------------------------------ one step

    def prepare(self, step: int) -> tuple[Tensor, ...]:
        """Batch of a step. Called once before each pass; hooks and numbers of the step are set here."""
        self.step = step
        return self.batch(torch.Generator().manual_seed(step))

    def around(self) -> AbstractContextManager[object]:
        """Context of forward and backward pass."""
        return contextlib.nullcontext()

    # -------------------------------------------------------------------------------------------- data

    def batch(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Tokens (B, T) and labels (B,)."""
        sizes = self.sizes
        tokens = torch.randint(sizes.vocabulary, (sizes.samples, sizes.tokens), generator=generator)
        return tokens, torch.randint(sizes.classes, (sizes.samples,), generator=generator)

    # -------------------------------------------------------------------------------------------- model

    def forward(self, tokens: Tensor, labels: Tensor, *data: Tensor) -> Tensor:
        h = self.pool(self.encode(self.embed(tokens)), *data)
        return F.cross_entropy(self.head(h), labels, reduction="none")

    def embed(self, tokens: Tensor) -> Tensor:
        # Positions of shape (B, T): Opacus has rules for modules on batches only.
        return self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]).expand_as(tokens))

    def encode(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = block(h)
        return h

    def pool(self, h: Tensor, *data: Tensor) -> Tensor:
        return h.mean(1)

    def block(self) -> nn.Module:
        return Block(self.sizes, self)

    # Lines of a block that situations replace.

    def mix(self, attention: Attention, h: Tensor) -> Tensor:
        return attention(h)

    def rotate(self, q: Tensor) -> Tensor:
        return q

    def activate(self, h: Tensor) -> Tensor:
        return F.gelu(h)


class Block(nn.Module):
    """Pre-norm transformer layer; its changeable lines are methods of the situation."""

    def __init__(self, sizes: Sizes, situation: Situation):
        super().__init__()
        self.lines = [situation]  # in a list: not a submodule
        self.norms = nn.ModuleList(nn.LayerNorm(sizes.width) for _ in range(2))
        self.attention = Attention(sizes, situation)
        self.up = nn.Linear(sizes.width, sizes.hidden)
        self.down = nn.Linear(sizes.hidden, sizes.width)

    def forward(self, h: Tensor) -> Tensor:
        (lines,) = self.lines
        h = h + lines.mix(self.attention, self.norms[0](h))
        return h + self.down(lines.activate(self.up(self.norms[1](h))))


class Attention(nn.Module):
    def __init__(self, sizes: Sizes, situation: Situation):
        super().__init__()
        self.lines = [situation]
        self.heads = sizes.heads
        self.enter = nn.Linear(sizes.width, 3 * sizes.width)
        self.leave = nn.Linear(sizes.width, sizes.width)

    def forward(self, h: Tensor) -> Tensor:
        return self.leave(F.scaled_dot_product_attention(*self.queries(h)).transpose(1, 2).flatten(2))

    def queries(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, (B, heads, T, width / heads)."""
        (lines,) = self.lines
        q, k, v = self.enter(h).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return lines.rotate(q), lines.rotate(k), v


def situation(kind: type[Situation]) -> type[Situation]:
    """Decorator that registers a situation under the name of its class, in lower case with underscores."""
    name = "".join(f"_{c.lower()}" if c.isupper() else c for c in kind.__name__).lstrip("_")
    assert name not in SITUATIONS, f"names of situations must be unique; found two named {name}"
    SITUATIONS[name] = kind
    return kind


def line(kind: type[Situation]) -> str:
    """One line that describes the situation."""
    return (kind.__doc__ or "").strip().splitlines()[0].rstrip(".")


def build(name: str, sizes: Sizes | None = None, seed: int = 0) -> Situation:
    """Model of a situation in torch's default dtype, with weights that depend on `seed` only."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return SITUATIONS[name](sizes or Sizes())
