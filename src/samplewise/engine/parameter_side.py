"""Parameter side: conversion of per-sample gradients from the cut to the parameter, and merging of several uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from samplewise.engine.grads.base import DenseGrad, PerSampleGrad, SummedGrad
from samplewise.engine.grads.factored import FactoredGrad
from samplewise.engine.grads.generic import Pullback, PulledBackGrad
from samplewise.engine.grads.indexed import VIEWS, as_blocks, relabelled
from samplewise.engine.graph import Graph, Node
from samplewise.engine.rules.embedding import looked_up

UNCHANGED = {"ToCopy", "Alias", "Clone"}


def ways_down(graph: Graph, entry: Node) -> list[tuple[Node, tuple[Node, ...] | None]]:
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


def carried(
    form: PerSampleGrad,
    operations: Sequence[str] | None,
    pullback: Pullback,
    number: int,
    indices: Callable[[], Tensor],
) -> PerSampleGrad:
    """Convert the representation of an operand into that of leaf `number` of the pullback.

    `operations` are those on the path to the leaf; None if it is not a single path. `indices()` returns the indices of
    the embedding on the path, and is called only if there is one.
    """
    if operations == []:
        return form
    leaf = pullback.leaves[number]
    if operations is not None:
        changing = [op for op in operations if op not in UNCHANGED]
        if not changing:
            return form
        found: PerSampleGrad | None = None
        if changing == ["T"] and isinstance(form, FactoredGrad):
            found = form.transposed()
        elif set(changing) <= VIEWS:
            found = relabelled(form, pullback.entry, leaf)
        elif operations == ["Embedding"] and isinstance(form, DenseGrad):
            found = _looked_up_once(form, pullback.entry.node, indices(), leaf.shape)
        if found is not None:
            return found
    return PulledBackGrad(pullback, number)


def _looked_up_once(form: DenseGrad, node: Node, index: Tensor, shape: tuple[int, ...]) -> FactoredGrad | None:
    """Gradients of position embeddings, which are looked up once and broadcast to all samples."""
    rows = form.rows(0, form.samples)
    gradient = rows.reshape(form.samples, index.numel(), rows.shape[-1])
    return looked_up(node, index.reshape(1, -1).expand(form.samples, -1), gradient, shape)


def combined(forms: Sequence[PerSampleGrad]) -> PerSampleGrad:
    """Merge all uses of a parameter into one representation, so that norms include the cross terms between uses."""
    outers = [form for form in forms if isinstance(form, FactoredGrad)]
    if len(outers) == len(forms) and len({outer.matrix for outer in outers}) == 1:
        return settled(FactoredGrad([term for outer in outers for term in outer.terms], forms[0].shape))
    if len(forms) == 1:
        return forms[0]
    if all(isinstance(form, DenseGrad) for form in forms):
        return DenseGrad(SummedGrad(forms).rows(0, forms[0].samples))
    return as_blocks(forms) or SummedGrad(forms)


def settled(outer: FactoredGrad) -> PerSampleGrad:
    """Convert factors to rows if rows need no more memory; then rows are also faster than pairs of tokens."""
    stored = sum(term.tokens * term.numbers_per_token for term in outer.terms)
    return DenseGrad(outer.rows(0, outer.samples)) if outer.width <= stored else outer
