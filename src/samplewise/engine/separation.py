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

from samplewise.engine.graph import Graph

# Weights of samples that are on. They are random, so that contributions that cancel in one pass differ in another, and
# at most 1, so that scaled gradients in float16 do not overflow.
POWERS = torch.tensor([1.0, 0.5, 0.25, 0.125], dtype=torch.float64)
# Passes that measure the rounding noise; the larger number if the smaller one does not explain a difference.
REPEATS = (1, 8)
_generator = torch.Generator().manual_seed(0)  # separate generator: does not change the user's RNG state


def passes_needed(samples: int) -> int:
    """Smallest number of passes with a set of its own for each sample."""
    return next(k for k in range(2, 64) if math.comb(k, k // 2) >= samples)


@lru_cache(maxsize=64)
def passes_of_samples(samples: int) -> tuple[tuple[int, ...], ...]:
    """Passes in which each sample is on: `passes_needed(samples) // 2` of them."""
    passes = passes_needed(samples)
    return tuple(islice(combinations(range(passes), passes // 2), samples))


def switched_weights(graph: Graph) -> Iterator[Tensor]:
    """Yield weights (b,) in float64 for each pass: 0, or a random power of two."""
    chosen = passes_of_samples(graph.samples)
    for k in range(passes_needed(graph.samples)):
        on = torch.tensor([float(k in passes) for passes in chosen], dtype=torch.float64)
        yield (on * random_powers(graph.samples)).to(graph.losses.device, non_blocking=True)


def random_powers(samples: int) -> Tensor:
    """Random powers of two (b,) in float64 on the CPU."""
    return POWERS[torch.randint(len(POWERS), (samples,), generator=_generator)]


def is_deterministic(graph: Graph) -> bool:
    """True if two backward passes give the same bits: on the CPU."""
    return graph.losses.device.type == "cpu"


def rounding(graph: Graph, sums: Tensor, repeated: Sequence[Tensor]) -> Tensor:
    """Tolerance of the sums of absolute values of each sample, (b,), on a non-deterministic device.

    repeated: the differences of `sums` from those of other passes with the same weights. Where terms cancel, a sum
    consists of rounding errors, and only these differences show their size.
    """
    coarsest = max(torch.finfo(dtype).eps for dtype in graph.dtypes())
    relative = min(0.25, max(1e-6, 2**13 * coarsest))
    return relative * sums + 16 * torch.stack([d.abs() for d in repeated]).amax(0)
