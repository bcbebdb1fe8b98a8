"""`sw.influence`: effect of training samples on the losses of queries, from inner products of their gradients.

Plain        g_query . g_train, from the factors of both
Solved       g_query^T (H + damping)^-1 g_train, from rows of the queries that the curvature has solved
Eigenbasis   the same for EK-FAC: both gradients in its eigenbasis, where H is diagonal, so that factors are rotated
             instead of rows
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, overload

import torch
from torch import Tensor, nn

from samplewise.attribution.blocks import Block, divided, with_zeros
from samplewise.attribution.curvature import Curvature, Rows, check_shapes, checked_damping
from samplewise.attribution.ekfac import EKFAC
from samplewise.attribution.units import Unit, by_unit, check_units
from samplewise.core.losses import LossFn
from samplewise.core.microbatch import Microbatch
from samplewise.core.state import eval_mode
from samplewise.dataset_pass import at_each, check_train_and_queries, map_over_ranks, parameters_kept
from samplewise.engine.gradients import Gradients, factored_grads
from samplewise.engine.grads.base import PerSampleGrad
from samplewise.engine.grads.dense import DenseGrad
from samplewise.loop.checkpoint.trained import CheckpointSource, as_checkpoints
from samplewise.scan import Scanner, scan

ALL = ""  # name of the only part of scores that are not divided by layer
CHUNK = 2**24  # elements of training rows held at a time for norms

Parts = dict[str, Tensor]  # values by parameter, or by layer


@overload
def influence(
    model: nn.Module,
    loss_fn: LossFn,
    train: Iterable[Any],
    queries: Iterable[Any],
    checkpoints: CheckpointSource | None = None,
    *,
    curvature: Curvature | None = None,
    damping: float | None = None,
    cosine: bool = False,
    by: None = None,
    unit: Unit | None = None,
    query_unit: Unit | None = None,
    microbatch: Microbatch = "auto",
) -> Tensor: ...
@overload
def influence(
    model: nn.Module,
    loss_fn: LossFn,
    train: Iterable[Any],
    queries: Iterable[Any],
    checkpoints: CheckpointSource | None = None,
    *,
    curvature: Curvature | None = None,
    damping: float | None = None,
    cosine: bool = False,
    by: Literal["layer"],
    unit: Unit | None = None,
    query_unit: Unit | None = None,
    microbatch: Microbatch = "auto",
) -> dict[str, Tensor]: ...
def influence(
    model: nn.Module,
    loss_fn: LossFn,
    train: Iterable[Any],
    queries: Iterable[Any],
    checkpoints: CheckpointSource | None = None,
    *,
    curvature: Curvature | None = None,
    damping: float | None = None,
    cosine: bool = False,
    by: Literal["layer"] | None = None,
    unit: Unit | None = None,
    query_unit: Unit | None = None,
    microbatch: Microbatch = "auto",
) -> Tensor | dict[str, Tensor]:
    """Influence (queries, training samples): dot products of query and training gradients, summed over checkpoints.

    Without curvature this is TracIn: the sum over checkpoints of lr * g_query . g_train. With curvature H, the sum of
    lr * g_query^T (H + damping)^-1 g_train: leaving a sample out of n and training again to convergence raises the loss
    of the query by about its influence / n. Positive for a training sample that lowers the query's loss, negative for
    one that raises it.

    Gradients of training samples are not stored. `train` is iterated once for each checkpoint and batch of queries, so
    make the query batches as large as memory allows; with curvature, the gradients of one batch of queries are held as
    rows, a number for each query and parameter. The model is in evaluation mode. With several ranks, every rank passes
    the same arguments, computes the columns of its share of the training batches, and gets the whole result.

    train, queries: loaders or lists of batches; columns and rows of the result are in their order
    checkpoints: run directory, whose checkpoints are used with the learning rates of their updates (1 if there is one
        only), or list of (state_dict, lr), copies of the model's state; default: the current parameters with lr 1
    curvature: result of `sw.ekfac` or `sw.attribution.hessian`, or another object with a method `solve`, see
        `samplewise.attribution.Curvature`; used for all checkpoints. Default: none
    damping: multiple of the mean eigenvalue of the curvature that is added to its eigenvalues, see
        `samplewise.attribution.Curvature`; default 0.1
    cosine: if True, divide each dot product by both norms, at each checkpoint; 0 if a gradient is zero. With curvature,
        norms are those of the metric, sqrt(g^T (H + damping)^-1 g), which costs a `solve` of the training rows, too
    by: "layer" returns a dict with the matrix of each module that has parameters of its own, such as "encoder.fc" for
        "encoder.fc.weight", and "" for those of the model itself. The matrices add up to the result without `by`,
        except with cosine=True, which gives cosines within each layer
    unit: what the columns are, if `loss_fn` returns a loss per token, (B, T): "sample" (sums over T), "token" (token t
        of row i is column i * T + t), or a function (batch) -> numbers (B, T), such as those of packed documents, each
        of which is a column, in the order of rows and numbers; tokens with negative numbers are left out. A unit costs
        one row. Default None: samples, whose losses are (B,)
    query_unit: the same for the rows of the result; default: `unit`
    microbatch: number of training samples computed at a time, "auto" (default) for the largest that fits into memory,
        or `sw.auto(memory)`. Query batches are not cut
    """
    _check_options(curvature, damping, cosine, by)
    check_train_and_queries(train, queries)
    unit, query_unit = check_units(unit, query_unit)
    train_fn, train = by_unit(model, loss_fn, train, unit)
    query_fn, queries = by_unit(model, loss_fn, queries, query_unit)
    scores = _Scores(model, train_fn, query_fn, inner_product_of(curvature, damping), cosine, by, microbatch)
    total: Parts = {}
    with eval_mode(model), parameters_kept(model):
        for lr in at_each(model, as_checkpoints(model, checkpoints)):
            for name, part in scores.of_all(train, queries).items():
                total[name] = lr * part + total[name] if name in total else lr * part
    return total if by == "layer" else total[ALL]


def _check_options(curvature: Curvature | None, damping: float | None, cosine: bool, by: str | None) -> None:
    if by not in (None, "layer"):
        raise ValueError(f"by must be None or 'layer'; found {by!r}.")
    if curvature is not None and not callable(getattr(curvature, "solve", None)):
        raise TypeError(
            "curvature must be the result of sw.ekfac or sw.attribution.hessian, or have a method solve(rows, "
            f"damping); found {type(curvature).__name__}."
        )
    checked_damping(damping)
    if damping is not None and curvature is None:
        raise ValueError(f"damping needs a curvature; found damping={damping} without. Pass curvature=sw.ekfac(...).")
    if cosine and curvature is not None and by == "layer":
        raise ValueError(
            "cosine=True with a curvature needs by=None, because a layer has no norm of its own in the metric of a "
            "curvature; found by='layer'. Leave out one of the three."
        )


class _Scores(NamedTuple):
    """Scores of training samples and queries at the current parameters: layer -> values, or ALL -> values."""

    model: nn.Module
    loss_fn: LossFn
    query_loss_fn: LossFn
    inner_product: InnerProduct
    cosine: bool
    by: Literal["layer"] | None
    microbatch: Microbatch

    def of_all(self, train: Iterable[Any], queries: Iterable[Any]) -> Parts:
        """Scores (queries, training samples) of each part."""
        scanner = Scanner(self.model, self.loss_fn, self.microbatch)  # keeps the size of microbatches that fits
        rows = []
        for _, query_gradients in scan(self.model, self.query_loss_fn, queries, microbatch=None):
            query = self.inner_product.query(query_gradients)
            query_norms = self._norms(query_gradients) if self.cosine else {}

            def of_batch(batch: Any, query: Any = query, query_norms: Parts = query_norms) -> Parts:
                pieces = [self._of_piece(g, query, query_norms) for _, g in scanner.of(batch)]
                return _join(pieces, "train", dim=1)

            rows.append(_join(list(map_over_ranks(of_batch, train, "sw.influence")), "train", dim=1))
        return _join(rows, "queries", dim=0)

    def _of_piece(self, g: Gradients, query: Any, query_norms: Parts) -> Parts:
        """Scores (queries, samples) of a microbatch of training samples, on the CPU."""
        products = self._sum_by_layer(self.inner_product.products(g, query))
        if self.cosine:
            norms = self._norms(g)
            for name, part in products.items():
                scale = norms[name][:, None] * query_norms[name]
                products[name] = torch.where(scale > 0, part / torch.where(scale > 0, scale, 1), 0)
        return {name: part.T.cpu() for name, part in products.items()}

    def _norms(self, g: Gradients) -> Parts:
        squares = self._sum_by_layer({name: norms.square() for name, norms in self.inner_product.norms(g).items()})
        return {name: total.sqrt() for name, total in squares.items()}

    def _sum_by_layer(self, parts: Parts) -> Parts:
        """Sums of values by parameter over all parameters, or those of each module."""
        sums: Parts = {}
        for name, part in parts.items():
            layer = name.rpartition(".")[0] if self.by == "layer" else ALL
            sums[layer] = sums[layer] + part if layer in sums else part
        return sums


def _join(parts: list[Parts], name: str, dim: int) -> Parts:
    if not parts:
        raise ValueError(
            f"{name} must yield at least one batch; found none. Pass a loader or a list: an iterator is exhausted "
            "after one pass."
        )
    return {key: torch.cat([part[key] for part in parts], dim) for key in parts[0]}


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
        width = sum(row.numel() for row in g[0].values())
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
        # Parameters that the losses do not reach have no form, and any shape.
        model_shapes = {name: tuple(forms[name].shape) if name in forms else shapes.get(name) for name in g.names}
        check_shapes(model_shapes, shapes)
        return {block: block.coordinates(with_zeros(forms, block, shapes, len(g))) for block in self.curvature.blocks}

    def _squares(self, block: Block, form: PerSampleGrad) -> Iterator[Tensor]:
        return ((rows * divided(block, rows, self.damping)).flatten(1).sum(1) for _, rows in form.chunks())


def _roots(squares: Iterator[Tensor]) -> Tensor:
    values = torch.cat(list(squares))
    if (values < 0).any():
        raise ValueError(
            "cosine=True needs a curvature with g^T (H + damping)^-1 g of 0 or more for every gradient g; found "
            f"{values.min().item():.3g}. Pass a larger damping."
        )
    return values.sqrt()
