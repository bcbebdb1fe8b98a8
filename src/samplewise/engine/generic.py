"""Representations for operations without a rule: the operation's own backward, called once per sample.

GenericGrad      gradient of one operand: calls the node's backward with the output gradient of one sample at a time
PulledBackGrad   per-sample gradients of an operand, pulled back to a parameter through further operations by autograd
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from samplewise.engine.backward import pull_back
from samplewise.engine.grads import by_rows
from samplewise.engine.grads.base import PerSampleGrad, RowwiseGrad
from samplewise.engine.graph import Edge, EdgeKey, Node, is_python_function, numel, operation
from samplewise.engine.rules.use import Use, accumulable
from samplewise.engine.saved import block_of, run_in_backward


class GenericGrad(RowwiseGrad):
    """Per-sample gradients of one operand from one call of the node's backward per sample."""

    def __init__(self, use: Use, differentiable: bool):
        self.samples = use.samples
        self.shape = use.shape
        self.use = use
        self.differentiable = differentiable

    def rows(self, start: int, stop: int) -> Tensor:
        return torch.stack([self._call(self._only(b)) for b in range(start, stop)])

    def sum(self, weights: Tensor | None) -> Tensor:
        if weights is None:
            return self._call(self.use.gradients)
        return by_rows.sum(self, weights)

    def _only(self, sample: int) -> dict[int, Tensor]:
        return {slot: self.use.tags[slot].only(g, sample) for slot, g in self.use.gradients.items()}

    def _call(self, gradients: dict[int, Tensor]) -> Tensor:
        with torch.set_grad_enabled(self.differentiable):
            result = call(self.use.node, gradients)[self.use.operand]
        return _as_gradient(result, self.use)

    def describe(self) -> str:
        return "one sample at a time"


def call(node: Node, gradients: dict[int, Tensor]) -> tuple[Tensor | None, ...]:
    """Call the node's backward on output gradients (by output slot) and return the gradients of its operands.

    Inside a backward pass a node computes only the gradients that this pass needs, and a tensor recomputed by an
    activation checkpoint can be read only once per pass. In both cases the call runs in a separate backward pass.
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
    if is_python_function(node):  # expects zeros where a C++ node takes None
        return _as_tuple(node.apply(*(gradients[s] if s in gradients else Edge(node, s).zeros() for s in slots)))
    return _as_tuple(node(*(gradients.get(s) for s in slots)))


def _as_tuple(result: Tensor | tuple[Tensor | None, ...] | None) -> tuple[Tensor | None, ...]:
    return result if isinstance(result, tuple) else (result,)


def _as_gradient(result: Tensor | None, use: Use) -> Tensor:
    """Convert a result as the autograd engine does: None to zeros, sparse to dense, broadcast dims summed."""
    if result is None:
        return accumulable(use.entry.zeros())
    result = result.to_dense() if result.layout is not torch.strided else result
    if result.is_complex() and not use.entry.dtype.is_complex:
        result = result.real
    return accumulable(result.sum_to_size(use.shape))


class Pullback:
    """Pull the gradients of one operand back to all parameters below it with autograd.

    The last rows and sums are cached, so that all parameters share the backward passes.
    """

    def __init__(self, source: PerSampleGrad, entry: Edge, key: EdgeKey, leaves: Sequence[Edge], differentiable: bool):
        self.source = source
        self.entry = entry
        self.key = key  # of the entry, equal in all graphs of one structure
        self.leaves = leaves
        self.differentiable = differentiable
        self._rows: list[Tensor] = []  # of the last samples
        self._key: object = None  # these samples, and the versions of their rows, which the caller may change
        self._sums: dict[int, Tensor] = {}  # by parameter, those that were not returned yet
        self._weights: Tensor | None = None  # of these sums

    @cached_property
    def width(self) -> int:
        """Number of elements of all parameters."""
        return sum(numel(leaf.shape) for leaf in self.leaves)

    def rows(self, start: int, stop: int) -> list[Tensor]:
        """Rows (stop - start, *shape) of each parameter."""
        if self._key != (start, stop, self._versions()):
            self._rows = self._make_rows(self.source.rows(start, stop))
            self._key = (start, stop, self._versions())
        return self._rows

    def _versions(self) -> list[int]:
        return [0 if rows.is_inference() else rows._version for rows in self._rows]

    def sum(self, number: int, weights: Tensor | None) -> Tensor:
        """Weighted sum over samples of one parameter. Those of the others are computed with it."""
        if self._weights is not weights or number not in self._sums:
            self._sums = dict(enumerate(self._pull_back(self.source.sum(weights))))
            self._weights = weights
        return self._sums.pop(number)

    def _make_rows(self, rows: Tensor) -> list[Tensor]:
        if self.source.width >= len(rows) or rows.is_complex():
            return _stacked([self._pull_back(row) for row in rows])
        # The operand has fewer elements than there are samples, as for a regularizer: one pass per element.
        unit = torch.eye(self.source.width, dtype=rows.dtype, device=rows.device)
        jacobians = _stacked([self._pull_back(u.view(self.source.shape)) for u in unit])
        return [torch.tensordot(rows.reshape(len(rows), -1), jacobian, 1) for jacobian in jacobians]

    def _pull_back(self, gradient: Tensor) -> list[Tensor]:
        return [accumulable(g) for g in pull_back(gradient, self.entry, self.leaves, self.differentiable)]


def _stacked(rows: list[list[Tensor]]) -> list[Tensor]:
    return [torch.stack(of_leaf) for of_leaf in zip(*rows, strict=True)]


class PulledBackGrad(RowwiseGrad):
    """Per-sample gradients of one parameter from a `Pullback`."""

    def __init__(self, pullback: Pullback, number: int):
        self.samples = pullback.source.samples
        self.shape = pullback.leaves[number].shape
        self.row_size = max(pullback.source.row_size, pullback.width)
        self.pullback = pullback
        self.number = number

    def rows(self, start: int, stop: int) -> Tensor:
        return self.pullback.rows(start, stop)[self.number]

    def sum(self, weights: Tensor | None) -> Tensor:
        return self.pullback.sum(self.number, weights)

    def describe(self) -> str:
        return f"{self.pullback.source.describe()}, through {operation(self.pullback.entry.node)}"
