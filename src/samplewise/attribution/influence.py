"""`sw.influence`: effect of training samples on the losses of queries, from inner products of their gradients.

Plain        g_query . g_train, from the factors of both
Solved       g_query^T (H + damping)^-1 g_train, from rows of the queries that the curvature has solved
Eigenbasis   the same for EK-FAC: both gradients in its eigenbasis, where H is diagonal, so that factors are rotated
             instead of rows
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, overload

import torch
from torch import Tensor, nn

from samplewise.attribution.blocks import Block, divided, with_zeros
from samplewise.attribution.curvature import Curvature, Rows, check_shapes, checked_damping
from samplewise.attribution.ekfac import EKFAC
from samplewise.attribution.gauss_newton import GaussNewton, check_refine, summary
from samplewise.attribution.units import Unit, by_unit, check_units
from samplewise.core.losses import LossFn
from samplewise.core.microbatch import Microbatch
from samplewise.core.state import eval_mode
from samplewise.core.text import plural
from samplewise.dataset_pass import at_each, check_train_and_queries, map_over_ranks, parameters_kept
from samplewise.engine.arguments import check_model
from samplewise.engine.gradients import Gradients, factored_grads
from samplewise.engine.grads.base import PerSampleGrad
from samplewise.engine.grads.dense import DenseGrad
from samplewise.loop.checkpoint.trained import CheckpointSource, as_checkpoints
from samplewise.parallel import collectives
from samplewise.scan import Scanner, scan

ALL = ""  # name of the only part of scores that are not divided by layer
CHUNK = 2**24  # elements of training rows held at a time for norms

Parts = dict[str, Tensor]  # values by parameter, or by layer


@overload
def influence(
    model: nn.Module | Iterable[nn.Module],
    loss_fn: LossFn,
    train: Iterable[Any],
    queries: Iterable[Any],
    checkpoints: CheckpointSource | None = None,
    *,
    curvature: Curvature | Sequence[Curvature] | None = None,
    damping: float | None = None,
    refine: int | None = None,
    run: str | os.PathLike[str] | None = None,
    cosine: bool = False,
    by: None = None,
    unit: Unit | None = None,
    query_unit: Unit | None = None,
    microbatch: Microbatch = "auto",
) -> Tensor: ...
@overload
def influence(
    model: nn.Module | Iterable[nn.Module],
    loss_fn: LossFn,
    train: Iterable[Any],
    queries: Iterable[Any],
    checkpoints: CheckpointSource | None = None,
    *,
    curvature: Curvature | Sequence[Curvature] | None = None,
    damping: float | None = None,
    refine: int | None = None,
    run: str | os.PathLike[str] | None = None,
    cosine: bool = False,
    by: Literal["layer"],
    unit: Unit | None = None,
    query_unit: Unit | None = None,
    microbatch: Microbatch = "auto",
) -> dict[str, Tensor]: ...
def influence(
    model: nn.Module | Iterable[nn.Module],
    loss_fn: LossFn,
    train: Iterable[Any],
    queries: Iterable[Any],
    checkpoints: CheckpointSource | None = None,
    *,
    curvature: Curvature | Sequence[Curvature] | None = None,
    damping: float | None = None,
    refine: int | None = None,
    run: str | os.PathLike[str] | None = None,
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

    model: a model, or several in a list or generator, over which the scores are averaged
    train, queries: loaders or lists of batches; columns and rows of the result are in their order
    checkpoints: run directory, whose checkpoints are used with the learning rates of their updates (1 if there is one
        only), or list of (state_dict, lr), copies of the model's state; default: the current parameters with lr 1
    curvature: result of `sw.ekfac` or `sw.attribution.hessian`, or another object with a method `solve`, see
        `samplewise.attribution.Curvature`; used for all checkpoints. For a curvature of each checkpoint, or of each of
        several models, a list of them. Default: none
    damping: multiple of the mean eigenvalue of the curvature that is added to its eigenvalues, see
        `samplewise.attribution.Curvature`; default 0.1, with `refine` see `run`
    refine: largest number of iterations of conjugate gradients that solve the exact Gauss-Newton matrix of `train`,
        preconditioned by `curvature`, a result of `sw.ekfac`; see `samplewise.attribution.GaussNewton`. Each is a pass
        over `train` per batch of queries, whose queries are solved together: a larger batch needs fewer. A line on
        stderr says what stopped them. Default: the curvature alone
    run: run directory of the model, or one of its checkpoints, for a default damping of 1 / (learning rate * updates)
        with `refine`; default: `checkpoints`, if that is a path; if no run is known, the default damping is 10
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
    for matrix in curvature if isinstance(curvature, (list, tuple)) else [curvature]:
        _check_options(matrix, damping, refine, cosine, by)
    if run is not None and refine is None:
        raise ValueError(f"run needs refine, whose damping it sets; found run={str(run)!r} without. Pass refine=20.")
    if refine is not None and damping is None and run is None and isinstance(checkpoints, (str, os.PathLike)):
        run = checkpoints
    check_train_and_queries(train, queries)
    unit, query_unit = check_units(unit, query_unit)
    single = model if isinstance(model, nn.Module) and not isinstance(model, nn.ModuleList) else None
    total: Parts = {}
    refined: list[GaussNewton] = []
    number = 0
    with parameters_kept(single) if single is not None else nullcontext():
        for member, weight, matrix in _members(model, checkpoints, curvature):
            number += 1
            train_fn, train_units = by_unit(member, loss_fn, train, unit)
            query_fn, query_units = by_unit(member, loss_fn, queries, query_unit)
            if refine is not None:
                matrix = GaussNewton(
                    member, train_fn, train_units, matrix, refine, damping=damping, run=run, microbatch=microbatch
                )
                refined.append(matrix)
            inner_product = inner_product_of(matrix, None if refine else damping)
            scores = _Scores(member, train_fn, query_fn, inner_product, cosine, by, microbatch)
            with eval_mode(member):
                for name, part in scores.of_all(train_units, query_units).items():
                    total[name] = weight * part + total[name] if name in total else weight * part
    if single is None:
        total = {name: part / number for name, part in total.items()}
    if refined and collectives.rank() == 0 and sys.stderr is not None:
        print(f"sw.influence: {summary(refined)}", file=sys.stderr, flush=True)
    return total if by == "layer" else total[ALL]


def _members(
    model: Any, checkpoints: CheckpointSource | None, curvature: Any
) -> Iterator[tuple[nn.Module, float, Any]]:
    """(model, weight, curvature) for each of several models, or for one model at each of its checkpoints."""
    curvatures = curvature if isinstance(curvature, (list, tuple)) else None
    number: int | None
    if not isinstance(model, Iterable):
        check_model(model, "sw.influence(model, loss_fn, train, queries)")
    if isinstance(model, nn.Module) and not isinstance(model, nn.ModuleList):
        states = as_checkpoints(model, checkpoints)
        number = 1 if states is None else len(states)
        members = ((model, rate) for rate in at_each(model, states))
    elif checkpoints is not None:
        raise ValueError("checkpoints need a single model, whose parameters they are; found several models.")
    else:
        number = len(model) if isinstance(model, Sized) else None  # a generator has no length
        members = ((member, 1.0) for member in model)
        if curvature is not None and curvatures is None:
            raise ValueError("curvature must be a list with one for each model; found one for several models.")
    if number is not None:
        _check_number(curvatures, number)
    count = 0
    for count, (member, weight) in enumerate(members, 1):
        check_model(member, "sw.influence([model, ...], loss_fn, train, queries)")
        if number is None and curvatures is not None:
            _check_number(curvatures, max(count, len(curvatures)))
        yield member, weight, curvature if curvatures is None else curvatures[count - 1]
    _check_number(curvatures, count)


def _check_number(curvatures: Sequence[Any] | None, number: int) -> None:
    if number == 0 or (curvatures is not None and len(curvatures) != number):
        raise ValueError(
            "curvature must be a list with one for each of at least one model, or checkpoint; found "
            f"{'none' if curvatures is None else len(curvatures)} for {plural(number, 'model')}."
        )


def _check_options(curvature: Any, damping: float | None, refine: int | None, cosine: bool, by: str | None) -> None:
    if by not in (None, "layer"):
        raise ValueError(f"by must be None or 'layer'; found {by!r}.")
    if curvature is not None and not callable(getattr(curvature, "solve", None)):
        raise TypeError(
            "curvature must be the result of sw.ekfac or sw.attribution.hessian, or have a method solve(rows, "
            f"damping), or be a list of these; found {type(curvature).__name__}."
        )
    checked_damping(damping)
    if damping is not None and curvature is None:
        raise ValueError(f"damping needs a curvature; found damping={damping} without. Pass curvature=sw.ekfac(...).")
    if refine is not None:
        check_refine(refine, curvature)
    if cosine and (refine is not None or isinstance(curvature, GaussNewton)):
        raise ValueError(
            "cosine=True needs a curvature that is solved for the training samples without passes over them; found "
            "conjugate gradients. Leave out one of the two."
        )
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
        return {block: self._divided(block, form.rows(0, len(g))) for block, form in coordinates.items()}

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
        return ((rows * self._divided(block, rows)).flatten(1).sum(1) for _, rows in form.chunks())

    def _divided(self, block: Block, rows: Tensor) -> Tensor:
        return divided(block, rows, self.damping * block.eigenvalues.mean())


def _roots(squares: Iterator[Tensor]) -> Tensor:
    values = torch.cat(list(squares))
    if (values < 0).any():
        raise ValueError(
            "cosine=True needs a curvature with g^T (H + damping)^-1 g of 0 or more for every gradient g; found "
            f"{values.min().item():.3g}. Pass a larger damping."
        )
    return values.sqrt()
