"""Access to a LightningModule and its trainer: replaced methods, backward pass, loss scale, refused settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from torch import Tensor

from samplewise.errors import DistributedError, GraphError


def replace_methods(module: LightningModule, replacements: Mapping[str, Callable[..., Any]]) -> Callable[[], None]:
    """Replace methods of the object by `replacement(module, method, ...)`. Returns a function that restores them."""
    attributes = vars(module)
    own = {name: attributes[name] for name in replacements if name in attributes}
    for name, replacement in replacements.items():
        method = getattr(module, name)
        attributes[name] = wraps(method)(partial(replacement, module, method))

    def restore() -> None:
        for name in replacements:
            attributes.pop(name, None)
        attributes.update(own)

    return restore


class _Through(NamedTuple):
    """The module's own backward method, and the gradient scaler of the trainer."""

    backward: Callable[[Tensor], Any]
    scaler: Any


def framework_backward(module: LightningModule, original: Callable[..., Any]) -> _Through | None:
    """None if the pass is that of torch."""
    scaler = _scaler(module.trainer)
    if scaler is None and getattr(original, "__func__", None) is LightningModule.backward:
        return None
    return _Through(original, scaler)


def _scaler(trainer: Trainer) -> Any:
    return getattr(trainer.precision_plugin, "scaler", None)


def loss_scale(trainer: Trainer) -> float:
    scaler = _scaler(trainer)
    return 1.0 if scaler is None else float(scaler.get_scale())


def has_gradients(optimizer: Any) -> bool:
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])


def check_trainer(trainer: Trainer, module: LightningModule, exact_accumulation: bool) -> None:
    """Raise an error for settings of the trainer that do not work with the callback."""
    if isinstance(trainer.strategy, (DeepSpeedStrategy, FSDPStrategy)):
        raise DistributedError(
            "PerSample needs a strategy that leaves the parameters whole, such as 'auto' or 'ddp', or shards them with "
            f"fully_shard (ModelParallelStrategy); found {type(trainer.strategy).__name__}."
        )
    if getattr(module, "_compiler_ctx", None) is not None or any(map(_is_compiled, module.modules())):
        raise GraphError(
            "PerSample needs the autograd graph of the module; found a module compiled with torch.compile, whose graph "
            "cannot be read. Train the module itself."
        )
    if len(trainer.optimizers) > 1:
        raise ValueError(
            f"PerSample needs one optimizer; found {len(trainer.optimizers)}. Train with sw.Step or "
            "sw.backward in a loop of your own."
        )
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in trainer.optimizers):
        raise ValueError(
            "PerSample needs an optimizer with one backward pass per batch; found LBFGS, which evaluates the loss many "
            "times per update. Use another optimizer."
        )
    if exact_accumulation and not module.automatic_optimization:
        raise ValueError(
            "exact_accumulation=True needs automatic optimization; found manual optimization, in which training_step "
            "accumulates. Divide the losses by the number of samples of the window there."
        )


def _is_compiled(module: torch.nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None
