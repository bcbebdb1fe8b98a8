"""Gradients of one length."""

from __future__ import annotations

from samplewise.transforms.numbers import Numbers, PerSample
from samplewise.transforms.transform import SampleTransform, positive, quotient


def normalize(norm: float | str = 1.0) -> SampleTransform:
    """Gives every sample's gradient the same length, so that directions alone count; a gradient of zero stays zero.

    norm: the length, or "mean" for the mean length over the window, which keeps the scale of the update.
    """
    if norm == "mean":

        def to_the_mean(numbers: Numbers) -> PerSample:
            norms = numbers.norms
            return quotient(norms.mean(), norms)

        return SampleTransform("normalize('mean')", "mean‖{g}‖/‖{g}‖", to_the_mean, frozenset({"norms"}), window=True)
    if not isinstance(norm, (int, float)):
        raise ValueError(f"norm must be a positive number or 'mean'; found {norm!r}.")
    length = positive("norm", norm)
    name = "normalize()" if length == 1 else f"normalize({length})"
    return SampleTransform(
        name, f"{length:g}/‖{{g}}‖", lambda numbers: quotient(length, numbers.norms), frozenset({"norms"})
    )
