"""Strategies for computing per-sample gradients, one parameter after the other.

    fused        one backward pass; all gradients are kept, as rows or factors, so that all quantities share the pass
    twice        gradients are dropped after use: one backward pass per quantity
    full         as fused, with all gradients converted to rows
    reference    rows from one backward pass per sample

Gradients are converted, and the first quantity is computed from them, while the backward pass is at their node, because
their inputs are still in the CPU cache then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from samplewise.engine.backward import backward_past
from samplewise.engine.finite import traced
from samplewise.engine.grads.base import DenseGrad, PerSampleGrad
from samplewise.engine.graph import Edge, Graph, Node
from samplewise.engine.hooks import refuse_hooks_below_cut
from samplewise.engine.plan import ExplainRow, GradBuilder, Planner
from samplewise.engine.reference import jacobian_rows
from samplewise.engine.saved import Versions
from samplewise.engine.tags import Regular
from samplewise.engine.verify import verify_again
from samplewise.errors import GraphError

Visit = Callable[[str, PerSampleGrad], None]


class GradStrategy(Protocol):
    """Interface of a strategy."""

    def each(self, visit: Visit, release: bool = False) -> None:
        """Call visit(name, form) for each parameter in the graph. With release=True, kept gradients are dropped."""

    def explain(self) -> list[ExplainRow]: ...


class BackwardStrategy:
    """Strategies "fused" (keep=True) and "twice" (keep=False): one backward pass to the cut."""

    def __init__(self, planner: Planner, create_graph: bool, keep: bool):
        self.planner = planner
        self.plan = planner.plan()
        self.create_graph = create_graph
        self.keep = keep
        self.forms: dict[str, PerSampleGrad] = {}
        self.versions = Versions()

    def each(self, visit: Visit, release: bool = False) -> None:
        if not self.forms:
            self._first(visit, keep=self.keep and not release)
            return
        self.versions.check()
        if release:
            while self.forms:
                visit(*self.forms.popitem())
        else:
            for name, form in self.forms.items():
                visit(name, form)

    def _first(self, visit: Visit, keep: bool) -> None:
        kept: dict[str, PerSampleGrad] = {}

        def both(name: str, form: PerSampleGrad) -> None:
            kept[name] = form
            visit(name, form)

        if not self._pass(both if keep else visit):
            self.plan = self.planner.plan_by_probe()
            self._pass(both if keep else visit)
        refuse_hooks_below_cut(self.plan)
        self.forms = kept

    def _pass(self, visit: Visit) -> bool:
        """Run one backward pass; False if it has shown that a proof of ownership does not hold."""
        maker = GradBuilder(self.plan, self.create_graph)
        self.versions = maker.versions
        cut = self.plan.cut
        probed = {} if self.create_graph else dict(cut.gradients)
        cut.gradients.clear()
        if len(probed) == len(cut.tags):
            for node in self.plan.by_node:
                maker.add(node, {e.slot: probed.pop(e) for e in self.plan.edges_of(node)}, visit)
            return True
        shown = False

        def arrived(node: Node, gradients: dict[int, Tensor]) -> None:
            nonlocal shown
            shown = shown or any(Edge(node, slot) in cut.pending and _is_not_zero(g) for slot, g in gradients.items())
            maker.add(node, gradients, visit)

        backward_past(self.plan.graph, self.plan.by_node, arrived, create_graph=self.create_graph)
        return not shown or self._verified_now()

    def _verified_now(self) -> bool:
        tags = {edge: tag for edge, tag in self.plan.cut.tags.items() if isinstance(tag, Regular)}
        pending = verify_again(self.plan.graph, tags)
        self.plan.cut.pending = pending or set()
        return pending is not None

    def explain(self) -> list[ExplainRow]:
        rows: dict[str, ExplainRow] = {}
        self.each(lambda name, form: rows.update({name: self.plan.row(name, form)}))
        return list(rows.values())


def _is_not_zero(gradient: Tensor) -> bool:
    if traced(gradient):
        raise GraphError(
            "ownership of gradients must be verified with non-zero gradients before an update can be compiled; "
            "found a layer whose gradient has been zero so far. Train uncompiled until it is non-zero."
        )
    return bool(gradient.any())


class RowsStrategy:
    """Strategy "full": `BackwardStrategy` with all gradients converted to rows and kept."""

    def __init__(self, source: BackwardStrategy):
        self.source = source
        self.forms: dict[str, PerSampleGrad] = {}

    def each(self, visit: Visit, release: bool = False) -> None:
        if not self.forms:
            self.source.each(
                lambda n, form: self.forms.update({n: DenseGrad(form.rows(0, form.samples))}), release=True
            )
        for name, form in self.forms.items():
            visit(name, form)

    def explain(self) -> list[ExplainRow]:
        return self.source.explain()


class LoopStrategy:
    """Strategy "reference": rows from one backward pass per sample."""

    def __init__(self, graph: Graph, create_graph: bool):
        reached = {name: graph.wanted[name] for name in graph.leaves.values()}
        self.rows = jacobian_rows(graph.losses, reached, create_graph)

    def each(self, visit: Visit, release: bool = False) -> None:
        for name, rows in self.rows.items():
            visit(name, DenseGrad(rows))

    def explain(self) -> list[ExplainRow]:
        return [
            ExplainRow(name, tuple(rows.shape[1:]), "", "one backward per sample", "dense")
            for name, rows in self.rows.items()
        ]
