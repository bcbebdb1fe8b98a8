"""The autograd graph of `losses` as plain data: nodes, their consumers, and the nodes that lead to parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from samplewise.core.text import listed
from samplewise.engine.graph.compiled import is_compiled, make_repeatable
from samplewise.engine.graph.structure import ACCUMULATE_GRAD, Children, Reach, read_structure
from samplewise.engine.graph.structure import EdgeKey as EdgeKey
from samplewise.engine.graph.structure import Node as Node
from samplewise.engine.graph.structure import is_python_function as is_python_function
from samplewise.engine.graph.structure import operation as operation
from samplewise.errors import GraphError


class Edge(NamedTuple):
    """Output `slot` of the forward operation of `node`, where its gradient arrives in the backward pass."""

    node: Node
    slot: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.node._input_metadata[self.slot].shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.node._input_metadata[self.slot].dtype

    @property
    def device(self) -> torch.device:
        return self.node._input_metadata[self.slot].device

    def zeros(self) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)

    def constant(self, value: float) -> Tensor:
        """A gradient of equal elements, which takes no memory."""
        return torch.tensor(value, dtype=self.dtype, device=self.device).expand(self.shape)

    def gradient_edge(self) -> torch.autograd.graph.GradientEdge:
        return torch.autograd.graph.GradientEdge(self.node, self.slot)


def edge_of(tensor: Tensor) -> Edge:
    """Edge at which the gradient of a tensor arrives."""
    node, slot, *_ = torch.autograd.graph.get_gradient_edge(tensor)
    return Edge(node, slot)


FUSED_ATTENTION = {
    "ScaledDotProductFlashAttentionForCpu",
    "ScaledDotProductFlashAttention",
    "ScaledDotProductEfficientAttention",
    "ScaledDotProductCudnnAttention",
}


def is_accumulate_grad(node: Node) -> bool:
    """True for the node of a leaf tensor, which has the tensor as `node.variable`."""
    return type(node) is ACCUMULATE_GRAD


class Graph:
    """All nodes between the losses and the leaves.

    `nodes`: topological order, consumers before their operands; `index` is the position of each node in it.
    `structure`: one object for all graphs of the same operations, settings, connections and leaf names; `sizes`: one
    for those of them with the same shapes.
    `children`: for each node, the (node, output slot) of each operand, as in `next_functions`.
    `leaves`: nodes of the `wanted` parameters, with their names.

    The properties below are computed only when a structure is analyzed.
    """

    def __init__(self, losses: Tensor, wanted: Mapping[str, Tensor], goal: Node | None = None):
        # If the losses are a leaf tensor they have no grad_fn; a view has one.
        self.losses = losses if losses.grad_fn is not None else losses.view_as(losses)
        self.losses_version = self.losses._version
        self.samples = losses.shape[0]
        self.root = Edge(self.losses.grad_fn, self.losses.output_nr)
        self.wanted = wanted
        self.goal = goal
        self.row_counts = {self.samples}  # sizes of dimensions that sample data have; with samples=, also those of rows
        self.tracks_terms = False  # norms of the terms of gradients are computed, see `PerSampleGrad.term_norms`
        self.hooks: Any = None  # where it has hooks, see `hook_places`
        # Parameters of a sharded model have values only while a pass is in their module (see `unsharded`), its graph
        # contains functions and hooks of fully_shard, and every pass gathers all parameters: rows come from as few
        # whole passes as possible, with the gradients of one module at a time.
        self.sharded = False
        leaf_names = dict(zip(map(id, wanted.values()), wanted, strict=True))
        self.structure, self.sizes, self.nodes = read_structure(*self.root, leaf_names)

    @cached_property
    def children(self) -> dict[Node, Children]:
        return {node: node.next_functions for node in self.nodes}

    @cached_property
    def index(self) -> dict[Node, int]:
        return dict(zip(self.nodes, range(len(self.nodes)), strict=True))

    @cached_property
    def leaves(self) -> dict[Node, str]:
        return {self.nodes[at]: name for at, name in self.structure.leaves.items()}

    @cached_property
    def first_sequence_number(self) -> int:
        """Sequence number of the oldest node: autograd numbers the nodes of a thread in the order of their creation."""
        return min(node._sequence_nr() for node in self.nodes)  # those of leaves have the largest number possible

    @cached_property
    def operations(self) -> dict[Node, str]:
        return dict(zip(self.nodes, self.structure.operations, strict=True))

    @cached_property
    def reach(self) -> Reach:
        """Positions of the nodes with a path to a leaf or to `goal`."""
        return self.structure.reach(None if self.goal is None else self.index.get(self.goal))

    @cached_property
    def relevant(self) -> set[Node]:
        """Nodes with a path to a leaf or to `goal`."""
        return {self.nodes[at] for at in self.reach.nodes}

    @cached_property
    def consumers(self) -> dict[Node, list[tuple[Node, int]]]:
        """For each relevant node, the (node, operand position) pairs that use its output."""
        nodes = self.nodes
        return {nodes[at]: [(nodes[user], p) for user, p in users] for at, users in self.reach.consumers.items()}

    @property
    def inner(self) -> dict[int, dict[int, Tensor]]:
        """Positions of the relevant nodes except those of leaves, with zero gradients, which take no memory, for each
        output slot that receives a gradient.
        """
        goal = None if self.goal is None else self.index.get(self.goal)
        if goal not in self.sizes.inner:
            slots = self.reach.slots
            with torch.inference_mode(False):  # they are used in graphs of other modes, too
                self.sizes.inner[goal] = {
                    at: {slot: Edge(self.nodes[at], slot).constant(0) for slot in slots[at]}
                    for at in self.reach.nodes
                    if at not in self.structure.leaves
                }
        return self.sizes.inner[goal]

    def used_slots(self, node: Node) -> tuple[int, ...]:
        """Output slots of `node` that receive a gradient."""
        return self.reach.slots[self.index[node]]

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Dtypes of all gradients."""
        return self.sizes.dtypes

    def below(self, start: Iterable[Node]) -> list[Node]:
        """The nodes `start` and all nodes they were computed from, consumers first."""
        below = set(start)
        stack = list(below)
        while stack:
            new = {child for child, _ in self.children[stack.pop()] if child is not None} - below
            below |= new
            stack.extend(new)
        return sorted(below, key=self.index.__getitem__)

    def key(self, edge: Edge) -> EdgeKey:
        """Position of an edge in this structure."""
        return self.index[edge.node], edge.slot

    def edge(self, key: EdgeKey) -> Edge:
        return Edge(self.nodes[key[0]], key[1])

    def check_losses_unchanged(self) -> None:
        if self.losses._version != self.losses_version:
            raise GraphError(
                "the losses must not be modified in place while their gradients are in use; found that they were. "
                "Write losses = losses * 2 instead of losses *= 2, or compute all quantities before the change."
            )

    def check_twice_differentiable(self) -> None:
        """Raise GraphError for a fused attention kernel between the losses and the parameters."""
        fused = [self.operations[node] for node in self.relevant if self.operations[node] in FUSED_ATTENTION]
        if fused:
            raise GraphError(
                "create_graph=True needs operations with a second derivative; found the fused attention kernel "
                f"{fused[0]}, which has none in PyTorch. Compute the losses inside "
                "`with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):`."
            )

    def check_readable(self) -> None:
        """Raise GraphError if the graph hides operations or contains none of the wanted parameters."""
        functions = [type(self.nodes[at])._forward_cls for at in self.structure.functions]
        leaves = self.structure.leaves
        hidden: dict[str, None] = {}  # names of the trained parameters of compiled functions
        for at in self.structure.functions:
            if is_compiled(self.nodes[at]):
                make_repeatable(self.nodes[at])
                operands = [child for child, _ in self.structure.records[at].operands]
                hidden.update({leaves[child]: None for child in operands if child in leaves})
        if hidden:
            raise GraphError(
                "a function compiled with torch.compile must not contain trained parameters; found "
                f"{listed(hidden)} in one, which hides how they are used. Compute the losses with the uncompiled "
                "module (model._orig_mod), or compile only functions of activations, such as an attention core."
            )
        if any(issubclass(function, CheckpointFunction) for function in functions):
            raise GraphError(
                "the graph must contain all operations; found reentrant activation checkpointing, "
                "which hides a block until it is recomputed. Call checkpoint(..., use_reentrant=False)."
            )
        if not self.leaves:
            raise GraphError(
                "the losses must depend on at least one of the parameters; found none of them in the graph: "
                f"{listed(self.wanted)}. "
                "Check that the losses were computed with this model, and not from detached or copied weights."
            )


def scalar(node: Node, name: str) -> Any:
    """Number (or tuple of numbers) that the operation saved. Undoes autograd's conversion to unsigned 64-bit."""
    return _signed(getattr(node, "_saved_" + name))


def _signed(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_signed(v) for v in value)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 2**63:
        return value - 2**64
    return value


def numel(shape: Iterable[int]) -> int:
    return math.prod(shape)
