"""Detection of interacting samples: the loss of one sample depends on the data of another.

Rows of the Jacobian are exact even then, but "the gradient of a sample" is ambiguous, so it is an error by default.
Below the cut (see `cut`) gradients of several samples are already mixed. If only parameters and constants enter there,
samples are independent; if sample data enter there, they interact. The graph does not distinguish constants from data
when neither requires a gradient, so shapes decide: an operand with one row per sample counts as data.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property

import torch
from torch import Tensor, nn

from samplewise.core.comparisons import broadcast_cause
from samplewise.core.memory import is_plain, stored_values
from samplewise.core.modes import batch_norms
from samplewise.core.text import listed
from samplewise.engine.deferred_checks import is_traced
from samplewise.engine.graph.graph import Edge, Graph, Node, is_accumulate_grad, is_python_function, scalar
from samplewise.engine.graph.saved import SavedTensorReader, saved_tensor_names, with_base
from samplewise.errors import SamplesInteractError, SamplesMayInteractWarning
from samplewise.parallel.sharded_parameters import unsharded

BATCH_NORMS = {"NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm"}
REDUCTIONS = {"Mean", "Sum", "Var", "Std", "Cumsum", "Softmax", "LogSoftmax", "Amax", "Max", "Norm", "LinalgVectorNorm"}
RULE = "the loss of a sample must not depend on other samples"
FREEZE = "call sw.freeze_batchnorm(model), which keeps BatchNorm in eval mode after model.train()"
ALLOW = "pass interacting='allow' to sw.gradients, sw.backward or sw.Step to use the rows of the Jacobian"
WITHOUT_NORMS = (
    "No transform uses per-sample gradients here: sw.Ledger(norms=False), on the command line --ledger losses, records "
    "the losses and trains this model unchanged."
)


def refuse_batch_norm(graph: Graph, modules: Iterable[nn.Module]) -> None:
    """Raise SamplesInteractError for normalization with statistics of the batch. Needs no backward pass.

    `modules`: to name layers without trained parameters.
    """
    # A batch of one image is an instance norm: samples in its channels do not interact.
    mixing = [
        node
        for node in reversed(graph.nodes)
        if graph.operations[node] in BATCH_NORMS and scalar(node, "training") and Edge(node, 0).shape[0] > 1
    ]
    if not mixing:
        return
    paths = {storage_of(m.running_mean): name for name, m in batch_norms(modules) if m.running_mean is not None}
    names = dict.fromkeys(_batch_norm_name(graph, node, paths) for node in mixing)
    untracked = dict.fromkeys(
        _batch_norm_name(graph, node, paths) for node in mixing if node._saved_running_mean is None
    )
    note = (
        f"Without running statistics (track_running_stats=False), {listed(untracked)} would use those of the batch in "
        "eval mode, too: create it with track_running_stats=True. "
    )
    raise SamplesInteractError(
        f"{RULE}; found BatchNorm {'with batch statistics' if untracked else 'in training mode'}: {listed(names)}. "
        f"It normalizes with the statistics of the whole batch. {note if untracked else ''}".rstrip(),
        (FREEZE, "use GroupNorm", ALLOW),
    )


def norms_only_recorded(error: SamplesInteractError) -> SamplesInteractError:
    """The error if norms are recorded and no transform uses them: for BatchNorm, it names the ledger without norms
    first. Other interactions may be mistakes, such as a broadcast, which such a ledger would hide.
    """
    if FREEZE not in error.remedies:
        return error
    remedies = [f"to record norms, {error.remedies[0]}", *error.remedies[1:]]
    return SamplesInteractError(f"{error.finding} {WITHOUT_NORMS}", remedies)


def _batch_norm_name(graph: Graph, node: Node, paths: Mapping[int, str]) -> str:
    """Path of the layer of a node; `paths`: by the storage of the running mean."""
    mean = node._saved_running_mean
    path = None if mean is None else paths.get(storage_of(mean))
    return f"module {path!r}" if path is not None else _whereabouts(graph, node).strip(" ()") or "a function"


def refuse_sample_data(
    graph: Graph, operands: Iterable[tuple[Node, int]], side: set[Node], data: list[tuple[Node, Tensor]]
) -> None:
    """Raise SamplesInteractError for sample data below the cut; warn if they are integers, which may be positions."""
    for node, tensor in data:
        mixing = _mixing_node(graph, operands, side, node)
        mixture = f"{graph.operations[mixing]}{_whereabouts(graph, mixing)} mixes samples"
        entering = (
            f"of shape {tuple(tensor.shape)} enter below it ({graph.operations[node]}{_whereabouts(graph, node)})"
        )
        if tensor.is_floating_point() or tensor.is_complex():
            raise SamplesInteractError(
                f"{RULE}; found that {mixture}, and that sample data {entering}.",
                ("remove the operation that combines samples (a batch mean, in-batch negatives)", ALLOW),
            )
        warnings.warn(
            f"{mixture}, and integers {entering}: samples interact if these integers are sample data, "
            "and do not if they are positions or other constants. Run sw.check to find out.",
            SamplesMayInteractWarning,
            stacklevel=6,
        )


def may_refuse(data: Iterable[tuple[Node, Tensor]]) -> bool:
    """True if `refuse_sample_data` raises an error for some of these data."""
    return any(tensor.is_floating_point() or tensor.is_complex() for _, tensor in data)


DIFFERENCES = {"Sub", "Rsub", "Add"}
CRITERIA = {"MseLoss", "SmoothL1Loss", "HuberLoss"}


def refuse_broadcast(graph: Graph) -> None:
    """Raise SamplesInteractError if a prediction (B, 1) or (B,) and a target (B,) or (B, 1) without gradient were
    broadcast to (B, B): each loss then depends on the targets of all samples. Autograd does not keep the shape of a
    target, so that its values decide: they repeat in each row, or in each column.
    """
    square = (graph.samples, graph.samples)
    for at in graph.reach.nodes if graph.samples > 1 else ():
        name = graph.structure.operations[at]
        if name not in DIFFERENCES | CRITERIA or graph.sizes.shapes[at, 0] != square:
            continue
        node = graph.nodes[at]
        operands = [child for child in graph.children[node] if child[0] is not None]
        has_target = len(operands) == 1 and len(graph.children[node]) == 2
        entry = Edge(*operands[0])
        if graph.operations[entry.node] == "Expand":
            entry = Edge(*graph.children[entry.node][0])
        if not has_target or entry.shape not in ((graph.samples, 1), (graph.samples,)):
            continue
        users = [node] if name in CRITERIA else [user for user, _ in graph.consumers[node]]
        reader = SavedTensorReader({user: saved_tensor_names(user) for user in users})
        saved = _tensors(value for user in users for value in reader.take(user).values())
        if any(_is_broadcast(values.detach()) for values in saved if tuple(values.shape) == square):
            raise SamplesInteractError(
                f"{RULE}; found a broadcast. {broadcast_cause(name, graph.samples)}",
                (f"if it is intended, write prediction.repeat(1, {graph.samples})", ALLOW),
            )


def _is_broadcast(values: Tensor) -> bool:
    """True if rows (or columns) of the values (B, B) differ by constants only, and are not constant themselves: so do
    differences of all pairs of a prediction and a target, and the targets themselves.
    """
    if not values.is_floating_point() or is_traced(values) or not is_plain(values):
        return False
    values = values.double()
    steps = values - values[:, :1]
    rounding = 1e-6 * values.abs().max()
    return bool(((steps - steps[:1]).abs() <= rounding).all() and (steps.abs() > rounding).any())


class Constants:
    """Parameters and buffers of the model, which are not sample data when they enter below the cut. They are listed
    when they are first needed.
    """

    def __init__(self, tensors: Iterable[Tensor]):
        self._source = tensors

    @cached_property
    def _tensors(self) -> list[Tensor]:
        return list(self._source)

    @cached_property
    def _storages(self) -> set[int]:
        return {storage_of(tensor) for tensor in self._tensors}

    @cached_property
    def frozen_storages(self) -> set[int]:
        """Storages of parameters that are not trained, and of buffers."""
        return {storage_of(tensor) for tensor in self._tensors if not tensor.requires_grad}

    def __contains__(self, tensor: Tensor) -> bool:
        """True for a view or an equal copy of one of the tensors. spectral_norm copies its vectors."""
        if storage_of(tensor) in self._storages:
            return True
        return any(_is_copy(tensor, constant) for constant in self._tensors)


def _is_copy(tensor: Tensor, constant: Tensor) -> bool:
    if (constant.shape, constant.dtype, constant.device) != (tensor.shape, tensor.dtype, tensor.device):
        return False
    if not (is_plain(constant) and is_plain(tensor)) or is_traced(tensor) or is_traced(constant):
        return False
    # A parameter of a sharded model has no values while it is not gathered.
    has_values = constant.numel() == 0 or constant.untyped_storage().nbytes() > 0
    return has_values and torch.equal(constant, tensor)


def data_entries(graph: Graph, side: set[Node]) -> list[int]:
    """Positions of the nodes below the cut through which tensors without gradient may enter.

    These are nodes with saved tensors and leaves that are not wanted. The list depends only on the graph structure.
    """
    below = graph.below(side) if side else []
    entries = [node for node in below if _operand_names(node)]
    entries += [node for node in below if is_accumulate_grad(node) and node not in graph.leaves]
    return [graph.index[node] for node in entries]


def sample_data(graph: Graph, entries: Iterable[int], constants: Constants) -> Iterator[tuple[Node, Tensor]]:
    """Yield (node, tensor) for tensors at the `entries` without gradient, not in `constants`, with a row per sample."""
    nodes = [graph.nodes[entry] for entry in entries]
    reader = SavedTensorReader({node: names for node in nodes if (names := _operand_names(node))})
    for node in nodes:
        if is_accumulate_grad(node):
            if _may_be_data(node.variable.detach(), graph.row_counts, constants):
                yield node, node.variable
            continue
        # If every operand requires a gradient, a saved float tensor without one was computed from these operands.
        open_ended = any(child is None for child, _ in graph.children[node])
        with _unsharded_below(graph, node):  # for nodes under activation checkpointing, which recompute their tensors
            saved = reader.take(node)
        operands = [with_base(node, name, value) for name, value in saved.items()]
        # The forward of a Python function may store tensors as attributes of `ctx`.
        attributes = vars(node).values() if is_python_function(node) else ()
        for tensor in _tensors([*operands, *attributes]):
            if (open_ended or not tensor.is_floating_point()) and _may_be_data(tensor, graph.row_counts, constants):
                yield node, tensor


def with_frozen_weights(graph: Graph, positions: Iterable[int], constants: Constants) -> Iterator[int]:
    """Positions of the Python functions of one activation that keep a frozen tensor of the model, such as quantized
    layers. They may keep it in an object that describes the quantization.
    """
    nodes = {at: graph.nodes[at] for at in positions if is_python_function(graph.nodes[at])}
    reader = SavedTensorReader(dict.fromkeys(nodes.values(), ("tensors",)))
    for at, node in nodes.items():
        attributes = list(vars(node).values())
        inner = [value for state in attributes if hasattr(state, "__dict__") for value in vars(state).values()]
        tensors = _tensors([*reader.take(node).values(), *attributes, *inner])
        is_unary = sum(operand is not None for operand in graph.reach.operands[at]) == 1
        if is_unary and any(storage_of(tensor) in constants.frozen_storages for tensor in tensors):
            yield at


def _unsharded_below(graph: Graph, node: Node) -> AbstractContextManager[None]:
    if not graph.sharded:
        return nullcontext()
    return unsharded([leaf.variable for leaf in graph.below([node]) if leaf in graph.leaves])


def _operand_names(node: Node) -> tuple[str, ...]:
    return tuple(name for name in saved_tensor_names(node) if not name.startswith("result"))


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    for value in values:
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, Tensor):
                yield item


def storage_of(tensor: Tensor) -> int:
    """Identity of the tensor's storage, equal for all views of it. Works for traced tensors, too."""
    return stored_values(tensor).untyped_storage()._cdata


def _may_be_data(tensor: Tensor, row_counts: Collection[int], constants: Constants) -> bool:
    if tensor.requires_grad or tensor.dtype is torch.bool or tensor.dim() == 0:
        return False
    # A slice of sample data is recognized by the shape of its base tensor.
    shapes = [t.shape for t in (tensor, tensor._base) if t is not None]
    has_row_per_sample = any(size in row_counts for shape in shapes for size in (shape[:-1] or shape))
    return has_row_per_sample and tensor not in constants


def _mixing_node(graph: Graph, operands: Iterable[tuple[Node, int]], side: set[Node], data: Node) -> Node:
    """First operation above `data` that combines samples: a reduction just below the cut, or else the cut's node."""
    for node, position in operands:
        child = graph.children[node][position][0]
        if child in side and data in graph.below([child]):
            return child if graph.operations[child] in REDUCTIONS | BATCH_NORMS else node
    return data


def _whereabouts(graph: Graph, node: Node) -> str:
    """Location of an operation for messages, from the nearest parameter: the graph does not record modules."""
    names = [graph.leaves[child] for child, _ in graph.children[node] if child in graph.leaves]
    if names:
        return f" (module {names[0].rpartition('.')[0]!r})"
    below = set(graph.below([node]))
    named = [name for leaf, name in graph.leaves.items() if leaf in below]
    return f" (downstream of parameter {named[0]!r})" if named else ""
