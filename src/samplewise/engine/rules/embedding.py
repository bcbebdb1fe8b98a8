"""Rule for embeddings: row index[b, t] of the table gets the gradient of token t of sample b."""

from __future__ import annotations

import torch
from torch import Tensor

from samplewise.engine.grads.base import PerSampleGrad
from samplewise.engine.grads.factored import FactoredGrad, OneHot, Term
from samplewise.engine.graph.graph import Node, scalar
from samplewise.engine.rules.rule_input import Use


def table(use: Use) -> PerSampleGrad | None:
    """Rule for the table of an embedding."""
    index = use.saved["indices"]
    g = use.gradient
    rows = use.rows(index.dim()) if g.dim() > 1 else None
    if rows is None:
        return None
    width = g.shape[-1]
    return lookup_grad(use.node, rows.gather(index.reshape(-1)), rows.gather(g.reshape(-1, width)), use.shape)


def lookup_grad(node: Node, index: Tensor, gradient: Tensor, shape: tuple[int, ...]) -> FactoredGrad | None:
    """Gradients of a table of this shape from index (b, t) and gradient (b, t, i); None with scale_grad_by_freq."""
    if scalar(node, "scale_grad_by_freq"):  # frequencies are counted over the whole batch: computed by `generic`
        return None
    padding = scalar(node, "padding_idx")
    if padding >= 0:
        gradient = torch.where((index == padding)[:, :, None], 0, gradient)
    return FactoredGrad([Term(OneHot(index, shape[0]), gradient)], shape)
