"""Verification of derived ownership with extra backward passes, once per graph structure and derivation.

`layouts` derives from shapes which sample owns each element of a gradient. To verify it, the losses are weighted by
powers of two that differ between any two samples in at least one pass. Scaling by a power of two is exact, so the sum
of absolute values over the block of a sample must be multiplied by exactly the power of that sample.

Where sums are not deterministic, as on GPUs, this holds up to rounding. There some samples have weight 0 in each pass,
and their blocks must be exactly 0: see `weighted_passes`.

Blocks that are zero or non-finite verify nothing. An edge at which fewer than two samples had a non-zero, finite block
stays *pending*, and is verified again when a later pass has a non-zero gradient there. While a gradient is zero, any
ownership is correct.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from samplewise.engine.backward import Stops, backward_past, gradients_at, stops_at
from samplewise.engine.graph.graph import Edge, EdgeKey, Graph, numel
from samplewise.engine.graph.hook_registry import hook_places, may_have_hooks
from samplewise.engine.ownership.owner_map import OwnerMap
from samplewise.engine.ownership.weighted_passes import (
    REPEATS,
    WIDE,
    check_linear,
    distinct_powers,
    is_deterministic,
    is_float16,
    rounding,
    switched_weights,
    switches,
)

ENOUGH = 2  # number of samples with a non-zero block that verify an edge
FEW = 32  # up to this number of samples, each is seen alone where the first hooks of a graph structure are verified
MOST_REMEMBERED = 10_000  # cached graph structures; the cache is cleared when it is full


@dataclass
class _Record:
    """Result of the verification of one graph structure and derivation."""

    holds: bool
    nonzero: dict[EdgeKey, set[int]]  # samples that had a non-zero block, by edge

    hooked: set[object] = field(default_factory=set)  # places with hooks that were verified by passes of single samples
    pending: set[EdgeKey] = field(init=False)  # edges at which too few samples had a non-zero block

    def __post_init__(self) -> None:
        self.pending = {edge for edge, samples in self.nonzero.items() if len(samples) < ENOUGH}


_records: dict[int, _Record] = {}


def verify(graph: Graph, owner_maps: Mapping[Edge, OwnerMap], derivation: int) -> set[Edge] | None:
    """Verify ownership, or use the cached result of graphs of this structure in which it was derived in the same way,
    with these or other sizes. Return the pending edges; None if the ownership does not hold.
    """
    record = _records.get(_key(graph, owner_maps, derivation))
    if record is None:
        return verify_again(graph, owner_maps, derivation)
    return _pending(graph, owner_maps, record)


def verify_again(graph: Graph, owner_maps: Mapping[Edge, OwnerMap], derivation: int) -> set[Edge] | None:
    """As `verify`, but always run the backward passes."""
    key = _key(graph, owner_maps, derivation)
    former = _records.get(key)
    samples = dict(former.nonzero) if former is not None and former.holds else {}
    # Of no elements, any ownership holds.
    nonempty = {edge: owner_map for edge, owner_map in owner_maps.items() if numel(edge.shape)}
    nonzero = _compare(graph, nonempty)
    if nonzero is None and not is_deterministic(graph):
        nonzero = _compare(graph, nonempty, repeats=max(REPEATS))
    for edge in nonempty:
        samples[graph.key(edge)] = samples.get(graph.key(edge), set()) | (nonzero or {}).get(edge, set())
    record = _Record(nonzero is not None, samples)
    if record.holds or not may_have_hooks(graph):  # a hook that mixes samples says nothing about other graphs
        if len(_records) >= MOST_REMEMBERED:
            _records.clear()
        _records[key] = record
    return _pending(graph, owner_maps, record)


def follows_weights(
    graph: Graph,
    stops: Stops,
    owner_maps: Mapping[Edge, OwnerMap],
    derivation: int,
    plain: Mapping[Edge, Tensor] | None = None,
) -> bool:
    """True if the ownership holds in one more pass with weights; `plain`: sums of absolute values of each sample in the
    pass without weights, if there was one. In each graph with hooks: they may do something else than before.
    """
    if plain is None:
        plain = _block_sums(graph, owner_maps, torch.ones_like(graph.losses), stops)
    record = _records.get(_key(graph, owner_maps, derivation))
    keys = _hook_keys(graph)
    if record is None or not keys <= record.hooked:
        # A hook that compares samples may do the same to them with all weights. Once per structure: this is slow.
        nonempty = {edge: owner_maps[edge] for edge in plain if numel(edge.shape)}
        if _compare(graph, nonempty, max(REPEATS), few_at_a_time=True) is None:
            return False
        if record is not None:
            record.hooked |= keys
    if not is_deterministic(graph):  # differences between passes count as rounding there
        check_linear(graph, list(owner_maps), gradients_at(graph, list(owner_maps)))
    if is_float16(graph) or not is_deterministic(graph):  # these need several passes
        return verify_again(graph, owner_maps, derivation) is not None
    (powers,) = distinct_powers(graph, _relative_sizes(graph, plain), base=WIDE, digits=1)
    coded = _block_sums(graph, owner_maps, powers.to(graph.losses.dtype), stops)
    sums = torch.stack(list(plain.values()))
    weighted_sums = _stack_sums(coded, plain)
    tiny = sums.new_tensor([_tiny(graph, edge) for edge in plain])[:, None]
    relative = sums.new_tensor([_relative(edge) for edge in plain])[:, None]
    near = (weighted_sums - sums * powers).abs() <= tiny + relative * sums * powers
    return bool((near | ~(sums.isfinite() & weighted_sums.isfinite())).all())


def has_verified_hooks(graph: Graph, owner_maps: Mapping[Edge, OwnerMap], derivation: int) -> bool:
    """True if `follows_weights` was True for an earlier graph with hooks at the same places."""
    record = _records.get(_key(graph, owner_maps, derivation))
    return record is not None and _hook_keys(graph) <= record.hooked


def _hook_keys(graph: Graph) -> frozenset[object]:
    places = hook_places(graph)
    return places.keys if places is not None and places.keys else frozenset([None])  # None: anywhere


def _pending(graph: Graph, owner_maps: Mapping[Edge, OwnerMap], record: _Record) -> set[Edge] | None:
    if not record.holds:
        return None
    if not record.pending:
        return set()
    return {edge for edge in owner_maps if graph.key(edge) in record.pending}


def _key(graph: Graph, owner_maps: Mapping[Edge, OwnerMap], derivation: int) -> int:
    return hash((graph.structure.hash, derivation, tuple(map(graph.key, owner_maps))))


def _compare(
    graph: Graph, owner_maps: Mapping[Edge, OwnerMap], repeats: int = min(REPEATS), few_at_a_time: bool = False
) -> dict[Edge, set[int]] | None:
    """Up to ENOUGH samples with a non-zero, finite block at each edge; None if a block belongs to another sample.

    few_at_a_time: with passes of one sample each, or of half of the samples if they are many.
    """
    if not owner_maps:
        return {}
    plain = _block_sums(graph, owner_maps, torch.ones_like(graph.losses))
    if not plain:
        return {}
    tolerances = torch.stack(list(_tolerances(graph, owner_maps, plain, repeats).values()))
    sums = torch.stack(list(plain.values()))
    tiny = sums.new_tensor([_tiny(graph, edge) for edge in plain])[:, None]
    nonzero = sums.isfinite() & (sums > tiny)
    passes: Iterable[Tensor]
    if few_at_a_time:
        masks = torch.eye(graph.samples).double() if graph.samples <= FEW else switches(graph.samples)
        passes = (mask.to(graph.losses.device) for mask in masks)
    else:
        sizes = _relative_sizes(graph, plain)
        passes = distinct_powers(graph, sizes) if is_deterministic(graph) else switched_weights(graph)
    for powers in passes:
        weighted_sums = _stack_sums(_block_sums(graph, owner_maps, powers.to(graph.losses.dtype)), plain)
        finite = sums.isfinite() & weighted_sums.isfinite()
        near = (weighted_sums - sums * powers).abs() <= tiny + tolerances * powers
        if not (near | ~finite).all():
            return None
        nonzero &= finite
    samples = torch.arange(graph.samples)
    return {edge: set(samples[of_edge][:ENOUGH].tolist()) for edge, of_edge in zip(plain, nonzero.cpu(), strict=True)}


def _stack_sums(sums: Mapping[Edge, Tensor], edges: Mapping[Edge, Tensor]) -> Tensor:
    """Sums (edges, b); zeros at edges without gradient."""
    zeros = torch.zeros_like(next(iter(edges.values())))
    return torch.stack([sums.get(edge, zeros) for edge in edges])


def _relative_sizes(graph: Graph, plain: Mapping[Edge, Tensor]) -> Tensor:
    """Size of the gradients of each sample, relative to that of the largest one at each edge, (b,)."""
    sums = torch.stack(list(plain.values()))
    return (sums / sums.amax(1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)).sum(0)


def _relative(edge: Edge) -> float:
    """Relative tolerance of a sum on the CPU, where scaling is exact except for denormals."""
    return 1e-12 if edge.dtype in (torch.float64, torch.complex128) else 1e-6


def _tolerances(
    graph: Graph, owner_maps: Mapping[Edge, OwnerMap], plain: dict[Edge, Tensor], repeats: int
) -> dict[Edge, Tensor]:
    """Tolerance of each block sum."""
    if is_deterministic(graph):
        return {edge: sums * _relative(edge) for edge, sums in plain.items()}
    repeated = [_block_sums(graph, owner_maps, torch.ones_like(graph.losses)) for _ in range(repeats)]
    return {edge: rounding(graph, sums, [r.get(edge, sums) - sums for r in repeated]) for edge, sums in plain.items()}


def _tiny(graph: Graph, edge: Edge) -> float:
    """Absolute tolerance: sums of denormals. None in float16, where they are large and weights are 0 and 1."""
    return 0.0 if is_float16(graph) and is_deterministic(graph) else torch.finfo(edge.dtype).tiny * 2**8


def _block_sums(
    graph: Graph, owner_maps: Mapping[Edge, OwnerMap], weights: Tensor, stops: Stops | None = None
) -> dict[Edge, Tensor]:
    """Sum of absolute values over the block of each sample, (b,) in float64, for each edge that gets a gradient."""
    sums: dict[Edge, Tensor] = {}

    def receive(stop: int, gradients: dict[int, Tensor]) -> None:
        for slot, gradient in gradients.items():
            edge = graph.edge((stop, slot))
            if edge in owner_maps:
                sums[edge] = owner_maps[edge].sizes(gradient.detach())

    backward_past(graph, stops or stops_at(graph, [edge.node for edge in owner_maps]), receive, weights)
    return sums
