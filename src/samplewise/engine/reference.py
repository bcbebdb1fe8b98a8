"""Reference implementation: one backward pass per sample. Slow and simple; the tests compare everything with it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def jacobian_rows(losses: Tensor, parameters: Mapping[str, Tensor], create_graph: bool = False) -> dict[str, Tensor]:
    """Jacobian of the losses, name -> (b, *shape): row i is the gradient of losses[i]."""
    rows: dict[str, list[Tensor]] = {name: [] for name in parameters}
    for one in torch.eye(len(losses), dtype=losses.dtype, device=losses.device):
        gradients = torch.autograd.grad(
            losses, list(parameters.values()), one, retain_graph=True, create_graph=create_graph, allow_unused=True
        )
        for (name, p), g in zip(parameters.items(), gradients, strict=True):
            rows[name].append(torch.zeros_like(p) if g is None else _dense(g))
    return {name: torch.stack(stack) for name, stack in rows.items()}


def _dense(gradient: Tensor) -> Tensor:
    return gradient if gradient.layout is torch.strided else gradient.to_dense()
