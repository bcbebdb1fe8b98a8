"""Blocks of an EK-FAC matrix: the curvature between parameters of different blocks is taken as zero.

    KroneckerBlock   weight of a layer, with its bias if it has one: eigenvectors are outer products of those of two
                     covariances, of the gradients of the layer's outputs and of its inputs
    DiagonalBlock    any other parameter: eigenvectors are the coordinates

Legend: n row, l and r the two dims of the weight as a matrix, with one more row or column for the bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from samplewise.attribution.curvature import Rows
from samplewise.engine.grads.base import CHUNK, PerSampleGrad
from samplewise.engine.grads.dense import DenseGrad
from samplewise.engine.grads.factored import Factor, FactoredGrad, OneHot, Term
from samplewise.engine.grads.kernels import mm

Forms = Mapping[str, PerSampleGrad]  # representations of per-sample gradients by parameter
SAME = 1e-3  # relative difference up to which gradients of a bias are the sums of output gradients
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
        rows, columns = self.matrix
        return {LEFT: rows + (self.bias_side == LEFT), RIGHT: columns + (self.bias_side == RIGHT)}

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

    def describes(self, forms: Forms, term: Term) -> bool:
        """True if these are gradients of this layer: factors of the same sizes, and gradients of the bias that are the
        sums over tokens of the factor on the other side.
        """
        form = forms[self.weight]
        if not isinstance(form, FactoredGrad) or form.matrix != self.matrix:
            return False
        if self.bias is None:
            return True
        bias = forms.get(self.bias)
        factor = term.left if self.bias_side == RIGHT else term.right
        if bias is None or not isinstance(factor, Tensor) or bias.shape != (factor.shape[2],):
            return False
        difference = (bias.rows(0, bias.samples) - factor.sum(1)).abs()
        return bool((difference <= SAME * factor.abs().sum(1).amax(1, keepdim=True)).all())

    def extend(self, left: Factor, right: Factor) -> tuple[Factor, Factor]:
        """Factors (b, t, l) and (b, t, r) of the weight and the bias, from those of the weight."""
        if self.bias is None:
            return left, right
        assert isinstance(left, Tensor) and isinstance(right, Tensor)
        # The input of a bias is 1 at every token.
        if self.bias_side == RIGHT:
            return left, F.pad(right, (0, 1), value=1.0)
        return F.pad(left, (0, 1), value=1.0), right


@dataclass(frozen=True, eq=False)
class KroneckerBlock:
    """Curvature of one layer. A basis is None if it is the identity: one-hot inputs, or too many dims."""

    layer: Layer
    left: Tensor | None  # (l, l), eigenvectors in columns
    right: Tensor | None  # (r, r)
    eigenvalues: Tensor  # (l, r)

    @property
    def names(self) -> tuple[str, ...]:
        return self.layer.names

    def coordinates(self, forms: Forms) -> PerSampleGrad:
        """Gradients in the eigenbasis, in factors if the weight has them."""
        form = forms[self.layer.weight]
        term = only_term(form)
        if term is None or not self.layer.describes(forms, term):
            rows = {name: forms[name].rows(0, form.samples) for name in self.names}
            return DenseGrad(self.rotate(self.layer.join(rows)))
        left, right = self.layer.extend(*term)
        term = Term(_rotate(left, self.left), _rotate(right, self.right))
        return FactoredGrad([term], tuple(self.eigenvalues.shape))

    def solve(self, rows: Rows, damping: Tensor | float) -> dict[str, Tensor]:
        matrices = self.layer.join(rows)
        solved = torch.empty_like(matrices)
        step = max(1, CHUNK // max(matrices[:1].numel(), 1))  # rotated rows are copies: some at a time
        for start in range(0, len(matrices), step):
            chunk = divided(self, self.rotate(matrices[start : start + step]), damping)
            if self.left is not None:
                chunk = self.left.to(chunk) @ chunk
            solved[start : start + step] = chunk if self.right is None else chunk @ self.right.T.to(chunk)
        return self.layer.split(solved, rows)

    def rotate(self, matrices: Tensor) -> Tensor:
        """Coordinates of matrices (n, l, r) in the eigenbasis."""
        if self.left is not None:
            matrices = self.left.T.to(matrices) @ matrices
        return matrices if self.right is None else matrices @ self.right.to(matrices)


@dataclass(frozen=True, eq=False)
class DiagonalBlock:
    """Curvature of one parameter by its diagonal."""

    name: str
    eigenvalues: Tensor  # shape of the parameter

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def solve(self, rows: Rows, damping: Tensor | float) -> dict[str, Tensor]:
        return {self.name: divided(self, rows[self.name], damping)}

    def coordinates(self, forms: Forms) -> PerSampleGrad:
        """Gradients in the eigenbasis: the coordinates of the parameter."""
        return forms[self.name]


Block = KroneckerBlock | DiagonalBlock


def divided(block: Block, rows: Tensor, damping: Tensor | float) -> Tensor:
    """Rows (n, ...) in the eigenbasis, divided by the eigenvalues plus `damping`; 0 where both are zero."""
    divisor = (block.eigenvalues + damping).to(rows)
    zero = divisor == 0
    if not zero.any():
        return rows / divisor
    if rows[:, zero].any():
        names = " and ".join(block.names)
        if zero.all():
            raise ValueError(
                f"the curvature of {names} must not be zero if gradients are not; found zero in all directions. "
                "Compute it from samples whose losses depend on these parameters, or freeze them with requires_grad."
            )
        raise ValueError(
            f"damping must be above 0 for {names}, whose curvature is zero in directions in which gradients are not; "
            f"found {float(damping):g}. Pass a multiple of the mean eigenvalue, such as 0.1."
        )
    return torch.where(zero, 0, rows / torch.where(zero, 1, divisor))


def with_zeros(forms: Forms, block: Block, shapes: Mapping[str, tuple[int, ...]], samples: int) -> Forms:
    """Forms of a block's parameters; zeros for those that the losses do not depend on."""
    missing = {name: block.eigenvalues.new_zeros(samples, *shapes[name]) for name in block.names if name not in forms}
    return {**forms, **{name: DenseGrad(zeros) for name, zeros in missing.items()}}


def only_term(form: PerSampleGrad) -> Term | None:
    """Factors of the gradients of a matrix; None if they have no factors, or several kinds of them."""
    if not isinstance(form, FactoredGrad) or len(form.terms) > 1:
        return None
    (term,) = form.terms
    return None if all(isinstance(factor, OneHot) for factor in term) else term


def _rotate(factor: Factor, basis: Tensor | None) -> Factor:
    if basis is None or isinstance(factor, OneHot):
        return factor
    return mm(factor.flatten(0, 1), basis.to(factor.dtype)).unflatten(0, factor.shape[:2])
