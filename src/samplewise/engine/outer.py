"""Per-sample gradients kept as factors: that of sample b is the sum over tokens t of left[b, t] x right[b, t].

This is what y = x W^T leaves behind (left: the output's gradient, right: x), and an embedding too (left: unit vectors).

Legend: b sample, t and s token, o and i the parameter's two sides, k projected dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from samplewise.engine import rowwise
from samplewise.engine.forms import Dense, Form, Mixture
from samplewise.engine.rowwise import as_matrix

# A sum of products that is this small against its terms has lost its digits.
CANCELLED = 1e-3


class OneHot(NamedTuple):
    """A factor whose row (b, t) is the unit vector number index[b, t]."""

    index: Tensor
    size: int


Factor = Tensor | OneHot


class Term(NamedTuple):
    left: Factor  # (b, t, o)
    right: Factor  # (b, t, i)

    @property
    def tokens(self) -> int:
        return _table(self.left).shape[1]

    @property
    def numbers_per_token(self) -> int:
        return _stored(self.left) + _stored(self.right)

    @property
    def dtype(self) -> torch.dtype:
        return self.right.dtype if isinstance(self.right, Tensor) else self.left.dtype  # type: ignore[union-attr]


def _table(factor: Factor) -> Tensor:
    return factor.index if isinstance(factor, OneHot) else factor


def _size(factor: Factor) -> int:
    return factor.size if isinstance(factor, OneHot) else factor.shape[-1]


def _stored(factor: Factor) -> int:
    return 1 if isinstance(factor, OneHot) else factor.shape[-1]


def _some(factor: Factor, samples: slice | Tensor) -> Factor:
    return OneHot(factor.index[samples], factor.size) if isinstance(factor, OneHot) else factor[samples]


def _times(factor: Factor, matrix: Tensor) -> Tensor:
    """(b, t, o) x (o, k) -> (b, t, k)"""
    return matrix[factor.index] if isinstance(factor, OneHot) else factor @ matrix


def _inner(a: Factor, b: Factor, dtype: torch.dtype) -> Tensor:
    """(b, t, s): inner products of the tokens of the same sample."""
    if isinstance(a, OneHot) and isinstance(b, OneHot):
        return (a.index[:, :, None] == b.index[:, None, :]).to(dtype)
    if isinstance(a, OneHot):
        return _inner(b, a, dtype).transpose(1, 2)
    if isinstance(b, OneHot):
        return a.gather(2, b.index[:, None, :].expand(-1, a.shape[1], -1))
    return torch.bmm(a, b.transpose(1, 2))


def _weighted(factor: Tensor, weights: Tensor | None) -> Tensor:
    return factor if weights is None else factor * weights.to(factor.dtype)[:, None, None]


def _summed_term(term: Term, weights: Tensor | None) -> Tensor:
    """(o, i): sum over b and t of weights[b] left[b, t] right[b, t]"""
    left, right = term
    if isinstance(left, OneHot):
        return _scatter_sum(left, right, weights)
    if isinstance(right, OneHot):
        return _scatter_sum(right, left, weights).T
    if left.shape[-1] < right.shape[-1]:
        left = _weighted(left, weights)
    else:
        right = _weighted(right, weights)
    return left.flatten(0, 1).T @ right.flatten(0, 1)


def _scatter_sum(hot: OneHot, values: Factor, weights: Tensor | None) -> Tensor:
    assert isinstance(values, Tensor)
    flat = _weighted(values, weights).flatten(0, 1)
    return flat.new_zeros(hot.size, flat.shape[1]).index_add(0, hot.index.flatten(), flat)


def _term_rows(term: Term) -> Tensor:
    """(b, o, i)"""
    left, right = term
    if isinstance(left, OneHot):
        return _scatter_rows(left, right)
    if isinstance(right, OneHot):
        return _scatter_rows(right, left).transpose(1, 2)
    return torch.bmm(left.transpose(1, 2), right)


def _scatter_rows(hot: OneHot, values: Factor) -> Tensor:
    assert isinstance(values, Tensor)
    samples, tokens, width = values.shape
    place = hot.index + hot.size * torch.arange(samples, device=values.device)[:, None]
    flat = values.new_zeros(samples * hot.size, width).index_add(0, place.flatten(), values.flatten(0, 1))
    return flat.view(samples, hot.size, width)


def _one_token(term: Term) -> bool:
    return term.tokens == 1 and isinstance(term.left, Tensor) and isinstance(term.right, Tensor)


class Outer(Form):
    def __init__(self, terms: Sequence[Term], shape: tuple[int, ...]):
        self.terms = _joined(terms)
        self.shape = shape
        self.samples = _table(terms[0].left).shape[0]

    @property
    def tokens(self) -> int:
        return sum(term.tokens for term in self.terms)

    def transposed(self) -> Outer:
        assert len(self.shape) == 2
        return Outer([Term(t.right, t.left) for t in self.terms], (self.shape[1], self.shape[0]))

    def some(self, samples: slice | Tensor) -> Outer:
        return Outer([Term(_some(t.left, samples), _some(t.right, samples)) for t in self.terms], self.shape)

    def rows(self, start: int, stop: int) -> Tensor:
        first, *others = (_term_rows(t) for t in self.some(slice(start, stop)).terms)
        return sum(others, start=first).reshape(-1, *self.shape)

    def squared_norms(self) -> Tensor:
        if len(self.terms) == 1 and _one_token(self.terms[0]):
            left, right = self.terms[0]
            assert isinstance(left, Tensor) and isinstance(right, Tensor)
            return left.square().sum((1, 2)) * right.square().sum((1, 2))
        return self._squared_norms_by_pairs()

    def _squared_norms_by_pairs(self) -> Tensor:
        total, size = 0.0, 0.0
        for n, p in enumerate(self.terms):
            for q in self.terms[n:]:
                pairs = _inner(p.left, q.left, p.dtype) * _inner(p.right, q.right, p.dtype)
                share = 1 if p is q else 2
                total = total + share * pairs.sum((1, 2))
                size = size + share * pairs.detach().abs().sum((1, 2))
        assert isinstance(total, Tensor) and isinstance(size, Tensor)
        lost = (total.detach() < CANCELLED * size).nonzero().flatten()
        if len(lost):
            total = total.index_copy(0, lost, rowwise.squared_norms(self.some(lost)))
        return total

    def dot(self, direction: Tensor) -> Tensor:
        matrix = direction.reshape(as_matrix(self.shape))
        return sum((_dot_term(term, matrix) for term in self.terms[1:]), start=_dot_term(self.terms[0], matrix))

    def gram(self, other: Form) -> Tensor:
        if isinstance(other, Outer) and len(self.terms) == len(other.terms) == 1 and _one_token(self.terms[0]) and _one_token(other.terms[0]):
            (left, right), (left2, right2) = self.terms[0], other.terms[0]
            assert isinstance(left, Tensor) and isinstance(left2, Tensor) and isinstance(right, Tensor) and isinstance(right2, Tensor)
            return (left[:, 0] @ left2[:, 0].T) * (right[:, 0] @ right2[:, 0].T)
        return rowwise.gram(self, other)

    def sum(self, weights: Tensor | None) -> Tensor:
        first, *others = (_summed_term(term, weights) for term in self.terms)
        return sum(others, start=first).reshape(self.shape)

    def sum_of_squares(self, centre: Tensor | None) -> Tensor:
        if centre is None and len(self.terms) == 1 and _one_token(self.terms[0]):
            left, right = self.terms[0]
            assert isinstance(left, Tensor) and isinstance(right, Tensor)
            return (left[:, 0].square().T @ right[:, 0].square()).reshape(self.shape)
        return rowwise.sum_of_squares(self, centre)

    def project(self, left: Tensor, right: Tensor) -> Tensor:
        dtype = self.terms[0].dtype
        left, right = left.to(dtype), right.to(dtype)
        first, *others = ((_times(t.left, left) * _times(t.right, right)).sum(1) for t in self.terms)
        return sum(others, start=first)

    def describe(self) -> str:
        return f"factors, {self.tokens} token{'s' * (self.tokens != 1)}"


def _dot_term(term: Term, matrix: Tensor) -> Tensor:
    left, right = term
    if isinstance(right, OneHot):
        left, right, matrix = right, left, matrix.T
    assert isinstance(right, Tensor)
    return torch.einsum("bti,bti->b", _times(left, matrix.to(right.dtype)), right)


def _joined(terms: Sequence[Term]) -> list[Term]:
    """Terms with factors of the same kind become one, laid end to end: an RNN's many steps are one long sequence."""
    kinds: dict[tuple[bool, bool], list[Term]] = {}
    for term in terms:
        kinds.setdefault((isinstance(term.left, OneHot), isinstance(term.right, OneHot)), []).append(term)
    return [Term(_end_to_end([t.left for t in group]), _end_to_end([t.right for t in group])) for group in kinds.values()]


def _end_to_end(factors: Sequence[Factor]) -> Factor:
    if len(factors) == 1:
        return factors[0]
    tables = torch.cat([_table(f) for f in factors], dim=1)
    return OneHot(tables, factors[0].size) if isinstance(factors[0], OneHot) else tables


def combined(forms: Sequence[Form]) -> Form:
    """One form for all uses of a parameter, so that the cross terms between uses come out right."""
    if all(isinstance(form, Outer) for form in forms):
        return settled(Outer([term for form in forms for term in form.terms], forms[0].shape))  # type: ignore[attr-defined]
    if len(forms) == 1:
        return forms[0]
    if all(isinstance(form, Dense) for form in forms):
        return Dense(Mixture(forms).rows(0, forms[0].samples))
    return Mixture(forms)


def settled(outer: Outer) -> Form:
    """Rows where they take no more room than their factors: then they also cost less than the pairs of tokens would."""
    stored = sum(term.tokens * term.numbers_per_token for term in outer.terms)
    return Dense(outer.rows(0, outer.samples)) if outer.width <= stored else outer
