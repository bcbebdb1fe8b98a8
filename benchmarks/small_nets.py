"""Networks whose update takes a few milliseconds or less."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from workloads import CLASSES, Workload, classification, labels


class Transformer(nn.Module):
    """Two layers of width 64 on vectors in place of tokens."""

    def __init__(self) -> None:
        super().__init__()
        kind = partial(nn.TransformerEncoderLayer, 64, 4, 256, dropout=0.0, batch_first=True, norm_first=True)
        self.layers, self.head = nn.ModuleList([kind(), kind()]), nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def mlp(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def cnn() -> nn.Module:
    body = [nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*body, nn.Linear(1568, 30), nn.ReLU(), nn.Linear(30, CLASSES))


# ---------------------------------------------------------------------------------- workloads


def small_mlp() -> Workload:
    inputs = torch.randn(64, 64)
    return Workload("small_mlp", mlp(64, 128, 128, CLASSES), inputs, labels(64), classification, clip=1.0)


def small_cnn() -> Workload:
    return Workload("small_cnn", cnn(), torch.randn(64, 1, 28, 28), labels(64), classification, clip=1.0)


def small_transformer() -> Workload:
    inputs = torch.randn(16, 32, 64)
    return Workload("small_transformer", Transformer(), inputs, labels(16), classification, clip=1.0)


SMALL_NETS: dict[str, Callable[[], Workload]] = {f.__name__: f for f in (small_mlp, small_cnn, small_transformer)}
