"""Passes with some samples switched off, which show on any device which samples contribute to a gradient.

A sample with weight 0 contributes exactly 0, whatever the order of sums. So these passes need no tolerance where sums
are not deterministic, as on GPUs. Each sample is on in another set of passes; all sets have the same size, so that none
contains another: for any two samples there is a pass with the first off and the second on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import combinations, islice

import torch
from torch import Tensor

from samplewise.engine.graph.graph import Graph

# Passes that measure the rounding noise; the larger number if the smaller one does not explain a difference.
REPEATS = (1, 8)
WIDE = 48  # powers of two in a single pass that float32 has the range for
_generator = torch.Generator().manual_seed(0)  # separate generator: does not change the user's RNG state


def passes_needed(samples: int) -> int:
    """Smallest number of passes with a set of its own for each sample."""
    return next(k for k in range(2, 64) if math.comb(k, k // 2) >= samples)


@lru_cache(maxsize=64)
def passes_of_samples(samples: int) -> tuple[tuple[int, ...], ...]:
    """Passes in which each sample is on: `passes_needed(samples) // 2` of them."""
    passes = passes_needed(samples)
    return tuple(islice(combinations(range(passes), passes // 2), samples))


def switches(samples: int) -> list[Tensor]:
    """Weights (b,) of 0 and 1 in float64 on the CPU for each pass."""
    subsets = passes_of_samples(samples)
    passes = range(passes_needed(samples))
    return [torch.tensor([float(k in subset) for subset in subsets], dtype=torch.float64) for k in passes]


def switched_weights(graph: Graph) -> Iterator[Tensor]:
    """Yield weights (b,) in float64 for each pass: 0, or a random power of two."""
    for on in switches(graph.samples):
        yield (on * random_powers(graph.samples)).to(graph.losses.device, non_blocking=True)


def random_powers(samples: int, number: int = 4) -> Tensor:
    """Random powers of two (b,) in float64 on the CPU: 1, 1/2, 1/4, ..., `number` different ones.

    They are random, so that contributions that cancel in one pass differ in another, and at most 1, so that scaled
    gradients in float16 do not overflow.
    """
    powers = torch.tensor([2.0**-k for k in range(number)], dtype=torch.float64)
    return powers[torch.randint(number, (samples,), generator=_generator)]


def distinct_powers(graph: Graph, sizes: Tensor, base: int = 16, digits: int | None = None) -> Iterator[Tensor]:
    """Yield weights (b,) for each pass. Any two samples have different powers of two, or in float16 0 and 1, in at
    least one pass, unless `digits` limits the number of passes. Samples of smaller `sizes` (b,) get larger powers
    first: a hook that keeps the largest gradients of the batch then keeps others. None is larger than 1: a clip that
    is not reached without weights is not reached with them.
    """
    if is_float16(graph):
        yield from switches(graph.samples)
        return
    spread = max(1, (base - 1) // max(1, graph.samples - 1))  # few samples use the whole range of powers, too
    drawn = torch.randperm(graph.samples, generator=_generator)  # for equal sizes
    numbers = drawn[sizes[drawn].argsort(descending=True, stable=True)].argsort()
    for digit in range(digits or max(1, math.ceil(math.log(graph.samples, base) - 1e-12))):
        exponents = numbers // base**digit % base * spread
        yield torch.tensor(
            [2.0 ** (e - base + 1) for e in exponents.tolist()], dtype=torch.float64, device=graph.losses.device
        )


def is_float16(graph: Graph) -> bool:
    """True if a gradient has the narrow range of float16, in which powers of two overflow or lose bits."""
    return torch.float16 in graph.dtypes


def is_deterministic(graph: Graph) -> bool:
    """True if two backward passes give the same bits: on the CPU."""
    return graph.losses.device.type == "cpu"


def rounding(graph: Graph, sums: Tensor, repeated: Sequence[Tensor]) -> Tensor:
    """Tolerance of the sums of absolute values of each sample, (b,), on a non-deterministic device.

    repeated: the differences of `sums` from those of other passes with the same weights. Where terms cancel, a sum
    consists of rounding errors, and only these differences show their size.
    """
    coarsest = max(torch.finfo(dtype).eps for dtype in graph.dtypes)
    relative = min(0.25, max(1e-6, 2**13 * coarsest))
    return relative * sums + 16 * torch.stack([d.abs() for d in repeated]).amax(0)
