"""The six workloads of the benchmark.

They use plain nn modules, one module per parameter, and position ids of shape (B, T), so that libraries with per-module
rules support them. The exceptions are the tied head and nn.LSTM, which are the point of their workloads.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samplewise.bench.networks import LanguageModel, Transformer

VOCABULARY = 8000
CLASSES = 10


@dataclass(frozen=True)
class Workload:
    name: str
    model: nn.Module
    inputs: Tensor
    targets: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]  # (outputs, targets) -> one loss per sample
    clip: float  # near the median of the per-sample norms, so that about half the samples are clipped
    unused: frozenset[str] = frozenset()  # parameters that the losses do not reach

    def losses(self, model: nn.Module) -> Tensor:
        return self.loss(model(self.inputs), self.targets)


# ------------------------------------------------------------------------------------- losses


def classification(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none")


def next_token(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none").view(tokens.shape).mean(1)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean((1, 2))


# ------------------------------------------------------------------------------------- models


class Classifier(nn.Module):
    def __init__(self, body: Transformer, width: int = 256):
        super().__init__()
        self.body, self.head = body, nn.Linear(width, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(tokens).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 128)
        self.lstm = nn.LSTM(128, 256, batch_first=True)
        self.head = nn.Linear(256, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(self.tokens(tokens))
        return self.head(states[:, -1])


def convolutional() -> nn.Module:
    layers: list[nn.Module] = []
    for channels_in, channels_out, stride in [(3, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1)]:
        convolution = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1)
        layers += [convolution, nn.GroupNorm(8, channels_out), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, CLASSES))


# ---------------------------------------------------------------------------------- workloads


def labels(batch: int) -> Tensor:
    return torch.randint(CLASSES, (batch,))


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length))


def mlp() -> Workload:
    model = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, CLASSES))
    return Workload("mlp", model, torch.randn(256, 784), labels(256), classification, clip=8.4)


def cnn() -> Workload:
    images = torch.randn(64, 3, 32, 32)
    return Workload("cnn", convolutional(), images, labels(64), classification, clip=16.7)


def encoder() -> Workload:
    model = Classifier(Transformer(VOCABULARY, length=64, causal=False))
    return Workload("encoder", model, tokens(32, 64), labels(32), classification, clip=55.0)


def lm() -> Workload:
    model = LanguageModel(Transformer(VOCABULARY, length=128, causal=True))
    return Workload("lm", model, tokens(8, 128), tokens(8, 128), next_token, clip=3.0)


def lstm() -> Workload:
    return Workload("lstm", Recurrent(), tokens(32, 64), labels(32), classification, clip=2.58)


def long() -> Workload:
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))
    return Workload("long", model, torch.randn(8, 512, 512), torch.randn(8, 512, 512), squared_error, clip=0.0785)


MEDIUM_NETS: dict[str, Callable[[], Workload]] = {f.__name__: f for f in (mlp, cnn, encoder, lm, lstm, long)}
