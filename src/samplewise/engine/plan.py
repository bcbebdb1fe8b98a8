"""Plan: the rule for each use of a parameter, and the nodes between the use and the parameter.

`make_plan(graph, cut)` reads the graph only, no gradients. `FormMaker(plan)` applies the plan; its only decisions are
based on sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from samplewise.engine.cut import Cut, find_cut, probed_cut
from samplewise.engine.grads.base import DenseGrad, PerSampleGrad
from samplewise.engine.grads.generic import GenericGrad, Pullback
from samplewise.engine.graph import Edge, Graph, Node
from samplewise.engine.independence import Constants
from samplewise.engine.parameter_side import carried, combined, ways_down
from samplewise.engine.rules import RULES, Rule, Use
from samplewise.engine.saved import Saved, SavedTensorReader, Versions
from samplewise.errors import GraphError


@dataclass(frozen=True)
class Route:
    """Path from one operand of a clean node to one parameter."""

    node: Node
    operand: int
    rule: Rule | None
    entry: Edge  # where the gradient of the operand arrives
    leaf: Node
    number: int  # index of the leaf among those below the operand
    chain: tuple[Node, ...] | None  # nodes between operand and leaf, () if there are none; None if not a single path


@dataclass(frozen=True)
class ExplainRow:
    """One line of the table of `explain`."""

    parameter: str
    shape: tuple[int, ...]
    operations: str
    ownership: str
    form: str


class Plan:
    """All routes from the cut to the parameters, indexed by node and by parameter name."""

    def __init__(self, graph: Graph, cut: Cut, routes: list[Route]):
        self.graph = graph
        self.cut = cut
        self.routes = routes
        self.by_node: dict[Node, list[Route]] = {}
        self.by_name: dict[str, list[Route]] = {}
        self.leaves_below: dict[tuple[Node, int], list[Edge]] = {}
        for route in routes:
            self.by_node.setdefault(route.node, []).append(route)
            self.by_name.setdefault(graph.leaves[route.leaf], []).append(route)
            self.leaves_below.setdefault((route.node, route.operand), []).append(Edge(route.leaf, 0))

    def edges_of(self, node: Node) -> list[Edge]:
        return [Edge(node, slot) for slot in self.graph.used_slots(node)]

    def reader(self) -> SavedTensorReader:
        """Reader of all saved tensors that the rules of this plan need."""
        wishes: dict[Node, tuple[str, ...]] = {}
        for node, routes in self.by_node.items():
            names: dict[str, None] = {}
            for route in routes:
                if route.rule is not None:
                    names.update(dict.fromkeys(route.rule.reads))
            wishes[node] = tuple(names)
            for route in routes:
                for below in route.chain or ():
                    if self.graph.operations[below] == "Embedding":
                        wishes[below] = ("indices",)
        return SavedTensorReader(wishes.items())

    def row(self, name: str, form: PerSampleGrad) -> ExplainRow:
        """Line of `explain` for one parameter."""
        routes = self.by_name[name]
        operations = dict.fromkeys(self.graph.operations[r.node] for r in routes)
        kinds = dict.fromkeys(str(self.cut.tags[e]) for r in routes for e in self.edges_of(r.node))
        ownership = f"{', '.join(kinds)} ({'proven' if self.cut.proven else 'probed'})"
        count = f" x{len(routes)}" if len(routes) > 1 else ""
        return ExplainRow(name, form.shape, ", ".join(operations) + count, ownership, form.describe())


def make_plan(graph: Graph, cut: Cut) -> Plan:
    """Return the plan for a graph and its cut. Checks that each parameter in the graph has a route."""
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
            f"each parameter in the graph must be reached from the cut; found no route to {names}. "
            "This is a bug in samplewise: please report it with the model."
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


class GradBuilder:
    """Convert gradients at the cut into representations of per-sample gradients, node by node.

    `visit(name, form)` is called for each parameter as soon as all of its uses have been added.
    """

    def __init__(self, plan: Plan, differentiable: bool):
        self.plan = plan
        self.differentiable = differentiable
        self.reader = plan.reader()
        self.versions = Versions()  # version counters of the tensors that representations refer to
        self.pending: dict[str, list[PerSampleGrad]] = {}

    def add(self, node: Node, gradients: dict[int, Tensor], visit: Callable[[str, PerSampleGrad], None]) -> None:
        saved = self.reader.take(node)
        # Rules use only the shape of weights, or read them at once, so the optimizer may change them afterwards.
        kept = [tensor for name, tensor in saved.items() if not name.startswith("weight")]
        self.versions.remember([*kept, *gradients.values()])
        operands: dict[int, tuple[PerSampleGrad, Pullback]] = {}
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

    def _operand(self, route: Route, gradients: dict[int, Tensor], saved: Saved) -> PerSampleGrad:
        graph = self.plan.graph
        shape = route.entry.shape
        if not gradients:
            return DenseGrad(torch.zeros(graph.samples, *shape, dtype=route.entry.dtype, device=graph.losses.device))
        tags = {slot: self.plan.cut.tags[Edge(route.node, slot)] for slot in gradients}
        use = Use(route.node, route.operand, route.entry, shape, graph.samples, gradients, tags, saved)
        form = route.rule.form(use) if route.rule is not None else None
        return GenericGrad(use, self.differentiable) if form is None else form

    def _carry(self, form: PerSampleGrad, pullback: Pullback, route: Route) -> PerSampleGrad:
        """Convert the representation of an operand into that of the parameter below it."""
        operations = None if route.chain is None else [self.plan.graph.operations[node] for node in route.chain]

        def indices() -> Tensor:
            found: Tensor = self.reader.take(route.entry.node)["indices"]
            self.versions.remember([found])
            return found

        return carried(form, operations, pullback, route.number, indices)
