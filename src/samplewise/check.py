"""`sw.check`: compare the engine with one backward pass per sample, in float64, on a copy of the model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from samplewise.core.batches import copied, keep_whole, map_leaves
from samplewise.core.closure_state import CallSnapshot, state_restored
from samplewise.core.comparisons import RANDOM, changed_by_exchange, changed_by_order, loss_alone, why_not_alone
from samplewise.core.losses import LossFn, as_loss_fn, constants_of, note_causes, per_sample
from samplewise.core.text import Table, Tabular, listed, plural
from samplewise.engine.arguments import check_model, wanted_parameters
from samplewise.engine.gradients import Gradients, gradients
from samplewise.engine.graph.graph import Edge
from samplewise.engine.strategies import jacobian_rows
from samplewise.errors import GraphError, SamplesInteractError, SamplewiseError

TOLERANCE = 1e-9
RECOMPUTED = 3  # samples that are recomputed alone


@dataclass(frozen=True)
class ParameterCheck:
    """Result for one parameter: its largest per-sample norm and the relative errors of the engine."""

    parameter: str
    shape: tuple[int, ...]
    norm: float
    errors: dict[str, float]  # of rows, norms and sum, each relative to the largest absolute value
    tolerance: float = TOLERANCE

    @property
    def ok(self) -> bool:
        return all(error <= self.tolerance for error in self.errors.values())

    def cells(self) -> tuple[str, ...]:
        """Cells of a row of the printed table."""
        shape = "x".join(map(str, self.shape)) or "1"
        errors = (f"{error:.0e}" for error in self.errors.values())
        return (self.parameter, shape, f"{self.norm:.3g}", *errors, "ok" if self.ok else "WRONG")


@dataclass(frozen=True, repr=False)
class Check(Tabular):
    """Result of `sw.check`, shown as a table with one line per parameter; `ok` is True if everything agrees."""

    samples: int
    lines: list[ParameterCheck] = field(default_factory=list)
    refusal: str | None = None
    notes: list[str] = field(default_factory=list)
    interacts: bool = False

    @property
    def ok(self) -> bool:
        return self.refusal is None and not self.interacts and all(line.ok for line in self.lines)

    def _table(self) -> Table:
        quantities = list(self.lines[0].errors) if self.lines else []
        rows = [line.cells() for line in self.lines]
        outcome = "ok" if self.ok else "NOT OK"
        title = f"engine vs. one backward pass per sample, float64, {plural(self.samples, 'sample')}: {outcome}"
        refusal = [f"refused: {self.refusal}"] if self.refusal else []
        return Table(("parameter", "shape", "largest norm", *quantities, ""), rows, title, [*refusal, *self.notes])


def check(model: nn.Module, loss_fn: LossFn, batch: Any) -> Check:
    """Compare the engine's results with one backward pass per sample, in float64.

    Compares rows, norms and sums of every parameter. Also recomputes up to 3 samples alone, and all samples in other
    orders: a different loss means that samples interact. Works on a copy; the model is not changed.
    """
    check_model(model, "sw.check(model, loss_fn, batch)")
    if isinstance(batch, (DataLoader, Dataset, Iterator)):
        remedy = "next(iter(DataLoader(dataset, batch_size=8)))" if isinstance(batch, Dataset) else "next(iter(loader))"
        raise TypeError(f"batch must be one batch; found a {type(batch).__name__}. Pass {remedy}.")
    if isinstance(batch, list) and len(batch) == 1 and isinstance(batch[0], (tuple, dict)):
        raise TypeError("batch must be one batch; found a list with one batch. Pass the batch itself.")
    loss_fn = as_loss_fn(copy.deepcopy(loss_fn).double() if isinstance(loss_fn, nn.Module) else loss_fn)
    model_copy = copy.deepcopy(model).double()
    batch = keep_whole(map_leaves(batch, _as_double), constants_of(loss_fn))
    with state_restored([loss_fn]), torch.enable_grad():
        try:
            losses = per_sample(loss_fn(model_copy, copied(batch)))[0]
        except Exception as error:
            note_causes(error, model_copy, batch)
            raise
        try:
            g = gradients(losses, model_copy)
            lines = _compare(losses, g, model_copy)
        except SamplewiseError as error:
            if not isinstance(error, (SamplesInteractError, GraphError)):
                raise
            return Check(len(losses), refusal=str(error), interacts=isinstance(error, SamplesInteractError))
        interacts, notes = _recompute_alone(model_copy, loss_fn, batch, losses)
    return Check(len(losses), lines, None, notes + _advice(model_copy, lines), interacts)


def _as_double(leaf: Any) -> Any:
    return leaf.detach().double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _compare(losses: Tensor, g: Gradients, model_copy: nn.Module) -> list[ParameterCheck]:
    full = g.full()
    norms = g.norms(by="parameter")
    total = g.sum()
    # Tolerance for parameters that the model casts to a lower precision before it uses them, as Keras does.
    graph = g._graph
    tolerances = {}
    for leaf, name in graph.leaves.items():
        edges = [Edge(user, slot) for user, _ in graph.consumers[leaf] for slot in graph.used_slots(user)]
        eps = max(torch.finfo(edge.dtype).eps for edge in edges)
        if eps > torch.finfo(torch.float64).eps:
            tolerances[name] = eps**0.75
    rows = jacobian_rows(losses, wanted_parameters(model_copy).named)
    noise = torch.finfo(losses.dtype).eps * max(
        (row.abs().max().item() for row in rows.values() if row.numel()), default=0.0
    )
    checks = []
    for name, row in rows.items():
        flat = row.reshape(len(row), -1)
        expected = flat.abs().square().sum(1).sqrt()
        errors = {
            "rows": _relative_error(full[name], row, noise),
            "norms": _relative_error(norms[name], expected, noise),
            "sum": _relative_error(total[name], row.sum(0), noise, row),
        }
        tolerance = tolerances.get(name, TOLERANCE)
        checks.append(ParameterCheck(name, tuple(row.shape[1:]), expected.max().item(), errors, tolerance))
    return checks


def _relative_error(result: Tensor, expected: Tensor, noise: float, scale: Tensor | None = None) -> float:
    """Largest error relative to the largest element of `scale`, by default of `expected`; absolute if that is 0.

    Errors up to `noise` count as 0: a gradient that is zero in exact arithmetic, such as that of the bias of attention
    keys, consists of rounding errors.
    """
    if not expected.numel():
        return 0.0
    largest = (expected if scale is None else scale).abs().max()
    error = (result - expected).abs().max()
    if error <= noise:
        return 0.0
    return (error / largest).item() if largest > 0 else error.item()


def _recompute_alone(model_copy: nn.Module, loss_fn: LossFn, batch: Any, losses: Tensor) -> tuple[bool, list[str]]:
    """Recompute up to RECOMPUTED samples alone; return whether a loss differs from the one in the batch, and notes."""

    def compute(batch: Any) -> Tensor:
        return per_sample(loss_fn(model_copy, copied(batch)))[0]

    def rewind() -> Callable[[], Any]:
        return CallSnapshot([loss_fn], [model_copy]).restore

    with torch.no_grad():
        reason = why_not_alone(compute, batch, losses)
        if reason == RANDOM:
            change = changed_by_exchange(compute, batch, rewind, 1e-6)
            if change is not None:
                return True, [f"{change}: samples interact"]
            return False, [f"{reason}, so no sample was recomputed alone; repeat the check in eval mode"]
        if reason is not None:
            return False, [f"{reason}, so no sample was recomputed alone"]
        change = changed_by_order(compute, batch, losses, 1e-6)
        if change is not None:
            return True, [f"{change}: samples interact"]
        for i in range(min(RECOMPUTED, len(losses))):
            alone = loss_alone(compute, batch, i)
            if alone.shape != (1,) or not torch.isclose(alone[0], losses[i].detach(), rtol=1e-6, atol=1e-9):
                return True, [
                    f"sample {i} has loss {losses[i].item():.6g} in the batch and "
                    f"{alone.flatten()[0].item():.6g} alone: samples interact"
                ]
    number = min(RECOMPUTED, len(losses))
    if number == 1:
        return False, ["1 sample recomputed alone has the same loss as in the batch"]
    return False, [f"{number} samples recomputed alone have the same losses as in the batch"]


def _advice(model_copy: nn.Module, lines: list[ParameterCheck]) -> list[str]:
    unused = [line.parameter for line in lines if line.norm == 0]
    frozen = [name for name, p in model_copy.named_parameters() if not p.requires_grad]
    notes = []
    for tolerance in sorted({line.tolerance for line in lines} - {TOLERANCE}):
        names = listed(line.parameter for line in lines if line.tolerance == tolerance)
        notes.append(f"the model uses {names} in lower precision than float64: errors up to {tolerance:.0e} are ok")
    if unused:
        notes.append(f"the losses do not depend on these parameters: {', '.join(unused)}")
    if frozen:
        notes.append(f"frozen parameters were not compared: {listed(frozen)}")
    return notes
