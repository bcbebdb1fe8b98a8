"""Input of a rule: one use of one operand by one operation, with the gradient of the operation's output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samplewise.engine.grads.base import PerSampleGrad
from samplewise.engine.grads.dense import DenseGrad
from samplewise.engine.grads.kernels import frobenius_norms
from samplewise.engine.graph.graph import Edge, Node
from samplewise.engine.graph.saved import Saved
from samplewise.engine.ownership.layouts import locate
from samplewise.engine.ownership.owner_map import Irregular, OwnerMap, Regular, RowGather, permute

HALF_PRECISION = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Operand:
    """One operand of an operation: the part of a use that depends only on the graph structure."""

    position: int
    shape: tuple[int, ...]
    samples: int
    owner_maps: dict[int, OwnerMap]  # ownership of the gradients of the operation's outputs, by output slot
    layouts: dict[Any, Any] = field(default_factory=dict)  # row assignments, computed when a rule first needs them


class Use:
    """One use of an operand, with all that a rule needs to compute its per-sample gradients."""

    __slots__ = ("gradients", "layouts", "node", "operand", "owner_maps", "samples", "saved", "shape")

    def __init__(self, node: Node, operand: Operand, gradients: dict[int, Tensor], saved: Saved):
        self.node = node
        self.operand = operand.position
        self.shape = operand.shape  # shape of the operand
        self.samples = operand.samples
        self.owner_maps = operand.owner_maps  # ownership of the gradients, by output slot
        self.gradients = gradients  # by output slot; outputs without gradient are missing
        self.saved = saved  # tensors saved by the node, by name
        self.layouts = operand.layouts

    @property
    def entry(self) -> Edge:
        """Where the gradient of the operand arrives."""
        return Edge(*self.node.next_functions[self.operand])

    @property
    def gradient(self) -> Tensor:
        """Gradient of the first output, half precision converted to float32."""
        gradient = self.gradients[0]
        return gradient.float() if gradient.dtype in HALF_PRECISION else gradient

    @property
    def owner_map(self) -> OwnerMap:
        """Ownership of the first output's gradient."""
        return self.owner_maps[0]

    def tensor(self, name: str) -> Tensor:
        """Saved tensor of this name, half precision converted to float32."""
        saved: Tensor = self.saved[name]
        return saved.float() if saved.dtype in HALF_PRECISION else saved

    def rows(self, row_dims: int) -> RowGather | None:
        """Assignment of the rows of the first output's gradient (its first `row_dims` dims) to samples.

        None if samples share a row.
        """
        if row_dims not in self.layouts:
            self.layouts[row_dims] = self.owner_map.rows(tuple(self.gradients[0].shape), row_dims)
        rows: RowGather | None = self.layouts[row_dims]
        return rows

    def permuted_rows(self, dims: tuple[int, ...], row_dims: int) -> RowGather | None:
        """As `rows`, for the gradient with its dimensions permuted."""
        if (dims, row_dims) not in self.layouts:
            shape = tuple(self.gradients[0].shape)
            owner_map = permute(self.owner_map, shape, dims)
            self.layouts[dims, row_dims] = (
                None if owner_map is None else owner_map.rows(tuple(shape[d] for d in dims), row_dims)
            )
        rows: RowGather | None = self.layouts[dims, row_dims]
        return rows


class Rule(NamedTuple):
    """Function that converts a use to per-sample gradients, or returns None for a use that it does not support."""

    grad: Callable[[Use], PerSampleGrad | None]
    reads: tuple[str, ...] = ()  # names of the saved tensors it needs
    factors: Callable[[Use], PerSampleGrad | None] | None = None  # as `grad`, in factors also if rows are smaller


class OperandRule(NamedTuple):
    """Function that computes the gradients of operands (by position), of all samples together, from what other rules of
    the node have computed, so that the node need not be run; or returns None if it must be run.
    """

    gradients: Callable[[Use], dict[int, Tensor] | None]
    reads: tuple[str, ...] = ()  # names of the saved tensors it needs


def accumulable(x: Tensor) -> Tensor:
    """Convert float16 and bfloat16 to float32, so that sums keep precision; other dtypes are unchanged."""
    return x.float() if x.dtype in HALF_PRECISION else x


def summed(use: Use, values: Tensor, shape: tuple[int, ...] | None = None) -> PerSampleGrad | None:
    """Gradients of a broadcast operand: `values`, in the layout of the output's gradient, summed within each sample.

    `shape` is the operand's shape with size 1 for the dims it was broadcast along. Default: aligned to the right.
    """
    if values.is_complex():  # a real operand needs the real part only: computed by `generic`
        return None
    target = use.shape if shape is None else shape
    aligned = (1,) * (values.dim() - len(target)) + target
    owner_map = use.owner_maps[0]
    if isinstance(owner_map, Irregular):  # rows of a sample are in any order, so that they are gathered first
        row_dims = next((d for d, size in enumerate(aligned) if size != 1), len(aligned))
        rows_of_samples = owner_map.rows(tuple(values.shape), row_dims)
        if rows_of_samples is None or row_dims == 0:
            return None
        tokens = rows_of_samples.gather(values.flatten(0, row_dims - 1))
        terms = tokens.reshape(use.samples, -1, *(1,) * (row_dims - 1), *values.shape[row_dims:])
        dims = [d + 1 for d, size in enumerate(aligned) if size == 1 and terms.shape[d + 1] != 1]
        return _sum_over(use, terms, sorted({1, *dims}))
    value_shape = tuple(values.shape)
    if (value_shape, aligned) not in use.layouts:
        use.layouts[value_shape, aligned] = _split_samples(owner_map, value_shape, aligned)
    split: SampleSplit | None = use.layouts[value_shape, aligned]
    if split is None:
        return None
    if split.divided is not None:
        values = values.reshape(split.divided).movedim(split.dim, 0)
    if not split.summed:
        rows = (use.samples, *use.shape)
        return DenseGrad(values if values.shape == rows else values.reshape(rows))
    return _sum_over(use, values.reshape(split.by_sample), split.summed)


def _sum_over(use: Use, terms: Tensor, dims: Sequence[int]) -> DenseGrad:
    """Terms (b, ...) summed over some dims, as rows in the operand's shape."""
    count = prod(terms.shape[d] for d in dims)
    rows = terms.sum(tuple(dims), keepdim=True).reshape(use.samples, *use.shape)
    return DenseGrad(rows, terms=lambda: frobenius_norms(terms) * count**0.5)


def sum_of_tokens(tokens: Tensor) -> DenseGrad:
    """Rows (b, ...) that are sums of tokens (b, t, ...)."""
    return DenseGrad(tokens.sum(1), terms=lambda: frobenius_norms(tokens) * tokens.shape[1] ** 0.5)


class SampleSplit(NamedTuple):
    """Steps that divide a tensor into samples: reshape, move `dim` to the front, reshape, sum."""

    divided: tuple[int, ...] | None  # shape with the dim of the samples divided into three; None if they come first
    dim: int  # the dim that has one entry per sample
    by_sample: tuple[int, ...]  # shape (b, *shape), the dim that contained the samples divided by b
    summed: tuple[int, ...]  # dims along which the operand was broadcast


def _split_samples(owner_map: Regular, shape: tuple[int, ...], aligned: tuple[int, ...]) -> SampleSplit | None:
    """Steps for a tensor of this shape and an operand of shape `aligned`; None if a sample is not a block of a dim."""
    place = locate(owner_map.inner, shape, owner_map.samples)
    if place is None or aligned[place.dim] != 1:
        return None
    dim, post = place
    assert isinstance(post, int)
    groups = shape[dim] // (owner_map.samples * post)
    divided = None if dim == 0 and groups == 1 else (*shape[:dim], groups, owner_map.samples, post, *shape[dim + 1 :])
    by_sample = (owner_map.samples, *shape[:dim], groups * post, *shape[dim + 1 :])
    summed = tuple(d + 1 for d, size in enumerate(aligned) if size == 1 and by_sample[d + 1] != 1)
    return SampleSplit(divided, dim + 1, by_sample, summed)
