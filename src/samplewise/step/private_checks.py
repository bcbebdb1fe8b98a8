"""Checks of model and buffers in every update of a private step."""

from __future__ import annotations

from samplewise.core.snapshot import Buffers
from samplewise.core.text import listed
from samplewise.errors import PrivacyError
from samplewise.step.parameters import TrainedParameters


def check_private_parameters(trained: TrainedParameters) -> None:
    """Raise if a parameter of the model may be trained outside of the step, without noise."""
    untracked = trained.untracked_parameters()
    if untracked:
        raise PrivacyError(
            "all parameters of a private model must be trained by the step, or frozen; found parameters that the "
            f"optimizer does not have: {listed(untracked)}. Add them to the optimizer, or freeze them with "
            "requires_grad_(False)."
        )


def check_private_buffers(buffers: Buffers) -> None:
    """Raise if the forward pass has changed a buffer: it holds data of the samples, without noise."""
    if buffers.changed():
        raise PrivacyError(
            "the buffers of a private model must not change in training, because they would hold data of the samples "
            "without noise; found that one has changed. Call sw.freeze_batchnorm(model), or use GroupNorm."
        )
