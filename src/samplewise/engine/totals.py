"""Sums of per-sample values over the parameters."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from samplewise.engine.arguments import wide_dtype
from samplewise.engine.graph.graph import Graph


def zeros(graph: Graph, *more: int) -> Tensor:
    """Zeros (B, *more) for sums of values like the losses."""
    losses = graph.losses
    return torch.zeros(graph.samples, *more, dtype=wide_dtype(losses.dtype), device=losses.device)


def total_of(graph: Graph, parts: Mapping[str, Tensor], *more: int) -> Tensor:
    """Sum (B, *more) of the parts, in the order of the parameters, not of the backward pass, to be bit-reproducible."""
    result = zeros(graph, *more)
    for name in graph.wanted:
        if name in parts:
            result = result + parts[name]
    return result
