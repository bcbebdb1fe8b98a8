"""Division of a backward pass into parts, at nodes that need not be run because a rule gives the gradients of their
operands. The next part starts from these gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set
from typing import NamedTuple

from samplewise.engine.graph import Graph, Node


class Part(NamedTuple):
    """Stops of one part of a pass, as positions in `graph.nodes`."""

    inside: tuple[int, ...]  # stops that the part runs
    ends: tuple[int, ...]  # stops at which it ends


def divided(
    graph: Graph, stops: Collection[int], ends: Set[int], nodes: Set[Node], skipped: Iterable[Node]
) -> tuple[Part, ...]:
    """Parts of a pass through `nodes` that ends at the stops in `ends`, divided at the `skipped` nodes where possible:
    gradients must reach the nodes below those that a part skips through these alone.
    """
    parts = []
    rest = set(nodes)
    left = list(skipped)
    while left:
        first = _without_others_above(graph, left)
        lower = (set(graph.below(first)) & rest) - first
        upper = rest - lower
        if any(consumer in upper - first for node in lower for consumer, _ in graph.consumers[node]):
            break
        parts.append(_part(graph, stops, ends | {graph.index[node] for node in first}, upper))
        rest = lower
        left = [node for node in left if node in lower]
    parts.append(_part(graph, stops, ends, rest))
    return tuple(parts)


def _without_others_above(graph: Graph, nodes: Iterable[Node]) -> set[Node]:
    """Those of the nodes that are not below another one."""
    chosen = set(nodes)
    lower = set[Node]()
    for node in chosen:
        lower.update(set(graph.below([node])) - {node})
    return chosen - lower


def _part(graph: Graph, stops: Collection[int], ends: Set[int], nodes: Set[Node]) -> Part:
    here = [stop for stop in stops if graph.nodes[stop] in nodes]
    return Part(tuple(stop for stop in here if stop not in ends), tuple(stop for stop in here if stop in ends))
