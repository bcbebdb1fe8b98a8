"""Ask autograd which sample owns each element of a gradient.

A backward pass is linear in the weights put on the losses, and scaling by a power of two is exact in floating point.
So run it once with equal weights and again with weights 2**code(sample): an element that belongs to one sample comes
back multiplied by exactly 2**code of that sample, and the ratio reads the owner off. More samples than codes fit are
told apart by digits, one pass each. A last pass with random codes exposes mixtures that pose as a single owner.

Where a loud sample meets a faint one, rounding may swallow the faint one in all of these passes. A thorough probe also
switches samples off: for any two there is a pass with the one off and the other on, in which nothing can hide it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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


def probe(graph: Graph, edges: Sequence[Edge], thorough: bool = False) -> Probed:
    for codes in _codes_for(graph):
        probed = _probe_with(graph, edges, codes, thorough)
        if probed is not None:
            return probed
    raise NonFiniteGradientError(_non_finite_message(graph, edges))


def _codes_for(graph: Graph) -> list[Codes]:
    """What fits the narrowest floating-point type that a gradient passes through."""
    dtypes = {graph.losses.dtype} | {
        Edge(node, slot).dtype for node in graph.relevant for slot in graph.used_slots(node)
    }
    if torch.float16 in dtypes:
        return _FLOAT16_CODES
    return _FLOAT64_CODES if dtypes <= {torch.float64, torch.complex128} else _FLOAT32_CODES


def _probe_with(graph: Graph, edges: Sequence[Edge], codes: Codes, thorough: bool) -> Probed | None:
    samples = graph.samples
    device = graph.losses.device
    numbers = torch.arange(samples, device=device)
    plain = gradients_at(graph, edges, _weights(graph, codes, torch.zeros_like(numbers)))
    digits = max(1, math.ceil(math.log(samples, codes.base) - 1e-12))
    owners = [torch.zeros(g.shape, dtype=torch.long, device=g.device) for g in plain]
    scale = 1
    for _ in range(digits):
        coded = gradients_at(graph, edges, _weights(graph, codes, numbers // scale % codes.base))
        if not _finite(plain) or not _finite(coded):
            return None
        owners = [_add_digit(o, p, c, scale, codes) for o, p, c in zip(owners, plain, coded, strict=True)]
        scale *= codes.base
    drawn = torch.randint(codes.base, (samples,), generator=torch.Generator().manual_seed(samples)).to(device)
    checked = gradients_at(graph, edges, _weights(graph, codes, drawn))
    if not _finite(checked):
        return None
    owners = [_verified(o, p, c, drawn, codes) for o, p, c in zip(owners, plain, checked, strict=True)]
    for on in _switches(samples, device) if thorough else ():
        kept = gradients_at(graph, edges, _weights(graph, codes, torch.zeros_like(numbers)) * on)
        owners = [_switched(o, p, k, on) for o, p, k in zip(owners, plain, kept, strict=True)]
    return Probed([_scaled(p, -codes.shift) for p in plain], owners)


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


def _switches(samples: int, device: torch.device) -> Iterator[Tensor]:
    """Vectors of 0 and 1 such that for any two samples, in either order, one has the first off and the other on."""
    passes = next(k for k in range(2, 64) if math.comb(k, k // 2) >= samples)
    chosen = list(islice(combinations(range(passes), passes // 2), samples))
    return (torch.tensor([float(k in subset) for subset in chosen], device=device) for k in range(passes))


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
