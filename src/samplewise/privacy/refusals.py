"""Settings of a step that would void the guarantee, refused when the step is created."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samplewise.core.microbatch import Auto
from samplewise.errors import PrivacyError
from samplewise.privacy.privacy import Privacy
from samplewise.transforms.chain import Chain


def check_settings(settings: Mapping[str, Any], plan: Privacy) -> None:
    """Raise PrivacyError for settings of `Step`, by name, that would void the guarantee."""
    defaults = {
        "samples": ((None,), "an update is one draw of privacy.loader"),
        "tail": (("update",), "an update is one draw of privacy.loader"),
        "interacting": (("refuse",), "the norm of one sample's gradient must not depend on others"),
        "on_nonfinite": ((None, "zero"), "a sample that is not finite contributes nothing"),
    }
    for name, (allowed, reason) in defaults.items():
        value = settings[name]
        if value not in allowed:
            raise PrivacyError(f"{name} must have its default with privacy=, because {reason}; found {value!r}.")
    if settings["precision"] == "16-mixed":
        raise PrivacyError(
            "precision must not scale the loss with privacy=, because whether it overflows depends on single "
            "samples; found '16-mixed'. Use 'bf16-mixed'."
        )
    if settings["recheck"] is False:
        raise PrivacyError(
            "recheck must not be False with privacy=, because it finds samples that interact; found False. Leave "
            "it out."
        )
    if settings["record"] and not plan.observe:
        raise PrivacyError(
            "record must be empty with privacy=, because norms of single samples are not covered by the guarantee; "
            f"found {', '.join(settings['record'])}. Leave it out, or pass sw.Privacy(observe=True)."
        )
    if isinstance(settings["microbatch"], Auto) and plan.users is not None:
        raise PrivacyError("microbatch must be a number or None with users= of sw.Privacy; found an automatic size.")


def check_transforms(transforms: Chain, plan: Privacy) -> None:
    """Raise PrivacyError for transforms that cannot precede grouping, clip and noise of a plan."""
    if transforms.on_sum or transforms.grouping is not None:
        misfit = transforms.on_sum[0] if transforms.on_sum else transforms.grouping
        remedy = "users= of sw.Privacy groups by user" if transforms.grouping is not None else "it adds its own noise"
        raise PrivacyError(
            f"transforms must act on single samples with privacy=; found {misfit}. Leave it out: {remedy}."
        )
    if plan.users is not None and (transforms.batch_keys or transforms.reads_whole_batch):
        raise PrivacyError("transforms must not read the batch with users=; found one that does. Leave it out.")
    if plan.adaptive is not None and transforms.transforms:
        raise PrivacyError(f"an adaptive bound must have no other transforms; found {transforms!r}. Leave them out.")


def check_sharded_precision(sharded: bool, precision: str | None) -> None:
    """Raise PrivacyError if the sum of a sharded model would have less than the precision of float32."""
    if sharded and precision not in (None, "32"):
        raise PrivacyError(
            "a private sum must have the precision of float32, and a sharded model is summed by a backward pass in "
            f"the precision of the forward pass; found precision={precision!r}. Leave it out, or use "
            "parallel='ddp'."
        )
