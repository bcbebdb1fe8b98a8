"""Where gradients stop belonging to single samples on their way from the losses to the parameters.

A node is *clean* when every element of its output's gradient belongs to one sample at most. The *cut* is the set of
operands through which clean nodes hand their gradient on to a parameter or to a node that is not clean; the nodes
between cut and parameters are the parameter side: transposes, casts, weight norms, position embeddings.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from samplewise.engine.graph import Edge, Graph, Node
from samplewise.engine.interaction import refuse_batch_norm, refuse_sample_data, sample_data
from samplewise.engine.layouts import proofs
from samplewise.engine.passes import backward_past
from samplewise.engine.probe import MIXED, probe
from samplewise.engine.saved import saved_tensor_names
from samplewise.engine.tags import Regular, Tag, sequences_of, tag_of


@dataclass
class Cut:
    operands: list[tuple[Node, int]]  # clean node, position of the operand
    side: set[Node]  # the parameter side, parameters not included
    tags: dict[Edge, Tag]  # of the clean nodes' outputs
    gradients: dict[Edge, Tensor]  # what a probe has already brought to light, for losses.sum()
    proven: bool


def find_cut(graph: Graph, constants: set[int], interacting: str) -> Cut:
    """`constants` are the storages of parameters and buffers: operands that live there are no sample data."""
    if interacting == "refuse":
        refuse_batch_norm(graph)
    cut = _proven_cut(graph, constants)
    if cut is None:
        cut = _Search(graph).run()
        data = list(sample_data(graph, cut.side | _along_samples(graph, cut.tags), constants))
        if not data:
            _remember(graph, cut)
        elif interacting == "refuse":
            refuse_sample_data(graph, cut.operands, cut.side, data)
    return cut


def _boundary(graph: Graph, clean: Iterable[Node]) -> list[tuple[Node, int]]:
    clean = set(clean)
    outside = graph.relevant - clean | set(graph.leaves)
    return [
        (node, position)
        for node in graph.nodes
        if node in clean and node not in graph.leaves
        for position, (child, _) in enumerate(node.next_functions)
        if child in outside
    ]


def _along_samples(graph: Graph, tags: dict[Edge, Tag]) -> set[Node]:
    """Fused recurrent layers in which a sequence serves several samples: what one step has seen, the next one knows.
    The gradient that arrives there is clean; that the layer mixes samples happens inside the kernel."""
    return {
        edge.node
        for edge, tag in tags.items()
        if graph.operations[edge.node] == "MkldnnRnnLayer" and edge.slot == 0
        if graph.samples > 1 and sequences_of(tag, edge.shape) is None
    }


# --- by proof ------------------------------------------------------------------------------------------------------

_verified: set[int] = set()


def _proven_cut(graph: Graph, constants: set[int]) -> Cut | None:
    """None where the proof does not reach far enough, or leaves a doubt that only a probe can settle."""
    proven = proofs(graph)
    clean = [n for n in graph.nodes if n in graph.relevant and all(Edge(n, s) in proven for s in graph.used_slots(n))]
    if graph.root.node not in clean:
        return None
    operands = _boundary(graph, clean)
    side = graph.relevant - set(clean) - set(graph.leaves)
    tags: dict[Edge, Tag] = {e: Regular(graph.samples, proven[e]) for e in _edges(graph, operands)}
    cut = Cut(operands, side, tags, {}, proven=True)
    doubtful = any(True for _ in sample_data(graph, side | _along_samples(graph, tags), constants))
    return None if doubtful or not _confirmed(graph, cut) else cut


def _edges(graph: Graph, operands: Iterable[tuple[Node, int]]) -> list[Edge]:
    nodes = dict.fromkeys(node for node, _ in operands)
    return [Edge(node, slot) for node in nodes for slot in graph.used_slots(node)]


def _confirmed(graph: Graph, cut: Cut) -> bool:
    """The first time a graph of this wiring is seen, autograd is asked whether the proof holds.

    If the blocks of a gradient belong to the samples as proven, weighting the losses by powers of two multiplies the
    sum of each block by just that power. Sums are all that is kept of either pass.
    """
    key = graph.fingerprint()
    if key not in _verified:
        exponents = torch.randint(0, 7, (graph.samples,), generator=torch.Generator().manual_seed(graph.samples))
        powers = torch.tensor([2.0**k for k in exponents.tolist()], dtype=torch.float64, device=graph.losses.device)
        plain = _block_sums(graph, cut, torch.ones_like(graph.losses))
        coded = _block_sums(graph, cut, powers.to(graph.losses.dtype))
        if not all(_scales(plain[edge], coded[edge], powers) for edge in plain):
            return False
        _verified.add(key)
    return True


def _block_sums(graph: Graph, cut: Cut, weights: Tensor) -> dict[Edge, Tensor]:
    """For every output of the cut: the sum over each sample's part of its gradient, (b,)."""
    sums: dict[Edge, Tensor] = {}

    def arrived(node: Node, gradients: dict[int, Tensor]) -> None:
        for slot, gradient in gradients.items():
            tag = cut.tags[Edge(node, slot)]
            assert isinstance(tag, Regular)
            parts = torch.view_as_real(gradient).flatten(-2) if gradient.is_complex() else gradient
            inner = tag.inner * (2 if gradient.is_complex() else 1)
            blocks = parts.detach().reshape(-1, graph.samples, inner)
            sums[Edge(node, slot)] = blocks.sum((0, 2), dtype=torch.float64)

    backward_past(graph, {node: None for node, _ in cut.operands}, arrived, weights)
    return sums


def _scales(plain: Tensor, coded: Tensor, powers: Tensor) -> bool:
    """Summed in float64, an exact multiple stays one to the last digits; what is not finite is told of elsewhere."""
    finite = plain.isfinite() & coded.isfinite()
    return bool(torch.isclose(coded, plain * powers, rtol=1e-6, atol=1e-30)[finite].all())


# --- by probe ------------------------------------------------------------------------------------------------------


# For graphs probed before, by wiring: which nodes were found mixed. Treating them so again is always exact.
_seen_mixed: dict[int, frozenset[int]] = {}


def _remember(graph: Graph, cut: Cut) -> None:
    _seen_mixed[graph.fingerprint()] = frozenset(i for i, node in enumerate(graph.nodes) if node in cut.side)


@dataclass
class _Search:
    """Climbs from the parameters toward the losses until every path has met a clean node."""

    graph: Graph
    clean: set[Node] = field(default_factory=set)
    mixed: set[Node] = field(default_factory=set)
    tags: dict[Edge, Tag] = field(default_factory=dict)
    gradients: dict[Edge, Tensor] = field(default_factory=dict)
    first_time: bool = True

    def run(self) -> Cut:
        wiring = self.graph.fingerprint()
        self.first_time = wiring not in _seen_mixed
        self.mixed.update(self.graph.nodes[i] for i in _seen_mixed.get(wiring, ()))
        reach = 1
        while True:
            open_questions = self._undecided()
            if open_questions:
                self._ask(self._with_ancestors(open_questions, reach))
                reach *= 4
            elif not self._spread_mixing():
                break
        operands = [(n, p) for n, p in _boundary(self.graph, self.clean) if self._leads_outside(n, p)]
        tags = {e: self.tags[e] for e in _edges(self.graph, operands)}
        gradients = {e: g for e, g in self.gradients.items() if e in tags}
        return Cut(operands, self.mixed, tags, gradients, proven=False)

    def _leads_outside(self, node: Node, position: int) -> bool:
        child = node.next_functions[position][0]
        return child in self.mixed or child in self.graph.leaves

    def _undecided(self) -> list[Node]:
        """Nodes met by climbing from the parameters through mixed ones of which nothing is known yet."""
        seen, stack, undecided = set(self.graph.leaves), list(self.graph.leaves), []
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
        """Some levels more, so that long parameter sides take few passes. A lone operand is always passed through."""
        found, level = dict.fromkeys(nodes), nodes
        for _ in range(1000):
            passing = [n for n in level if reach > 1 or _is_plain(n)]
            level = [c for n in passing for c, _ in self.graph.consumers[n] if c not in found and c not in self.clean]
            found.update(dict.fromkeys(level))
            reach -= 1
            if not level:
                break
        return list(found)

    def _ask(self, nodes: list[Node]) -> None:
        edges = [Edge(node, slot) for node in nodes for slot in self.graph.used_slots(node)]
        probed = probe(self.graph, edges, thorough=self.first_time)
        self.clean.update(nodes)
        for edge, gradient, owner in zip(edges, *probed, strict=True):
            self.gradients[edge] = gradient
            if (owner == MIXED).any():
                self.mixed.add(edge.node)
            else:
                self.tags[edge] = tag_of(owner, self.graph.samples)
        self.clean -= self.mixed

    def _spread_mixing(self) -> bool:
        """Below a mixed node all is parameter side: what goes through it there must not be counted twice."""
        below = set(self.graph.below(self.mixed)) & self.graph.relevant - set(self.graph.leaves)
        grown = bool(below - self.mixed)
        self.mixed |= below
        self.clean -= below
        return grown


def _is_plain(node: Node) -> bool:
    return len(node.next_functions) == 1 and not saved_tensor_names(node)
