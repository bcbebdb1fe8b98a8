"""What a trainer computes its loss from: outputs of the model, from a forward hook, and operands of means and sums.
Among the operands may be the losses of the samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from samplewise.core.batches import leaves
from samplewise.core.text import plural
from samplewise.errors import GraphError
from samplewise.integrations.transformers_losses import KnownLosses


class OutputsHook:
    """Forward hooks on a model, which keep the outputs of the forward passes that record a graph.

    They stay registered for a whole training: after each new hook, the engine verifies the gradients again.
    """

    def __init__(self) -> None:
        self._model: nn.Module | None = None
        self._handles: list[Any] = []
        self.outputs: list[Any] = []  # of each forward pass of the model
        self.inner: list[Any] = []  # of each forward pass of the module whose outputs the loss passes through

    def watch(self, model: nn.Module, unwrap: Callable[[nn.Module], nn.Module]) -> None:
        """Discard the outputs so far; register the hooks if the model is another one than before.

        unwrap: returns the model inside a DistributedDataParallel, whose outputs are copies
        """
        self.discard()
        if model is not self._model:
            self.remove()
            self._model = model
            inside = unwrap(model)
            for module, name in ((inside, "outputs"), (before_fused_head(inside), "inner")):
                self._handles.append(module.register_forward_hook(partial(self._append, name)))

    def _append(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled() and module.training:
            getattr(self, name).append(output)

    def discard(self) -> None:
        """Release the outputs, and with them the graph."""
        self.outputs = []
        self.inner = []

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._model = None
        self._handles = []
        self.discard()


def before_fused_head(model: Any) -> Any:
    """The module whose outputs the loss passes through: the model, or the part of it before a frozen head that TRL has
    fused with the loss.

    The graph of such a head does not show which sample a gradient belongs to; that of the module before it does. The
    backward of a trained head is called with the rows of each sample: see `engine.row_calls`.
    """
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model  # without the adapters of peft
    function = getattr(causal.forward, "__func__", None)
    defined_in = getattr(function, "__globals__", {}).get("__name__", "")
    head = causal.get_output_embeddings() if hasattr(causal, "get_output_embeddings") else None
    if head is None or not defined_in.startswith("trl."):
        return model
    return model if any(p.requires_grad for p in head.parameters()) else causal.base_model


def attached(forward: Sequence[Any]) -> list[Tensor]:
    """Tensors among outputs that are attached to the graph, except scalars."""
    return [z for output in forward for z in leaves(output) if isinstance(z, Tensor) and z.requires_grad and z.dim()]


def per_sample_outputs(forward: Sequence[Any], rows: int, batch_first: bool = True) -> list[Tensor]:
    """Tensors (B, ...) among the outputs of the forward passes that are attached to the graph; B is `rows`.

    batch_first: False if tensors with as many rows are (T, B, ...), because a smaller batch has the same number T.

    If one of them was computed from another one, the engine uses that which is closer to the loss.
    """
    candidates = attached(forward)
    outputs = [z for z in candidates if len(z) == rows and batch_first]
    if outputs:
        return outputs
    second = next((z for z in candidates if z.dim() > 1 and z.shape[1] == rows), None)
    if second is not None:
        raise GraphError(
            f"the model must return outputs whose first dimension is the batch of {plural(rows, 'sample')}; found "
            f"shape {tuple(second.shape)}, whose second dimension is. Return logits.transpose(0, 1) from the model, "
            "and compute the loss from it."
        )
    shapes = ", ".join(str(tuple(z.shape)) for z in candidates[:3])
    raise GraphError(
        f"the model must return an output with one row for each of the {plural(rows, 'sample')} of a batch, such as "
        f"logits; found {f'only shapes {shapes}' if shapes else 'none'}. Return the logits from the model beside the "
        "loss, without packing and without a kernel that fuses logits and loss."
    )


# --- operands of means and sums ---------------------------------------------------------------------------------------


REDUCTIONS = frozenset({Tensor.mean, Tensor.nanmean, Tensor.sum, torch.mean, torch.nanmean, torch.sum})


class Reductions(TorchFunctionMode):
    """Mode in which the operands of means and sums that are attached to the graph are kept."""

    def __init__(self, operands: list[Tensor]):
        super().__init__()
        self._operands = operands

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in REDUCTIONS and result.dim() == 0 and result.requires_grad and args and args[0].dim():
            self._operands.append(args[0].detach())
        return result


class TrainerLoss(NamedTuple):
    """Loss of a batch, and what the trainer computed it from.

    loss          scalar
    denominator   what the sum of the samples' losses is divided by
    forward       outputs of the forward passes of the model
    operands      of means and sums
    unit          factor from an operand to the losses of the samples
    """

    loss: Tensor
    denominator: float
    forward: Sequence[Any]
    operands: Sequence[Tensor]
    unit: float = 1.0


def reduced_losses(trainer_loss: TrainerLoss, samples: int) -> Tensor | None:
    """The losses (B,) of the samples, whose sum over the denominator is the loss; None if no operand has them.

    An operand is (B,), or (B, ...), summed over the other dimensions; also with the opposite sign, as in -x.mean().
    """
    for operand in trainer_loss.operands:
        if len(operand) == samples:
            losses = operand.reshape(samples, -1).sum(1) * trainer_loss.unit
            for signed in (losses, -losses):
                if bool(KnownLosses(signed).agree(trainer_loss.loss, trainer_loss.denominator)):
                    return signed
    return None
