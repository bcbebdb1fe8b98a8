"""Oracle: per-sample gradients row by row with plain autograd, and every quantity computed from those rows.

`ExpectedRows` has the methods of `samplewise.Gradients`, so the same code computes a quantity from either.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def wanted(model: nn.Module) -> dict[str, Tensor]:
    """Parameters that require gradients, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def rows_of(losses: Tensor, parameters: dict[str, Tensor], create_graph: bool = False) -> ExpectedRows:
    """Per-sample gradients with one autograd.grad call per sample."""
    rows = [
        torch.autograd.grad(
            loss, list(parameters.values()), retain_graph=True, allow_unused=True, create_graph=create_graph
        )
        for loss in losses.unbind()
    ]
    return ExpectedRows(
        {name: torch.stack([dense(row[k], p) for row in rows]) for k, (name, p) in enumerate(parameters.items())}
    )


def dense(gradient: Tensor | None, like: Tensor) -> Tensor:
    if gradient is None:
        return torch.zeros_like(like)
    return gradient.to_dense() if gradient.is_sparse else gradient


class ExpectedRows:
    """Per-sample gradients, name -> (B, *shape), with the methods of `samplewise.Gradients`."""

    def __init__(self, full: dict[str, Tensor]):
        self._full = full
        self.names = list(full)

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self._full.values())).dtype.to_real()

    @property
    def device(self) -> torch.device:
        return next(iter(self._full.values())).device

    def __len__(self) -> int:
        return len(next(iter(self._full.values())))

    def __getitem__(self, key: str | int) -> Any:
        return self._full[key] if isinstance(key, str) else {name: rows[key] for name, rows in self._full.items()}

    def full(self) -> dict[str, Tensor]:
        return dict(self._full)

    def flat(self) -> Tensor:
        """All gradients as one matrix (B, number of real values in all parameters)."""
        return torch.cat([real(rows).reshape(len(rows), -1) for rows in self._full.values()], 1)

    def norms(self, by: str | None = None) -> Any:
        if by == "parameter":
            return {name: row_norms(real(rows).reshape(len(rows), -1)) for name, rows in self._full.items()}
        return row_norms(self.flat())

    def dot(self, direction: dict[str, Tensor]) -> Tensor:
        return self.flat() @ torch.cat([real(direction[name]).flatten() for name in self.names])

    def gram(self, other: ExpectedRows | None = None) -> Tensor:
        return self.flat() @ (other or self).flat().T

    def sum(self, weights: Tensor | dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        if weights is None:
            weights = torch.ones(len(self), dtype=self.dtype, device=self.device)
        by_name = weights if isinstance(weights, dict) else dict.fromkeys(self.names, weights)
        return {name: torch.tensordot(by_name[name].to(rows.dtype), rows, 1) for name, rows in self._full.items()}

    def mean(self) -> dict[str, Tensor]:
        return {name: rows.mean(0) for name, rows in self._full.items()}

    def sum_of_squares(self) -> dict[str, Tensor]:
        return {name: rows.square().sum(0) for name, rows in self._full.items()}

    def variance(self) -> dict[str, Tensor]:
        return {name: rows.var(0, unbiased=True) for name, rows in self._full.items()}

    def to(self, dtype: torch.dtype) -> ExpectedRows:
        return ExpectedRows(
            {name: rows.to(dtype.to_complex() if rows.is_complex() else dtype) for name, rows in self._full.items()}
        )


def row_norms(matrix: Tensor) -> Tensor:
    """L2 norm of each row; a row whose squares are too small for the dtype is scaled by its largest element first."""
    if not matrix.shape[1]:
        return matrix.norm(dim=1)
    largest = matrix.detach().abs().amax(1, keepdim=True)
    faint = (largest > 0) & (largest.square() < torch.finfo(matrix.dtype).tiny)
    scale = torch.where(faint, largest, torch.ones_like(largest))
    return (matrix / scale).norm(dim=1) * scale.squeeze(1)


def real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
