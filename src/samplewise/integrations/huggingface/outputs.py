"""Outputs of the model in a training step, from a forward hook."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from samplewise.core.batches import leaves
from samplewise.core.text import plural
from samplewise.errors import GraphError


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


def per_sample_outputs(forward: Sequence[Any], rows: int, batch_first: bool = True) -> list[Tensor]:
    """Tensors (B, ...) among the outputs of the forward passes that are attached to the graph; B is `rows`.

    batch_first: False if tensors with as many rows are (T, B, ...), because a smaller batch has the same number T.

    If one of them was computed from another one, the engine uses that which is closer to the loss.
    """
    attached = [
        z for output in forward for z in leaves(output) if isinstance(z, Tensor) and z.requires_grad and z.dim()
    ]
    outputs = [z for z in attached if len(z) == rows and batch_first]
    if outputs:
        return outputs
    second = next((z for z in attached if z.dim() > 1 and z.shape[1] == rows), None)
    if second is not None:
        raise GraphError(
            f"the model must return outputs whose first dimension is the batch of {plural(rows, 'sample')}; found "
            f"shape {tuple(second.shape)}, whose second dimension is. Return logits.transpose(0, 1) from the model, "
            "and compute the loss from it."
        )
    shapes = ", ".join(str(tuple(z.shape)) for z in attached[:3])
    raise GraphError(
        f"the model must return an output with one row for each of the {plural(rows, 'sample')} of a batch, such as "
        f"logits; found {f'only shapes {shapes}' if shapes else 'none'}. Return the logits from the model beside the "
        "loss, without packing and without a kernel that fuses logits and loss."
    )
