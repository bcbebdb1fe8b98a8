"""One update made both ways, before compiled code is trusted."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from samplewise.errors import SamplewiseError
from samplewise.replay import snapshot
from samplewise.step.compiled.program import Program
from samplewise.step.evaluation import Evaluation
from samplewise.step.finish import Finish
from samplewise.step.summing import Plain, Summing, Weighted
from samplewise.step.window import Window
from samplewise.transforms.chain import Chain

# An optimizer may blow a gradient that is nothing but rounding up to its full step, so that parameters can differ here
# and there; a wrong graph differs everywhere.
APART = 0.1  # of the length of the step
LOSSES = 1e-3


@torch.no_grad()
def agrees(
    program: Program,
    evaluation: Evaluation,
    finish: Finish,
    chain: Chain,
    record: Collection[str],
    piece: Any,
    start: int,
) -> bool | None:
    """Whether the update that begins at row `start` is the same compiled and uncompiled. Leaves no trace. Of an update
    that is not finite nothing is learnt: None.
    """
    state = [
        t for kept in getattr(finish.optimizer, "state", {}).values() for t in kept.values() if isinstance(t, Tensor)
    ]
    touched = [*evaluation.trained.named.values(), *state]
    before, restore_model = [t.clone() for t in touched], snapshot(*evaluation.modules)

    def undo() -> None:
        restore_model()
        for tensor, then in zip(touched, before, strict=True):
            tensor.copy_(then)
        evaluation.trained.clear()

    try:
        losses, gradients = _uncompiled(evaluation, finish, chain, record, piece)
        step = program.whole.cohorts is not None
        if step:
            finish.optimizer.step()
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
    same = torch.allclose(program.part(results).losses, losses, rtol=LOSSES, atol=LOSSES)
    origin = before if step else [torch.zeros_like(t) for t in expected]
    return same and _length(found, expected) <= APART * _length(expected, origin) + 1e-12


def _uncompiled(
    evaluation: Evaluation, finish: Finish, chain: Chain, record: Collection[str], piece: Any
) -> tuple[Tensor, list[Tensor]]:
    """The losses, and the gradients in `.grad`."""
    weighs = chain.weighs or "norms" in record
    summing: Summing = Weighted(evaluation, chain, "norms" in record) if weighs else Plain(evaluation)
    evaluation.trained.clear()
    summing.begin()
    with torch.enable_grad():
        parts = summing.add([piece], 0)
    finish.prepare(Window(parts=parts, samples=len(parts[0])))
    return parts[0].losses, evaluation.trained.gradients()


def _length(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Of the difference."""
    return float(sum(_wide(x - y).abs().square().sum() for x, y in zip(a, b, strict=True))) ** 0.5


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.complex128 if t.is_complex() else torch.float64)
