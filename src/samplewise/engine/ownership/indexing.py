"""Ownership through operations that move whole entries of a dimension by an index, read from the saved index.

A call of the node would show the same (see `local_probe`), at the price of gradients in full size.

    Index         x[i], x[:, mask], x[rows, columns]
    IndexSelect   x.index_select(dim, i)
    IndexAdd      x.index_add(dim, i, source)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from samplewise.engine.graph.graph import Edge, Graph, Node, scalar
from samplewise.engine.graph.saved import block_of
from samplewise.engine.ownership.owner_map import OwnerMap, along, rows_of, sole_owner
from samplewise.engine.ownership.probe import MIXED, NO_OWNER


def read_owners(graph: Graph, node: Node, owner_maps: Mapping[int, OwnerMap]) -> list[Tensor] | None:
    """Owner of each element of the gradient of each operand, as views that take little memory, with MIXED for elements
    of several samples; None if the index does not show it.
    """
    operation = graph.operations[node]
    if operation not in ("Index", "IndexSelect", "IndexAdd") or block_of(node) is not None:
        return None
    shape = Edge(node, 0).shape
    rows = rows_of(owner_maps[0], shape, Edge(node, 0).device)
    if rows is None:
        return None
    dim, owner = rows
    if operation == "IndexAdd":
        return None if scalar(node, "source_dim") == 0 else _owners_of_add(node, shape, dim, owner)
    if operation == "Index":
        indices = _integers(node._saved_indices)
    else:
        indices = [None] * (scalar(node, "dim") % len(shape)) + [node._saved_index.reshape(-1)]
    return None if indices is None else [_owners_of_choice(node, indices, dim, owner, sole_owner(owner_maps[0]))]


def _owners_of_add(node: Node, shape: tuple[int, ...], dim: int, owner: Tensor) -> list[Tensor]:
    """Owners of both operands: the tensor has those of the output, the source those of the entries it is added to."""
    index = node._saved_index.reshape(-1)
    indexed_dim = scalar(node, "dim") % len(shape)
    size = (*shape[:indexed_dim], len(index), *shape[indexed_dim + 1 :])  # that of the source
    return [along(dim, owner, shape), along(dim, owner[index] if indexed_dim == dim else owner, size)]


def _owners_of_choice(node: Node, indices: list[Tensor | None], dim: int, owner: Tensor, sole: int | None) -> Tensor:
    """Owners of a tensor of which entries were chosen; `sole`: the owner of the whole output."""
    whole = Edge(*node.next_functions[0]).shape
    at = [d for d, index in enumerate(indices) if index is not None]
    chosen = list(torch.broadcast_tensors(*(index for index in indices if index is not None)))
    # The dims of the indices replace those that they index; they come first if there are others in between.
    first = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    count = chosen[0].dim()
    others = [d for d in range(len(whole)) if d not in at]
    if sole is None and not first <= dim < first + count:
        return along(others[dim if dim < first else dim - count], owner, whole)
    # An entry may be chosen several times: by one sample only, if each finds itself there.
    of_index = owner.new_full((), sole) if sole is not None else along(dim - first, owner, tuple(chosen[0].shape))
    of_index = of_index.expand(chosen[0].shape)
    entries = owner.new_full([whole[d] for d in at], NO_OWNER)
    owned = of_index >= 0
    if not owned.all():
        of_index = of_index[owned]
        chosen = [index[owned] for index in chosen]
    entries[tuple(chosen)] = of_index
    if not torch.equal(entries[tuple(chosen)], of_index):
        entries.fill_(MIXED)
    return entries.view(*entries.shape, *(1,) * len(others)).permute(_inverse([*at, *others])).expand(whole)


def _inverse(dims: list[int]) -> list[int]:
    return [dims.index(d) for d in range(len(dims))]


def _integers(indices: Sequence[Tensor | None]) -> list[Tensor | None] | None:
    """Indices with one integer tensor per dimension: a mask is the places at which it is true."""
    integers: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            if index.dim() == 0:  # adds a dimension
                return None
            integers += index.nonzero().unbind(1)
        else:
            integers.append(index)
    return integers
