"""Random projections of per-sample gradients: one map of all parameters to `dim` numbers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from samplewise.engine.grads import by_rows
from samplewise.engine.grads.base import PerSampleGrad


class Projection:
    """Projection of gradients to `dim` numbers, from a seed. Random signs are kept for the next batch.

    Each parameter, viewed as a matrix G, contributes u^T G v to each dimension of its block, with random signs u and v.

    blocks: name of each parameter -> slice of the dimensions that it contributes to; None: all
    scale: name of each parameter -> tensor of its shape, by which gradients are multiplied first; None: ones
    """

    def __init__(
        self,
        dim: int,
        seed: int = 0,
        *,
        blocks: Mapping[str, slice] | None = None,
        scale: Mapping[str, Tensor] | None = None,
    ):
        if type(dim) is not int or dim < 1:
            raise ValueError(f"dim must be a positive integer; found {dim!r}.")
        self.dim = dim
        self.seed = seed
        self.scale = scale
        self._blocks = blocks
        self._signs: dict[tuple[str, torch.device], tuple[Tensor, Tensor]] = {}

    def part(self, form: PerSampleGrad, name: str, device: torch.device) -> Tensor:
        """Contribution of a parameter to the dimensions of its block, (b, size of the block)."""
        block = self.block(name)
        size = block.stop - block.start
        if (name, device) not in self._signs:
            self._signs[name, device] = by_rows.random_signs(name, form.shape, size, self.seed, device)
        signs = self._signs[name, device]
        if self.scale is None:
            return form.project(*signs) / size**0.5
        return by_rows.project(form, *signs, self.scale[name]) / size**0.5

    def block(self, name: str) -> slice:
        """Dimensions that a parameter contributes to."""
        return slice(0, self.dim) if self._blocks is None else self._blocks[name]

    def total(self, parts: Mapping[str, Tensor], zeros: Tensor) -> Tensor:
        """Sum (b, dim) of the contributions of the parameters, in the order of `parts`, added to zeros (b, dim)."""
        if self._blocks is None:
            return sum(parts.values(), start=zeros)
        for name, part in parts.items():
            zeros[:, self.block(name)] += part
        return zeros
