"""Division of a backward pass into parts, at nodes that need not be run because a rule gives the gradients of their
operands. The next part starts from these gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import NamedTuple

from samplewise.engine.graph.structure import Reach


class Segment(NamedTuple):
    """Stops of one part of a pass, as positions in `graph.nodes`."""

    inside: tuple[int, ...]  # stops that the part runs
    ends: tuple[int, ...]  # stops at which it ends


def divide_pass(
    reach: Reach, stops: Iterable[int], ends: Set[int], nodes: Set[int], skipped: Set[int]
) -> tuple[Segment, ...]:
    """Parts of a pass through `nodes` that ends at the stops in `ends`, divided at the `skipped` nodes where possible:
    all gradients that reach the next parts must come from the nodes that a part skips.
    """
    levels, last = _levels(reach, nodes, skipped)
    inside: list[list[int]] = [[] for _ in range(last + 1)]
    outside: list[list[int]] = [[] for _ in range(last + 1)]
    for stop in stops:
        part = min(levels[stop], last)
        is_end = stop in ends or (stop in skipped and part < last)
        (outside if is_end else inside)[part].append(stop)
    return tuple(Segment(tuple(run), tuple(not_run)) for run, not_run in zip(inside, outside, strict=True))


def _levels(reach: Reach, nodes: Set[int], skipped: Set[int]) -> tuple[dict[int, int], int]:
    """Largest number of skipped nodes on a path from the losses to each node, and the number up to which levels can be
    parts: from there on, some node has gradients from several levels.
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
