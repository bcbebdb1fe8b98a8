"""Samples that interact: where one sample's loss depends on another sample's data.

Rows of the Jacobian are exact even then, but "the gradient of a sample" has two meanings, so it is refused by default.
Below the cut (see `cut`) gradients of several samples are already mixed. If all that enters there is parameters and
constants, samples are independent all the same; if sample data enter, they are not. Autograd cannot tell a constant
from data when neither needs a gradient, so shapes have to: an operand with a row per sample counts as data.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from samplewise.engine.finite import traced
from samplewise.engine.graph import Edge, Graph, Node, is_accumulate_grad, is_python_function, scalar
from samplewise.engine.saved import Reader, saved_tensor_names
from samplewise.errors import SamplesInteractError, SamplesMayInteractWarning

BATCH_NORMS = {"NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm"}
REDUCTIONS = {"Mean", "Sum", "Var", "Std", "Cumsum", "Softmax", "LogSoftmax", "Amax", "Max", "Norm", "LinalgVectorNorm"}
RULE = "the loss of a sample must not depend on other samples"
REMEDY = "or pass interacting='allow' for the Jacobian rows as they are."


def refuse_batch_norm(graph: Graph) -> None:
    """Statistics over the batch are seen without looking at gradients. One image at a time is an instance norm."""
    for node in graph.nodes:
        if graph.operations[node] in BATCH_NORMS and scalar(node, "training") and Edge(node, 0).shape[0] > 1:
            raise SamplesInteractError(
                f"{RULE}; found {graph.operations[node]} in training mode{_whereabouts(graph, node)}, "
                "which normalises with the statistics of the whole batch. "
                f"Put BatchNorm layers in eval mode, use GroupNorm, {REMEDY}"
            )


def refuse_sample_data(
    graph: Graph, operands: Iterable[tuple[Node, int]], side: set[Node], data: list[tuple[Node, Tensor]]
) -> None:
    """An error for numbers with a row per sample, a warning for integers, which may be positions or the like."""
    for node, what in data:
        mixing = _mixing_node(graph, operands, side, node)
        found = f"{graph.operations[mixing]}{_whereabouts(graph, mixing)} mixes samples"
        entering = f"of shape {tuple(what.shape)} enter below it ({graph.operations[node]}{_whereabouts(graph, node)})"
        if what.is_floating_point() or what.is_complex():
            raise SamplesInteractError(
                f"{RULE}; found that {found}, and that sample data {entering}. "
                f"Remove what combines samples (a batch mean, in-batch negatives), {REMEDY}"
            )
        warnings.warn(
            f"{found}, and integers {entering}: samples interact if these are sample data, "
            "and do not if these are positions or the like. sw.check settles it.",
            SamplesMayInteractWarning,
            stacklevel=6,
        )


class Constants:
    """Parameters and buffers of the model: what enters below the cut from there is no sample data."""

    def __init__(self, tensors: Iterable[Tensor]):
        self._tensors = list(tensors)
        self._storages = {storage_of(tensor) for tensor in self._tensors}

    def __contains__(self, tensor: Tensor) -> bool:
        """True for a view of one of them, and for a copy, such as those of the vectors of spectral_norm."""
        if storage_of(tensor) in self._storages:
            return True
        return any(_is_copy(tensor, one) for one in self._tensors)


def _is_copy(tensor: Tensor, one: Tensor) -> bool:
    alike = one.shape == tensor.shape and one.dtype == tensor.dtype and one.device == tensor.device
    return alike and not traced(tensor) and not traced(one) and torch.equal(one, tensor)


def sample_data(graph: Graph, side: set[Node], constants: Constants) -> Iterator[tuple[Node, Tensor]]:
    """Operands below the cut that no gradient reaches, are no constants of the model, and have a row per sample."""
    if not side:
        return
    below = graph.below(side)
    savers = {node: _operand_names(node) for node in below if _operand_names(node) or _attributes(node)}
    reader = Reader(savers.items())
    for node in savers:
        # Where every operand has a gradient, what was saved without one was computed from those operands.
        open_ended = any(child is None for child, _ in graph.children[node])
        for tensor in _tensors([*reader.take(node).values(), *_attributes(node)]):
            if (open_ended or not tensor.is_floating_point()) and _may_be_data(tensor, graph.samples, constants):
                yield node, tensor
    for node in below:
        other = is_accumulate_grad(node) and node not in graph.leaves
        if other and _may_be_data(node.variable.detach(), graph.samples, constants):
            yield node, node.variable


def _operand_names(node: Node) -> tuple[str, ...]:
    return tuple(name for name in saved_tensor_names(node) if not name.startswith("result"))


def _attributes(node: Node) -> list[object]:
    """What the forward of a Python function has kept as attributes of `ctx`."""
    return list(vars(node).values()) if is_python_function(node) else []


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    for value in values:
        yield from (t for t in (value if isinstance(value, (tuple, list)) else (value,)) if isinstance(t, Tensor))


def storage_of(tensor: Tensor) -> int:
    """The same for all views of one storage, also where nothing is stored because it is only traced."""
    return tensor.untyped_storage()._cdata


def _may_be_data(tensor: Tensor, samples: int, constants: Constants) -> bool:
    if tensor.requires_grad or tensor.dtype is torch.bool or tensor.dim() == 0:
        return False
    # A slice of sample data betrays itself by what it was cut from.
    whole = (t for t in (tensor, tensor._base) if t is not None)
    has_row_per_sample = any(samples in (t.shape[:-1] if t.dim() > 1 else t.shape) for t in whole)
    return has_row_per_sample and tensor not in constants


def _mixing_node(graph: Graph, operands: Iterable[tuple[Node, int]], side: set[Node], data: Node) -> Node:
    """The highest operation that combines samples: a reduction just below the cut, or else the cut's own operation."""
    for node, position in operands:
        child = graph.children[node][position][0]
        if child in side and data in graph.below([child]):
            return child if graph.operations[child] in REDUCTIONS | BATCH_NORMS else node
    return data


def _whereabouts(graph: Graph, node: Node) -> str:
    """Autograd does not know modules: the nearest parameters tell where in the model an operation stands."""
    own = [graph.leaves[child] for child, _ in graph.children[node] if child in graph.leaves]
    if own:
        return f" (module {own[0].rpartition('.')[0]!r})"
    below = set(graph.below([node]))
    named = [name for leaf, name in graph.leaves.items() if leaf in below]
    return f" (downstream of parameter {named[0]!r})" if named else ""
