"""A LightningModule and its trainer: output of training_step, replaced methods, loss scale, refused settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from torch import Tensor

from samplewise.core.losses import IGNORE_INDEX, PREDICTION_COLUMNS, prediction_columns
from samplewise.engine.outputs import checked_outputs
from samplewise.errors import DistributedError, GraphError, LossesError
from samplewise.integrations.adapter import BatchLoss

KEYS = ("outputs", "losses", "counts", "labels", "id")  # of the output of training_step, beside the loss


# --- output of training_step ------------------------------------------------------------------------------------------


def check_arguments(positional: Sequence[Any], keywords: Mapping[str, Any]) -> None:
    """Raise TypeError for arguments of manual_backward other than the loss, KEYS and retain_graph."""
    names = (*KEYS, "retain_graph")
    surplus = ["a second positional argument"] if positional else [key for key in keywords if key not in names]
    if surplus:
        raise TypeError(
            f"manual_backward must get the loss, and {', '.join(names)} as keywords; found {surplus[0]}. Leave it out."
        )


def parse(output: Any, scale: float = 1.0) -> BatchLoss:
    """Check and name the values. `scale`: loss scale that the losses (B,) contain."""
    entries = output if isinstance(output, Mapping) else {"loss": output}
    loss = entries.get("loss")
    outputs: Any = entries.get("outputs")
    counts = entries.get("counts")
    if not isinstance(loss, Tensor) or loss.dim() > 1 or (loss.dim() == 0 and outputs is None):
        raise LossesError(
            "training_step must return the losses of the samples, (B,), or {'loss': scalar, 'outputs': tensor (B, "
            "...)} with the tensor that the loss was computed from; "
            f"found {_description(loss)}. Compute the losses with "
            "reduction='none' and return them, or return the outputs of the model too. With manual optimization: "
            "self.manual_backward(losses), or self.manual_backward(loss, outputs=outputs)."
        )
    for key in ("losses", "counts", "labels"):
        if not isinstance(entries.get(key), Tensor | None):
            raise LossesError(f"{key} must be a tensor (B,); found {type(entries[key]).__name__}.")
    attached = [loss] if loss.dim() == 1 else checked_outputs(loss, outputs)[0]
    samples = len(attached[0])
    if counts is not None and tuple(counts.shape) != (samples,):
        raise LossesError(f"counts must have one value per sample, ({samples},); found {tuple(counts.shape)}.")
    labels = entries.get("labels")
    if labels is not None and len(labels) != samples:
        raise LossesError(f"labels must have one row per sample, {samples}; found shape {tuple(labels.shape)}.")
    losses = entries.get("losses")
    columns = None
    if isinstance(outputs, Tensor) and labels is not None:
        columns = prediction_columns(outputs, labels, IGNORE_INDEX, PREDICTION_COLUMNS)
    if loss.dim() == 1:
        losses = loss.detach() / scale if scale != 1 else loss.detach()
        if counts is None:
            loss = loss.mean()
        else:
            total = counts.sum()
            loss = loss.sum() / torch.where(total == 0, 1, total)
    return BatchLoss(loss, attached, samples, losses, counts, columns, entries.get("id"))


def for_trainer(output: Any, loss: Tensor) -> Any:
    """Value of training_step for the trainer: a scalar loss, and the other entries without their graph."""
    if not isinstance(output, Mapping):
        return loss
    entries = {key: value.detach() if isinstance(value, Tensor) else value for key, value in output.items()}
    return {**entries, "loss": loss}


def _description(loss: Any) -> str:
    if not isinstance(loss, Tensor):
        return "no loss" if loss is None else f"a loss of type {type(loss).__name__}"
    return "a scalar without outputs" if loss.dim() == 0 else f"losses of shape {tuple(loss.shape)}"


# --- module and trainer -----------------------------------------------------------------------------------------------


def replace_methods(module: LightningModule, replacements: Mapping[str, Callable[..., Any]]) -> Callable[[], None]:
    """Replace methods of the object by `replacement(module, method, ...)`. Returns a function that restores them."""
    attributes = vars(module)
    originals = {name: attributes[name] for name in replacements if name in attributes}  # assigned to the object
    for name, replacement in replacements.items():
        method = getattr(module, name)
        attributes[name] = wraps(method)(partial(replacement, module, method))

    def restore() -> None:
        for name in replacements:
            attributes.pop(name, None)
        attributes.update(originals)

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
    is_compiled = getattr(module, "_compiler_ctx", None) is not None or any(
        type(part).__name__ == "OptimizedModule" or part._compiled_call_impl is not None for part in module.modules()
    )
    if is_compiled:
        raise GraphError(
            "PerSample needs the autograd graph of the module; found a module compiled with torch.compile, whose graph "
            "cannot be read. Train the module itself."
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
