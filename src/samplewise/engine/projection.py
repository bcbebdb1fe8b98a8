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
        self._normalization = torch.ones(dim, dtype=torch.float64)  # 1 / sqrt(size of the block) of each dimension
        for block in [slice(0, dim)] if blocks is None else blocks.values():
            self._normalization[block] = len(range(*block.indices(dim))) ** -0.5
        self._signs: dict[tuple[str, torch.device], tuple[Tensor, Tensor]] = {}

    def part(self, form: PerSampleGrad, name: str, device: torch.device) -> Tensor:
        """Contribution of a parameter to the dimensions of its block, (b, size of the block), without normalization."""
        if (name, device) not in self._signs:
            size = len(range(*self._block(name).indices(self.dim)))
            self._signs[name, device] = by_rows.random_signs(name, form.shape, size, self.seed, device)
        left, right = self._signs[name, device]
        if self.scale is None:
            return form.project(left, right)
        return by_rows.project(form, left, right, self.scale[name].to(device))

    def total(self, parts: Mapping[str, Tensor], zeros: Tensor) -> Tensor:
        """Sum (b, dim) of the contributions of the parameters, in the order of `parts`, added to zeros (b, dim)."""
        for part in parts.values():  # complex parameters have complex projections
            zeros = zeros.to(torch.promote_types(zeros.dtype, part.dtype))
        for name, part in parts.items():
            zeros[:, self._block(name)] += part
        return zeros * self._normalization.to(zeros)

    def _block(self, name: str) -> slice:
        return slice(0, self.dim) if self._blocks is None else self._blocks[name]
