"""Hooks of the caller in a backward pass: verified above the cut, refused below it.

Above the cut, a hook replaces the gradient that arrives at a node. `HookChecks` watches what arrives, which is the sum
of what the consumers of the node return, and what the hooks leave of it:

- If that is the same tensor at all nodes, the pass is that of the graph without hooks: no hook is called again.
- Else all hooks of the graph are called once more after the pass, in the same order, with the gradients that have
  arrived, weighted by powers of two that differ between samples. What they leave must follow the weights. Hooks that
  round, clip or threshold gradients, that compare samples, or that do something else in each call, do not.

Hooks that cannot be verified in this way, such as those that change gradients in place, are verified by a backward pass
with weights: see `verify.follows_weights`.

Below the cut, on a transposed weight or on the node of the operation itself, a hook changes the parameter's gradient
after per-sample gradients are read. If a graph may have such hooks, `refuse_hooks_below_cut` compares a weighted sum of
its per-sample gradients with the gradient from autograd.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C import _DisableTorchDispatch
from torch.autograd.graph import GradientEdge, _engine_run_backward

from samplewise.core.files import have_same_bytes
from samplewise.engine.backward import Stops, backward_past, backward_to_leaves
from samplewise.engine.deferred_checks import is_traced
from samplewise.engine.generic import as_gradient
from samplewise.engine.grads.base import PerSampleGrad, RowwiseGrad, term_norms
from samplewise.engine.grads.dense import DenseGrad
from samplewise.engine.grads.indexed import VIEWS
from samplewise.engine.grads.kernels import random_signs
from samplewise.engine.graph.graph import Edge, EdgeKey, Graph, Node
from samplewise.engine.graph.hook_registry import (
    HookPlaces,
    foreign_hooks,
    have_hooks,
    hook_places,
    remove_afterwards,
)
from samplewise.engine.graph.saved import run_in_backward
from samplewise.engine.ownership.local_probe import follows
from samplewise.engine.ownership.owner_map import OwnerMap
from samplewise.engine.ownership.ownership import is_identity
from samplewise.engine.ownership.verify import has_verified_hooks
from samplewise.engine.ownership.weighted_passes import (
    WIDE,
    NotLinearError,
    Tolerance,
    distinct_powers,
    is_deterministic,
    is_float16,
    nonlinear_operation,
    random_powers,
)
from samplewise.engine.plan import GradBuilder, Plan
from samplewise.errors import GraphError


def hook_checks(graph: Graph, plan: Plan, ordinary: bool) -> HookChecks | None:
    """Checks of all hooks above the cut; None if the ownership must be verified by a pass with weights.

    ordinary: the pass is one of the caller, which does not start from the losses.
    """
    places = hook_places(graph)
    if places is None:
        return None
    checks = HookChecks(graph, places, plan.side)
    if not checks.slots:
        return checks
    watchable = (
        plan.proven
        and plan.by_passes.isdisjoint(places.keys)
        and is_deterministic(graph)
        and plan.operands.keys().isdisjoint([*places.before, *places.after])
        and all(is_identity(graph.nodes[at]) for at in places.after if at not in plan.side)
        and places.after.keys().isdisjoint(claim.node for claim in plan.functions)
        and not (ordinary and 0 in checks.slots)
    )
    owner_maps = {graph.edge(key): owner_map for key, owner_map in plan.owner_maps.items()}
    return checks if watchable and has_verified_hooks(graph, owner_maps, plan.derivation) else None


class _Arrival(NamedTuple):
    """Gradient that has arrived at an edge."""

    value: Tensor  # copy that hooks do not get
    tensor: Tensor | None  # what they get, if it is known


class HookChecks:
    """Verifies the hooks of one graph in a backward pass."""

    def __init__(self, graph: Graph, places: HookPlaces, side: Iterable[int]):
        self.graph = graph
        self.places = places
        self.slots: dict[int, list[int]] = {}  # output slots that are watched, by node
        self._watched: dict[tuple[Node, int], EdgeKey] = {}
        for at in sorted(places.nodes.difference(side)):
            has_own = at in places.before or at in places.after
            self.slots[at] = [slot for slot in graph.inner[at] if has_own or (at, slot) in places.edges]
            self._watched.update({(graph.nodes[at], slot): (at, slot) for slot in self.slots[at]})
        self.captures: list[tuple[Node, int]] = []  # edges with several consumers, whose gradients autograd adds
        self._arrivals: dict[EdgeKey, _Arrival] = {}
        self._remainders: dict[int, Mapping[int, Tensor]] = {}  # by node, in the order of the pass
        self._foreign = foreign_hooks() if self.slots else 0
        self._thread = threading.get_ident()

    def watch(self, stops: Stops) -> AbstractContextManager[None]:
        """Context manager: the backward pass in the block is watched. What arrives at `stops` is passed to `reach`."""
        if not self.slots:
            return nullcontext()
        nodes = self.graph.nodes
        consumers: dict[int, list[tuple[int, EdgeKey]]] = {}
        for edge, key in self._watched.items():
            uses = self.graph.structure.consumers.get(key, ())
            for at, position in uses:
                consumers.setdefault(at, []).append((position, key))
            if len(uses) > 1 and key[0] not in stops.ends:
                self.captures.append(edge)
        handles = []
        for at in set(self.slots).difference(stops.slots):
            if at in self.places.after:
                handles.append(nodes[at].register_hook(partial(self._after, at)))
            else:
                handles.append(nodes[at].register_prehook(partial(self._before, at)))
        handles += [nodes[at].register_hook(partial(self._read_operands, uses)) for at, uses in consumers.items()]
        return remove_afterwards(handles)

    def start(self, edges: Iterable[tuple[Node, int]], gradients: Iterable[Tensor]) -> None:
        """Note the gradients from which a pass, or a part of it, starts."""
        for edge, gradient in zip(edges, gradients, strict=True) if self.slots else ():
            if tuple(edge) in self._watched:
                self._arrive(self._watched[tuple(edge)], gradient)

    def capture(self, gradients: Iterable[Tensor | None]) -> None:
        """Note the gradients that the hooks at `captures` got."""
        for edge, gradient in zip(self.captures, gradients, strict=True):
            key = self._watched[edge]
            if key in self._arrivals:
                self._arrivals[key] = self._arrivals[key]._replace(tensor=gradient)

    def reach(self, at: int, gradients: Mapping[int, Tensor]) -> None:
        """Note what the hooks of a node have left of its gradients (by output slot)."""
        if at in self.slots:
            self._remainders.setdefault(at, gradients)

    # Autograd would take a value that one of these hooks returns for other gradients.

    def _before(self, at: int, gradients: Sequence[Tensor | None]) -> None:
        if threading.get_ident() == self._thread:
            self.reach(at, {slot: g for slot, g in enumerate(gradients) if g is not None})

    def _after(self, at: int, operands: Sequence[Tensor | None], gradients: Sequence[Tensor | None]) -> None:
        self._before(at, operands)  # of an identity: operand k is output k

    def _read_operands(
        self, uses: Sequence[tuple[int, EdgeKey]], operands: Sequence[Tensor | None], gradients: object
    ) -> None:
        if threading.get_ident() == self._thread:
            for position, key in uses:
                gradient = operands[position]
                if gradient is not None:
                    self._arrive(key, gradient)

    def _arrive(self, key: EdgeKey, gradient: Tensor) -> None:
        earlier = self._arrivals.get(key)
        zeros = self.graph.inner[key[0]][key[1]]
        with _DisableTorchDispatch():  # a mode must not see these operations
            value = gradient.detach()
            is_same = value.layout is zeros.layout and value.shape == zeros.shape and value.dtype is zeros.dtype
            if not is_same:
                value = as_gradient(value, self.graph.edge(key)).to(zeros.dtype)
            if earlier is None:
                self._arrivals[key] = _Arrival(value.clone(), gradient if is_same else None)
            else:  # autograd adds them in this order
                self._arrivals[key] = _Arrival(earlier.value + value, None)

    def hold(self, owners: Mapping[EdgeKey, OwnerMap], includes_unchanged: bool) -> bool:
        """True if the watched pass shows that hooks have changed nothing, or keep to the ownership of gradients.

        includes_unchanged: hooks that have changed nothing are verified, too, because another pass with weights will
        call them.
        """
        if not self.slots:
            return True
        if foreign_hooks() != self._foreign:  # a hook may have registered another one
            return False
        with torch.no_grad(), _DisableTorchDispatch():
            verdicts = [self._is_changed(key) for key in self._watched.values()]
        if None in verdicts:
            return False
        if not (includes_unchanged or True in verdicts) or not self._arrivals:
            return True
        return self._follow(owners)

    def _is_changed(self, key: EdgeKey) -> bool | None:
        """True if hooks may have replaced the gradient of an edge; None if they have changed one in place, which may be
        the gradient of other edges, too.
        """
        arrival = self._arrivals.get(key)
        remainder = self._remainders.get(key[0], {}).get(key[1])
        if arrival is None:
            return None if remainder is not None and bool(remainder.any()) else False
        if remainder is None or remainder.layout is not torch.strided or remainder.shape != arrival.value.shape:
            return None
        if arrival.tensor is not None and not have_same_bytes(arrival.tensor, arrival.value):
            return None
        return remainder is not arrival.tensor  # equal values are not enough: a roll may leave them as they are

    def _follow(self, owners: Mapping[EdgeKey, OwnerMap]) -> bool:
        """Call all hooks again with weighted gradients; True if what they leave follows the weights."""
        graph = self.graph
        if is_float16(graph):  # needs several passes
            return False
        sizes = torch.stack([owners[key].sizes(arrival.value) for key, arrival in self._arrivals.items()])
        sizes /= sizes.amax(1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
        (weights,) = distinct_powers(graph, sizes.sum(0), base=WIDE, digits=1)
        flags: list[Tensor] = []

        def replay() -> None:
            with torch.no_grad():
                for at, remainder in self._remainders.items():
                    keys = [(at, slot) for slot in self.slots[at] if (at, slot) in self._arrivals]
                    weighted = {key: owners[key].apply_weights(self._arrivals[key].value, weights) for key in keys}
                    results = self._call_hooks(at, {slot: g for (_, slot), g in weighted.items()})
                    for key in keys:
                        result = results[key[1]]
                        expected = owners[key].apply_weights(remainder[key[1]], weights)
                        if result is None or result.shape != expected.shape:
                            flags.append(torch.zeros((), dtype=torch.bool))
                        else:
                            flags.append(follows(result, expected, graph))

        try:
            run_in_backward(replay)
        except Exception:  # of a hook that supports one call only
            return False
        return bool(torch.stack(flags).all())

    def _call_hooks(self, at: int, gradients: Mapping[int, Tensor]) -> Sequence[Tensor | None]:
        """What the hooks of a node leave of these gradients (by output slot)."""
        node = self.graph.nodes[at]
        arriving: list[Tensor | None] = [None] * len(node._input_metadata)
        for slot, gradient in gradients.items():
            arriving[slot] = gradient
            if (at, slot) in self.places.edges:  # a pass from the edge to itself runs the hooks of its tensor only
                edge = (GradientEdge(node, slot),)
                (arriving[slot],) = _engine_run_backward(
                    edge, (gradient,), True, False, edge, True, accumulate_grad=False
                )
        remainder: Sequence[Tensor | None] = tuple(arriving)
        for hook in self.places.before.get(at, ()):
            remainder = _after_hook(remainder, hook(remainder))
        after_prehooks = remainder
        for hook in self.places.after.get(at, ()):
            remainder = _after_hook(remainder, hook(remainder, after_prehooks))
        return remainder


def _after_hook(gradients: Sequence[Tensor | None], result: object) -> Sequence[Tensor | None]:
    """The gradients after a hook that has returned this result."""
    if result is None:
        return gradients
    return result if isinstance(result, tuple) else (result,)


# --- hooks below the cut ---------------------------------------------------------------------------------------------

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
    if graph.sharded or have_hooks(graph, plan.operands):
        return True
    passes: list[dict[int, EdgeKey]] = [{}]  # several uses of a parameter in one pass each: autograd adds them
    for operand_plan in (operand_plan for operands in plan.operands.values() for operand_plan in operands):
        for route, leaf in zip(operand_plan.branch.routes, operand_plan.branch.leaves, strict=True):
            if operand_plan.branch.entry[0] == leaf or graph.nodes[leaf].variable._backward_hooks:
                continue
            if route.changing is None or not set(route.changing) <= VIEWS:
                return True
            entries = next((entries for entries in passes if leaf not in entries), None)
            if entries is None:
                passes.append(entries := {})
            entries[leaf] = operand_plan.branch.entry
    constant = CONSTANTS[int(torch.randint(len(CONSTANTS), (), generator=_generator))]
    return any(_is_changed(graph, entries, constant) for entries in passes if entries)


def _is_changed(graph: Graph, entries: Mapping[int, EdgeKey], constant: float) -> bool:
    """True if the gradient of a parameter (by position) is another than the constant sent from the entry."""
    constants = [graph.edge(entry).constant(constant) for entry in entries.values()]
    try:
        gradients = torch.autograd.grad(
            [graph.edge(entry).gradient_edge() for entry in entries.values()],
            [Edge(graph.nodes[leaf], 0).gradient_edge() for leaf in entries],
            constants,
            retain_graph=True,
        )
    except Exception:  # of a hook, for example of one that changes its gradient in place
        return True
    for sent, gradient in zip(constants, gradients, strict=True):
        is_view = gradient.data_ptr() == sent.data_ptr() and not any(gradient.stride())
        # The gradient of a slice has zeros around the constants.
        if not is_view and not gradient.count_nonzero() == (gradient == sent.flatten()[:1]).sum() == sent.numel():
            return True
    return False


def _compare(plan: Plan, graph: Graph) -> None:
    # Powers of two: a cast to half precision in a hook rounds the scaled gradient to the scaled value.
    weights = random_powers(graph.samples).to(graph.losses)
    if abs(float(weights.sum()) - 1) < 0.25:  # with a sum of 1, a constant that a hook adds to each row would cancel
        weights = weights / 2
    sums: dict[str, Tensor] = {}
    sizes: dict[str, float] = {}
    samples = torch.arange(graph.samples, device=graph.losses.device)

    def measure(grad: PerSampleGrad, name: str) -> None:
        # Rows of operations without a rule are computed one by one; a hook may act on their sum in another way.
        total = grad.sum_of_rows(weights) if isinstance(grad, RowwiseGrad) else grad.sum(weights)
        sums[name] = _comparable(graph, name, total)
        sizes[name] = float((grad.underflowed_norms(samples) * weights).sum())

    with torch.no_grad():
        backward_past(graph, plan.stops, GradBuilder(plan, graph, measure, differentiable=False, keep=False).add)
    relative, canceled = _tolerances(graph)
    noise = canceled * max(sizes.values())
    from_autograd: dict[str, Tensor] = {}

    def receive(name: str, gradient: Tensor) -> None:
        from_autograd[name] = _comparable(graph, name, gradient)

    # Rows do not contain what hooks on the parameters themselves change.
    names = [name for leaf, name in graph.leaves.items() if not leaf.variable._backward_hooks]
    backward_to_leaves(graph, names, weights, receive)
    for name, expected in from_autograd.items():
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


def _comparable(graph: Graph, name: str, gradient: Tensor) -> Tensor:
    """The gradient; of a sharded model a random projection of it, with the same norm in expectation, to save memory."""
    if not graph.sharded:
        return gradient
    signs = random_signs(name, gradient.shape, 1, PROJECTED, 0, gradient.device)
    projected = DenseGrad(gradient[None]).project(*signs)
    return projected / PROJECTED**0.5
