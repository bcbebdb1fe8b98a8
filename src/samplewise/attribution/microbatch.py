"""Microbatch sizes of the passes over training samples and queries."""

from __future__ import annotations

from typing import Literal

from torch import nn

from samplewise.core.losses import LossFn
from samplewise.scan import Scanner
from samplewise.step.microbatch import Auto

Microbatch = Auto | int | Literal["auto"]


def scanner_of(model: nn.Module, loss_fn: LossFn, microbatch: Microbatch) -> Scanner:
    """Scanner that cuts batches into microbatches of a size, or of the largest size that fits into memory."""
    if isinstance(microbatch, Auto):
        return Scanner(model, loss_fn, "auto", memory=microbatch.memory)
    return Scanner(model, loss_fn, microbatch)
