"""Parameter side: conversion of per-sample gradients from the cut to the parameter, and merging of several uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from samplewise.engine.generic import Pullback, PulledBackGrad
from samplewise.engine.grads.base import PerSampleGrad, SummedGrad
from samplewise.engine.grads.dense import DenseGrad
from samplewise.engine.grads.factored import FactoredGrad
from samplewise.engine.grads.indexed import VIEWS, as_blocks, re_indexed
from samplewise.engine.graph import Graph, Node
from samplewise.engine.rules.embedding import looked_up

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


def carried(
    form: PerSampleGrad,
    changing: tuple[str, ...] | None,
    pullback: Pullback,
    number: int,
    indices: Callable[[], Tensor] | None,
    orders: dict[object, str],
) -> PerSampleGrad:
    """Convert the representation of an operand into that of leaf `number` of the pullback.

    `changing` are the operations on the path to the leaf that change a gradient; None if it is not a single path.
    `indices` returns the indices of an embedding that is the only operation on the path; None if there is no such.
    `orders`: see `re_indexed`.
    """
    if changing is not None:
        leaf = pullback.leaves[number]
        converted: PerSampleGrad | None = None
        if changing == ("T",) and isinstance(form, FactoredGrad):
            converted = form.transposed()
        elif set(changing) <= VIEWS:
            converted = re_indexed(form, pullback.entry, leaf, orders, (pullback.key, number))
        elif indices is not None and isinstance(form, DenseGrad):
            converted = _looked_up_once(form, pullback.entry.node, indices(), leaf.shape)
        if converted is not None:
            return converted
    return PulledBackGrad(pullback, number)


def _looked_up_once(form: DenseGrad, node: Node, index: Tensor, shape: tuple[int, ...]) -> FactoredGrad | None:
    """Gradients of position embeddings, which are looked up once and broadcast to all samples."""
    rows = form.rows(0, form.samples)
    gradient = rows.reshape(form.samples, index.numel(), rows.shape[-1])
    return looked_up(node, index.reshape(1, -1).expand(form.samples, -1), gradient, shape)


def combined(forms: Sequence[PerSampleGrad], name: str, shared: dict[object, bool]) -> PerSampleGrad:
    """Merge all uses of a parameter into one representation, so that norms include the cross terms between uses.
    `shared`: see `as_blocks`.
    """
    outers = [form for form in forms if isinstance(form, FactoredGrad)]
    if len(outers) == len(forms) and len({outer.matrix for outer in outers}) == 1:
        return FactoredGrad([term for outer in outers for term in outer.terms], forms[0].shape)
    if all(isinstance(form, DenseGrad) for form in forms):
        return DenseGrad(SummedGrad(forms).rows(0, forms[0].samples))
    return as_blocks(forms, shared, name) or SummedGrad(forms)
