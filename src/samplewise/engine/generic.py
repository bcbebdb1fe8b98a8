"""Forms that need no rule: the operation's own backward, called once for each sample.

Masked     the gradient of one operand of one operation, by handing the operation one sample's part at a time
Pushed     what a form becomes on its way through further operations down to the parameter
"""

from __future__ import annotations

import torch
from torch import Tensor

from samplewise.engine import rowwise
from samplewise.engine.forms import ByRows, Form
from samplewise.engine.graph import Edge, Node, operation
from samplewise.engine.rules.use import Use, accumulable
from samplewise.engine.saved import block_of, run_in_backward


class Masked(ByRows):
    def __init__(self, use: Use, differentiable: bool):
        super().__init__(use.samples, use.shape)
        self.use, self.differentiable = use, differentiable

    def rows(self, start: int, stop: int) -> Tensor:
        return torch.stack([self._call(self._only(b)) for b in range(start, stop)])

    def sum(self, weights: Tensor | None) -> Tensor:
        if weights is None:
            return self._call(self.use.gradients)
        return rowwise.sum(self, weights)

    def _only(self, sample: int) -> dict[int, Tensor]:
        return {slot: self.use.tags[slot].only(g, sample) for slot, g in self.use.gradients.items()}

    def _call(self, gradients: dict[int, Tensor]) -> Tensor:
        with torch.set_grad_enabled(self.differentiable):
            result = call(self.use.node, gradients)[self.use.operand]
        return _settle(result, self.use)

    def describe(self) -> str:
        return "one sample at a time"


def call(node: Node, gradients: dict[int, Tensor]) -> tuple[Tensor | None, ...]:
    """The node's backward on the given output gradients.

    Inside of a backward pass a node computes what that pass asks of it only, and what a checkpoint recomputes is used
    up by the pass that reads it: in both cases the call gets a pass of its own.
    """
    if block_of(node) is None and torch._C._current_graph_task_id() == -1:
        return _call_now(node, gradients)
    results: list[tuple[Tensor | None, ...]] = []
    grad_enabled = torch.is_grad_enabled()

    def action() -> None:
        with torch.set_grad_enabled(grad_enabled):
            results.append(_call_now(node, gradients))

    run_in_backward(action)
    return results[0]


def _call_now(node: Node, gradients: dict[int, Tensor]) -> tuple[Tensor | None, ...]:
    slots = range(len(node._input_metadata))
    if hasattr(node, "apply"):  # a Python autograd.Function expects zeros where a C++ node takes None
        return _as_tuple(node.apply(*(gradients[s] if s in gradients else Edge(node, s).zeros() for s in slots)))
    return _as_tuple(node(*(gradients.get(s) for s in slots)))


def _as_tuple(result: Tensor | tuple[Tensor | None, ...] | None) -> tuple[Tensor | None, ...]:
    return result if isinstance(result, tuple) else (result,)


def _settle(result: Tensor | None, use: Use) -> Tensor:
    """As the autograd engine does: no gradient is zeros, sparse becomes dense, broadcast dims are summed."""
    child = Edge(*use.node.next_functions[use.operand])
    if result is None:
        return accumulable(child.zeros())
    result = result.to_dense() if result.layout is not torch.strided else result
    if result.is_complex() and not child.dtype.is_complex:
        result = result.real
    return accumulable(result.sum_to_size(use.shape))


class Pushed(ByRows):
    """Row by row through the operations between `entry` and the parameter. Sums go through in one piece."""

    def __init__(self, source: Form, entry: Edge, leaf: Edge, differentiable: bool):
        super().__init__(source.samples, leaf.shape, source.row_size)
        self.source, self.entry, self.leaf, self.differentiable = source, entry, leaf, differentiable

    def rows(self, start: int, stop: int) -> Tensor:
        rows = self.source.rows(start, stop)
        if (
            self.source.width < len(rows) and not rows.is_complex()
        ):  # few numbers feed the parameter, as for a regulariser: one push for each
            unit = torch.eye(self.source.width, dtype=rows.dtype, device=rows.device)
            jacobian = torch.stack([self._push(u.view(self.source.shape)) for u in unit])
            return torch.tensordot(rows.reshape(len(rows), -1), jacobian, 1)
        return torch.stack([self._push(row) for row in rows])

    def sum(self, weights: Tensor | None) -> Tensor:
        return self._push(self.source.sum(weights))

    def _push(self, gradient: Tensor) -> Tensor:
        return push(gradient, self.entry, self.leaf, self.differentiable)

    def describe(self) -> str:
        return f"{self.source.describe()}, through {operation(self.entry.node)}"


def push(gradient: Tensor, entry: Edge, leaf: Edge, differentiable: bool) -> Tensor:
    """One gradient through the operations from `entry` to `leaf`."""
    found: tuple[Tensor | None, ...] = torch.autograd.grad(
        [entry.gradient_edge()],
        [leaf.gradient_edge()],
        [gradient.to(entry.dtype)],
        retain_graph=True,
        create_graph=differentiable,
        allow_unused=True,
    )
    (pushed,) = found
    if pushed is None:
        return accumulable(leaf.zeros())
    return accumulable(pushed.to_dense() if pushed.layout is not torch.strided else pushed)
