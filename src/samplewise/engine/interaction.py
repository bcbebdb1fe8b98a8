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

from samplewise.engine.graph import Edge, Graph, Node, scalar
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


def sample_data(graph: Graph, side: set[Node], constants: set[int]) -> Iterator[tuple[Node, Tensor]]:
    """Operands below the cut that no gradient reaches, are no constants of the model, and have a row per sample."""
    if not side:
        return
    below = graph.below(side)
    savers = {node: _operand_names(node) for node in below if _operand_names(node)}
    reader = Reader(savers.items())
    for node in savers:
        # Where every operand has a gradient, what was saved without one was computed from those operands.
        open_ended = any(child is None for child, _ in node.next_functions)
        for tensor in _tensors(reader.take(node).values()):
            if (open_ended or not tensor.is_floating_point()) and _may_be_data(tensor, graph.samples, constants):
                yield node, tensor
    for node in below:
        leaf = getattr(node, "variable", None)
        if leaf is not None and node not in graph.leaves and _may_be_data(leaf.detach(), graph.samples, constants):
            yield node, leaf


def _operand_names(node: Node) -> tuple[str, ...]:
    return tuple(name for name in saved_tensor_names(node) if not name.startswith("result"))


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    for value in values:
        yield from (t for t in (value if isinstance(value, (tuple, list)) else (value,)) if isinstance(t, Tensor))


def storage_of(tensor: Tensor) -> int:
    """The same for all views of one storage, also where nothing is stored because it is only traced."""
    return tensor.untyped_storage()._cdata


def _may_be_data(tensor: Tensor, samples: int, constants: set[int]) -> bool:
    if tensor.requires_grad or tensor.dtype is torch.bool or tensor.dim() == 0:
        return False
    if storage_of(tensor) in constants:
        return False
    # A slice of sample data betrays itself by what it was cut from.
    return any(samples in (t.shape[:-1] if t.dim() > 1 else t.shape) for t in (tensor, tensor._base) if t is not None)


def _mixing_node(graph: Graph, operands: Iterable[tuple[Node, int]], side: set[Node], data: Node) -> Node:
    """The highest operation that combines samples: a reduction just below the cut, or else the cut's own operation."""
    for node, position in operands:
        child = node.next_functions[position][0]
        if child in side and data in graph.below([child]):
            return child if graph.operations[child] in REDUCTIONS | BATCH_NORMS else node
    return data


def _whereabouts(graph: Graph, node: Node) -> str:
    """Autograd does not know modules: the nearest parameters tell where in the model an operation stands."""
    own = [graph.leaves[child] for child, _ in node.next_functions if child in graph.leaves]
    if own:
        return f" (module {own[0].rpartition('.')[0]!r})"
    below = set(graph.below([node]))
    named = [name for leaf, name in graph.leaves.items() if leaf in below]
    return f" (downstream of parameter {named[0]!r})" if named else ""
