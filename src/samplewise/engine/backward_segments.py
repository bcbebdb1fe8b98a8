"""Stops of a backward pass: the nodes at which gradients are read, and division of the pass into segments.

A pass is divided at nodes that need not be run because a rule gives the gradients of their operands: the next segment
starts from these gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from functools import partial
from typing import NamedTuple

from samplewise.engine.graph.graph import Graph, Node
from samplewise.engine.graph.structure import Reach, once


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
