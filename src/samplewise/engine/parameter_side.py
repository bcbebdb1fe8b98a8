"""Parameter side: conversion of per-sample gradients from the cut to the parameter, and merging of several uses.

Autograd pulls gradients back through most operations (`generic.Pullback`). Through weight norm and the operations in
`LOWERED`, representations are converted, so that no rows are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from samplewise.engine.backward import pull_back
from samplewise.engine.deferred_checks import is_traced
from samplewise.engine.grads.bags import BagGrad
from samplewise.engine.grads.base import PerSampleGrad, SummedGrad, term_norms
from samplewise.engine.grads.dense import DenseGrad
from samplewise.engine.grads.factored import FactoredGrad, Term
from samplewise.engine.grads.indexed import VIEWS, as_blocks, reindex
from samplewise.engine.grads.reparametrized import exponential, normalize_grad, scale_grad
from samplewise.engine.grads.stacked import StackedGrad, join_stacks
from samplewise.engine.graph.graph import Edge, EdgeKey, Graph, Node, operation, scalar
from samplewise.engine.graph.saved import Saved, saved_tensor_names
from samplewise.engine.ownership import layouts
from samplewise.engine.rules.embedding import lookup_grad
from samplewise.engine.rules.rule_input import accumulable

UNCHANGED = {"ToCopy", "Alias", "Clone"}


def paths_to_leaves(graph: Graph, entry: Node) -> list[tuple[Node, tuple[Node, ...] | None]]:
    """Leaves below `entry` with the nodes on the path to each: () if `entry` is the leaf, None if not a single path."""
    chain: list[Node] = []
    node = entry
    while node not in graph.leaves:
        chain.append(node)
        children = [child for child, _ in graph.children[node] if child in graph.relevant]
        if len(children) != 1:
            return [(leaf, None) for leaf in graph.below([entry]) if leaf in graph.leaves]
        node = children[0]
    return [(node, tuple(chain))]


def changing_operations(operations: Sequence[str]) -> tuple[str, ...]:
    """The operations that change a gradient which passes through them."""
    return tuple(operation for operation in operations if operation not in UNCHANGED)


def carry(
    grad: PerSampleGrad,
    changing: tuple[str, ...] | None,
    entry: Edge,
    leaf: Edge,
    indices: Callable[[], Tensor] | None,
    orders: dict[object, str],
    key: object,
) -> PerSampleGrad | None:
    """Convert the representation of an operand into that of a leaf; None if this needs a `Pullback`.

    `changing` are the operations on the path to the leaf that change a gradient; None if it is not a single path.
    `indices` returns the indices of an embedding that is the only operation on the path; None if there is no such.
    `orders`, `key`: see `reindex`.
    """
    if changing is None:
        return None
    if changing == ("Transpose",) and isinstance(grad, StackedGrad) and operation(entry.node) == "Transpose":
        ndim = len(entry.shape)
        if {scalar(entry.node, "dim0") % ndim, scalar(entry.node, "dim1") % ndim} == {ndim - 2, ndim - 1}:
            return grad.transpose()
    if changing in SELECTIONS and isinstance(grad, FactoredGrad) and grad.matrix == grad.shape:
        matrix = _selected_matrix(entry, leaf)
        if matrix is not None:
            return StackedGrad(grad.transpose() if changing[0] == "T" else grad, [matrix], leaf.shape[0])
    if set(changing) <= VIEWS:
        return reindex(grad, entry, leaf, orders, key)
    if indices is not None and isinstance(grad, DenseGrad):
        # Position embeddings: they are looked up once and broadcast to all samples.
        index = indices()
        rows = grad.rows(0, grad.samples)
        gradient = rows.reshape(grad.samples, index.numel(), rows.shape[-1])
        return lookup_grad(entry.node, index, index.reshape(1, -1).expand(grad.samples, -1), gradient, leaf.shape)
    return None


# Paths to one matrix of a stack: weights[2] of experts.
SELECTIONS = (("Select",), ("T", "Select"), ("Unbind",), ("T", "Unbind"))


def _selected_matrix(entry: Edge, leaf: Edge) -> int | None:
    """Position of the matrix that was selected of a stack of matrices; None if another dimension was indexed."""
    node, slot = entry.node, entry.slot
    while operation(node) not in ("Select", "Unbind"):
        node, slot = node.next_functions[0]
    if len(leaf.shape) != 3 or scalar(node, "dim") % 3 != 0:
        return None
    matrix: int = slot if operation(node) == "Unbind" else scalar(node, "index")
    return matrix % leaf.shape[0]


# --- operations that keep representations ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One or several operations, from where the gradient of their output arrives to where that of an operand does. The
    other operands do not lead to parameters. Nodes are positions in the graph.
    """

    entry: EdgeKey
    operand: int  # position of the operand; of several operations, that of the first
    below: EdgeKey
    reads: tuple[str, ...]  # names of the saved tensors to read


class Lowering(NamedTuple):
    """Function that converts a representation of the output of a step to one of its operand, from the edges of both,
    the position of the operand and the saved tensors; None for representations that it is not for.
    """

    convert: Callable[[PerSampleGrad, Edge, Edge, int, Saved], PerSampleGrad | None]
    reads: tuple[str, ...] = ()  # names of the saved tensors it needs


def _keep(grad: PerSampleGrad, entry: Edge, below: Edge, operand: int, saved: Saved) -> PerSampleGrad:
    return grad


def _transpose(grad: PerSampleGrad, entry: Edge, below: Edge, operand: int, saved: Saved) -> PerSampleGrad | None:
    if isinstance(grad, DenseGrad):
        return DenseGrad(*(part.mT for part in grad.parts), terms=grad.term_norms)
    return grad.transpose() if isinstance(grad, FactoredGrad) else None


def _view(grad: PerSampleGrad, entry: Edge, below: Edge, operand: int, saved: Saved) -> PerSampleGrad | None:
    if not isinstance(grad, DenseGrad):
        return None
    return DenseGrad(*(part.reshape(len(part), *below.shape) for part in grad.parts), terms=grad.term_norms)


def _permute(grad: PerSampleGrad, entry: Edge, below: Edge, operand: int, saved: Saved) -> PerSampleGrad | None:
    if not isinstance(grad, DenseGrad):
        return None
    order = list(range(len(below.shape)))
    if operation(entry.node) == "Permute":
        dims = [d % len(order) for d in scalar(entry.node, "dims")]
        order = [dims.index(d) for d in order]
    else:
        a, b = scalar(entry.node, "dim0"), scalar(entry.node, "dim1")
        order[a], order[b] = order[b], order[a]
    return DenseGrad(*(part.permute(0, *(d + 1 for d in order)) for part in grad.parts), terms=grad.term_norms)


def _index(grad: PerSampleGrad, entry: Edge, below: Edge, operand: int, saved: Saved) -> PerSampleGrad | None:
    """Gradients of a table of which entries are looked up, such as a relative position bias: table[index]."""
    index, *others = saved["indices"]
    if (
        not isinstance(grad, DenseGrad)
        or index is None
        or index.dtype is not torch.long
        or others != [None] * len(others)
    ):
        return None
    entries = index.flatten() % below.shape[0]  # indices may be negative
    parts = []
    for part in grad.parts:
        of_entries = part.reshape(len(part), len(entries), *below.shape[1:])
        parts.append(part.new_zeros(len(part), *below.shape).index_add(1, entries, of_entries))
    return DenseGrad(*parts, terms=lambda: term_norms(grad) * len(entries) ** 0.5)


def _add_scaled(grad: PerSampleGrad, entry: Edge, below: Edge, operand: int, saved: Saved) -> PerSampleGrad:
    return grad if operand == 0 or entry.node._saved_alpha == 1 else scale_grad(grad, float(entry.node._saved_alpha))


def _times_number(grad: PerSampleGrad, entry: Edge, below: Edge, operand: int, saved: Saved) -> PerSampleGrad:
    factor = saved["other" if operand == 0 else "self"] if saved else entry.node._saved_other  # a Python number
    if not isinstance(factor, Tensor):
        return scale_grad(grad, float(factor))
    if factor.numel() == 1:
        return scale_grad(grad, accumulable(factor.reshape(())))
    return _elementwise(grad, entry, below, operand, saved)


def _elementwise(grad: PerSampleGrad, entry: Edge, below: Edge, operand: int, saved: Saved) -> PerSampleGrad:
    """Gradients of an operand of elementwise operations, which multiply each element by a factor."""
    ones = torch.ones(entry.shape, dtype=entry.dtype, device=entry.device)
    (factors,) = pull_back(ones, entry, [below], torch.is_grad_enabled())
    return scale_grad(grad, accumulable(factors))


def _in_product(grad: PerSampleGrad, entry: Edge, below: Edge, operand: int, saved: Saved) -> PerSampleGrad | None:
    """Gradients of one factor of a matrix product."""
    if not isinstance(grad, FactoredGrad):
        return None
    other: Tensor = accumulable(saved["mat2" if operand == 0 else "self"])
    terms = []
    for left, right in grad.terms:
        if not isinstance(left, Tensor) or not isinstance(right, Tensor) or other.is_complex():
            return None
        terms.append(Term(left, right @ other.T) if operand == 0 else Term(left @ other, right))
    return FactoredGrad(terms, below.shape)


def _exponential(grad: PerSampleGrad, entry: Edge, below: Edge, operand: int, saved: Saved) -> PerSampleGrad | None:
    A = accumulable(saved["self"])
    # The second derivative would need more nodes; on other devices, the number of nodes would be a host sync.
    usable = A.dim() == 2 and A.device.type == "cpu" and not (A.is_complex() or is_traced(A) or torch.is_grad_enabled())
    return exponential(grad, A) if usable else None


ELEMENTWISE = Lowering(_elementwise)
LOWERED = {
    **dict.fromkeys(layouts.ELEMENTWISE.split(), ELEMENTWISE),
    **dict.fromkeys(UNCHANGED, Lowering(_keep)),
    **dict.fromkeys(layouts.VIEWS - UNCHANGED, Lowering(_view)),
    **dict.fromkeys(("Permute", "Transpose"), Lowering(_permute)),
    "Index": Lowering(_index, ("indices",)),
    "T": Lowering(_transpose),
    "Add": Lowering(_add_scaled),
    "Mul": Lowering(_times_number, ("self", "other")),
    "Mm": Lowering(_in_product, ("self", "mat2")),
    "LinalgMatrixExp": Lowering(_exponential, ("self",)),
}
# Operations whose operand may have another shape than the output.
OTHER_SHAPES = {"T", "Mm", "Index", "Permute", "Transpose"} | layouts.VIEWS
WEIGHT_NORM = "WeightNormInterface"
WEIGHT_NORM_READS = ("v", "g", "result1")


@dataclass(frozen=True)
class Descent:
    """Operations just below an operand through which representations are converted, and parameters that are reached.
    Numbers are those of the parameters below the operand.
    """

    steps: tuple[Step, ...] = ()
    last: int | None = None  # position of a weight norm or product of parameters below these steps
    numbers: tuple[int | None, ...] = ()  # parameters that are the operands of `last`, or the one below all steps


NO_DESCENT = Descent()


def descent(graph: Graph, entry: Edge, leaves: Sequence[Node]) -> Descent:
    """Return the operations below `entry` through which representations are converted. `leaves`: all leaves below."""
    steps: list[Step] = []
    while (kind := graph.operations[entry.node]) in LOWERED:
        children = graph.children[entry.node]
        operands = [position for position, (child, _) in enumerate(children) if child in graph.relevant]
        below = Edge(*children[operands[0]])
        is_complex = entry.dtype.is_complex or below.dtype.is_complex  # derivatives may not be products then
        if len(operands) > 1 or is_complex or not (below.shape == entry.shape or kind in OTHER_SHAPES):
            break
        reads = tuple(name for name in LOWERED[kind].reads if name in saved_tensor_names(entry.node))
        step = Step(graph.key(entry), operands[0], graph.key(below), reads)
        if steps and LOWERED[kind] is ELEMENTWISE is LOWERED[graph.operations[graph.edge(steps[-1].entry).node]]:
            step = replace(steps.pop(), below=step.below)
        steps.append(step)
        entry = below
    if entry.node in graph.leaves:
        return Descent(tuple(steps), None, (leaves.index(entry.node),))
    children = graph.children[entry.node]
    ends = all(child in graph.leaves or child not in graph.relevant for child, _ in children)
    if ends and (kind == "Mm" or (kind == WEIGHT_NORM and entry.slot == 0 and entry.node._saved_dim == 0)):
        numbers = tuple(leaves.index(child) if child in graph.leaves else None for child, _ in children)
        return Descent(tuple(steps), graph.index[entry.node], numbers)
    return Descent(tuple(steps)) if steps else NO_DESCENT


def reads_of(path: Descent, graph: Graph) -> dict[int, tuple[str, ...]]:
    """Names of the saved tensors that `lower` reads, by position."""
    reads = {step.entry[0]: step.reads for step in path.steps}
    if path.last is not None:
        kind = graph.operations[graph.nodes[path.last]]
        reads[path.last] = WEIGHT_NORM_READS if kind == WEIGHT_NORM else LOWERED[kind].reads
    return {at: names for at, names in reads.items() if names}


def lower(
    grad: PerSampleGrad, entry: EdgeKey, path: Descent, graph: Graph, read: Callable[[Node], Saved]
) -> tuple[PerSampleGrad, EdgeKey, Mapping[int, PerSampleGrad]]:
    """Convert the representation of an operand as far as possible: the representation, where it is one of, and those of
    parameters, by number.
    """
    for step in path.steps:
        edge = graph.edge(step.entry)
        saved = read(edge.node) if step.reads else {}
        convert = LOWERED[operation(edge.node)].convert
        converted = convert(grad, edge, graph.edge(step.below), step.operand, saved)
        if converted is None:
            return grad, entry, {}
        grad, entry = converted, step.below
    grads: Sequence[PerSampleGrad | None] = ()
    if path.last is None:
        grads = (grad,) if path.numbers else ()
    else:
        edge = graph.edge(entry)
        saved = read(edge.node)
        if operation(edge.node) == WEIGHT_NORM:
            grads = normalize_grad(grad, *(accumulable(saved[name]) for name in WEIGHT_NORM_READS)) or ()
        else:
            operands = [Edge(*child) for child in edge.node.next_functions]
            grads = [
                None if number is None else _in_product(grad, edge, operands[position], position, saved)
                for position, number in enumerate(path.numbers)
            ]
    numbered = zip(path.numbers, grads, strict=False)  # there are no grads if the representation is of another kind
    return grad, entry, {n: of_leaf for n, of_leaf in numbered if n is not None and of_leaf is not None}


# --- merging ---------------------------------------------------------------------------------------------------------


def combine(grads: Sequence[PerSampleGrad], name: str, shared: dict[object, bool]) -> PerSampleGrad:
    """Merge all uses of a parameter into one representation, so that norms include the cross terms between uses.
    `shared`: see `as_blocks`.
    """
    grads = [grad.entries if isinstance(grad, BagGrad) else grad for grad in grads]
    outers = [grad for grad in grads if isinstance(grad, FactoredGrad)]
    if len(outers) == len(grads) and len({outer.matrix for outer in outers}) == 1:
        return FactoredGrad([term for outer in outers for term in outer.terms], grads[0].shape)
    if all(isinstance(grad, DenseGrad) for grad in grads):
        uses = SummedGrad(grads)
        return DenseGrad(uses.rows(0, uses.samples), terms=uses.term_norms)
    return join_stacks(grads) or as_blocks(grads, shared, name) or SummedGrad(grads)
