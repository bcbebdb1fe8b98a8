"""Sensitivity of the weighted sum of a chain: a bound of the norm by which one sample, or one group, changes it.

The bound needs two properties. The last transform of single gradients bounds their norm (`clip`). And the coefficient
of a sample does not depend on other samples: otherwise adding one sample would also change the terms of the others.
"""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING

from samplewise.errors import TransformError

if TYPE_CHECKING:
    from samplewise.transforms.chain import Chain
    from samplewise.transforms.transform import SampleTransform

RULE = "the sum of a chain has a bounded sensitivity only if"


def sensitivity(chain: Chain, parameters: int | None = None) -> float:
    """Largest norm by which adding or removing one sample, or one group, changes the sum. `parameters`: number of
    parameters, needed for clip(by="parameter").
    """
    transforms = (*chain.samples.transforms, *chain.groups.transforms)
    for transform in transforms:
        _check_alone(transform)
    last = (chain.samples if chain.grouping is None else chain.groups).transforms[-1:]
    if not last or last[0].max_norm is None:
        found = f"{last[0]} at its end" if last else "none"
        raise TransformError(
            f"{RULE} its last transform before the sum is a clip of the norm; found {found}. Put sw.clip(C) last."
        )
    bound = last[0].max_norm
    if not last[0].by_parameter:
        return bound
    if parameters is None:
        raise TransformError(
            f"the sensitivity of {last[0]} is {bound} × √(number of parameters); found no number of parameters. Use "
            "samplewise.transforms.sensitivity.sensitivity(chain, parameters)."
        )
    return bound * sqrt(parameters)


def _check_alone(transform: SampleTransform) -> None:
    """Raise unless the coefficient of a sample depends on this sample only."""
    reason = None
    if transform.renormalizes:
        reason = "divides by the weights of all samples"
    elif transform.window:
        reason = "compares a sample with the others of its window"
    elif transform.reference is not None:
        reason = "compares gradients with a reference, which may depend on private samples"
    elif transform.positions is not None:
        reason = "depends on the positions of samples in the window"
    if reason is not None:
        raise TransformError(
            f"{RULE} the weight of a sample depends on this sample alone; found {transform}, which {reason}. Leave it "
            "out."
        )
