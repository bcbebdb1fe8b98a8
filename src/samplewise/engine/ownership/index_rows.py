"""Owners of the rows that an index moves, for the indices of routed tokens: one integer per row, or a mask of rows.

    Index         x[i], x[mask], x[rows, columns]
    IndexSelect   x.index_select(0, i)
    IndexAdd      x.index_add(0, i, source)
    IndexPut      x[i] = source, x[mask] += source

Only owners of whole rows are read, which takes few operations. `local_probe` finds those of other indices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from samplewise.engine.graph.graph import EdgeKey, Graph, Node, numel, scalar
from samplewise.engine.graph.saved import block_of
from samplewise.engine.ownership.layouts import RowOwners, SampleDim
from samplewise.engine.ownership.owner_map import Irregular, OwnerMap, Regular, owner_map_at, regular_inner, rows_of
from samplewise.engine.ownership.probe import NO_OWNER

OPERATIONS = {"Index", "IndexSelect", "IndexAdd", "IndexPut"}


def owners_of_indexed_rows(
    graph: Graph, at: int, owner_maps: Mapping[int, OwnerMap], positions: Sequence[int]
) -> dict[int, OwnerMap | None] | None:
    """Ownership of the gradients of the operands at these positions of the node at `at`, for an output with the samples
    in its first dimension; None if the index does not show it. A row belongs to the sample that finds itself there.
    """
    node = graph.nodes[at]
    operation = graph.structure.operations[at]
    if operation not in OPERATIONS or block_of(node) is not None:
        return None
    shape = graph.sizes.shapes[at, 0]
    rows = rows_of(owner_maps[0], shape, graph.edge((at, 0)).device)
    index = _index_of_rows(node, operation)
    if rows is None or index is None or rows[0] != 0:
        return None
    owner = rows[1]
    index = index._replace(rows=index.rows.to(owner.device))  # a tensor on an accelerator may have an index on the CPU
    result: dict[int, OwnerMap | None] = {}
    for position in positions:
        child = graph.reach.operands[at][position]
        assert child is not None
        if operation in ("Index", "IndexSelect"):
            entries = owner.new_full(graph.sizes.shapes[child][:1], NO_OWNER).index_copy_(0, index.rows, owner)
            if not torch.equal(entries.index_select(0, index.rows), owner):
                return None
            result[position] = _as_owner_map(graph, child, entries)
        elif position == 0:
            result[0] = owner_maps[0]
        elif graph.sizes.shapes[child] == (len(index.rows), *shape[index.dims :]):
            result[position] = _as_owner_map(graph, child, owner.index_select(0, index.rows))
        else:  # a source that is broadcast
            return None
    return result


class RowIndex(NamedTuple):
    """Index of entries of the first dimensions of a tensor."""

    rows: Tensor  # position of each entry in the first dimension, (n,)
    dims: int  # number of dimensions that are indexed


def _index_of_rows(node: Node, operation: str) -> RowIndex | None:
    if operation in ("IndexSelect", "IndexAdd"):
        return RowIndex(node._saved_index.reshape(-1), 1) if scalar(node, "dim") == 0 else None
    first, *others = node._saved_indices
    if first is None or any(index is None or index.shape != first.shape for index in others):
        return None
    if first.dtype is torch.bool:
        return RowIndex(first.nonzero()[:, 0], first.dim()) if first.dim() and not others else None
    plain = first.dim() == 1 and first.dtype is torch.long and not (len(first) and int(first.min()) < 0)
    return RowIndex(first, 1 + len(others)) if plain else None


def _as_owner_map(graph: Graph, child: EdgeKey, owner: Tensor) -> OwnerMap | None:
    """Owner map of a gradient from the owners of its rows; a regular one, if no gradient is added that shows it."""
    shape = graph.sizes.shapes[child]
    if not len(owner):
        return Irregular(graph.samples, owner.new_empty(shape))
    if len(owner) % graph.samples == 0 and len(graph.structure.consumers[child]) == 1:
        inner = regular_inner(owner, graph.samples)
        if inner is not None:
            return Regular(graph.samples, inner * numel(shape[1:]))
    return owner_map_at(SampleDim(0, RowOwners(owner)), shape, graph.samples)
