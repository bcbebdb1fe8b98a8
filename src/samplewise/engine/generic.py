"""Representations for operations without a rule: the operation's own backward, called for the gradient of each sample.

GenericGrad      gradient of one operand: calls the node's backward with the output gradient of one sample
PulledBackGrad   per-sample gradients of an operand, pulled back to a parameter through further operations by autograd

Both repeat a linear function for the gradients of many samples: in batches with torch.vmap, see `Repetition`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from samplewise.core.memory import is_out_of_memory
from samplewise.engine.backward import pull_back
from samplewise.engine.deferred_checks import is_traced
from samplewise.engine.grads.base import CHUNK, PerSampleGrad, RowwiseGrad
from samplewise.engine.graph.graph import Edge, EdgeKey, Graph, Node, is_python_function, numel, operation
from samplewise.engine.graph.saved import block_of, run_in_backward
from samplewise.engine.ownership.weighted_passes import is_additive, largest
from samplewise.engine.rules.rule_input import HALF_PRECISION, Use, accumulable, summed

FEW = 4  # torch.vmap takes longer than this number of calls
Verdicts = dict[object, bool]  # whether a faster computation gives the same values, for all graphs of one structure


class Repetition:
    """Calls of a linear function for many gradients: in one batch with torch.vmap, or one after the other.

    The first batch is compared with single calls for its two largest gradients. If they differ, or if torch.vmap does
    not support an operation, all later calls are single ones. `verdicts`: None if there must be no batches.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], verdicts: Verdicts | None, key: object):
        self.function = function
        self.verdicts = verdicts
        self.key = key

    def __call__(self, *gradients: Tensor) -> list[Tensor]:
        """Results (n, ...) for gradients (n, ...)."""
        verdict = False if self.verdicts is None else self.verdicts.get(self.key)
        if verdict is False or len(gradients[0]) < FEW or (verdict is None and is_traced(gradients[0])):
            return self._one_by_one(gradients)
        assert self.verdicts is not None
        if verdict is None:
            sizes = torch.stack([g.detach().reshape(len(g), -1).abs().amax(1).double() for g in gradients]).amax(0)
            samples = sizes.topk(2).indices
            if not sizes.any():  # zeros verify nothing, and one call is enough for them
                single = self._one_by_one([g[:1] for g in gradients])
                return [result.expand(len(sizes), *result.shape[1:]) for result in single]
        results = self._in_batch(gradients)
        if results is not None and verdict is None:
            expected = self._one_by_one([g[samples] for g in gradients])
            if not all(are_near(result[samples], single) for result, single in zip(results, expected, strict=True)):
                results = None
            elif bool(sizes[samples].all()):
                self.verdicts[self.key] = True
        if results is None:
            self.verdicts[self.key] = False
            return self._one_by_one(gradients)
        return results

    def _one_by_one(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        results = [self.function(*of_sample) for of_sample in zip(*gradients, strict=True)]
        return [torch.stack(of_all) for of_all in zip(*results, strict=True)]

    def _in_batch(self, gradients: Sequence[Tensor]) -> list[Tensor] | None:
        try:
            with _no_fallback_warnings():
                return list(torch.vmap(self.function)(*gradients))
        except Exception as error:  # the backward of an operation may do anything that torch.vmap does not support
            if is_out_of_memory(error):
                raise
            return None


def are_near(first: Tensor, second: Tensor) -> bool:
    """True if the values agree to half of their digits: rounding errors may differ, as algorithms depend on the size of
    a batch, but what is computed in a wrong way differs by as much as the values are large.
    """
    if first.shape != second.shape or first.dtype is not second.dtype:
        return False
    tolerance = torch.finfo(first.dtype).eps ** 0.5
    size = second.detach().abs().nan_to_num(0, 0, 0).max().item() if second.numel() else 0.0
    return torch.allclose(first, second, rtol=tolerance, atol=tolerance * size, equal_nan=True)


@contextmanager
def _no_fallback_warnings() -> Iterator[None]:
    """Context manager: torch.vmap does not warn of operations that it calls once per sample; so would the caller."""
    set_enabled = torch._C._functorch._set_vmap_fallback_warning_enabled  # type: ignore[attr-defined]
    set_enabled(False)
    try:
        yield
    finally:
        set_enabled(True)


def supports_batches(node: Node) -> bool:
    """True if the backward of a node may get the tensors of torch.vmap. A Python Function has to declare it, because
    its backward may store the gradients that it gets.
    """
    if not is_python_function(node):
        return True
    function = type(node)._forward_cls
    return bool(function.generate_vmap_rule) or function.vmap is not torch.autograd.Function.vmap


class GenericGrad(RowwiseGrad):
    """Per-sample gradients of one operand from calls of the node's backward with the output gradient of each sample."""

    def __init__(self, use: Use, differentiable: bool, verdicts: Verdicts | None, key: object):
        self.samples = use.samples
        self.shape = use.shape
        self.use = use
        self.differentiable = differentiable
        self.verdicts = verdicts if supports_batches(use.node) else None
        self.key = (key, differentiable)
        # In a batch there are gradients of all outputs and of all operands for each sample.
        operands = [Edge(*child) for child in use.node.next_functions if child[0] is not None]
        self.row_size = sum(numel(o.shape) for o in operands) + sum(g.numel() for g in use.gradients.values())

    def rows(self, start: int, stop: int) -> Tensor:
        slots = list(self.use.gradients)
        repetition = Repetition(lambda *g: (self._call(dict(zip(slots, g, strict=True))),), self.verdicts, self.key)
        parts: list[Tensor] = []
        for at in range(start, stop, self.step):
            samples = range(at, min(at + self.step, stop))
            parts += repetition(
                *(self.use.owner_maps[slot].split_samples(g, samples) for slot, g in self.use.gradients.items())
            )
        return accumulable(torch.cat(parts) if len(parts) > 1 else parts[0])

    def sum(self, weights: Tensor | None) -> Tensor:
        if weights is None:
            return accumulable(self._call(self.use.gradients))
        if any(g.dtype in HALF_PRECISION for g in self.use.gradients.values()):
            return self.sum_of_rows(weights)  # weighted gradients would be rounded to half precision
        return self._call(self._weighted_gradients(weights))

    def summed_apart(self, weights: Tensor | None) -> Tensor:
        return self.sum_of_rows(weights)  # the operation may cancel what is large in the output's gradient

    def is_linear(self, graph: Graph, weights: Tensor) -> bool:
        """True if the node's backward is linear: compared for all samples, and for samples with these weights (b,)."""
        first = self.use.gradients
        second = self._weighted_gradients(weights)
        total = {slot: g + second[slot] for slot, g in first.items()}
        a, b, c = (accumulable(self._call(gradients)) for gradients in (first, second, total))
        return is_additive(graph, a, b, c, largest(total.values()))

    def broadcast(self) -> PerSampleGrad | None:
        """The same gradients, if the operation is elementwise and has broadcast the operand: its backward then returns
        a gradient in the shape of the output, which autograd sums. None for other operations.
        """
        use = self.use
        key = ("broadcast", self.key)
        if self.verdicts is None or self.verdicts.get(key) is False or len(use.node._input_metadata) > 1:
            return None
        if key not in self.verdicts and is_traced(use.gradient):
            return None
        with torch.set_grad_enabled(self.differentiable):
            values = call(use.node, use.gradients)[use.operand]
        grad = None
        if values is not None and values.shape == use.gradient.shape and values.shape != use.shape:
            grad = summed(use, accumulable(values))
        if grad is not None and key not in self.verdicts:
            sizes = grad.norms().detach()
            first, second = sizes.topk(2).indices.tolist()
            if not all(are_near(grad.rows(b, b + 1), self.rows(b, b + 1)) for b in (first, second)):
                grad = None
            elif bool(sizes[second] > 0):
                self.verdicts[key] = True
        if grad is None:
            self.verdicts[key] = False
        return grad

    def _weighted_gradients(self, weights: Tensor) -> dict[int, Tensor]:
        return {slot: self.use.owner_maps[slot].apply_weights(g, weights) for slot, g in self.use.gradients.items()}

    def _call(self, gradients: dict[int, Tensor]) -> Tensor:
        with torch.set_grad_enabled(self.differentiable):
            result = call(self.use.node, gradients)[self.use.operand]
        return self.use.entry.zeros() if result is None else as_gradient(result, self.use.entry)

    def describe(self) -> str:
        return "no rule"


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
        results = _as_tuple(node.apply(*(gradients[s] if s in gradients else Edge(node, s).zeros() for s in slots)))
        # It returns a gradient for each argument; only those that are tensors are operands of the node.
        of_tensors = iter([result for result, needed in zip(results, node.needs_input_grad, strict=False) if needed])
        return tuple(None if child is None else next(of_tensors, None) for child, _ in node.next_functions)
    return _as_tuple(node(*(gradients.get(s) for s in slots)))


def _as_tuple(result: Tensor | tuple[Tensor | None, ...] | None) -> tuple[Tensor | None, ...]:
    return result if isinstance(result, tuple) else (result,)


def as_gradient(result: Tensor, edge: Edge) -> Tensor:
    """Convert a gradient that a node has returned as the autograd engine does: sparse to dense, the real part for a
    real edge, broadcast dims summed.
    """
    result = result.to_dense() if result.layout is not torch.strided else result
    if result.is_complex() and not edge.dtype.is_complex:
        result = result.real
    return result.sum_to_size(edge.shape)


class Pullback:
    """Pull the gradients of one operand back to all parameters below it with autograd.

    The last rows and sums are cached, so that all parameters share the backward passes.
    """

    def __init__(
        self,
        source: PerSampleGrad,
        entry: Edge,
        key: EdgeKey,
        leaves: Sequence[Edge],
        differentiable: bool,
        verdicts: Verdicts | None,
        closed: Mapping[int, PerSampleGrad],
    ):
        self.source = source
        self.entry = entry
        self.key = key  # of the entry, equal in all graphs of one structure
        self.leaves = leaves
        self.differentiable = differentiable
        self.width = sum(numel(leaf.shape) for leaf in leaves)  # number of elements of all parameters
        self.row_size = max(source.row_size, self.width)
        self._repetition = Repetition(self._pull_back, verdicts, (key, differentiable))
        self._rows: list[Tensor] = []  # of the last samples
        self._versions: list[int] = []  # of these rows, which the caller may change
        self._samples = (0, 0)
        self._closed = closed  # representations of parameters that need no pass, by number
        self._sums: dict[int, Tensor] = {}  # by parameter, those that were not returned yet
        self._weights: Tensor | None = None  # of these sums

    def grad(self, number: int) -> PerSampleGrad:
        """Representation of one parameter."""
        return self._closed[number] if number in self._closed else PulledBackGrad(self, number)

    def rows(self, number: int, start: int, stop: int) -> Tensor:
        """Rows (stop - start, *shape) of one parameter. Those of the others are computed with it."""
        if self._samples != (start, stop) or self._versions[number] != _version(self._rows[number]):
            step = max(1, CHUNK // max(self.row_size, 1))
            parts = [self._make_rows(self.source.rows(at, min(at + step, stop))) for at in range(start, stop, step)]
            self._rows = parts[0] if len(parts) == 1 else [torch.cat(of_leaf) for of_leaf in zip(*parts, strict=True)]
            self._versions = list(map(_version, self._rows))
            self._samples = (start, stop)
        return self._rows[number]

    def is_linear(self, graph: Graph, weights: Tensor) -> bool:
        """True if this is linear: compared for the sum over samples, and for the sum with these weights (b,)."""
        first = self.source.sum(None)
        second = self.source.sum(weights)
        size = largest([first, second])
        pulled = zip(
            *([accumulable(g) for g in self._pull_back(x)] for x in (first, second, first + second)), strict=True
        )
        return all(is_additive(graph, a, b, total, size) for a, b, total in pulled)

    def sum(self, number: int, weights: Tensor | None) -> Tensor:
        """Weighted sum over samples of one parameter. Those of the others are computed with it."""
        if self._weights is not weights or number not in self._sums:
            self._sums = dict(enumerate(map(accumulable, self._pull_back(self.source.sum(weights)))))
            self._weights = weights
        return self._sums.pop(number)

    def _make_rows(self, rows: Tensor) -> list[Tensor]:
        if self.source.width >= len(rows) or rows.is_complex():
            return list(map(accumulable, self._repetition(rows)))
        # The operand has fewer elements than there are samples, as for a regularizer: one gradient per element.
        unit = torch.eye(self.source.width, dtype=rows.dtype, device=rows.device)
        jacobians = map(accumulable, self._repetition(unit.view(-1, *self.source.shape)))
        flat = rows.reshape(len(rows), -1)
        return [torch.tensordot(flat.to(jacobian.dtype), jacobian, 1) for jacobian in jacobians]  # may be complex

    def _pull_back(self, gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(pull_back(gradient, self.entry, self.leaves, self.differentiable))


def _version(rows: Tensor) -> int:
    return 0 if rows.is_inference() else rows._version


class PulledBackGrad(RowwiseGrad):
    """Per-sample gradients of one parameter from a `Pullback`."""

    def __init__(self, pullback: Pullback, number: int):
        self.samples = pullback.source.samples
        self.shape = pullback.leaves[number].shape
        self.row_size = pullback.row_size
        self.pullback = pullback
        self.number = number

    def rows(self, start: int, stop: int) -> Tensor:
        return self.pullback.rows(self.number, start, stop)

    def sum(self, weights: Tensor | None) -> Tensor:
        if weights is not None and self.pullback.entry.dtype in HALF_PRECISION:
            return self.sum_of_rows(weights)  # the sum would be rounded to half precision
        return self.pullback.sum(self.number, weights)

    def summed_apart(self, weights: Tensor | None) -> Tensor:
        return self.sum_of_rows(weights)  # the operations may cancel what is large in the source

    def describe(self) -> str:
        return f"{self.pullback.source.describe()}, through {operation(self.pullback.entry.node)}"
