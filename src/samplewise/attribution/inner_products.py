"""Inner products of gradients in which `sw.influence` measures: plain, or with the inverse of a curvature.

    Plain        g_query . g_train, from the factors of both
    Solved       g_query^T (H + damping)^-1 g_train, from rows of the queries that the curvature has solved
    Eigenbasis   the same for EK-FAC: both gradients in its eigenbasis, where H is diagonal, so that factors are rotated
                 instead of rows

`query` prepares the gradients of a batch of queries, `products` has a matrix (training samples, queries) for each
parameter (or the first of a block), and `norms` the norm of each sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from samplewise.attribution.blocks import Block, divided, with_zeros
from samplewise.attribution.curvature import Curvature, Rows, check_shapes, checked_damping
from samplewise.attribution.ekfac import EKFAC
from samplewise.engine.gradients import Gradients, factored_grads
from samplewise.engine.grads.base import PerSampleGrad
from samplewise.engine.grads.dense import DenseGrad

CHUNK = 2**24  # elements of training rows held at a time for norms

Parts = dict[str, Tensor]  # values by parameter


class InnerProduct(Protocol):
    """Inner product of gradients."""

    def query(self, g: Gradients) -> Any: ...

    def products(self, g: Gradients, query: Any) -> Parts:
        """Contribution of each parameter to the inner products (B, Q)."""

    def norms(self, g: Gradients) -> Parts:
        """Norms (B,) whose squares add up to that of the sample; there may be one entry for all parameters."""


def inner_product_of(curvature: Curvature | None, damping: float | None) -> InnerProduct:
    """Inner product for the arguments of `sw.influence`."""
    if curvature is None:
        return Plain()
    if isinstance(curvature, EKFAC):
        return Eigenbasis(curvature, checked_damping(damping))
    return Solved(curvature, damping)


@dataclass(frozen=True)
class Plain:
    def query(self, g: Gradients) -> Gradients:
        return g

    def products(self, g: Gradients, query: Gradients) -> Parts:
        return g.gram(query, by="parameter")

    def norms(self, g: Gradients) -> Parts:
        return g.norms(by="parameter")


@dataclass(frozen=True)
class Solved:
    curvature: Curvature
    damping: float | None

    def query(self, g: Gradients) -> dict[str, Tensor]:
        return self.curvature.solve(g.full(), self.damping)

    def products(self, g: Gradients, query: Rows) -> Parts:
        return g.gram(query, by="parameter")

    def norms(self, g: Gradients) -> Parts:
        width = sum(each.numel() for each in g[0].values())
        return {"": _roots(self._squares(rows) for rows in g.chunks(max(1, CHUNK // width)))}

    def _squares(self, rows: Rows) -> Tensor:
        solved = self.curvature.solve(rows, self.damping)
        return torch.stack([(rows[name] * solved[name]).flatten(1).sum(1) for name in rows]).sum(0)


@dataclass(frozen=True)
class Eigenbasis:
    curvature: EKFAC
    damping: float

    @torch.no_grad()
    def query(self, g: Gradients) -> dict[Block, Tensor]:
        coordinates = self._coordinates(g)
        return {block: divided(block, form.rows(0, len(g)), self.damping) for block, form in coordinates.items()}

    @torch.no_grad()
    def products(self, g: Gradients, query: Mapping[Block, Tensor]) -> Parts:
        coordinates = self._coordinates(g)
        return {block.names[0]: form.gram(DenseGrad(query[block])) for block, form in coordinates.items()}

    @torch.no_grad()
    def norms(self, g: Gradients) -> Parts:
        coordinates = self._coordinates(g)
        return {block.names[0]: _roots(self._squares(block, form)) for block, form in coordinates.items()}

    def _coordinates(self, g: Gradients) -> dict[Block, PerSampleGrad]:
        """Gradients in the eigenbasis of each block."""
        forms = factored_grads(g)
        shapes = self.curvature.shapes
        own = {name: tuple(form.shape) for name, form in forms.items()}
        check_shapes({name: own.get(name, shapes.get(name)) for name in g.names}, shapes)
        return {block: block.coordinates(with_zeros(forms, block, shapes, len(g))) for block in self.curvature.blocks}

    def _squares(self, block: Block, form: PerSampleGrad) -> Iterator[Tensor]:
        return ((rows * divided(block, rows, self.damping)).flatten(1).sum(1) for _, rows in form.chunks())


def _roots(squares: Iterator[Tensor]) -> Tensor:
    joined = torch.cat(list(squares))
    if (joined < 0).any():
        raise ValueError(
            "cosine=True needs a curvature with g^T (H + damping)^-1 g of 0 or more for every gradient g; found "
            f"{joined.min().item():.3g}. Pass a larger damping."
        )
    return joined.sqrt()
