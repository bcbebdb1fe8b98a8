"""Probe: find the sample that owns each element of a gradient with weighted backward passes.

A backward pass is linear in the weights on the losses, and scaling by a power of two is exact in floating point. One
pass runs with equal weights and one with weights 2**code(sample): an element that belongs to one sample is multiplied
by exactly 2**code of that sample, so the ratio of the two passes gives the owner. If there are more samples than codes,
the sample's number is split into digits, with one pass per digit. Each probe draws new numbers: a mixture whose
weights happen to fit one numbering does not fit the next.

An element shared by several samples can look like the element of one sample if the contributions of the others are
lost to rounding. Two further kinds of passes detect this, with new codes in each probe:

    balanced    weights that bring the gradients of all samples to about the same magnitude, as far as it is known
    switched    weight 1 for the samples that own nothing at an edge and 0 for the others, so that no rounding can hide
                a contribution; if a sample is large at one edge and small at another, so that no single weight balances
                both, then for any two samples there is a pass with the first at 0 and the second at 1

Where sums are not deterministic, as on GPUs, ratios have rounding errors, and elements in which terms cancel consist of
them. There the owner is found with switched passes only: an element belongs to a sample if it is non-zero in exactly
the passes in which that sample is on. One pass with random powers of two then shows that the backward pass is linear.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from samplewise.engine.backward import gradients_at
from samplewise.engine.graph import Edge, Graph
from samplewise.engine.separation import (
    REPEATS,
    is_deterministic,
    passes_needed,
    passes_of_samples,
    random_powers,
    rounding,
    switched_weights,
)
from samplewise.errors import NonFiniteGradientError

NO_OWNER, UNKNOWN, MIXED = -1, -2, -3
BALANCED_PASSES = 2  # a mixture that poses as one sample passes each of them with a chance of about 1 in 16


class Codes(NamedTuple):
    """Weights 2**(shift + code), 0 <= code < base."""

    shift: int
    base: int


# Wide codes first; narrow codes are for gradients so large that wide codes overflow.
# float16 has exponents from -14 to 15 only; bfloat16 has the range of float32.
_FLOAT64_CODES = [Codes(300, 500), Codes(0, 64)]
_FLOAT32_CODES = [Codes(40, 61), Codes(0, 16), Codes(-30, 16)]
_FLOAT16_CODES = [Codes(0, 8), Codes(-4, 4)]


class Probed(NamedTuple):
    """Result of a probe, one tensor per edge."""

    gradients: list[Tensor]  # gradients of losses.sum()
    owners: list[Tensor]  # sample numbers, same shapes; NO_OWNER: zero, UNKNOWN: too small to decide, MIXED: shared


def probe(graph: Graph, edges: Sequence[Edge]) -> Probed:
    """Return gradients and owners at the edges. Raises NonFiniteGradientError if gradients are not finite."""
    for codes in _codes_for(graph):
        probed = _probe_with(graph, edges, codes) if is_deterministic(graph) else _switch(graph, edges, codes)
        if probed is not None:
            return probed
    raise NonFiniteGradientError(_non_finite_message(graph, edges))


def _codes_for(graph: Graph) -> list[Codes]:
    """Codes that fit the narrowest floating-point type of any gradient in the graph."""
    dtypes = graph.dtypes()
    if torch.float16 in dtypes:
        return _FLOAT16_CODES
    return _FLOAT64_CODES if dtypes <= {torch.float64, torch.complex128} else _FLOAT32_CODES


def _probe_with(graph: Graph, edges: Sequence[Edge], codes: Codes) -> Probed | None:
    """Probe with one set of codes; None if gradients are not finite with them."""
    samples = torch.randperm(graph.samples, generator=_generator).to(graph.losses.device)  # sample of each number
    numbers = samples.argsort()
    equal = _weights(graph, codes, torch.zeros_like(numbers))
    plain = gradients_at(graph, edges, equal)
    digits = max(1, math.ceil(math.log(graph.samples, codes.base) - 1e-12))
    owners = [torch.zeros(g.shape, dtype=torch.long, device=g.device) for g in plain]
    scale = 1
    for _ in range(digits):
        coded = gradients_at(graph, edges, _weights(graph, codes, numbers // scale % codes.base))
        if not _finite(plain) or not _finite(coded):
            return None
        owners = [_add_digit(o, p, c, scale, codes) for o, p, c in zip(owners, plain, coded, strict=True)]
        scale *= codes.base
    owners = [torch.where((o >= 0) & (o < len(samples)), samples[o.clamp(0, len(samples) - 1)], o) for o in owners]
    sizes = torch.stack([_sizes(o, p, graph.samples) for o, p in zip(owners, plain, strict=True)])
    for _ in range(BALANCED_PASSES):
        balanced = _balanced(sizes, codes)
        checked = gradients_at(graph, edges, _weights(graph, codes, balanced))
        if not _finite(checked):
            return None
        owners = [_verified(o, p, c, balanced, codes) for o, p, c in zip(owners, plain, checked, strict=True)]
    for on in _switches(sizes):
        switched = gradients_at(graph, edges, equal * on)
        owners = [_switched(o, p, k, on) for o, p, k in zip(owners, plain, switched, strict=True)]
    return Probed([_scaled(p, -codes.shift) for p in plain], owners)


def _sizes(owner: Tensor, plain: Tensor, samples: int) -> Tensor:
    """Largest absolute element of each sample relative to the largest of all, (b,) in float64."""
    largest = torch.zeros(samples + 1, dtype=torch.float64, device=owner.device)
    index = torch.where((owner >= 0) & (owner < samples), owner, samples).flatten()
    largest.scatter_reduce_(0, index, plain.abs().double().flatten(), "amax")
    return largest[:samples] / largest.amax(0).clamp_min(torch.finfo(torch.float64).tiny)


_generator = torch.Generator().manual_seed(0)  # separate generator: does not change the user's RNG state


def _balanced(sizes: Tensor, codes: Codes) -> Tensor:
    """Codes (b,) that cancel the magnitudes `sizes` (edges, b) of the samples, plus a random number from 0 to 3."""
    largest = sizes.amax(0)
    exponents = -torch.frexp(torch.where(largest > 0, largest, 2.0**-codes.base)).exponent.long()
    jitter = torch.randint(4, (sizes.shape[1],), generator=_generator).to(sizes.device)
    return (exponents + jitter).clamp(0, codes.base - 1)


def _weights(graph: Graph, codes: Codes, code: Tensor) -> Tensor:
    return _powers(codes, code.device)[code].mul(2.0**codes.shift).to(graph.losses.dtype)


def _powers(codes: Codes, device: torch.device) -> Tensor:
    """Exact powers 2**0 .. 2**(base - 1) in float64; torch.ldexp and torch.pow may round."""
    return torch.tensor([2.0**k for k in range(codes.base)], dtype=torch.float64, device=device)


def _finite(gradients: Sequence[Tensor]) -> bool:
    return all(bool(g.isfinite().all()) for g in gradients)


def _real(g: Tensor) -> Tensor:
    """View a complex tensor as real, with a last dimension of 2; real tensors are returned unchanged."""
    return torch.view_as_real(g.resolve_conj()) if g.is_complex() else g


def _add_digit(owner: Tensor, plain: Tensor, coded: Tensor, scale: int, codes: Codes) -> Tensor:
    if plain.is_complex():
        parts = _digit(_real(plain), _real(coded), codes)
        digit = torch.where(
            (parts[..., 0] == parts[..., 1]) | (parts[..., 1] == NO_OWNER),
            parts[..., 0],
            torch.where(parts[..., 0] == NO_OWNER, parts[..., 1], MIXED),
        )
    else:
        digit = _digit(plain, coded, codes)
    return torch.where(
        (owner < 0) | (digit < 0), torch.minimum(owner, digit).clamp_max(NO_OWNER), owner + scale * digit
    )


def _digit(plain: Tensor, coded: Tensor, codes: Codes) -> Tensor:
    tiny = torch.finfo(plain.dtype).tiny
    # float64 represents all values of narrower types exactly and has the range for every ratio.
    mantissa, exponent = torch.frexp(coded.double() / plain.double())
    digit = exponent.long() - 1
    exact = (mantissa == 0.5) & (digit >= 0) & (digit < codes.base)
    digit = torch.where(exact, digit, MIXED)
    denormal = (plain.abs() < tiny) & (coded.abs() < tiny * 2.0**codes.base)
    digit = torch.where(denormal, UNKNOWN, digit)
    return torch.where((plain == 0) & (coded == 0), NO_OWNER, digit)


def _verified(owner: Tensor, plain: Tensor, coded: Tensor, drawn: Tensor, codes: Codes) -> Tensor:
    known = (owner >= 0) & (owner < len(drawn))
    code = drawn[owner.clamp(0, len(drawn) - 1)]
    plain, coded = _real(plain), _real(coded)
    if plain.dim() > owner.dim():
        code = code[..., None]
    near = plain.double() * _powers(codes, code.device)[code] == coded
    near = near.all(-1) if plain.dim() > owner.dim() else near
    silent = (coded == 0).all(-1) if plain.dim() > owner.dim() else coded == 0
    good = torch.where(known, near, (owner == UNKNOWN) | ((owner == NO_OWNER) & silent))
    return torch.where(good, owner, MIXED)


UNBALANCED = 2.0**-8  # below this ratio of a sample's size at two edges, one weight cannot balance both


def _switches(sizes: Tensor) -> list[Tensor]:
    """Weights (b,) of 0 and 1 for each switched pass, from the sizes (edges, b) of the samples."""
    samples = sizes.shape[1]
    silent = sizes == 0
    groups = [group for group in silent.unique(dim=0) if group.any() and not group.all()]
    most = passes_needed(samples)
    unbalanced = (~silent & (sizes < UNBALANCED * sizes.amax(0))).any()
    if len(groups) <= most and not unbalanced:
        return [group.to(torch.float64) for group in groups]
    chosen = passes_of_samples(samples)
    return [sizes.new_tensor([float(k in subset) for subset in chosen]) for k in range(most)]


def _switched(owner: Tensor, plain: Tensor, switched: Tensor, on: Tensor) -> Tensor:
    expected = torch.where(on[owner.clamp_min(0)] > 0, plain, 0)
    return torch.where((switched == expected) | (owner == UNKNOWN), owner, MIXED)


# --- devices on which sums are not deterministic ---------------------------------------------------------------------


def _switch(graph: Graph, edges: Sequence[Edge], codes: Codes) -> Probed | None:
    """Probe with samples switched off; weights are at most 2**shift. None if gradients are not finite."""
    scale = 2.0**codes.shift
    weights = [w * scale for w in switched_weights(graph)]
    plain = gradients_at(graph, edges, torch.full_like(graph.losses, scale))
    seen = [torch.zeros(g.shape, dtype=torch.long, device=g.device) for g in plain]
    for k, own in enumerate(weights):
        switched = gradients_at(graph, edges, own.to(graph.losses.dtype))
        if not _finite(switched):
            return None
        seen = [s | (g != 0).long() << k for s, g in zip(seen, switched, strict=True)]
    owners = [_owner_of(s, p, graph.samples) for s, p in zip(seen, plain, strict=True)]
    owners = _linear(graph, edges, plain, owners, scale)
    return Probed([_scaled(p, -codes.shift) for p in plain], owners) if _finite(plain) else None


def _owner_of(seen: Tensor, plain: Tensor, samples: int) -> Tensor:
    """Owner of each element, from the set of passes in which it is non-zero, as bits.

    UNKNOWN: non-zero in fewer passes than any sample, by rounding or underflow. MIXED: no sample has this set.
    """
    sets = [sum(1 << k for k in passes) for passes in passes_of_samples(samples)]
    known, order = torch.tensor(sets, device=seen.device).sort()
    place = torch.searchsorted(known, seen).clamp_max(samples - 1)
    owner = torch.where(known[place] == seen, order[place], MIXED)
    bits = torch.stack([(seen >> k) & 1 for k in range(passes_needed(samples))])
    few = bits.sum(0) < len(passes_of_samples(samples)[0])
    owner = torch.where(few, UNKNOWN, owner)
    return torch.where((seen == 0) & (plain == 0), NO_OWNER, owner)


def _linear(
    graph: Graph, edges: Sequence[Edge], plain: list[Tensor], owners: list[Tensor], scale: float
) -> list[Tensor]:
    """Mark the elements of samples as MIXED whose sum of absolute values is not multiplied by the sample's weight."""
    equal = torch.full_like(graph.losses, scale)
    powers = random_powers(graph.samples).to(graph.losses.device)
    coded = gradients_at(graph, edges, (powers * scale).to(graph.losses.dtype))
    for repeats in REPEATS:
        again = [gradients_at(graph, edges, equal) for _ in range(repeats)]
        nonlinear = []
        for owner, p, c, *others in zip(owners, plain, coded, *again, strict=True):
            total, found = _totals(owner, p, graph.samples), _totals(owner, c, graph.samples)
            noise = [_totals(owner, other - p, graph.samples) for other in others]
            nonlinear.append((found - powers * total).abs() > powers * rounding(graph, total, noise))
        if not torch.stack(nonlinear).any():
            return owners
    return [torch.where((o >= 0) & off[o.clamp_min(0)], MIXED, o) for o, off in zip(owners, nonlinear, strict=True)]


def _totals(owner: Tensor, x: Tensor, samples: int) -> Tensor:
    """Sum of the absolute values of each sample's elements, (b,) in float64."""
    totals = torch.zeros(samples + 1, dtype=torch.float64, device=x.device)
    index = torch.where(owner >= 0, owner, samples).flatten()
    return totals.index_add_(0, index, x.abs().double().flatten())[:samples]


def _scaled(g: Tensor, exponent: int) -> Tensor:
    return g * 2.0**exponent


def _non_finite_message(graph: Graph, edges: Sequence[Edge]) -> str:
    plain = gradients_at(graph, edges)
    bad = [graph.operations[e.node] for e, g in zip(edges, plain, strict=True) if not g.isfinite().all()]
    where = f"first found at {bad[0]}" if bad else "too large for its floating-point type after scaling"
    return (
        f"gradients must be finite; found NaN or infinity although every loss is finite ({where}). "
        "Check for a square root, norm, division or logarithm at zero."
    )
