"""Error for hooks that change a gradient between the cut and the parameter.

A hook on an activation runs in the backward pass to the cut, so per-sample gradients include it. A hook below the cut,
on a transposed weight or on the node of the operation itself, changes the parameter's gradient after per-sample
gradients are read. Therefore, if hooks have been registered since a graph structure was last checked, a weighted sum of
its per-sample gradients is compared with the gradient from autograd.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from samplewise.engine.backward import backward_past, backward_to_leaves
from samplewise.engine.checks import is_traced
from samplewise.engine.grads.base import PerSampleGrad
from samplewise.engine.grads.by_rows import random_signs
from samplewise.engine.grads.dense import DenseGrad
from samplewise.engine.graph import Graph
from samplewise.engine.plan import GradBuilder, Plan
from samplewise.engine.registered_hooks import HookState, has_hooks_of, hook_state
from samplewise.errors import GraphError

PROJECTED = 16  # dimensions of the projections that are compared for sharded models

_generator = torch.Generator().manual_seed(0)


@dataclass
class _Checks:
    """State of the comparisons for one graph structure and number of registered hooks."""

    hooks: HookState
    passes: int = 0
    conclusive: bool = False  # all parameters had a non-zero gradient

    def due(self) -> bool:
        """Count a pass; True if it must be compared: passes 1, 2, 4, 8, ... until a comparison is conclusive."""
        self.passes += 1
        return not self.conclusive and self.passes & (self.passes - 1) == 0


_checks: dict[int, _Checks] = {}


def refuse_hooks_below_cut(plan: Plan, graph: Graph) -> None:
    """Raise GraphError if the sum of per-sample gradients differs from the gradient from autograd."""
    checks = _checks.get(plan.hooks_key)
    if checks is None or not has_hooks_of(graph, checks.hooks):
        checks = _checks[plan.hooks_key] = _Checks(hook_state(graph))
    if checks.due():
        if is_traced(graph.losses):
            raise GraphError(
                "gradients under hooks must be compared with autograd in an eager pass before compilation; "
                "found a traced pass. After registering hooks, run updates uncompiled first."
            )
        checks.conclusive = _compare(plan, graph)


def _compare(plan: Plan, graph: Graph) -> bool:
    """Compare with autograd; True if every parameter had a non-zero gradient."""
    weights = torch.rand(graph.samples, generator=_generator).add(0.5).to(graph.losses)
    sums: dict[str, Tensor] = {}
    sizes: dict[str, float] = {}
    every = torch.arange(graph.samples, device=graph.losses.device)

    def measure(form: PerSampleGrad, name: str) -> None:
        sums[name] = _shown(graph, name, form.sum(weights))
        sizes[name] = float((form.faint_norms(every) * weights).sum())

    with torch.no_grad():
        backward_past(graph, plan.stops, GradBuilder(plan, graph, measure, differentiable=False, keep=False).add)
    relative, cancelled = _tolerances(graph)
    noise = cancelled * max(sizes.values())
    for name, expected in _from_autograd(graph, weights).items():
        off = float((sums[name].to(expected) - expected).abs().double().square().sum().sqrt())
        if isfinite(off) and off > relative * sizes[name] + noise:
            raise GraphError(
                f"per-sample gradients must sum to the gradient from autograd; found that those of {name!r} do not. "
                "A hook on a tensor or node between an operation and this parameter changes the gradient. "
                "Remove the hook, or pass strategy='reference'."
            )
    return all(size > 0 for size in sizes.values())


def _tolerances(graph: Graph) -> tuple[float, float]:
    """Tolerance relative to the norm of a parameter's gradients, and tolerance relative to the largest such norm.

    The second covers rounding errors of gradients that cancel to zero.
    """
    dtypes = graph.dtypes()
    if dtypes & {torch.float16, torch.bfloat16}:
        return 5e-2, 5e-2
    return (1e-3, 1e-10) if dtypes <= {torch.float64, torch.complex128} else (1e-3, 1e-4)


def _from_autograd(graph: Graph, weights: Tensor) -> dict[str, Tensor]:
    """Dense gradient of the weighted losses by name, without parameters that have hooks themselves."""
    names = [name for leaf, name in graph.leaves.items() if not leaf.variable._backward_hooks]
    gradients: dict[str, Tensor] = {}

    def arrived(name: str, gradient: Tensor) -> None:
        gradients[name] = _shown(graph, name, gradient)

    backward_to_leaves(graph, names, weights, arrived)
    return gradients


def _shown(graph: Graph, name: str, gradient: Tensor) -> Tensor:
    """The gradient; of a sharded model a random projection of it, with the same norm in expectation, to save memory."""
    if not graph.sharded:
        return gradient
    projected = DenseGrad(gradient[None]).project(*random_signs(name, gradient.shape, PROJECTED, 0, gradient.device))
    return projected / PROJECTED**0.5
