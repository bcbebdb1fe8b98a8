"""Rules for tables of embeddings: lookups of single entries (F.embedding), and of bags of entries (F.embedding_bag).

Gradients of a table are sums of outer products of unit vectors, at the entries that a sample looks up, with gradients
of the output, see `FactoredGrad`.

Legend: b sample, t entry that belongs to b, n bag, i feature.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samplewise.engine.grads.bags import BagGrad
from samplewise.engine.grads.base import PerSampleGrad
from samplewise.engine.grads.factored import FactoredGrad, OneHot, Term
from samplewise.engine.graph.graph import Node, scalar
from samplewise.engine.ownership.owner_map import RaggedGather, RegularGather, RowGather, ragged_gather
from samplewise.engine.rules.rule_input import Use, accumulable

MEAN, MAX = 1, 2  # modes of bags; 0 is the sum
NO_PADDING = 2**63  # padding_idx of bags is unsigned: -1 is 2**64 - 1
BAG_READS = ("indices", "offsets", "per_sample_weights", "result1", "result2", "result3")


def table(use: Use) -> PerSampleGrad | None:
    """Rule for the table of an embedding."""
    index = use.saved["indices"]
    g = use.gradient
    rows = use.rows(index.dim()) if g.dim() > 1 else None
    if rows is None:
        return None
    gradient = rows.gather(g.reshape(-1, g.shape[-1]))
    return lookup_grad(use.node, index, rows.gather(index.reshape(-1)), gradient, use.shape)


def lookup_grad(
    node: Node, indices: Tensor, index: Tensor, gradient: Tensor, shape: tuple[int, ...]
) -> FactoredGrad | None:
    """Gradients of a table of this shape from index (b, t) and gradient (b, t, i). `indices`: all that are looked up.

    None if frequencies scale gradients that must be differentiable: PyTorch's second derivative leaves them out.
    """
    scales = scalar(node, "scale_grad_by_freq")
    if scales and torch.is_grad_enabled():
        return None
    padding = scalar(node, "padding_idx")
    if 0 <= padding < NO_PADDING:
        gradient = torch.where((index == padding)[:, :, None], 0, gradient)
    if scales:  # frequencies are counted over the whole batch
        gradient = gradient / indices.flatten().bincount()[index][:, :, None]
    return FactoredGrad([Term(OneHot(index, shape[0]), gradient)], shape)


def indexed_table(use: Use) -> PerSampleGrad | None:
    """Rule for W (e, ...) in W[i]: the entries that a sample looks up are matrices, or numbers of any shape."""
    indices = use.saved["indices"]
    return _selected_entries(use, indices[0]) if len(indices) == 1 else None


def selected_table(use: Use) -> PerSampleGrad | None:
    """Rule for W (e, ...) in W.index_select(0, i)."""
    return _selected_entries(use, use.saved["index"]) if scalar(use.node, "dim") % len(use.shape) == 0 else None


def _selected_entries(use: Use, index: Tensor | None) -> PerSampleGrad | None:
    g = use.gradient
    if index is None or index.dtype in (torch.bool, torch.uint8) or g.is_complex():  # a mask
        return None
    rows = use.rows(index.dim())
    if rows is None:
        return None
    entries = index.reshape(-1)
    hot = OneHot(rows.gather(torch.where(entries < 0, entries + use.shape[0], entries)), use.shape[0])
    return FactoredGrad([Term(hot, rows.gather(g.reshape(len(entries), -1)))], use.shape)


def bag_table(use: Use) -> PerSampleGrad | None:
    """Rule for the table of bags of embeddings: each entry of a bag gets the gradient of the bag, times its weight or
    divided by the size of the bag.
    """
    node = use.node
    rows = use.rows(1)
    if rows is None or scalar(node, "scale_grad_by_freq"):  # the CPU kernel divides by frequencies of other entries
        return None
    g = use.gradient
    if scalar(node, "mode") == MAX:
        return _largest_entries(use, rows)
    if scalar(node, "mode") == MEAN:
        g = g / use.saved["result2"].clamp_min(1)[:, None]  # sizes of the bags, without padding
    tokens, bag = _entries_of_samples(use, rows)
    index = tokens.gather(use.saved["indices"])
    # Flags (b, t) of entries that are no padding, neither of the bag nor of the samples.
    padding = scalar(node, "padding_idx")
    present = index != padding if padding < NO_PADDING else torch.ones_like(index, dtype=torch.bool)
    present = present & (tokens.slots < tokens.rows) if isinstance(tokens, RaggedGather) else present
    weights = use.saved["per_sample_weights"]

    def entries() -> FactoredGrad:
        values = tokens.gather(g.index_select(0, bag))
        if weights is not None:
            values = values * tokens.gather(accumulable(weights))[:, :, None]
        grad = lookup_grad(node, use.saved["indices"], index, values, use.shape)
        assert grad is not None
        return grad

    bags = rows.gather(g)
    if bags.shape[1] > 1 or weights is not None:
        return entries()
    # An entry that is found n times in the bag of a sample has n times the gradient.
    coincide = (index[:, :, None] == index[:, None, :]) & present[:, :, None] & present[:, None, :]
    return BagGrad(bags[:, 0], coincide.sum((1, 2)).to(g.dtype), use.shape, entries)


def _entries_of_samples(use: Use, rows: RowGather) -> tuple[RowGather, Tensor]:
    """Assignment of the entries of all bags to samples, and the bag of each entry."""
    count = len(use.saved["indices"])
    bags = len(use.gradient)
    starts = use.saved["offsets"][:bags]
    place = torch.arange(count, device=starts.device)
    bag = use.saved["result1"]  # the kernel for sums may leave it out
    if len(bag) < count:
        bag = torch.bucketize(place, starts, right=True) - 1
    size = count // bags
    if isinstance(rows, RegularGather) and size * bags == count and bool((bag == place // max(size, 1)).all()):
        return RegularGather(rows.samples, rows.outer, rows.inner * size), bag  # bags of one size
    owner = use.owner_map.owners(tuple(use.gradient.shape), use.gradient.device).amax(1)
    return ragged_gather(owner[bag], use.samples), bag


def _largest_entries(use: Use, rows: RowGather) -> PerSampleGrad:
    """Gradients for bags of which each feature is the largest of all entries: single elements of the table."""
    g = use.gradient * (use.saved["result2"] > 0)[:, None]  # empty bags have no largest entry
    count, width = use.shape
    bags = rows.gather(g)

    def entries() -> FactoredGrad:
        elements = use.saved["result3"] * width + torch.arange(width, device=g.device)
        hot = OneHot(rows.gather(elements).flatten(1), count * width)
        return FactoredGrad([Term(hot, bags.flatten(1)[:, :, None])], use.shape)

    if bags.shape[1] > 1:
        return entries()
    return BagGrad(bags[:, 0], g.new_ones(use.samples), use.shape, entries)
