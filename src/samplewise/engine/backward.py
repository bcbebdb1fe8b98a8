"""Backward passes that stop at given nodes, before the parameters, so that no parameter gradient is computed.

`gradients_at` returns the gradients at given edges. `backward_past` passes them to a callback, node by node during the
pass, and keeps none of them; `watch_backward` does so during an ordinary pass to the parameters. `pull_back` continues
from an edge to the parameters below it. `backward_to_leaves` passes the gradients of parameters to a callback, one by
one.

A callback may return a function that returns the gradients of the node's operands. `backward_past` then does not run
the node: the pass is divided there, if possible, and its next segment starts from these gradients.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import starmap
from math import prod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward

from samplewise.engine.graph.graph import Edge, EdgeKey, Graph, Node
from samplewise.engine.graph.hook_registry import have_hooks, may_have_hooks, remove_afterwards
from samplewise.engine.graph.structure import Reach, once

OperandGradients = Callable[[], Mapping[int, Tensor] | None]  # by operand position; None if the node must be run
Receiver = Callable[[int, dict[int, Tensor]], OperandGradients | None]


class Watcher(Protocol):
    """Observer of a backward pass."""

    captures: list[tuple[Node, int]]  # edges above the ends of the pass whose gradients are read before any hook

    def start(self, edges: Sequence[tuple[Node, int]], gradients: Sequence[Tensor]) -> None:
        """Called with the gradients from which the pass, or a segment of it, starts."""

    def capture(self, gradients: Sequence[Tensor | None]) -> None:
        """Called after the pass with the gradients of `captures`."""


class Segment(NamedTuple):
    """Stops of one segment of a pass, as positions in `graph.nodes`."""

    inside: tuple[int, ...]  # stops that the segment runs
    ends: tuple[int, ...]  # stops at which it ends


class Stops(NamedTuple):
    """Nodes at which gradients are read, for all graphs of one structure. Nodes are positions in `graph.nodes`."""

    slots: dict[int, tuple[int, ...]]  # output slots that receive a gradient, by node, consumers first
    ends: frozenset[int]  # nodes with none of the others below them: autograd does not run them
    whole: Segment  # all stops
    segments: tuple[Segment, ...]  # the same stops, if the pass is divided at nodes that need not be run


def stops_at(graph: Graph, nodes: Iterable[Node], replaceable: Iterable[Node] = ()) -> Stops:
    """Return the stops of a pass that reads the gradients at `nodes`. Those of them in `replaceable` need not be run,
    because the callback returns the gradients of their operands.
    """
    key = (frozenset(map(graph.index.__getitem__, nodes)), frozenset(map(graph.index.__getitem__, replaceable)))
    return once(graph.reach.results, key, partial(_stops_at, graph.reach, *key))


def _stops_at(reach: Reach, positions: frozenset[int], replaceable: frozenset[int]) -> Stops:
    above = set[int]()
    for at in reversed(reach.nodes):
        if at in positions or at in above:
            above.update(consumer for consumer, _ in reach.consumers[at])
    slots = {at: reach.slots[at] for at in reach.nodes if at in positions}
    ends = positions - above
    whole = Segment(tuple(stop for stop in slots if stop not in ends), tuple(stop for stop in slots if stop in ends))
    skipped = above & replaceable
    segments = divide_pass(reach, slots, ends, positions | above, skipped) if skipped else (whole,)
    return Stops(slots, ends, whole, segments)


def divide_pass(
    reach: Reach, stops: Iterable[int], ends: Set[int], nodes: Set[int], skipped: Set[int]
) -> tuple[Segment, ...]:
    """Segments of a pass through `nodes` that ends at the stops in `ends`, divided at the `skipped` nodes where
    possible: all gradients that reach the next segments must come from the nodes that a segment skips.
    """
    levels, last = _levels(reach, nodes, skipped)
    inside: list[list[int]] = [[] for _ in range(last + 1)]
    outside: list[list[int]] = [[] for _ in range(last + 1)]
    for stop in stops:
        number = min(levels[stop], last)
        is_end = stop in ends or (stop in skipped and number < last)
        (outside if is_end else inside)[number].append(stop)
    return tuple(Segment(tuple(run), tuple(not_run)) for run, not_run in zip(inside, outside, strict=True))


def _levels(reach: Reach, nodes: Set[int], skipped: Set[int]) -> tuple[dict[int, int], int]:
    """Largest number of skipped nodes on a path from the losses to each node, and the number up to which levels can be
    segments: from there on, some node has gradients from several levels.
    """
    levels: dict[int, int] = {}
    last = len(skipped)
    for at in reach.nodes:
        if at in nodes:
            consumers = (consumer for consumer, _ in reach.consumers[at] if consumer in nodes)
            sources = [levels[consumer] + (consumer in skipped) for consumer in consumers]
            levels[at] = max(sources, default=0)
            if sources and min(sources) < levels[at]:
                last = min(last, min(sources))
    return levels, min(last, max(levels.values(), default=0))


# --- passes ----------------------------------------------------------------------------------------------------------

# Gradients with at most this many elements in total, and in one tensor, stay in the CPU caches: a pass may return them
# all at its end.
FITS_CACHE = 2**20
ONE_FITS_CACHE = 2**17


def gradients_at(
    graph: Graph, edges: Sequence[Edge], weights: Tensor | None = None, create_graph: bool = False
) -> list[Tensor]:
    """Gradients of the weighted losses at the given edges, from one backward pass; zeros if there is none.

    `weights` (b,) default to ones. The graph is retained. Hooks on the edges are part of the gradients.
    """
    if not may_have_hooks(graph):
        gradients = _gradients(_Roots.of(graph, weights), edges, create_graph)
        return [edge.zeros() if g is None else g for edge, g in zip(edges, gradients, strict=True)]
    # The result of a pass does not contain the changes of hooks on nodes that the pass runs; prehooks see them.
    stops = stops_at(graph, {edge.node for edge in edges})
    by_key: dict[EdgeKey, Tensor] = {}

    def receive(stop: int, by_slot: dict[int, Tensor]) -> None:
        by_key.update({(stop, slot): gradient for slot, gradient in by_slot.items()})

    _send_during(graph, stops, (stops.whole,), receive, weights, create_graph)
    return [by_key[key] if (key := graph.key(edge)) in by_key else edge.zeros() for edge in edges]


class _Roots(NamedTuple):
    """Edges from which a backward pass starts, and the gradients there."""

    edges: list[tuple[Node, int]]
    gradients: list[Tensor]

    @classmethod
    def of(cls, graph: Graph, weights: Tensor | None) -> _Roots:
        """The losses, with weights (b,) that default to ones."""
        return cls([graph.root], [torch.ones_like(graph.losses) if weights is None else weights])

    def extend(self, node: Node, gradients: Mapping[int, Tensor], of_operands: Mapping[int, Tensor] | None) -> None:
        """Add the operands of a node, or the node itself with the gradients of its outputs if `of_operands` is None."""
        if of_operands is None:
            self.edges.extend((node, slot) for slot in gradients)
            self.gradients.extend(gradients.values())
        else:
            self.edges.extend(node.next_functions[position] for position in of_operands)
            self.gradients.extend(of_operands.values())


def _gradients(roots: _Roots, edges: Sequence[tuple[Node, int]], create_graph: bool) -> tuple[Tensor | None, ...]:
    # As torch.autograd.grad, without its checks of arguments, which take microseconds: retain_graph and allow_unused
    # are True.
    gradients: tuple[Tensor | None, ...] = _engine_run_backward(
        tuple(starmap(GradientEdge, roots.edges)),
        tuple(roots.gradients),
        True,
        create_graph,
        tuple(starmap(GradientEdge, edges)),
        True,
        accumulate_grad=False,
    )
    return gradients


def backward_past(
    graph: Graph,
    stops: Stops,
    receive: Receiver,
    weights: Tensor | None = None,
    create_graph: bool = False,
    during: bool = False,
    watcher: Watcher | None = None,
) -> None:
    """Run one backward pass and call receive(position of the node, {output slot: gradient}) once for each stop.

    `weights` (b,) on the losses default to ones. Small gradients are all passed on after the pass, unless `during`;
    others during it, while they are in the CPU cache.
    """
    hooked = may_have_hooks(graph)
    captures = watcher is not None and bool(watcher.captures)
    # Segments leave out nodes, among them those with which fully_shard notices that a pass has left a module.
    divisible = len(stops.segments) > 1 and not (during or create_graph or graph.sharded or captures)
    if divisible and hooked:  # hooks of nodes that are not run would not be called
        skipped = [stop for segment in stops.segments for stop in segment.ends if stop not in stops.ends]
        divisible = not have_hooks(graph, skipped)
    if divisible:
        _send_during(graph, stops, stops.segments, receive, weights, create_graph, watcher)
        return
    # A prehook sees changes by earlier prehooks of the same node, the result of the pass does not. A hook or Python
    # function may change a gradient in place after it has passed a node.
    if not (during or hooked or graph.structure.functions):
        shapes = graph.sizes.shapes
        elements = [prod(shapes[at, slot]) for at, slots in stops.slots.items() for slot in slots]
        if sum(elements) <= FITS_CACHE and max(elements, default=0) <= ONE_FITS_CACHE:
            _send_afterwards(graph, stops, receive, weights, create_graph)
            return
    _send_during(graph, stops, (stops.whole,), receive, weights, create_graph, watcher)


def _send_afterwards(graph: Graph, stops: Stops, receive: Receiver, weights: Tensor | None, create_graph: bool) -> None:
    nodes = graph.nodes
    # The order in which autograd runs the nodes, latest first, then the ends: sums over several uses of a parameter are
    # then bit-identical to those of `_send_during`.
    order = []
    for stop in stops.slots:
        order.append((stop in stops.ends, 0 if stop in stops.ends else -nodes[stop]._sequence_nr(), stop))
    order.sort()
    edges = [(nodes[stop], slot) for _, _, stop in order for slot in stops.slots[stop]]
    gradients = iter(_gradients(_Roots.of(graph, weights), edges, create_graph))
    for is_end, _, stop in order:
        by_slot = {}
        for slot in stops.slots[stop]:
            gradient = next(gradients)
            if gradient is None and is_end:
                gradient = Edge(nodes[stop], slot).zeros()
            if gradient is not None:
                by_slot[slot] = gradient
        receive(stop, by_slot)


def _send_during(
    graph: Graph,
    stops: Stops,
    segments: Iterable[Segment],
    receive: Receiver,
    weights: Tensor | None,
    create_graph: bool,
    watcher: Watcher | None = None,
) -> None:
    viewer = _Viewer(stops, receive, create_graph)
    roots = _Roots.of(graph, weights)
    for segment in segments:
        # Prehooks show the gradients of the nodes that run; those of the ends are the result of the pass.
        edges = [Edge(graph.nodes[stop], slot) for stop in segment.ends for slot in stops.slots[stop]]
        captures = () if watcher is None else watcher.captures
        if watcher is not None:
            watcher.start(roots.edges, roots.gradients)
        with viewer.watch(graph, segment.inside):
            gradients = _gradients(roots, [*edges, *captures], create_graph)
        if watcher is not None and captures:
            watcher.capture(gradients[len(edges) :])
        # The next segment starts from the operands of the ends, or from the ends that must be run after all.
        at_ends = iter([edge.zeros() if g is None else g for edge, g in zip(edges, gradients, strict=False)])
        roots = _Roots([], [])
        for stop in segment.ends:
            by_slot = {slot: next(at_ends) for slot in stops.slots[stop]}
            of_operands = viewer.show(stop, [by_slot.get(slot) for slot in range(max(by_slot) + 1)])
            if stop not in stops.ends:
                roots.extend(graph.nodes[stop], by_slot, of_operands and of_operands())


def watch_backward(graph: Graph, stops: Stops, receive: Receiver, run: Callable[[], object]) -> bool:
    """Call run(), an ordinary backward pass through the nodes of `graph`, and receive(position of the node, {output
    slot: gradient}) for each stop in it. Returns True if the pass has reached all stops.
    """
    viewer = _Viewer(stops, receive, create_graph=False)
    with viewer.watch(graph, stops.slots), torch.enable_grad():
        run()
    return not viewer.remaining


class _Viewer:
    """Passes the gradients that a backward pass computes at each stop to a callback, once."""

    def __init__(self, stops: Stops, receive: Receiver, create_graph: bool):
        self.stops = stops
        self.receive = receive
        self.create_graph = create_graph
        self.remaining = set(stops.slots)
        self.thread = threading.get_ident()

    @contextmanager
    def watch(self, graph: Graph, hooked: Iterable[int]) -> Iterator[None]:
        """Context manager: shows the gradients of backward passes in the block at these nodes."""
        with (
            _one_pass_at_a_time(graph.losses.device),
            remove_afterwards([graph.nodes[stop].register_prehook(partial(self._hook, stop)) for stop in hooked]),
        ):
            yield

    def _hook(self, stop: int, gradients: Sequence[Tensor | None]) -> None:
        self.show(stop, gradients)  # autograd would take a returned value for other gradients

    def show(self, stop: int, gradients: Sequence[Tensor | None]) -> OperandGradients | None:
        # A node may run again before the hooks are removed: in a nested call, or in the pass of another thread. The
        # autograd engine runs CPU nodes in the thread that started the pass.
        if stop not in self.remaining:
            return None
        if threading.get_ident() != self.thread and all(g is None or g.device.type == "cpu" for g in gradients):
            return None
        self.remaining.remove(stop)
        slots = self.stops.slots[stop]
        with torch.set_grad_enabled(self.create_graph):
            return self.receive(stop, {s: g for s in slots if s < len(gradients) and (g := gradients[s]) is not None})


_device_passes = threading.Lock()


def _one_pass_at_a_time(device: torch.device) -> AbstractContextManager[object]:
    """Lock for passes on other devices: their nodes run in one thread per device, not in the caller's thread."""
    return nullcontext() if device.type == "cpu" else _device_passes


def backward_to_leaves(
    graph: Graph, names: Iterable[str], weights: Tensor, receive: Callable[[str, Tensor], None]
) -> None:
    """Run one backward pass and call receive(name, gradient) for each of these parameters, with dense gradients. Of a
    sharded model, each gradient is dropped during the pass.
    """
    leaves = {name: graph.wanted[name] for name in names}
    if not leaves:
        return

    def pass_on(name: str, gradient: Tensor) -> None:
        with torch.no_grad():
            receive(name, gradient if gradient.layout is torch.strided else gradient.to_dense())

    with _replace_with_zeros(leaves, pass_on) if graph.sharded else nullcontext():
        gradients = torch.autograd.grad(
            graph.losses, list(leaves.values()), weights, retain_graph=True, allow_unused=True
        )
    if not graph.sharded:
        for name, gradient in zip(leaves, gradients, strict=True):
            if gradient is not None:
                pass_on(name, gradient)


@contextmanager
def _replace_with_zeros(leaves: Mapping[str, Tensor], receive: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Context manager: a backward pass in the block calls receive(name, gradient), and continues with zeros, which take
    no memory, in place of the gradient. Passes of other threads are not changed.
    """
    thread = threading.get_ident()

    def show(name: str, gradient: Tensor) -> Tensor | None:
        if threading.get_ident() != thread and gradient.device.type == "cpu":
            return None
        receive(name, gradient)
        return None if gradient.layout is not torch.strided else gradient.new_zeros(()).expand(gradient.shape)

    device = next(iter(leaves.values())).device
    with (
        _one_pass_at_a_time(device),
        remove_afterwards([leaf.register_hook(partial(show, name)) for name, leaf in leaves.items()]),
    ):
        yield


def notify_ready(parameters: Iterable[Tensor], ready: Callable[[Tensor], None] | None) -> AbstractContextManager[None]:
    """Context manager: backward passes in the block call ready(p) when they have added a gradient to `p.grad`."""
    if ready is None:
        return nullcontext()
    return remove_afterwards([p.register_post_accumulate_grad_hook(ready) for p in parameters if p.requires_grad])


def pull_back(gradient: Tensor, entry: Edge, leaves: Sequence[Edge], differentiable: bool) -> list[Tensor]:
    """Pull one gradient back from `entry` to each of the leaves. Returns dense tensors; zeros if there is no path."""
    gradients: tuple[Tensor | None, ...] = torch.autograd.grad(
        [entry.gradient_edge()],
        [leaf.gradient_edge() for leaf in leaves],
        [gradient.to(entry.dtype)],
        retain_graph=True,
        create_graph=differentiable,
        allow_unused=True,
    )
    dense = []
    for leaf, of_leaf in zip(leaves, gradients, strict=True):
        if of_leaf is None:
            of_leaf = leaf.zeros()
        dense.append(of_leaf if of_leaf.layout is torch.strided else of_leaf.to_dense())
    return dense


def accumulate_sum(losses: Tensor, weights: Tensor) -> None:
    """Add Σ w × gradient to `.grad`: torch.autograd.backward(losses, weights), without its checks of arguments."""
    _engine_run_backward((losses,), (weights,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def accumulate_grad(p: Tensor, gradient: Tensor) -> None:
    """Add a gradient to `p.grad`, in place if `p.grad` exists, as autograd does."""
    if p.grad is None:
        if gradient.dtype is not p.dtype:
            gradient = gradient.to(p.dtype)
        # Later calls add in place, which an expanded tensor does not support.
        p.grad = gradient.clone() if 0 in gradient.stride() else gradient
    elif p.grad.layout is torch.strided and not p.grad.requires_grad:
        with torch.no_grad():
            p.grad.add_(gradient)
    else:
        p.grad = p.grad + gradient.to(p.dtype)


@contextmanager
def without_grads(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Context manager: `.grad` is None inside and is restored on exit, for backward passes of other code."""
    grads_before = [(p, p.grad) for p in parameters]
    for p, _ in grads_before:
        p.grad = None
    try:
        yield
    finally:
        for p, gradient in grads_before:
            p.grad = gradient
