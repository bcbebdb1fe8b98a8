"""Backward passes that stop at given nodes, before the parameters, so that no parameter gradient is computed.

`gradients_at` returns the gradients at given edges. `backward_past` passes them to a callback, node by node during the
pass, and keeps none of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from samplewise.engine.graph import Edge, Graph, Node

Arrived = Callable[[Node, dict[int, Tensor]], None]


_own_hooks = 0


def foreign_hooks() -> int:
    """Number of hooks registered in this process so far on tensors, nodes and modules, except by this module."""
    return RemovableHandle.next_id - _own_hooks


def gradients_at(
    graph: Graph, edges: Sequence[Edge], weights: Tensor | None = None, create_graph: bool = False
) -> list[Tensor]:
    """Gradients of the weighted losses at the given edges, from one backward pass; zeros if there is none.

    `weights` (b,) default to ones. The graph is retained.
    """
    found = torch.autograd.grad(
        [graph.root.gradient_edge()],
        [edge.gradient_edge() for edge in edges],
        grad_outputs=[torch.ones_like(graph.losses) if weights is None else weights],
        retain_graph=True,
        create_graph=create_graph,
        allow_unused=True,
    )
    return [edge.zeros() if g is None else g for edge, g in zip(edges, found, strict=True)]


def backward_past(
    graph: Graph, nodes: Iterable[Node], arrived: Arrived, weights: Tensor | None = None, create_graph: bool = False
) -> None:
    """Run one backward pass and call arrived(node, {output slot: gradient}) once for each of the nodes.

    `weights` (b,) on the losses default to ones.
    """
    waiting = dict.fromkeys(nodes)
    ends = _ends(graph, waiting)
    thread = threading.get_ident()

    def show(node: Node, gradients: Sequence[Tensor | None]) -> None:
        # A node may run again before the hooks are removed: in a nested call, or in the pass of another thread. The
        # autograd engine runs CPU nodes in the thread that started the pass.
        if node in waiting and (threading.get_ident() == thread or not _on_cpu(gradients)):
            del waiting[node]
            used = graph.used_slots(node)
            with torch.set_grad_enabled(create_graph):
                arrived(node, {s: g for s in used if s < len(gradients) and (g := gradients[s]) is not None})

    edges = [Edge(node, slot) for node in ends for slot in graph.used_slots(node)]
    with _one_pass_at_a_time(graph.losses.device), _prehooks(waiting, show):
        found = gradients_at(graph, edges, weights, create_graph)
    by_node: dict[Node, dict[int, Tensor]] = {node: {} for node in ends}
    for edge, gradient in zip(edges, found, strict=True):
        by_node[edge.node][edge.slot] = gradient
    for node, here in by_node.items():
        show(node, [here.get(slot) for slot in range(max(here) + 1)])


_device_passes = threading.Lock()


def _one_pass_at_a_time(device: torch.device) -> AbstractContextManager[object]:
    """Lock for passes on other devices: their nodes run in one thread per device, not in the caller's thread."""
    return nullcontext() if device.type == "cpu" else _device_passes


def _on_cpu(gradients: Sequence[Tensor | None]) -> bool:
    return all(g is None or g.device.type == "cpu" for g in gradients)


@contextmanager
def _prehooks(nodes: Iterable[Node], show: Callable[[Node, Sequence[Tensor | None]], None]) -> Iterator[None]:
    global _own_hooks
    handles = [node.register_prehook(partial(show, node)) for node in nodes]
    _own_hooks += len(handles)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _ends(graph: Graph, nodes: Iterable[Node]) -> list[Node]:
    """Nodes with none of the others below them. Autograd returns their gradient without running them."""
    nodes = set(nodes)
    above = set[Node]()
    for node in reversed(graph.nodes):
        if node in nodes or node in above:
            above.update(consumer for consumer, _ in graph.consumers.get(node, ()))
    return [node for node in graph.nodes if node in nodes and node not in above]
