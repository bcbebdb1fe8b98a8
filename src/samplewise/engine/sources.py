"""The strategies: how the per-sample gradients of each parameter are brought to light, one form after the other.

    fused        one backward pass; every form is kept, so that all quantities share the pass
    twice        forms are made while the backward passes by and dropped after use: a pass for each question
    full         fused, with every form turned into rows
    reference    rows from a backward pass for each sample

Forms are made, and the question at hand is put to them, while the backward pass is at their node: what they are made
of is still in the cache then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from samplewise.engine.cut import find_cut
from samplewise.engine.forms import Dense, Form
from samplewise.engine.graph import Graph
from samplewise.engine.passes import backward_past
from samplewise.engine.plan import FormMaker, Plan, Row, prepare
from samplewise.engine.reference import jacobian_rows

Visit = Callable[[str, Form], None]


class Source(Protocol):
    def each(self, visit: Visit, release: bool = False) -> None:
        """Calls visit(name, form) for every parameter that the losses reach; `release` lets forms go after it."""

    def explain(self) -> list[Row]: ...


def make_plan(graph: Graph, constants: set[int], interacting: str) -> Plan:
    return prepare(graph, find_cut(graph, constants, interacting))


class OnePass:
    """Forms from a backward pass to the cut, kept for further questions or not."""

    def __init__(self, plan: Plan, create_graph: bool, keep: bool):
        self.plan, self.create_graph, self.keep = plan, create_graph, keep
        self.forms: dict[str, Form] = {}

    def each(self, visit: Visit, release: bool = False) -> None:
        if not self.forms:
            self._pass(self._keeping(visit) if self.keep and not release else visit)
        elif release:
            while self.forms:
                visit(*self.forms.popitem())
        else:
            for name, form in self.forms.items():
                visit(name, form)

    def _keeping(self, visit: Visit) -> Visit:
        def both(name: str, form: Form) -> None:
            self.forms[name] = form
            visit(name, form)

        return both

    def _pass(self, visit: Visit) -> None:
        maker = FormMaker(self.plan, self.create_graph)
        probed = {} if self.create_graph else dict(self.plan.cut.gradients)
        self.plan.cut.gradients.clear()
        if len(probed) == len(self.plan.cut.tags):
            for node in self.plan.by_node:
                maker.add(node, {e.slot: probed.pop(e) for e in self.plan.edges_of(node)}, visit)
        else:
            backward_past(
                self.plan.graph,
                self.plan.by_node,
                lambda node, gradients: maker.add(node, gradients, visit),
                create_graph=self.create_graph,
            )

    def explain(self) -> list[Row]:
        rows: list[Row] = []
        self.each(lambda name, form: rows.append(self.plan.row(name, form)))
        return rows


class AsRows:
    """Another source with every form turned into rows."""

    def __init__(self, source: OnePass):
        self.source = source
        self.forms: dict[str, Form] = {}

    def each(self, visit: Visit, release: bool = False) -> None:
        if not self.forms:
            self.source.each(lambda n, form: self.forms.update({n: Dense(form.rows(0, form.samples))}), release=True)
        for name, form in self.forms.items():
            visit(name, form)

    def explain(self) -> list[Row]:
        return self.source.explain()


class Reference:
    def __init__(self, graph: Graph, create_graph: bool):
        reached = {name: graph.wanted[name] for name in graph.leaves.values()}
        self.rows = jacobian_rows(graph.losses, reached, create_graph)

    def each(self, visit: Visit, release: bool = False) -> None:
        for name, rows in self.rows.items():
            visit(name, Dense(rows))

    def explain(self) -> list[Row]:
        return [
            Row(name, tuple(rows.shape[1:]), "", "one backward per sample", "dense") for name, rows in self.rows.items()
        ]
