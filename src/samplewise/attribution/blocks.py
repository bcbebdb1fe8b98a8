"""Blocks of an EK-FAC matrix: the curvature between parameters of different blocks is taken as zero.

    KroneckerBlock   weight of a layer, with its bias if it has one: eigenvectors are outer products of those of two
                     covariances, of the gradients of the layer's outputs and of its inputs
    DiagonalBlock    any other parameter: eigenvectors are the coordinates

Legend: n row, l and r the two dims of the weight as a matrix, with one more row or column for the bias.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from samplewise.attribution.curvature import RELATIVE_DAMPING, Rows
from samplewise.engine.grads.by_rows import CHUNK
from samplewise.engine.grads.factored import Factor

LEFT = "left"
RIGHT = "right"


@dataclass(frozen=True)
class Layer:
    """Parameters of a Kronecker block."""

    weight: str
    matrix: tuple[int, int]  # shape of the weight as a matrix
    bases: tuple[str, ...]  # sides that have an eigenbasis; that of the others is the identity
    bias: str | None = None
    bias_side: str = ""  # the bias is one more column (RIGHT), or row (LEFT), of the matrix

    @property
    def sides(self) -> dict[str, int]:
        """Number of dims l and r."""
        left, right = self.matrix
        return {LEFT: left + (self.bias_side == LEFT), RIGHT: right + (self.bias_side == RIGHT)}

    @property
    def names(self) -> tuple[str, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def join(self, rows: Rows) -> Tensor:
        """Matrices (n, l, r) of rows of the weight and the bias."""
        weight = rows[self.weight].reshape(-1, *self.matrix)
        if self.bias is None:
            return weight
        bias = rows[self.bias]
        if self.bias_side == RIGHT:
            return torch.cat([weight, bias[:, :, None]], 2)
        return torch.cat([weight, bias[:, None, :]], 1)

    def split(self, matrices: Tensor, like: Rows) -> dict[str, Tensor]:
        """Rows of the weight and the bias from matrices (n, l, r); inverse of `join`."""
        rows, columns = self.matrix
        parts = {self.weight: matrices[:, :rows, :columns].reshape(like[self.weight].shape)}
        if self.bias is not None:
            parts[self.bias] = matrices[:, :, -1] if self.bias_side == RIGHT else matrices[:, -1, :]
        return parts

    def extended(self, left: Factor, right: Factor) -> tuple[Factor, Factor]:
        """Factors (b, t, l) and (b, t, r) of the weight and the bias, from those of the weight."""
        if self.bias is None:
            return left, right
        assert isinstance(left, Tensor) and isinstance(right, Tensor)
        return (left, _with_one(right)) if self.bias_side == RIGHT else (_with_one(left), right)


def _with_one(factor: Tensor) -> Tensor:
    return F.pad(factor, (0, 1), value=1.0)


@dataclass(frozen=True)
class KroneckerBlock:
    """Curvature of one layer. A basis is None if it is the identity: one-hot inputs, or too many dims."""

    layer: Layer
    left: Tensor | None  # (l, l), eigenvectors in columns
    right: Tensor | None  # (r, r)
    eigenvalues: Tensor  # (l, r)

    @property
    def names(self) -> tuple[str, ...]:
        return self.layer.names

    def solve(self, rows: Rows, damping: float | None) -> dict[str, Tensor]:
        divisor = _damped(self.eigenvalues, damping)
        matrices = self.layer.join(rows)
        solved = torch.empty_like(matrices)
        step = max(1, CHUNK // max(matrices[:1].numel(), 1))
        for start in range(0, len(matrices), step):
            chunk = self.rotate(matrices[start : start + step])
            chunk = _divided(chunk, divisor, self.names)
            solved[start : start + step] = self._rotate_back(chunk)
        return self.layer.split(solved, rows)

    def rotate(self, matrices: Tensor) -> Tensor:
        """Coordinates of matrices (n, l, r) in the eigenbasis."""
        if self.left is not None:
            matrices = self.left.T.to(matrices) @ matrices
        return matrices if self.right is None else matrices @ self.right.to(matrices)

    def _rotate_back(self, matrices: Tensor) -> Tensor:
        if self.left is not None:
            matrices = self.left.to(matrices) @ matrices
        return matrices if self.right is None else matrices @ self.right.T.to(matrices)


@dataclass(frozen=True)
class DiagonalBlock:
    """Curvature of one parameter by its diagonal."""

    name: str
    eigenvalues: Tensor  # shape of the parameter

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def solve(self, rows: Rows, damping: float | None) -> dict[str, Tensor]:
        return {self.name: _divided(rows[self.name], _damped(self.eigenvalues, damping), self.names)}


Block = KroneckerBlock | DiagonalBlock


def _damped(eigenvalues: Tensor, damping: float | None) -> Tensor:
    return eigenvalues + (RELATIVE_DAMPING * eigenvalues.mean() if damping is None else damping)


def _divided(rows: Tensor, divisor: Tensor, names: tuple[str, ...]) -> Tensor:
    """Rows (n, ...) divided by (...); 0 where both are zero."""
    divisor = divisor.to(rows)
    flat = divisor == 0
    if not flat.any():
        return rows / divisor
    if rows[:, flat].any():
        raise ValueError(
            f"damping must be above 0 for {' and '.join(names)}, whose curvature is zero in directions in which "
            "gradients are not; found none. Pass damping=, for example 1e-4."
        )
    return torch.where(flat, 0, rows / torch.where(flat, 1, divisor))
