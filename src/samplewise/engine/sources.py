"""The strategies: how the per-sample gradients of each parameter are brought to light, one form after the other.

    fused        one backward pass; every form is kept, so that all quantities share the pass
    twice        forms are made while the backward passes by and dropped after use: a pass for each question
    full         fused, with every form turned into rows
    reference    rows from a backward pass for each sample

Forms are made, and the question at hand is put to them, while the backward pass is at their node: what they are made
of is still in the cache then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from samplewise.engine.cut import find_cut
from samplewise.engine.forms import Dense, Form
from samplewise.engine.graph import Graph, Node
from samplewise.engine.plan import FormMaker, Plan, Row, prepare
from samplewise.engine.probe import gradients_at
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
            self._backward(maker, visit)

    def _backward(self, maker: FormMaker, visit: Visit) -> None:
        waiting = set(self.plan.by_node)

        def arrived(node: Node, gradients: Sequence[Tensor | None]) -> None:
            if node in waiting:  # a node may be called again while forms are made
                waiting.discard(node)
                used = self.plan.graph.used_slots(node)
                maker.add(node, {s: g for s in used if s < len(gradients) and (g := gradients[s]) is not None}, visit)

        hooks = [node.register_prehook(_hook(node, arrived, self.create_graph)) for node in self.plan.by_node]
        ends = self._ends()
        last = [edge for node in ends for edge in self.plan.edges_of(node)]
        try:
            found = gradients_at(self.plan.graph, last, create_graph=self.create_graph)
        finally:
            for hook in hooks:
                hook.remove()
        for node in ends:
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


def _hook(
    node: Node, arrived: Callable[[Node, Sequence[Tensor | None]], None], create_graph: bool
) -> Callable[[Any], None]:
    def prehook(gradients: Sequence[Tensor | None]) -> None:
        with torch.set_grad_enabled(create_graph):
            arrived(node, gradients)

    return prehook


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
