"""Refusal of `privacy=` inside other trainers."""

from __future__ import annotations

from typing import Any

from samplewise.errors import PrivacyError


def refuse_privacy(privacy: Any, trainer: str) -> None:
    """Raise PrivacyError if privacy= is given: these trainers draw batches and make updates themselves."""
    if privacy is not None:
        raise PrivacyError(
            "privacy= must be used with sw.Step, which draws samples as the accountant assumes and adds the noise; "
            f"found it in {trainer}, whose loader cannot be replaced. Use sw.Step(model, optimizer, loss_fn, "
            "privacy=privacy) and sw.Trainer."
        )
