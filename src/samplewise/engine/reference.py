"""Reference implementation: one backward pass per sample. Slow and simple; the tests compare everything with it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def jacobian_rows(losses: Tensor, parameters: Mapping[str, Tensor], create_graph: bool = False) -> dict[str, Tensor]:
    """Jacobian of the losses, name -> (b, *shape): row i is the gradient of losses[i]."""
    unit = torch.eye(len(losses), dtype=losses.dtype, device=losses.device)
    rows = [gradient_of(losses, parameters, weights, create_graph) for weights in unit]
    return {name: torch.stack([row[name] for row in rows]) for name in parameters}


def gradient_of(
    losses: Tensor, parameters: Mapping[str, Tensor], weights: Tensor, create_graph: bool = False
) -> dict[str, Tensor]:
    """Dense gradient of the weighted sum of the losses (b,), name -> shape; zeros for parameters without gradient."""
    gradients = torch.autograd.grad(
        losses, list(parameters.values()), weights, retain_graph=True, create_graph=create_graph, allow_unused=True
    )
    of_all = {}
    for (name, p), g in zip(parameters.items(), gradients, strict=True):
        dense = torch.zeros_like(p) if g is None else g
        of_all[name] = dense if dense.layout is torch.strided else dense.to_dense()
    return of_all
