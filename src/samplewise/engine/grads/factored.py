"""Factored per-sample gradients: the gradient of sample b is the sum over tokens t of left[b, t] x right[b, t].

y = x W^T gives such gradients (left: gradient of the output, right: x), as does an embedding (left: unit vectors).

Legend: b sample, t and s token, o and i the two dimensions of the parameter; p and q rows and columns of a
tile of a projection, n number of the tile.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from samplewise.engine.grads.base import PerSampleGrad
from samplewise.engine.grads.dense import DenseGrad
from samplewise.engine.grads.kernels import (
    PairSums,
    as_matrix,
    bmm,
    flat_squared_norms,
    frobenius_norms,
    largest_magnitudes,
    mm,
    root,
    scale_to_one,
    total,
)

# Samples of weight zero are left out of a sum if at most this fraction of the samples remains.
ENOUGH_LEFT = 0.75
# Rows of up to this many times the size of the factors give norms and weighted sum faster than the factors do. They are
# kept only if they have few elements, to save memory.
ROWS_PAY = 1.75
FEW_ELEMENTS = 2**20
# Maximum number of elements of one tensor of kept rows: the allocator keeps the memory of smaller tensors when they are
# freed, see `core.memory`.
LARGEST_PART = 2**22
# Rows of at most this fraction of the size of the factors give norms faster than pairs of tokens do.
ROWS_PAY_FOR_NORMS = 0.75


class OneHot(NamedTuple):
    """Factor (b, t, size) whose row (b, t) is the unit vector with a one at positions[b, t]."""

    positions: Tensor
    size: int


Factor = Tensor | OneHot


class Term(NamedTuple):
    """One sum over tokens of outer products left[b, t] x right[b, t]."""

    left: Factor  # (b, t, o)
    right: Factor  # (b, t, i)

    @property
    def tokens(self) -> int:
        return _table(self.left).shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return next(factor.dtype for factor in (self.right, self.left) if isinstance(factor, Tensor))


class FactoredGrad(PerSampleGrad):
    """Per-sample gradients as a sum of terms, each a sum over tokens of outer products; rows are computed on demand."""

    is_bounded_by_norms = True  # the squares of all tokens are among the summed pairs

    def __init__(self, terms: Sequence[Term], shape: tuple[int, ...]):
        left = terms[0].left
        self.samples = (left.positions if isinstance(left, OneHot) else left).shape[0]
        self.shape = shape
        self.terms = list(terms) if len(terms) == 1 else _join_terms(terms)

    @property
    def tokens(self) -> int:
        return sum(term.tokens for term in self.terms)

    @property
    def matrix(self) -> tuple[int, int]:
        """Shape (o, i) of the parameter as a matrix."""
        return _size(self.terms[0].left), _size(self.terms[0].right)

    def transpose(self) -> FactoredGrad:
        shape = self.shape if len(self.shape) == 2 else self.matrix
        terms = []
        for left, right in self.terms:
            terms.append(Term(right, left))
        return FactoredGrad(terms, shape[::-1])

    def select(self, samples: slice | Tensor) -> FactoredGrad:
        """Gradients of these samples."""
        terms = [Term(_select(left, samples), _select(right, samples)) for left, right in self.terms]
        return FactoredGrad(terms, self.shape)

    def compact(self) -> PerSampleGrad:
        """Rows if they need no more memory than the factors, or little; then rows are faster than pairs of tokens."""
        width = prod(self.shape)
        if not self._has_small_rows(ROWS_PAY if self.samples * width <= FEW_ELEMENTS else 1):
            return self
        step = max(1, LARGEST_PART // max(width, 1))
        parts = [self.rows(at, min(at + step, self.samples)) for at in range(0, self.samples, step)]
        return DenseGrad(*parts, terms=self.term_norms)

    def _has_small_rows(self, ratio: float = 1) -> bool:
        """True if a row has at most `ratio` times as many elements as the factors of one sample."""
        stored = 0
        for left, right in self.terms:
            width = 1 if isinstance(left, OneHot) else left.shape[2]
            width += 1 if isinstance(right, OneHot) else right.shape[2]
            stored += width * (left.positions if isinstance(left, OneHot) else left).shape[1]
        return prod(self.shape) <= ratio * stored

    def rows(self, start: int, stop: int) -> Tensor:
        terms = self.terms if stop - start == self.samples else self.select(slice(start, stop)).terms
        first, *rest = _lookups_last(terms)
        rows = _term_rows(first)
        for term in rest:  # rows are large: those of an embedding tied to the head are added in place
            if isinstance(term.left, OneHot) and isinstance(term.right, Tensor) and rows.is_contiguous():
                rows = _scatter_rows(rows, term.left, term.right)
            else:
                rows = rows + _term_rows(term)
        return rows.reshape(stop - start, *self.shape)

    def squared_norms(self, exactly: bool = True) -> Tensor:
        """As `PerSampleGrad.squared_norms`. exactly: if False, NaN for samples whose sum of pairs cancels."""
        factors = self._single_factors()
        if factors is not None:
            return flat_squared_norms(factors[0]) * flat_squared_norms(factors[1])  # |l x r| = |l| |r|
        if self._has_small_rows(ROWS_PAY_FOR_NORMS):
            return super().squared_norms()
        return self._squared_norms_by_pairs(exactly)

    def norms(self) -> Tensor:
        left, right = self.terms[0]
        if len(self.terms) == 1 and isinstance(left, Tensor) and isinstance(right, Tensor) and left.shape[1] == 1:
            of_left = torch.linalg.vector_norm(left, dim=(1, 2))
            return of_left.mul_(torch.linalg.vector_norm(right, dim=(1, 2)))
        return super().norms()

    def _squared_norms_by_pairs(self, exactly: bool) -> Tensor:
        # |sum_t l_t x r_t|^2 = sum_ts <l_t, l_s> <r_t, r_s>: the "ghost norm", which needs no rows. Pairs of two
        # different terms count twice.
        pairs = PairSums()
        for n, p in enumerate(self.terms):
            if isinstance(p.left, Tensor) and isinstance(p.right, Tensor):
                pairs.add_within(p.left, p.right)
            else:
                pairs.add(_inner(p.left, p.left, p.dtype), _inner(p.right, p.right, p.dtype))
            for q in self.terms[n + 1 :]:
                pairs.add(_inner(p.left, q.left, p.dtype), _inner(p.right, q.right, p.dtype), 2)
        if not exactly:
            return pairs.settle(None)
        return pairs.settle(lambda samples: PerSampleGrad.squared_norms(self.select(samples)))

    @property
    def may_cancel(self) -> bool:
        return self.tokens > 1 and not self._looks_up and not self._has_small_rows()

    @property
    def _looks_up(self) -> bool:
        """True for the gradients of an embedding that is used once."""
        return len(self.terms) == 1 and any(isinstance(factor, OneHot) for factor in self.terms[0])

    def scaled_norms(self) -> Tensor:
        if self._has_small_rows():
            return super().scaled_norms()
        if self._looks_up:
            scale, divided = self._scale_terms()
            return scale * root(_squared_norms_of_lookup(divided.terms[0]))
        return self._norms_by_scaled_pairs(exactly=False)

    def _norms_by_scaled_pairs(self, exactly: bool) -> Tensor:
        scale, divided = self._scale_terms()
        return scale * root(divided.squared_norms(exactly))

    def _scale_terms(self) -> tuple[Tensor, FactoredGrad]:
        """Scale (b,) and gradients divided by it, such that the products of factors have magnitude 1."""
        scale = torch.stack([_largest(term.left) * _largest(term.right) for term in self.terms]).amax(0)
        # The product of two large values may be infinite: the norm would be infinity times zero.
        scale = torch.where(scale > 0, scale, 1).clamp(max=torch.finfo(scale.dtype).max)
        terms = []
        for left, right in self.terms:
            if isinstance(right, OneHot):
                assert isinstance(left, Tensor)
                terms.append(Term(left / scale[:, None, None], right))
            elif isinstance(left, OneHot):
                terms.append(Term(left, right / scale[:, None, None]))
            else:
                left, share = scale_to_one(left)
                terms.append(Term(left, right * (share / scale)[:, None, None]))
        return scale, FactoredGrad(terms, self.shape)

    def underflowed_norms(self, samples: Tensor) -> Tensor:
        """As `PerSampleGrad.underflowed_norms`, from factors that are scaled to magnitude 1 in float64 first."""
        terms = [Term(_as_double(left), _as_double(right)) for left, right in self.select(samples).terms]
        return FactoredGrad(terms, self.shape)._norms_by_scaled_pairs(exactly=True)

    def dot(self, direction: Tensor) -> Tensor:
        dots = []
        for left, right in self.terms:
            matrix = direction.reshape(self.matrix)
            if isinstance(right, OneHot):
                left, right, matrix = right, left, matrix.T
            assert isinstance(right, Tensor)
            dots.append((_times(left, matrix.to(right.dtype)) * right).sum((1, 2)))  # <l x r, M> = <M^T l, r>
        return total(dots)

    def paired_dot(self, other: PerSampleGrad) -> Tensor:
        dtype = self.terms[0].dtype
        if not isinstance(other, FactoredGrad) or self.matrix != other.matrix or other.terms[0].dtype != dtype:
            return super().paired_dot(other)
        pairs = PairSums()
        for p in self.terms:
            for q in other.terms:
                pairs.add(_inner(p.left, q.left, dtype), _inner(p.right, q.right, dtype))
        return pairs.settle(lambda samples: PerSampleGrad.paired_dot(self.select(samples), other.select(samples)))

    def gram(self, other: PerSampleGrad) -> Tensor:
        factors = self._single_factors()
        other_factors = other._single_factors() if isinstance(other, FactoredGrad) else None
        if factors is None or other_factors is None:
            return super().gram(other)
        (left, right), (left2, right2) = factors, other_factors
        return (left @ left2.T) * (right @ right2.T)  # <l x r, m x s> = <l, m> <r, s>

    def _single_factors(self) -> tuple[Tensor, Tensor] | None:
        """Factors (b, o) and (b, i) if each gradient is a single outer product; else None."""
        left, right = self.terms[0]
        if len(self.terms) == 1 and isinstance(left, Tensor) and isinstance(right, Tensor) and left.shape[1] == 1:
            return left[:, 0], right[:, 0]
        return None

    def sum(self, weights: Tensor | None) -> Tensor:
        samples = _samples_to_sum(weights)
        terms = self.terms
        if samples is not None and weights is not None:
            terms = self.select(samples).terms
            weights = weights[samples]
        first, *rest = _lookups_last(terms) if len(terms) > 1 else terms
        result = _sum_term(first, weights)
        for term in rest:  # tables of embeddings are large: their terms are added in place
            left, right = term
            if isinstance(left, OneHot) and isinstance(right, Tensor) and right.dtype == result.dtype:
                result = _scatter_sum(left, right, weights, result)
            else:
                result = result + _sum_term(term, weights)
        return result if result.shape == self.shape else result.reshape(self.shape)

    def term_norms(self) -> Tensor | None:
        if len(self.terms) == 1 and self.tokens == 1:
            return None
        return total(_norms_of(term.left) * _norms_of(term.right) for term in self.terms)

    def sum_of_squares(self, center: Tensor | None) -> Tensor:
        factors = self._single_factors()
        if center is not None or factors is None:
            return super().sum_of_squares(center)
        left, right = factors
        return (left.square().T @ right.square()).reshape(self.shape)

    def project(self, left: Tensor, right: Tensor) -> Tensor:
        if self.matrix != as_matrix(self.shape):
            return super().project(left, right)
        dtype = self.terms[0].dtype
        p, n = left.shape[1:]
        q = right.shape[1]
        left, right = left.flatten(1).to(dtype), right.flatten(1).to(dtype)
        projections = []
        for term in self.terms:  # u^T (l x r) v = <u, l> <r, v>
            of_left = _times(term.left, left).unflatten(2, (p, 1, n))
            of_right = _times(term.right, right).unflatten(2, (1, q, n))
            if term.tokens == 1:
                tiles = of_left[:, 0] * of_right[:, 0]
            elif p == q == 1:
                tiles = (of_left * of_right).sum(1)
            else:
                tiles = torch.einsum("btpn,btqn->bpqn", of_left.squeeze(3), of_right.squeeze(2))
            projections.append(tiles.flatten(1))
        return total(projections)

    def describe(self) -> str:
        return f"factors, {self.tokens} token{'s' * (self.tokens != 1)}"


# --- terms ------------------------------------------------------------------------------------------------------------


def _join_terms(terms: Sequence[Term]) -> list[Term]:
    """Concatenate terms with the same kinds of factors along the tokens: the steps of an RNN become one sequence."""
    kinds: dict[tuple[bool, bool], list[Term]] = {}
    for term in terms:
        kinds.setdefault((isinstance(term.left, OneHot), isinstance(term.right, OneHot)), []).append(term)
    return [
        Term(_join_tokens([t.left for t in group]), _join_tokens([t.right for t in group])) for group in kinds.values()
    ]


def _join_tokens(factors: Sequence[Factor]) -> Factor:
    if len(factors) == 1:
        return factors[0]
    tables = torch.cat([_table(f) for f in factors], dim=1)
    return OneHot(tables, factors[0].size) if isinstance(factors[0], OneHot) else tables


def _lookups_last(terms: Sequence[Term]) -> list[Term]:
    """Terms, those of embeddings after the others: they can be added in place."""
    return sorted(terms, key=lambda term: isinstance(term.left, OneHot))


def _term_rows(term: Term) -> Tensor:
    """Rows (b, o, i) of one term."""
    left, right = term
    if isinstance(left, OneHot):
        assert isinstance(right, Tensor)
        return _scatter_rows(right.new_zeros(len(right), left.size, right.shape[2]), left, right)
    if isinstance(right, OneHot):
        return _term_rows(Term(right, left)).transpose(1, 2)
    return bmm(left.transpose(1, 2), right)


def _scatter_rows(rows: Tensor, hot: OneHot, values: Tensor) -> Tensor:
    """Add values (b, t, i) in place to the rows (b, o, i) at the positions of `hot` in dimension o."""
    first = hot.size * torch.arange(len(rows), device=rows.device)[:, None]
    rows.view(-1, rows.shape[2]).index_add_(0, (hot.positions + first).flatten(), values.flatten(0, 1))
    return rows


def _squared_norms_of_lookup(term: Term) -> Tensor:
    """Squared norms (b,) from the sums of values (b, t, i) with the same position, without pairs that may cancel."""
    hot, values = term if isinstance(term.left, OneHot) else (term.right, term.left)
    assert isinstance(hot, OneHot) and isinstance(values, Tensor)
    coincide = hot.positions[:, :, None] == hot.positions[:, None, :]
    first = coincide.to(torch.uint8).argmax(2)  # first token with the same position
    result = torch.zeros_like(values).scatter_add(1, first[:, :, None].expand_as(values), values)
    return flat_squared_norms(result.flatten(1))


def _samples_to_sum(weights: Tensor | None) -> Tensor | None:
    """Samples with non-zero weight, if leaving out the others saves more than selecting them costs; else None."""
    global _last_selection
    last, selected = _last_selection
    if weights is None or last() is weights:
        return None if weights is None else selected
    if weights.requires_grad or not weights.is_cpu or type(weights) is not Tensor:
        return None  # on other devices, nonzero would be a host sync; traced weights, a subclass, have no values
    nonzero = weights.nonzero()
    selected = nonzero.flatten() if nonzero.shape[0] <= ENOUGH_LEFT * weights.shape[0] else None
    _last_selection = (weakref.ref(weights), selected)
    return selected


# Weights, and the samples selected for them: all parameters are summed with the same tensor of weights.
_last_selection: tuple[Callable[[], Tensor | None], Tensor | None] = (lambda: None, None)


def _sum_term(term: Term, weights: Tensor | None) -> Tensor:
    """Sum over b and t of weights[b] left[b, t] right[b, t], (o, i)."""
    left, right = term
    if isinstance(left, OneHot):
        return _scatter_sum(left, right, weights)
    if isinstance(right, OneHot):
        return _scatter_sum(right, left, weights).T
    if weights is not None:
        column = (weights if weights.dtype is left.dtype else weights.to(left.dtype)).view(-1, 1, 1)
        if left.shape[-1] < right.shape[-1]:  # the smaller factor is multiplied by the weights
            left = left * column
        else:
            right = right * column
    return mm(left.flatten(0, 1).t(), right.flatten(0, 1))


def _scatter_sum(hot: OneHot, values: Factor, weights: Tensor | None, into: Tensor | None = None) -> Tensor:
    assert isinstance(values, Tensor)
    if weights is not None:
        values = values * weights.to(values.dtype).view(-1, 1, 1)
    flat = values.flatten(0, 1)
    table = flat.new_zeros(hot.size, flat.shape[1]) if into is None else into
    return table.index_add_(0, hot.positions.flatten(), flat)


# --- factors ----------------------------------------------------------------------------------------------------------


def _table(factor: Factor) -> Tensor:
    return factor.positions if isinstance(factor, OneHot) else factor


def _size(factor: Factor) -> int:
    return factor.size if isinstance(factor, OneHot) else factor.shape[-1]


def _select(factor: Factor, samples: slice | Tensor) -> Factor:
    return OneHot(factor.positions[samples], factor.size) if isinstance(factor, OneHot) else factor[samples]


def _times(factor: Factor, matrix: Tensor) -> Tensor:
    """Product of a factor (b, t, o) with a matrix (o, k): (b, t, k)."""
    if isinstance(factor, OneHot):
        return matrix[factor.positions]
    return mm(factor.flatten(0, 1), matrix).unflatten(0, factor.shape[:2])


def _inner(a: Factor, b: Factor, dtype: torch.dtype) -> Tensor:
    """Inner products of all pairs of tokens of the same sample, (b, t, s)."""
    if isinstance(a, OneHot) and isinstance(b, OneHot):
        return (a.positions[:, :, None] == b.positions[:, None, :]).to(dtype)
    if isinstance(a, OneHot):
        return _inner(b, a, dtype).transpose(1, 2)
    if isinstance(b, OneHot):
        return a.gather(2, b.positions[:, None, :].expand(-1, a.shape[1], -1))
    return bmm(a, b.transpose(1, 2))


def _as_double(factor: Factor) -> Factor:
    if isinstance(factor, OneHot):
        return factor
    return factor.to(torch.complex128 if factor.is_complex() else torch.float64)


def _largest(factor: Factor) -> Tensor:
    """Largest absolute value of each sample, (b,), or a scalar."""
    return torch.ones(()) if isinstance(factor, OneHot) else largest_magnitudes(factor)


def _norms_of(factor: Factor) -> Tensor:
    if isinstance(factor, OneHot):
        return factor.positions.new_full((), factor.positions.shape[1]).sqrt()
    return frobenius_norms(factor)
