"""Per-sample gradients of a Python function from calls of its backward with the rows of one sample alone.

A head that is fused with the loss (TRL, Liger, chunked cross-entropy) is one function of hidden states, weight and
labels, whose rows are tokens. Called with the gradient of one sample, its backward would compute zeros for the tokens
of all others. Here it gets the rows of that sample only, of the gradients and of all tensors that it has saved: the
calls for all samples together take as long as one call for the batch, and need no logits.

That a function treats rows independently is a claim. It is verified in the first graph of a structure, with calls for
the whole batch, and in each graph with rows of two samples, apart and together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from samplewise.core.memory import is_out_of_memory, stored_values
from samplewise.engine.generic import GenericGrad, Verdicts, are_near, as_gradient, call
from samplewise.engine.grads.base import PerSampleGrad
from samplewise.engine.grads.dense import DenseGrad
from samplewise.engine.grads.kernels import flat_squared_norms, flatten_rows
from samplewise.engine.graph.graph import Edge, Node, is_accumulate_grad, numel
from samplewise.engine.ownership.owner_map import OwnerMap
from samplewise.engine.rules.rule_input import accumulable

# Rows of up to this many elements are kept, so that a weighted sum needs no further call; of larger ones the norms.
KEPT = 2**26
LARGE = 2**17  # elements of a parameter whose gradient takes longer to compute than those of two rows
Rows = slice | Tensor  # of one or more samples
Results = dict[int, Tensor]  # gradients of operands, by position


class RowCalls:
    """Calls of the backward of a node with the rows of single samples.

    gradients, owner_maps: of its outputs, by slot. parameters, activations: positions of the operands whose gradients
    are needed; those of parameters are summed over rows, those of activations have the rows of the outputs.
    """

    def __init__(
        self,
        node: Node,
        gradients: Mapping[int, Tensor],
        owner_maps: Mapping[int, OwnerMap],
        parameters: Sequence[int],
        activations: Sequence[int],
        verdicts: Verdicts,
        key: object,
    ):
        self.node = node
        self.gradients = gradients
        self.owner_maps = owner_maps
        self.parameters = parameters
        self.activations = activations
        self.verdicts = verdicts
        self.key = ("rows", key)
        self._none_key = ("None", key)  # of the verdict whether the function takes None
        self.samples = next(iter(owner_maps.values())).samples
        self.operands: Results = {}  # gradients of the activations
        self.owner: Tensor  # sample of each row of the outputs
        self.rows: list[Rows]  # of each sample
        children = [child for child, _ in node.next_functions]
        # Tensors of parameters have no rows of samples, whatever their size.
        self._weights = {
            stored_values(child.variable).untyped_storage()._cdata
            for child in children
            if child is not None and is_accumulate_grad(child)
        }
        of_operands = [at for at, is_needed in enumerate(node.needs_input_grad) if is_needed]
        attached = [position for position, child in enumerate(children) if child is not None]
        self._arguments = dict(zip(attached, of_operands, strict=False))

    def grads(self, whole: Mapping[int, GenericGrad], keep: bool, fill: bool) -> dict[int, PerSampleGrad]:
        """Representations of the parameters, by position; none if the function does not treat rows independently, or
        if they do not show it. `whole`: the same from calls with the rows of all samples. `keep`: rows are kept, if
        they are not too large. `fill`: `operands` are computed, too.
        """
        if self.verdicts.get(self.key) is False or not self._find_rows():
            return {}
        try:
            if self._none_key not in self.verdicts:
                self.verdicts[self._none_key] = self._takes_none()
            unverified = self.key not in self.verdicts
            grads = self._grads(whole, keep, fill or unverified) if self._are_independent() else {}
            if grads and unverified and not self._are_verified(grads):
                grads = {}
        except Exception as error:  # the backward of a function may do anything with its rows
            if is_out_of_memory(error):
                raise
            grads = {}
        if not grads:
            self.verdicts[self.key] = False
            self.operands = {}
        return grads

    def _grads(self, whole: Mapping[int, GenericGrad], keep: bool, fill: bool) -> dict[int, PerSampleGrad]:
        """Representations of the parameters; fills in `operands`."""
        outputs: Results = {}
        squares: Results = {}
        activations = self.activations if fill else ()
        for sample, of_sample in enumerate(self.rows):
            results = self.call(of_sample, [*self.parameters, *activations])
            for position in activations:
                if sample == 0:
                    self.operands[position] = self._edge(position).zeros()
                self.operands[position][of_sample] = results[position]
            for position in self.parameters:
                row = accumulable(results[position])
                if keep and self.samples * row.numel() <= KEPT:
                    if sample == 0:
                        outputs[position] = row.new_empty(self.samples, *row.shape)
                    outputs[position][sample] = row
                else:
                    if sample == 0:
                        squares[position] = row.new_empty(self.samples)
                    squares[position][sample] = flat_squared_norms(flatten_rows(row[None]))[0]
        return {position: DenseGrad(of_position) for position, of_position in outputs.items()} | {
            position: RowCallsGrad(self, position, of_position, whole[position])
            for position, of_position in squares.items()
        }

    def _find_rows(self) -> bool:
        """Find the rows of each sample; False if samples share rows, or if outputs differ in them."""
        owners = []
        for slot, gradient in self.gradients.items():
            if gradient.dim() == 0:
                return False
            owner = self.owner_maps[slot].owners(tuple(gradient.shape), gradient.device).reshape(len(gradient), -1)
            owners.append(owner.amax(1))
            if not bool(((owner == owners[-1][:, None]) | (owner < 0)).all()) or not torch.equal(owners[0], owners[-1]):
                return False
        self.owner = owners[0]
        count, rest = divmod(len(self.owner), self.samples)
        numbers = torch.arange(self.samples, device=self.owner.device)
        if not rest and torch.equal(self.owner, numbers.repeat_interleave(count)):  # views instead of copies
            self.rows = [slice(b * count, (b + 1) * count) for b in range(self.samples)]
        else:
            self.rows = [(self.owner == b).nonzero().flatten() for b in range(self.samples)]
        return True

    def _takes_none(self) -> bool:
        """True if the function takes None for outputs without gradient; others expect zeros."""
        self.verdicts[self._none_key] = True
        try:
            self.call(slice(0, 1), self.parameters)
        except (TypeError, AttributeError):
            return len(self.gradients) == len(self.node._input_metadata)
        return True

    def call(self, rows: Rows, positions: Sequence[int], weights: Tensor | None = None) -> Results:
        """Gradients of operands for these rows of the outputs, multiplied by weights."""
        # Copies, also of slices: the backward of a function may change its gradient in place.
        gradients = {slot: gradient[rows].clone() for slot, gradient in self.gradients.items()}
        count = len(next(iter(gradients.values())))
        if not count:
            zeros = {position: self._edge(position).zeros() for position in positions}
            return {position: z if position in self.parameters else z[:0] for position, z in zeros.items()}
        if weights is not None:
            gradients = {s: g * weights.view(-1, *(1,) * (g.dim() - 1)).to(g.dtype) for s, g in gradients.items()}
        arguments = {self._arguments[position]: position for position in positions}
        needs = tuple(at in arguments for at in range(len(self.node.needs_input_grad)))
        context = _Context(self.node, rows, len(self.owner), needs, self._weights)
        outputs: list[Tensor | None] = []
        for slot in range(len(self.node._input_metadata)):
            missing = None if self.verdicts[self._none_key] else Edge(self.node, slot).zeros()[rows]
            outputs.append(gradients.get(slot, missing))
        with torch.no_grad():
            results = type(self.node)._forward_cls.backward(context, *outputs)
        results = results if isinstance(results, tuple) else (results,)
        of_positions = {}
        for at, position in arguments.items():
            edge = self._edge(position)
            if position in self.parameters:
                of_positions[position] = as_gradient(results[at], edge)
            elif results[at].shape != (count, *edge.shape[1:]):
                raise ValueError("the gradient of an activation must have the rows of the outputs")
            else:
                of_positions[position] = results[at].to(edge.dtype)
        return of_positions

    def _are_independent(self) -> bool:
        """True if the gradients of two rows of different samples, one of them multiplied by a number, are the sum of
        those of each row alone.
        """
        sizes = torch.stack([g.detach().reshape(len(g), -1).abs().amax(1).double() for g in self.gradients.values()])
        sizes = sizes.amax(0)
        first = sizes.argmax()
        others = (self.owner != self.owner[first]) & (self.owner >= 0)
        pair = torch.stack([first, torch.where(others, sizes, -1).argmax()])
        weights = torch.tensor([1.0, -0.375], dtype=torch.float64, device=sizes.device)
        # Gradients of a large parameter follow from the same values per row as those of the activations.
        large = [position for position in self.parameters if numel(self._edge(position).shape) > LARGE]
        positions = [*self.parameters, *self.activations]
        if self.activations:
            positions = [position for position in positions if position not in large]
        together = self.call(pair, positions, weights)
        singles = [self.call(pair[k : k + 1], positions) for k in range(2)]
        for position in positions:
            a, b = (single[position] for single in singles)
            expected = a - 0.375 * b if position in self.parameters else torch.cat([a, -0.375 * b])
            if not are_near(together[position], expected):
                return False
        return True

    def _are_verified(self, grads: Mapping[int, PerSampleGrad]) -> bool:
        """True if the gradients of the two samples with the largest ones are those that a call for the whole batch
        gives. Noted for graphs of this structure unless they are zero.
        """
        sizes = sum(self.owner_maps[slot].sizes(g.detach()) for slot, g in self.gradients.items())
        assert isinstance(sizes, Tensor)
        samples = sizes.topk(2).indices.tolist()
        for b in samples:
            alone = {
                slot: self.owner_maps[slot].split_samples(g, range(b, b + 1))[0] for slot, g in self.gradients.items()
            }
            with torch.no_grad():
                results = call(self.node, alone)
            for position, grad in grads.items():
                result = results[position]
                edge = self._edge(position)
                expected = edge.zeros() if result is None else as_gradient(result, edge)
                if not are_near(grad.rows(b, b + 1)[0], accumulable(expected)):
                    return False
            for position, of_rows in self.operands.items():
                result = results[position]
                edge = self._edge(position)
                expected = edge.zeros() if result is None else as_gradient(result, edge).to(edge.dtype)
                elsewhere = torch.zeros_like(of_rows)
                elsewhere[self.rows[b]] = of_rows[self.rows[b]]
                if not are_near(elsewhere, expected):
                    return False
        if bool(sizes[samples].all()):
            self.verdicts[self.key] = True
        return True

    def _edge(self, position: int) -> Edge:
        return Edge(*self.node.next_functions[position])


class RowCallsGrad(PerSampleGrad):
    """Per-sample gradients of a large parameter: rows from `RowCalls`, the weighted sum from a call for all samples."""

    def __init__(self, calls: RowCalls, position: int, squares: Tensor, whole: GenericGrad):
        self.samples = calls.samples
        self.shape = whole.shape
        self._calls = calls
        self._position = position
        self._squares = squares
        self._whole = whole

    def rows(self, start: int, stop: int) -> Tensor:
        calls = self._calls
        rows = [calls.call(calls.rows[b], [self._position])[self._position] for b in range(start, stop)]
        return accumulable(torch.stack(rows))

    def squared_norms(self) -> Tensor:
        return self._squares

    def sum(self, weights: Tensor | None) -> Tensor:
        return self._whole.sum(weights)

    def summed_apart(self, weights: Tensor | None) -> Tensor:
        return self.sum_of_rows(weights)

    def describe(self) -> str:
        return "rows of each sample"


class _Context:
    """The `ctx` of a function's backward, with some rows of its tensors."""

    def __init__(self, node: Node, rows: Rows, count: int, needs_input_grad: tuple[bool, ...], weights: set[int]):
        self.needs_input_grad = needs_input_grad
        self._node = node
        self._rows = rows
        self._count = count
        self._weights = weights

    def __getattr__(self, name: str) -> Any:  # of what is not an attribute of this object
        return self._select(getattr(self._node, name))

    def _select(self, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(map(self._select, value)) if type(value) in (tuple, list) else value
        if not isinstance(value, Tensor) or value.dim() == 0 or len(value) != self._count:
            return value
        return value if stored_values(value).untyped_storage()._cdata in self._weights else value[self._rows]
