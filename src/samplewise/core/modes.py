"""Warning about modules that are in eval mode while the model is trained."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import nn

from samplewise.core.text import listed
from samplewise.errors import TrainingWarning

MODEL = "model"


def warn(message: str) -> None:
    warnings.warn(message, TrainingWarning, stacklevel=2)


def check_modes(modules: Sequence[nn.Module]) -> None:
    """Warn about modules in eval mode; of nested ones only the outermost is named. Frozen modules and single BatchNorm
    layers are exempt: per-sample gradients need BatchNorm in eval mode.
    """
    asleep = [path for path, module in paths(modules) if not module.training and not _is_meant(module)]
    outermost = [path for path in asleep if not any(path.startswith(f"{other}.") for other in asleep)]
    names = ["the model"] if MODEL in outermost else [path.removeprefix(f"{MODEL}.") for path in outermost]
    if outermost:
        warn(
            f"modules are in eval mode while training: {listed(names)}. Their dropout is off, and their running "
            "statistics are not updated. Call train() on them, unless this is intended."
        )


def _is_meant(module: nn.Module) -> bool:
    """True if eval mode is intended: for a BatchNorm layer, and if the module has parameters and all are frozen."""
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return True
    parameters = list(module.parameters())
    return bool(parameters) and not any(p.requires_grad for p in parameters)


def paths(modules: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Path and module of every module, including the model ("model") and the loss module ("loss")."""
    roots = zip((MODEL, "loss"), modules, strict=False)
    return [(f"{root}.{name}".rstrip("."), module) for root, top in roots for name, module in top.named_modules()]
