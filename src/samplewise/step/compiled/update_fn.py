"""One complete update as a function of tensors; this function is compiled.

rows → losses, gradients → max_grad_norm → optimizer formula → if all finite: write parameters and state in place

Losses and gradients are traced from the accumulators of uncompiled updates. The rest is written here again instead of
traced from `UpdateApplier` and the optimizer: these read the finite flag and the hyperparameters as Python numbers,
which would become constants of the code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from samplewise.engine.grads.kernels import total
from samplewise.step.compiled.decompositions import materialize
from samplewise.step.compiled.optim import OptimBuckets
from samplewise.step.compiled.tracing import Backward


class Inputs(NamedTuple):
    """Inputs of the compiled code, in this order."""

    trained: list[Tensor]
    states: list[Tensor]
    untrained: list[Tensor]
    constants: list[Tensor]
    cells: list[Tensor]  # first row, flag (squared gradient norm, or non-finite), scalars of the formula
    batch: list[Tensor]

    def flat(self) -> list[Tensor]:
        """All tensors in one list."""
        return [tensor for part in self for tensor in part]

    def like(self, flat: Sequence[Tensor]) -> Inputs:
        """Inputs with the tensors of `flat`, split as in this object."""
        tensors = iter(flat)
        return Inputs(*([next(tensors) for _ in part] for part in self))


class Values(NamedTuple):
    """Tensors that an update changes."""

    trained: dict[str, Tensor]
    states: dict[tuple[str, str], Tensor]
    untrained: list[Tensor]

    def tensors(self) -> list[Tensor]:
        return [*self.trained.values(), *self.states.values(), *self.untrained]


@dataclass
class CompiledUpdate:
    """One update of `samples` rows. `has_rows[k]` is True if tensor k of the batch has one row per sample."""

    backward: Backward
    buckets: OptimBuckets | None  # None: gradients are returned, for the optimizer or for the sum over ranks
    samples: int
    has_rows: list[bool]
    max_grad_norm: float | None
    checks: bool

    def __call__(self, inputs: Inputs) -> tuple[Tensor, ...]:
        start, flag, numbers = inputs.cells
        states = {} if self.buckets is None else dict(zip(self.buckets.states, inputs.states, strict=True))
        before = Values(dict(zip(self.backward.trained, inputs.trained, strict=True)), states, inputs.untrained)
        moving = self.backward.moving
        untrained = [t.clone() if k in moving else t for k, t in enumerate(inputs.untrained)]  # the model changes these
        run: Any = fx.Interpreter(self.backward.graph).run
        results = run(*inputs.trained, *untrained, *self._rows(inputs.batch, start), *inputs.constants)
        stats = [t.contiguous() for t in results[: self.backward.first_gradient]]
        gradients, size = self._gradients(results)
        # Adding the doubts makes the flag NaN if a per-sample result is invalid, without another output.
        doubts = [_doubt(name, t) for name, t in zip(self.backward.columns, stats, strict=False)]
        size = total([size, *doubts])
        flag.copy_(size.reshape(1))
        after = before._replace(untrained=untrained)
        if self.buckets is not None:
            scalars = self.buckets.split(numbers)
            after = Values(*self.buckets.apply(before.trained, gradients, states, scalars), untrained)
        # Write new values in place if everything is finite. Without checks, values are always written, but only after
        # everything has been computed: an index may be out of range.
        fit = materialize(size.isfinite() if self.checks else size.isnan() | (size >= 0))
        for old, new in zip(before.tensors(), after.tensors(), strict=True):
            if new is not old:
                old.copy_(torch.where(fit, new, old))
        return (*stats, *(gradients.values() if self.buckets is None else ()))

    def _rows(self, batch: Sequence[Tensor], start: Tensor) -> list[Tensor]:
        places = start if self.samples == 1 else start + torch.arange(self.samples)
        row = torch.ops.aten._unsafe_index.Tensor  # no bounds check: batches have any number of rows
        return [row(t, [places]) if rows else t for t, rows in zip(batch, self.has_rows, strict=True)]

    def _gradients(self, results: Sequence[Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        """Gradients after `max_grad_norm`, and their squared norm before it."""
        gradients = self.backward.gradients(results)
        square = self._square(gradients, results)
        if self.max_grad_norm is not None:  # as in torch.nn.utils.clip_grad_norm_
            scale = materialize((self.max_grad_norm / (square.sqrt() + 1e-6)).clamp(max=1))
            gradients = {name: g * scale.to(g.dtype) for name, g in gradients.items()}
        return gradients, square

    def _square(self, gradients: dict[str, Tensor], results: Sequence[Tensor]) -> Tensor:
        """Squared norm of the gradient; for a column times a row, the product of their squared norms."""
        squares = []
        for name, g in gradients.items():
            factors = [results[k] for k in self.backward.factors.get(name, ())] or [g]
            sums = [_square(t) for t in factors]
            squares.append(sums[0] * sums[1] if len(sums) == 2 else sums[0])
        return total(square.double() for square in squares)


def _doubt(column: str, values: Tensor) -> Tensor:
    """Return NaN for an invalid column (non-finite values; a negative count; a denominator of zero or less), else
    zero.
    """
    doubt = (values * 0).sum().double()
    if column not in ("counts", "shares"):
        return doubt
    refused = ~(values.sum() > 0)
    if column == "counts":
        refused = refused | (values.min() < 0)
    return torch.where(refused, torch.nan, doubt)


def _square(t: Tensor) -> Tensor:
    t = torch.view_as_real(t) if t.is_complex() else t
    return (t * t).sum()
