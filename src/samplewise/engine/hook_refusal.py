"""Error for hooks that change a gradient between the cut and the parameter.

A hook on an activation runs in the backward pass to the cut, so per-sample gradients include it. A hook below the cut,
on a transposed weight or on the node of the operation itself, changes the parameter's gradient after per-sample
gradients are read. Therefore, if a graph may have such hooks, a weighted sum of its per-sample gradients is compared
with the gradient from autograd.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

import torch
from torch import Tensor

from samplewise.engine.backward import backward_past, backward_to_leaves
from samplewise.engine.deferred_checks import is_traced
from samplewise.engine.grads.base import PerSampleGrad, RowwiseGrad, term_norms
from samplewise.engine.grads.dense import DenseGrad
from samplewise.engine.grads.indexed import VIEWS
from samplewise.engine.grads.kernels import random_signs
from samplewise.engine.graph.graph import Edge, EdgeKey, Graph
from samplewise.engine.graph.hook_registry import have_hooks, hook_places
from samplewise.engine.ownership.weighted_passes import (
    NotLinearError,
    Tolerance,
    is_deterministic,
    nonlinear_operation,
    random_powers,
)
from samplewise.engine.plan import GradBuilder, Plan
from samplewise.errors import GraphError

_generator = torch.Generator().manual_seed(0)  # separate generator: does not change the user's RNG state

PROJECTED = 16  # dimensions of the projections that are compared for sharded models


def refuse_hooks_below_cut(plan: Plan, graph: Graph) -> None:
    """Raise GraphError if the sum of per-sample gradients differs from the gradient from autograd."""
    if is_traced(graph.losses):
        raise GraphError(
            "gradients under hooks must be compared with autograd in an eager pass before compilation; "
            "found a traced pass. After registering hooks, run updates uncompiled first."
        )
    if _may_have_hooks_below(plan, graph):
        _compare(plan, graph)


CONSTANTS = (1.3e-6, -0.7, 1.7e6)  # gradients that are sent to the parameters, one in each graph


def _may_have_hooks_below(plan: Plan, graph: Graph) -> bool:
    """False if nodes at the cut have no hooks, and gradients pass from there to the parameters unchanged.

    If `hook_places` cannot say where hooks are, a constant is sent, which takes no memory. It comes out as it is,
    unless a hook returns something else. Other operations than views and casts are not tried.
    """
    places = hook_places(graph)
    if places is not None:
        at_cut = plan.operands.keys() & {*places.before, *places.after}
        return bool(at_cut) or not plan.side.isdisjoint(places.nodes)
    # In a sharded model, constants would call the hooks of fully_shard, which gather parameters.
    if graph.sharded or have_hooks(graph, plan.operands):
        return True
    uses: list[dict[int, EdgeKey]] = [{}]  # several uses of a parameter apart from each other: autograd adds them
    for operand_plan in (operand_plan for operands in plan.operands.values() for operand_plan in operands):
        for route, leaf in zip(operand_plan.branch.routes, operand_plan.branch.leaves, strict=True):
            if operand_plan.branch.entry[0] == leaf or graph.nodes[leaf].variable._backward_hooks:
                continue
            if route.changing is None or not set(route.changing) <= VIEWS:
                return True
            free = next((one for one in uses if leaf not in one), None)
            if free is None:
                uses.append(free := {})
            free[leaf] = operand_plan.branch.entry
    constant = CONSTANTS[int(torch.randint(len(CONSTANTS), (), generator=_generator))]
    return any(_is_changed(graph, entries, constant) for entries in uses if entries)


def _is_changed(graph: Graph, entries: Mapping[int, EdgeKey], constant: float) -> bool:
    """True if the gradient of a parameter (by position) is another than the constant sent from the entry."""
    sent = [graph.edge(entry).constant(constant) for entry in entries.values()]
    try:
        gradients = torch.autograd.grad(
            [graph.edge(entry).gradient_edge() for entry in entries.values()],
            [Edge(graph.nodes[leaf], 0).gradient_edge() for leaf in entries],
            sent,
            retain_graph=True,
        )
    except Exception:  # of a hook, for example of one that changes its gradient in place
        return True
    for one, gradient in zip(sent, gradients, strict=True):
        is_view = gradient.data_ptr() == one.data_ptr() and not any(gradient.stride())
        # The gradient of a slice has zeros around the constants.
        if not is_view and not gradient.count_nonzero() == (gradient == one.flatten()[:1]).sum() == one.numel():
            return True
    return False


def _compare(plan: Plan, graph: Graph) -> None:
    # Powers of two: a cast to half precision in a hook rounds the scaled gradient to the scaled value.
    weights = random_powers(graph.samples).to(graph.losses)
    if abs(float(weights.sum()) - 1) < 0.25:  # with a sum of 1, a constant that a hook adds to each row would cancel
        weights = weights / 2
    sums: dict[str, Tensor] = {}
    sizes: dict[str, float] = {}
    every = torch.arange(graph.samples, device=graph.losses.device)

    def measure(grad: PerSampleGrad, name: str) -> None:
        # Rows of operations without a rule are computed one by one; a hook may act on their sum in another way.
        total = grad.sum_of_rows(weights) if isinstance(grad, RowwiseGrad) else grad.sum(weights)
        sums[name] = _comparable(graph, name, total)
        sizes[name] = float((grad.underflowed_norms(every) * weights).sum())

    with torch.no_grad():
        backward_past(graph, plan.stops, GradBuilder(plan, graph, measure, differentiable=False, keep=False).add)
    relative, canceled = _tolerances(graph)
    noise = canceled * max(sizes.values())
    for name, expected in _from_autograd(graph, weights).items():
        off = float((sums[name].to(expected) - expected).abs().double().square().sum().sqrt())
        if isfinite(off) and off > relative * sizes[name] + noise:
            operation = nonlinear_operation(graph)
            if operation is not None:  # the reason may be above the cut
                raise NotLinearError(operation)
            if off <= _rounding_errors(plan, graph, weights, name):
                continue
            raise GraphError(
                f"per-sample gradients must sum to the gradient from autograd; found that those of {name!r} do not. "
                "A hook on a tensor or node between an operation and this parameter changes the gradient, or a hook "
                "compares samples of the batch. Remove the hook, or pass strategy='reference'."
            )


def _rounding_errors(plan: Plan, graph: Graph, weights: Tensor, parameter: str) -> float:
    """Rounding errors of the gradient of a parameter: relative to the terms that are added, which may cancel, as those
    of the bias of keys do over tokens.
    """
    terms: list[float] = []

    def measure(grad: PerSampleGrad, name: str) -> None:
        if name == parameter:
            terms.append(float((term_norms(grad).double() * weights).sum()))

    graph.tracks_terms, before = True, graph.tracks_terms
    with torch.no_grad():
        backward_past(graph, plan.stops, GradBuilder(plan, graph, measure, differentiable=False, keep=False).add)
    graph.tracks_terms = before
    return Tolerance(graph).relative * sum(terms)


def _tolerances(graph: Graph) -> tuple[float, float]:
    """Tolerance relative to the norm of a parameter's gradients, and tolerance relative to the largest such norm.

    The second covers rounding errors of gradients that cancel to zero.
    """
    dtypes = graph.dtypes
    if dtypes & {torch.float16, torch.bfloat16}:
        return 5e-2, 5e-2
    if dtypes <= {torch.float64, torch.complex128}:
        return 1e-10, 1e-10
    return (1e-4 if is_deterministic(graph) else 1e-3), 1e-4


def _from_autograd(graph: Graph, weights: Tensor) -> dict[str, Tensor]:
    """Dense gradient of the weighted losses by name, without parameters that have hooks themselves."""
    names = [name for leaf, name in graph.leaves.items() if not leaf.variable._backward_hooks]
    gradients: dict[str, Tensor] = {}

    def receive(name: str, gradient: Tensor) -> None:
        gradients[name] = _comparable(graph, name, gradient)

    backward_to_leaves(graph, names, weights, receive)
    return gradients


def _comparable(graph: Graph, name: str, gradient: Tensor) -> Tensor:
    """The gradient; of a sharded model a random projection of it, with the same norm in expectation, to save memory."""
    if not graph.sharded:
        return gradient
    projected = DenseGrad(gradient[None]).project(*random_signs(name, gradient.shape, PROJECTED, 0, gradient.device))
    return projected / PROJECTED**0.5
