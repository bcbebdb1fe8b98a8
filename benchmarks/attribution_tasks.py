"""Tasks of the attribution benchmark: model, training data, queries and settings of the training.

lr            logistic regression on Fashion-MNIST, 5,000 training samples and 500 queries
mlp           MLP 784-128-64-10 on the same data
cnn           CNN with two convolutions and 7,018 parameters on 2,000 of these training samples and 200 queries
transformer   language model with two layers on sequences of synthetic text by six authors
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import samplewise as sw
from samplewise.attribution import margin

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import fashion_mnist

LETTERS = 16
LENGTH = 16
AUTHORS = 6


@dataclass(frozen=True)
class Task:
    """A training that is repeated on subsets."""

    name: str
    make_model: Callable[[], nn.Module]
    make_data: Callable[[int, int], tuple[TensorDataset, TensorDataset]]  # (samples, queries)
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    loss_fn: object
    output_fn: Callable
    lr: float
    epochs: int = 50
    batch_size: int = 64
    samples: int = 5000
    queries: int = 500
    subsets: int = 50
    models: int = 50  # of TRAK
    runs: int = 5  # on all samples with different seeds
    refined_queries: int = 100  # of conjugate gradients, the first ones
    metagradient_queries: int = 20
    removals: int = 24  # subsets without 5 % of the samples, in the same order as the run; 0: none
    # Words (n, length) of sequences, by name: those of BM25.
    words: dict[str, Callable[[TensorDataset], Tensor]] = field(default_factory=dict)

    def make_step(self, *transforms: object) -> sw.Step:
        model = self.make_model()
        return sw.Step(model, self.optimizer(model), self.loss_fn, transforms=transforms)

    def data(self) -> tuple[TensorDataset, TensorDataset]:
        return self.make_data(self.samples, self.queries)

    def small(self) -> "Task":
        """The same task in seconds, to test the benchmark."""
        queries = {"queries": 24, "refined_queries": 12, "metagradient_queries": 4}
        repeats = {"runs": min(2, self.runs), "removals": min(4, self.removals)}
        return replace(self, epochs=3, samples=240, subsets=8, models=3, **repeats, **queries)


def pictures(samples: int, queries: int) -> tuple[TensorDataset, TensorDataset]:
    """The first images of Fashion-MNIST, as vectors of 784 pixels."""

    def first(part: str, count: int) -> TensorDataset:
        x, y = fashion_mnist.load(part)
        return TensorDataset(x[:count].flatten(1), y[:count])

    return first("train", samples), first("t10k", queries)


def text(samples: int, queries: int) -> tuple[TensorDataset, TensorDataset]:
    """Sequences of letters, and the letter that follows each. A sequence is by one author, whose pairs of letters have
    frequencies of their own.
    """
    generator = torch.Generator().manual_seed(0)
    habits = (2 * torch.randn(AUTHORS, LETTERS, LETTERS, generator=generator)).softmax(2)

    def write(count: int) -> TensorDataset:
        author = torch.randint(AUTHORS, (count,), generator=generator)
        letters = [torch.randint(LETTERS, (count,), generator=generator)]
        for _ in range(LENGTH):
            letters.append(torch.multinomial(habits[author, letters[-1]], 1, generator=generator)[:, 0])
        return TensorDataset(torch.stack(letters[:-1], 1), torch.stack(letters[1:], 1))

    return write(samples), write(queries)


def letters(sequences: TensorDataset) -> Tensor:
    """Letters (n, LENGTH + 1) of each sequence."""
    first, following = sequences.tensors
    return torch.cat([first, following[:, -1:]], 1)


def pairs(sequences: TensorDataset) -> Tensor:
    """Numbers (n, LENGTH) of the pairs of neighboring letters, which are what the authors differ in."""
    first, following = sequences.tensors
    return LETTERS * first + following


class Block(nn.Module):
    """Causal attention and a feed-forward layer, with residual connections."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(b, t, d))
        return x + self.feed(self.norms[1](x))


class LanguageModel(nn.Module):
    """Logits (b, t, letters) of the next letter."""

    def __init__(self, width: int = 32, layers: int = 2, heads: int = 2):
        super().__init__()
        self.letters = nn.Embedding(LETTERS, width)
        self.positions = nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, LETTERS)

    def forward(self, letters: Tensor) -> Tensor:
        x = self.letters(letters) + self.positions.weight[: letters.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def sequence_losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean loss (b,) over the letters of each sequence."""
    letters, following = batch[:2]  # without the id
    return F.cross_entropy(model(letters).transpose(1, 2), following, reduction="none").mean(1)


def log_likelihoods(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Mean log-likelihood (b,) of each sequence. The loss is its negative: the weight is 1."""
    outputs = -sequence_losses(model, batch)
    return outputs, torch.ones_like(outputs)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


def cnn() -> nn.Module:
    convolutions = nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU()
    return nn.Sequential(nn.Unflatten(1, (1, 28, 28)), *convolutions, nn.Flatten(), nn.Linear(576, 10))


def logistic_regression() -> nn.Module:
    return nn.Linear(784, 10)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3)


TASKS = {
    task.name: task
    for task in (
        Task("lr", logistic_regression, pictures, sgd, nn.CrossEntropyLoss(), margin, lr=0.01, runs=1, removals=0),
        Task("mlp", mlp, pictures, sgd, nn.CrossEntropyLoss(), margin, lr=0.01),
        Task(
            "cnn",
            cnn,
            pictures,
            sgd,
            nn.CrossEntropyLoss(),
            margin,
            lr=0.01,
            epochs=30,
            samples=2000,
            queries=200,
            models=10,
            runs=3,
            refined_queries=20,
            removals=16,
        ),
        Task(
            "transformer",
            LanguageModel,
            text,
            adam,
            sequence_losses,
            log_likelihoods,
            lr=1e-3,
            epochs=20,
            samples=2000,
            queries=200,
            models=10,
            refined_queries=20,
            subsets=32,
            runs=1,
            removals=16,
            words={"letters": letters, "pairs of letters": pairs},
        ),
    )
}
