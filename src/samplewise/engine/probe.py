"""Ask autograd which sample owns each element of a gradient.

A backward pass is linear in the weights put on the losses, and scaling by a power of two is exact in floating point.
So run it once with equal weights and again with weights 2**code(sample): an element that belongs to one sample comes
back multiplied by exactly 2**code of that sample, and the ratio reads the owner off. More samples than codes fit are
told apart by digits, one pass each.

An element that several samples share can pose as one of theirs when the others are so small beside it that rounding
swallows them. Two kinds of passes expose that, with new codes in every probe:

    balanced    the weights bring the gradients of all samples to about the same size, as far as they are known
    switched    samples that own nothing at an edge are left on and the others are off, so that nothing can hide them;
                where a sample is large at one edge and small at another, so that no weight balances both, for any two
                samples there is a pass with the one off and the other on
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations, islice
from typing import NamedTuple

import torch
from torch import Tensor

from samplewise.engine.graph import Edge, Graph
from samplewise.engine.passes import gradients_at
from samplewise.errors import NonFiniteGradientError

NOBODY, UNKNOWN, MIXED = -1, -2, -3


class Codes(NamedTuple):
    """Weights 2**(shift + code), 0 <= code < base."""

    shift: int
    base: int


# Wide codes first; narrow ones for gradients so large that the wide would overflow.
# float16 reaches from 2**-14 to 2**15 only, bfloat16 as far as float32.
_FLOAT64_CODES = [Codes(300, 500), Codes(0, 64)]
_FLOAT32_CODES = [Codes(40, 61), Codes(0, 16), Codes(-30, 16)]
_FLOAT16_CODES = [Codes(0, 8), Codes(-4, 4)]


class Probed(NamedTuple):
    gradients: list[Tensor]  # those of losses.sum()
    owners: list[Tensor]  # same shapes; NOBODY where zero, UNKNOWN where too small to tell, MIXED where shared


def probe(graph: Graph, edges: Sequence[Edge]) -> Probed:
    for codes in _codes_for(graph):
        probed = _probe_with(graph, edges, codes)
        if probed is not None:
            return probed
    raise NonFiniteGradientError(_non_finite_message(graph, edges))


def _codes_for(graph: Graph) -> list[Codes]:
    """What fits the narrowest floating-point type that a gradient passes through."""
    dtypes = graph.dtypes()
    if torch.float16 in dtypes:
        return _FLOAT16_CODES
    return _FLOAT64_CODES if dtypes <= {torch.float64, torch.complex128} else _FLOAT32_CODES


def _probe_with(graph: Graph, edges: Sequence[Edge], codes: Codes) -> Probed | None:
    """None if gradients overflow with these codes."""
    numbers = torch.arange(graph.samples, device=graph.losses.device)
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
    sizes = torch.stack([_sizes(o, p, graph.samples) for o, p in zip(owners, plain, strict=True)])
    balanced = _balanced(sizes, codes)
    checked = gradients_at(graph, edges, _weights(graph, codes, balanced))
    if not _finite(checked):
        return None
    owners = [_verified(o, p, c, balanced, codes) for o, p, c in zip(owners, plain, checked, strict=True)]
    for on in _switches(sizes):
        kept = gradients_at(graph, edges, equal * on)
        owners = [_switched(o, p, k, on) for o, p, k in zip(owners, plain, kept, strict=True)]
    return Probed([_scaled(p, -codes.shift) for p in plain], owners)


def _sizes(owner: Tensor, plain: Tensor, samples: int) -> Tensor:
    """(b,) in float64: the largest element of each sample, relative to the largest of all."""
    found = torch.zeros(samples + 1, dtype=torch.float64, device=owner.device)
    index = torch.where((owner >= 0) & (owner < samples), owner, samples).flatten()
    found.scatter_reduce_(0, index, plain.abs().double().flatten(), "amax")
    return found[:samples] / found.amax().clamp_min(torch.finfo(torch.float64).tiny)


_generator = torch.Generator().manual_seed(0)  # of its own: the user's random numbers stay as they are


def _balanced(sizes: Tensor, codes: Codes) -> Tensor:
    """(b,): codes that make up for the sizes (edges, b) of the samples, within a random bit or two."""
    largest = sizes.amax(0)
    exponents = -torch.frexp(torch.where(largest > 0, largest, 2.0**-codes.base)).exponent.long()
    jitter = torch.randint(4, (sizes.shape[1],), generator=_generator).to(sizes.device)
    return (exponents + jitter).clamp(0, codes.base - 1)


def _weights(graph: Graph, codes: Codes, code: Tensor) -> Tensor:
    return _powers(codes, code.device)[code].mul(2.0**codes.shift).to(graph.losses.dtype)


def _powers(codes: Codes, device: torch.device) -> Tensor:
    """2**0 .. 2**(base - 1), exactly: torch.ldexp and torch.pow may round."""
    return torch.tensor([2.0**k for k in range(codes.base)], dtype=torch.float64, device=device)


def _finite(gradients: Sequence[Tensor]) -> bool:
    return all(bool(g.isfinite().all()) for g in gradients)


def _real(g: Tensor) -> Tensor:
    """Complex elements are judged by their two parts."""
    return torch.view_as_real(g.resolve_conj()) if g.is_complex() else g


def _add_digit(owner: Tensor, plain: Tensor, coded: Tensor, scale: int, codes: Codes) -> Tensor:
    if plain.is_complex():
        parts = _digit(_real(plain), _real(coded), codes)
        digit = torch.where(
            (parts[..., 0] == parts[..., 1]) | (parts[..., 1] == NOBODY),
            parts[..., 0],
            torch.where(parts[..., 0] == NOBODY, parts[..., 1], MIXED),
        )
    else:
        digit = _digit(plain, coded, codes)
    return torch.where((owner < 0) | (digit < 0), torch.minimum(owner, digit).clamp_max(NOBODY), owner + scale * digit)


def _digit(plain: Tensor, coded: Tensor, codes: Codes) -> Tensor:
    tiny = torch.finfo(plain.dtype).tiny
    # bfloat16 and float16 values are exact in float32, float64 has the range for every ratio
    mantissa, exponent = torch.frexp(coded.double() / plain.double())
    digit = exponent.long() - 1
    exact = _is_power(mantissa, plain.device) & (digit >= 0) & (digit < codes.base)
    digit = torch.where(exact, digit, MIXED)
    denormal = (plain.abs() < tiny) & (coded.abs() < tiny * 2.0**codes.base)
    digit = torch.where(denormal, UNKNOWN, digit)
    return torch.where((plain == 0) & (coded == 0), NOBODY, digit)


def _is_power(mantissa: Tensor, device: torch.device) -> Tensor:
    # Sums are repeatable on the CPU. Elsewhere their order may vary: allow for rounding.
    return mantissa == 0.5 if device.type == "cpu" else (mantissa - 0.5).abs() < 1e-3


def _verified(owner: Tensor, plain: Tensor, coded: Tensor, drawn: Tensor, codes: Codes) -> Tensor:
    known = (owner >= 0) & (owner < len(drawn))
    code = drawn[owner.clamp(0, len(drawn) - 1)]
    plain, coded = _real(plain), _real(coded)
    if plain.dim() > owner.dim():
        code = code[..., None]
    expected = plain.double() * _powers(codes, code.device)[code]
    near = (
        expected == coded if plain.device.type == "cpu" else torch.isclose(expected, coded.double(), rtol=1e-3, atol=0)
    )
    near = near.all(-1) if plain.dim() > owner.dim() else near
    silent = (coded == 0).all(-1) if plain.dim() > owner.dim() else coded == 0
    good = torch.where(known, near, (owner == UNKNOWN) | ((owner == NOBODY) & silent))
    return torch.where(good, owner, MIXED)


UNBALANCED = 2.0**-8  # a sample this much smaller at one edge than at another is not balanced by one weight


def _switches(sizes: Tensor) -> list[Tensor]:
    """Weights 0 and 1 for the switched passes, from the sizes (edges, b) of the samples."""
    samples = sizes.shape[1]
    silent = sizes == 0
    groups = [group for group in silent.unique(dim=0) if group.any() and not group.all()]
    most = next(k for k in range(2, 64) if math.comb(k, k // 2) >= samples)
    unbalanced = (~silent & (sizes < UNBALANCED * sizes.amax(0))).any()
    if len(groups) <= most and not unbalanced:
        return [group.to(torch.float64) for group in groups]
    chosen = list(islice(combinations(range(most), most // 2), samples))
    return [sizes.new_tensor([float(k in subset) for subset in chosen]) for k in range(most)]


def _switched(owner: Tensor, plain: Tensor, kept: Tensor, on: Tensor) -> Tensor:
    expected = torch.where(on[owner.clamp_min(0)] > 0, plain, 0)
    near = kept == expected if plain.device.type == "cpu" else torch.isclose(kept, expected, rtol=1e-3, atol=0)
    return torch.where(near | (owner == UNKNOWN), owner, MIXED)


def _scaled(g: Tensor, exponent: int) -> Tensor:
    return g * 2.0**exponent


def _non_finite_message(graph: Graph, edges: Sequence[Edge]) -> str:
    plain = gradients_at(graph, edges)
    bad = [graph.operations[e.node] for e, g in zip(edges, plain, strict=True) if not g.isfinite().all()]
    where = f"first seen at {bad[0]}" if bad else "too large for its floating-point type once scaled"
    return (
        f"gradients must be finite; found NaN or infinity though every loss is finite ({where}). "
        "Look for a square root, norm, division or logarithm at zero."
    )
