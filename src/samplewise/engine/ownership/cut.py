"""The cut: the last place in the backward pass where each gradient element belongs to a single sample.

A node is *clean* if every element of its output's gradient belongs to at most one sample. The *cut* is the set of
operands through which clean nodes pass their gradient to a parameter or to a node that is not clean. The nodes between
the cut and the parameters are the *parameter side*: transposes, casts, weight norms, position embeddings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from torch import Tensor

from samplewise.engine.deferred_checks import is_traced
from samplewise.engine.graph.graph import Edge, EdgeKey, Graph, Node
from samplewise.engine.graph.structure import once
from samplewise.engine.ownership.independence import (
    Constants,
    data_entries,
    may_refuse,
    refuse_sample_data,
    sample_data,
)
from samplewise.engine.ownership.local_probe import Claim
from samplewise.engine.ownership.owner_map import OwnerMap, owner_map_of, sequences_of
from samplewise.engine.ownership.ownership import is_plain, owners, views_of_leaves
from samplewise.engine.ownership.probe import MIXED, probe
from samplewise.engine.ownership.verify import verify
from samplewise.engine.ownership.weighted_passes import NotLinearError, check_linear
from samplewise.errors import GraphError, NonFiniteGradientError


class Cause(NamedTuple):
    """Why ownership could not be derived node by node."""

    text: str
    node: Node | None = None  # the operation that is the reason


@dataclass
class Cut:
    """Operands at the cut, with the sample ownership of the gradients that arrive there."""

    operands: list[tuple[Node, int]]  # clean node, position of the operand
    side: set[Node]  # the parameter side, without the parameters themselves
    owner_maps: dict[Edge, OwnerMap]  # ownership of the clean nodes' output gradients
    gradients: dict[Edge, Tensor]  # gradients of losses.sum() that a probe has already computed
    pending: set[Edge]  # edges whose proof is not verified yet, because their gradients were zero (see `verify`)
    proven: bool  # True: ownership derived node by node; False: probed by passes through the whole graph
    data_entries: list[int]  # positions of the nodes through which sample data may enter below the cut
    owners: dict[EdgeKey, OwnerMap] = field(default_factory=dict)  # of all derived ownership, also above the cut
    # What derived ownership depends on, see `Ownership`.
    claims: list[Claim] = field(default_factory=list)
    functions: list[Claim] = field(default_factory=list)
    by_data: bool = False
    recomputed: list[int] = field(default_factory=list)
    derivation: int = 0
    cause: Cause | None = None  # why the whole graph was probed


def find_cut(graph: Graph, constants: Constants, interacting: str) -> Cut:
    """Return the cut from ownership derived node by node, or from a probe of the whole graph if that does not suffice.

    `constants` are the parameters and buffers of the model. With interacting="refuse", raise SamplesInteractError if
    the loss of a sample depends on other samples.
    """
    cut = _proven_cut(graph, constants, interacting)
    if isinstance(cut, Cut):
        return cut
    probed = probed_cut(graph, constants, interacting)
    probed.cause = cut
    return probed


def probed_cut(graph: Graph, constants: Constants, interacting: str) -> Cut:
    """Return the cut found with backward passes through the whole graph alone."""
    if is_traced(graph.losses):
        raise GraphError(
            "shapes must show which sample each gradient element belongs to before an update can be compiled; found "
            "that it depends on data (indexing, routing, or samples that interact). Train uncompiled."
        )
    search = _Search(graph)
    cut = search.run()
    data = list(sample_data(graph, cut.data_entries, constants))
    if not data:
        return cut
    check_linear(graph, list(search.gradients), list(search.gradients.values()))  # a shift of gradients mixes samples
    if interacting == "refuse":
        refuse_sample_data(graph, cut.operands, cut.side, data)
    return cut


class Boundary(NamedTuple):
    """The cut below some clean nodes, for all graphs of a structure. Nodes are positions."""

    operands: list[tuple[int, int]]  # clean node, position of the operand
    edges: list[EdgeKey]  # outputs of these nodes
    side: list[int]
    entries: list[int]  # see `Cut.data_entries`

    @classmethod
    def of(cls, graph: Graph, clean: Iterable[int]) -> Boundary:
        nodes = {graph.nodes[at] for at in clean}
        operands = _boundary(graph, nodes)
        side = graph.relevant - nodes - set(graph.leaves)
        return cls(
            [(graph.index[node], position) for node, position in operands],
            [graph.key(edge) for edge in _edges(graph, operands)],
            [graph.index[node] for node in side],
            data_entries(graph, side),
        )


def _boundary(graph: Graph, clean: Iterable[Node]) -> list[tuple[Node, int]]:
    """Operands (node, position) of clean nodes that are parameters or outputs of nodes that are not clean."""
    clean = set(clean)
    outside = graph.relevant - clean | set(graph.leaves)
    operands = []
    for node in graph.nodes:
        if node in clean and node not in graph.leaves:
            for position, (child, _) in enumerate(graph.children[node]):
                if child in outside:
                    operands.append((node, position))
    return operands


def _along_samples(graph: Graph, owner_maps: Mapping[Edge, OwnerMap]) -> set[Node]:
    """Fused recurrent layers in which one sequence contains several samples, so a state depends on earlier samples.

    The gradient that arrives at such a layer is clean; the samples are mixed inside the kernel.
    """
    layers = set()
    for edge, owner_map in owner_maps.items():
        is_sequence = graph.operations[edge.node] == "MkldnnRnnLayer" and edge.slot == 0
        if is_sequence and graph.samples > 1 and sequences_of(owner_map, edge.shape) is None:
            layers.add(edge.node)
    return layers


# --- node by node --------------------------------------------------------------------------------------------------


def _proven_cut(graph: Graph, constants: Constants, interacting: str) -> Cut | Cause:
    """Return the cut from derived ownership; or the reason, if it is incomplete, fails verification or sample data
    enter below the cut: samples interact then, or the ownership derived is too coarse.
    """
    try:
        # A probe is a backward pass, which gathers the parameters of a sharded model.
        ownership = owners(graph, probes=not (graph.sharded or is_traced(graph.losses)))
    except NonFiniteGradientError:
        return Cause("gradients of an operation are not finite for other losses")
    except NotLinearError as error:
        return Cause(f"the backward of {error.operation} is not linear")
    reach = graph.reach
    clean = tuple([at for at in reach.nodes if all((at, slot) in ownership.owner_maps for slot in reach.slots[at])])
    if clean[:1] != (0,):
        return Cause(f"{graph.operations[graph.root.node]}, which computes the losses, mixes samples", graph.root.node)
    boundary = once(graph.structure.results, (Boundary, clean), partial(Boundary.of, graph, clean))
    operands = [(graph.nodes[at], position) for at, position in boundary.operands]
    side = {graph.nodes[at] for at in boundary.side}
    owner_maps = {graph.edge(key): ownership.owner_maps[key] for key in boundary.edges}
    layers = _along_samples(graph, owner_maps)
    entries = data_entries(graph, side | layers) if layers else boundary.entries
    # With "allow" only the rows of the Jacobian count, which are the same whether samples interact or not.
    asks = interacting == "refuse" or is_traced(graph.losses)
    data = list(sample_data(graph, entries, constants)) if asks else []
    if data and (may_refuse(data) or is_traced(graph.losses)):
        mixing = data[0][0]
        return Cause(f"{graph.operations[mixing]} combines sample data with gradients of several samples", mixing)
    pending = verify(graph, owner_maps, ownership.derivation)
    if pending is None:
        return Cause("ownership derived from shapes does not hold in a backward pass")
    if data and set(probed_cut(graph, constants, interacting).operands) != set(operands):  # which warns of integers
        return Cause(f"{graph.operations[data[0][0]]} may combine sample data with gradients of several samples")
    return Cut(
        operands,
        side,
        owner_maps,
        {},
        pending,
        True,
        entries,
        owners=ownership.owner_maps,
        claims=ownership.claims,
        functions=ownership.functions,
        by_data=ownership.by_data,
        recomputed=ownership.recomputed,
        derivation=ownership.derivation,
    )


def _edges(graph: Graph, operands: Iterable[tuple[Node, int]]) -> list[Edge]:
    nodes = dict.fromkeys(node for node, _ in operands)
    return [Edge(node, slot) for node in nodes for slot in graph.used_slots(node)]


# --- by probe ------------------------------------------------------------------------------------------------------


# Nodes that the last search in a graph of the same structure has probed, by hash of the structure: the next search
# probes them together. Only the number of passes depends on it: a search in another process finds the same cut.
_probed_before: dict[int, list[int]] = {}


@dataclass
class _Search:
    """Search for the cut by probing nodes from the parameters toward the losses until each path has a clean node."""

    graph: Graph
    clean: set[Node] = field(default_factory=set)
    mixed: set[Node] = field(default_factory=set)
    owner_maps: dict[Edge, OwnerMap] = field(default_factory=dict)
    gradients: dict[Edge, Tensor] = field(default_factory=dict)
    owners: dict[Edge, Tensor] = field(default_factory=dict)  # of probed edges, also of those not needed so far

    def run(self) -> Cut:
        self.mixed.update(self.graph.nodes[at] for at in views_of_leaves(self.graph))
        reach = 1
        while True:
            undecided = self._undecided()
            if undecided:
                self._probe(self._with_ancestors(undecided, reach))
                reach *= 4  # so that the number of probes grows with the logarithm of the longest parameter side
            elif not self._spread_mixing():
                break
        decided = self.clean | self.mixed
        _probed_before[self.graph.structure.hash] = [
            at for at, node in enumerate(self.graph.nodes) if node in decided and self._edges(node)[0] in self.owners
        ]
        outside = self.mixed | set(self.graph.leaves)
        operands = [(n, p) for n, p in _boundary(self.graph, self.clean) if self.graph.children[n][p][0] in outside]
        owner_maps = {e: self.owner_maps[e] for e in _edges(self.graph, operands)}
        gradients = {e: g for e, g in self.gradients.items() if e in owner_maps}
        entries = data_entries(self.graph, self.mixed | _along_samples(self.graph, owner_maps))
        return Cut(operands, self.mixed, owner_maps, gradients, set(), False, entries)

    def _edges(self, node: Node) -> list[Edge]:
        return [Edge(node, slot) for slot in self.graph.used_slots(node)]

    def _undecided(self) -> list[Node]:
        """Nodes not probed yet that are reached from the parameters through mixed nodes only."""
        visited = set(self.graph.leaves)
        stack = list(self.graph.leaves)
        undecided = []
        while stack:
            for consumer, _ in self.graph.consumers[stack.pop()]:
                if consumer in visited:
                    continue
                visited.add(consumer)
                if consumer in self.mixed:
                    stack.append(consumer)
                elif consumer not in self.clean:
                    undecided.append(consumer)
        return undecided

    def _with_ancestors(self, nodes: list[Node], reach: int) -> list[Node]:
        """Add `reach` - 1 levels of consumers to `nodes`, so that a long parameter side needs few probes.

        Above these levels, the consumers of nodes with one operand and no saved tensors are added, too.
        """
        selected = dict.fromkeys(nodes)
        level = nodes
        for _ in range(1000):
            passing = [n for n in level if reach > 1 or is_plain(self.graph, n)]
            above = [consumer for node in passing for consumer, _ in self.graph.consumers[node]]
            level = [node for node in above if node not in selected and node not in self.clean]
            selected.update(dict.fromkeys(level))
            reach -= 1
            if not level:
                break
        return list(selected)

    def _probe(self, nodes: list[Node]) -> None:
        edges_of_nodes = [edge for node in nodes for edge in self._edges(node)]
        if any(edge not in self.owners for edge in edges_of_nodes):
            before = () if self.owners else _probed_before.get(self.graph.structure.hash, ())
            edges = dict.fromkeys(
                [*edges_of_nodes, *(edge for at in before for edge in self._edges(self.graph.nodes[at]))]
            )
            probed = probe(self.graph, list(edges))
            self.gradients.update(zip(edges, probed.gradients, strict=True))
            self.owners.update(zip(edges, probed.owners, strict=True))
        self.clean.update(nodes)
        for edge in edges_of_nodes:
            if (self.owners[edge] == MIXED).any():
                self.mixed.add(edge.node)
            else:
                self.owner_maps[edge] = owner_map_of(self.owners[edge], self.graph.samples)
        self.clean -= self.mixed

    def _spread_mixing(self) -> bool:
        """Mark all nodes below mixed nodes as mixed, so that no gradient is counted twice. True if any was added."""
        below = set(self.graph.below(self.mixed)) & self.graph.relevant - set(self.graph.leaves)
        grown = bool(below - self.mixed)
        self.mixed |= below
        self.clean -= below
        return grown
