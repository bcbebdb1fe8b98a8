"""Scalar losses: the part of each sample, from the outputs that the loss is computed from.

With c = d loss / d outputs, the rows of (c * outputs).flatten(1).sum(1) have the samples' parts of the gradient of the
loss as their gradients. The parts add up to the whole gradient, whatever reduction, weights or factors the loss has.

`samples=` gives rows, tokens or other elements of the outputs to samples: pairs, packed documents, groups. The parts of
a sample's elements are added up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parallel import distributed as ddp

from samplewise.core.text import plural
from samplewise.engine.arguments import wide_dtype
from samplewise.engine.deferred_checks import is_traced, read_at_once
from samplewise.engine.generic import as_gradient
from samplewise.engine.graph.compiled import is_compiled, make_repeatable
from samplewise.engine.graph.graph import (
    Edge,
    Node,
    edge_of,
    is_accumulate_grad,
    is_python_function,
    operation,
)
from samplewise.engine.graph.hook_registry import foreign_hooks, remove_afterwards
from samplewise.engine.graph.saved import graph_alive
from samplewise.engine.graph.structure import children_below
from samplewise.errors import GraphError, LossesError

Outputs = Tensor | Sequence[Tensor]
Samples = Tensor | Sequence[Tensor]

# Operations that return their operands unchanged. Frameworks call them on the outputs that they return, after the model
# has computed its loss from the operands.
COPIES = ("ToCopy", "Clone", "Alias")

_generator = torch.Generator().manual_seed(0)  # separate generator: does not change the user's RNG state


class LossParts(NamedTuple):
    """Parts of a scalar loss.

    values      (B,), attached to the graph; their gradients are the samples' parts of the gradient of the loss
    consumers   operands of nodes at which paths from the loss reach the outputs
    rest        names of parameters that the loss also reaches on other paths
    """

    values: Tensor
    consumers: Consumers
    rest: list[str]


def parts_of_loss(
    loss: Tensor, outputs: Outputs, wanted: Mapping[str, Tensor], samples: Samples | None = None, rest: str = "refuse"
) -> LossParts:
    """The parts of the samples in a scalar `loss`.

    outputs: tensor (B, ...), or several, through which the whole loss passes. If the loss depends on an output through
    another one, that dependence counts for the output that is closer to the loss.
    wanted: parameters by name; with rest="refuse", a path from the loss to one of them that does not pass an output is
    an error.
    samples: numbers of the samples that rows or elements of each output belong to; None: row i belongs to sample i.
    """
    tensors, owners = checked_outputs(loss, outputs, samples)
    stops = {edge_of(z): Stop(z, owner) for z, owner in zip(tensors, owners, strict=True)}
    for z, owner in zip(tensors, owners, strict=True):
        for edge, copy in _copies_of(z):
            stops.setdefault(edge, Stop(z, owner, copy))
    count = sample_count(owners) if samples is not None else 0
    with graph_alive():
        consumers, bypassed = _consumers(loss, stops, wanted)
        if bypassed and rest == "refuse":
            _refuse_fused_head(loss, consumers, bypassed, wanted)
            _refuse_rest(bypassed)
        total: Tensor | None = None
        for edge, c in _gradients_at(loss, consumers).items():
            stop = stops[edge]
            if stop.copy is not None:
                _refuse_hooks_on_copies(stop, edge, c)
            part = _row_sums(c, stop.output, 1 if stop.owner is None else stop.owner.dim())
            if stop.owner is not None:
                _check_unowned(c, stop.owner)
                part = add_by_sample(part, stop.owner, count)
            total = part if total is None else total + part
    assert total is not None
    return LossParts(total, consumers, bypassed)


class Stop(NamedTuple):
    """An edge at which paths from the loss end: that of an output, or of a tensor that an output is a copy of."""

    output: Tensor
    owner: Tensor | None  # sample of each row or element of the output; None: row i belongs to sample i
    copy: tuple[Node, int] | None = None  # node that copies the tensor of this edge, and position of its operand


# --- samples= ---------------------------------------------------------------------------------------------------------


def check_owner(owner: Any, values: Tensor, name: str) -> None:
    """Raise LossesError unless `owner` has the number of a sample for each row, or each element, of `values`."""
    is_tensor = isinstance(owner, Tensor)
    if not is_tensor or owner.is_floating_point() or owner.is_complex() or owner.dtype is torch.bool:
        kind = f"dtype {owner.dtype}" if is_tensor else type(owner).__name__
        raise LossesError(
            f"samples must be a tensor of integers, the number of the sample of each row of {name}; found {kind}."
        )
    if owner.dim() == 0 or owner.shape != values.shape[: owner.dim()] or not owner.numel():
        raise LossesError(
            f"samples must have one number for each row or element of {name}, a shape that begins as "
            f"{tuple(values.shape)}; found {tuple(owner.shape)}."
        )


def sample_count(owners: Sequence[Tensor | None]) -> int:
    """Number of samples: the largest number of an owner, plus 1. Waits for the device if `samples` is there."""
    count = max(int(owner.max()) for owner in owners if owner is not None) + 1
    if count < 1:
        raise LossesError("samples must have a number of 0 or more for some row; found only negative numbers.")
    return count


def add_by_sample(values: Tensor, owner: Tensor, count: int) -> Tensor:
    """Sums (count,) of the values of each sample; those with a negative number are left out."""
    numbers = owner.flatten().to(torch.long)
    last = count
    if owner.device.type != "cpu" or bool((numbers < 0).any()):  # one more sum, so that nothing waits for a device
        numbers = torch.where(numbers < 0, count, numbers)
        last = count + 1
    numbers = numbers.to(values.device, non_blocking=True)
    with torch.enable_grad():
        sums = values.new_zeros(last).index_add(0, numbers, values.flatten())
        return sums if last == count else sums[:count]


def _check_unowned(c: Tensor, owner: Tensor) -> None:
    """Raise LossesError if the loss depends on elements of an output that belong to no sample."""
    unowned = owner < 0
    if owner.device.type == "cpu" and not unowned.any():
        return
    enters = (c[unowned.to(c.device)] != 0).reshape(int(unowned.sum()), -1).any(1)
    if enters.any():
        raise LossesError(
            "rows of outputs whose number in samples is negative must not enter the loss, because they belong to no "
            f"sample; found {plural(int(enters.sum()), 'such row')}. Number them, or mask them in the loss."
        )


# --- outputs= ---------------------------------------------------------------------------------------------------------


def checked_outputs(
    loss: Tensor, outputs: Any, samples: Samples | None = None
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Outputs that are attached to the graph, with the samples of their rows. Raises LossesError if invalid."""
    tensors = [outputs] if isinstance(outputs, Tensor) else outputs
    if not isinstance(tensors, (list, tuple)) or not all(isinstance(z, Tensor) for z in tensors) or not tensors:
        raise LossesError(
            "outputs must be a tensor (B, ...) that the loss was computed from, or a list of such tensors; found "
            f"{_description(outputs)}. Pass the tensors themselves, for example outputs=out.logits."
        )
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        kind = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise LossesError(
            f"loss must be a scalar tensor if outputs are given; found {kind}. Leave out outputs for losses (B,), one "
            "per sample."
        )
    if not loss.requires_grad:
        raise LossesError(
            "loss must be attached to the autograd graph; found requires_grad=False. Compute it outside "
            "torch.no_grad(), without .detach()."
        )
    owners: list[Any] = [None] * len(tensors)
    if samples is not None:
        owners = [samples] * len(tensors) if isinstance(samples, Tensor) else list(samples)
        if len(owners) != len(tensors):
            raise LossesError(
                f"samples must be one tensor for all outputs, or one for each; found {len(owners)} for "
                f"{plural(len(tensors), 'output')}."
            )
        for z, owner in zip(tensors, owners, strict=True):
            check_owner(owner, z, "outputs")
    attached = [z for z in tensors if z.requires_grad]
    owners = [owner for z, owner in zip(tensors, owners, strict=True) if z.requires_grad]
    if not attached:
        raise LossesError(
            "outputs must be attached to the autograd graph; found requires_grad=False. Pass the tensors that the "
            "model returned, without .detach()."
        )
    shapes = [tuple(z.shape) for z in attached]
    if samples is None and (any(not shape or shape[:1] != shapes[0][:1] for shape in shapes) or shapes[0][0] == 0):
        raise LossesError(
            "outputs must have one row per sample, and all of them the same number of rows; found "
            f"{' and '.join(map(str, dict.fromkeys(shapes)))}. Pass tensors whose first dimension is the batch, or "
            "samples=, the sample of each row."
        )
    return attached, owners


def _description(outputs: Any) -> str:
    if isinstance(outputs, (list, tuple)):
        kinds = sorted({type(z).__name__ for z in outputs})
        return f"a {type(outputs).__name__} of {' and '.join(kinds) or 'nothing'}"
    return type(outputs).__name__


def _copies_of(z: Tensor) -> Iterator[tuple[Edge, tuple[Node, int]]]:
    """Edges of the tensors that an output is an unchanged copy of, with the node that copies each
    and the position of its operand."""
    edge = edge_of(z)
    while _is_copy(edge.node):
        position = edge.slot if len(edge.node.next_functions) > 1 else 0
        child, slot = edge.node.next_functions[position]
        if child is None or torch.promote_types(child._input_metadata[slot].dtype, edge.dtype) != edge.dtype:
            return
        copy = (edge.node, position)
        edge = Edge(child, slot)
        yield edge, copy


def _is_copy(node: Node) -> bool:
    if is_python_function(node):
        return type(node)._forward_cls is ddp._DDPSink
    return operation(node) in COPIES


Consumers = dict[Edge, list[tuple[Node, int]]]  # nodes that an edge is an operand of, and its position there


def _consumers(loss: Tensor, stops: Mapping[Edge, Stop], wanted: Mapping[str, Tensor]) -> tuple[Consumers, list[str]]:
    """The stops that the loss depends on, with their consumers on paths that do not pass another stop; and the names of
    wanted parameters that are reached without passing one. Raises GraphError if there is no stop.
    """
    names = {id(p): name for name, p in wanted.items()}
    consumers: Consumers = {}
    bypassed: list[str] = []
    stack: list[Node] = [edge_of(loss).node]
    visited = set(stack)
    while stack:
        node = stack.pop()
        if is_compiled(node):
            make_repeatable(node)
        if is_accumulate_grad(node) and id(node.variable) in names:
            bypassed.append(names[id(node.variable)])
        for position, (child, slot) in enumerate(node.next_functions):
            if child is None:
                continue
            if Edge(child, slot) in stops:
                consumers.setdefault(Edge(child, slot), []).append((node, position))
            elif child not in visited:
                visited.add(child)
                stack.append(child)
    if not consumers:
        raise GraphError(
            "the loss must be computed from outputs; found no path from the loss to them in the graph. Pass the tensor "
            "object that the model returned and the loss was computed from."
        )
    return consumers, sorted(bypassed, key=list(wanted).index)


def _refuse_fused_head(
    loss: Tensor, consumers: Consumers, bypassed: Sequence[str], wanted: Mapping[str, Tensor]
) -> None:
    """Raise GraphError if a Python function computes the loss, or a part of it, from outputs and from a parameter."""
    names = {id(wanted[name]): name for name in bypassed}
    ends = {edge.node for edge in consumers}
    for node, children in children_below(edge_of(loss).node).items():
        parameters = [child.variable for child, _ in children if child is not None and is_accumulate_grad(child)]
        heads = [names[id(p)] for p in parameters if id(p) in names]
        if heads and is_python_function(node) and ends & children_below(node).keys():
            raise GraphError(
                f"the whole loss must pass through outputs; found that {operation(node)} computes it from outputs and "
                f"from {heads[0]!r}, as a trained head that is fused with the loss does. Pass the losses of tokens "
                "that the function returns as outputs (reduction='none'), compute logits with an ordinary layer and "
                "pass them, or freeze the head."
            )


def _refuse_rest(bypassed: Sequence[str]) -> None:
    more = f" and {plural(len(bypassed) - 1, 'other parameter')}" if len(bypassed) > 1 else ""
    raise GraphError(
        f"the whole loss must pass through outputs; found that it depends on {bypassed[0]!r}{more} on another path, as "
        "a penalty on weights, an auxiliary loss or a learned temperature does. Pass all outputs that the loss depends "
        "on; or leave such terms out of the loss and call backward() on them separately; or pass rest='plain' to "
        "sw.backward or PerSample, which gives these paths their ordinary gradient, without transforms."
    )


def _gradients_at(loss: Tensor, consumers: Consumers) -> dict[Edge, Tensor]:
    """Gradient of the loss at each edge, along paths that do not pass another one of them. It is read where it leaves
    the consumers of the edge, before the hooks on the tensor: these act in the pass through the parts.
    """
    gradients: dict[Edge, Tensor] = {}
    with stop_at_outputs(consumers, gradients):
        torch.autograd.grad(loss, [edge.gradient_edge() for edge in consumers], retain_graph=True, allow_unused=True)
    return {edge: gradients[edge] if edge in gradients else edge.zeros() for edge in consumers}


def stop_at_outputs(consumers: Consumers, gradients: dict[Edge, Tensor] | None = None) -> AbstractContextManager[None]:
    """Context manager: backward passes of the loss in the block continue with zeros past the outputs, whose gradients
    are added to `gradients`.
    """
    operands: dict[Node, list[tuple[int, Edge]]] = {}
    for edge, uses in consumers.items():
        for node, position in uses:
            operands.setdefault(node, []).append((position, edge))

    def read(edges: list[tuple[int, Edge]], leaving: tuple[Tensor | None, ...], _: object) -> object:
        onward = list(leaving)
        for position, edge in edges:
            gradient = leaving[position]
            if gradient is not None:
                onward[position] = torch.zeros_like(gradient)  # hooks below the edge are not made for None
                if gradients is not None:
                    gradient = as_gradient(gradient, edge).to(edge.dtype)
                    gradients[edge] = gradients[edge] + gradient if edge in gradients else gradient
        return tuple(onward)

    return remove_afterwards([node.register_hook(partial(read, edges)) for node, edges in operands.items()])


def rest_gradients(loss: Tensor, parts: LossParts, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of the loss, name -> shape, along the paths that do not pass the outputs."""
    if not parts.rest:
        return {}
    with stop_at_outputs(parts.consumers):
        gradients = torch.autograd.grad(loss, [wanted[name] for name in parts.rest], retain_graph=True)
    return dict(zip(parts.rest, gradients, strict=True))


def _refuse_hooks_on_copies(stop: Stop, edge: Edge, c: Tensor) -> None:
    """Raise GraphError if a hook changes gradients between an output and the tensor that it is a copy of. The loss does
    not pass there, but its parts do, because autograd gives access to the tensor through its copy only.
    """
    assert stop.copy is not None
    node, position = stop.copy
    output = edge_of(stop.output)
    changed = bool(stop.output._backward_hooks)
    if not changed and foreign_hooks():

        def compare(sent: Tensor, leaving: tuple[Tensor | None, ...], _: object) -> object:
            nonlocal changed
            gradient = leaving[position]
            changed |= gradient is None or not torch.equal(gradient, sent)
            return tuple(None if g is None else torch.zeros_like(g) for g in leaving)  # for hooks on the tensor

        limits = torch.finfo(c.dtype)
        noise = torch.randn(c.shape, generator=_generator, dtype=torch.float64).to(c)
        # A hook may change large or small gradients only: clip them, or drop them.
        for sent in (c, noise * limits.max ** (1 / 3), noise * limits.tiny ** (1 / 3)):
            with remove_afterwards([node.register_hook(partial(compare, sent))]):
                torch.autograd.grad(
                    [output.gradient_edge()], [edge.gradient_edge()], [sent.to(output.dtype)], retain_graph=True
                )
    if changed:
        raise GraphError(
            "if outputs is a copy of the tensor that the loss was computed from, gradients must pass unchanged from "
            "one to the other; found a hook between outputs and the tensor. Pass the tensor that the loss was computed "
            "from as outputs, or register the hook on it."
        )


def _row_sums(c: Tensor, z: Tensor, dims: int) -> Tensor:
    """Sums of c * z over all but the first `dims` dimensions, flattened: (B,) for rows. In float32 for half precision,
    in which they could overflow.

    Elements that the loss does not depend on may be infinite, such as the logits of masked classes, and are left out.
    """
    rows = z.shape[:dims].numel()
    if z.is_complex():
        c = torch.view_as_real(c.to(z.dtype))
        z = torch.view_as_real(z)
    dtype = wide_dtype(z.dtype)
    c = c.to(z.device, dtype)
    with torch.enable_grad():
        if read_at_once(c):
            sums = (c * z.to(dtype)).reshape(rows, -1).sum(1)
            if is_traced(sums) or not sums.isnan().any():
                return sums
        return (c * z.to(dtype).masked_fill(c == 0, 0)).reshape(rows, -1).sum(1)
