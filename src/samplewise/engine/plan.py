"""Which rule serves each use of a parameter, and the way from there to the parameter. Decided from the graph alone.

`prepare(graph, cut)` touches no gradient; `FormMaker(plan)` then makes no decision but from sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from samplewise.engine.cut import Cut
from samplewise.engine.forms import Dense, Form
from samplewise.engine.generic import Masked
from samplewise.engine.graph import Edge, Graph, Node
from samplewise.engine.rules import RULES, Rule, Use
from samplewise.engine.saved import Reader, Saved
from samplewise.engine.sides import carried, combined, ways_down
from samplewise.errors import GraphError


@dataclass(frozen=True)
class Route:
    """From one operand of a clean node down to one parameter."""

    node: Node
    operand: int
    rule: Rule | None
    leaf: Node
    chain: tuple[Node, ...] | None  # the nodes on the way where it is a single path, () where there are none

    @property
    def entry(self) -> Edge:
        return Edge(*self.node.next_functions[self.operand])


@dataclass(frozen=True)
class Row:
    """A line of `explain`."""

    parameter: str
    shape: tuple[int, ...]
    operations: str
    ownership: str
    form: str


class Plan:
    def __init__(self, graph: Graph, cut: Cut, routes: list[Route]):
        self.graph, self.cut, self.routes = graph, cut, routes
        self.by_node: dict[Node, list[Route]] = {}
        self.uses: dict[str, int] = {}
        for route in routes:
            self.by_node.setdefault(route.node, []).append(route)
            name = graph.leaves[route.leaf]
            self.uses[name] = self.uses.get(name, 0) + 1

    def edges_of(self, node: Node) -> list[Edge]:
        return [Edge(node, slot) for slot in self.graph.used_slots(node)]

    def reader(self) -> Reader:
        wishes = {}
        for node, routes in self.by_node.items():
            chained = [n for r in routes for n in r.chain or () if self.graph.operations[n] == "Embedding"]
            wishes[node] = tuple(dict.fromkeys(name for r in routes if r.rule for name in r.rule.reads))
            wishes.update((n, ("indices",)) for n in chained)
        return Reader(wishes.items())

    def row(self, name: str, form: Form) -> Row:
        routes = [r for r in self.routes if self.graph.leaves[r.leaf] == name]
        operations = dict.fromkeys(self.graph.operations[r.node] for r in routes)
        kinds = dict.fromkeys(str(self.cut.tags[e]) for r in routes for e in self.edges_of(r.node))
        ownership = f"{', '.join(kinds)} ({'proven' if self.cut.proven else 'probed'})"
        count = f" x{len(routes)}" if len(routes) > 1 else ""
        return Row(name, form.shape, ", ".join(operations) + count, ownership, form.describe())


def prepare(graph: Graph, cut: Cut) -> Plan:
    routes = []
    for node, operand in cut.operands:
        entry = node.next_functions[operand][0]
        rule = RULES.get((graph.operations[node], operand))
        routes += [Route(node, operand, rule, leaf, chain) for leaf, chain in ways_down(graph, entry)]
    _prove_complete(graph, routes)
    return Plan(graph, cut, routes)


def _prove_complete(graph: Graph, routes: list[Route]) -> None:
    missed = set(graph.leaves) - {route.leaf for route in routes}
    if missed:
        names = ", ".join(sorted(graph.leaves[leaf] for leaf in missed))
        raise GraphError(
            f"every parameter in the graph must be reached from a cut; found none above {names}. "
            "Please report this model."
        )


class FormMaker:
    """Turns gradients into forms, node by node, and hands each parameter's form out as soon as its last use is in."""

    def __init__(self, plan: Plan, differentiable: bool):
        self.plan, self.differentiable = plan, differentiable
        self.reader = plan.reader()
        self.pending: dict[str, list[Form]] = {}

    def add(self, node: Node, gradients: dict[int, Tensor], visit: Callable[[str, Form], None]) -> None:
        saved = self.reader.take(node)
        operands: dict[int, Form] = {}
        for route in self.plan.by_node[node]:
            if route.operand not in operands:
                operands[route.operand] = self._operand(route, gradients, saved)
            name = self.plan.graph.leaves[route.leaf]
            waiting = self.pending.setdefault(name, [])
            waiting.append(self._carry(operands[route.operand], route))
            if len(waiting) == self.plan.uses[name]:
                visit(name, combined(self.pending.pop(name)))

    def _operand(self, route: Route, gradients: dict[int, Tensor], saved: Saved) -> Form:
        graph = self.plan.graph
        shape = route.entry.shape
        if not gradients:
            return Dense(torch.zeros(graph.samples, *shape, dtype=route.entry.dtype, device=graph.losses.device))
        tags = {slot: self.plan.cut.tags[Edge(route.node, slot)] for slot in gradients}
        use = Use(route.node, route.operand, shape, graph.samples, gradients, tags, saved)
        form = route.rule.form(use) if route.rule is not None else None
        return Masked(use, self.differentiable) if form is None else form

    def _carry(self, form: Form, route: Route) -> Form:
        """The operand's form becomes the parameter's."""
        operations = None if route.chain is None else [self.plan.graph.operations[node] for node in route.chain]

        def indices() -> Tensor:
            return self.reader.take(route.entry.node)["indices"]

        return carried(form, operations, route.entry, Edge(route.leaf, 0), indices, self.differentiable)
