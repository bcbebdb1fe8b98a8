"""The strategies: how the per-sample gradients of each parameter are brought to light, one form after the other.

fused        one backward pass; every form is kept, so that all quantities share the pass
twice        forms are made while the backward passes by and dropped after use: a pass for each question
full         fused, with every form turned into rows
reference    rows from a backward pass for each sample
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from samplewise.engine.cut import find_cut
from samplewise.engine.forms import Dense, Form
from samplewise.engine.graph import Edge, Graph, Node
from samplewise.engine.plan import FormMaker, Plan, Row, prepare
from samplewise.engine.probe import gradients_at
from samplewise.engine.reference import jacobian_rows

Visit = Callable[[str, Form], None]


class Source(Protocol):
    def each(self, visit: Visit) -> None:
        """Calls visit(name, form) for every parameter that the losses reach."""

    def explain(self) -> list[Row]: ...


def make_plan(graph: Graph, constants: set[int], interacting: str) -> Plan:
    return prepare(graph, find_cut(graph, constants, interacting))


class Fused:
    def __init__(self, plan: Plan, create_graph: bool):
        self.plan = plan
        self.forms: dict[str, Form] = {}
        gradients = _cut_gradients(plan, create_graph)
        maker = FormMaker(plan, create_graph)
        for node in plan.by_node:
            maker.add(node, {e.slot: gradients.pop(e) for e in plan.edges_of(node)}, self.forms.__setitem__)

    def each(self, visit: Visit) -> None:
        for name, form in self.forms.items():
            visit(name, form)

    def explain(self) -> list[Row]:
        return [self.plan.row(name, form) for name, form in self.forms.items()]


def _cut_gradients(plan: Plan, create_graph: bool) -> dict[Edge, Tensor]:
    """The gradient of losses.sum() at every clean node of the cut, in one backward pass."""
    found = {} if create_graph else dict(plan.cut.gradients)
    plan.cut.gradients.clear()
    missing = [edge for edge in plan.cut.tags if edge not in found]
    if missing:
        found.update(zip(missing, gradients_at(plan.graph, missing, create_graph=create_graph), strict=True))
    return found


class Full:
    def __init__(self, plan: Plan, create_graph: bool):
        self.plan = plan
        self.forms: dict[str, Form] = {}
        Fused(plan, create_graph).each(lambda name, form: self.forms.update({name: Dense(form.rows(0, form.samples))}))

    each = Fused.each
    explain = Fused.explain


class Reference:
    def __init__(self, graph: Graph, create_graph: bool):
        reached = {name: graph.wanted[name] for name in graph.leaves.values()}
        self.rows = jacobian_rows(graph.losses, reached, create_graph)

    def each(self, visit: Visit) -> None:
        for name, rows in self.rows.items():
            visit(name, Dense(rows))

    def explain(self) -> list[Row]:
        return [
            Row(name, tuple(rows.shape[1:]), "", "one backward per sample", "dense") for name, rows in self.rows.items()
        ]


class Streamed:
    def __init__(self, plan: Plan):
        self.plan = plan
        plan.cut.gradients.clear()  # the point is to keep nothing

    def each(self, visit: Visit) -> None:
        maker = FormMaker(self.plan, differentiable=False)
        waiting = set(self.plan.by_node)

        def arrived(node: Node, gradients: Sequence[Tensor | None]) -> None:
            if node in waiting:  # once: a node is run once a pass
                waiting.discard(node)
                used = {e.slot for e in self.plan.edges_of(node)}
                maker.add(node, {s: g for s, g in enumerate(gradients) if s in used and g is not None}, visit)

        hooks = [node.register_prehook(_hook(node, arrived)) for node in self.plan.by_node]
        try:
            last = [edge for node in self._ends() for edge in self.plan.edges_of(node)]
            found = gradients_at(self.plan.graph, last)
        finally:
            for hook in hooks:
                hook.remove()
        for node in self._ends():
            here = {e.slot: g for e, g in zip(last, found, strict=True) if e.node is node}
            arrived(node, [here.get(slot) for slot in range(max(here) + 1)])

    def _ends(self) -> list[Node]:
        """Cut nodes with no other below: autograd stops there and hands their gradient over instead of running them."""
        graph = self.plan.graph
        above: set[Node] = set()
        for node in reversed(graph.nodes):
            if node in self.plan.by_node or node in above:
                above.update(consumer for consumer, _ in graph.consumers.get(node, ()))
        return [node for node in self.plan.by_node if node not in above]

    def explain(self) -> list[Row]:
        rows: list[Row] = []
        self.each(lambda name, form: rows.append(self.plan.row(name, form)))
        return rows


def _hook(node: Node, arrived: Callable[[Node, Sequence[Tensor | None]], None]) -> Callable[[Any], None]:
    def prehook(gradients: Sequence[Tensor | None]) -> None:
        with torch.no_grad():
            arrived(node, gradients)

    return prehook
