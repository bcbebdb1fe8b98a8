"""Strategies for computing per-sample gradients, one parameter after the other.

    fused        one backward pass; all gradients are kept, as rows or factors, so that all quantities share the pass
    twice        gradients are dropped after use: one backward pass per quantity. Rows that are small compared with the
                 activations are kept for the weighted sum, which then may need only a part of the second pass
    factors      as twice, with factors also where rows are smaller
    full         as fused, with all gradients converted to rows
    reference    rows from one backward pass per sample

Gradients are converted, and the first quantity is computed from them, while the backward pass is at their node, because
their inputs are still in the CPU cache then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch._C import _set_grad_enabled  # torch.set_grad_enabled takes microseconds

from samplewise.core.memory import keep_freed_memory
from samplewise.core.text import plural
from samplewise.engine.backward import OperandGradients, backward_past, backward_to_leaves, watch_backward
from samplewise.engine.deferred_checks import is_traced
from samplewise.engine.grads.base import PerSampleGrad
from samplewise.engine.grads.dense import DenseGrad
from samplewise.engine.graph.graph import Edge, Graph, raise_graph_error
from samplewise.engine.graph.hook_registry import hook_places, may_have_hooks
from samplewise.engine.graph.saved import Versions
from samplewise.engine.hook_checks import HookChecks, hook_checks
from samplewise.engine.hook_refusal import refuse_hooks_below_cut
from samplewise.engine.ownership.linearity import NotLinearError, nonlinear_operation
from samplewise.engine.ownership.local_probe import FunctionChecks
from samplewise.engine.ownership.masked_passes import is_deterministic
from samplewise.engine.ownership.verify import follows_weights
from samplewise.engine.plan import ExplainRow, GradBuilder, Planner, Quantity
from samplewise.engine.reference import LoopStrategy
from samplewise.engine.slow_paths import warn_if_slow
from samplewise.errors import GraphError
from samplewise.parallel.sharded_parameters import unsharded

Result = TypeVar("Result")

ROWS_MODIFIED = (
    "rows of per-sample gradients must not change before the last use of the gradients; found rows modified in place. "
    "Write rows = rows * 2 instead of rows *= 2, or compute all quantities before the change."
)


class QuantityEvaluator:
    """Quantities of the per-sample gradients of one graph, computed with one strategy, in one thread at a time."""

    def __init__(self, planner: Planner, strategy: str, create_graph: bool):
        self.graph = planner.graph
        self.strategy = strategy
        self.create_graph = create_graph
        self._planner = planner
        self._strategies: dict[str, GradStrategy] = {}
        self._exposed: dict[str, Versions] = {}  # of kept tensors whose views the caller has, by parameter
        self._freed = ""  # error message of later questions, if the graph was freed
        self._not_linear: NotLinearError | None = None  # the reason why rows come from one backward pass per sample
        self._lock = threading.RLock()

    @property
    def by_loop(self) -> bool:
        """True if rows come from one backward pass per sample with any strategy. No plan is needed."""
        return self.graph.samples == 1 or self.graph.sizes.nested

    def during(self, run: Callable[[], object], compute: Callable[[], object]) -> None:
        """Call compute(), and run() once: in place of the first backward pass of `compute`, or after it if it has none.
        run() is an ordinary backward pass through this graph that does not free it.
        """
        with self.context():
            source = self._of_strategy(self.strategy, lambda source: source)
        if isinstance(source, BackwardStrategy):
            source.ordinary = run
        compute()
        if not isinstance(source, BackwardStrategy) or source.ordinary is not None:
            run()

    def close(self, message: str) -> None:
        """Drop all gradients that are kept; later questions raise GraphError with the message."""
        self._freed = message
        self._strategies.clear()
        self._exposed.clear()

    def check_open(self) -> None:
        """Raise GraphError if the graph was freed."""
        if self._freed:
            raise GraphError(self._freed)

    def context(self) -> AbstractContextManager[None]:
        """Context of all computations: autocast off, grad mode on only with create_graph, one thread at a time."""
        return _Computing(self.graph, self._lock, self.create_graph)

    def analyze(self) -> None:
        """Make or look up the plan, so that its errors are raised here."""
        if self.by_loop:
            return
        with self.context():
            if self.strategy != "reference":
                self._of_strategy(self.strategy, lambda source: source)
            else:
                with suppress(NotLinearError):
                    self._planner.plan()

    def require_linear(self) -> None:
        """Raise NotLinearError unless a backward pass with weights gives the weighted sum of the gradients."""
        if self.by_loop:
            return
        with self.context():
            if not self._strategies and (self._planner.plan().has_functions or may_have_hooks(self.graph)):
                self.evaluate(lambda grad, _: None)
            if self._not_linear is not None:
                raise self._not_linear

    def find_plan(self) -> bool:
        """Look up the plan; False if the graph must be analyzed."""
        if self.by_loop or self._planner.find(verify=False):  # without the context, which takes microseconds
            return True
        with self.context():
            return self._planner.find()

    def evaluate(self, quantity: Quantity) -> dict[str, Any]:
        """Return quantity(grad, name) for each parameter in the graph, by name. Must be called inside `context`."""
        self._check_exposed()
        return self._of_strategy(self.strategy, lambda source: source.evaluate(quantity))

    def release(self, quantity: Quantity) -> Iterator[tuple[str, Any]]:
        """Pairs (name, quantity(grad, name)) in the order of the backward pass; kept gradients are dropped one by one.
        Must be used up inside `context`.
        """
        self._check_exposed()
        self._exposed.clear()
        return self._of_strategy(self.strategy, lambda source: source.release(quantity))

    def grads(self) -> dict[str, PerSampleGrad]:
        """All representations at once, by name. Rows and pairs of samples need them kept."""
        strategy = "fused" if self.strategy == "twice" else self.strategy
        with self.context():
            self._check_exposed()
            return self._of_strategy(strategy, lambda source: source.evaluate(lambda grad, _: grad))

    def take_rows(self) -> dict[str, DenseGrad]:
        """Rows of some parameters that the last pass of strategy "twice" has kept, by name. They are released."""
        source = self._strategies.get("twice")
        if not isinstance(source, BackwardStrategy):
            return {}
        rows = source.rows
        source.rows = {}
        return rows

    def factors(self) -> dict[str, PerSampleGrad]:
        """All representations by name, from a backward pass of their own: factors wherever an operation has them."""
        with self.context():
            self._check_exposed()
            return self._of_strategy("factors", lambda source: source.evaluate(lambda grad, _: grad))

    def expose(self, name: str, grad: PerSampleGrad) -> None:
        """Note that the caller gets rows of a parameter: a later change of kept ones is an error."""
        if name not in self._exposed:
            self._exposed[name] = Versions()
            self._exposed[name].record(grad.row_tensors)

    def _check_exposed(self) -> None:
        for versions in self._exposed.values():
            versions.check(ROWS_MODIFIED)

    def explain(self) -> list[ExplainRow]:
        with self.context():
            return self._of_strategy(self.strategy, lambda source: source.explain())

    def _of_strategy(self, strategy: str, compute: Callable[[GradStrategy], Result]) -> Result:
        """Return compute(the strategy); that of one backward pass per sample if backward passes are not linear."""
        self.check_open()
        try:
            if strategy not in self._strategies:
                self._strategies[strategy] = self._new(strategy)
            return compute(self._strategies[strategy])
        except NotLinearError as error:
            # The loop includes hooks on parameters; the sum of "twice" is one pass with weights, which is not linear.
            has_hooks = any(p._backward_hooks for p in self.graph.wanted.values())
            if has_hooks or strategy == "twice" or self.graph.sharded:
                raise
            loop = LoopStrategy(self.graph, self.create_graph)
            if not loop.adds_up():
                raise
            self._not_linear = error
            self._strategies[strategy] = loop
            warn_if_slow(
                self.graph,
                f"the backward of {error.operation} is not linear, so that rows come from one backward pass per sample",
                f"{plural(self.graph.samples, 'backward pass', 'backward passes')} in each step",
                "Remove the Function or hook that rounds, clips or thresholds gradients, if it is not needed.",
            )
            return compute(loop)

    def _new(self, strategy: str) -> GradStrategy:
        if self.graph.sharded and strategy == "twice" and self.graph.samples == 1:
            return SingleSampleStrategy(self.graph)
        if strategy == "reference" or self.by_loop:
            return LoopStrategy(self.graph, self.create_graph)
        source = BackwardStrategy(
            self._planner, self.create_graph, keep=strategy == "fused", factors=strategy == "factors"
        )
        return RowsStrategy(source) if strategy == "full" else source


class _Computing:
    """Context manager of `QuantityEvaluator.context`. Not a generator: these take several microseconds."""

    __slots__ = ("_autocast", "_grad_enabled", "_grad_was_enabled", "_graph", "_lock")

    def __init__(self, graph: Graph, lock: AbstractContextManager[bool], grad_enabled: bool):
        self._graph = graph
        self._lock = lock
        self._grad_enabled = grad_enabled
        self._grad_was_enabled = True
        self._autocast: torch.autocast | None = None

    def __enter__(self) -> None:
        graph = self._graph
        self._lock.__enter__()
        self._grad_was_enabled = torch.is_grad_enabled()
        _set_grad_enabled(self._grad_enabled)
        device = graph.losses.device.type
        if torch.is_autocast_enabled(device):
            self._autocast = torch.autocast(device, enabled=False)
            self._autocast.__enter__()
        if graph.losses._version != graph.losses_version:
            self.__exit__(None, None, None)
            graph.check_losses_unchanged()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._autocast is not None:
            self._autocast.__exit__(None, None, None)
        _set_grad_enabled(self._grad_was_enabled)
        self._lock.__exit__(None, None, None)
        if isinstance(error, RuntimeError):
            raise_graph_error(error)


class GradStrategy(Protocol):
    """Interface of a strategy."""

    def evaluate(self, quantity: Quantity) -> dict[str, Any]:
        """Return quantity(grad, name) for each parameter in the graph, by name."""

    def release(self, quantity: Quantity) -> Iterator[tuple[str, Any]]:
        """Pairs (name, quantity(grad, name)); kept gradients are dropped one by one."""

    def explain(self) -> list[ExplainRow]: ...


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
        if not self.grads:
            return self._first(quantity, self.keep)
        self.versions.check()
        compute = partial(self._of_kept, quantity) if self.planner.graph.sharded else quantity
        return {name: compute(grad, name) for name, grad in self.grads.items()}

    def release(self, quantity: Quantity) -> Iterator[tuple[str, Any]]:
        if not self.grads:
            return iter(self._first(quantity, keep=False).items())
        self.versions.check()
        compute = partial(self._of_kept, quantity) if self.planner.graph.sharded else quantity
        return ((name, compute(self.grads.pop(name), name)) for name in list(self.grads))

    def _of_kept(self, quantity: Quantity, grad: PerSampleGrad, name: str) -> Any:
        """The quantity of a parameter of a sharded model."""
        with unsharded([self.planner.graph.wanted[name]]):
            return quantity(grad, name)

    def _first(self, quantity: Quantity, keep: bool) -> dict[str, Any]:
        """Compute the quantity during a backward pass."""
        keep_freed_memory()
        builder = self._pass(quantity, keep)
        if builder is None:
            self.plan = self.planner.plan_by_probe()
            builder = self._pass(quantity, keep)
            assert builder is not None  # a probed plan has no proof that a pass could refute
        if builder.not_linear is not None:  # raised after the pass, which may be one of the caller
            raise NotLinearError(builder.not_linear)
        if may_have_hooks(self.planner.graph):
            refuse_hooks_below_cut(self.plan, self.planner.graph)
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

        # Where hooks may change gradients unseen, the ownership is verified by one more pass, with weights.
        hooks = hook_checks(graph, plan, ordinary=run is not None) if watches else None
        weighs = hooks is None or plan.recomputed
        if not (plan.proven and is_deterministic(graph)):  # Python functions are not watched
            weighs = weighs or bool(graph.structure.functions)
        if hooks is None or weighs:
            hooks = HookChecks(graph)

        # A probe has computed these gradients already; a Function or hook may have changed them in place since.
        in_place = bool(graph.structure.functions) or (weighs and may_have_hooks(graph))
        builder = self.make_builder(plan, graph, quantity, self.create_graph, keep, self.factors, in_place)
        probed = dict(plan.gradients)
        plan.gradients.clear()
        unusable = not probed or self.create_graph or graph.sharded or in_place or may_have_hooks(graph)
        if not unusable and len(probed) == len(plan.owner_maps):
            for at, slots in plan.stops.slots.items():
                builder.add(at, {slot: probed.pop((at, slot)) for slot in slots})
            return builder

        # The pass: gradients are converted as they arrive, and what its plan claims is recorded.
        nonzero: list[Tensor] = []  # whether gradients that could not verify their ownership so far are non-zero
        functions = FunctionChecks(graph, () if weighs else plan.functions)
        sums: dict[Edge, Tensor] = {}  # of the absolute values of each sample in this pass

        def record_and_add(at: int, gradients: dict[int, Tensor]) -> OperandGradients | None:
            nonzero.extend(_is_not_zero(g) for slot, g in gradients.items() if (at, slot) in pending)
            if weighs:
                for slot, g in gradients.items():
                    sums[graph.edge((at, slot))] = plan.owner_maps[at, slot].sizes(g.detach())
            hooks.reach(at, gradients)
            return builder.add(at, gradients)

        receive = record_and_add if pending or weighs or hooks.slots else builder.add
        self.ordinary = None
        with functions.watch(), hooks.watch(plan.stops):
            if run is None:
                backward_past(graph, plan.stops, receive, None, self.create_graph, builder.recomputes, hooks)
            elif not watch_backward(graph, plan.stops, receive, run):
                return self._pass(quantity, keep)

        # The verdict: hooks where they are, ownership by weights, Python functions, gradients that were zero so far.
        if not hooks.hold(plan.owners, again=not self.keep):
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
        if not functions.hold:
            return None
        verifiable = bool(nonzero) and bool(torch.stack(nonzero).any())  # one host sync for all
        return None if verifiable and not self.planner.verify_again() else builder

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
