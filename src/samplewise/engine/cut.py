"""Where gradients stop belonging to single samples on their way from the losses to the parameters.

A node is *clean* when every element of its output's gradient belongs to one sample at most. The *cut* is the set of
operands through which clean nodes hand their gradient on to a parameter or to a node that is not clean; the nodes
between cut and parameters are the parameter side: transposes, casts, weight norms, position embeddings.
Jacobian rows are exact in every case. But if sample data enter the parameter side, samples interact: refused by default.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from samplewise.engine.graph import Edge, Graph, Node, scalar
from samplewise.engine.layouts import proofs
from samplewise.engine.probe import MIXED, probe
from samplewise.engine.saved import Reader, saved_tensor_names
from samplewise.engine.tags import Regular, Tag, tag_of
from samplewise.errors import SamplesInteractError, SamplesMayInteractWarning

BATCH_NORMS = {"NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm"}


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
        _refuse_batch_norm(graph)
    cut = _proven_cut(graph, constants)
    if cut is None:
        cut = _Search(graph).run()
        data = list(_sample_data(graph, cut, constants))
        if not data:
            _remember(graph, cut)
        elif interacting == "refuse":
            _refuse_sample_data(graph, cut, data)
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
    doubt = any(True for _ in _sample_data(graph, cut, constants))
    return None if doubt or not _confirmed(graph, cut) else cut


def _edges(graph: Graph, operands: Iterable[tuple[Node, int]]) -> list[Edge]:
    nodes = dict.fromkeys(node for node, _ in operands)
    return [Edge(node, slot) for node in nodes for slot in graph.used_slots(node)]


def _confirmed(graph: Graph, cut: Cut) -> bool:
    """The first time a graph of this wiring is seen, autograd is asked whether the proof holds."""
    key = graph.fingerprint()
    if key not in _verified:
        edges = list(cut.tags)
        probed = probe(graph, edges)
        for edge, gradient, owner in zip(edges, *probed, strict=True):
            tag = cut.tags[edge]
            assert isinstance(tag, Regular)
            if not _agrees(tag, owner):
                return False
            cut.gradients[edge] = gradient
        _verified.add(key)
    return True


def _agrees(tag: Regular, owner: Tensor) -> bool:
    places = owner.new_ones(owner.numel()).cumsum(0) - 1
    flat = owner.reshape(-1)
    return bool(((places // tag.inner % tag.samples == flat) | ((flat < 0) & (flat != MIXED))).all())


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


# --- samples that interact -----------------------------------------------------------------------------------------


def _refuse_batch_norm(graph: Graph) -> None:
    for node in graph.nodes:
        if graph.operations[node] in BATCH_NORMS and scalar(node, "training") and Edge(node, 0).shape[0] > 1:
            raise SamplesInteractError(
                f"the loss of a sample must not depend on other samples; found {graph.operations[node]} in training mode"
                f"{_whereabouts(graph, node)}, which normalises with the statistics of the whole batch. "
                "Put BatchNorm layers in eval mode, use GroupNorm, or pass interacting='allow' for the Jacobian rows as they are."
            )


def _refuse_sample_data(graph: Graph, cut: Cut, data: list[tuple[Node, Tensor]]) -> None:
    for node, what in data:
        mixing = _mixing_node(graph, cut, node)
        found = f"{graph.operations[mixing]}{_whereabouts(graph, mixing)} mixes samples"
        if what.is_floating_point() or what.is_complex():
            raise SamplesInteractError(
                f"the loss of a sample must not depend on other samples; found that {found}, "
                f"and that sample data of shape {tuple(what.shape)} enter below it ({graph.operations[node]}{_whereabouts(graph, node)}). "
                "Remove what combines samples (a batch mean, in-batch negatives), or pass interacting='allow' for the Jacobian rows as they are."
            )
        warnings.warn(
            f"{found}, and integers of shape {tuple(what.shape)} enter below it: samples interact if these are sample data. "
            "They do not if these are positions or the like. sw.check settles it.",
            SamplesMayInteractWarning,
            stacklevel=6,
        )


def _sample_data(graph: Graph, cut: Cut, constants: set[int]) -> Iterable[tuple[Node, Tensor]]:
    """Operands below the cut that no gradient reaches, that are no constants of the model, and have a row per sample."""
    below = [node for node in graph.below(cut.side) if saved_tensor_names(node)] if cut.side else []
    names = {node: tuple(n for n in saved_tensor_names(node) if not n.startswith("result")) for node in below}
    reader = Reader(names.items())
    for node in below:
        # Where every operand has a gradient, what was saved without one was computed from those operands.
        open_ended = any(child is None for child, _ in node.next_functions)
        for value in reader.take(node).values():
            for tensor in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(tensor, Tensor) and (open_ended or not tensor.is_floating_point()):
                    if _may_be_data(tensor, graph.samples, constants):
                        yield node, tensor
    for node in graph.below(cut.side):
        variable = getattr(node, "variable", None)
        if (
            variable is not None
            and node not in graph.leaves
            and _may_be_data(variable.detach(), graph.samples, constants)
        ):
            yield node, variable


def _may_be_data(tensor: Tensor, samples: int, constants: set[int]) -> bool:
    if tensor.requires_grad or tensor.dtype is torch.bool or tensor.dim() == 0:
        return False
    if tensor.untyped_storage().data_ptr() in constants:
        return False
    # A slice of sample data betrays itself by what it was cut from.
    return any(samples in (t.shape[:-1] if t.dim() > 1 else t.shape) for t in (tensor, tensor._base) if t is not None)


def _mixing_node(graph: Graph, cut: Cut, data: Node) -> Node:
    """The highest operation that combines samples: a reduction just below the cut, or else the cut's own operation."""
    reductions = {
        "Mean",
        "Sum",
        "Var",
        "Std",
        "Cumsum",
        "Softmax",
        "LogSoftmax",
        "Amax",
        "Max",
        "Norm",
        "LinalgVectorNorm",
    } | BATCH_NORMS
    for node, position in cut.operands:
        child = node.next_functions[position][0]
        if child in cut.side and data in graph.below([child]):
            return child if graph.operations[child] in reductions else node
    return data


def _whereabouts(graph: Graph, node: Node) -> str:
    """Autograd does not know modules: the nearest parameters tell where in the model an operation stands."""
    own = [graph.leaves[child] for child, _ in node.next_functions if child in graph.leaves]
    if own:
        return f" (module {own[0].rpartition('.')[0]!r})"
    named = [name for leaf, name in graph.leaves.items() if leaf in set(graph.below([node]))]
    return f" (downstream of parameter {named[0]!r})" if named else ""
