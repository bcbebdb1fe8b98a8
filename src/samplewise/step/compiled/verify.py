"""Verification of compiled code: one update is computed compiled and uncompiled, and compared."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from samplewise.errors import SamplewiseError
from samplewise.step.compiled.program import Program
from samplewise.step.compiled.rehearsal import Rehearsal

# An optimizer can scale a gradient that consists of rounding errors up to a full step, so single parameters may differ;
# with a wrong graph all parameters differ.
APART = 0.1  # allowed difference, relative to the norm of the update
LOSSES = 1e-3  # allowed difference of losses, absolute and relative

Found = tuple[Tensor, list[Tensor]]  # losses, and changed tensors or gradients


@torch.no_grad()
def agrees(program: Program, rehearsal: Rehearsal, start: int) -> bool | None:
    """Test whether the update from row `start` is equal compiled and uncompiled; None if it is not finite."""

    def uncompiled() -> Found:
        losses, found = rehearsal.uncompiled()
        return losses, [t.clone() for t in found]

    def compiled() -> Found | None:
        found = rehearsal.compiled(program, start)
        return None if found is None else (found[0], [t.clone() for t in found[1]])

    try:
        losses, expected = rehearsal.undone(uncompiled)
        rehearsal.undone(program.record)
        results = rehearsal.undone(compiled)
    except SamplewiseError:
        return None
    if results is None:
        return None
    same = torch.allclose(results[0], losses, rtol=LOSSES, atol=LOSSES)
    origin = rehearsal.origin(expected)
    return same and _length(results[1], expected) <= APART * _length(expected, origin) + 1e-12


def _length(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Euclidean norm of the difference of two lists of tensors."""
    return float(sum(_wide(x - y).abs().square().sum() for x, y in zip(a, b, strict=True))) ** 0.5


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.complex128 if t.is_complex() else torch.float64)
