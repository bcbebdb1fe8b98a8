"""Scalar losses: the part of each sample, from the outputs that the loss is computed from.

With c = d loss / d outputs, the rows of (c * outputs).flatten(1).sum(1) have the samples' parts of the gradient of the
loss as their gradients. The parts add up to the whole gradient, whatever reduction, weights or factors the loss has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from samplewise.core.text import plural
from samplewise.engine.checks import is_traced, wide_dtype
from samplewise.engine.graph import Edge, Node, edge_of, graph_alive, is_accumulate_grad, operation
from samplewise.engine.pending_checks import read_at_once
from samplewise.engine.registered_hooks import removed_afterwards
from samplewise.errors import GraphError, LossesError

Outputs = Tensor | Sequence[Tensor]

# Operations that return their operands unchanged. Frameworks call them on the outputs that they return, after the model
# has computed its loss from the operands.
COPIES = ("ToCopy", "Clone", "Alias", "Function '_DDPSink'")


def parts_of_loss(loss: Tensor, outputs: Outputs, wanted: Mapping[str, Tensor]) -> Tensor:
    """Values (B,), attached to the graph, whose gradients are the samples' parts of the gradient of a scalar `loss`.

    outputs: tensor (B, ...), or several, through which the whole loss passes. If the loss depends on an output through
    another one, that dependence counts for the output that is closer to the loss.
    wanted: parameters by name; a path from the loss to one of them that does not pass an output is an error.
    """
    tensors = checked_outputs(loss, outputs)
    stops = {edge: z for z in tensors for edge in _edges_of(z)}
    with graph_alive():
        reached = _reached(loss, stops, wanted)
        total: Tensor | None = None
        with _without_hooks(tensors):  # they are called in the pass through the parts
            gradients = _gradients_at(loss, reached)
        for edge, c in zip(reached, gradients, strict=True):
            part = _row_sums(c, stops[edge])
            total = part if total is None else total + part
    assert total is not None
    return total


def checked_outputs(loss: Tensor, outputs: Any) -> list[Tensor]:
    """Outputs that are attached to the graph, as a list. Raises LossesError for invalid arguments."""
    tensors = [outputs] if isinstance(outputs, Tensor) else outputs
    if not isinstance(tensors, (list, tuple)) or not all(isinstance(z, Tensor) for z in tensors) or not tensors:
        raise LossesError(
            "outputs must be a tensor (B, ...) that the loss was computed from, or a list of such tensors; found "
            f"{_description(outputs)}. Pass the tensors themselves, for example outputs=out.logits."
        )
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise LossesError(
            f"loss must be a scalar tensor if outputs are given; found {found}. Leave out outputs for losses (B,), one "
            "per sample."
        )
    if not loss.requires_grad:
        raise LossesError(
            "loss must be attached to the autograd graph; found requires_grad=False. Compute it outside "
            "torch.no_grad(), without .detach()."
        )
    attached = [z for z in tensors if z.requires_grad]
    if not attached:
        raise LossesError(
            "outputs must be attached to the autograd graph; found requires_grad=False. Pass the tensors that the "
            "model returned, without .detach()."
        )
    shapes = [tuple(z.shape) for z in attached]
    if any(not shape or shape[:1] != shapes[0][:1] for shape in shapes) or shapes[0][0] == 0:
        raise LossesError(
            "outputs must have one row per sample, and all of them the same number of rows; found "
            f"{' and '.join(map(str, dict.fromkeys(shapes)))}. Pass tensors whose first dimension is the batch."
        )
    return attached


def _description(outputs: Any) -> str:
    if isinstance(outputs, (list, tuple)):
        kinds = sorted({type(z).__name__ for z in outputs})
        return f"a {type(outputs).__name__} of {' and '.join(kinds) or 'nothing'}"
    return type(outputs).__name__


def _edges_of(z: Tensor) -> Iterator[Edge]:
    """The edge of an output, and those of the tensors that it is an unchanged copy of."""
    edge = edge_of(z)
    yield edge
    while not is_accumulate_grad(edge.node) and operation(edge.node) in COPIES:
        child, slot = edge.node.next_functions[edge.slot if len(edge.node.next_functions) > 1 else 0]
        if child is None or torch.promote_types(child._input_metadata[slot].dtype, edge.dtype) != edge.dtype:
            return
        edge = Edge(child, slot)
        yield edge


def _reached(loss: Tensor, stops: Mapping[Edge, Tensor], wanted: Mapping[str, Tensor]) -> list[Edge]:
    """The stops that the loss depends on. Raises GraphError if there is none, or if a wanted parameter is reached
    without passing one.
    """
    names = {id(p): name for name, p in wanted.items()}
    found: dict[Edge, None] = {}
    bypassed: list[str] = []
    stack: list[Node] = [edge_of(loss).node]
    seen = set(stack)
    while stack:
        node = stack.pop()
        if is_accumulate_grad(node) and id(node.variable) in names:
            bypassed.append(names[id(node.variable)])
        for child, slot in node.next_functions:
            if child is None:
                continue
            if Edge(child, slot) in stops:
                found[Edge(child, slot)] = None
            elif child not in seen:
                seen.add(child)
                stack.append(child)
    if not found:
        raise GraphError(
            "the loss must be computed from outputs; found no path from the loss to them in the graph. Pass the tensor "
            "object that the model returned and the loss was computed from."
        )
    if bypassed:
        first = min(bypassed, key=list(wanted).index)
        others = f" and {plural(len(bypassed) - 1, 'other parameter')}" if len(bypassed) > 1 else ""
        raise GraphError(
            f"the whole loss must pass through outputs; found that it depends on {first!r}{others} on another path, as "
            "a penalty on weights or an auxiliary loss does. Pass all outputs that the loss depends on, or leave such "
            "terms out of the loss and call backward() on them separately."
        )
    return list(found)


def _gradients_at(loss: Tensor, edges: Sequence[Edge]) -> list[Tensor]:
    """Gradient of the loss at each edge, along paths that do not pass another one of them."""
    with _paths_cut(edges):
        gradients = torch.autograd.grad(
            loss, [edge.gradient_edge() for edge in edges], retain_graph=True, allow_unused=True
        )
    return [edge.zeros() if c is None else c for edge, c in zip(edges, gradients, strict=True)]


@contextmanager
def _without_hooks(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Context manager: backward passes in the block do not call the hooks that `register_hook` added to the tensors."""
    kept = [(z._backward_hooks, dict(z._backward_hooks)) for z in tensors if z._backward_hooks]
    for hooks, _ in kept:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in kept:
            hooks.update(before)


@contextmanager
def _paths_cut(edges: Sequence[Edge]) -> Iterator[None]:
    """Context manager: backward passes in the block do not continue below these edges. `torch.autograd.grad` reads the
    gradient at an edge before the hooks of its node are called.
    """
    slots: dict[Any, set[int]] = {}
    for edge in edges:
        slots.setdefault(edge.node, set()).add(edge.slot)

    def cut(here: set[int], gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return tuple(None if slot in here else gradient for slot, gradient in enumerate(gradients))

    several = list(slots.items()) if len(edges) > 1 else []  # a pass to one edge ends there
    with removed_afterwards([node.register_prehook(partial(cut, here)) for node, here in several]):
        yield


def _row_sums(c: Tensor, z: Tensor) -> Tensor:
    """Sums (B,) of c * z over each row, in float32 for half precision, in which they could overflow.

    Elements that the loss does not depend on may be infinite, such as the logits of masked classes, and are left out.
    """
    if z.is_complex():
        c = torch.view_as_real(c.to(z.dtype))
        z = torch.view_as_real(z)
    dtype = wide_dtype(z.dtype)
    c = c.to(dtype)
    with torch.enable_grad():
        if read_at_once(c):
            sums = (c * z.to(dtype)).reshape(len(z), -1).sum(1)
            if is_traced(sums) or not sums.isnan().any():
                return sums
        return (c * z.to(dtype).masked_fill(c == 0, 0)).reshape(len(z), -1).sum(1)
