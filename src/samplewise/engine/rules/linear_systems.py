"""Rule for the matrix of torch.linalg.solve, shared by all right-hand sides.

Legend: b sample, t right-hand side (a column of the output that belongs to b; a row with left=False), o and i the
matrix's two dims.
"""

from __future__ import annotations

import torch

from samplewise.engine.grads.base import PerSampleGrad
from samplewise.engine.grads.factored import FactoredGrad, Term
from samplewise.engine.rules.rule_input import Use


def matrix(use: Use) -> PerSampleGrad | None:
    """Rule for A in A X = B: outer products of the gradients of B, which are solutions for the transposed matrix, with
    the columns of X. With left=False, X A = B, of the rows of X with the gradients of B.
    """
    g = use.gradient
    left = use.node._saved_left
    last = g.dim() - 1
    dims = (*range(last - 1), last, last - 1) if left else tuple(range(last + 1))  # each right-hand side as a row
    rows = use.permuted_rows(dims, last) if len(use.shape) == 2 and last > 0 else None
    if rows is None or g.is_complex():
        return None
    n = use.shape[0]
    A = use.tensor("A")
    gradient = -rows.gather(torch.linalg.solve(A if left else A.T, g.permute(dims).reshape(-1, n), left=False))
    solution = rows.gather(use.tensor("result").permute(dims).reshape(-1, n))
    return FactoredGrad([Term(gradient, solution) if left else Term(solution, gradient)], use.shape)
