"""Backward passes that stop short of the parameters, so that no parameter's own gradient is computed.

`gradients_at` returns the gradients of some places of the graph; `backward_past` shows them one after the other, as the
pass comes by, and keeps none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from samplewise.engine.graph import Edge, Graph, Node

Arrived = Callable[[Node, dict[int, Tensor]], None]


def gradients_at(
    graph: Graph, edges: Sequence[Edge], weights: Tensor | None = None, create_graph: bool = False
) -> list[Tensor]:
    """One backward pass to the given places of the graph; no parameter's own gradient is computed."""
    found = torch.autograd.grad(
        graph.losses,
        [edge.gradient_edge() for edge in edges],
        grad_outputs=torch.ones_like(graph.losses) if weights is None else weights,
        retain_graph=True,
        create_graph=create_graph,
        allow_unused=True,
    )
    return [edge.zeros() if g is None else g for edge, g in zip(edges, found, strict=True)]


def backward_past(
    graph: Graph, nodes: Iterable[Node], arrived: Arrived, weights: Tensor | None = None, create_graph: bool = False
) -> None:
    """One backward pass that calls arrived(node, gradient by output) once for each of the nodes."""
    waiting = dict.fromkeys(nodes)
    ends = _ends(graph, waiting)

    def show(node: Node, gradients: Sequence[Tensor | None]) -> None:
        if node in waiting:  # a node may run again, for other reasons, before the hooks are gone
            del waiting[node]
            used = graph.used_slots(node)
            with torch.set_grad_enabled(create_graph):
                arrived(node, {s: g for s in used if s < len(gradients) and (g := gradients[s]) is not None})

    hooks = [node.register_prehook(_hook(node, show)) for node in waiting]
    edges = [Edge(node, slot) for node in ends for slot in graph.used_slots(node)]
    try:
        found = gradients_at(graph, edges, weights, create_graph)
    finally:
        for hook in hooks:
            hook.remove()
    for node in ends:
        here = {edge.slot: g for edge, g in zip(edges, found, strict=True) if edge.node is node}
        show(node, [here.get(slot) for slot in range(max(here) + 1)])


def _hook(node: Node, show: Callable[[Node, Sequence[Tensor | None]], None]) -> Callable[[Any], None]:
    return lambda gradients: show(node, gradients)


def _ends(graph: Graph, nodes: Iterable[Node]) -> list[Node]:
    """Those with no other below: autograd stops there and hands their gradient over instead of running them."""
    nodes, above = set(nodes), set[Node]()
    for node in reversed(graph.nodes):
        if node in nodes or node in above:
            above.update(consumer for consumer, _ in graph.consumers.get(node, ()))
    return [node for node in graph.nodes if node in nodes and node not in above]
