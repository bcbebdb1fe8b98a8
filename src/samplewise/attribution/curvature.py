"""Curvature H in influence scores g_query^T (H + damping)^-1 g_train: its interface, and the exact Hessian."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from samplewise.core.batches import check_loader
from samplewise.core.losses import LossFn, as_loss_fn, per_sample
from samplewise.core.state import eval_mode
from samplewise.core.text import listed
from samplewise.dataset_pass import share_of_rank
from samplewise.engine.arguments import check_attached, check_model, wanted_parameters
from samplewise.errors import ParameterError
from samplewise.parallel import collectives
from samplewise.parallel.collectives import on_every_rank

DEFAULT_DAMPING = 0.1
LARGEST = 20_000  # parameters: the matrix then has 3.2 GB in float64
NEGATIVE = 4.0  # default damping of an indefinite Hessian, in multiples of the size of its most negative eigenvalue
ELEMENTS = 2**18  # of one output of the model for all directions that are multiplied at a time

Rows = Mapping[str, Tensor]  # parameter name -> (n, *shape), as returned by `Gradients.full`


class Curvature(Protocol):
    """Matrix H over all trainable parameters of a model, such as a Hessian, given by how it is solved.

    `sw.ekfac` and `sw.attribution.hessian` return such objects. For another matrix, pass `sw.influence` an object of
    any class with this method.

    `damping` is a multiple of the mean eigenvalue of the matrix in all of attribution, so that a value suits losses,
    models and numbers of samples of any scale: the inverse is that of H + damping * mean eigenvalue * identity. None,
    the default, is 0.1 if a matrix is inverted; 10 for `GaussNewton` without a run; and for a Hessian with negative
    eigenvalues a multiple of the lowest one, see `Hessian`. The mean is taken

        EKFAC                    of each block, which is a layer, over its own eigenvalues
        GaussNewton              over all eigenvalues of the EK-FAC matrix that preconditions it
        Hessian                  over all eigenvalues; it must be positive, unless damping is the default
        trak, ProjectedStore     over the eigenvalues of X^T X, where X are the projected gradients of a model

    `sw.trak` inverts a matrix in any case, `sw.influence` if it is given a curvature, a store if it is given a damping.
    """

    def solve(self, rows: Rows, damping: float | None = None) -> dict[str, Tensor]:
        """Product of (H + damping * mean eigenvalue * identity)^-1 with each row.

        rows: parameter name -> (n, *shape), one vector over all parameters for each of n samples; the result is alike
        damping: 0 or more; None: the default
        """


def check_shapes(model_shapes: Mapping[str, tuple[int, ...] | None], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise if the parameters of a model are not those that the curvature was computed for."""
    if model_shapes == shapes:
        return
    differing = sorted(name for name in {*model_shapes, *shapes} if model_shapes.get(name) != shapes.get(name))
    raise ParameterError(
        "the curvature must be of a model with the same trainable parameters; found other names or shapes: "
        f"{listed(differing)}. Compute it again for this model."
    )


def checked_damping(damping: float | None) -> float:
    """Multiple of the mean eigenvalue; the default for None."""
    if damping is None:
        return DEFAULT_DAMPING
    is_number = isinstance(damping, (int, float)) and not isinstance(damping, bool)
    if not (is_number and 0 <= damping < float("inf")):
        raise ValueError(f"damping must be a multiple of the mean eigenvalue, 0 or more; found {damping!r}.")
    return float(damping)


def hessian(model: nn.Module, loss_fn: LossFn, loader: Iterable[Any]) -> Hessian:
    """Exact Hessian of the mean of the losses over a loader, as a matrix over all trainable parameters.

    For models of up to 20,000 parameters, such as a logistic regression. Each batch costs as many Hessian-vector
    products as there are parameters, computed many at a time. The model is in evaluation mode. With several ranks,
    every rank passes the same arguments and a loader of all samples, uses its share of the batches, and gets the whole
    result.
    """
    check_model(model, "sw.attribution.hessian(model, loss_fn, loader)")
    parameters = wanted_parameters(model).named
    width = sum(p.numel() for p in parameters.values())
    if not 0 < width <= LARGEST:
        raise ParameterError(
            f"hessian needs a model of 1 to {LARGEST:,} trainable parameters, because it computes a matrix with the "
            f"square of that number; found {width:,}. Use sw.ekfac."
        )
    loss_fn = as_loss_fn(loss_fn)
    check_loader(loader)
    device = next(iter(parameters.values())).device
    total = torch.zeros(width, width, dtype=torch.float64, device=device)
    samples = 0

    def add_batches() -> None:
        nonlocal samples
        for _, batch in share_of_rank(loader, "hessian"):
            with torch.enable_grad():
                losses = per_sample(loss_fn(model, batch))[0]
            check_attached(losses)
            samples += len(losses)
            _add_second_derivatives(total, losses, list(parameters.values()))

    with eval_mode(model):
        on_every_rank(add_batches)
    (count,) = collectives.all_reduce_scalars(samples)
    if not count:
        raise ValueError("the loader must yield at least one batch; found none.")
    matrix = collectives.all_reduce_(total).div_(count)
    matrix = (matrix + matrix.T).div_(2)  # equal up to rounding; Cholesky reads one half
    return Hessian(matrix, {name: tuple(p.shape) for name, p in parameters.items()})


def _add_second_derivatives(total: Tensor, losses: Tensor, parameters: list[Tensor]) -> None:
    """Add the Hessian of the sum of the losses to `total`, some of its rows at a time."""
    with torch.enable_grad():
        gradients = torch.autograd.grad(losses.sum(), parameters, create_graph=True, materialize_grads=True)
        flat = torch.cat([g.reshape(-1) for g in gradients])
    if not flat.requires_grad:  # the losses are linear in the parameters
        return
    step = max(1, ELEMENTS // len(losses))  # directions that vmap multiplies at a time: each needs its own activations
    for start in range(0, len(flat), step):
        stop = min(start + step, len(flat))
        directions = torch.zeros(stop - start, len(flat), dtype=flat.dtype, device=flat.device)
        directions[:, start:stop].fill_diagonal_(1)
        rows = torch.autograd.grad(
            flat, parameters, directions, retain_graph=True, is_grads_batched=True, allow_unused=True
        )
        column = 0
        for p, row in zip(parameters, rows, strict=True):
            if row is not None:
                total[start:stop, column : column + p.numel()] += row.reshape(stop - start, -1)
            column += p.numel()


class Hessian:
    """Curvature returned by `sw.attribution.hessian`: an explicit symmetric matrix.

    matrix: (parameters, parameters) in float64, in the order of the model's trainable parameters
    """

    def __init__(self, matrix: Tensor, shapes: Mapping[str, tuple[int, ...]]):
        self.matrix = matrix
        self.shapes = dict(shapes)
        self._factor: Tensor | None = None  # Cholesky factor of the matrix plus `_shift`
        self._shift = 0.0
        self._default: float | None = None

    @property
    def mean_eigenvalue(self) -> float:
        """Mean of the eigenvalues, which is that of the diagonal. `damping` is a multiple of it."""
        return float(self.matrix.diagonal().mean())

    def solve(self, rows: Rows, damping: float | None = None) -> dict[str, Tensor]:
        """Product of (H + damping * mean_eigenvalue * identity)^-1 with each row, name -> (n, *shape).

        damping: multiple of `mean_eigenvalue`, see `Curvature`; 1 was better than 0.1 for logistic regression. The sum
            must be positive definite: the Hessian of a net has negative eigenvalues unless it is trained to a minimum,
            and that of a softmax has zeros. Default: see `default_shift`
        """
        check_shapes({name: tuple(values.shape[1:]) for name, values in rows.items()}, self.shapes)
        mean = self.mean_eigenvalue
        shift = self.default_shift if damping is None else checked_damping(damping) * mean
        if not mean > 0 and (damping is not None or shift == 0):
            raise ValueError(
                "the mean eigenvalue of the Hessian must be positive, because damping is a multiple of it; found "
                f"{mean:.3g}. Train the model closer to a minimum, leave damping out, or use sw.ekfac."
            )
        factor = self._cholesky_factor(shift)
        flat = torch.cat([rows[name].flatten(1) for name in self.shapes], 1)
        solved = torch.cholesky_solve(flat.T.to(factor), factor).T
        parts = solved.split([rows[name][0].numel() for name in self.shapes], 1)
        by_name = dict(zip(self.shapes, parts, strict=True))
        return {name: by_name[name].to(values.dtype).reshape(values.shape) for name, values in rows.items()}

    @property
    def default_shift(self) -> float:
        """The number that is added to all eigenvalues by default: 0.1 times their mean, or, if the sum is not positive
        definite, 4 times the size of the most negative eigenvalue.
        """
        if self._default is None:
            self._default = max(DEFAULT_DAMPING * self.mean_eigenvalue, 0.0)
            if self._factor_and_failure(self._default)[1]:
                self._default = -NEGATIVE * min(float(torch.linalg.eigvalsh(self.matrix)[0]), 0.0)
        return self._default

    def _cholesky_factor(self, shift: float) -> Tensor:
        """Cholesky factor of the matrix plus a multiple of the identity."""
        if self._factor is None or shift != self._shift:
            self._factor = None  # free its memory first
            factor, failed = self._factor_and_failure(shift)
            if failed:
                mean = self.mean_eigenvalue
                smallest = float(torch.linalg.eigvalsh(self.matrix)[0]) / mean
                raise ValueError(
                    "the Hessian plus damping must be positive definite; found a smallest eigenvalue of "
                    f"{smallest:.3g} times their mean, with damping {shift / mean:.3g}. Pass a damping above "
                    f"{max(-smallest, 0):.3g}, or none for the default, or train the model closer to a minimum."
                )
            self._factor = factor
            self._shift = shift
        return self._factor

    def _factor_and_failure(self, shift: float) -> tuple[Tensor, bool]:
        damped = self.matrix.clone()
        damped.diagonal().add_(shift)
        factor, failed = torch.linalg.cholesky_ex(damped)
        pivots = factor.diagonal() ** 2  # cholesky_ex accepts a matrix that is singular up to rounding
        return factor, bool(failed) or not pivots.min() > len(factor) * torch.finfo(factor.dtype).eps * pivots.max()

    def __repr__(self) -> str:
        default = "" if self._default is None else f", default damping {self._default:.3g}"
        return f"Hessian({len(self.matrix):,} parameters in {listed(self.shapes)}{default})"
