"""The parameter side: what a form becomes on its way from the cut to the parameter, and all uses taken together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from samplewise.engine.forms import Dense, Form, Mixture
from samplewise.engine.generic import Pullback, Pushed
from samplewise.engine.graph import Graph, Node
from samplewise.engine.outer import Outer
from samplewise.engine.relabelled import VIEWS, as_blocks, relabelled
from samplewise.engine.rules.embedding import looked_up

UNCHANGED = {"ToCopy", "Alias", "Clone"}


def ways_down(graph: Graph, entry: Node) -> list[tuple[Node, tuple[Node, ...] | None]]:
    """The parameters below, each with the nodes on the way where that is a single path (none if `entry` is it)."""
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
    form: Form,
    operations: Sequence[str] | None,
    pullback: Pullback,
    number: int,
    indices: Callable[[], Tensor],
) -> Form:
    """The form of one of the pullback's leaves. `operations` are those of the chain where there is a single path;
    `indices` gives what the last of them, an embedding, looked up.
    """
    if operations == []:
        return form
    leaf = pullback.leaves[number]
    if operations is not None:
        changing = [op for op in operations if op not in UNCHANGED]
        if not changing:
            return form
        found: Form | None = None
        if changing == ["T"] and isinstance(form, Outer):
            found = form.transposed()
        elif set(changing) <= VIEWS:
            found = relabelled(form, pullback.entry, leaf)
        elif operations == ["Embedding"] and isinstance(form, Dense):
            found = _looked_up_once(form, pullback.entry.node, indices(), leaf.shape)
        if found is not None:
            return found
    return Pushed(pullback, number)


def _looked_up_once(form: Dense, node: Node, index: Tensor, shape: tuple[int, ...]) -> Outer | None:
    """Position embeddings: looked up once, added to every sample."""
    rows = form.rows(0, form.samples)
    gradient = rows.reshape(form.samples, index.numel(), rows.shape[-1])
    return looked_up(node, index.reshape(1, -1).expand(form.samples, -1), gradient, shape)


def combined(forms: Sequence[Form]) -> Form:
    """One form for all uses of a parameter, so that the cross terms between uses come out right."""
    outers = [form for form in forms if isinstance(form, Outer)]
    if len(outers) == len(forms) and len({outer.matrix for outer in outers}) == 1:
        return settled(Outer([term for outer in outers for term in outer.terms], forms[0].shape))
    if len(forms) == 1:
        return forms[0]
    if all(isinstance(form, Dense) for form in forms):
        return Dense(Mixture(forms).rows(0, forms[0].samples))
    return as_blocks(forms) or Mixture(forms)


def settled(outer: Outer) -> Form:
    """Rows where they take no more room than their factors: then they also cost less than the pairs of tokens would."""
    stored = sum(term.tokens * term.numbers_per_token for term in outer.terms)
    return Dense(outer.rows(0, outer.samples)) if outer.width <= stored else outer
