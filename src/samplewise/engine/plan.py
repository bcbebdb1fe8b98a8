"""Which rule serves each use of a parameter, and the way from there to the parameter. Decided from the graph alone.

`make_plan(graph, cut)` touches no gradient; `FormMaker(plan)` then makes no decision but from sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from samplewise.engine.cut import Cut, find_cut, probed_cut
from samplewise.engine.forms import Dense, Form
from samplewise.engine.generic import Masked, Pullback
from samplewise.engine.graph import Edge, Graph, Node
from samplewise.engine.interaction import Constants
from samplewise.engine.rules import RULES, Rule, Use
from samplewise.engine.saved import Reader, Saved, Versions
from samplewise.engine.sides import carried, combined, ways_down
from samplewise.errors import GraphError


@dataclass(frozen=True)
class Route:
    """From one operand of a clean node down to one parameter."""

    node: Node
    operand: int
    rule: Rule | None
    entry: Edge  # where the gradient of the operand arrives
    leaf: Node
    number: int  # of the leaf among those below the operand
    chain: tuple[Node, ...] | None  # the nodes on the way where it is a single path, () where there are none


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
        self.by_name: dict[str, list[Route]] = {}
        self.leaves_below: dict[tuple[Node, int], list[Edge]] = {}
        for route in routes:
            self.by_node.setdefault(route.node, []).append(route)
            self.by_name.setdefault(graph.leaves[route.leaf], []).append(route)
            self.leaves_below.setdefault((route.node, route.operand), []).append(Edge(route.leaf, 0))

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
        routes = self.by_name[name]
        operations = dict.fromkeys(self.graph.operations[r.node] for r in routes)
        kinds = dict.fromkeys(str(self.cut.tags[e]) for r in routes for e in self.edges_of(r.node))
        ownership = f"{', '.join(kinds)} ({'proven' if self.cut.proven else 'probed'})"
        count = f" x{len(routes)}" if len(routes) > 1 else ""
        return Row(name, form.shape, ", ".join(operations) + count, ownership, form.describe())


def make_plan(graph: Graph, cut: Cut) -> Plan:
    routes = []
    for node, operand in cut.operands:
        entry = Edge(*graph.children[node][operand])
        rule = RULES.get((graph.operations[node], operand))
        for number, (leaf, chain) in enumerate(ways_down(graph, entry.node)):
            routes.append(Route(node, operand, rule, entry, leaf, number, chain))
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


class Planner:
    """The plan of a graph, made when it is first needed."""

    def __init__(self, graph: Graph, constants: Constants, interacting: str):
        self.graph = graph
        self.constants = constants
        self.interacting = interacting
        self._plan: Plan | None = None

    def plan(self) -> Plan:
        if self._plan is None:
            self._plan = make_plan(self.graph, find_cut(self.graph, self.constants, self.interacting))
        return self._plan

    def plan_by_probe(self) -> Plan:
        """Replace the plan by one that does not depend on derived ownership."""
        self._plan = make_plan(self.graph, probed_cut(self.graph, self.constants, self.interacting))
        return self._plan


class FormMaker:
    """Turns gradients into forms, node by node, and hands each parameter's form out as soon as its last use is in."""

    def __init__(self, plan: Plan, differentiable: bool):
        self.plan, self.differentiable = plan, differentiable
        self.reader = plan.reader()
        self.versions = Versions()  # of the tensors that forms are made of
        self.pending: dict[str, list[Form]] = {}

    def add(self, node: Node, gradients: dict[int, Tensor], visit: Callable[[str, Form], None]) -> None:
        saved = self.reader.take(node)
        # Of weights, rules use the shape or compute something at once: an optimizer may change them afterwards.
        kept = [tensor for name, tensor in saved.items() if not name.startswith("weight")]
        self.versions.remember([*kept, *gradients.values()])
        operands: dict[int, tuple[Form, Pullback]] = {}
        for route in self.plan.by_node[node]:
            if route.operand not in operands:
                form = self._operand(route, gradients, saved)
                leaves = self.plan.leaves_below[node, route.operand]
                operands[route.operand] = (form, Pullback(form, route.entry, leaves, self.differentiable))
            form, pullback = operands[route.operand]
            name = self.plan.graph.leaves[route.leaf]
            waiting = self.pending.setdefault(name, [])
            waiting.append(self._carry(form, pullback, route))
            if len(waiting) == len(self.plan.by_name[name]):
                visit(name, combined(self.pending.pop(name)))

    def _operand(self, route: Route, gradients: dict[int, Tensor], saved: Saved) -> Form:
        graph = self.plan.graph
        shape = route.entry.shape
        if not gradients:
            return Dense(torch.zeros(graph.samples, *shape, dtype=route.entry.dtype, device=graph.losses.device))
        tags = {slot: self.plan.cut.tags[Edge(route.node, slot)] for slot in gradients}
        use = Use(route.node, route.operand, route.entry, shape, graph.samples, gradients, tags, saved)
        form = route.rule.form(use) if route.rule is not None else None
        return Masked(use, self.differentiable) if form is None else form

    def _carry(self, form: Form, pullback: Pullback, route: Route) -> Form:
        """The operand's form becomes the parameter's."""
        operations = None if route.chain is None else [self.plan.graph.operations[node] for node in route.chain]

        def indices() -> Tensor:
            found: Tensor = self.reader.take(route.entry.node)["indices"]
            self.versions.remember([found])
            return found

        return carried(form, operations, pullback, route.number, indices)
