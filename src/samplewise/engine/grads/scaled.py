"""Per-sample gradients multiplied by constants, one for each element of the parameter or one for all."""

from __future__ import annotations

from torch import Tensor

from samplewise.engine.grads.base import PerSampleGrad, RowwiseGrad, term_norms
from samplewise.engine.grads.dense import DenseGrad
from samplewise.engine.grads.factored import FactoredGrad, Term


def scale_grad(grad: PerSampleGrad, factor: Tensor | float) -> PerSampleGrad:
    """The gradients of `grad`, in its shape, times a factor that is a number or has this shape."""
    if isinstance(grad, FactoredGrad):
        is_number = not isinstance(factor, Tensor) or factor.dim() == 0
        terms = [Term(left * factor, right) for left, right in grad.terms if isinstance(left, Tensor) and is_number]
        if len(terms) == len(grad.terms):
            return FactoredGrad(terms, grad.shape)
        grad = grad.compact()
    return _scaled_rows(grad, factor) if isinstance(grad, DenseGrad) else ScaledGrad(grad, factor)


def _scaled_rows(grad: DenseGrad, factor: Tensor | float) -> DenseGrad:
    def terms() -> Tensor:
        return term_norms(grad) * (abs(factor) if isinstance(factor, float) else factor.detach().abs().amax())

    return DenseGrad(*(part * factor for part in grad.parts), terms=terms)


class ScaledGrad(RowwiseGrad):
    """Gradients times a factor; rows are computed on demand."""

    def __init__(self, source: PerSampleGrad, factor: Tensor | float):
        self.samples = source.samples
        self.shape = source.shape
        self.row_size = source.row_size
        self.source = source
        self.factor = factor

    def rows(self, start: int, stop: int) -> Tensor:
        return self.source.rows(start, stop) * self.factor

    def sum(self, weights: Tensor | None) -> Tensor:
        return self.source.sum(weights) * self.factor

    def summed_apart(self, weights: Tensor | None) -> Tensor:
        return self.source.summed_apart(weights) * self.factor

    def term_norms(self) -> Tensor:
        return term_norms(self.source) * (
            abs(self.factor) if isinstance(self.factor, float) else self.factor.abs().amax()
        )

    def describe(self) -> str:
        return f"{self.source.describe()}, scaled"
