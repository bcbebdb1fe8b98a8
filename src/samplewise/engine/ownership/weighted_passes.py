"""Backward passes with weights on the samples: the weights, rounding errors, and checks that passes are linear.

A sample with weight 0 contributes exactly 0, whatever the order of sums. So passes with some samples switched off need
no tolerance where sums are not deterministic, as on GPUs. Each sample is on in another set of passes; all sets have the
same size, so that none contains another: for any two samples there is a pass with the first off and the second on.

The backward pass of a derivative is linear in the gradient that arrives. Hooks and Python Functions may do something
else: round, clip or threshold gradients, add a constant or noise. The row of a sample is then what a backward pass of
its loss alone gives, and rows are computed in this way, if they add up to the gradient of the sum of the losses.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import combinations, islice

import torch
from torch import Tensor

from samplewise.engine.backward import gradients_at
from samplewise.engine.graph.graph import Edge, Graph, is_python_function
from samplewise.engine.graph.hook_registry import may_have_hooks
from samplewise.errors import GraphError

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
    order = torch.randperm(graph.samples, generator=_generator)  # for equal sizes
    numbers = order[sizes[order].argsort(descending=True, stable=True)].argsort()
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


# --- linearity --------------------------------------------------------------------------------------------------------


class NotLinearError(GraphError):
    """A backward pass is not linear: gradients of weighted losses are not weighted gradients."""

    def __init__(self, operation: str):
        self.operation = operation
        super().__init__(
            "per-sample gradients must add up to the gradient of the summed losses; found that the backward of "
            f"{operation} is not linear. A Python Function or hook that rounds, clips or thresholds gradients, or adds "
            "a constant or noise to them, is not. Remove it, or pass strategy='reference' to sw.gradients, which "
            "runs one backward pass per sample."
        )


class Tolerance:
    """Largest difference by rounding between two passes whose gradients are equal in exact arithmetic."""

    def __init__(self, graph: Graph):
        coarsest = max((torch.finfo(dtype) for dtype in graph.dtypes), key=lambda info: info.eps)
        is_half = coarsest.bits == 16
        # Scaling by a power of two is exact on the CPU, but for denormals and for algorithms that depend on the size of
        # the gradient, such as that of matrix_exp. Half precision has its rounding errors in few bits.
        factor = 2**2 if is_half else 2**8
        self.relative = min(0.25, coarsest.eps * (factor if is_deterministic(graph) else 2**13))
        # Denormals lose bits; the numbers of float16 that do are not small.
        self.absolute = coarsest.tiny * (1 if coarsest.tiny > 1e-30 else 2**8)

    def of(self, size: Tensor) -> Tensor:
        """Tolerance for elements of gradients whose largest elements have this size."""
        return self.relative * size + self.absolute


def check_linear(graph: Graph, edges: Sequence[Edge], plain: Sequence[Tensor]) -> None:
    """Raise NotLinearError if the gradients at the edges do not follow the weights; `plain`: with weights 1."""
    if may_be_nonlinear(graph) and not all(_are_linear(graph, edges, plain)):
        raise NotLinearError(nonlinear_operation(graph) or "an operation")


def may_be_nonlinear(graph: Graph) -> bool:
    """False if the graph has only ATen operations, which are derivatives, and neither Python Functions nor hooks."""
    return bool(graph.structure.functions) or may_have_hooks(graph)


def _are_linear(graph: Graph, edges: Sequence[Edge], plain: Sequence[Tensor]) -> Iterator[bool]:
    """For each edge, whether its gradients scale with the losses, and are the sums of those of two halves of them."""
    tolerance = Tolerance(graph)
    factor = 0.5 if torch.float16 in graph.dtypes else 2.0**-10
    half = (torch.randperm(graph.samples, generator=_generator) % 2).to(graph.losses)
    weights = (torch.full_like(graph.losses, factor), half, 1 - half)
    size = largest(plain)
    for p, scaled, first, second in zip(plain, *(gradients_at(graph, edges, w) for w in weights), strict=True):
        # A power of two scales rounding errors, too, if they are the same in both passes.
        limit = tolerance.of(largest([p]) if is_deterministic(graph) else size)
        yield bool(((p - scaled / factor).abs() <= limit).all()) and is_additive(graph, first, second, p, size)


def nonlinear_operation(graph: Graph) -> str | None:
    """Name of the operation nearest to the losses whose backward is not linear; None if there is none."""
    edges = [Edge(node, slot) for node in graph.nodes if node in graph.relevant for slot in graph.used_slots(node)]
    for edge, is_linear in zip(edges, _are_linear(graph, edges, gradients_at(graph, edges)), strict=True):
        if not is_linear:
            consumers = [consumer for consumer, _ in graph.consumers[edge.node]]
            functions = [consumer for consumer in consumers if is_python_function(consumer)]
            if functions:
                return graph.operations[functions[0]]
            after = f"{graph.operations[consumers[0]]}, including hooks" if consumers else "a hook on the losses"
            return f"{after} on the output of {graph.operations[edge.node]},"
    return None


def is_additive(graph: Graph, first: Tensor, second: Tensor, joint: Tensor, size: Tensor) -> bool:
    """True if `joint`, the gradient for two arriving gradients together, is the sum of those for each of them.

    size: of the gradients that these are computed from. Where they cancel, a gradient consists of rounding errors.
    """
    change = (first + second - joint).abs()
    limit = Tolerance(graph).of(largest([first, second, joint]).maximum(size))
    return bool(((change <= limit) | ~change.isfinite()).all())


def largest(gradients: Iterable[Tensor]) -> Tensor:
    """Largest absolute value of any element, a scalar in float64."""
    return torch.stack(
        [g.abs().amax().double() for g in gradients if g.numel()] or [torch.zeros((), dtype=torch.double)]
    ).amax()
