"""The autograd graph behind `losses`, as plain data: nodes, who consumes whom, which lead to which parameter."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samplewise.errors import GraphError

Node = Any  # torch.autograd.graph.Node: its attributes are made per operation, so no type checker knows them


class Edge(NamedTuple):
    """The output `slot` of the forward operation behind `node`; a gradient arrives there in the backward pass."""

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


_operations: dict[str, str] = {}


def operation(node: Node) -> str:
    """The forward operation's name: 'Addmm' for AddmmBackward0."""
    name = node.name()
    if name not in _operations:
        _operations[name] = re.sub(r"Backward\d*$", "", name)
    return _operations[name]


class Graph:
    """Every node between the losses and the leaves; in `nodes` consumers stand before what they consume."""

    def __init__(self, losses: Tensor, wanted: Mapping[str, Tensor], goal: Node | None = None):
        # A leaf handed over as losses has no node of its own: a view gives it one.
        self.losses = losses if losses.grad_fn is not None else losses.view_as(losses)
        self.samples = len(losses)
        self.root = Edge(self.losses.grad_fn, self.losses.output_nr)
        self.wanted = wanted
        self.nodes = _consumers_first(self.root.node)
        self.operations = {node: operation(node) for node in self.nodes}
        self.leaves = self._find_leaves()
        self.relevant = self._lead_to(set(self.leaves) | {goal} & set(self.nodes))
        self.consumers = self._find_consumers()
        self._slots = self._find_slots()

    def _find_leaves(self) -> dict[Node, str]:
        names = {id(p): name for name, p in self.wanted.items()}
        leaves = {}
        for node in self.nodes:
            if not node.next_functions and hasattr(node, "variable") and id(node.variable) in names:
                leaves[node] = names[id(node.variable)]
        return leaves

    def _lead_to(self, goal: set[Node]) -> set[Node]:
        found = set(goal)
        for node in reversed(self.nodes):
            if any(child in found for child, _ in node.next_functions):
                found.add(node)
        return found

    def _find_consumers(self) -> dict[Node, list[tuple[Node, int]]]:
        """For each relevant node: the nodes that use its result, with the position of the operand."""
        consumers: dict[Node, list[tuple[Node, int]]] = {node: [] for node in self.relevant}
        for node in self.nodes:
            if node in self.relevant:
                for position, (child, _) in enumerate(node.next_functions):
                    if child in self.relevant:
                        consumers[child].append((node, position))
        return consumers

    def used_slots(self, node: Node) -> list[int]:
        """The outputs of `node` into which a gradient flows."""
        return self._slots[node]

    def _find_slots(self) -> dict[Node, list[int]]:
        slots: dict[Node, set[int]] = {node: set() for node in self.relevant}
        slots.setdefault(self.root.node, set()).add(self.root.slot)
        for node in self.relevant:
            for child, slot in node.next_functions:
                if child in slots:
                    slots[child].add(slot)
        return {node: sorted(used) for node, used in slots.items()}

    def below(self, start: Iterable[Node]) -> list[Node]:
        """`start` and everything it was computed from, consumers first."""
        found = set(start)
        for node in self.nodes:
            if node in found:
                found.update(child for child, _ in node.next_functions if child is not None)
        return [node for node in self.nodes if node in found]

    def fingerprint(self) -> int:
        """Equal for graphs of the same operations and settings, wired in the same way, whatever their shapes."""
        index = {node: i for i, node in enumerate(self.nodes)}
        wiring = tuple((_settings(n), tuple((index.get(c, -1), k) for c, k in n.next_functions)) for n in self.nodes)
        return hash((self.root.slot, wiring))

    def check_readable(self) -> None:
        if any(name.startswith("CompiledFunction") for name in self.operations.values()):
            raise GraphError(
                "the graph must consist of visible operations; found a region made by torch.compile, which is opaque. "
                "Compute the losses with the uncompiled module (model._orig_mod)."
            )
        if "CheckpointFunction" in self.operations.values():
            raise GraphError(
                "the graph must be visible as a whole; found reentrant activation checkpointing, "
                "which hides a block until it is recomputed. Call checkpoint(..., use_reentrant=False)."
            )
        if not self.leaves:
            raise GraphError(
                "the losses must reach at least one of the parameters; found none of them in the graph "
                f"(looked for {', '.join(list(self.wanted)[:3])}, ...). "
                "Check that the losses were computed with this model, and not from detached or copied weights."
            )


@contextmanager
def graph_alive() -> Iterator[None]:
    """Says in plain words that the graph was freed, wherever autograd notices it."""
    try:
        yield
    except RuntimeError as error:
        if "second time" not in str(error) and "already been freed" not in str(error):
            raise
        raise GraphError(
            "the graph of the losses must still hold what was saved for backward; found it freed. "
            "Ask for quantities before losses.backward(), or call backward(retain_graph=True)."
        ) from error


def _consumers_first(root: Node) -> list[Node]:
    """Depth-first, without recursion: graphs of long RNNs are thousands of nodes deep."""
    finished: list[Node] = []
    seen = {root}
    stack = [(root, iter(root.next_functions))]
    while stack:
        node, children = stack[-1]
        for child, _ in children:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append((child, iter(child.next_functions)))
                break
        else:
            finished.append(node)
            stack.pop()
    return finished[::-1]


_setting_names: dict[str, tuple[str, ...]] = {}


def _settings(node: Node) -> tuple[object, ...]:
    """The operation and the numbers it saved, sizes left out."""
    kind = node.name()
    if kind not in _setting_names:
        saved = [name for name in dir(node) if name.startswith("_saved_") and "_sym_" not in name]
        _setting_names[kind] = tuple(name for name in saved if not hasattr(type(node), "_raw" + name))
    return (kind, *(repr(getattr(node, name)) for name in _setting_names[kind]))


def scalar(node: Node, name: str) -> Any:
    """A number the operation saved. Autograd hands negative ones back as unsigned 64-bit: undo that."""
    return _signed(getattr(node, "_saved_" + name))


def _signed(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_signed(v) for v in value)
    return value - 2**64 if isinstance(value, int) and not isinstance(value, bool) and value >= 2**63 else value


def numel(shape: Iterable[int]) -> int:
    return math.prod(shape)
