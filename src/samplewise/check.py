"""`sw.check`: compare the engine with one backward pass per sample, in float64, on a copy of the model."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from samplewise.core.batches import map_leaves
from samplewise.core.losses import LossFn, as_loss_fn, loss_alone, per_sample, why_not_alone
from samplewise.core.text import render
from samplewise.engine.checks import named_parameters
from samplewise.engine.gradients import gradients
from samplewise.engine.reference import jacobian_rows
from samplewise.errors import GraphError, SamplesInteractError, SamplewiseError

TOLERANCE = 1e-9
ALONE = 3  # number of samples that are recomputed alone


@dataclass(frozen=True)
class Line:
    """Result for one parameter: its largest per-sample norm and the relative errors of the engine."""

    parameter: str
    shape: tuple[int, ...]
    norm: float
    errors: dict[str, float]  # of rows, norms and sum, each relative to the largest absolute value

    @property
    def ok(self) -> bool:
        return all(error <= TOLERANCE for error in self.errors.values())


@dataclass(frozen=True)
class Check:
    """Result of `sw.check`. Prints as a table with one line per parameter; `ok` is True if everything agrees."""

    samples: int
    lines: list[Line] = field(default_factory=list)
    refusal: str | None = None
    notes: list[str] = field(default_factory=list)
    interacts: bool = False

    @property
    def ok(self) -> bool:
        return self.refusal is None and not self.interacts and all(line.ok for line in self.lines)

    def __str__(self) -> str:
        quantities = list(self.lines[0].errors) if self.lines else []
        cells = [
            (
                line.parameter,
                "x".join(map(str, line.shape)) or "1",
                f"{line.norm:.3g}",
                *(f"{line.errors[q]:.0e}" for q in quantities),
                "ok" if line.ok else "WRONG",
            )
            for line in self.lines
        ]
        verdict = "ok" if self.ok else "NOT OK"
        title = f"engine vs. one backward pass per sample, float64, {self.samples} samples: {verdict}"
        table = render(("parameter", "shape", "largest norm", *quantities, ""), cells, title) if cells else title
        said = ([f"refused: {self.refusal}"] if self.refusal else []) + self.notes
        return "\n".join([table, *said])


def check(model: nn.Module, loss_fn: LossFn, batch: Any) -> Check:
    """Compare the engine's results with one backward pass per sample, in float64.

    Compares rows, norms and sums of every parameter. Also recomputes up to 3 samples alone: a different loss means that
    samples interact. Works on a copy; the model is not changed.
    """
    loss_fn = as_loss_fn(copy.deepcopy(loss_fn).double() if isinstance(loss_fn, nn.Module) else loss_fn)
    twin = copy.deepcopy(model).double()
    batch = map_leaves(batch, _doubled)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        losses = per_sample(loss_fn(twin, batch))[0]
        try:
            found = gradients(losses, twin)
            lines = _compare(losses, found.full(), found.norms(by="parameter"), found.sum(), twin)
        except SamplewiseError as error:
            if not isinstance(error, (SamplesInteractError, GraphError)):
                raise
            return Check(len(losses), refusal=str(error), interacts=isinstance(error, SamplesInteractError))
        interacts, notes = _alone(twin, loss_fn, batch, losses)
    return Check(len(losses), lines, None, notes + _advice(twin, lines), interacts)


def _doubled(leaf: Any) -> Any:
    return leaf.detach().double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _compare(
    losses: Tensor, full: dict[str, Tensor], norms: Any, total: dict[str, Tensor], twin: nn.Module
) -> list[Line]:
    rows = jacobian_rows(losses, named_parameters(twin))
    lines = []
    for name, row in rows.items():
        flat = row.reshape(len(row), -1)
        truth = flat.abs().square().sum(1).sqrt()
        errors = {
            "rows": _off(full[name], row),
            "norms": _off(norms[name], truth),
            "sum": _off(total[name], row.sum(0), row),
        }
        lines.append(Line(name, tuple(row.shape[1:]), truth.max().item(), errors))
    return lines


def _off(found: Tensor, truth: Tensor, scale: Tensor | None = None) -> float:
    largest = (truth if scale is None else scale).abs().max()
    return ((found - truth).abs().max() / largest).item() if largest > 0 else found.abs().max().item()


def _alone(twin: nn.Module, loss_fn: LossFn, batch: Any, losses: Tensor) -> tuple[bool, list[str]]:
    """Recompute up to ALONE samples alone; return whether a loss differs from the one in the batch, and notes."""

    def compute(batch: Any) -> Tensor:
        return per_sample(loss_fn(twin, batch))[0]

    with torch.no_grad():
        reason = why_not_alone(compute, batch, losses)
        if reason is not None:
            remedy = "; repeat the check in eval mode" if "random" in reason else ""
            return False, [f"{reason}, so no sample was recomputed alone{remedy}"]
        for i in range(min(ALONE, len(losses))):
            alone = loss_alone(compute, batch, i)
            if alone.shape != (1,) or not torch.isclose(alone[0], losses[i].detach(), rtol=1e-6, atol=1e-9):
                return True, [
                    f"sample {i} has loss {losses[i].item():.6g} in the batch and "
                    f"{alone.flatten()[0].item():.6g} alone: samples interact"
                ]
    return False, [f"{min(ALONE, len(losses))} samples recomputed alone have the same losses as in the batch"]


def _advice(twin: nn.Module, lines: list[Line]) -> list[str]:
    silent = [line.parameter for line in lines if line.norm == 0]
    frozen = [name for name, p in twin.named_parameters() if not p.requires_grad]
    notes = []
    if silent:
        notes.append(f"no gradient for {', '.join(silent)}: the losses do not depend on them")
    if frozen:
        notes.append(f"{len(frozen)} frozen parameters were not compared")
    return notes
