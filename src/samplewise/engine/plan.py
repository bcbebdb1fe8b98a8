"""Plan of a graph structure, and its application to one graph.

`Planner(graph, ...).plan()` returns the plan: which nodes the backward pass stops at, which rule converts the gradient
of each operand, and which operations lie between the operand and the parameter. Plans refer to nodes by position and
hold no tensors, so graphs of the same structure and shapes share a plan. `GradBuilder` applies a plan to a graph.

A plan is a claim about all graphs of a structure. What can change between two of them is verified for each graph: the
ownership through nodes that were probed (before the pass), Python functions and hooks (by the pass, see `strategies`),
gradients that could not verify the ownership because they were zero, and sample data below the cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from samplewise.engine.backward import OperandGradients, Stops, stops_at
from samplewise.engine.deferred_checks import is_traced
from samplewise.engine.generic import GenericGrad, Pullback, Verdicts, supports_batches
from samplewise.engine.grads.base import PerSampleGrad
from samplewise.engine.grads.dense import DenseGrad
from samplewise.engine.grads.factored import FactoredGrad
from samplewise.engine.grads.indexed import VIEWS
from samplewise.engine.grads.packed import SMALL, pack_rows
from samplewise.engine.grads.stacked import StackedGrad
from samplewise.engine.graph.graph import Edge, EdgeKey, Graph, Node, is_accumulate_grad, is_python_function, numel
from samplewise.engine.graph.hook_registry import leave_out_forward_hooks, may_have_hooks
from samplewise.engine.graph.saved import SavedTensorReader, Versions
from samplewise.engine.graph.structure import once
from samplewise.engine.ownership.cut import Cut, find_cut, probed_cut
from samplewise.engine.ownership.independence import (
    Constants,
    may_refuse,
    refuse_batch_norm,
    refuse_broadcast,
    sample_data,
)
from samplewise.engine.ownership.local_probe import Claim, hold
from samplewise.engine.ownership.owner_map import OwnerMap, Regular
from samplewise.engine.ownership.verify import verify_again
from samplewise.engine.parameter_side import (
    NO_DESCENT,
    Descent,
    carry,
    changing_operations,
    combine,
    descent,
    lower,
    paths_to_leaves,
    reads_of,
)
from samplewise.engine.rules import OPERAND_RULES, RULES, OperandRule, Rule, Use
from samplewise.engine.rules.rule_input import Operand
from samplewise.engine.slow_paths import place_of, warn_if_slow
from samplewise.errors import GraphError
from samplewise.parallel.sharded_parameters import unsharded

Quantity = Callable[[PerSampleGrad, str], Any]

# Rows with at most this fraction of the elements of the gradient that they were computed from are kept in any case.
FEW_ROWS = 0.25

_generator = torch.Generator().manual_seed(0)  # separate generator: does not change the user's RNG state


@dataclass(frozen=True)
class Route:
    """Path from one operand to one parameter."""

    name: str  # of the parameter
    number: int  # index of the parameter among those below the operand
    changing: tuple[str, ...] | None  # operations on the path that change a gradient; None if not a single path
    looks_up: bool  # the only operation on the path is an embedding


@dataclass(frozen=True)
class Branch:
    """Parameters below one operand, for all graphs of a structure."""

    entry: EdgeKey  # where the gradient of the operand arrives
    leaves: tuple[int, ...]  # positions of the parameters
    routes: tuple[Route, ...]
    viewed: bool  # the operations on all routes only view the parameters
    function: str | None  # name of a Python Function below the operand


@dataclass(frozen=True)
class OperandPlan:
    """Conversion of the gradient of one operand at the cut."""

    operand: Operand
    rule: Rule | None
    empty: bool  # the output has no elements, so that the operand gets no gradient
    branch: Branch
    descent: Descent  # operations below the operand through which representations are converted


@dataclass(frozen=True)
class ExplainRow:
    """One line of the table of `explain`."""

    parameter: str
    shape: tuple[int, ...]
    operations: str
    ownership: str
    grad: str


@dataclass
class Plan:
    """Everything about per-sample gradients that depends only on the graph structure and its shapes."""

    stops: Stops  # nodes at the cut
    operands: dict[int, list[OperandPlan]]  # by node at the cut
    reads: dict[int, tuple[str, ...]]  # names of the saved tensors to read, by node
    uses: dict[str, int]  # number of routes to each parameter
    rules: dict[tuple[str, int], Rule | None]  # the rules in use, by operation and operand position
    owner_maps: dict[EdgeKey, OwnerMap]  # ownership of the gradients at the cut
    owners: dict[EdgeKey, OwnerMap]  # of all gradients whose ownership was derived
    side: set[int]  # nodes of the parameter side
    proven: bool  # True: ownership derived node by node; False: probed by passes through the whole graph
    claims: list[Claim]  # that the ownership depends on, to be verified in each graph
    functions: list[Claim]  # as before, about Python functions: to be verified during a pass
    recomputed: bool  # the ownership is to be verified by a pass with weights in each graph
    derivation: int  # see `Ownership`
    has_functions: bool  # True if there are Python Functions at the cut or below it
    data_entries: list[int]  # positions of the nodes through which sample data may enter below the cut
    operations: dict[int, str]  # by node at the cut
    operand_rules: dict[int, OperandRule]  # of nodes that need not be run, by node at the cut
    pending: set[EdgeKey]  # edges whose ownership is not verified yet, because gradients were zero
    orders: dict[object, str] = field(default_factory=dict)  # of the elements of viewed parameters, see `reindex`
    shared: dict[object, bool] = field(default_factory=dict)  # whether views of a parameter overlap, by name
    verdicts: Verdicts = field(default_factory=dict)  # whether operations without a rule can be computed in batches
    gradients: dict[EdgeKey, Tensor] = field(default_factory=dict)  # gradients that a probe has already computed
    by_passes: set[object] = field(default_factory=set)  # places of hooks that are verified by passes with weights
    cause: str = "samples do not own the gradients as was derived"  # why the whole graph was probed, if it was

    def explain(self, name: str, grad: PerSampleGrad) -> ExplainRow:
        """Line of `explain` for one parameter."""
        operations: dict[str, None] = {}
        kinds: dict[str, None] = {}
        for node, operands in self.operands.items():
            if any(route.name == name for operand in operands for route in operand.branch.routes):
                operations[self.operations[node]] = None
                kinds.update(dict.fromkeys(str(self.owner_maps[node, slot]) for slot in self.stops.slots[node]))
        ownership = f"{', '.join(kinds)} ({'proven' if self.proven else 'probed'})"
        count = f" x{self.uses[name]}" if self.uses[name] > 1 else ""
        return ExplainRow(name, grad.shape, ", ".join(operations) + count, ownership, grad.describe())


# --- making a plan -------------------------------------------------------------------------------------------------


def make_plan(graph: Graph, cut: Cut) -> Plan:
    """Return the plan for a graph and its cut. Checks that each parameter in the graph has a route."""
    keys = tuple([(graph.index[node], position) for node, position in cut.operands])
    # Routes to the parameters depend on the structure alone: graphs with other shapes share them.
    branches = once(graph.structure.results, (Branch, keys), partial(_branches, graph, keys))
    operands: dict[int, list[OperandPlan]] = {}
    reads: dict[int, dict[str, None]] = {}
    uses: dict[str, int] = {}
    rules: dict[tuple[str, int], Rule | None] = {}
    for (at, position), branch in zip(keys, branches, strict=True):
        key = (graph.structure.operations[at], position)
        rule = rules[key] = RULES.get(key)
        reads.setdefault(at, {}).update(dict.fromkeys(rule.reads if rule is not None else ()))
        operand_plan = _plan_operand(graph, cut, at, position, rule, branch)
        operands.setdefault(at, []).append(operand_plan)
        for below, names in reads_of(operand_plan.descent, graph).items():
            reads.setdefault(below, {}).update(dict.fromkeys(names))
        for route in branch.routes:
            uses[route.name] = uses.get(route.name, 0) + 1
            if route.looks_up:
                reads.setdefault(branch.entry[0], {})["indices"] = None
    operations = {at: graph.structure.operations[at] for at in operands}
    operand_rules = _operand_rules(operations, reads)
    return Plan(
        stops=stops_at(graph, [graph.nodes[at] for at in operands], [graph.nodes[at] for at in operand_rules]),
        operands=operands,
        reads={at: tuple(names) for at, names in reads.items()},
        uses=uses,
        rules=rules,
        owner_maps={graph.key(edge): owner_map for edge, owner_map in cut.owner_maps.items()},
        owners=cut.owners,
        side={graph.index[node] for node in cut.side},
        proven=cut.proven,
        claims=cut.claims,
        functions=cut.functions,
        recomputed=cut.recomputed,
        derivation=cut.derivation,
        has_functions=any(
            operand_plan.branch.function is not None or is_python_function(graph.nodes[at])
            for at, operands_of_node in operands.items()
            for operand_plan in operands_of_node
        ),
        data_entries=cut.data_entries,
        operations=operations,
        operand_rules=operand_rules,
        pending={graph.key(edge) for edge in cut.pending},
        gradients={graph.key(edge): gradient for edge, gradient in cut.gradients.items()},
    )


def _plan_operand(graph: Graph, cut: Cut, at: int, position: int, rule: Rule | None, branch: Branch) -> OperandPlan:
    shapes = graph.sizes.shapes
    slots = graph.reach.slots[at]
    owner_maps = {slot: cut.owner_maps[graph.edge((at, slot))] for slot in slots}
    operand = Operand(position, shapes[branch.entry], graph.samples, owner_maps)
    empty = not any(numel(shapes[at, slot]) for slot in slots)
    if branch.viewed:
        return OperandPlan(operand, rule, empty, branch, NO_DESCENT)
    leaves = [graph.nodes[leaf] for leaf in branch.leaves]
    return OperandPlan(operand, rule, empty, branch, descent(graph, graph.edge(branch.entry), leaves))


def _branches(graph: Graph, operands: Iterable[tuple[int, int]]) -> list[Branch]:
    """Parameters below each operand (node, position). Checks that each parameter in the graph is reached."""
    branches = [_branch(graph, graph.nodes[at], position) for at, position in operands]
    _prove_complete(graph, [route.name for branch in branches for route in branch.routes])
    return branches


def _branch(graph: Graph, node: Node, position: int) -> Branch:
    entry = Edge(*graph.children[node][position])
    paths = paths_to_leaves(graph, entry.node)
    routes = []
    for number, (leaf, chain) in enumerate(paths):
        operations = None if chain is None else [graph.operations[below] for below in chain]
        changing = None if operations is None else changing_operations(operations)
        routes.append(Route(graph.leaves[leaf], number, changing, looks_up=operations == ["Embedding"]))
    leaves = tuple(graph.index[leaf] for leaf, _ in paths)
    viewed = all(route.changing is not None and set(route.changing) <= VIEWS for route in routes)
    return Branch(graph.key(entry), leaves, tuple(routes), viewed, _function_below(graph, entry.node))


def _function_below(graph: Graph, start: Node) -> str | None:
    if not graph.structure.functions:
        return None
    functions = [node for node in graph.below([start]) if node in graph.relevant and is_python_function(node)]
    return graph.operations[functions[0]] if functions else None


def _operand_rules(operations: Mapping[int, str], reads: Mapping[int, Mapping[str, None]]) -> dict[int, OperandRule]:
    """Rules for the gradients of operands, of nodes whose saved tensors are read by other rules in any case."""
    rules = {at: OPERAND_RULES[name] for at, name in operations.items() if name in OPERAND_RULES}
    return {at: rule for at, rule in rules.items() if set(rule.reads) <= set(reads[at])}


def _prove_complete(graph: Graph, uses: Iterable[str]) -> None:
    missed = set(graph.leaves.values()) - set(uses)
    if missed:
        raise GraphError(
            f"each parameter in the graph must be reached from the cut; found no route to {', '.join(sorted(missed))}. "
            "This is a bug in samplewise: please report it with the model."
        )


class Planner:
    """The plan of a graph, made or looked up when it is first needed.

    `modules`: tensors of these modules do not count as sample data. `interacting`: see `gradients`.
    """

    def __init__(self, graph: Graph, modules: Iterable[nn.Module], interacting: str):
        self.graph = graph
        self.modules = modules
        self.interacting = interacting
        self._plan: Plan | None = None

    def plan(self) -> Plan:
        if self._plan is None and not self.find():
            self._plan = self._analyze()
        assert self._plan is not None
        return self._plan

    def find(self, verify: bool = True) -> bool:
        """Look up the plan; False if there is none for such graphs, or if it does not hold for this one. `verify`: if
        False, also if this depends on values of this graph.
        """
        if not self.graph.sharded:  # `harmless_hooks` has those of sharded models
            leave_out_forward_hooks(self.modules)
        plan: Plan | None = self.graph.sizes.plans.get(self.interacting)
        if plan is None or (not verify and (plan.claims or plan.data_entries)) or not self._holds(plan):
            return False
        self._plan = plan
        return True

    def plan_by_probe(self) -> Plan:
        """Replace the plan by one that does not depend on derived ownership."""
        self._plan = make_plan(self.graph, probed_cut(self.graph, self._constants(), self.interacting))
        return self._plan

    def _holds(self, plan: Plan) -> bool:
        """True if a cached plan is valid here: same rules, no sample data below the cut, verified ownership."""
        if list(map(RULES.get, plan.rules)) != list(plan.rules.values()):  # the caller may have added a rule
            return False
        if plan.data_entries and not self._allows_data(plan):
            return False
        if plan.claims and is_traced(self.graph.losses):  # claims are verified with values
            return False
        return not plan.claims or hold(plan.claims, self.graph)

    def _allows_data(self, plan: Plan) -> bool:
        """True if what enters below the cut is no reason to look at this graph: integers may be positions."""
        if self.interacting != "refuse" and not is_traced(self.graph.losses):
            return True
        data = list(sample_data(self.graph, plan.data_entries, self._constants()))
        return not (data and (may_refuse(data) or is_traced(self.graph.losses)))

    def verify_again(self) -> bool:
        """Verify the ownership of the current plan with new passes; False if it does not hold."""
        plan = self.plan()
        owner_maps = {self.graph.edge(key): owner_map for key, owner_map in plan.owner_maps.items()}
        pending = verify_again(self.graph, owner_maps, plan.derivation)
        if pending is None:
            self.graph.sizes.plans.pop(self.interacting, None)
            return False
        plan.pending = set(map(self.graph.key, pending))
        return True

    def _analyze(self) -> Plan:
        if self.interacting == "refuse":
            refuse_batch_norm(self.graph, self.modules)
            refuse_broadcast(self.graph)
        cut = find_cut(self.graph, self._constants(), self.interacting)
        plan = make_plan(self.graph, cut)
        if cut.cause is not None:
            place = "" if cut.cause.node is None else place_of(self.graph, cut.cause.node, self.modules)
            plan.cause = cut.cause.text + place
        sizes = self.graph.sizes
        # Routing by data has new shapes in each step: owners of rows are kept only for shapes that are met again.
        small = sizes.analyzed or all(isinstance(owner_map, Regular) for owner_map in plan.owner_maps.values())
        if cut.proven and not cut.by_data and small:
            sizes.plans[self.interacting] = plan
        sizes.analyzed = True
        return plan

    def _constants(self) -> Constants:
        return Constants(self._model_tensors())

    def _model_tensors(self) -> Iterator[Tensor]:
        """Parameters and buffers of the model, some of them twice."""
        yield from self.graph.wanted.values()
        for node in self.graph.nodes:
            if is_accumulate_grad(node) and isinstance(node.variable, nn.Parameter):
                yield node.variable
        for module in self.modules:
            for part in module.modules():  # a tenth of the time of module.parameters()
                for tensor in (*part._parameters.values(), *part._buffers.values()):
                    if tensor is not None:
                        yield tensor


# --- applying a plan -----------------------------------------------------------------------------------------------


class GradBuilder:
    """Convert gradients at the cut into representations of per-sample gradients, and compute a quantity of each.

    `add` is called once for each node at the cut. As soon as all uses of a parameter have been added,
    quantity(grad, name) is stored in `results`, and with keep=True the representation in `grads`. Otherwise, `rows` has
    those of parameters that are small compared with the activations.
    """

    def __init__(
        self,
        plan: Plan,
        graph: Graph,
        quantity: Quantity,
        differentiable: bool,
        keep: bool,
        factors: bool = False,
        in_place: bool = True,
    ):
        self.plan = plan
        self.graph = graph
        self.quantity = quantity
        self.differentiable = differentiable
        self.keep = keep
        self.factors = factors  # prefer factors, also if rows are smaller
        self.versions = Versions()  # version counters of the tensors that representations refer to
        self.results: dict[str, Any] = {}
        self.grads: dict[str, PerSampleGrad] = {}
        self.rows: dict[str, DenseGrad] = {}
        self._gradients: dict[int, Tensor] = {}  # of the last node that was added
        self._uses: dict[str, list[PerSampleGrad]] = {}  # of parameters with uses that are still to be added
        self._packs = keep and not (differentiable or graph.sharded or is_traced(graph.losses))
        # A hook or Python function may change a gradient in place during the pass, before its rows are packed.
        self._copies = self._packs and in_place
        self._small: dict[str, DenseGrad] = {}  # to be packed after the pass
        self._verdicts = None if graph.sharded else plan.verdicts
        self.not_linear: str | None = None  # a Python Function whose backward is not linear
        reads = {graph.nodes[at]: names for at, names in plan.reads.items()}
        self._reader = SavedTensorReader(reads, shared=not graph.sharded)
        # It reads tensors of checkpointed blocks during a pass, so that the pass can use them, too.
        self.recomputes = self._reader.recomputes

    def add(self, at: int, gradients: dict[int, Tensor]) -> OperandGradients | None:
        """Convert the gradients (by output slot) of the node at position `at`. If the node need not be run, a function
        is returned that computes the gradients of its operands.
        """
        if self.graph.sharded:
            leaves = [
                self.graph.nodes[leaf].variable
                for operand_plan in self.plan.operands[at]
                for leaf in operand_plan.branch.leaves
            ]
            with unsharded(leaves):  # a pass may have left their module
                self._add(at, gradients)
            return None
        return self._add(at, gradients)

    def _add(self, at: int, gradients: dict[int, Tensor]) -> OperandGradients | None:
        node = self.graph.nodes[at]
        saved = self._reader.take(node)
        self._gradients = gradients
        grads: list[PerSampleGrad] = []
        for operand_plan in self.plan.operands[at]:
            grad = None
            if gradients:
                use = Use(node, operand_plan.operand, gradients, saved)
            if not gradients or operand_plan.empty:
                grad = self._zeros(operand_plan)
            elif operand_plan.rule is not None and node not in self._reader.sparse:  # rules are for strided tensors
                rule = operand_plan.rule
                grad = rule.factors(use) if self.factors and rule.factors is not None else rule.grad(use)
            if grad is None:  # no rule, or one that does not support this use
                generic = GenericGrad(use, self.differentiable, self._verdicts, (at, operand_plan.operand.position))
                grad = generic.broadcast() or generic
                if is_python_function(node):
                    self._check_linear(generic, self.plan.operations[at])
                    if not supports_batches(node):
                        warn_if_slow(
                            self.graph,
                            f"{self.plan.operations[at]} has no rule, so that its backward is called once per sample",
                            f"{self.graph.samples} calls of it in each step",
                            "Set generate_vmap_rule = True in the Function if torch.vmap supports its backward.",
                        )
            grads += self._carry(operand_plan, grad)
        if self.keep and grads:
            # Rules use only the shape of weights, or read them at once, so the optimizer may change them afterwards.
            read = [tensor for name, tensor in saved.items() if not name.startswith("weight")]
            tensors = [*read, *gradients.values()]
            for grad in grads:
                if not (isinstance(grad, DenseGrad) and grad.is_apart_from(tensors)):
                    self.versions.record(tensors)
                    break
        of_operands = self.plan.operand_rules.get(at)
        return partial(of_operands.gradients, use) if of_operands is not None and gradients else None

    def _carry(self, operand_plan: OperandPlan, grad: PerSampleGrad) -> list[PerSampleGrad]:
        """Convert the representation of an operand into those of the parameters below it. Returns those that may refer
        to the tensors of the operation.
        """
        referring: list[PerSampleGrad] = []
        pullback: Pullback | None = None
        for route in operand_plan.branch.routes:
            converted: PerSampleGrad | None = grad
            if route.changing == ("T",) and isinstance(grad, FactoredGrad):  # without edges, which take microseconds
                converted = grad.transpose()
            elif route.changing != ():
                entry = self.graph.edge(operand_plan.branch.entry)
                leaf = Edge(self.graph.nodes[operand_plan.branch.leaves[route.number]], 0)
                indices = self._indices(operand_plan) if route.looks_up else None
                key = (operand_plan.branch.entry, route.number)
                converted = carry(grad, route.changing, entry, leaf, indices, self.plan.orders, key)
            if converted is None:
                pullback = self._pullback(operand_plan, grad) if pullback is None else pullback
                converted = pullback.grad(route.number)
            if not self._add_use(route.name, converted):
                referring.append(converted)
        return referring

    def _add_use(self, name: str, grad: PerSampleGrad) -> bool:
        """Add one use of a parameter; True if it was copied into rows, so that it need not stay unchanged."""
        is_copied = False
        if self.plan.uses[name] > 1:
            self._settle_terms(grad)
            uses = self._uses.setdefault(name, [])
            uses.append(grad)
            if len(uses) < self.plan.uses[name]:
                return False
            grad = combine(self._uses.pop(name), name, self.plan.shared)
        if self.keep and isinstance(grad, (FactoredGrad, StackedGrad)):
            grad = grad.compact()
            is_copied = isinstance(grad, DenseGrad)
        if isinstance(grad, DenseGrad):
            if grad.terms is not None:
                grad.settle_terms(self.graph.tracks_terms)
            if self._packs and len(grad.parts) == 1 and grad.parts[0].numel() <= SMALL:
                self._small[name] = DenseGrad(grad.parts[0].clone()) if self._copies and not is_copied else grad
                return True
        self._finish(name, grad)
        return is_copied

    def _settle_terms(self, grad: PerSampleGrad) -> None:
        if isinstance(grad, DenseGrad) and grad.terms is not None:
            grad.settle_terms(self.graph.tracks_terms)

    def _finish(self, name: str, grad: PerSampleGrad) -> None:
        if self.keep:
            self.grads[name] = grad
        elif isinstance(grad, DenseGrad) and self._is_small(grad):
            self.rows[name] = grad
        self.results[name] = self.quantity(grad, name)

    def _is_small(self, grad: DenseGrad) -> bool:
        """True for rows of their own with few elements compared with the gradient that they were computed from."""
        elements = sum(gradient.numel() for gradient in self._gradients.values())
        return grad.samples * grad.width <= FEW_ROWS * elements and grad.is_apart_from(self._gradients.values())

    def _check_linear(self, grad: GenericGrad | Pullback, name: str) -> None:
        """Note that the backward of a Python Function is not linear. ATen operations are derivatives, so they are."""
        if is_traced(self.graph.losses):
            return
        weights = torch.rand(self.graph.samples, generator=_generator, dtype=torch.float64)
        with torch.no_grad():
            if not grad.is_linear(self.graph, weights.mul(2).sub(1).to(self.graph.losses)):
                self.not_linear = name

    def finish(self) -> None:
        """Pack small representations, and compute the quantity of each. To be called after the pass."""
        small = self._small
        large = self.grads
        self.grads = {}
        for name, grad in pack_rows({name: small[name] for name in self.graph.wanted if name in small}).items():
            self._finish(name, grad)
        self.grads.update(large)  # small ones come first: every bucket of an all-reduce waits for some of them

    def _zeros(self, operand_plan: OperandPlan) -> PerSampleGrad:
        entry = self.graph.edge(operand_plan.branch.entry)
        device = self.graph.losses.device
        return DenseGrad(torch.zeros(self.graph.samples, *entry.shape, dtype=entry.dtype, device=device))

    def _pullback(self, operand_plan: OperandPlan, grad: PerSampleGrad) -> Pullback:
        leaves = [Edge(self.graph.nodes[leaf], 0) for leaf in operand_plan.branch.leaves]
        entry = operand_plan.branch.entry
        verdicts: Verdicts | None = None
        closed: Mapping[int, PerSampleGrad] = {}
        if self._pulls_back_in_batches(operand_plan, leaves):
            verdicts = self._verdicts
            self._settle_terms(grad)
            grad, entry, closed = lower(grad, entry, operand_plan.descent, self.graph, self._reader.take)
        pullback = Pullback(grad, self.graph.edge(entry), entry, leaves, self.differentiable, verdicts, closed)
        if operand_plan.branch.function is not None:
            self._check_linear(pullback, operand_plan.branch.function)
        return pullback

    def _pulls_back_in_batches(self, operand_plan: OperandPlan, leaves: Iterable[Edge]) -> bool:
        """False if a hook or Python Function, which may store gradients, would get the tensors of torch.vmap."""
        if (
            self.graph.sharded
            or may_have_hooks(self.graph)
            or any(leaf.node.variable._backward_hooks for leaf in leaves)
        ):
            return False
        functions = self.graph.structure.functions if operand_plan.branch.function is not None else ()
        return all(supports_batches(self.graph.nodes[at]) for at in functions)

    def _indices(self, operand_plan: OperandPlan) -> Callable[[], Tensor]:
        def read() -> Tensor:
            indices: Tensor = self._reader.take(self.graph.nodes[operand_plan.branch.entry[0]])["indices"]
            self.versions.record([indices])
            return indices

        return read
