"""The cut: the last place in the backward pass where each gradient element belongs to a single sample.

A node is *clean* if every element of its output's gradient belongs to at most one sample. The *cut* is the set of
operands through which clean nodes pass their gradient to a parameter or to a node that is not clean. The nodes between
the cut and the parameters are the *parameter side*: transposes, casts, weight norms, position embeddings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from samplewise.engine.checks import is_traced
from samplewise.engine.graph import Edge, Graph, Node
from samplewise.engine.independence import (
    Constants,
    data_entries,
    refuse_sample_data,
    sample_data,
)
from samplewise.engine.layouts import proofs
from samplewise.engine.probe import MIXED, probe
from samplewise.engine.saved import saved_tensor_names
from samplewise.engine.tags import Regular, Tag, sequences_of, tag_of
from samplewise.engine.verify import verify
from samplewise.errors import GraphError


@dataclass
class Cut:
    """Operands at the cut, with the sample ownership (tag) of the gradients that arrive there."""

    operands: list[tuple[Node, int]]  # clean node, position of the operand
    side: set[Node]  # the parameter side, without the parameters themselves
    tags: dict[Edge, Tag]  # ownership of the clean nodes' output gradients
    gradients: dict[Edge, Tensor]  # gradients of losses.sum() that a probe has already computed
    pending: set[Edge]  # edges whose proof is not verified yet, because their gradients were zero (see `verify`)
    proven: bool  # True: ownership derived from shapes; False: probed
    data_entries: list[int]  # positions of the nodes through which sample data may enter below the cut


def find_cut(graph: Graph, constants: Constants, interacting: str) -> Cut:
    """Return the cut from shape proofs, or from a probe if the proofs do not suffice.

    `constants` are the parameters and buffers of the model. With interacting="refuse", raise SamplesInteractError if
    the loss of a sample depends on other samples.
    """
    return _proven_cut(graph, constants) or probed_cut(graph, constants, interacting)


def probed_cut(graph: Graph, constants: Constants, interacting: str) -> Cut:
    """Return the cut found with backward passes alone, without shape proofs."""
    if is_traced(graph.losses):
        raise GraphError(
            "shapes must show which sample each gradient element belongs to before an update can be compiled; found "
            "that it depends on data (indexing, routing, or samples that interact). Train uncompiled."
        )
    cut = _Search(graph).run()
    data = list(sample_data(graph, cut.data_entries, constants))
    if not data:
        _remember(graph, cut)
    elif interacting == "refuse":
        refuse_sample_data(graph, cut.operands, cut.side, data)
    return cut


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


def _along_samples(graph: Graph, tags: Mapping[Edge, Tag]) -> set[Node]:
    """Fused recurrent layers in which one sequence contains several samples, so a state depends on earlier samples.

    The gradient that arrives at such a layer is clean; the samples are mixed inside the kernel.
    """
    layers = set()
    for edge, tag in tags.items():
        is_sequence = graph.operations[edge.node] == "MkldnnRnnLayer" and edge.slot == 0
        if is_sequence and graph.samples > 1 and sequences_of(tag, edge.shape) is None:
            layers.add(edge.node)
    return layers


# --- by proof ------------------------------------------------------------------------------------------------------


def _proven_cut(graph: Graph, constants: Constants) -> Cut | None:
    """Return the cut from proofs; None if they are incomplete, fail verification or sample data enter below the cut."""
    proven = proofs(graph)
    clean = []
    for node in graph.nodes:
        if node in graph.relevant and all(Edge(node, slot) in proven for slot in graph.used_slots(node)):
            clean.append(node)
    if graph.root.node not in clean:
        return None
    operands = _boundary(graph, clean)
    side = graph.relevant - set(clean) - set(graph.leaves)
    tags = {e: Regular(graph.samples, proven[e]) for e in _edges(graph, operands)}
    entries = data_entries(graph, side | _along_samples(graph, tags))
    has_data = any(True for _ in sample_data(graph, entries, constants))
    pending = None if has_data else verify(graph, tags)
    return None if pending is None else Cut(operands, side, dict(tags), {}, pending, True, entries)


def _edges(graph: Graph, operands: Iterable[tuple[Node, int]]) -> list[Edge]:
    nodes = dict.fromkeys(node for node, _ in operands)
    return [Edge(node, slot) for node in nodes for slot in graph.used_slots(node)]


# --- by probe ------------------------------------------------------------------------------------------------------


# Nodes found mixed in earlier probes, by hash of the graph structure. Treating them as mixed again is always exact.
_seen_mixed: dict[int, frozenset[int]] = {}


def _remember(graph: Graph, cut: Cut) -> None:
    _seen_mixed[graph.structure.hash] = frozenset(i for i, node in enumerate(graph.nodes) if node in cut.side)


@dataclass
class _Search:
    """Search for the cut by probing nodes from the parameters toward the losses until each path has a clean node."""

    graph: Graph
    clean: set[Node] = field(default_factory=set)
    mixed: set[Node] = field(default_factory=set)
    tags: dict[Edge, Tag] = field(default_factory=dict)
    gradients: dict[Edge, Tensor] = field(default_factory=dict)

    def run(self) -> Cut:
        self.mixed.update(self.graph.nodes[i] for i in _seen_mixed.get(self.graph.structure.hash, ()))
        reach = 1
        while True:
            undecided = self._undecided()
            if undecided:
                self._probe(self._with_ancestors(undecided, reach))
                reach *= 4
            elif not self._spread_mixing():
                break
        operands = [(n, p) for n, p in _boundary(self.graph, self.clean) if self._leads_outside(n, p)]
        tags = {e: self.tags[e] for e in _edges(self.graph, operands)}
        gradients = {e: g for e, g in self.gradients.items() if e in tags}
        entries = data_entries(self.graph, self.mixed | _along_samples(self.graph, tags))
        return Cut(operands, self.mixed, tags, gradients, set(), False, entries)

    def _leads_outside(self, node: Node, position: int) -> bool:
        child = self.graph.children[node][position][0]
        return child in self.mixed or child in self.graph.leaves

    def _undecided(self) -> list[Node]:
        """Nodes not probed yet that are reached from the parameters through mixed nodes only."""
        seen = set(self.graph.leaves)
        stack = list(self.graph.leaves)
        undecided = []
        while stack:
            for consumer, _ in self.graph.consumers[stack.pop()]:
                if consumer in seen:
                    continue
                seen.add(consumer)
                if consumer in self.mixed:
                    stack.append(consumer)
                elif consumer not in self.clean:
                    undecided.append(consumer)
        return undecided

    def _with_ancestors(self, nodes: list[Node], reach: int) -> list[Node]:
        """Add `reach` - 1 levels of consumers to `nodes`, so that a long parameter side needs few probes.

        Above these levels, the consumers of nodes with one operand and no saved tensors are added, too.
        """
        chosen = dict.fromkeys(nodes)
        level = nodes
        for _ in range(1000):
            passing = [n for n in level if reach > 1 or self._is_plain(n)]
            above = [consumer for node in passing for consumer, _ in self.graph.consumers[node]]
            level = [node for node in above if node not in chosen and node not in self.clean]
            chosen.update(dict.fromkeys(level))
            reach -= 1
            if not level:
                break
        return list(chosen)

    def _probe(self, nodes: list[Node]) -> None:
        edges = [Edge(node, slot) for node in nodes for slot in self.graph.used_slots(node)]
        probed = probe(self.graph, edges)
        self.clean.update(nodes)
        for edge, gradient, owner in zip(edges, *probed, strict=True):
            self.gradients[edge] = gradient
            if (owner == MIXED).any():
                self.mixed.add(edge.node)
            else:
                self.tags[edge] = tag_of(owner, self.graph.samples)
        self.clean -= self.mixed

    def _spread_mixing(self) -> bool:
        """Mark all nodes below mixed nodes as mixed, so that no gradient is counted twice. True if any was added."""
        below = set(self.graph.below(self.mixed)) & self.graph.relevant - set(self.graph.leaves)
        grown = bool(below - self.mixed)
        self.mixed |= below
        self.clean -= below
        return grown

    def _is_plain(self, node: Node) -> bool:
        return len(self.graph.children[node]) == 1 and not saved_tensor_names(node)
