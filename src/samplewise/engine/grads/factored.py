"""Factored per-sample gradients: the gradient of sample b is the sum over tokens t of left[b, t] x right[b, t].

y = x W^T gives such gradients (left: gradient of the output, right: x), as does an embedding (left: unit vectors).

Legend: b sample, t and s token, o and i the two dimensions of the parameter, k projected dimension.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from samplewise.engine.deferred_checks import is_traced
from samplewise.engine.grads import by_rows
from samplewise.engine.grads.base import PerSampleGrad, total
from samplewise.engine.grads.by_rows import as_matrix, flat_squared_norms, frobenius_norms, root
from samplewise.engine.grads.dense import DenseGrad
from samplewise.engine.grads.matrix_kernels import bmm, mm, prefers_onednn

# A sum below this fraction of the sum of absolute values of its terms has lost too many digits to cancellation.
CANCELLED = 1e-3
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
# Gram matrices of tokens are symmetric. From this many tokens on, they are computed in four blocks of columns, each
# from the diagonal on: products of many rows with few columns are efficient, those of few rows are not. Matrix kernels
# are fastest for multiples of 16 columns.
MANY_TOKENS = 48


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


def _table(factor: Factor) -> Tensor:
    return factor.positions if isinstance(factor, OneHot) else factor


def _size(factor: Factor) -> int:
    return factor.size if isinstance(factor, OneHot) else factor.shape[-1]


def _some(factor: Factor, samples: slice | Tensor) -> Factor:
    return OneHot(factor.positions[samples], factor.size) if isinstance(factor, OneHot) else factor[samples]


def _times(factor: Factor, matrix: Tensor) -> Tensor:
    """Product of a factor (b, t, o) with a matrix (o, k): (b, t, k)."""
    return matrix[factor.positions] if isinstance(factor, OneHot) else factor @ matrix


def _inner(a: Factor, b: Factor, dtype: torch.dtype) -> Tensor:
    """Inner products of all pairs of tokens of the same sample, (b, t, s)."""
    if isinstance(a, OneHot) and isinstance(b, OneHot):
        return (a.positions[:, :, None] == b.positions[:, None, :]).to(dtype)
    if isinstance(a, OneHot):
        return _inner(b, a, dtype).transpose(1, 2)
    if isinstance(b, OneHot):
        return a.gather(2, b.positions[:, None, :].expand(-1, a.shape[1], -1))
    return bmm(a, b.transpose(1, 2))


def _apply_weights(factor: Tensor, weights: Tensor | None) -> Tensor:
    if weights is None:
        return factor
    column = weights if weights.dtype is factor.dtype else weights.to(factor.dtype)
    return factor * column.view(-1, 1, 1)


def _sum_term(term: Term, weights: Tensor | None) -> Tensor:
    """Sum over b and t of weights[b] left[b, t] right[b, t], (o, i)."""
    left, right = term
    if isinstance(left, OneHot):
        return _scatter_sum(left, right, weights)
    if isinstance(right, OneHot):
        return _scatter_sum(right, left, weights).T
    if left.shape[-1] < right.shape[-1]:  # the smaller factor is multiplied by the weights
        left = _apply_weights(left, weights)
    else:
        right = _apply_weights(right, weights)
    return mm(left.flatten(0, 1).t(), right.flatten(0, 1))


def _add_term(result: Tensor, term: Term, weights: Tensor | None) -> Tensor:
    """Sum (o, i) of other terms plus that of one more, which is added in place if it is that of an embedding: such
    tables are large.
    """
    left, right = term
    if isinstance(left, OneHot) and isinstance(right, Tensor) and right.dtype == result.dtype:
        return _scatter_sum(left, right, weights, result)
    return result + _sum_term(term, weights)


def _scatter_sum(hot: OneHot, values: Factor, weights: Tensor | None, into: Tensor | None = None) -> Tensor:
    assert isinstance(values, Tensor)
    flat = _apply_weights(values, weights).flatten(0, 1)
    table = flat.new_zeros(hot.size, flat.shape[1]) if into is None else into
    return table.index_add_(0, hot.positions.flatten(), flat)


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


def _one_token(term: Term) -> bool:
    return term.tokens == 1 and isinstance(term.left, Tensor) and isinstance(term.right, Tensor)


def _is_lookup(term: Term) -> bool:
    return isinstance(term.left, OneHot)


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
        return FactoredGrad([Term(t.right, t.left) for t in self.terms], shape[::-1])

    def some(self, samples: slice | Tensor) -> FactoredGrad:
        return FactoredGrad([Term(_some(t.left, samples), _some(t.right, samples)) for t in self.terms], self.shape)

    def compact(self) -> PerSampleGrad:
        """Rows if they need no more memory than the factors, or little; then rows are faster than pairs of tokens."""
        width = prod(self.shape)
        few = self.samples * width <= FEW_ELEMENTS
        if width > (ROWS_PAY if few else 1) * self._stored_elements():
            return self
        step = max(1, LARGEST_PART // max(width, 1))
        parts = [self.rows(at, min(at + step, self.samples)) for at in range(0, self.samples, step)]
        return DenseGrad(*parts, terms=self.term_norms)

    def _has_small_rows(self) -> bool:
        return prod(self.shape) <= self._stored_elements()

    def _stored_elements(self) -> int:
        """Number of elements of the factors of one sample."""
        stored = 0
        for left, right in self.terms:
            width = 1 if isinstance(left, OneHot) else left.shape[2]
            width += 1 if isinstance(right, OneHot) else right.shape[2]
            stored += width * (left.positions if isinstance(left, OneHot) else left).shape[1]
        return stored

    def rows(self, start: int, stop: int) -> Tensor:
        whole = self if stop - start == self.samples else self.some(slice(start, stop))
        first, *others = sorted(whole.terms, key=_is_lookup)
        rows = _term_rows(first)
        for term in others:  # rows are large: those of an embedding tied to the head are added in place
            if isinstance(term.left, OneHot) and isinstance(term.right, Tensor) and rows.is_contiguous():
                rows = _scatter_rows(rows, term.left, term.right)
            else:
                rows = rows + _term_rows(term)
        return rows.reshape(stop - start, *self.shape)

    def squared_norms(self, exactly: bool = True) -> Tensor:
        """As `PerSampleGrad.squared_norms`. exactly: if False, NaN for samples whose sum of pairs cancels."""
        left, right = self.terms[0]
        if len(self.terms) == 1 and isinstance(left, Tensor) and isinstance(right, Tensor) and left.shape[1] == 1:
            return flat_squared_norms(left.flatten(1)) * flat_squared_norms(right.flatten(1))  # |l x r| = |l| |r|
        if prod(self.shape) <= ROWS_PAY_FOR_NORMS * self._stored_elements():
            return by_rows.squared_norms(self)
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
            _add_pairs_within(pairs, p)
            for q in self.terms[n + 1 :]:
                pairs.add(_inner(p.left, q.left, p.dtype), _inner(p.right, q.right, p.dtype), 2)
        return pairs.settle((lambda samples: by_rows.squared_norms(self.some(samples))) if exactly else None)

    @property
    def may_cancel(self) -> bool:
        return self.tokens > 1 and not self._looks_up and not self._has_small_rows()

    @property
    def _looks_up(self) -> bool:
        """True for the gradients of an embedding that is used once."""
        return len(self.terms) == 1 and any(isinstance(factor, OneHot) for factor in self.terms[0])

    def scaled_norms(self) -> Tensor:
        if self._has_small_rows():
            return by_rows.all_scaled_norms(self)
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
        return scale, FactoredGrad([_divide_term(term, scale) for term in self.terms], self.shape)

    def underflowed_norms(self, samples: Tensor) -> Tensor:
        """As `PerSampleGrad.underflowed_norms`, from factors that are scaled to magnitude 1 in float64 first."""
        terms = [Term(_as_double(left), _as_double(right)) for left, right in self.some(samples).terms]
        return FactoredGrad(terms, self.shape)._norms_by_scaled_pairs(exactly=True)

    def dot(self, direction: Tensor) -> Tensor:
        return total(_dot_term(term, direction.reshape(self.matrix)) for term in self.terms)

    def paired_dot(self, other: PerSampleGrad) -> Tensor:
        dtype = self.terms[0].dtype
        if not isinstance(other, FactoredGrad) or self.matrix != other.matrix or other.terms[0].dtype != dtype:
            return by_rows.paired_dot(self, other)
        pairs = PairSums()
        for p in self.terms:
            for q in other.terms:
                pairs.add(_inner(p.left, q.left, dtype), _inner(p.right, q.right, dtype))
        return pairs.settle(lambda samples: by_rows.paired_dot(self.some(samples), other.some(samples)))

    def gram(self, other: PerSampleGrad) -> Tensor:
        if (
            isinstance(other, FactoredGrad)
            and len(self.terms) == len(other.terms) == 1
            and _one_token(self.terms[0])
            and _one_token(other.terms[0])
        ):
            (left, right), (left2, right2) = self.terms[0], other.terms[0]
            assert (
                isinstance(left, Tensor)
                and isinstance(left2, Tensor)
                and isinstance(right, Tensor)
                and isinstance(right2, Tensor)
            )
            return (left[:, 0] @ left2[:, 0].T) * (right[:, 0] @ right2[:, 0].T)  # <l x r, m x s> = <l, m> <r, s>
        return by_rows.gram(self, other)

    def sum(self, weights: Tensor | None) -> Tensor:
        weighted = _samples_to_sum(weights)
        terms = self.terms
        if weighted is not None and weights is not None:
            terms = self.some(weighted).terms
            weights = weights[weighted]
        first, *others = sorted(terms, key=_is_lookup) if len(terms) > 1 else terms
        result = _sum_term(first, weights)
        for term in others:
            result = _add_term(result, term, weights)
        return result if result.shape == self.shape else result.reshape(self.shape)

    def term_norms(self) -> Tensor | None:
        if len(self.terms) == 1 and self.tokens == 1:
            return None
        return total(_norms_of(term.left) * _norms_of(term.right) for term in self.terms)

    def sum_of_squares(self, center: Tensor | None) -> Tensor:
        if center is None and len(self.terms) == 1 and _one_token(self.terms[0]):
            left, right = self.terms[0]
            assert isinstance(left, Tensor) and isinstance(right, Tensor)
            return (left[:, 0].square().T @ right[:, 0].square()).reshape(self.shape)
        return by_rows.sum_of_squares(self, center)

    def project(self, left: Tensor, right: Tensor) -> Tensor:
        if self.matrix != as_matrix(self.shape):
            return by_rows.project(self, left, right)
        dtype = self.terms[0].dtype
        left, right = left.to(dtype), right.to(dtype)
        return total(_project_term(term, left, right) for term in self.terms)

    def describe(self) -> str:
        return f"factors, {self.tokens} token{'s' * (self.tokens != 1)}"


def _project_term(term: Term, left: Tensor, right: Tensor) -> Tensor:
    """Sum over t of (left[b, t] @ left signs) * (right[b, t] @ right signs), (b, k)."""
    products = _times(term.left, left) * _times(term.right, right)  # u^T (l x r) v = <u, l> <r, v>
    return products[:, 0] if term.tokens == 1 else products.sum(1)


def _as_double(factor: Factor) -> Factor:
    if isinstance(factor, OneHot):
        return factor
    return factor.to(torch.complex128 if factor.is_complex() else torch.float64)


def _largest(factor: Factor) -> Tensor:
    """Largest absolute value of each sample, (b,), or a scalar."""
    return torch.ones(()) if isinstance(factor, OneHot) else factor.detach().abs().flatten(1).amax(1)


def _norms_of(factor: Factor) -> Tensor:
    if isinstance(factor, OneHot):
        return factor.positions.new_full((), factor.positions.shape[1]).sqrt()
    return frobenius_norms(factor)


def scale_to_one(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Factor (b, ...) divided by the largest absolute value of each sample, and these values (b,); 1 if all are 0."""
    largest = _largest(factor)
    scale = torch.where(largest > 0, largest, 1)
    return factor / scale.view(-1, *(1,) * (factor.dim() - 1)), scale


def _divide_term(term: Term, scale: Tensor) -> Term:
    """The term divided by a scale (b,)."""
    left, right = term
    if isinstance(right, OneHot):
        assert isinstance(left, Tensor)
        return Term(left / scale[:, None, None], right)
    if isinstance(left, OneHot):
        return Term(left, right / scale[:, None, None])
    left, share = scale_to_one(left)
    return Term(left, right * (share / scale)[:, None, None])


def _squared_norms_of_lookup(term: Term) -> Tensor:
    """Squared norms (b,) from the sums of values (b, t, i) with the same position, without pairs that may cancel."""
    hot, values = term if isinstance(term.left, OneHot) else (term.right, term.left)
    assert isinstance(hot, OneHot) and isinstance(values, Tensor)
    same = hot.positions[:, :, None] == hot.positions[:, None, :]
    first = same.to(torch.uint8).argmax(2)  # first token with the same position
    result = torch.zeros_like(values).scatter_add(1, first[:, :, None].expand_as(values), values)
    return flat_squared_norms(result.flatten(1))


def _samples_to_sum(weights: Tensor | None) -> Tensor | None:
    """Samples with non-zero weight, if leaving out the others saves more than selecting them costs; else None."""
    global _last_selection
    last, selected = _last_selection
    if weights is None or last() is weights:
        return None if weights is None else selected
    if weights.requires_grad or not weights.is_cpu or is_traced(weights):
        return None  # on other devices, nonzero would be a host sync
    nonzero = weights.nonzero()
    selected = nonzero.flatten() if nonzero.shape[0] <= ENOUGH_LEFT * weights.shape[0] else None
    _last_selection = (weakref.ref(weights), selected)
    return selected


# Weights, and the samples selected for them: all parameters are summed with the same tensor of weights.
_last_selection: tuple[Callable[[], Tensor | None], Tensor | None] = (lambda: None, None)


class PairSums:
    """Sums (b,) of products over pairs of tokens, and of their absolute values, which show if a sum has canceled."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []
        self._sizes: list[Tensor] = []

    def add(self, left: Tensor, right: Tensor, multiple: int = 1, once: int = 0) -> None:
        """Add `multiple` times the sum of left * right, (b, t, s) each; the first `once` rows only once."""
        pairs = left * right if left.requires_grad or right.requires_grad else left.mul_(right)
        values = pairs.detach()
        self._add(pairs, values, multiple)
        if once:
            self._add(pairs[:, :once], values[:, :once], 1 - multiple)

    def _add(self, pairs: Tensor, values: Tensor, multiple: int) -> None:
        self._sums.append(pairs.sum((1, 2)) * multiple)
        self._sizes.append(torch.linalg.vector_norm(values, 1, (1, 2)) * multiple)

    def settle(self, exactly: Callable[[Tensor], Tensor] | None) -> Tensor:
        """The sums (b,). Samples whose sum has canceled are replaced by `exactly(samples)`; they are NaN if it is
        None, which needs no host sync.

        In a traced pass, which cannot branch on values, they are NaN as well, so that the compiled update falls back to
        another computation.
        """
        sums = total(self._sums)
        canceled = sums.detach().abs() < CANCELLED * total(self._sizes)
        if exactly is None or is_traced(sums):
            return torch.where(canceled, torch.nan, sums)
        samples = canceled.nonzero().flatten()
        return sums.index_copy(0, samples, exactly(samples)) if len(samples) else sums


def _add_pairs_within(pairs: PairSums, term: Term) -> None:
    """Add the inner products of all pairs of tokens of a term: those below the diagonal twice, in blocks of columns."""
    left, right = term
    if not isinstance(left, Tensor) or not isinstance(right, Tensor) or term.tokens < MANY_TOKENS:
        pairs.add(_inner(left, left, term.dtype), _inner(right, right, term.dtype))
        return
    # Two blocks if they are large enough for the faster kernels.
    half = -(-term.tokens // 2)
    blocks = 2 if prefers_onednn(left, right, half, half, min(left.shape[2], right.shape[2])) else 4
    step = 16 * -(-term.tokens // (16 * blocks))
    for at in range(0, term.tokens, step):
        of_left, of_right = (bmm(f[:, at:], f[:, at : at + step].transpose(1, 2)) for f in (left, right))
        pairs.add(of_left, of_right, multiple=2, once=min(step, term.tokens - at))


def _dot_term(term: Term, matrix: Tensor) -> Tensor:
    left, right = term
    if isinstance(right, OneHot):
        left, right, matrix = right, left, matrix.T
    assert isinstance(right, Tensor)
    return (_times(left, matrix.to(right.dtype)) * right).sum((1, 2))


def _join_terms(terms: Sequence[Term]) -> list[Term]:
    """Concatenate terms with the same kinds of factors along the tokens: the steps of an RNN become one sequence."""
    kinds: dict[tuple[bool, bool], list[Term]] = {}
    for term in terms:
        kinds.setdefault((isinstance(term.left, OneHot), isinstance(term.right, OneHot)), []).append(term)
    sequences = []
    for group in kinds.values():
        left = _end_to_end([term.left for term in group])
        right = _end_to_end([term.right for term in group])
        sequences.append(Term(left, right))
    return sequences


def _end_to_end(factors: Sequence[Factor]) -> Factor:
    if len(factors) == 1:
        return factors[0]
    tables = torch.cat([_table(f) for f in factors], dim=1)
    return OneHot(tables, factors[0].size) if isinstance(factors[0], OneHot) else tables
