"""A LightningModule and its trainer: output of training_step, replaced methods, loss scale, refused settings; and the
optimizers: those that a backward pass serves, and the passes since the last step of each.

With several optimizers, as for a GAN, the gradient of a sample is that of the parameters of one optimizer. A pass that
reaches the parameters of more than one, because no optimizer is toggled, is made in parts, one for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from torch import Tensor
from torch.optim import Optimizer

from samplewise.core.losses import IGNORE_INDEX, PREDICTION_COLUMNS, prediction_columns
from samplewise.engine.graph.graph import edge_of
from samplewise.engine.graph.structure import read_structure
from samplewise.engine.outputs import checked_outputs
from samplewise.errors import DistributedError, GraphError, LossesError
from samplewise.integrations.adapter import BatchLoss, BatchPass
from samplewise.parallel.ddp import is_replica
from samplewise.parallel.sharded_parameters import is_sharded
from samplewise.step.backward import BackwardResult

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


# --- optimizers -------------------------------------------------------------------------------------------------------


TOGGLE = "Call self.toggle_optimizer(optimizer) before the forward pass."


@dataclass(frozen=True)
class PassPart:
    """Part of a backward pass: the gradients of some parameters."""

    numbers: list[int]  # of the optimizers that have these parameters; empty: no optimizer has them
    others: list[Tensor]  # parameters of the other parts

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Context manager: backward passes leave the gradients of the other parameters as they are."""
        for p in self.others:
            p.requires_grad_(False)
        try:
            yield
        finally:
            for p in self.others:
                p.requires_grad_(True)


class Optimizers:
    """Optimizers of a trainer, numbered in the order of configure_optimizers."""

    def __init__(self, optimizers: Sequence[Optimizer]):
        self._optimizers = [_unwrapped(optimizer) for optimizer in optimizers]
        self._toggled: Optimizer | None = None
        # Passes since the last step of an optimizer; no key if there was none.
        self._windows: dict[int, list[BatchPass]] = {}

    def toggle(self, module: LightningModule, original: Callable[..., Any], optimizer: Any) -> None:
        original(optimizer)
        self._toggled = _unwrapped(optimizer)

    def untoggle(self, module: LightningModule, original: Callable[..., Any], optimizer: Any) -> None:
        original(optimizer)
        self._toggled = None

    # --- one pass ----------------------------------------------------------------------------------------------------

    def parts(self, loss: Tensor, module: LightningModule, per_sample: bool) -> list[PassPart]:
        """Parts of the backward pass of a loss: one, unless `per_sample` and parameters of several optimizers."""
        if len(self._optimizers) < 2:
            return [PassPart([0], [])]
        # Discard passes whose gradients were set to None or zero before a step: one of the generator leaves gradients
        # on the discriminator, which are not used. The trainer has no hook for zero_grad in manual optimization.
        for number, window in self._windows.items():
            gradients = (p.grad for p in _parameters(self._optimizers[number]))
            if window and not any(grad is not None and bool(grad.any()) for grad in gradients):
                self._windows[number] = []
        named = _reached_parameters(loss, module)
        owned = {}
        for number, optimizer in enumerate(self._optimizers):
            if self._toggled is None or optimizer is self._toggled:
                members = set(map(id, _parameters(optimizer)))
                owned[number] = frozenset(name for name, p in named.items() if id(p) in members)
        if not per_sample:
            return [PassPart([number for number, names in owned.items() if names], [])]
        sets = dict.fromkeys(names for names in owned.values() if names)
        # Raise GraphError if optimizers have some parameters in common, but not all.
        for names in sets:
            common = [name for other in sets if other != names for name in sorted(names & other)]
            if common:
                numbers = " and ".join(str(number) for number, members in owned.items() if common[0] in members)
                raise GraphError(
                    f"manual_backward must differentiate each parameter for one optimizer; found {common[0]!r} in "
                    f"optimizers {numbers}. {TOGGLE}"
                )
        parts = [[number for number, names in owned.items() if names == names_of_part] for names_of_part in sets]
        rest = frozenset(named).difference(*sets)
        if rest:
            sets[rest] = None
            parts.append([])
        if len(parts) > 1 and (is_replica(named.values()) or is_sharded(module)):
            raise DistributedError(
                "manual_backward must differentiate for one optimizer at a time if a model is trained on several "
                f"ranks; found parameters of several optimizers that require gradients. {TOGGLE}"
            )
        return [
            PassPart(numbers, [p for name, p in named.items() if name not in names])
            for numbers, names in zip(parts, sets, strict=True)
        ]

    def add(self, part: PassPart, passes: list[BatchPass]) -> None:
        for number in part.numbers:
            self._windows[number] = self._windows.get(number, []) + passes

    # --- one update --------------------------------------------------------------------------------------------------

    def number(self, optimizer: Any) -> int:
        """Position of an optimizer in those of the trainer."""
        optimizer = _unwrapped(optimizer)
        return next((k for k, candidate in enumerate(self._optimizers) if candidate is optimizer), 0)

    def has_run(self, number: int) -> bool:
        """True if a backward pass has served the optimizer since its last step."""
        return number in self._windows

    def log_name(self, number: int) -> str:
        """First part of the names of logged values."""
        return "samplewise" if len(self._optimizers) < 2 else f"samplewise/optimizer_{number}"

    def take_passes(self, number: int) -> list[BatchPass]:
        """Remove and return the passes of the open window of an optimizer. With several, its number is a column."""
        passes = self._windows.pop(number, [])
        return passes if len(self._optimizers) < 2 else [_with_column(batch_pass, number) for batch_pass in passes]


def _unwrapped(optimizer: Any) -> Any:
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _reached_parameters(loss: Tensor, module: LightningModule) -> dict[str, Tensor]:
    """Parameters that require gradients and that the graph of the loss contains. That of a sharded model contains
    other tensors in their place.
    """
    named: dict[str, Tensor] = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not loss.requires_grad or is_sharded(module):
        return named
    structure, _, _ = read_structure(*edge_of(loss), {id(p): name for name, p in named.items()})
    names = set(structure.leaves.values())
    return {name: p for name, p in named.items() if name in names}


def _with_column(batch_pass: BatchPass, number: int) -> BatchPass:
    stats = batch_pass.results.stats
    column = torch.full((len(stats),), number, device=stats.losses.device)
    columns = {**(stats.columns or {}), "optimizer": column}
    return batch_pass._replace(results=BackwardResult(replace(stats, columns=columns)))
