"""Quantities of the per-sample gradients of one graph: those of each parameter, and norms over all of them.

`QuantityEvaluator` computes any quantity of each parameter, with one of the strategies in `strategies`.

`Norms` are right also where squares of gradients are too small for their dtype. On the CPU, norms are square roots of
summed squares, and those that are too small are computed again from scaled rows. On an accelerator, which norms are too
small is not known without a host sync: all of them come from scaled factors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial, reduce
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import _set_grad_enabled  # torch.set_grad_enabled takes microseconds

from samplewise.core.text import plural
from samplewise.engine.arguments import wide_dtype
from samplewise.engine.deferred_checks import (
    DeferredChecks,
    are_at_most_one,
    are_ordinary_norms,
    finite_numbers,
    read_at_once,
    underflow_limit,
)
from samplewise.engine.grads.base import PerSampleGrad
from samplewise.engine.grads.dense import DenseGrad, PackedGrad
from samplewise.engine.grads.kernels import root, scaled_norms
from samplewise.engine.graph.graph import Graph
from samplewise.engine.graph.hook_registry import may_have_hooks
from samplewise.engine.graph.saved import Versions, raise_graph_error
from samplewise.engine.ownership.weighted_passes import NotLinearError
from samplewise.engine.plan import ExplainRow, Quantity
from samplewise.engine.slow_paths import warn_if_slow
from samplewise.engine.strategies import (
    BackwardStrategy,
    GradStrategy,
    LoopStrategy,
    Planner,
    RowsStrategy,
    SingleSampleStrategy,
)
from samplewise.errors import GraphError

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
        # Rows come from one backward pass per sample with any strategy: no plan is needed.
        self._by_loop = self.graph.samples == 1 or self.graph.sizes.nested
        self.context = ComputationContext(self.graph, create_graph)

    def during(self, run: Callable[[], object], compute: Callable[[], object]) -> None:
        """Call compute(), and run() once: in place of the first backward pass of `compute`, or after it if it has none.
        run() is an ordinary backward pass through this graph that does not free it.
        """
        with self.context:
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

    def analyze(self) -> None:
        """Make or look up the plan, so that its errors are raised here."""
        if self._by_loop:
            return
        with self.context:
            if self.strategy != "reference":
                self._of_strategy(self.strategy, lambda source: source)
            else:
                with suppress(NotLinearError):
                    self._planner.plan()

    def require_linear(self) -> None:
        """Raise NotLinearError unless a backward pass with weights gives the weighted sum of the gradients."""
        if self._by_loop:
            return
        with self.context:
            if not self._strategies and (self._planner.plan().has_functions or may_have_hooks(self.graph)):
                self.evaluate(lambda grad, _: None)
            if self._not_linear is not None:
                raise self._not_linear

    def find_plan(self) -> bool:
        """Look up the plan; False if the graph must be analyzed."""
        if self._by_loop or self._planner.find(verify=False):  # without the context, which takes microseconds
            return True
        with self.context:
            return self._planner.find()

    def evaluate(self, quantity: Quantity) -> dict[str, Any]:
        """Return quantity(grad, name) for each parameter in the graph, by name. Must be called inside `context`."""
        if self._exposed:
            self._check_exposed()
        return self._of_strategy(self.strategy, lambda source: source.evaluate(quantity))

    def release(self, quantity: Quantity) -> Iterator[tuple[str, Any]]:
        """Pairs (name, quantity(grad, name)) in the order of the backward pass; kept gradients are dropped one by one.
        Must be used up inside `context`.
        """
        if self._exposed:
            self._check_exposed()
            self._exposed.clear()
        return self._of_strategy(self.strategy, lambda source: source.release(quantity))

    def grads(self, *, factors: bool = False) -> dict[str, PerSampleGrad]:
        """All representations at once, by name. Rows and pairs of samples need them kept. With `factors`, they come
        from a backward pass of their own: factors wherever an operation has them.
        """
        strategy = self.strategy
        if factors:
            strategy = "factors"
        elif strategy == "twice":  # which drops them
            strategy = "fused"
        with self.context:
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

    def expose(self, name: str, grad: PerSampleGrad) -> None:
        """Note that the caller gets rows of a parameter: a later change of kept ones is an error."""
        if name not in self._exposed:
            self._exposed[name] = Versions()
            self._exposed[name].record(grad.row_tensors)

    def _check_exposed(self) -> None:
        for versions in self._exposed.values():
            versions.check(ROWS_MODIFIED)

    def explain(self) -> list[ExplainRow]:
        with self.context:
            return self._of_strategy(self.strategy, lambda source: source.explain())

    def _of_strategy(self, strategy: str, compute: Callable[[GradStrategy], Result]) -> Result:
        """Return compute(the strategy); that of one backward pass per sample if backward passes are not linear."""
        if self._freed:
            raise GraphError(self._freed)
        try:
            if strategy not in self._strategies:
                self._strategies[strategy] = self._make_strategy(strategy)
            return compute(self._strategies[strategy])
        except NotLinearError as error:
            # The loop includes hooks on parameters; the sum of "twice" is one pass with weights, which is not linear.
            # In a sharded model, each pass of the loop would gather all parameters.
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

    def _make_strategy(self, strategy: str) -> GradStrategy:
        # The loop would hold the gradients of all modules of a sharded model at a time.
        if self.graph.sharded and strategy == "twice" and self.graph.samples == 1:
            return SingleSampleStrategy(self.graph)
        if strategy == "reference" or self._by_loop:
            return LoopStrategy(self.graph, self.create_graph)
        source = BackwardStrategy(
            self._planner, self.create_graph, keep=strategy == "fused", factors=strategy == "factors"
        )
        return RowsStrategy(source) if strategy == "full" else source


class ComputationContext:
    """Context manager of all computations: autocast off, grad mode on only with create_graph, one thread at a time.

    It can be entered again inside. Not a generator: these take several microseconds.
    """

    __slots__ = ("_create_graph", "_graph", "_lock", "_outer")

    def __init__(self, graph: Graph, create_graph: bool):
        self._graph = graph
        self._create_graph = create_graph
        self._lock = threading.RLock()
        # Grad mode before each entry, and what turns autocast off, if it was on.
        self._outer: list[tuple[bool, torch.autocast | None]] = []

    def __enter__(self) -> None:
        graph = self._graph
        self._lock.acquire()
        grad_enabled = torch.is_grad_enabled()
        _set_grad_enabled(self._create_graph)
        autocast: torch.autocast | None = None
        device = graph.losses.device.type
        if torch.is_autocast_enabled(device):
            autocast = torch.autocast(device, enabled=False)
            autocast.__enter__()
        self._outer.append((grad_enabled, autocast))
        if graph.losses._version != graph.losses_version:
            self.__exit__(None, None, None)
            graph.check_losses_unchanged()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        grad_enabled, autocast = self._outer.pop()
        if autocast is not None:
            autocast.__exit__(None, None, None)
        _set_grad_enabled(grad_enabled)
        self._lock.release()
        if isinstance(error, RuntimeError):
            raise_graph_error(error)


class Norms:
    """Norms of the per-sample gradients of one graph, each computed once. To be used inside `evaluator.context`."""

    def __init__(self, evaluator: QuantityEvaluator, checks: DeferredChecks):
        self._evaluator = evaluator
        self._graph = evaluator.graph
        self._checks = checks
        self._by_name: dict[str, Tensor] | None = None  # see `_norms_by_name`
        self._ordinary = False  # True if the norms of samples are known, and neither too small nor too large
        self._underflowed: Tensor | None = None  # norms of samples, some of which are too small or too large
        self._joint: set[str] = set()  # parameters of a pack that have the norms of the pack
        self._scaled_by_name: dict[str, Tensor] | None = None
        self._terms: dict[str, Tensor] | None = None  # see `track_terms`

    def track_terms(self) -> None:
        """Also compute `term_norms` of each parameter, in the pass that computes the norms."""
        self._terms = {}
        self._graph.tracks_terms = True

    def of_samples(self) -> Tensor:
        """Norms over all parameters, (B,)."""
        if not read_at_once(self._graph.losses):
            return self._of_samples_without_sync()
        by_name = self._norms_by_name(joint=True)
        if self._evaluator.create_graph:
            norms = root(total_of(self._graph, by_name))
        else:
            # In the order of the parameters, not that of the backward pass, to be bit-reproducible. By id: the
            # parameters of a pack have one tensor, which counts once.
            columns = {id(by_name[name]): by_name[name] for name in self._graph.wanted if name in by_name}
            norms = torch.linalg.vector_norm(torch.stack(list(columns.values()), 1), dim=1)
            dtype = torch.promote_types(norms.dtype, wide_dtype(self._graph.losses.dtype))
            norms = norms if norms.dtype is dtype else norms.to(dtype)
        self._ordinary = are_ordinary_norms(norms)
        if self._ordinary:
            return norms
        if self._underflowed is None:  # computed once, while the graph has its saved tensors
            self._underflowed = self._with_underflowed_norms({"": finite_numbers(norms, "norm")})[""]
        return self._underflowed.clone()

    def by_parameter(self) -> dict[str, Tensor]:
        """Parameter name -> norms (B,)."""
        on_host = read_at_once(self._graph.losses)
        by_name = self._norms_by_name(joint=False) if on_host else self._scaled_norms_by_name()
        if on_host and self._evaluator.create_graph:
            by_name = {name: root(squares) for name, squares in by_name.items()}
        # Copies: the caller may change the result, and the norms are returned again.
        norms = {name: by_name[name].clone() if name in by_name else zeros(self._graph) for name in self._graph.wanted}
        return self._with_underflowed_norms(norms) if on_host else norms

    def bound_sums(self, weights: object) -> bool:
        """True if a sum with these weights (B,) must be finite, because the norms are and no weight exceeds 1."""
        if not self._ordinary or not isinstance(weights, Tensor) or weights.dim() != 1:
            return False
        return weights.is_floating_point() and len(weights) > 0 and are_at_most_one(weights)

    def with_larger_terms(self, weights: Mapping[str, Tensor], limit: float) -> list[int]:
        """Samples whose terms, times their weights, have norms above `limit`. Needs `track_terms`. One host sync."""
        terms = [norms * weights[name].abs() for name, norms in (self._terms or {}).items()]
        if not terms:
            return []
        sizes = torch.linalg.vector_norm(torch.stack(terms, 1), dim=1)
        return (~(sizes <= limit)).nonzero().flatten().tolist()  # also NaN, from factors whose squares overflow

    def _norms_by_name(self, joint: bool) -> dict[str, Tensor]:
        """Norms (B,) of each parameter; with create_graph their squares, which are differentiable where they are zero.
        joint: the parameters of a pack may have the norms of the pack instead, as one tensor.
        """
        if self._by_name is None or (self._joint and not joint):
            earlier: dict[str, Tensor] = {}  # norms that need not be computed again
            if self._by_name is not None:
                earlier = {name: norms for name, norms in self._by_name.items() if name not in self._joint}
            self._joint.clear()
            self._by_name = self._evaluator.evaluate(partial(self._norms_of, joint, earlier))
        return self._by_name

    def _norms_of(self, joint: bool, earlier: dict[str, Tensor], grad: PerSampleGrad, name: str) -> Tensor:
        if self._terms is not None and (terms := grad.term_norms()) is not None:
            self._terms[name] = terms
        if self._evaluator.create_graph:
            return grad.squared_norms()
        if joint and isinstance(grad, PackedGrad):
            self._joint.add(name)
            return grad.pack.norms
        return earlier[name] if name in earlier else grad.norms()

    def _with_underflowed_norms(self, norms: dict[str, Tensor]) -> dict[str, Tensor]:
        """Recompute norms whose squares are too small for their dtype. The name "" means all parameters together."""
        masks = {name: n.detach() < underflow_limit(n.dtype) for name, n in norms.items() if not are_ordinary_norms(n)}
        masks = {name: mask for name, mask in masks.items() if mask.any()}
        if not masks:
            return norms
        samples = torch.stack(list(masks.values())).any(0).nonzero().flatten()
        by_name = self._evaluator.evaluate(lambda grad, _: grad.underflowed_norms(samples))
        for name, mask in masks.items():
            if name == "":
                exact: Tensor | None = scaled_norms(torch.stack(list(by_name.values()), 1))
            else:
                exact = by_name.get(name)
            if exact is not None:
                before = norms[name]
                after = torch.where(mask[samples], exact.to(before.dtype), before[samples])
                norms[name] = before.index_copy(0, samples, after)
        return norms

    # --- without a host sync -----------------------------------------------------------------------------------------

    def _of_samples_without_sync(self) -> Tensor:
        by_name = self._scaled_norms_by_name()
        norms = zeros(self._graph)
        if by_name:
            dtype = reduce(torch.promote_types, (n.dtype for n in by_name.values()), norms.dtype)
            columns = [by_name[name].to(dtype) for name in self._graph.wanted if name in by_name]
            norms = scaled_norms(torch.stack(columns, 1))
        self._checks.add(finite_numbers, norms, "norm")
        return norms

    def _scaled_norms_by_name(self) -> dict[str, Tensor]:
        """Norms of each parameter. Those that are NaN because a sum of pairs cancels are computed from rows: one host
        sync, if there are parameters with such sums.
        """
        if self._scaled_by_name is not None:
            return self._scaled_by_name
        may_cancel: set[str] = set()

        def quantity(grad: PerSampleGrad, name: str) -> Tensor:
            if self._terms is not None and (terms := grad.term_norms()) is not None:
                self._terms[name] = terms
            if grad.may_cancel:
                may_cancel.add(name)
            return grad.scaled_norms()

        norms: dict[str, Tensor] = self._evaluator.evaluate(quantity)
        if may_cancel:
            samples = torch.stack([norms[name].isnan() for name in sorted(may_cancel)]).any(0).nonzero().flatten()
            if len(samples):
                exact = self._evaluator.evaluate(
                    lambda grad, name: PerSampleGrad.underflowed_norms(grad, samples) if name in may_cancel else None
                )
                for name in may_cancel:
                    norms[name] = norms[name].index_copy(0, samples, exact[name].to(norms[name].dtype))
        self._scaled_by_name = norms
        return norms


def zeros(graph: Graph, *more: int) -> Tensor:
    """Zeros (B, *more) for sums of values like the losses."""
    losses = graph.losses
    return torch.zeros(graph.samples, *more, dtype=wide_dtype(losses.dtype), device=losses.device)


def total_of(graph: Graph, by_name: Mapping[str, Tensor], *more: int) -> Tensor:
    """Sum (B, *more) over the parameters, in their order, not that of the backward pass, to be bit-reproducible."""
    result = zeros(graph, *more)
    for name in graph.wanted:
        if name in by_name:
            result = result + by_name[name]
    return result
