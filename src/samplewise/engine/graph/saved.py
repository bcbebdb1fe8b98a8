"""Access to tensors that graph nodes saved for backward, including blocks under activation checkpointing; errors about
saved tensors that were freed or modified in place.

A checkpointed block keeps a placeholder for each tensor and recomputes the whole block at the first read. Inside the
backward pass that needs the tensor, a read consumes it; outside a backward pass each read would recompute the block
again. Therefore all needed tensors of a checkpointed block are read together: inside a pass they are then put back for
the pass, so that the block is recomputed once for both; otherwise they are read in a small separate backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import _Handle, _Holder

from samplewise.core.memory import HeldTensor
from samplewise.engine.graph.graph import Node, is_python_function
from samplewise.errors import GraphError

Saved = dict[str, Any]

# False in torch 2.8 and 2.9. Any node may then be in a checkpointed block, so each node is treated as a block of its
# own: a checkpointed block is recomputed once for each of its nodes that is read, which takes more time and memory.
HOOKS_ARE_VISIBLE = hasattr(torch._C._autograd.SavedTensor, "unpack_hook")

_names: dict[type, tuple[str, ...]] = {}


def saved_tensor_names(node: Node) -> tuple[str, ...]:
    """Names of the saved tensors of a node; for a Python function, the single name "tensors"."""
    kind = type(node)
    if kind not in _names:
        if is_python_function(node):
            return ("tensors",)
        raw = [name for name in dir(kind) if name.startswith("_raw_saved_")]
        _names[kind] = tuple(name.removeprefix("_raw_saved_") for name in raw)
    return _names[kind]


def block_of(node: Node) -> Any:
    """Identity of the checkpointed block that contains the node; None outside of activation checkpoints."""
    if not HOOKS_ARE_VISIBLE:
        return node
    for name in saved_tensor_names(node):
        raw = getattr(node, "_raw_saved_" + name)
        for saved in raw if isinstance(raw, (tuple, list)) else (raw,):
            packed = _packed_value(saved)
            if packed is not None:  # in a block all saved tensors are placeholders, outside none are
                return saved.unpack_hook if isinstance(packed, _Holder) else None
    return None


def with_base(node: Node, name: str, value: Any) -> Any:
    """The value of a saved tensor; if hooks of `core.memory` hold a view, the view itself, which has its base."""
    if not HOOKS_ARE_VISIBLE or is_python_function(node):
        return value
    packed = _packed_value(getattr(node, "_raw_saved_" + name))
    return packed.tensor if isinstance(packed, HeldTensor) else value


def _packed_value(raw: Any) -> Any:
    try:
        return raw.data
    except (RuntimeError, AttributeError):  # not packed: an ordinary or freed saved tensor; a list of saved tensors
        return None


MODIFIED = (
    "tensors saved for backward must not change before the last use of the per-sample gradients; found one modified in "
    "place after the forward pass: a parameter, for example by optimizer.step(), or an input. Compute all quantities "
    "before the step and before an input or index buffer is refilled, or compute the losses again."
)


@contextmanager
def graph_alive() -> Iterator[None]:
    """Convert autograd's errors about a freed graph or a saved tensor modified in place to GraphError."""
    try:
        yield
    except RuntimeError as error:
        raise_graph_error(error)
        raise


def raise_graph_error(error: RuntimeError) -> None:
    """Raise GraphError if `error` is autograd's error about a freed graph or a saved tensor modified in place."""
    if "modified by an inplace operation" in str(error):
        raise GraphError(MODIFIED) from error
    if "donated buffer" in str(error):
        raise GraphError(
            "the backward of a compiled function must be repeatable; found one that overwrites saved tensors, in a "
            "checkpointed block. Set torch._functorch.config.donated_buffer = False before it is compiled."
        ) from error
    if "second time" in str(error) or "already been freed" in str(error):
        raise GraphError(
            "the graph of the losses must still hold its saved tensors; found that it was freed. "
            "Compute quantities before losses.backward(), or call backward(retain_graph=True)."
        ) from error


class Versions:
    """Version counters of tensors, to detect in-place modification while the tensors are still needed.

    Changes through `.data`, NumPy or shared memory do not increase the counter and are not detected.
    """

    def __init__(self) -> None:
        self._versions: list[tuple[Tensor, int]] = []

    def record(self, values: Iterable[Any]) -> None:
        """Record the counters of tensors, and of tensors in tuples and lists; other values are ignored."""
        for value in values:
            for tensor in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(tensor, Tensor) and not tensor.is_inference():
                    self._versions.append((tensor, tensor._version))

    def check(self, message: str = MODIFIED) -> None:
        for tensor, version in self._versions:
            if tensor._version != version:
                raise GraphError(message)


class SavedTensorReader:
    """Reader of saved tensors of given nodes. A checkpointed block is recomputed once, when its first node is read.

    `names`: names of the saved tensors to read, by node. `shared`: a backward pass through these nodes that calls
    `take` before it runs the node uses what was recomputed, too.
    """

    def __init__(self, names: Mapping[Node, tuple[str, ...]], shared: bool = False):
        self._names = names
        self._shared = shared and HOOKS_ARE_VISIBLE
        self._block_of: dict[Node, Any] = {}  # only of nodes in checkpointed blocks
        self._nodes: dict[Any, list[Node]] = {}  # by block
        self._recomputed: dict[Node, Saved] = {}
        self.sparse: set[Node] = set()  # nodes with a tensor that is not strided, of those that were read
        for node in hooked_nodes(names):
            block = block_of(node)
            if block is not None:
                self._block_of[node] = block
                self._nodes.setdefault(block, []).append(node)
        self.recomputes = bool(self._block_of)  # some of the nodes are in checkpointed blocks

    def take(self, node: Node) -> Saved:
        """Return the saved tensors of a node by name. In a checkpointed block they are then released."""
        if node not in self._block_of:
            return self._read(node)
        if node not in self._recomputed:
            self._recompute(self._block_of[node])
        return self._recomputed.pop(node)

    def _read(self, node: Node) -> Saved:
        prefix = "" if isinstance(node, BackwardCFunction) else "_"
        saved = {}
        for name in self._names[node]:
            value = saved[name] = getattr(node, f"{prefix}saved_{name}")
            if isinstance(value, Tensor) and value.layout is not torch.strided:
                self.sparse.add(node)
        return saved

    def _recompute(self, block: Any) -> None:
        task = torch._C._current_graph_task_id()
        if self._shared and task >= 0 and self._read_in_pass(block, task):
            return

        def read_block() -> None:
            for node in self._nodes[block]:
                self._recomputed[node] = self._read(node)
            # Release the tensors that were not read: the block would keep each until it is read once.
            inner_task = torch._C._current_graph_task_id()
            for reference in getattr(_frame_of(block), "weak_holders", ()):
                holder = reference()
                if holder is not None:
                    holder.handles.pop(inner_task, None)

        run_in_backward(read_block)

    def _read_in_pass(self, block: Any, task: int) -> bool:
        """Read the tensors of a block in the current backward pass, and put them back for the pass. False if the pass
        has already consumed one of them, or if they cannot be put back.
        """
        frame = _frame_of(block)
        placeholders: dict[Node, list[Any]] = {}  # that the checkpoint keeps for the tensors to read
        for node in self._nodes[block]:
            raw = _flat(getattr(node, "_raw_saved_" + name) for name in self._names[node])
            placeholders[node] = [_packed_value(saved) for saved in raw]
        holders = [holder for of_node in placeholders.values() for holder in of_node]
        if frame is None or not all(isinstance(holder, _Holder) for holder in holders):  # None: a tensor kept itself
            return False
        if any(holder.handles.get(task, frame) is None for holder in holders):
            return False
        for node, holders in placeholders.items():
            with torch.enable_grad():
                self._recomputed[node] = saved = self._read(node)
            for holder, tensor in zip(holders, _flat(saved.values()), strict=True):
                holder.handles[task] = _Handle()
                frame.recomputed[task][holder.handles[task]] = tensor.detach()
        return True


def free_saved(nodes: Iterable[Node], message: str) -> None:
    """Free the saved tensors of these nodes, as a backward pass without retain_graph does. A later read, also one by
    autograd, raises GraphError with the message.

    Autograd frees saved tensors only in a pass. Here a pack hook replaces each by None, and its unpack hook raises.
    Tensors in hooks of the caller, such as torch.autograd.graph.save_on_cpu, stay until the graph is deleted.
    """

    def refuse(*unused: object) -> Tensor:
        raise GraphError(message)

    for node in nodes:
        for name in saved_tensor_names(node):
            try:
                saved = _flat([getattr(node, "_raw_saved_" + name)])
            except RuntimeError:  # freed already
                continue
            for raw in saved:
                if not HOOKS_ARE_VISIBLE or raw.unpack_hook is None:
                    with suppress(RuntimeError):  # None, or freed already
                        raw.register_hooks(_drop, refuse)
                elif isinstance(raw.data, HeldTensor):
                    raw.data.free()
                elif isinstance(raw.data, _Holder):
                    frame = _frame_of(raw.unpack_hook)
                    frame.saved_args = []
                    frame.recompute_fn = refuse


def _drop(tensor: Tensor) -> None:
    """Pack hook that keeps nothing."""


def hooked_nodes(names: Mapping[Node, tuple[str, ...]]) -> list[Node]:
    """Nodes with a saved tensor that was packed by a hook, as in activation checkpoints: one of the given names, or any
    of a node without names. All nodes if torch does not show hooks.
    """
    if not HOOKS_ARE_VISIBLE:
        return list(names)
    hooked = []
    for node, of_node in names.items():
        for name in of_node or saved_tensor_names(node):
            raw = getattr(node, "_raw_saved_" + name)
            if isinstance(raw, (tuple, list)):
                packed = any(saved.unpack_hook is not None for saved in raw)
            else:
                packed = raw.unpack_hook is not None
            if packed:
                hooked.append(node)
                break
    return hooked


def _flat(values: Iterable[Any]) -> list[Any]:
    return [item for value in values for item in (value if isinstance(value, (tuple, list)) else (value,))]


def _frame_of(block: Any) -> Any:
    """Torch's _CheckpointFrame of a block; None if it cannot be found."""
    cells = getattr(block, "__closure__", None) or ()
    return next((cell.cell_contents for cell in cells if hasattr(cell.cell_contents, "recomputed")), None)


class _InBackward(torch.autograd.Function):
    """Function whose backward calls `action`."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, action: Callable[[], None]) -> Tensor:
        ctx.action = action
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        with torch.enable_grad():
            ctx.action()
        return None, None


def run_in_backward(action: Callable[[], None]) -> None:
    """Run `action` inside a separate backward pass, with grad mode enabled."""
    with torch.enable_grad():
        carrier = _InBackward.apply(torch.zeros((), requires_grad=True), action)
    carrier.backward(retain_graph=True)
