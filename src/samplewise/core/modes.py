"""Train and eval modes of modules: `sw.freeze_batchnorm`, BatchNorm layers that normalize with statistics of the batch,
and a warning about modules that are in eval mode while the model is trained.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from samplewise.core.text import listed
from samplewise.core.validate import check_module
from samplewise.errors import ParameterError, TrainingWarning

Model = TypeVar("Model", bound=nn.Module)
MODEL = "model"


def freeze_batchnorm(model: Model, frozen: bool = True) -> Model:
    """Put every BatchNorm layer in eval mode and keep it there when `model.train()` is called. Returns the model.

    The layers then normalize with their running statistics, which no longer change, and samples do not depend on each
    other. Weight and bias are trained as before. The model keeps its classes, names and state dict; copies and pickles
    of it are frozen, too. A new model has running statistics of 0 and 1: freeze after pretraining, or use GroupNorm.

    frozen: False undoes it: the layers get the mode of the model.

    Raises ParameterError for layers with track_running_stats=False: they use batch statistics in eval mode, too.
    """
    check_module(model)
    layers = dict(batch_norms([model]))
    untracked = [name for name, layer in layers.items() if layer.running_mean is None]
    if frozen and untracked:
        raise ParameterError(
            "BatchNorm layers must have running statistics to be frozen; found track_running_stats=False in "
            f"{listed(untracked)}. Create them with track_running_stats=True, or use GroupNorm."
        )
    for layer in layers.values():
        if frozen:
            # An attribute of the instance, found before the method of the class. A partial object can be pickled.
            layer.train = partial(_stay_in_eval_mode, layer)  # type: ignore[method-assign, assignment]
            layer.train()
        elif is_frozen(layer):
            del layer.train
            layer.train(model.training)
    return model


def _stay_in_eval_mode(layer: nn.Module, mode: bool = True) -> nn.Module:
    """Replacement of `layer.train`."""
    return nn.Module.train(layer, False)


def is_frozen(layer: nn.Module) -> bool:
    """True for a layer frozen by `freeze_batchnorm`."""
    train = vars(layer).get("train")
    return isinstance(train, partial) and train.func is _stay_in_eval_mode


def batch_norms(modules: Iterable[nn.Module]) -> Iterator[tuple[str, _BatchNorm]]:
    """Yield (path, layer) for each BatchNorm layer."""
    for root in modules:
        for name, module in root.named_modules():
            if isinstance(module, _BatchNorm):
                yield name, module


def mixing_batch_norms(modules: Iterable[nn.Module]) -> list[str]:
    """Paths of the BatchNorm layers that normalize with statistics of the batch: in training mode, or without running
    statistics.
    """
    return [name for name, layer in batch_norms(modules) if layer.training or layer.running_mean is None]


def warn(message: str) -> None:
    warnings.warn(message, TrainingWarning, stacklevel=2)


def check_modes(modules: Sequence[nn.Module]) -> None:
    """Warn about modules in eval mode: see `modules_in_eval_mode`."""
    names = modules_in_eval_mode(modules)
    if names:
        warn(
            f"modules are in eval mode while training: {listed(names)}. Their dropout is off, and their running "
            "statistics are not updated. Call train() on them, unless this is intended."
        )


def modules_in_eval_mode(modules: Sequence[nn.Module]) -> list[str]:
    """Names of the modules in eval mode; of nested ones only the outermost. Frozen modules and single BatchNorm layers
    are exempt: per-sample gradients need BatchNorm in eval mode.
    """
    roots = zip((MODEL, "loss"), modules, strict=False)
    named = [(f"{root}.{name}".rstrip("."), module) for root, top in roots for name, module in top.named_modules()]
    asleep = [path for path, module in named if not module.training and not _is_intended(module)]
    outermost = [path for path in asleep if not any(path.startswith(f"{parent}.") for parent in asleep)]
    return ["the model"] if MODEL in outermost else [path.removeprefix(f"{MODEL}.") for path in outermost]


def _is_intended(module: nn.Module) -> bool:
    """True if eval mode is intended: for a BatchNorm layer, and if the module has parameters and all are frozen."""
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return True
    parameters = list(module.parameters())
    return bool(parameters) and not any(p.requires_grad for p in parameters)
