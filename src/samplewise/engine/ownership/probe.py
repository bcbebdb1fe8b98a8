"""Probe: find the sample that owns each element of a gradient with weighted backward passes, through the whole graph
or through a single node.

A backward pass is linear in the weights on the losses, and scaling by a power of two is exact in floating point. One
pass runs with weights 1, whose gradients are returned, and one with weights 2**code(sample): an element that belongs to
one sample is multiplied by exactly 2**code of that sample, so the ratio of the two passes gives the owner. If there are
more samples than codes, the sample's number is split into digits, with one pass per digit. Each probe draws new
numbers: a mixture whose weights happen to fit one numbering does not fit the next.

An element shared by several samples can look like the element of one sample if the contributions of the others are
lost to rounding. Two further kinds of passes detect this, with new codes in each probe:

    balanced    weights that bring the gradients of all samples to about the same magnitude, as far as it is known
    switched    weight 1 for the samples that own nothing at an edge and 0 for the others, so that no rounding can hide
                a contribution; if a sample is large at one edge and small at another, so that no single weight balances
                both, then for any two samples there is a pass with the first at 0 and the second at 1

Denormal gradients lose bits, and the algorithms of some operations, such as matrix_exp, depend on the size of the
gradient. Elements that seem to be shared are therefore decided by switched passes alone: an element belongs to a sample
if it is unchanged in the passes in which that sample is on, and exactly zero in the others. If it does, but its ratios
are wrong because the backward pass is not linear at all, NotLinearError is raised.

Where sums are not deterministic, as on GPUs, ratios have rounding errors, and elements in which terms cancel consist of
them. There the owner is found with switched passes only: an element belongs to a sample if it is non-zero in exactly
the passes in which that sample is on. It must have the same value in all of them, and one pass with random powers of
two then shows that the backward pass is linear.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from samplewise.engine.backward import gradients_at
from samplewise.engine.graph.graph import Edge, Graph
from samplewise.engine.ownership.weighted_passes import (
    REPEATS,
    NotLinearError,
    Tolerance,
    check_linear,
    is_deterministic,
    may_be_nonlinear,
    nonlinear_operation,
    passes_needed,
    passes_of_samples,
    random_powers,
    rounding,
    switches,
)
from samplewise.errors import NonFiniteGradientError

NO_OWNER, UNKNOWN, MIXED = -1, -2, -3
RANDOM_PASSES = 2  # with random samples switched off, to confirm owners that ratios could not decide
BALANCED_PASSES = 2  # a mixture that poses as one sample passes each of them with a chance of about 1 in 16


class Codes(NamedTuple):
    """Weights 2**(shift + code), 0 <= code < base."""

    shift: int
    base: int


# Wide codes first; narrow codes are for gradients so large that wide codes overflow.
# float16 has exponents from -14 to 15 only; bfloat16 has the range of float32.
_FLOAT64_CODES = [Codes(-60, 500), Codes(-32, 64), Codes(-63, 64)]
_FLOAT32_CODES = [Codes(-10, 61), Codes(-8, 16), Codes(-15, 16)]
_FLOAT16_CODES = [Codes(0, 8), Codes(-3, 4)]


class Passes(Protocol):
    """Backward passes with weights on the samples that end at several places."""

    graph: Graph

    def run(self, weights: Tensor | None = None, at: Collection[int] | None = None) -> list[Tensor]:
        """Gradients at the places, or at those with the numbers `at`. `weights` (b,) default to ones."""

    def check_linear(self, plain: list[Tensor]) -> None:
        """Raise NotLinearError if gradients do not follow the weights; `plain`: with weights 1."""

    def operation(self, at: int) -> str:
        """Name of the operation at a place, for messages."""


class GraphPasses:
    """Passes from the losses to edges of the graph."""

    def __init__(self, graph: Graph, edges: Sequence[Edge]):
        self.graph = graph
        self.edges = edges

    def run(self, weights: Tensor | None = None, at: Collection[int] | None = None) -> list[Tensor]:
        return gradients_at(self.graph, self.edges if at is None else [self.edges[k] for k in at], weights)

    def check_linear(self, plain: list[Tensor]) -> None:
        check_linear(self.graph, self.edges, plain)

    def operation(self, at: int) -> str:
        return self.graph.operations[self.edges[at].node]


class ProbeResult(NamedTuple):
    """Result of a probe, one tensor per place."""

    gradients: list[Tensor]  # gradients of losses.sum()
    owners: list[Tensor]  # sample numbers, same shapes; NO_OWNER: zero, UNKNOWN: too small to decide, MIXED: shared


def probe(graph: Graph, edges: Sequence[Edge]) -> ProbeResult:
    """Return gradients and owners at the edges. Raises NonFiniteGradientError if gradients are not finite, and
    NotLinearError if backward passes are not linear.
    """
    return probe_passes(GraphPasses(graph, edges))


def probe_passes(passes: Passes) -> ProbeResult:
    """As `probe`, for any backward passes."""
    plain = passes.run()
    if _finite(plain):
        if not is_deterministic(passes.graph):
            owners = _by_nonzero_passes(passes, plain)
            if owners is not None:
                passes.check_linear(plain)
                return ProbeResult(plain, owners)
        else:
            for codes in codes_for(passes.graph):
                owners = _by_codes(passes, plain, codes)
                if owners is not None:
                    return ProbeResult(plain, _by_switches(passes, plain, owners))
    bad = [passes.operation(at) for at, g in enumerate(plain) if not g.isfinite().all()]
    where = f"first found at {bad[0]}" if bad else "too large for its floating-point type after scaling"
    raise NonFiniteGradientError(
        f"gradients must be finite; found NaN or infinity although every loss is finite ({where}). "
        "Check for a square root, norm, division or logarithm at zero."
    )


def codes_for(graph: Graph) -> list[Codes]:
    """Codes that fit the narrowest floating-point type of any gradient in the graph."""
    dtypes = graph.dtypes
    if torch.float16 in dtypes:
        return _FLOAT16_CODES
    return _FLOAT64_CODES if dtypes <= {torch.float64, torch.complex128} else _FLOAT32_CODES


def _by_codes(passes: Passes, plain: list[Tensor], codes: Codes) -> list[Tensor] | None:
    """Owners from ratios to the gradients with weights 1; None if gradients are not finite with these codes."""
    graph = passes.graph
    samples = torch.randperm(graph.samples, generator=_generator).to(graph.losses.device)  # sample of each number
    numbers = samples.argsort()
    digits = max(1, math.ceil(math.log(graph.samples, codes.base) - 1e-12))
    owners = [torch.zeros(g.shape, dtype=torch.long, device=g.device) for g in plain]
    scale = 1
    # One pass for each digit of the sample numbers: the ratio to the plain gradient is the power of the owner's digit.
    for _ in range(digits):
        powers = code_powers(codes).to(numbers.device)[numbers // scale % codes.base]
        coded = passes.run(powers.to(graph.losses.dtype))
        if not _finite(coded):
            return None
        owners = [_add_digit(o, p, c, scale, codes) for o, p, c in zip(owners, plain, coded, strict=True)]
        scale *= codes.base
    owners = [torch.where((o >= 0) & (o < len(samples)), samples[o.clamp(0, len(samples) - 1)], o) for o in owners]
    sizes = torch.stack([_sizes(o, p, graph.samples) for o, p in zip(owners, plain, strict=True)])
    relative = sizes / sizes.amax(1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    # Powers of two that make all samples about equally large, times a random one of 1 to 8: a contribution that was
    # lost to rounding beside a larger one shows.
    largest = relative.amax(0)
    exponents = -torch.frexp(torch.where(largest > 0, largest, 2.0**-codes.base)).exponent.long()
    for _ in range(BALANCED_PASSES):
        jitter = torch.randint(4, (graph.samples,), generator=_generator).to(exponents.device)
        balanced = code_powers(codes).to(exponents.device)[(exponents + jitter).clamp(0, codes.base - 1)]
        checked = passes.run(balanced.to(graph.losses.dtype))
        if not _finite(checked):
            return None
        owners = [_verify_owners(o, p, c, balanced, codes) for o, p, c in zip(owners, plain, checked, strict=True)]
    # Balanced weights cannot show all, such as a sample that is zero at a place: passes with some samples switched off.
    for on in _switches(relative):
        switched = passes.run(on.to(graph.losses.dtype))
        for at, (owner, p, s) in enumerate(zip(owners, plain, switched, strict=True)):
            expected = torch.where(on[owner.clamp_min(0)] > 0, p, 0)
            owners[at] = torch.where((s == expected) | (owner == UNKNOWN), owner, MIXED)
    # Elements that are too small for ratios count where they are not small beside the others of some sample.
    for at, p in enumerate(plain):
        if (sizes[at] < _denormal_limit(p, codes) / torch.finfo(p.dtype).eps).any():
            owners[at] = torch.where(owners[at] == UNKNOWN, MIXED, owners[at])
    return owners


def _by_switches(passes: Passes, plain: list[Tensor], owners: list[Tensor]) -> list[Tensor]:
    """Decide the elements that are MIXED by their ratios again, with weights of 0 and 1."""
    graph = passes.graph
    doubtful = {at: elements for at, owner in enumerate(owners) if (elements := owner == MIXED).any()}
    if not doubtful:
        return owners
    tolerance = Tolerance(graph)
    limits = {at: tolerance.of(plain[at].abs().amax().double()) for at in doubtful}
    nonzero = {at: torch.zeros_like(owners[at]) for at in doubtful}  # passes in which an element is non-zero, as bits
    changes = {at: torch.zeros_like(plain[at].real) for at in doubtful}  # largest change of an element in them
    samples = torch.randperm(graph.samples, generator=_generator).to(graph.losses.device)  # sample of each number
    numbers = samples.argsort()
    for k, on in enumerate(switches(graph.samples)):
        weights = on.to(graph.losses)[numbers]
        for at, g in zip(list(doubtful), passes.run(weights, doubtful), strict=True):
            nonzero[at] |= (g != 0).long() << k
            changes[at] = torch.where(g != 0, (g - plain[at]).abs(), 0).maximum(changes[at])
            if (changes[at] > limits[at]).any():
                del doubtful[at]  # one shared element is enough: the node is on the side of the parameters
        if not doubtful:
            return owners
    for at, elements in doubtful.items():
        number = _owner_of(nonzero[at], plain[at], graph.samples)
        owner = torch.where(number >= 0, samples[number.clamp_min(0)], torch.where(number == NO_OWNER, number, MIXED))
        owners[at] = torch.where(elements, owner, owners[at])
        owners[at] = _mark_changed(owners[at], plain[at], changes[at], tolerance, graph.samples)
    if any((elements & (owners[at] >= 0)).any() for at, elements in doubtful.items()):
        passes.check_linear(plain)
        # Contributions that cancel in all of these passes hardly do with other samples switched off. Powers of two as
        # weights would decide nothing here: the rounding errors of some algorithms grow with the size of the gradient.
        for _ in range(RANDOM_PASSES):
            on = torch.randint(2, (graph.samples,), generator=_generator).to(graph.losses)
            switched = passes.run(on, doubtful)
            for at, g in zip(doubtful, switched, strict=True):
                change = (g - plain[at] * on[owners[at].clamp_min(0)]).abs()
                owners[at] = _mark_changed(owners[at], plain[at], change, tolerance, graph.samples)
    return owners


def _mark_changed(owner: Tensor, plain: Tensor, change: Tensor, tolerance: Tolerance, samples: int) -> Tensor:
    """Owners, with MIXED for elements that change more than by rounding, relative to the largest of the sample; if an
    element had no owner, because it was zero, relative to the largest of all.
    """
    limits = tolerance.of(_sizes(owner, plain, samples))
    limits = torch.where(owner >= 0, limits[owner.clamp_min(0)], limits.amax())
    return torch.where((owner >= NO_OWNER) & (change > limits), MIXED, owner)


def _sizes(owner: Tensor, plain: Tensor, samples: int) -> Tensor:
    """Largest absolute element of each sample, (b,) in float64."""
    largest = torch.zeros(samples + 1, dtype=torch.float64, device=owner.device)
    index = torch.where((owner >= 0) & (owner < samples), owner, samples).flatten()
    largest.scatter_reduce_(0, index, plain.abs().double().flatten(), "amax")
    return largest[:samples]


_generator = torch.Generator().manual_seed(0)  # separate generator: does not change the user's RNG state


@cache
def code_powers(codes: Codes) -> Tensor:
    """Exact powers 2**(shift + code) in float64 on the CPU, by code; torch.ldexp and torch.pow may round."""
    powers = [2.0 ** (codes.shift + code) for code in range(codes.base)]
    return torch.tensor(powers, dtype=torch.float64, device="cpu")


def _denormal_limit(plain: Tensor, codes: Codes) -> float:
    """Size of elements that may be denormal in a coded pass; 0 in float16, whose denormals are not small."""
    return 0.0 if plain.dtype is torch.float16 else torch.finfo(plain.dtype).tiny * 2.0**-codes.shift


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
    # float64 represents all values of narrower types exactly and has the range for every ratio.
    mantissa, exponent = torch.frexp(coded.double() / plain.double())
    digit = exponent.long() - 1 - codes.shift
    exact = (mantissa == 0.5) & (digit >= 0) & (digit < codes.base)
    digit = torch.where(exact, digit, MIXED)
    limit = _denormal_limit(plain, codes)
    digit = torch.where(
        (plain.abs() < limit) & (coded.abs() < limit * 2.0 ** (codes.shift + codes.base)), UNKNOWN, digit
    )
    return torch.where((plain == 0) & (coded == 0), NO_OWNER, digit)


def _verify_owners(owner: Tensor, plain: Tensor, coded: Tensor, weights: Tensor, codes: Codes) -> Tensor:
    is_owned = (owner >= 0) & (owner < len(weights))
    weight = weights[owner.clamp(0, len(weights) - 1)]
    plain, coded = _real(plain), _real(coded)
    is_complex = plain.dim() > owner.dim()
    near = plain.double() * (weight[..., None] if is_complex else weight) == coded.double()
    silent = coded == 0
    if is_complex:
        near, silent = near.all(-1), silent.all(-1)
    good = torch.where(is_owned, near, (owner == UNKNOWN) | ((owner == NO_OWNER) & silent))
    if good.all():
        return owner
    denormal = plain.abs() < _denormal_limit(plain, codes)
    denormal = denormal.all(-1) if is_complex else denormal
    return torch.where(good, owner, torch.where(is_owned & denormal, UNKNOWN, MIXED))


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
    subsets = passes_of_samples(samples)
    return [sizes.new_tensor([float(k in subset) for subset in subsets]) for k in range(most)]


# --- devices on which sums are not deterministic ---------------------------------------------------------------------


def _by_nonzero_passes(passes: Passes, plain: list[Tensor]) -> list[Tensor] | None:
    """Owners from passes with samples switched off. None if gradients are not finite."""
    graph = passes.graph
    nonzero = [torch.zeros(g.shape, dtype=torch.long, device=g.device) for g in plain]  # passes, as bits
    changes = [torch.zeros_like(g.real) for g in plain]  # largest change of an element while it is non-zero
    for k, on in enumerate(switches(graph.samples)):
        switched = passes.run(on.to(graph.losses))
        if not _finite(switched):
            return None
        nonzero = [bits | (g != 0).long() << k for bits, g in zip(nonzero, switched, strict=True)]
        changes = [
            torch.where(g != 0, (g - p).abs(), 0).maximum(change)
            for change, g, p in zip(changes, switched, plain, strict=True)
        ]
    owners = [_owner_of(bits, p, graph.samples) for bits, p in zip(nonzero, plain, strict=True)]
    return _linear(passes, plain, owners, changes)


def _owner_of(nonzero: Tensor, plain: Tensor, samples: int) -> Tensor:
    """Owner of each element, from the set of passes in which it is non-zero, as bits.

    UNKNOWN: non-zero in fewer passes than any sample, by rounding or underflow. MIXED: no sample has this set.
    """
    sets = [sum(1 << k for k in passes) for passes in passes_of_samples(samples)]
    ordered_sets, order = torch.tensor(sets, device=nonzero.device).sort()
    place = torch.searchsorted(ordered_sets, nonzero.contiguous()).clamp_max(samples - 1)
    owner = torch.where(ordered_sets[place] == nonzero, order[place], MIXED)
    bits = torch.stack([(nonzero >> k) & 1 for k in range(passes_needed(samples))])
    is_partial = bits.sum(0) < len(passes_of_samples(samples)[0])
    owner = torch.where(is_partial, UNKNOWN, owner)
    return torch.where((nonzero == 0) & (plain == 0), NO_OWNER, owner)


def _linear(passes: Passes, plain: list[Tensor], owners: list[Tensor], changes: list[Tensor]) -> list[Tensor]:
    """Mark the elements of samples as MIXED if one of them has changed with the weights of other samples, or if their
    sum of absolute values is not multiplied by the sample's weight. If hooks or Python Functions may be the reason,
    raise NotLinearError.
    """
    graph = passes.graph
    powers = random_powers(graph.samples).to(graph.losses.device)
    coded = passes.run(powers.to(graph.losses.dtype))
    for repeats in REPEATS:
        repeated = [passes.run() for _ in range(repeats)]
        nonlinear = []
        for owner, p, c, change, *repetitions in zip(owners, plain, coded, changes, *repeated, strict=True):
            total, weighted_total = _totals(owner, p, graph.samples), _totals(owner, c, graph.samples)
            noise = [_totals(owner, r - p, graph.samples) for r in repetitions]
            off = (weighted_total - powers * total).abs() > powers * rounding(graph, total, noise)
            noise = [_sizes(owner, r - p, graph.samples) for r in repetitions]
            limits = rounding(graph, _sizes(owner, p, graph.samples), noise)
            unowned = torch.where((owner == NO_OWNER) | (owner == UNKNOWN), change, 0)
            off |= (_sizes(owner, change, graph.samples) > limits) | (unowned > limits.amax()).any()
            nonlinear.append(off)
        if not torch.stack(nonlinear).any():
            return owners
    if may_be_nonlinear(graph):
        raise NotLinearError(nonlinear_operation(graph) or "an operation")
    return [torch.where((o >= 0) & off[o.clamp_min(0)], MIXED, o) for o, off in zip(owners, nonlinear, strict=True)]


def _totals(owner: Tensor, x: Tensor, samples: int) -> Tensor:
    """Sum of the absolute values of each sample's elements, (b,) in float64."""
    totals = torch.zeros(samples + 1, dtype=torch.float64, device=x.device)
    index = torch.where(owner >= 0, owner, samples).flatten()
    return totals.index_add_(0, index, x.abs().double().flatten())[:samples]
