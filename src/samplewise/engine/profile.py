"""Where the time of per-sample gradients goes: the stages of a step, measured on one graph.

`profile(evaluator)` repeats what a step does after its forward pass: read the graph, find the owners of gradients, run
the backward pass to the cut, compute norms and a weighted sum. Only these repetitions are timed: they use a planner and
a builder that read the clock, so that ordinary steps do not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import perf_counter, thread_time

import torch
from torch import Tensor, nn

from samplewise.core.text import listed, plural, render
from samplewise.engine.backward import OperandGradients, backward_past, backward_to_leaves
from samplewise.engine.deferred_checks import DeferredChecks
from samplewise.engine.generic import supports_batches
from samplewise.engine.grads.indexed import VIEWS
from samplewise.engine.graph.graph import Graph
from samplewise.engine.graph.hook_registry import leave_out_forward_hooks, may_have_hooks
from samplewise.engine.plan import GradBuilder, Plan
from samplewise.engine.quantities import Norms, QuantityEvaluator
from samplewise.engine.slow_paths import SlowPath, slow_paths_collected
from samplewise.engine.strategies import BackwardStrategy, GradStrategy, LoopStrategy, Planner, RowsStrategy
from samplewise.errors import NonFiniteGradientError

ROUNDS = 5  # after one that is not counted
SHOWN = 6  # operations with a line of their own

FORWARD = "forward pass"
PLAIN = "plain backward pass"
GRAPH = "reading the graph"
SEARCH = "search for hooks"
OWNERSHIP = "ownership"
PASS = "backward pass to the cut"  # and the verification of what it depends on
CUT = "backward pass to the cut alone"
RULES = "rules and norms: "  # followed by the operation
PACKED = "small parameters, packed"
SUMS = "weighted sums"


@dataclass(frozen=True)
class Stage:
    """One line of the table of times."""

    name: str
    seconds: float
    cause: str = ""  # why it takes this time, if it does not in most models


@dataclass(frozen=True)
class Profile:
    """Times of the stages of a step, and the slow paths that it takes."""

    stages: list[Stage]
    plain: float  # seconds of a plain backward pass
    slow_paths: list[SlowPath]

    @property
    def table(self) -> str:
        """Table with one line per stage."""
        total = sum(stage.seconds for stage in self.stages)
        cells = []
        for stage in (*self.stages, Stage("in all", total)):
            times = (f"{1e3 * stage.seconds:.3f}", f"{stage.seconds / total:.0%}", f"{stage.seconds / self.plain:.2f}")
            cells.append((stage.name, *times, stage.cause))
        title = f"time of norms and a weighted sum; a plain backward pass takes {1e3 * self.plain:.3f} ms"
        return render(("stage", "ms", "share", "x backward", "cause"), cells, title)

    def __str__(self) -> str:
        return "\n".join([self.table, *(f"slow: {path}" for path in self.slow_paths)])


def profile(evaluator: QuantityEvaluator, forward: Callable[[], object] | None = None) -> Profile | None:
    """Measure the stages of a step on the graph of `evaluator`, with its strategy; `forward`: a function that repeats
    the forward pass. Each time is the shortest of some rounds. None if the model is sharded.
    """
    if evaluator.graph.sharded:  # a rank cannot repeat passes alone
        return None
    times: list[dict[str, float]] = []
    with evaluator.context, slow_paths_collected() as slow_paths:
        for _ in range(1 + ROUNDS):
            round_ = _Round(evaluator)
            round_.run(forward)
            times.append(round_.clock.seconds)
    seconds = {name: min(seconds_of.get(name, 0.0) for seconds_of in times[1:]) for name in times[-1]}
    plain = seconds.pop(PLAIN)
    return Profile(_stages(round_, seconds), plain, list(slow_paths))


# --- measuring -----------------------------------------------------------------------------------------------------


class _Clock:
    """Seconds spent in each stage, without those in the stages inside it."""

    def __init__(self, device: torch.device):
        self.seconds: dict[str, float] = {}
        self._inside = [0.0]  # seconds of the stages inside each open stage
        self._device = device

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = self._now()
        self._inside.append(0.0)
        try:
            yield
        finally:
            duration = self._now() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + duration - self._inside.pop()
            self._inside[-1] += duration

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
            return perf_counter()
        # Autograd runs CPU nodes in this thread, whose own time does not contain that of other processes. On Windows
        # its resolution is 16 ms.
        return perf_counter() if sys.platform == "win32" else thread_time()


class _Round(QuantityEvaluator):
    """A step on the nodes of another evaluator, with a graph, a plan and results of its own."""

    def __init__(self, evaluator: QuantityEvaluator):
        source = evaluator._planner
        self.clock = _Clock(evaluator.graph.losses.device)
        with self.clock.stage(GRAPH):
            graph = Graph(evaluator.graph.losses, evaluator.graph.wanted)
        self.planner = _TimedPlanner(graph, source.modules, source.interacting, self.clock)
        super().__init__(self.planner, evaluator.strategy, evaluator.create_graph)

    def run(self, forward: Callable[[], object] | None) -> None:
        clock = self.clock
        graph = self.graph
        if forward is not None:
            with clock.stage(FORWARD), torch.enable_grad():
                forward()
        with self.context:
            with clock.stage(PLAIN):
                backward_to_leaves(graph, graph.leaves.values(), torch.ones_like(graph.losses), _drop)
            leave_out_forward_hooks(self.planner.modules)
            with clock.stage(SEARCH):
                self.has_hooks = may_have_hooks(graph)
            with clock.stage(PASS), suppress(NonFiniteGradientError):  # NaN takes as long as other numbers
                Norms(self, DeferredChecks()).of_samples()
            with clock.stage(SUMS):
                self._sum(torch.full_like(graph.losses, 1 / graph.samples))
            if self.plan is not None and self.verified:
                with clock.stage(CUT):
                    backward_past(graph, self.plan.stops, lambda at, gradients: None)

    def _sum(self, weights: Tensor) -> None:
        if self.strategy != "twice":
            for _ in self.release(lambda grad, _: grad.sum(weights)):
                pass
            return
        rows = self.take_rows()  # the other sums come from an ordinary backward pass
        names = [name for name in self.graph.leaves.values() if name not in rows]
        backward_to_leaves(self.graph, names, weights, _drop)
        for grad in rows.values():
            grad.sum(weights)

    def _make_strategy(self, strategy: str) -> GradStrategy:
        source = super()._make_strategy(strategy)
        backward = source.source if isinstance(source, RowsStrategy) else source
        if isinstance(backward, BackwardStrategy):
            backward.make_builder = _timed_builder(self.clock)
        return source

    @property
    def plan(self) -> Plan | None:
        """The plan of the pass; None if rows come from one backward pass per sample."""
        loops = any(isinstance(source, LoopStrategy) for source in self._strategies.values())
        return None if loops else self.planner.last

    @property
    def verified(self) -> list[str]:
        """What a backward pass verifies in each graph."""
        plan = self.plan
        if plan is None:
            return []
        positions = [claim.node for claim in plan.functions] if plan.proven else self.graph.structure.functions
        names = dict.fromkeys(self.graph.operations[self.graph.nodes[at]] for at in positions)
        return [
            *(["hooks on activations or nodes, or a dispatch mode"] if self.has_hooks else []),
            *([listed(names)] if names else []),
            *(["probed operations under activation checkpointing"] if plan.recomputed else []),
        ]

    @property
    def why_by_loop(self) -> str:
        """Why rows come from one backward pass per sample."""
        if self._not_linear is not None:
            return f"the backward of {self._not_linear.operation} is not linear"
        return "strategy 'reference'" if self.strategy == "reference" else "one sample, or nested tensors"


class _TimedPlanner(Planner):
    """Planner that counts its time as that of the ownership."""

    def __init__(self, graph: Graph, modules: Iterable[nn.Module], interacting: str, clock: _Clock):
        super().__init__(graph, modules, interacting)
        self._clock = clock

    @property
    def last(self) -> Plan | None:
        """The last plan; None if there is none."""
        return self._plan

    def plan(self) -> Plan:
        with self._clock.stage(OWNERSHIP):
            return super().plan()

    def plan_by_probe(self) -> Plan:
        with self._clock.stage(OWNERSHIP):
            return super().plan_by_probe()

    def verify_again(self) -> bool:
        with self._clock.stage(OWNERSHIP):
            return super().verify_again()


def _timed_builder(clock: _Clock) -> type[GradBuilder]:
    """Class of builders that count their time by operation."""

    class TimedBuilder(GradBuilder):
        def add(self, at: int, gradients: dict[int, Tensor]) -> OperandGradients | None:
            with clock.stage(RULES + self.plan.operations[at]):
                return super().add(at, gradients)

        def finish(self) -> None:
            with clock.stage(RULES + PACKED if self._small else PASS):
                super().finish()

    return TimedBuilder


def _drop(name: str, gradient: Tensor) -> None:
    """Do nothing with the gradient of a parameter."""


# --- lines of the table --------------------------------------------------------------------------------------------


def _stages(last: _Round, seconds: dict[str, float]) -> list[Stage]:
    """Lines of the table, in the order of a step."""
    stages = [Stage(name, seconds[name]) for name in (FORWARD, GRAPH, SEARCH) if name in seconds]
    if OWNERSHIP in seconds:
        stages.append(Stage(OWNERSHIP + _kind_of_ownership(last), seconds[OWNERSHIP], _cause_of_ownership(last)))
    if last.plan is None:
        stages.append(Stage("one backward pass per sample", seconds[PASS], last.why_by_loop))
    elif CUT not in seconds:
        stages.append(Stage(PASS, seconds[PASS]))
    else:
        alone = min(seconds[CUT], seconds[PASS])
        stages.append(Stage(PASS, alone))
        stages.append(Stage("verification during the pass", seconds[PASS] - alone, "; ".join(last.verified)))
    operations = {name: time for name, time in seconds.items() if name.startswith(RULES)}
    by_time = sorted(operations, key=operations.__getitem__, reverse=True)
    for name in by_time[:SHOWN]:
        stages.append(Stage(name, seconds[name], _cause_of_rule(last, name.removeprefix(RULES))))
    if by_time[SHOWN:]:
        rest = sum(map(operations.__getitem__, by_time[SHOWN:]))
        stages.append(Stage(f"{RULES}{plural(len(by_time) - SHOWN, 'other operation')}", rest))
    return [*stages, Stage(SUMS, seconds[SUMS])]


def _kind_of_ownership(last: _Round) -> str:
    plan = last.plan
    if plan is None:
        return ""
    if not plan.proven:
        return ": probe of the whole graph"
    if not Planner(last.graph, last.planner.modules, last.planner.interacting).find():
        return ": derived for each graph"
    return f": {plural(len(plan.claims), 'claim')} verified" if plan.claims else ": kept plan"


def _cause_of_ownership(last: _Round) -> str:
    plan = last.plan
    if plan is None:
        return last.why_by_loop
    if not plan.proven:
        return plan.cause
    return listed(dict.fromkeys(last.graph.operations[last.graph.nodes[claim.node]] for claim in plan.claims))


def _cause_of_rule(last: _Round, operation: str) -> str:
    """Why the rules of an operation take longer than usual."""
    plan = last.plan
    if plan is None:
        return ""
    causes: dict[str, None] = {}
    for at in (at for at, name in plan.operations.items() if name == operation):
        if any(str(plan.owner_maps[at, slot]) != "regular" for slot in plan.stops.slots[at]):
            causes["rows of samples in an irregular order"] = None
        for operand_plan in plan.operands[at]:
            if operand_plan.rule is None and not operand_plan.empty:
                if plan.verdicts.get(("rows", at)):
                    causes["no rule, calls of its backward with the rows of each sample"] = None
                elif supports_batches(last.graph.nodes[at]):
                    causes["no rule"] = None
                else:
                    causes["no rule, one call of its backward per sample"] = None
            if not all(
                route.changing is not None and set(route.changing) <= VIEWS for route in operand_plan.branch.routes
            ):
                causes["operations between it and its parameters"] = None
    return "; ".join(causes)
