"""Plan of a graph structure, and its application to one graph.

`make_plan` returns the plan: which nodes the backward pass stops at, which rule converts the gradient of each operand,
and which operations lie between the operand and the parameter. Plans refer to nodes by position and hold no tensors, so
graphs of the same structure and shapes share a plan. `GradBuilder` applies a plan to a graph, during a backward pass.
`strategies` looks plans up, and verifies for each graph what may differ between graphs of one structure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from samplewise.engine.backward import OperandGradients, Stops, stops_at
from samplewise.engine.deferred_checks import is_traced
from samplewise.engine.generic import GenericGrad, Pullback, Verdicts, supports_batches
from samplewise.engine.grads.base import PerSampleGrad
from samplewise.engine.grads.dense import SMALL, DenseGrad, pack_rows
from samplewise.engine.grads.factored import FactoredGrad
from samplewise.engine.grads.indexed import VIEWS
from samplewise.engine.grads.stacked import StackedGrad
from samplewise.engine.graph.graph import Edge, EdgeKey, Graph, is_python_function, numel
from samplewise.engine.graph.hook_registry import may_have_hooks
from samplewise.engine.graph.saved import SavedTensorReader, Versions, block_of
from samplewise.engine.graph.structure import once
from samplewise.engine.ownership.cut import Cut
from samplewise.engine.ownership.local_probe import Claim
from samplewise.engine.ownership.owner_map import OwnerMap
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
from samplewise.engine.row_calls import RowCalls
from samplewise.engine.rules import OPERAND_RULES, RULES, OperandRule, Rule, Use
from samplewise.engine.rules.rule_input import Operand
from samplewise.engine.slow_paths import warn_if_slow
from samplewise.errors import GraphError
from samplewise.parallel.sharded_parameters import unsharded

Quantity = Callable[[PerSampleGrad, str], Any]

# Rows with at most this fraction of the elements of the gradient that they were computed from are kept in any case.
FEW_ROWS = 0.25
# Number of passes between two verifications of layers with frozen weights that need a pass with weights.
TURN = 16

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
    recomputed: list[int]  # nodes that the ownership depends on, to be verified by a pass with weights
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
    frozen: list[int] = field(default_factory=list)  # Python functions with frozen weights: quantized layers
    verified_passes: int = 0  # passes in which no claim about a function was refuted
    cause: str = "samples do not own the gradients as was derived"  # why the whole graph was probed, if it was

    # Layers with frozen weights do the same in each step, and a second call of each of them would take as long as a
    # backward pass: the first pass verifies all of them, and each later one another one.

    @property
    def functions_to_verify(self) -> list[Claim]:
        """Claims about Python functions that the next pass verifies."""
        if not self.frozen or not self.verified_passes:
            return self.functions
        turn = self.frozen[self.verified_passes % len(self.frozen)]
        return [claim for claim in self.functions if claim.node == turn or claim.node not in self.frozen]

    def are_due(self, nodes: list[int]) -> bool:
        """True if the next pass verifies these nodes by another pass, with weights."""
        return bool(nodes) and (self.verified_passes % TURN == 0 or not set(nodes) <= set(self.frozen))

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
    # Rules for the gradients of operands, of nodes whose saved tensors are read by other rules in any case.
    operand_rules = {at: OPERAND_RULES[name] for at, name in operations.items() if name in OPERAND_RULES}
    operand_rules = {at: rule for at, rule in operand_rules.items() if set(rule.reads) <= set(reads[at])}
    replaceable = [at for at in operands if at in operand_rules or is_python_function(graph.nodes[at])]
    return Plan(
        stops=stops_at(graph, [graph.nodes[at] for at in operands], [graph.nodes[at] for at in replaceable]),
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
    branches = []
    for at, position in operands:
        entry = Edge(*graph.children[graph.nodes[at]][position])
        paths = paths_to_leaves(graph, entry.node)
        routes = []
        for number, (leaf, chain) in enumerate(paths):
            operations = None if chain is None else [graph.operations[node] for node in chain]
            changing = None if operations is None else changing_operations(operations)
            routes.append(Route(graph.leaves[leaf], number, changing, looks_up=operations == ["Embedding"]))
        leaves = tuple(graph.index[leaf] for leaf, _ in paths)
        viewed = all(route.changing is not None and set(route.changing) <= VIEWS for route in routes)
        function = None
        if graph.structure.functions:
            nodes = [node for node in graph.below([entry.node]) if node in graph.relevant and is_python_function(node)]
            function = graph.operations[nodes[0]] if nodes else None
        branches.append(Branch(graph.key(entry), leaves, tuple(routes), viewed, function))
    missing = set(graph.leaves.values()) - {route.name for branch in branches for route in branch.routes}
    if missing:
        raise GraphError(
            "each parameter in the graph must be reached from the cut; found no route to "
            f"{', '.join(sorted(missing))}. This is a bug in samplewise: please report it with the model."
        )
    return branches


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
        self.results: dict[str, Any] = {}
        self.grads: dict[str, PerSampleGrad] = {}
        self.rows: dict[str, DenseGrad] = {}
        self._gradients: dict[int, Tensor] = {}  # of the last node that was added
        self._uses: dict[str, list[PerSampleGrad]] = {}  # of parameters with uses that are still to be added
        reads = {graph.nodes[at]: names for at, names in plan.reads.items()}
        self._packs = keep and not (differentiable or graph.sharded or is_traced(graph.losses))
        # A hook or Python function may change a gradient in place during the pass, before its rows are packed.
        self._copies = self._packs and in_place
        self._small: dict[str, DenseGrad] = {}  # to be packed after the pass
        # No batches in a sharded model: its hooks would get the tensors of torch.vmap.
        self._verdicts = None if graph.sharded else plan.verdicts
        self._of_rows: dict[int, dict[int, PerSampleGrad]] = {}  # of Python functions, by node and operand
        self._operands: dict[int, dict[int, Tensor]] = {}  # gradients of activations, by node and operand
        self.not_linear: str | None = None  # a Python Function whose backward is not linear
        self.versions = Versions()  # version counters of the tensors that representations refer to
        self._reader = SavedTensorReader(reads, shared=not graph.sharded)
        # It reads tensors of checkpointed blocks during a pass, so that the pass can use them, too.
        self.recomputes = self._reader.recomputes
        self.ordinary = False  # the pass computes the sums, too
        # The pass may use gradients of operands that are computed here, see `backward_past`.
        self._divides = len(plan.stops.segments) > 1 and not (differentiable or graph.sharded or self.recomputes)

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
        referring: list[PerSampleGrad] = []  # representations that may refer to the tensors of the operation
        for operand_plan in self.plan.operands[at]:
            # First the gradients of the operand: from a rule, or from the operation's own backward.
            grad: PerSampleGrad | None = None
            if gradients:
                use = Use(node, operand_plan.operand, gradients, saved)
            if not gradients or operand_plan.empty:
                entry = self.graph.edge(operand_plan.branch.entry)
                device = self.graph.losses.device
                grad = DenseGrad(torch.zeros(self.graph.samples, *entry.shape, dtype=entry.dtype, device=device))
            elif operand_plan.rule is not None and node not in self._reader.sparse:  # rules are for strided tensors
                rule = operand_plan.rule
                grad = rule.factors(use) if self.factors and rule.factors is not None else rule.grad(use)
            if grad is None:  # no rule, or one that does not support this use
                grad = self._convert_without_rule(use, at)
            # Then those of the parameters below it.
            pullback: Pullback | None = None
            for route in operand_plan.branch.routes:
                converted: PerSampleGrad | None = grad
                if route.changing == ("T",) and isinstance(grad, FactoredGrad):  # no edges, which take microseconds
                    converted = grad.transpose()
                elif route.changing != ():
                    converted = self._carry(operand_plan, route, grad)
                if converted is None:
                    pullback = self._pull_back(operand_plan, grad) if pullback is None else pullback
                    converted = pullback.grad(route.number)
                if not self._add_use(route.name, converted):
                    referring.append(converted)
        if self.keep and referring:
            # Rules use only the shape of weights, or read them at once, so the optimizer may change them afterwards.
            inputs = [tensor for name, tensor in saved.items() if not name.startswith("weight")]
            tensors = [*inputs, *gradients.values()]
            for grad in referring:
                if not (isinstance(grad, DenseGrad) and grad.is_apart_from(tensors)):
                    self.versions.record(tensors)
                    break
        if self._operands.get(at):
            return partial(self._operands.pop, at)
        of_operands = self.plan.operand_rules.get(at)
        return partial(of_operands.gradients, use) if of_operands is not None and gradients else None

    def _convert_without_rule(self, use: Use, at: int) -> PerSampleGrad:
        """Representation of an operand from calls of the operation's own backward."""
        generic = GenericGrad(use, self.differentiable, self._verdicts, (at, use.operand))
        grad = generic.broadcast()
        if grad is None and is_python_function(use.node):
            grad = self._row_grads(at, use).get(use.operand)
        if grad is not None:
            return grad
        if is_python_function(use.node):
            self._check_linear(generic, self.plan.operations[at])
            if not supports_batches(use.node):
                warn_if_slow(
                    self.graph,
                    f"{self.plan.operations[at]} has no rule, so that its backward is called once per sample",
                    f"{self.graph.samples} calls of it in each step",
                    "Set generate_vmap_rule = True in the Function if torch.vmap supports its backward.",
                )
        return generic

    def has_row_grads(self, at: int) -> bool:
        """True if the backward of a Python function was called with the rows of each sample, and treats them apart."""
        return bool(self._of_rows.get(at))

    def _row_grads(self, at: int, use: Use) -> dict[int, PerSampleGrad]:
        """Representations of the parameters of a Python function from calls with the rows of each sample, by position;
        none if this is not possible.
        """
        if at not in self._of_rows:
            self._of_rows[at] = {}
            apart = self._verdicts is not None and self.graph.samples > 1 and block_of(use.node) is None
            if apart and not (self.differentiable or is_traced(self.graph.losses)):
                assert self._verdicts is not None
                operands = {plan.operand.position: plan.operand for plan in self.plan.operands[at]}
                reached = [position for position, key in enumerate(self.graph.reach.operands[at]) if key is not None]
                activations = [position for position in reached if position not in operands]
                calls = RowCalls(
                    use.node, use.gradients, use.owner_maps, list(operands), activations, self._verdicts, at
                )
                whole = {
                    position: GenericGrad(
                        Use(use.node, operand, use.gradients, use.saved), False, self._verdicts, (at, position)
                    )
                    for position, operand in operands.items()
                }
                self._of_rows[at] = calls.grads(
                    whole, self.keep and not self.ordinary, self._divides and not self.ordinary
                )
                self._operands[at] = calls.operands
        return self._of_rows[at]

    def _carry(self, operand_plan: OperandPlan, route: Route, grad: PerSampleGrad) -> PerSampleGrad | None:
        """Convert the representation of an operand into that of a parameter; None if this needs a `Pullback`."""
        branch = operand_plan.branch

        def read_indices() -> Tensor:
            indices: Tensor = self._reader.take(self.graph.nodes[branch.entry[0]])["indices"]
            self.versions.record([indices])
            return indices

        return carry(
            grad,
            route.changing,
            self.graph.edge(branch.entry),
            Edge(self.graph.nodes[branch.leaves[route.number]], 0),
            read_indices if route.looks_up else None,
            self.plan.orders,
            (branch.entry, route.number),
        )

    def _pull_back(self, operand_plan: OperandPlan, grad: PerSampleGrad) -> Pullback:
        """Pull the representation of an operand back to all parameters below it with autograd."""
        branch = operand_plan.branch
        leaves = [Edge(self.graph.nodes[leaf], 0) for leaf in branch.leaves]
        entry = branch.entry
        verdicts: Verdicts | None = None
        closed: Mapping[int, PerSampleGrad] = {}
        # A hook or Python Function, which may store gradients, must not get the tensors of torch.vmap.
        hooked = (
            self.graph.sharded
            or may_have_hooks(self.graph)
            or any(leaf.node.variable._backward_hooks for leaf in leaves)
        )
        functions = self.graph.structure.functions if branch.function is not None else ()
        if not hooked and all(supports_batches(self.graph.nodes[at]) for at in functions):
            verdicts = self._verdicts
            self._settle_terms(grad)
            grad, entry, closed = lower(grad, entry, operand_plan.descent, self.graph, self._reader.take)
        pullback = Pullback(grad, self.graph.edge(entry), entry, leaves, self.differentiable, verdicts, closed)
        if branch.function is not None:
            self._check_linear(pullback, branch.function)
        return pullback

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
            is_copied = isinstance(grad.pairs if isinstance(grad, StackedGrad) else grad, DenseGrad)
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
        elif isinstance(grad, DenseGrad):
            elements = sum(gradient.numel() for gradient in self._gradients.values())
            if grad.samples * grad.width <= FEW_ROWS * elements and grad.is_apart_from(self._gradients.values()):
                self.rows[name] = grad  # not a view, which would keep the whole gradient in memory
        self.results[name] = self.quantity(grad, name)

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
