"""Input of a rule: one use of one operand by one operation, with the gradient of the operation's output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from samplewise.engine.grads.base import DenseGrad, PerSampleGrad
from samplewise.engine.graph import Edge, Node
from samplewise.engine.layouts import locate
from samplewise.engine.saved import Saved
from samplewise.engine.tags import Irregular, Regular, Tag


@dataclass(frozen=True)
class Use:
    """One use of an operand, with all that a rule needs to compute its per-sample gradients."""

    node: Node
    operand: int  # position of the operand
    entry: Edge  # where the gradient of the operand arrives
    shape: tuple[int, ...]  # shape of the operand
    samples: int
    gradients: dict[int, Tensor]  # by output slot; outputs without gradient are missing
    tags: dict[int, Tag]  # ownership of the gradients, by output slot
    saved: Saved  # tensors saved by the node, by name

    @property
    def gradient(self) -> Tensor:
        """Gradient of the first output, half precision converted to float32."""
        return accumulable(self.gradients[0])

    @property
    def tag(self) -> Tag:
        """Ownership of the first output's gradient."""
        return self.tags[0]

    def tensor(self, name: str) -> Tensor:
        """Saved tensor of this name, half precision converted to float32."""
        return accumulable(self.saved[name])


class Rule(NamedTuple):
    """Function that converts a use to per-sample gradients, or returns None for a use that it does not support."""

    form: Callable[[Use], PerSampleGrad | None]
    reads: tuple[str, ...] = ()  # names of the saved tensors it needs


def accumulable(x: Tensor) -> Tensor:
    """Convert float16 and bfloat16 to float32, so that sums keep precision; other dtypes are unchanged."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def summed(use: Use, values: Tensor, shape: tuple[int, ...] | None = None) -> PerSampleGrad | None:
    """Gradients of a broadcast operand: `values`, in the layout of the output's gradient, summed within each sample.

    `shape` is the operand's shape with size 1 for the dims it was broadcast along. Default: aligned to the right.
    """
    if values.is_complex():  # a real operand needs the real part only: computed by `generic`
        return None
    target = use.shape if shape is None else shape
    rows = _by_sample(use.tag, values, target)
    return None if rows is None else DenseGrad(rows.reshape(use.samples, *use.shape))


def _by_sample(tag: Tag, values: Tensor, target: tuple[int, ...]) -> Tensor | None:
    aligned = (1,) * (values.dim() - len(target)) + target
    if isinstance(tag, Regular):
        split = _split_samples(tag, values, aligned)
    else:
        split = _gather_samples(tag, values, aligned)
    if split is None:
        return None
    dims = [d + 1 for d, size in enumerate(aligned) if size == 1 and split.shape[d + 1] != 1]
    return split.sum(dims, keepdim=True) if dims else split


def _split_samples(tag: Regular, values: Tensor, aligned: tuple[int, ...]) -> Tensor | None:
    """Values with a new first dim for samples, (b, *shape); the dim that contained the samples is divided by b."""
    shape = tuple(values.shape)
    place = locate(tag.inner, shape, tag.samples)
    if place is None or aligned[place.dim] != 1:
        return None
    dim, post = place
    split = values.reshape(*shape[:dim], -1, tag.samples, post, *shape[dim + 1 :]).movedim(dim + 1, 0)
    return split.reshape(tag.samples, *shape[:dim], -1, *shape[dim + 1 :])


def _gather_samples(tag: Irregular, values: Tensor, aligned: tuple[int, ...]) -> Tensor | None:
    row_dims = next((d for d, size in enumerate(aligned) if size != 1), len(aligned))
    rows = tag.rows(tuple(values.shape), row_dims)
    if rows is None or row_dims == 0:
        return None
    gathered = rows.gather(values.flatten(0, row_dims - 1)).sum(1)
    return gathered.reshape(tag.samples, *(1,) * row_dims, *values.shape[row_dims:])
