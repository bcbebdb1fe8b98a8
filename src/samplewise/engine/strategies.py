"""Strategies for computing per-sample gradients, one parameter after the other: the plan, and the passes that apply it.

    fused        one backward pass; all gradients are kept, as rows or factors, so that all quantities share the pass
    twice        gradients are dropped after use: one backward pass per quantity. Rows that are small compared with the
                 activations are kept for the weighted sum, which then may need only a part of the second pass
    factors      as twice, with factors also where rows are smaller
    full         as fused, with all gradients converted to rows
    reference    rows from one backward pass per sample

Gradients are converted, and the first quantity is computed from them, while the backward pass is at their node, because
their inputs are still in the CPU cache then.

A plan is a claim about all graphs of a structure. What can change between two of them is verified for each graph: by
`Planner`, before the pass, sample data below the cut and the ownership through nodes that were probed; by
`BackwardStrategy`, during the pass, Python functions, hooks, and gradients that could not verify the ownership before
because they were zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from samplewise.core.memory import keep_freed_memory
from samplewise.engine.backward import OperandGradients, backward_past, backward_to_leaves, watch_backward
from samplewise.engine.deferred_checks import is_traced
from samplewise.engine.grads.base import PerSampleGrad
from samplewise.engine.grads.dense import DenseGrad
from samplewise.engine.graph.graph import Edge, Graph, is_accumulate_grad
from samplewise.engine.graph.hook_registry import hook_places, leave_out_forward_hooks, may_have_hooks
from samplewise.engine.graph.saved import Versions
from samplewise.engine.hook_checks import hook_checks, refuse_hooks_below_cut
from samplewise.engine.ownership.cut import find_cut, probed_cut
from samplewise.engine.ownership.independence import (
    Constants,
    may_refuse,
    refuse_batch_norm,
    refuse_broadcast,
    sample_data,
    with_frozen_weights,
)
from samplewise.engine.ownership.local_probe import FunctionChecks, hold
from samplewise.engine.ownership.owner_map import Regular
from samplewise.engine.ownership.verify import follows_weights, verify_again
from samplewise.engine.ownership.weighted_passes import (
    NotLinearError,
    Tolerance,
    is_deterministic,
    largest,
    nonlinear_operation,
)
from samplewise.engine.plan import ExplainRow, GradBuilder, Plan, Quantity, make_plan
from samplewise.engine.rules import RULES
from samplewise.engine.slow_paths import place_of, warn_if_slow
from samplewise.errors import GraphError
from samplewise.parallel.sharded_parameters import unsharded


class Planner:
    """The plan of a graph, made or looked up when it is first needed.

    `modules`: tensors of these modules do not count as sample data. `interacting`: see `gradients`.
    """

    def __init__(self, graph: Graph, modules: Iterable[nn.Module], interacting: str):
        self.graph = graph
        self.modules = modules
        self.interacting = interacting
        self._plan: Plan | None = None

    def plan(self) -> Plan:
        if self._plan is None and not self.find():
            self._plan = self._analyze()
        assert self._plan is not None
        return self._plan

    def find(self, verify: bool = True) -> bool:
        """Look up the plan; False if there is none for such graphs, or if it does not hold for this one. `verify`: if
        False, also if this depends on values of this graph.
        """
        losses = self.graph.losses
        if not self.graph.sharded:  # `harmless_hooks` has those of sharded models
            leave_out_forward_hooks(self.modules)
        plan: Plan | None = self.graph.sizes.plans.get(self.interacting)
        if plan is None or (not verify and (plan.claims or plan.data_entries)):
            return False
        if list(map(RULES.get, plan.rules)) != list(plan.rules.values()):  # the caller may have added a rule
            return False
        if plan.data_entries and (self.interacting == "refuse" or is_traced(losses)):
            # Integers that enter below the cut may be positions: no reason to look at this graph.
            data = list(sample_data(self.graph, plan.data_entries, self._constants()))
            if data and (may_refuse(data) or is_traced(losses)):
                return False
        if plan.claims and (is_traced(losses) or not hold(plan.claims, self.graph)):  # verified with values
            return False
        self._plan = plan
        return True

    def plan_by_probe(self) -> Plan:
        """Replace the plan by one that does not depend on derived ownership."""
        self._plan = make_plan(self.graph, probed_cut(self.graph, self._constants(), self.interacting))
        return self._plan

    def verify_again(self) -> bool:
        """Verify the ownership of the current plan with new passes; False if it does not hold."""
        plan = self.plan()
        owner_maps = {self.graph.edge(key): owner_map for key, owner_map in plan.owner_maps.items()}
        pending = verify_again(self.graph, owner_maps, plan.derivation)
        if pending is None:
            self.graph.sizes.plans.pop(self.interacting, None)
            return False
        plan.pending = set(map(self.graph.key, pending))
        return True

    def _analyze(self) -> Plan:
        if self.interacting == "refuse":
            refuse_batch_norm(self.graph, self.modules)
            refuse_broadcast(self.graph)
        constants = self._constants()
        cut = find_cut(self.graph, constants, self.interacting)
        plan = make_plan(self.graph, cut)
        functions = [*(claim.node for claim in plan.functions), *plan.recomputed]
        plan.frozen = list(with_frozen_weights(self.graph, functions, constants))
        if cut.cause is not None:
            place = "" if cut.cause.node is None else place_of(self.graph, cut.cause.node, self.modules)
            plan.cause = cut.cause.text + place
        sizes = self.graph.sizes
        # Routing by data has new shapes in each step: owners of rows are kept only for shapes that are met again.
        small = sizes.analyzed or all(isinstance(owner_map, Regular) for owner_map in plan.owner_maps.values())
        if cut.proven and not cut.by_data and small:
            sizes.plans[self.interacting] = plan
        sizes.analyzed = True
        return plan

    def _constants(self) -> Constants:
        return Constants(self._model_tensors())

    def _model_tensors(self) -> Iterator[Tensor]:
        """Parameters and buffers of the model, some of them twice."""
        yield from self.graph.wanted.values()
        for node in self.graph.nodes:
            if is_accumulate_grad(node) and isinstance(node.variable, nn.Parameter):
                yield node.variable
        for module in self.modules:
            for part in module.modules():  # a tenth of the time of module.parameters()
                for tensor in (*part._parameters.values(), *part._buffers.values()):
                    if tensor is not None:
                        yield tensor


class BackwardStrategy:
    """Strategies "fused" (keep=True), "twice" and "factors" (keep=False): one backward pass to the cut."""

    def __init__(self, planner: Planner, create_graph: bool, keep: bool, factors: bool = False):
        self.planner = planner
        self.plan = planner.plan()
        self.create_graph = create_graph
        self.keep = keep
        self.factors = factors
        self.grads: dict[str, PerSampleGrad] = {}
        self.rows: dict[str, DenseGrad] = {}  # small ones of the last pass, if gradients are not kept
        self.versions: Versions  # of the tensors that `grads` refer to, from the pass that has made them
        self.ordinary: Callable[[], object] | None = None  # ordinary backward pass that replaces the next one here
        self.make_builder: type[GradBuilder] = GradBuilder  # `profile` has one that measures its time

    def evaluate(self, quantity: Quantity) -> dict[str, Any]:
        """Return quantity(grad, name) for each parameter in the graph, by name."""
        if not self.grads:
            return self._evaluate_in_pass(quantity, self.keep)
        self.versions.check()
        compute = partial(self._of_kept, quantity) if self.planner.graph.sharded else quantity
        return {name: compute(grad, name) for name, grad in self.grads.items()}

    def release(self, quantity: Quantity) -> Iterator[tuple[str, Any]]:
        """Pairs (name, quantity(grad, name)); kept gradients are dropped one by one."""
        if not self.grads:
            return iter(self._evaluate_in_pass(quantity, keep=False).items())
        self.versions.check()
        compute = partial(self._of_kept, quantity) if self.planner.graph.sharded else quantity
        return ((name, compute(self.grads.pop(name), name)) for name in list(self.grads))

    def _of_kept(self, quantity: Quantity, grad: PerSampleGrad, name: str) -> Any:
        """The quantity of a parameter of a sharded model, which is gathered, because the pass has left its module."""
        with unsharded([self.planner.graph.wanted[name]]):
            return quantity(grad, name)

    def _evaluate_in_pass(self, quantity: Quantity, keep: bool) -> dict[str, Any]:
        """Compute the quantity during a backward pass."""
        keep_freed_memory()
        builder = self._pass(quantity, keep)
        if builder is None:
            self.plan = self.planner.plan_by_probe()
            builder = self._pass(quantity, keep)
            assert builder is not None  # a probed plan has no proof that a pass could refute
        builder.finish()
        if not self.plan.proven:
            warn_if_slow(
                self.planner.graph,
                f"{self.plan.cause}, so that the owners of all gradients are found by passes through the whole graph",
                "about ten backward passes in each step",
                "Write the operation so that each sample has rows of its own, or pass samples that do not interact.",
            )
        self.versions = builder.versions
        self.grads = builder.grads
        self.rows = builder.rows
        return builder.results

    def _pass(self, quantity: Quantity, keep: bool, watches: bool = True) -> GradBuilder | None:
        """Run one backward pass; None if it has shown that a proof of ownership does not hold.

        watches: hooks are verified where they are, if this is possible.
        """
        plan = self.plan
        pending = plan.pending
        graph = self.planner.graph
        run = self.ordinary

        # Where hooks or Python functions may change gradients unseen, the ownership is verified by one more pass, with
        # weights. Most graphs have neither: there is nothing to watch.
        hooked = may_have_hooks(graph)
        hooks = hook_checks(graph, plan, ordinary=run is not None) if hooked and watches else None
        weighs = plan.are_due(plan.recomputed) or not watches or (hooked and hooks is None)
        if not (plan.proven and is_deterministic(graph)):
            weighs |= plan.are_due(graph.structure.functions)
        if weighs:
            hooks = None
        # A probe has computed these gradients already; a Function or hook may have changed them in place since.
        in_place = bool(graph.structure.functions) or (weighs and hooked)
        builder = self.make_builder(plan, graph, quantity, self.create_graph, keep, self.factors, in_place)
        builder.ordinary = run is not None
        functions = None
        if plan.functions and not weighs and is_deterministic(graph):
            functions = FunctionChecks(graph, plan.functions_to_verify, builder.has_row_grads)
        if plan.gradients:
            probed = dict(plan.gradients)
            plan.gradients.clear()
            unusable = self.create_graph or graph.sharded or in_place or hooked
            if not unusable and len(probed) == len(plan.owner_maps):
                for at, slots in plan.stops.slots.items():
                    builder.add(at, {slot: probed.pop((at, slot)) for slot in slots})
                return builder

        # The pass: gradients are converted as they arrive, and what its plan claims is recorded.
        nonzero: list[Tensor] = []  # whether gradients that could not verify their ownership so far are non-zero
        sums: dict[Edge, Tensor] = {}  # of the absolute values of each sample in this pass

        def record_and_add(at: int, gradients: dict[int, Tensor]) -> OperandGradients | None:
            nonzero.extend(_is_not_zero(g) for slot, g in gradients.items() if (at, slot) in pending)
            if weighs:
                for slot, g in gradients.items():
                    sums[graph.edge((at, slot))] = plan.owner_maps[at, slot].sizes(g.detach())
            if hooks is not None:
                hooks.reach(at, gradients)
            return builder.add(at, gradients)

        receive = record_and_add if pending or weighs or hooks is not None else builder.add
        self.ordinary = None
        with (
            nullcontext() if functions is None else functions.watch(),
            nullcontext() if hooks is None else hooks.watch(plan.stops),
        ):
            if run is None:
                backward_past(graph, plan.stops, receive, None, self.create_graph, builder.recomputes, hooks)
            elif not watch_backward(graph, plan.stops, receive, run):
                return self._pass(quantity, keep)

        # The verdict: hooks where they are, ownership by weights, Python functions, gradients that were zero so far.
        if hooks is not None and not hooks.hold(plan.owners, includes_unchanged=not self.keep):
            return self._pass(quantity, keep, watches=False)
        if weighs:
            owner_maps = {graph.edge(key): owner_map for key, owner_map in plan.owner_maps.items()}
            plain = sums if run is None else None  # the losses of an ordinary pass may be scaled
            if not follows_weights(graph, plan.stops, owner_maps, plan.derivation, plain):
                if not plan.proven:
                    raise NotLinearError(nonlinear_operation(graph) or "an operation")
                return None
            places = hook_places(graph)
            if places is not None:
                plan.by_passes.update(() if watches else places.keys)
                graph.sizes.hooked = places.edges.intersection(plan.owners).difference(plan.by_passes)
        if functions is not None and not functions.hold:
            return None
        verifiable = bool(nonzero) and bool(torch.stack(nonzero).any())  # one host sync for all
        if verifiable and not self.planner.verify_again():
            return None
        if builder.not_linear is not None:  # raised after the pass, which may be one of the caller
            raise NotLinearError(builder.not_linear)
        plan.verified_passes += 1
        # Code of the caller that has run in the pass may have registered hooks, too.
        if (hooked or graph.structure.functions or run is not None) and may_have_hooks(graph):
            refuse_hooks_below_cut(plan, graph)
        return builder

    def explain(self) -> list[ExplainRow]:
        return list(self.evaluate(lambda grad, name: self.plan.explain(name, grad)).values())


def _is_not_zero(gradient: Tensor) -> Tensor:
    if is_traced(gradient):
        raise GraphError(
            "ownership of gradients must be verified with non-zero gradients before an update can be compiled; "
            "found a layer whose gradient has been zero so far. Train uncompiled until it is non-zero."
        )
    return gradient.any()


class RowsStrategy:
    """Strategy "full": `BackwardStrategy` with all gradients converted to rows and kept."""

    def __init__(self, source: BackwardStrategy):
        self.source = source
        self.grads: dict[str, PerSampleGrad] = {}

    def evaluate(self, quantity: Quantity) -> dict[str, Any]:
        if not self.grads:
            self.grads = dict(self.source.release(lambda grad, _: DenseGrad(grad.rows(0, grad.samples))))
        return {name: quantity(grad, name) for name, grad in self.grads.items()}

    def release(self, quantity: Quantity) -> Iterator[tuple[str, Any]]:
        yield from self.evaluate(quantity).items()

    def explain(self) -> list[ExplainRow]:
        return self.source.explain()


class SingleSampleStrategy:
    """Strategy "twice" for one sample of a sharded model: an ordinary backward pass, whose gradients are dropped."""

    def __init__(self, graph: Graph):
        self.graph = graph

    def evaluate(self, quantity: Quantity) -> dict[str, Any]:
        results: dict[str, Any] = {}

        def receive(name: str, gradient: Tensor) -> None:
            results[name] = quantity(DenseGrad(gradient[None]), name)

        graph = self.graph
        backward_to_leaves(graph, graph.leaves.values(), torch.ones_like(graph.losses), receive)
        return results

    def release(self, quantity: Quantity) -> Iterator[tuple[str, Any]]:
        yield from self.evaluate(quantity).items()

    def explain(self) -> list[ExplainRow]:
        return [
            ExplainRow(name, tuple(self.graph.wanted[name].shape), "", "one backward pass", "dense")
            for name in self.graph.leaves.values()
        ]


# --- one backward pass per sample ------------------------------------------------------------------------------------


def jacobian_rows(losses: Tensor, parameters: Mapping[str, Tensor], create_graph: bool = False) -> dict[str, Tensor]:
    """Jacobian of the losses, name -> (b, *shape): row i is the gradient of losses[i]."""
    unit = torch.eye(len(losses), dtype=losses.dtype, device=losses.device)
    rows = [gradient_of(losses, parameters, weights, create_graph) for weights in unit]
    return {name: torch.stack([row[name] for row in rows]) for name in parameters}


def gradient_of(
    losses: Tensor, parameters: Mapping[str, Tensor], weights: Tensor, create_graph: bool = False
) -> dict[str, Tensor]:
    """Dense gradient of the weighted sum of the losses (b,), name -> shape; zeros for parameters without gradient."""
    gradients = torch.autograd.grad(
        losses, list(parameters.values()), weights, retain_graph=True, create_graph=create_graph, allow_unused=True
    )
    of_all = {}
    for (name, p), g in zip(parameters.items(), gradients, strict=True):
        dense = torch.zeros_like(p) if g is None else g
        of_all[name] = dense if dense.layout is torch.strided else dense.to_dense()
    return of_all


class LoopStrategy:
    """Strategy "reference": rows from one backward pass per sample."""

    def __init__(self, graph: Graph, create_graph: bool):
        self.graph = graph
        reached = {name: graph.wanted[name] for name in graph.leaves.values()}
        self.rows = jacobian_rows(graph.losses, reached, create_graph)

    def adds_up(self) -> bool:
        """True if the rows add up to the gradient of the summed losses."""
        sums: dict[str, Tensor] = {}
        backward_to_leaves(self.graph, self.rows, torch.ones_like(self.graph.losses), sums.__setitem__)
        limit = Tolerance(self.graph).of(largest(rows.detach() for rows in self.rows.values()))
        return all(
            bool(((rows.detach().sum(0) - sums[name]).abs() <= limit).all())
            for name, rows in self.rows.items()
            if name in sums
        )

    def evaluate(self, quantity: Quantity) -> dict[str, Any]:
        return {name: quantity(DenseGrad(rows), name) for name, rows in self.rows.items()}

    def release(self, quantity: Quantity) -> Iterator[tuple[str, Any]]:
        yield from self.evaluate(quantity).items()

    def explain(self) -> list[ExplainRow]:
        return [
            ExplainRow(name, tuple(rows.shape[1:]), "", "one backward per sample", "dense")
            for name, rows in self.rows.items()
        ]


GradStrategy = BackwardStrategy | RowsStrategy | SingleSampleStrategy | LoopStrategy
