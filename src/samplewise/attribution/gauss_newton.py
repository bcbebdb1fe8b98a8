"""Gauss-Newton matrix solved by conjugate gradients: the curvature of `sw.influence(..., refine=)`.

The generalized Gauss-Newton matrix of the mean loss is J^T H J / N: J is the Jacobian of the outputs of the model with
respect to the parameters, H the Hessian of the losses with respect to these outputs. Both are products of autograd, so
that any loss and any model with second derivatives will do:

    J v      derivative, with respect to w, of (J^T w) . v: a backward pass through a backward pass
    H u      derivative, along u, of the gradient of the losses with respect to the outputs
    J^T w    a backward pass

Legend: q vector, p all parameters; z outputs of the model in products with the matrix.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from samplewise.attribution.curvature import Rows, check_shapes, checked_damping
from samplewise.attribution.ekfac import EKFAC
from samplewise.attribution.run_damping import RunDamping
from samplewise.attribution.sampled_labels import captured_output, prediction_of
from samplewise.core.losses import LossFn, as_loss_fn, same_constants
from samplewise.core.memory import count_saved_bytes
from samplewise.core.microbatch import Microbatch
from samplewise.core.state import eval_mode
from samplewise.core.text import plural
from samplewise.dataset_pass import check_order, check_repeatable, share_of_rank
from samplewise.engine.arguments import check_model, wanted_parameters, wide_dtype
from samplewise.errors import BatchError, LossesError, NonFiniteLossError
from samplewise.parallel import collectives
from samplewise.parallel.collectives import on_every_rank
from samplewise.scan import Scanner

VECTOR_BYTES = 2**28  # of intermediate results of all vectors that are multiplied at a time
DEFAULT_MULTIPLE = 10.0  # of the mean eigenvalue, see docs/attribution-measurements.md
# EK-FAC is most wrong along its smallest eigenvalues: with more damping than the system, it needs fewer iterations.
PRECONDITIONER_DAMPING = 10.0
ROUNDING = 1e-5  # relative difference of the losses of two passes, which may be cut into other microbatches
SAME = 1e-3  # relative difference of two gradients that are equal up to rounding
Shapes = Sequence[tuple[str, tuple[int, ...]]]  # of the parameters, by name
REMEDY = "Leave refine out to use the curvature alone."


class Stop(NamedTuple):
    """End of the conjugate gradients of one batch of queries."""

    iterations: int
    residual: float  # the largest of the queries, relative to the norm of the query's gradient
    converged: bool  # False: the number of iterations was the limit


class GaussNewton:
    """Curvature: the generalized Gauss-Newton matrix of the mean loss over a loader, plus damping.

    `solve` is the method of conjugate gradients, preconditioned by EK-FAC, on all rows as a block: the more rows, the
    fewer iterations. It stops when the residual of each row is at most `tolerance` times its norm, or after
    `iterations` iterations; `print` shows which. Each iteration is a pass over the loader, whose batches must be the
    same each time. Up to eight numbers are kept for each row and parameter. The model is in evaluation mode, at its
    parameters at the time of the call. With several ranks, each rank uses its share of the batches, and gets the whole
    result.

    model, loss_fn: the losses must depend on the parameters through the output of a single call of the model, which is
        a tensor, or has logits
    train: loader without shuffling, or list of batches
    preconditioner: result of `sw.ekfac`; it changes the number of iterations, not the solution
    iterations: largest number
    damping: multiple of the mean eigenvalue of the preconditioner, over all of its eigenvalues. Default: 1 /
        (learning rate * updates), if `run` is given, otherwise a multiple of 10
    run: run directory of the model, or one of its checkpoints; of a training with SGD
    tolerance: default: 6e-6, 2e-12 in float64
    microbatch: number of samples computed at a time, as in `sw.scan`
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        train: Iterable[Any],
        preconditioner: EKFAC,
        iterations: int = 20,
        *,
        damping: float | None = None,
        run: str | os.PathLike[str] | None = None,
        tolerance: float | None = None,
        microbatch: Microbatch = "auto",
    ):
        check_model(model, "GaussNewton(model, loss_fn, train, sw.ekfac(model, loss_fn, train))")
        check_refine(iterations, preconditioner)
        check_order(train, "Use shuffle=False.")
        check_repeatable(train, "train")
        if damping is not None and run is not None:
            raise ValueError(
                f"damping must be given by damping= or by run=; found damping={damping} and run={str(run)!r}. Leave "
                "one of them out."
            )
        self.preconditioner = preconditioner
        self.mean_eigenvalue = preconditioner.mean_eigenvalue
        self.iterations = iterations
        self.tolerance = tolerance
        self.run_damping = None if run is None else RunDamping.of(run)
        self.multiple = DEFAULT_MULTIPLE if damping is None else checked_damping(damping)
        self.stops: list[Stop] = []
        self._model = model
        self._train = train
        self._loss_fn = same_constants(self._losses, loss_fn)
        self._criterion = as_loss_fn(loss_fn)
        self._prediction: Tensor | None = None
        self._scanner = Scanner(model, self._loss_fn, microbatch)

    @property
    def damping(self) -> float:
        """The number that is added to all eigenvalues by default."""
        return self.multiple * self.mean_eigenvalue if self.run_damping is None else self.run_damping.value

    def solve(self, rows: Rows, damping: float | None = None) -> dict[str, Tensor]:
        """Product of (J^T H J / N + damping * identity)^-1 with each row, name -> (n, *shape). Collective.

        damping: multiple of `mean_eigenvalue`; default: `self.damping`
        """
        parameters = wanted_parameters(self._model).named
        shapes = {name: tuple(p.shape) for name, p in parameters.items()}
        check_shapes(shapes, self.preconditioner.shapes)
        check_shapes({name: tuple(values.shape[1:]) for name, values in rows.items()}, shapes)
        added = self.damping if damping is None else checked_damping(damping) * self.mean_eigenvalue
        flat = torch.cat([rows[name].flatten(1) for name in parameters], 1)
        flat = flat.to(wide_dtype(flat.dtype))
        with eval_mode(self._model):
            solved = self._solve(flat, added, list(shapes.items()))
        return {name: values.to(rows[name].dtype) for name, values in _split(solved, list(shapes.items())).items()}

    def _solve(self, b: Tensor, damping: float, shapes: Shapes) -> Tensor:
        """Solutions (q, p) of A x = b for each row of b, where A is the matrix plus damping.

        Conjugate gradients on blocks of vectors (Ji and Li, 2017): the residuals r of all rows span the next search
        directions d, so that each row is solved in the space of all of them. Orthonormal directions, of which those
        that depend on others are left out, keep the small systems regular.
        """
        tolerance = self.tolerance or torch.finfo(b.dtype).eps ** 0.75
        norms = torch.linalg.vector_norm(b, dim=1, keepdim=True, dtype=torch.float64).to(b.dtype)
        r = b / norms.where(norms > 0, 1)  # products of tiny gradients would underflow
        x = torch.zeros_like(b)
        residuals = r.norm(dim=1)
        d = _orthonormal(self._precondition(r[residuals > 0], damping, shapes))
        losses: float | None = None  # of the first pass
        iterations = 0
        while iterations < self.iterations:
            d = collectives.broadcast_object(d)  # the number of directions may depend on rounding
            if not len(d):
                break
            product, sum_of_losses = self._product(d, shapes)
            if losses is not None and not math.isclose(losses, sum_of_losses, rel_tol=ROUNDING):
                raise BatchError(
                    "train must yield the same batches in each pass, because each iteration of conjugate gradients is "
                    f"a pass; found losses whose sum was {losses:.9g} and then {sum_of_losses:.9g}. Switch random "
                    "augmentation off."
                )
            losses = losses or sum_of_losses
            product.add_(d, alpha=damping)
            factor, failed = torch.linalg.cholesky_ex(d @ product.T)
            if failed:
                smallest = torch.linalg.eigvalsh(d @ product.T)[0].item()
                raise ValueError(
                    "the Gauss-Newton matrix plus damping must be positive definite; found a direction of curvature "
                    f"{smallest:.3g} with damping {damping:.3g}. Pass a larger damping; for a loss that is not convex "
                    "in the model's output, leave refine out."
                )
            steps = torch.cholesky_solve(d @ r.T, factor).T
            x.addmm_(steps, d)
            r.addmm_(steps, product, alpha=-1)
            iterations += 1
            residuals = r.norm(dim=1)
            z = self._precondition(r[residuals > tolerance], damping, shapes)
            d = _orthonormal(z - torch.cholesky_solve(product @ z.T, factor).T @ d)
        self.stops.append(Stop(iterations, max(residuals.tolist(), default=0.0), not (residuals > tolerance).any()))
        return x.mul_(norms)

    def _precondition(self, r: Tensor, damping: float, shapes: Shapes) -> Tensor:
        solved = self.preconditioner.solve_shifted(_split(r, shapes), PRECONDITIONER_DAMPING * damping)
        return torch.cat([solved[name].flatten(1) for name, _ in shapes], 1)

    # --- products with the Gauss-Newton matrix -----------------------------------------------------------------------

    def _product(self, vectors: Tensor, shapes: Shapes) -> tuple[Tensor, float]:
        """Products (q, p) of the matrix with vectors, and the sum of the losses. Collective."""
        total = torch.zeros_like(vectors)
        split_total = _split(total, shapes)  # views
        split_vectors = _split(vectors, shapes)
        samples = 0
        loss = 0.0

        def add_batches() -> None:
            nonlocal samples, loss
            for _, batch in share_of_rank(self._train):
                # Fused attention has no second derivative.
                with sdpa_kernel(SDPBackend.MATH), count_saved_bytes(self._model) as saved:
                    for _, losses in self._scanner.losses(batch):
                        if not losses.isfinite().all():
                            raise NonFiniteLossError(
                                f"losses must be finite on train; found {losses[~losses.isfinite()][0].item()}. Remove "
                                "samples with NaN or infinity."
                            )
                        self._add_product(split_total, split_vectors, losses, saved.now, check=samples == 0)
                        samples += len(losses)
                        loss += float(losses.detach().sum())

        on_every_rank(add_batches)
        self._prediction = None  # frees its graph
        count, loss = collectives.all_reduce_scalars(samples, loss)
        if not count:
            raise ValueError("train must yield at least one batch; found none.")
        return collectives.all_reduce_(total).div_(count), loss

    def _losses(self, model: nn.Module, batch: Any) -> Any:
        """Losses, with the output of the model as `_prediction`."""
        with captured_output(model) as outputs:
            losses = self._criterion(model, batch)
        self._prediction = prediction_of(outputs, "refine needs", REMEDY)
        return losses

    def _add_product(
        self, total: Mapping[str, Tensor], vectors: Mapping[str, Tensor], losses: Tensor, saved: int, check: bool
    ) -> None:
        """Add J^T H J v of the samples of a microbatch to `total`, for each vector v."""
        z = self._prediction
        parameters = wanted_parameters(self._model).named
        assert z is not None
        if not z.requires_grad:
            return  # no parameter that is trained affects the outputs
        (slope,) = torch.autograd.grad(losses.sum(), z, create_graph=True, allow_unused=True)
        if slope is None or check:
            _check_only_through(z, slope, losses, list(parameters.values()))
        if slope is None or not slope.requires_grad:
            return  # the losses are linear in the outputs
        w = torch.zeros_like(z, requires_grad=True)
        with torch.enable_grad():
            pullback = torch.autograd.grad(z, list(parameters.values()), w, create_graph=True, allow_unused=True)
        used = {name: g for name, g in zip(parameters, pullback, strict=True) if g is not None and g.requires_grad}
        count = len(next(iter(vectors.values())))
        numbers = sum(p.numel() * p.element_size() for p in parameters.values())
        step = max(1, VECTOR_BYTES // max(saved + numbers, 1))
        for start in range(0, count, step):
            part = slice(start, start + step)
            directions = [vectors[name][part].to(g.dtype) for name, g in used.items()]
            (jv,) = _vector_products(list(used.values()), [w], directions)
            (hjv,) = _vector_products([slope], [z], [jv])
            rows = _vector_products([z], [parameters[name] for name in used], [hjv])
            for name, row in zip(used, rows, strict=True):
                total[name][part] += row

    @property
    def rule(self) -> str:
        """The default damping with its origin, as text."""
        if self.run_damping is not None:
            return f"{self.damping:.3g} = {self.run_damping}"
        return f"{self.damping:.3g} = {self.multiple:g} * mean eigenvalue {self.mean_eigenvalue:.3g}"

    def __repr__(self) -> str:
        end = f"; {summary([self])}" if self.stops else f"; damping {self.rule}"
        return f"GaussNewton(at most {plural(self.iterations, 'iteration')} of conjugate gradients{end})"


def check_refine(refine: Any, curvature: Any) -> None:
    """Raise unless these are a number of iterations and a preconditioner."""
    if type(refine) is not int or refine < 1:
        raise ValueError(f"refine must be the largest number of iterations, 1 or more; found {refine!r}.")
    if not isinstance(curvature, EKFAC):
        description = "none" if curvature is None else type(curvature).__name__
        raise TypeError(
            "refine needs curvature=sw.ekfac(...), which preconditions the conjugate gradients and sets the scale of "
            f"the damping; found {description}."
        )


def summary(curvatures: Sequence[GaussNewton]) -> str:
    """Sentence on where conjugate gradients have stopped, over all rows."""
    stops = [stop for curvature in curvatures for stop in curvature.stops]
    iterations = max(stop.iterations for stop in stops)
    residual = max(stop.residual for stop in stops)
    reason = "at the tolerance" if all(stop.converged for stop in stops) else "at the limit of iterations"
    return (
        f"conjugate gradients stopped {reason} after {plural(iterations, 'iteration')}, with a relative residual of "
        f"{residual:.2g} at most; damping {curvatures[-1].rule}"
    )


def _orthonormal(vectors: Tensor) -> Tensor:
    """Orthonormal basis (k, p) of the space of vectors (q, p), up to rounding."""
    if not len(vectors):
        return vectors
    basis, triangle = torch.linalg.qr((vectors / vectors.norm(dim=1, keepdim=True).clamp(min=1e-30)).T)
    rotation, sizes, _ = torch.linalg.svd(triangle)
    independent = sizes > torch.finfo(sizes.dtype).eps * len(vectors) * sizes[0]
    return (basis @ rotation[:, : len(sizes)][:, independent]).T.contiguous()


def _split(flat: Tensor, shapes: Shapes) -> dict[str, Tensor]:
    """Views (q, *shape) of vectors (q, p)."""
    rows = {}
    column = 0
    for name, shape in shapes:
        width = torch.Size(shape).numel()
        rows[name] = flat[:, column : column + width].unflatten(1, shape) if shape else flat[:, column]
        column += width
    return rows


_grad = partial(torch.autograd.grad, retain_graph=True, allow_unused=True, materialize_grads=True)


def _check_only_through(z: Tensor, slope: Tensor | None, losses: Tensor, parameters: Sequence[Tensor]) -> None:
    """Raise LossesError unless the losses depend on the parameters through the outputs z only."""
    if slope is not None:
        whole = _grad(losses.sum(), parameters)
        through = _grad(z, parameters, slope.detach())
        difference = torch.stack([(a - b).norm() for a, b in zip(whole, through, strict=True)]).norm()
        tolerance = SAME if torch.finfo(z.dtype).bits > 16 else 0.1
        if difference <= tolerance * torch.stack([a.norm() for a in whole]).norm():
            return
    raise LossesError(
        "refine needs losses that depend on the parameters through the output of the model, which is a tensor or has "
        f"logits; found another dependence, such as a penalty on the weights. {REMEDY}"
    )


def _vector_products(outputs: list[Tensor], inputs: list[Tensor], vectors: list[Tensor]) -> Sequence[Tensor]:
    """Vector-Jacobian products for each of q vectors, (q, *shape) for each of the inputs."""
    try:
        return _grad(outputs, inputs, vectors, is_grads_batched=True)
    except RuntimeError:  # an operation that vmap does not support, or too little memory: one vector at a time
        products = [_grad(outputs, inputs, list(row)) for row in zip(*vectors, strict=True)]
        return [torch.stack(column) for column in zip(*products, strict=True)]
