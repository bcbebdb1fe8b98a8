"""Verification of compiled code: one update is computed compiled and uncompiled, and compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from samplewise.core.snapshot import snapshot
from samplewise.errors import SamplewiseError
from samplewise.step.accumulate import Accumulator
from samplewise.step.apply import UpdateApplier
from samplewise.step.compiled.program import Program
from samplewise.step.config import StepConfig
from samplewise.step.forward import LossEvaluator
from samplewise.step.window import Window

# An optimizer can scale a gradient that consists of rounding errors up to a full step, so single parameters may differ;
# with a wrong graph all parameters differ.
APART = 0.1  # allowed difference, relative to the norm of the update
LOSSES = 1e-3  # allowed difference of losses, absolute and relative


@torch.no_grad()
def agrees(
    program: Program,
    accumulator: Accumulator,
    evaluator: LossEvaluator,
    applier: UpdateApplier,
    config: StepConfig,
    microbatch: Any,
    start: int,
    mean: bool,
) -> bool | None:
    """Test whether the update from row `start` is equal compiled and uncompiled; None if it is not finite. mean=False:
    the program returns sums of gradients.

    Restores parameters, optimizer state, buffers and RNG.
    """
    state: list[Tensor] = []
    for kept in getattr(applier.optimizer, "state", {}).values():
        state += [t for t in kept.values() if isinstance(t, Tensor)]
    touched = [*evaluator.trained.named.values(), *state]
    before = [t.clone() for t in touched]
    restore_model = snapshot(*evaluator.modules)

    def undo() -> None:
        restore_model()
        for tensor, then in zip(touched, before, strict=True):
            tensor.copy_(then)
        evaluator.trained.clear()

    try:
        losses, gradients = _uncompiled(accumulator, evaluator, applier, config, microbatch, mean)
        step = program.update.buckets is not None
        if step:
            applier.optimizer.step()
        expected = [t.clone() for t in (touched if step else gradients)]
        undo()
        program.record()
        undo()
        results = program(start, era=-2)
        if results is None:
            return None
        found = [t.clone() for t in (touched if step else program.gradients(results).values())]
    except SamplewiseError:
        return None
    finally:
        undo()
    same = torch.allclose(program.stats(results).losses, losses, rtol=LOSSES, atol=LOSSES)
    origin = before if step else [torch.zeros_like(t) for t in expected]
    return same and _length(found, expected) <= APART * _length(expected, origin) + 1e-12


def _uncompiled(
    accumulator: Accumulator,
    evaluator: LossEvaluator,
    applier: UpdateApplier,
    config: StepConfig,
    microbatch: Any,
    mean: bool,
) -> tuple[Tensor, list[Tensor]]:
    """Compute the update's gradients, or their sums, uncompiled into `.grad`; return losses and gradients."""
    evaluator.trained.clear()
    accumulator.begin()
    with torch.enable_grad():
        parts = accumulator.add([microbatch], 0)
    if mean:
        applier.prepare(Window(config, parts=parts, samples=len(parts[0])))
    return parts[0].losses, evaluator.trained.gradients()


def _length(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Euclidean norm of the difference of two lists of tensors."""
    return float(sum(_wide(x - y).abs().square().sum() for x, y in zip(a, b, strict=True))) ** 0.5


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.complex128 if t.is_complex() else torch.float64)
