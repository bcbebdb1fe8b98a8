"""Verification of derived ownership with extra backward passes, once per graph structure, cut and set of hooks.

`layouts` derives from shapes which sample owns each element of a gradient. To verify it, the losses are weighted by
powers of two that differ between any two samples in at least one pass. Scaling by a power of two is exact, so the sum
of absolute values over the block of a sample must be multiplied by exactly the power of that sample.

Where sums are not deterministic, as on GPUs, this holds up to rounding. There some samples have weight 0 in each pass,
and their blocks must be exactly 0: see `separation`.

Blocks that are zero or non-finite verify nothing. An edge at which fewer than two samples had a non-zero, finite block
stays *pending*, and is verified again when a later pass has a non-zero gradient there. While a gradient is zero, any
ownership is correct.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from samplewise.engine.backward import backward_past, stops_at
from samplewise.engine.graph import Edge, EdgeKey, Graph
from samplewise.engine.registered_hooks import HookState, has_hooks_of, hook_state
from samplewise.engine.separation import REPEATS, is_deterministic, rounding, switched_weights
from samplewise.engine.tags import Regular

ENOUGH = 2  # number of samples with a non-zero block that verify an edge
MOST_REMEMBERED = 10_000  # cached graph structures; the cache is cleared when it is full


@dataclass
class _Record:
    """Result of the verification of one graph structure and cut."""

    hooks: HookState  # of the graph: a new hook requires another verification
    holds: bool
    seen: dict[EdgeKey, set[int]]  # samples that had a non-zero block, by edge

    pending: set[EdgeKey] = field(init=False)  # edges at which too few samples had a non-zero block

    def __post_init__(self) -> None:
        self.pending = {edge for edge, samples in self.seen.items() if len(samples) < ENOUGH}


_records: dict[int, _Record] = {}
_generator = torch.Generator().manual_seed(0)  # separate generator: does not change the user's RNG state


def verify(graph: Graph, tags: Mapping[Edge, Regular]) -> set[Edge] | None:
    """Verify ownership, or use the cached result. Return the pending edges; None if the ownership does not hold."""
    record = _records.get(_key(graph, tags))
    if record is None or not has_hooks_of(graph, record.hooks):
        return verify_again(graph, tags)
    return _pending(graph, tags, record)


def verify_again(graph: Graph, tags: Mapping[Edge, Regular]) -> set[Edge] | None:
    """As `verify`, but always run the backward passes."""
    key = _key(graph, tags)
    hooks = hook_state(graph)
    known = _records.get(key)
    seen = dict(known.seen) if known is not None and known.holds and known.hooks == hooks else {}
    nonzero = _compare(graph, tags)
    if nonzero is None and not is_deterministic(graph):
        nonzero = _compare(graph, tags, repeats=max(REPEATS))
    for edge in tags:
        seen[graph.key(edge)] = seen.get(graph.key(edge), set()) | (nonzero or {}).get(edge, set())
    if len(_records) >= MOST_REMEMBERED:
        _records.clear()
    _records[key] = record = _Record(hooks, nonzero is not None, seen)
    return _pending(graph, tags, record)


def _pending(graph: Graph, tags: Mapping[Edge, Regular], record: _Record) -> set[Edge] | None:
    if not record.holds:
        return None
    if not record.pending:
        return set()
    return {edge for edge in tags if graph.key(edge) in record.pending}


def _key(graph: Graph, tags: Mapping[Edge, Regular]) -> int:
    return hash((graph.structure.hash, tuple(map(graph.key, tags))))


def _compare(graph: Graph, tags: Mapping[Edge, Regular], repeats: int = min(REPEATS)) -> dict[Edge, set[int]] | None:
    """Up to ENOUGH samples with a non-zero, finite block at each edge; None if a block belongs to another sample."""
    plain = _block_sums(graph, tags, torch.ones_like(graph.losses))
    tolerances = _tolerances(graph, tags, plain, repeats)
    nonzero = {edge: sums.isfinite() & (sums > _tiny(edge)) for edge, sums in plain.items()}
    for powers in _distinct_powers(graph) if is_deterministic(graph) else switched_weights(graph):
        coded = _block_sums(graph, tags, powers.to(graph.losses.dtype))
        for edge, sums in plain.items():
            scaled = coded.get(edge, torch.zeros_like(sums))
            finite = sums.isfinite() & scaled.isfinite()
            near = (scaled - sums * powers).abs() <= _tiny(edge) + tolerances[edge] * powers
            if not (near | ~finite).all():
                return None
            nonzero[edge] &= finite
    return {edge: set(samples.nonzero().flatten()[:ENOUGH].tolist()) for edge, samples in nonzero.items()}


def _tolerances(
    graph: Graph, tags: Mapping[Edge, Regular], plain: dict[Edge, Tensor], repeats: int
) -> dict[Edge, Tensor]:
    """Tolerance of each block sum. On the CPU scaling is exact except for denormals, common only in float16."""
    if is_deterministic(graph):
        return {edge: sums * (1e-2 if edge.dtype is torch.float16 else 1e-6) for edge, sums in plain.items()}
    again = [_block_sums(graph, tags, torch.ones_like(graph.losses)) for _ in range(repeats)]
    return {edge: rounding(graph, sums, [a.get(edge, sums) - sums for a in again]) for edge, sums in plain.items()}


def _tiny(edge: Edge) -> float:
    """Absolute tolerance: sums of denormals."""
    return torch.finfo(edge.dtype).tiny * 2**8


def _distinct_powers(graph: Graph) -> Iterator[Tensor]:
    """Yield weights (b,) for each pass. Any two samples have different powers of two in at least one pass."""
    base = 8 if torch.float16 in graph.dtypes() else 16
    numbers = torch.randperm(graph.samples, generator=_generator)
    for digit in range(max(1, math.ceil(math.log(graph.samples, base) - 1e-12))):
        exponents = numbers // base**digit % base
        yield torch.tensor([2.0**e for e in exponents.tolist()], dtype=torch.float64, device=graph.losses.device)


def _block_sums(graph: Graph, tags: Mapping[Edge, Regular], weights: Tensor) -> dict[Edge, Tensor]:
    """Sum of absolute values over the block of each sample, (b,) in float64, for each edge that gets a gradient."""
    sums: dict[Edge, Tensor] = {}

    def arrived(stop: int, gradients: dict[int, Tensor]) -> None:
        for slot, gradient in gradients.items():
            edge = graph.edge((stop, slot))
            if edge in tags:
                blocks = gradient.detach().abs().reshape(-1, graph.samples, tags[edge].inner)
                sums[edge] = blocks.sum((0, 2), dtype=torch.float64)

    backward_past(graph, stops_at(graph, [edge.node for edge in tags]), arrived, weights)
    return sums
