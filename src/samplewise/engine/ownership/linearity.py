"""Checks that backward passes are linear.

The backward pass of a derivative is linear in the gradient that arrives. Hooks and Python Functions may do something
else: round, clip or threshold gradients, add a constant or noise. The row of a sample is then what a backward pass of
its loss alone gives, and rows are computed in this way, if they add up to the gradient of the sum of the losses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from samplewise.engine.backward import gradients_at
from samplewise.engine.graph.graph import Edge, Graph, is_python_function
from samplewise.engine.graph.hook_registry import may_have_hooks
from samplewise.engine.ownership.masked_passes import is_deterministic
from samplewise.errors import GraphError

_generator = torch.Generator().manual_seed(0)  # separate generator: does not change the user's RNG state


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


def is_additive(graph: Graph, first: Tensor, second: Tensor, both: Tensor, size: Tensor) -> bool:
    """True if `both`, the gradient for two arriving gradients together, is the sum of those for each of them.

    size: of the gradients that these are computed from. Where they cancel, a gradient consists of rounding errors.
    """
    change = (first + second - both).abs()
    limit = Tolerance(graph).of(largest([first, second, both]).maximum(size))
    return bool(((change <= limit) | ~change.isfinite()).all())


def largest(gradients: Iterable[Tensor]) -> Tensor:
    """Largest absolute value of any element, a scalar in float64."""
    return torch.stack(
        [g.abs().amax().double() for g in gradients if g.numel()] or [torch.zeros((), dtype=torch.double)]
    ).amax()
