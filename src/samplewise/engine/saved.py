"""Read what the nodes of the graph saved for their backward, activation checkpointing included.

A checkpointed block keeps a placeholder for each tensor and recomputes the whole block at the first read. Outside of a
backward pass every single read would recompute it, and within the pass that needs the tensor the read would use it up.
So all tensors of checkpointed blocks are read inside one small backward pass of their own: one recomputation a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import _Holder

from samplewise.engine.graph import MODIFIED, Node, is_python_function
from samplewise.errors import GraphError

Saved = dict[str, Any]


_names: dict[type, tuple[str, ...]] = {}


def saved_tensor_names(node: Node) -> tuple[str, ...]:
    """Names of the tensors that this kind of node saves. A Python function has all of them under "tensors"."""
    kind = type(node)
    if kind not in _names:
        if is_python_function(node):
            return ("tensors",)
        raw = [name for name in dir(kind) if name.startswith("_raw_saved_")]
        _names[kind] = tuple(name.removeprefix("_raw_saved_") for name in raw)
    return _names[kind]


def block_of(node: Node) -> Any:
    """What identifies the checkpointed block the node is in; None outside of checkpoints."""
    for name in saved_tensor_names(node):
        raw = getattr(node, "_raw_saved_" + name)
        for one in raw if isinstance(raw, (tuple, list)) else (raw,):
            packed = _packed(one)
            if packed is not None:  # within a block all are placeholders, outside none
                return one.unpack_hook if isinstance(packed, _Holder) else None
    return None


def _packed(raw: Any) -> Any:
    try:
        return raw.data
    except RuntimeError:  # nothing is packed: an ordinary saved tensor, or one already freed
        return None


class Versions:
    """Version counters of tensors, to notice what is modified in place while it is still needed.

    Changes that autograd does not count either go unnoticed: through `.data`, NumPy or shared memory.
    """

    def __init__(self) -> None:
        self._remembered: list[tuple[Tensor, int]] = []

    def remember(self, values: Iterable[Any]) -> None:
        for value in values:
            for tensor in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(tensor, Tensor) and not tensor.is_inference():
                    self._remembered.append((tensor, tensor._version))

    def check(self) -> None:
        if any(tensor._version != version for tensor, version in self._remembered):
            raise GraphError(MODIFIED)


class Reader:
    """The wanted saved tensors of nodes; a checkpointed block is recomputed once, when its first node is asked for."""

    def __init__(self, wishes: Iterable[tuple[Node, tuple[str, ...]]]):
        self.wishes = dict(wishes)
        self.blocks: dict[Any, list[Node]] = {}
        self.block = {node: block_of(node) for node in self.wishes}
        for node, block in self.block.items():
            if block is not None:
                self.blocks.setdefault(block, []).append(node)
        self.kept: dict[Node, Saved] = {}

    def take(self, node: Node) -> Saved:
        block = self.block.get(node)
        if block is None:
            return _read_one(node, self.wishes[node])
        if node not in self.kept:
            self._recompute(block)
        return self.kept.pop(node)

    def _recompute(self, block: Any) -> None:
        def action() -> None:
            self.kept.update((node, _read_one(node, self.wishes[node])) for node in self.blocks[block])
            _forget(block)

        run_in_backward(action)


def _forget(block: Any) -> None:
    """A block keeps what it recomputed until each tensor is read once. We read a few: let go of the others."""
    frame = next((c.cell_contents for c in block.__closure__ or () if hasattr(c.cell_contents, "recomputed")), None)
    task = torch._C._current_graph_task_id()
    for reference in getattr(frame, "weak_holders", ()):
        holder = reference()
        if holder is not None:
            holder.handles.pop(task, None)


def _read_one(node: Node, names: tuple[str, ...]) -> Saved:
    python = is_python_function(node)
    return {name: getattr(node, "saved_tensors" if python else "_saved_" + name) for name in names}


class _InBackward(torch.autograd.Function):
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
    """Run `action` inside a backward pass made for it alone."""
    with torch.enable_grad():
        carrier = _InBackward.apply(torch.zeros((), requires_grad=True), action)
    carrier.backward()
