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

    `nodes`: topological order, consumers before their operands.
    `children`: for each node, the (node, output slot) of each operand, as in `next_functions`.
    `leaves`: nodes of the `wanted` parameters, with their names.
    `relevant`: nodes with a path to a leaf or to `goal`.
    `consumers`: for each relevant node, the (node, operand position) pairs that use its output.
    """

    def __init__(self, losses: Tensor, wanted: Mapping[str, Tensor], goal: Node | None = None):
        # If the losses are a leaf tensor they have no grad_fn; a view has one.
        self.losses = losses if losses.grad_fn is not None else losses.view_as(losses)
        self._losses_version = self.losses._version
        self.samples = len(losses)
        self.root = Edge(self.losses.grad_fn, self.losses.output_nr)
        self.wanted = wanted
        self.children = _children(self.root.node)
        self.nodes = list(reversed(self.children))
        self.operations = {node: operation(node) for node in self.nodes}
        self.leaves = self._find_leaves()
        self.relevant = self._lead_to(set(self.leaves) | {goal} & set(self.nodes))
        self.consumers = self._find_consumers()
        self._slots = self._find_slots()

    def _find_leaves(self) -> dict[Node, str]:
        names = {id(p): name for name, p in self.wanted.items()}
        leaves = {}
        for node in self.nodes:
            if is_accumulate_grad(node) and id(node.variable) in names:
                leaves[node] = names[id(node.variable)]
        return leaves

    def _lead_to(self, goal: set[Node]) -> set[Node]:
        found = set(goal)
        for node in reversed(self.nodes):
            if any(child in found for child, _ in self.children[node]):
                found.add(node)
        return found

    def _find_consumers(self) -> dict[Node, list[tuple[Node, int]]]:
        """Consumers of each relevant node, with the position of the operand."""
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

    def _find_slots(self) -> dict[Node, list[int]]:
        slots: dict[Node, set[int]] = {node: set() for node in self.relevant}
        slots.setdefault(self.root.node, set()).add(self.root.slot)
        for node in self.relevant:
            for child, slot in self.children[node]:
                if child in slots:
                    slots[child].add(slot)
        return {node: sorted(used) for node, used in slots.items()}

    def dtypes(self) -> set[torch.dtype]:
        """Dtypes of all gradients between the losses and the parameters."""
        found = {self.losses.dtype}
        for node in self.relevant:
            found.update(Edge(node, slot).dtype for slot in self._slots[node])
        return found

    def below(self, start: Iterable[Node]) -> list[Node]:
        """The nodes `start` and all nodes they were computed from, consumers first."""
        found = set(start)
        stack = list(found)
        while stack:
            new = {child for child, _ in self.children[stack.pop()] if child is not None} - found
            found |= new
            stack.extend(new)
        return sorted(found, key=self.index.__getitem__)

    @cached_property
    def index(self) -> dict[Node, int]:
        """Position of each node in `nodes`."""
        return {node: i for i, node in enumerate(self.nodes)}

    @cached_property
    def fingerprint(self) -> int:
        """Hash of the graph structure: operations, their settings and connections. Shapes are not included."""
        index = self.index
        structure = []
        for node in self.nodes:
            operands = tuple((index.get(child, -1), slot) for child, slot in self.children[node])
            structure.append((_settings(node), operands))
        return hash((self.root.slot, tuple(structure)))

    def check_losses_unchanged(self) -> None:
        if self.losses._version != self._losses_version:
            raise GraphError(
                "the losses must not be modified in place while their gradients are in use; found that they were. "
                "Write losses = losses * 2 instead of losses *= 2, or compute all quantities before the change."
            )

    def check_readable(self) -> None:
        functions = [type(node)._forward_cls for node in self.nodes if is_python_function(node)]
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
                "the losses must depend on at least one of the parameters; found none of them in the graph "
                f"(searched for {', '.join(list(self.wanted)[:3])}, ...). "
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
        if "modified by an inplace operation" in str(error):
            raise GraphError(MODIFIED) from error
        if "second time" not in str(error) and "already been freed" not in str(error):
            raise
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


_setting_names: dict[type, tuple[str, ...]] = {}


def _settings(node: Node) -> tuple[object, ...]:
    """Type of a node and its saved numbers except sizes; only the name for Python functions."""
    kind = type(node)
    if kind not in _setting_names:
        if is_python_function(node):
            return (operation(node),)
        saved = [name for name in dir(node) if name.startswith("_saved_") and "_sym_" not in name]
        _setting_names[kind] = tuple(name for name in saved if not hasattr(kind, "_raw" + name))
    return (kind, *(repr(getattr(node, name)) for name in _setting_names[kind]))


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
