"""Ownership through a single node, read from an index that it saved, or found by calling its backward.

Which samples meet in a node depends on that node and on what it saved, not on the rest of the graph. So the node is
called with gradients of our own: random numbers of about the same size in all samples, so that nothing is lost to
rounding and vanishing gradients are no obstacle. Calls in which the samples are weighted by powers of two show which
sample owns each element of an operand's gradient, as in `probe`.

    read_owners     reads the ownership of operations that move whole entries of a dimension by an index
    probe_node      finds the ownership of the operands
    Claim           says that it is the same in another graph; `hold` verifies that, with fewer calls
    FunctionChecks  verifies claims about Python functions during a backward pass, with the gradients that arrive:
                    unlike ATen operations they may round, clip or threshold gradients
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from samplewise.engine.generic import as_gradient, call
from samplewise.engine.graph.graph import FUSED_ATTENTION, Edge, Graph, Node, is_python_function, scalar
from samplewise.engine.graph.hook_registry import remove_afterwards
from samplewise.engine.graph.saved import block_of
from samplewise.engine.ownership.owner_map import (
    Irregular,
    OwnerMap,
    allows,
    along,
    distinct,
    owner_map_of,
    rows_of,
    sole_owner,
)
from samplewise.engine.ownership.probe import MIXED, NO_OWNER, code_powers, codes_for, probe_passes
from samplewise.engine.ownership.weighted_passes import (
    WIDE,
    NotLinearError,
    distinct_powers,
    is_deterministic,
    switches,
)

_generator = torch.Generator().manual_seed(0)  # separate generator: does not change the user's RNG state


def probe_node(
    graph: Graph, node: Node, owner_maps: Mapping[int, OwnerMap], positions: Sequence[int], exact: bool = False
) -> dict[int, OwnerMap | None]:
    """Ownership of the gradients of the operands at these positions, for gradients of the outputs with these owner maps
    (by output slot); None where samples are mixed. `exact`: see `owner_map_of`. Raises NonFiniteGradientError if
    gradients are not finite, and NotLinearError if the backward of a Python function is not linear.
    """
    owners = read_owners(graph, node, owner_maps)
    if owners is not None:
        owners = [owners[position] for position in positions]
    else:
        passes = _NodePasses(graph, node, owner_maps, positions)
        owners = _copied_owners(passes) or probe_passes(passes).owners
    return {
        position: None if (distinct(owner) == MIXED).any() else owner_map_of(owner, graph.samples, exact)
        for position, owner in zip(positions, owners, strict=True)
    }


# Operations that copy elements: an element of an operand's gradient is a sum of some elements of the output's gradient.
COPYING = set(
    """
    Cat CopySlices Flip Gather Index IndexAdd IndexCopy IndexPut IndexSelect MaskedScatter MaskedSelect Roll Scatter
    ScatterAdd Select Slice Sort Split SplitWithSizes Stack Take Topk Unbind
    """.split()
)


def _copied_owners(passes: _NodePasses) -> list[Tensor] | None:
    """Owners from two calls of a node that copies elements: one with the numbers of the owners as gradients, which come
    out where they belong, and one with ones. None if this does not decide them: an element may be copied twice.
    """
    exact = {torch.float32: 2**24, torch.float64: 2**53}  # integers up to these
    dtypes = {g.dtype for g in passes.gradients.values()}
    if passes.operation(0) not in COPYING or any(passes.graph.samples >= exact.get(dtype, 0) for dtype in dtypes):
        return None
    numbers = {}
    flags = {}
    for slot, gradient in passes.gradients.items():
        owner = passes.owner_maps[slot].owners(tuple(gradient.shape), gradient.device)
        numbers[slot] = (owner + 1).to(gradient.dtype)
        flags[slot] = (owner >= 0).to(gradient.dtype)
    copies = passes.call(flags)
    if not all(bool(((count == 0) | (count == 1)).all()) for count in copies):
        return None
    return [number.long() - 1 for number in passes.call(numbers)]


# --- reading the saved index ------------------------------------------------------------------------------------------
#
# A call of the node would show the same, at the price of gradients in full size.
#
#     Index         x[i], x[:, mask], x[rows, columns]
#     IndexSelect   x.index_select(dim, i)
#     IndexAdd      x.index_add(dim, i, source)
#     NllLoss       of rows, some with targets that are ignored
#     attention     with a mask that lets tokens attend to tokens of their own sample only, as of packed documents


def read_owners(graph: Graph, node: Node, owner_maps: Mapping[int, OwnerMap]) -> list[Tensor] | None:
    """Owner of each element of the gradient of each operand, as views that take little memory, with MIXED for elements
    of several samples; None if the index does not show it.
    """
    operation = graph.operations[node]
    readable = operation in FUSED_ATTENTION or operation in ("Index", "IndexSelect", "IndexAdd", "NllLoss", "NllLoss2D")
    if not readable or block_of(node) is not None:
        return None
    shape = Edge(node, 0).shape
    if operation in FUSED_ATTENTION:
        return _owners_of_attention(node, owner_maps, shape)
    if operation in ("NllLoss", "NllLoss2D"):
        owner = owner_maps[0].owners(shape, Edge(node, 0).device)
        owner = torch.where(node._saved_target == scalar(node, "ignore_index"), NO_OWNER, owner)
        return [owner[:, None].expand(Edge(*node.next_functions[0]).shape)]
    rows = rows_of(owner_maps[0], shape, Edge(node, 0).device)
    if rows is None:
        return None
    dim, owner = rows
    if operation == "IndexAdd":
        if scalar(node, "source_dim") == 0:
            return None
        # The tensor has the owners of the output, the source those of the entries it is added to.
        index = node._saved_index.reshape(-1)
        indexed_dim = scalar(node, "dim") % len(shape)
        source_shape = (*shape[:indexed_dim], len(index), *shape[indexed_dim + 1 :])
        return [along(dim, owner, shape), along(dim, owner[index] if indexed_dim == dim else owner, source_shape)]
    if operation == "Index":
        indices = _integers(node._saved_indices)
    else:
        indices = [None] * (scalar(node, "dim") % len(shape)) + [node._saved_index.reshape(-1)]
    return None if indices is None else [_owners_of_selection(node, indices, dim, owner, sole_owner(owner_maps[0]))]


def _owners_of_selection(node: Node, indices: list[Tensor | None], dim: int, owner: Tensor, sole: int | None) -> Tensor:
    """Owners of a tensor of which entries were selected; `sole`: the owner of the whole output."""
    shape = Edge(*node.next_functions[0]).shape
    at = [d for d, index in enumerate(indices) if index is not None]
    places = list(torch.broadcast_tensors(*(index for index in indices if index is not None)))
    # The dims of the indices replace those that they index; they come first if there are others in between.
    first = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    count = places[0].dim()
    other_dims = [d for d in range(len(shape)) if d not in at]
    if sole is None and not first <= dim < first + count:
        return along(other_dims[dim if dim < first else dim - count], owner, shape)
    # An entry may be selected several times: by one sample only, if each finds itself there.
    of_index = owner.new_full((), sole) if sole is not None else along(dim - first, owner, tuple(places[0].shape))
    of_index = of_index.expand(places[0].shape)
    entries = owner.new_full([shape[d] for d in at], NO_OWNER)
    owned = of_index >= 0
    if not owned.all():
        of_index = of_index[owned]
        places = [index[owned] for index in places]
    entries[tuple(places)] = of_index
    if not torch.equal(entries[tuple(places)], of_index):
        entries.fill_(MIXED)
    order = [*at, *other_dims]
    in_place = [order.index(d) for d in range(len(order))]
    return entries.view(*entries.shape, *(1,) * len(other_dims)).permute(in_place).expand(shape)


def _owners_of_attention(node: Node, owner_maps: Mapping[int, OwnerMap], shape: tuple[int, ...]) -> list[Tensor] | None:
    """Owners of queries, keys and values (b, heads, tokens, features), from the
    saved mask; None if there is no mask, if it mixes samples, or if the samples are not along b and tokens.
    """
    mask = getattr(node, "_saved_attn_mask", None)
    if mask is None or not mask.is_floating_point() or len(shape) != 4 or set(owner_maps) != {0}:
        return None
    owner = distinct(owner_maps[0].owners(shape, mask.device))
    if owner.shape[1] > 1 or owner.shape[3] > 1:
        return None
    attends = mask.isfinite()  # False: a weight of exactly zero
    attends = attends.view(*(1,) * (4 - attends.dim()), *attends.shape).any(1)
    if node._saved_is_causal:
        attends = attends.tril()
    owner = owner[:, 0, :, 0].expand(owner.shape[0], shape[2])
    # A key belongs to the queries that attend to it. These have one owner if its variance is zero.
    owned = (owner >= 0).double()
    moments = torch.stack([owned, owned * owner, owned * owner * owner], 1)  # (b, 3, queries)
    count, total, squares = (moments @ attends.double()).unbind(1)
    if not (count * squares == total * total).all():  # or the mask has finite numbers that are very small
        return None
    of_keys = torch.where(count > 0, (total / count.clamp(min=1)).long(), NO_OWNER)
    owners = [owner_maps[0].owners(shape, mask.device)]
    for position in (1, 2):
        child, slot = node.next_functions[position]
        keys = shape if child is None else Edge(child, slot).shape
        owners.append(of_keys[:, None, :, None].expand(-1, keys[1], -1, keys[3]).expand(keys[0], -1, -1, -1))
    return owners


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


# --- claims -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Claim:
    """Ownership of the gradients of some operands of a node, for outputs whose gradients have this ownership."""

    node: int  # position in the graph
    outputs: dict[int, OwnerMap]  # by output slot
    operands: dict[int, OwnerMap]  # by position

    def checks(self, graph: Graph) -> Iterator[Tensor]:
        """Flags that are all True if the operands of the node in this graph have this ownership."""
        node = graph.nodes[self.node]
        owners = read_owners(graph, node, self.outputs) if is_deterministic(graph) else None  # waits for a device
        if owners is not None:
            for position, owner_map in self.operands.items():
                yield allows(owner_map, owners[position])
            return
        passes = _NodePasses(graph, node, self.outputs, list(self.operands))
        plain = passes.run()
        for weights in _distinct_weights(graph):
            for gradient, p, owner_map in zip(passes.run(weights), plain, self.operands.values(), strict=True):
                yield follows(gradient, owner_map.apply_weights(p, weights), graph)


def hold(claims: Sequence[Claim], graph: Graph) -> bool:
    """True if all claims hold in this graph. One wait for the device."""
    flags = [flag for claim in claims for flag in claim.checks(graph)]
    return not flags or bool(torch.stack(flags).all())


class FunctionChecks:
    """Verifies claims about Python functions in the backward passes of one graph.

    is_verified: returns True for nodes that were verified before they are run
    """

    def __init__(self, graph: Graph, claims: Sequence[Claim], is_verified: Callable[[int], bool]):
        self.graph = graph
        self.claims = claims
        self.is_verified = is_verified
        self.hold = True  # False as soon as a claim does not hold

    def watch(self) -> AbstractContextManager[None]:
        """Context manager: the claims are verified by backward passes in the block, with one more call of each
        function. Its result must follow the weights of the samples: else it mixes them, or is not linear.
        """
        if not self.claims:
            return nullcontext()
        nodes = self.graph.nodes
        handles = [nodes[claim.node].register_hook(partial(self._compare, claim)) for claim in self.claims]
        return remove_afterwards(handles)

    def _compare(
        self, claim: Claim, operands: Sequence[Tensor | None], outputs: Sequence[Tensor | None]
    ) -> None:  # autograd would take a returned value for other gradients
        graph = self.graph
        if self.is_verified(claim.node):
            return
        gradients_of_outputs = {slot: g.detach() for slot in claim.outputs if (g := outputs[slot]) is not None}
        sizes = torch.stack([claim.outputs[slot].sizes(g) for slot, g in gradients_of_outputs.items()]).sum(0)
        for weights in distinct_powers(graph, sizes, base=WIDE, digits=1):
            weighted = {slot: claim.outputs[slot].apply_weights(g, weights) for slot, g in gradients_of_outputs.items()}
            with torch.no_grad():
                results = call(graph.nodes[claim.node], weighted)
            for position, owner_map in claim.operands.items():
                gradient = operands[position]
                result = results[position]
                if gradient is None or result is None:
                    self.hold &= gradient is result
                else:
                    edge = Edge(*graph.nodes[claim.node].next_functions[position])
                    expected = owner_map.apply_weights(as_gradient(gradient.detach(), edge), weights)
                    self.hold &= bool(follows(as_gradient(result, edge), expected, graph))


def _distinct_weights(graph: Graph) -> Iterator[Tensor]:
    """Weights (b,) for each pass: any two samples have different powers of two in one of them, or 0 and 1 where sums
    are not deterministic.
    """
    if not is_deterministic(graph):
        for on in switches(graph.samples):
            yield on.to(graph.losses.device, graph.losses.dtype, non_blocking=True)
        return
    codes = codes_for(graph)[0]
    numbers = torch.randperm(graph.samples, generator=_generator)
    for digit in range(max(1, math.ceil(math.log(graph.samples, codes.base) - 1e-12))):
        yield code_powers(codes)[numbers // codes.base**digit % codes.base].to(graph.losses.dtype)


def follows(gradient: Tensor, expected: Tensor, graph: Graph) -> Tensor:
    """Flag: a gradient is the expected one, to the last bit but for denormals, which lose bits when scaled. Where sums
    are not deterministic, what is switched off must be exactly zero.
    """
    if not is_deterministic(graph):
        near = (gradient != 0) <= (expected != 0)
    elif torch.equal(gradient, expected):
        return torch.ones((), dtype=torch.bool)
    else:
        tiny = 0.0 if gradient.dtype is torch.float16 else torch.finfo(gradient.dtype).tiny
        near = (gradient - expected).abs() <= tiny * 2.0 ** (8 + codes_for(graph)[0].base)
    return (near | ~(gradient.isfinite() & expected.isfinite())).all()


class _NodePasses:
    """Calls of a node with random gradients of its outputs, multiplied by the weights of the samples."""

    def __init__(self, graph: Graph, node: Node, owner_maps: Mapping[int, OwnerMap], positions: Sequence[int]):
        self.graph = graph
        self.node = node
        self.owner_maps = owner_maps
        self.positions = positions
        self.gradients: dict[int, Tensor] = {}
        for slot, owner_map in owner_maps.items():
            gradient = _random_values(Edge(node, slot))
            if isinstance(owner_map, Irregular):
                gradient = torch.where(owner_map.owner < 0, 0, gradient)
            self.gradients[slot] = gradient

    def run(self, weights: Tensor | None = None, at: Collection[int] | None = None) -> list[Tensor]:
        gradients = self.gradients
        if weights is not None:
            gradients = {slot: self.owner_maps[slot].apply_weights(g, weights) for slot, g in gradients.items()}
        return self.call(gradients, at)

    def call(self, gradients: dict[int, Tensor], at: Collection[int] | None = None) -> list[Tensor]:
        """Gradients of the operands, for these gradients of the outputs."""
        with torch.no_grad():
            results = call(self.node, gradients)
        positions = self.positions if at is None else [self.positions[k] for k in at]
        operands = [(Edge(*self.node.next_functions[position]), results[position]) for position in positions]
        return [edge.zeros() if result is None else as_gradient(result, edge) for edge, result in operands]

    def check_linear(self, plain: list[Tensor]) -> None:
        if is_python_function(self.node):
            raise NotLinearError(self.operation(0))

    def operation(self, at: int) -> str:
        return self.graph.operations[self.node]


MOST_VALUES = 2**20 + 7  # not a multiple of usual sizes, so that repeated values fall on other places of each sample
_values: dict[tuple[torch.dtype, torch.device], Tensor] = {}


def _random_values(edge: Edge) -> Tensor:
    """Random numbers between 1 and 2, in the shape of an edge. Drawn once: other numbers would show the same."""
    size = math.prod(edge.shape)
    key = (edge.dtype, edge.device)
    values = _values.get(key)
    if values is None or len(values) < min(size, MOST_VALUES):
        length = min(MOST_VALUES, max(2 * size, 2**12))
        real = torch.rand(2, length, generator=_generator, dtype=torch.float64) + 1
        values = _values[key] = (torch.complex(*real) if edge.dtype.is_complex else real[0]).to(edge.device, edge.dtype)
    return (values if size <= len(values) else values.repeat(-(-size // len(values))))[:size].view(edge.shape)
