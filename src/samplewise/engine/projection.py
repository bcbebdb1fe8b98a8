"""Random projections of per-sample gradients, which preserve inner products in expectation.

Each parameter is viewed as a matrix G (o, i), and each dimension is a product u^T G v with random signs u and v: the
gradient l r^T of a linear layer is projected as <u, l> <r, v>, without rows.

    dense      u and v of each dimension are independent: dim products with each factor
    factored   dimensions are tiles U^T G V, in which p left and q right vectors make p q dimensions: sqrt(TILES dim)
               products with each factor. Parameters with few elements are not multiplied: each of their elements is
               added, with a random sign, to one random dimension

Legend: b sample, o and i the two dimensions of a parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from typing import Literal, get_args

import torch
from torch import Tensor

from samplewise.engine.grads.base import PerSampleGrad, project_rows
from samplewise.engine.grads.kernels import as_matrix, flatten_rows, generator_of, random_signs

Method = Literal["factored", "dense"]
# Number of tiles. Fewer are faster, and have a larger error: that of the squared norm of l r^T has the variance
# ((1 + 2 / p) (1 + 2 / q) - 1) / tiles, where dense projections have 8 / dim.
TILES = 32


class Projection:
    """Projection of gradients to `dim` numbers, from a seed. Random signs are kept for the next batch.

    blocks: name of each parameter -> slice of the dimensions that it contributes to; None: all
    scale: name of each parameter -> tensor of its shape, by which gradients are multiplied first; None: ones
    """

    def __init__(
        self,
        dim: int,
        seed: int = 0,
        method: Method = "factored",
        *,
        blocks: Mapping[str, slice] | None = None,
        scale: Mapping[str, Tensor] | None = None,
    ):
        if type(dim) is not int or dim < 1:
            raise ValueError(f"dim must be a positive integer; found {dim!r}.")
        check_method(method)
        self.dim = dim
        self.seed = seed
        self.method = method
        self.scale = scale
        self._blocks = blocks
        self._normalization = torch.ones(dim, dtype=torch.float64)  # 1 / sqrt(size of the block) of each dimension
        for block in [slice(0, dim)] if blocks is None else blocks.values():
            self._normalization[block] = len(range(*block.indices(dim))) ** -0.5
        self._maps: dict[tuple[str, torch.device], Tiles | Sums] = {}

    def of_parameter(self, grad: PerSampleGrad, name: str, device: torch.device) -> Tensor:
        """Values (b, ...) from which `total` has the contribution of a parameter to the dimensions of its block."""
        if (name, device) not in self._maps:
            self._maps[name, device] = self._map(name, grad.shape, device)
        return self._maps[name, device].of(grad, None if self.scale is None else self.scale[name].to(device))

    def total(self, by_name: Mapping[str, Tensor], zeros: Tensor) -> Tensor:
        """Projection (b, dim) from the values of the parameters, added to zeros (b, dim) in the order of `by_name`."""
        device = zeros.device
        for values in by_name.values():  # complex parameters have complex projections
            zeros = zeros.to(torch.promote_types(zeros.dtype, values.dtype))
        for name, values in by_name.items():
            self._maps[name, device].add(values.to(zeros.dtype), zeros[:, self._block(name)])
        return zeros * self._normalization.to(zeros)

    def _block(self, name: str) -> slice:
        return slice(0, self.dim) if self._blocks is None else self._blocks[name]

    def _map(self, name: str, shape: tuple[int, ...], device: torch.device) -> Tiles | Sums:
        size = len(range(*self._block(name).indices(self.dim)))
        o, i = as_matrix(shape)
        if self.method == "dense":
            return Tiles(*random_signs(name, shape, 1, size, self.seed, device), size)
        if i == 1 or o * i <= size:
            return Sums(name, o * i, size, self.seed, device)
        side = max(1, isqrt(size // TILES))
        return Tiles(*random_signs(name, shape, side, -(-size // side**2), self.seed, device), size)


def check_method(method: str, argument: str = "method") -> None:
    """Raise ValueError for an invalid value of an argument with this name."""
    if method not in get_args(Method):
        raise ValueError(f"{argument} must be 'factored' or 'dense'; found {method!r}.")


class Tiles:
    """Map G -> tiles left[:, :, n]^T G right[:, :, n], side by side, of which the first `size` numbers are used.

    left (o, p, n), right (i, q, n)
    """

    def __init__(self, left: Tensor, right: Tensor, size: int):
        self.left = left
        self.right = right
        self.size = size

    def of(self, grad: PerSampleGrad, scale: Tensor | None) -> Tensor:
        if scale is None:
            return grad.project(self.left, self.right)
        return project_rows(grad, self.left, self.right, scale)

    def add(self, values: Tensor, into: Tensor) -> None:
        into += values[:, : self.size]


class Sums:
    """Map of `width` elements to `size` sums: each element is added, with a random sign, to one random sum.

    Inner products have the variance of those of a matrix of random signs, at the cost of one pass over the elements.
    """

    def __init__(self, name: str, width: int, size: int, seed: int, device: torch.device):
        generator = generator_of(name, seed)
        self.places = torch.randint(0, size, (width,), generator=generator).to(device)
        signs = torch.randint(0, 2, (width,), generator=generator, dtype=torch.float64) * 2 - 1
        self.signs = (signs * size**0.5).to(device)  # `Projection` divides by this root

    def of(self, grad: PerSampleGrad, scale: Tensor | None) -> Tensor:
        elements = []
        for _, rows in grad.chunks():
            flat = flatten_rows(rows if scale is None else rows * scale)
            elements.append(flat * self.signs.to(flat.dtype))
        return elements[0] if len(elements) == 1 else torch.cat(elements)

    def add(self, values: Tensor, into: Tensor) -> None:
        into.index_add_(1, self.places, values)
