"""A whole update as a function of tensors: what the compiled code does.

rows → losses, gradients → is all finite? → max_grad_norm → the optimizer's formula → parameters and state, in place
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from samplewise.engine.forms import total
from samplewise.step.compiled.cohorts import Cohorts
from samplewise.step.compiled.tracing import Backward


class Inputs(NamedTuple):
    """In the order in which the compiled code takes them."""

    trained: list[Tensor]
    states: list[Tensor]
    others: list[Tensor]
    constants: list[Tensor]
    cells: list[Tensor]  # the first row, one flag for each update, the numbers of each update
    batch: list[Tensor]

    def flat(self) -> list[Tensor]:
        return [tensor for part in self for tensor in part]

    def like(self, flat: Sequence[Tensor]) -> Inputs:
        tensors = iter(flat)
        return Inputs(*([next(tensors) for _ in part] for part in self))


class Values(NamedTuple):
    """What an update changes."""

    trained: dict[str, Tensor]
    states: dict[tuple[str, str], Tensor]
    others: list[Tensor]
    alive: Tensor | None  # whether all was finite so far; None: nobody looks


@dataclass
class Whole:
    """`block` updates of `samples` each, one after the other. `chosen`: which tensors of the batch have rows."""

    backward: Backward
    cohorts: Cohorts | None  # None: the optimizer does it, and is given the gradients
    chosen: list[bool]
    max_grad_norm: float | None
    checks: bool
    samples: int = 1
    block: int = 1

    def __call__(self, given: Inputs) -> tuple[Tensor, ...]:
        start, _, numbers = given.cells
        states = {} if self.cohorts is None else dict(zip(self.cohorts.states, given.states, strict=True))
        trained = dict(zip(self.backward.trained, given.trained, strict=True))
        now = Values(trained, states, given.others, None)
        results, found = [], []
        for k, these in enumerate(numbers.chunk(self.block) if numbers.numel() else [numbers] * self.block):
            rows = self._rows(given.batch, start + k * self.samples)
            now, known, flag = self._update(now, rows, given.constants, these)
            results.append(known)
            found.append(flag)
        self._write(given, now, torch.stack(found))
        return tuple(torch.cat(column) if self.block > 1 else column[0] for column in zip(*results, strict=True))

    def _rows(self, batch: Sequence[Tensor], start: Tensor) -> list[Tensor]:
        places = start if self.samples == 1 else start + torch.arange(self.samples)
        return [t.index_select(0, places) if rows else t for t, rows in zip(batch, self.chosen, strict=True)]

    def _update(
        self, now: Values, rows: Sequence[Tensor], constants: Sequence[Tensor], numbers: Tensor
    ) -> tuple[Values, list[Tensor], Tensor]:
        moving = self.backward.moving
        others = [t.clone() if k in moving else t for k, t in enumerate(now.others)]  # changed by the model itself
        run: Any = fx.Interpreter(self.backward.graph).run
        results = run(*now.trained.values(), *others, *rows, *constants)
        gradients = self.backward.gradients(results)
        square = self._square(gradients, results)
        known = list(results[: self.backward.known])
        flag = square + sum(self._doubt(name, t) for name, t in zip(self.backward.columns, known, strict=False))
        if self.max_grad_norm is not None:  # as torch.nn.utils.clip_grad_norm_ does it
            scale = (self.max_grad_norm / (square.sqrt() + 1e-6)).clamp(max=1)
            gradients = {name: g * scale.to(g.dtype) for name, g in gradients.items()}
        if self.cohorts is None:
            return Values(now.trained, now.states, others, None), known + list(gradients.values()), flag
        trained, states = self.cohorts.apply(now.trained, gradients, now.states, numbers)
        return self._kept(now, Values(trained, states, others, flag.isfinite())), known, flag

    def _kept(self, before: Values, after: Values) -> Values:
        """Unless all is finite, everything stays as it was."""
        if not self.checks or after.alive is None:
            return after._replace(alive=None)
        alive = after.alive if before.alive is None else before.alive & after.alive

        def chosen(new: Tensor, old: Tensor) -> Tensor:
            return new if new is old else torch.where(alive, new, old)

        return Values(
            {name: chosen(p, before.trained[name]) for name, p in after.trained.items()},
            {key: chosen(s, before.states[key]) for key, s in after.states.items()},
            [chosen(a, b) for a, b in zip(after.others, before.others, strict=True)],
            alive,
        )

    def _square(self, gradients: dict[str, Tensor], results: Sequence[Tensor]) -> Tensor:
        """The squared norm of the gradient. Of a column times a row it is that of the column times that of the row."""
        squares = []
        for name, g in gradients.items():
            factors = [results[k] for k in self.backward.factors.get(name, ())] or [g]
            sums = [_square(t) for t in factors]
            squares.append(sums[0] * sums[1] if len(sums) == 2 else sums[0])
        return total(square.double() for square in squares)

    def _doubt(self, column: str, values: Tensor) -> Tensor:
        """Zero, if these numbers are fit for an update."""
        if column == "counts":
            return torch.where((values.min() < 0) | (values.sum() == 0), torch.nan, 0.0)
        return (values * 0).sum().double()

    def _write(self, given: Inputs, now: Values, flags: Tensor) -> None:
        given.cells[1].copy_(flags)
        if self.cohorts is not None:
            for old, new in zip(given.trained, now.trained.values(), strict=True):
                if new is not old:
                    old.copy_(new)
            for old, new in zip(given.states, now.states.values(), strict=True):
                old.copy_(new)
        for k in self.backward.moving:
            given.others[k].copy_(now.others[k])


def _square(t: Tensor) -> Tensor:
    t = torch.view_as_real(t) if t.is_complex() else t
    return (t * t).sum()
