"""The autograd graph of `losses` as plain data: nodes, their consumers, and the nodes that lead to parameters."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import CheckpointFunction

from samplewise.core.text import listed
from samplewise.errors import GraphError

Node = Any  # torch.autograd.graph.Node: attributes differ per operation and are unknown to type checkers


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

    def gradient_edge(self) -> torch.autograd.graph.GradientEdge:
        return torch.autograd.graph.GradientEdge(self.node, self.slot)


def edge_of(tensor: Tensor) -> Edge:
    """Edge at which the gradient of a tensor arrives."""
    node, slot, *_ = torch.autograd.graph.get_gradient_edge(tensor)
    return Edge(node, slot)


EdgeKey = tuple[int, int]  # an edge of any graph of one structure: position of the node, output slot


FUSED_ATTENTION = {
    "ScaledDotProductFlashAttentionForCpu",
    "ScaledDotProductFlashAttention",
    "ScaledDotProductEfficientAttention",
    "ScaledDotProductCudnnAttention",
}

_operations: dict[type, str] = {}


def operation(node: Node) -> str:
    """Name of the forward operation: 'Addmm' for AddmmBackward0, "Function 'Add'" for a Python autograd.Function.

    The prefix separates Python functions, which can have any name, from the ATen operations in the tables of rules.
    """
    kind = type(node)
    if kind not in _operations:
        name = re.sub(r"Backward\d*$", "", node.name())
        if is_python_function(node):
            return f"Function {name!r}"  # not cached: a class defined inside forward is a new class in each call
        _operations[kind] = name
    return _operations[kind]


def is_python_function(node: Node) -> bool:
    """True for the node of a Python subclass of torch.autograd.Function."""
    return isinstance(node, BackwardCFunction)


def is_accumulate_grad(node: Node) -> bool:
    """True for the node of a leaf tensor, which has the tensor as `node.variable`."""
    return type(node) is _ACCUMULATE_GRAD


_ACCUMULATE_GRAD = type(torch.autograd.graph.get_gradient_edge(torch.zeros((), requires_grad=True)).node)


class Graph:
    """All nodes between the losses and the leaves.

    `nodes`: topological order, consumers before their operands; `index` is the position of each node in it.
    `children`: for each node, the (node, output slot) of each operand, as in `next_functions`.
    `leaves`: nodes of the `wanted` parameters, with their names.
    `structure`: operations, their settings and connections, and names of the leaves. Equal for graphs of the same
        operations, connected in the same way.
    `shapes`: shapes and dtypes of all outputs, in the order of `nodes`.

    The constructor reads each node once. The properties below are computed only when a structure is analyzed.
    """

    def __init__(self, losses: Tensor, wanted: Mapping[str, Tensor], goal: Node | None = None):
        # If the losses are a leaf tensor they have no grad_fn; a view has one.
        self.losses = losses if losses.grad_fn is not None else losses.view_as(losses)
        self.losses_version = self.losses._version
        self.samples = len(losses)
        self.root = Edge(self.losses.grad_fn, self.losses.output_nr)
        self.wanted = wanted
        self.goal = goal
        self.sharded = False  # parameters have values only while a pass is in their module, see `unsharded`
        self.children = _children(self.root.node)
        self.nodes = list(reversed(self.children))
        self.index = dict(zip(self.nodes, range(len(self.nodes)), strict=True))
        self.leaves: dict[Node, str] = {}
        self.python_functions: list[Node] = []
        self._read_nodes()

    def _read_nodes(self) -> None:
        """Set `structure`, `shapes`, `leaves` and `python_functions` in one loop without calls per node."""
        index = self.index
        leaf_names = dict(zip(map(id, self.wanted.values()), self.wanted, strict=True))
        structure: list[object] = [self.root.slot]
        shapes: list[object] = []
        for node in self.nodes:
            operands = self.children[node]
            kind = type(node)
            settings = _setting_names.get(kind)
            if settings is None:
                settings = _find_setting_names(node)
            if kind is _ACCUMULATE_GRAD:
                name = leaf_names.get(id(node.variable))
                structure += (kind, name)
                if name is not None:
                    self.leaves[node] = name
            elif isinstance(node, BackwardCFunction):
                self.python_functions.append(node)
                structure += (operation(node), kind._forward_cls.__module__, len(operands))
            else:
                structure += (kind, len(operands))
                for setting in settings:
                    value = getattr(node, setting)
                    structure.append(value if type(value) in _PLAIN else repr(value))
            for child, slot in operands:
                structure += (index.get(child), slot)
            for output in node._input_metadata:
                shapes += (tuple(output.shape), output.dtype)
        self.structure = tuple(structure)
        self.shapes = tuple(shapes)

    @cached_property
    def structure_hash(self) -> int:
        return hash(self.structure)

    @cached_property
    def first_sequence_number(self) -> int:
        """Sequence number of the oldest node: autograd numbers the nodes of a thread in the order of their creation."""
        return min(node._sequence_nr() for node in self.nodes)  # those of leaves have the largest number possible

    @cached_property
    def operations(self) -> dict[Node, str]:
        return {node: operation(node) for node in self.nodes}

    @cached_property
    def relevant(self) -> set[Node]:
        """Nodes with a path to a leaf or to `goal`."""
        relevant = set(self.leaves) | {self.goal} & set(self.nodes)
        for node in reversed(self.nodes):
            if any(child in relevant for child, _ in self.children[node]):
                relevant.add(node)
        return relevant

    @cached_property
    def consumers(self) -> dict[Node, list[tuple[Node, int]]]:
        """For each relevant node, the (node, operand position) pairs that use its output."""
        consumers: dict[Node, list[tuple[Node, int]]] = {node: [] for node in self.relevant}
        for node in self.nodes:
            if node in self.relevant:
                for position, (child, _) in enumerate(self.children[node]):
                    if child in self.relevant:
                        consumers[child].append((node, position))
        return consumers

    def used_slots(self, node: Node) -> list[int]:
        """Output slots of `node` that receive a gradient."""
        return self._slots[node]

    @cached_property
    def _slots(self) -> dict[Node, list[int]]:
        slots: dict[Node, set[int]] = {node: set() for node in self.relevant}
        slots.setdefault(self.root.node, set()).add(self.root.slot)
        for node in self.relevant:
            for child, slot in self.children[node]:
                if child in slots:
                    slots[child].add(slot)
        return {node: sorted(used) for node, used in slots.items()}

    def dtypes(self) -> set[torch.dtype]:
        """Dtypes of all gradients between the losses and the parameters."""
        dtypes = {self.losses.dtype}
        for node in self.relevant:
            dtypes.update(Edge(node, slot).dtype for slot in self._slots[node])
        return dtypes

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
        functions = [type(node)._forward_cls for node in self.python_functions]
        if any(function.__module__.startswith("torch._functorch.") for function in functions):
            raise GraphError(
                "the graph must consist of single operations; found a region made by torch.compile, which hides them. "
                "Compute the losses with the uncompiled module (model._orig_mod)."
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


MODIFIED = (
    "tensors saved for backward must not change before the last use of the per-sample gradients; "
    "found one modified in place after the forward pass. "
    "Compute all quantities before the input or index buffer is refilled, or pass a copy to the model."
)


@contextmanager
def graph_alive() -> Iterator[None]:
    """Convert autograd's errors about a freed graph or a saved tensor modified in place to GraphError."""
    try:
        yield
    except RuntimeError as error:
        raise_graph_error(error)
        raise


def raise_graph_error(error: RuntimeError) -> None:
    """Raise GraphError if `error` is autograd's error about a freed graph or a saved tensor modified in place."""
    if "modified by an inplace operation" in str(error):
        raise GraphError(MODIFIED) from error
    if "second time" in str(error) or "already been freed" in str(error):
        raise GraphError(
            "the graph of the losses must still hold its saved tensors; found that it was freed. "
            "Compute quantities before losses.backward(), or call backward(retain_graph=True)."
        ) from error


Children = tuple[tuple[Node | None, int], ...]


def _children(root: Node) -> dict[Node, Children]:
    """Operands of each node below `root`, in topological order, operands first.

    The search is depth-first without recursion, because graphs of long RNNs are thousands of nodes deep. Each
    `next_functions` is read once, because each read creates a new tuple.
    """
    finished: dict[Node, Children] = {}
    seen = {root}
    first = root.next_functions
    stack = [(root, first, iter(first))]
    while stack:
        node, children, remaining = stack[-1]
        for child, _ in remaining:
            if child is not None and child not in seen:
                seen.add(child)
                below = child.next_functions
                stack.append((child, below, iter(below)))
                break
        else:
            finished[node] = children
            stack.pop()
    return finished


_PLAIN = {int, bool, str, type(None)}  # types of settings that are compared as they are; others by their repr
_setting_names: dict[type, tuple[str, ...]] = {}


def _find_setting_names(node: Node) -> tuple[str, ...]:
    """Names of a node's saved numbers except sizes. Cached by type; not for Python functions, which have none."""
    kind = type(node)
    if is_python_function(node):
        return ()
    saved = [name for name in dir(node) if name.startswith("_saved_") and "_sym_" not in name]
    _setting_names[kind] = tuple(name for name in saved if not hasattr(kind, "_raw" + name))
    return _setting_names[kind]


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
