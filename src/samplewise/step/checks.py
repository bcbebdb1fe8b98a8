"""Warnings and errors about common mistakes, checked once at the first update."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from samplewise.core.batchnorm import mixing_batch_norms
from samplewise.core.modes import warn as warn
from samplewise.core.text import listed
from samplewise.errors import ParameterError


def check_pieces(modules: Iterable[nn.Module], sizes: Sequence[int], interacting: str) -> None:
    """Warn if BatchNorm in training mode normalizes microbatches of one sample, or a window of several microbatches;
    and about a window of several microbatches whose samples may interact. `sizes`: samples of each microbatch.
    """
    if len(sizes) == 1 and sizes[0] > 1:
        return
    names = mixing_batch_norms(modules)
    if names and 1 in sizes:
        warn(
            f"BatchNorm in training mode gets microbatches of one sample: {listed(names)}. Its statistics are then "
            "those of single samples. Use larger microbatches, call sw.freeze_batchnorm(model), or use GroupNorm."
        )
    elif names:
        warn(
            f"BatchNorm in training mode gets a window in {len(sizes)} microbatches: {listed(names)}. Its statistics "
            "are those of each microbatch, so that results depend on the microbatch size. Use microbatch=None with "
            "batches of the window's size, call sw.freeze_batchnorm(model), or use GroupNorm."
        )
    elif interacting == "allow" and len(sizes) > 1:
        warn(
            f"with interacting='allow', a window is computed in {len(sizes)} microbatches: a loss then depends on the "
            "samples of its own microbatch only, so that results depend on the microbatch size. Use microbatch=None "
            "with batches of the window's size, unless this is intended."
        )


def check_reached(trained: dict[str, Tensor], noise: bool) -> None:
    """Warn about parameters of the optimizer that got no gradient; raise if none got one. No warning with noise on the
    sum, which gives every parameter a gradient.
    """
    missed = [name for name, p in trained.items() if p.requires_grad and p.grad is None]
    if missed and all(p.grad is None for p in trained.values()):
        raise ParameterError(
            f"the loss must reach a parameter of the optimizer; found that it reaches none of {listed(missed)}. "
            "Check whether the optimizer was created from another model, or the model was copied afterwards."
        )
    if missed and not noise:
        warn(
            f"the optimizer has parameters that the loss does not reach: {listed(missed)}. They got no gradient in "
            "the first update. Look for a detach(), an unused layer, or the wrong model."
        )


def check_untracked(untracked: dict[str, Tensor], reached: set[int]) -> None:
    """Warn about parameters that the loss reaches and that the optimizer does not have. `reached`: ids of leaves."""
    missed = [name for name, p in untracked.items() if id(p) in reached]
    if missed:
        warn(
            f"the loss reaches parameters that the optimizer does not have: {listed(missed)}. They are not trained. "
            "Add them to the optimizer, or freeze them with requires_grad_(False)."
        )
