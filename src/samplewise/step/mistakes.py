"""What is seldom meant, said once, at the first update."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from samplewise import ranks
from samplewise.errors import ParameterError, TrainingWarning, TransformError
from samplewise.transforms.chain import Chain
from samplewise.transforms.numbers import PerSample

SHOWN = 5
MODEL = "model"


def warn(message: str) -> None:
    warnings.warn(message, TrainingWarning, stacklevel=2)


def listed(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def look_at_modes(modules: Sequence[nn.Module]) -> None:
    """Modules in eval mode: the outermost ones."""
    asleep = [path for path, module in paths(modules) if not module.training and not _is_frozen(module)]
    outermost = [path for path in asleep if not any(path.startswith(f"{other}.") for other in asleep)]
    names = ["the model"] if MODEL in outermost else [path.removeprefix(f"{MODEL}.") for path in outermost]
    if outermost:
        warn(
            f"modules are in eval mode while training: {listed(names)}. Dropout and running statistics stand still "
            "there. Call train() on them, unless you mean it."
        )


def _is_frozen(module: nn.Module) -> bool:
    """All of it: then eval mode is what one wants."""
    parameters = list(module.parameters())
    return bool(parameters) and not any(p.requires_grad for p in parameters)


def paths(modules: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Every module with its path, that of the model itself and of the loss module included."""
    roots = zip((MODEL, "loss"), modules, strict=False)
    return [(f"{root}.{name}".rstrip("."), module) for root, top in roots for name, module in top.named_modules()]


def training_batch_norms(modules: Iterable[nn.Module]) -> list[str]:
    return [
        name
        for root in modules
        for name, module in root.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training
    ]


def look_at_batch_norm(modules: Iterable[nn.Module], sizes: Sequence[int]) -> None:
    """A window in pieces: each normalises by itself."""
    if len(sizes) == 1 and sizes[0] > 1:
        return
    names = training_batch_norms(modules)
    if names and 1 in sizes:
        warn(
            f"BatchNorm in training mode sees microbatches of one sample: {listed(names)}. Its statistics are then "
            "those of single samples. Use larger microbatches, model.eval() for these modules, or GroupNorm."
        )
    elif names:
        warn(
            f"BatchNorm in training mode sees a window in {len(sizes)} pieces: {listed(names)}. Its statistics are "
            "those of the pieces, so that results depend on how the window is cut. Use microbatch=None with batches of "
            "the window's size, model.eval() for these modules, or GroupNorm."
        )


def look_at_reach(trained: dict[str, Tensor], noise: bool) -> None:
    """Parameters that got no gradient; with noise on the sum that is the fate they were given."""
    missed = [name for name, p in trained.items() if p.requires_grad and p.grad is None]
    if missed and all(p.grad is None for p in trained.values()):
        raise ParameterError(
            f"the loss must reach a parameter that the optimizer has; found that it reaches none of {listed(missed)}. "
            "Was the optimizer made from another model, or the model copied since?"
        )
    if missed and not noise:
        warn(
            f"the optimizer has parameters that the loss does not reach: {listed(missed)}. They got no gradient in "
            "the first update. Look for a detach, an unused layer, or the wrong model."
        )


def look_at_strangers(strangers: dict[str, Tensor], reached: set[int]) -> None:
    """Parameters that would have a gradient and no optimizer."""
    missed = [name for name, p in strangers.items() if id(p) in reached]
    if missed:
        warn(
            f"the loss reaches parameters that the optimizer does not have: {listed(missed)}. They are not trained. "
            "Give them to the optimizer, or freeze them with requires_grad_(False)."
        )


def look_at_weights(chain: Chain, weights: Sequence[PerSample | None], with_others: bool = False) -> None:
    """Weights that are all zero: an error, for nothing would be learned."""
    columns = [w for found in weights for w in (found.values() if isinstance(found, dict) else [found])]
    some = not columns or any(w is None or bool(w.any()) for w in columns)
    if not (ranks.meet(some)[0] if with_others else some):
        raise TransformError(
            f"some sample of the first update must have a weight that is not zero; found none by {chain!r}. "
            "Look at what it is computed from."
        )
