"""Outputs of the model in a training step, from a forward hook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from samplewise.core.batches import leaves
from samplewise.core.text import plural
from samplewise.errors import GraphError


class OutputsHook:
    """Forward hook on a model, which keeps the outputs of the forward passes that record a graph.

    It stays registered for a whole training: after each new hook, the engine verifies the gradients again.
    """

    def __init__(self) -> None:
        self._module: nn.Module | None = None
        self._handle: Any = None
        self._outputs: list[Any] = []

    def watch(self, module: nn.Module) -> None:
        """Discard the outputs so far; register the hook if the module is another one than before."""
        self._outputs = []
        if module is not self._module:
            self.remove()
            self._module = module
            self._handle = module.register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled() and module.training:
            self._outputs.append(output)

    def take(self) -> list[Any]:
        """Outputs of each forward pass since `watch`."""
        outputs = self._outputs
        self._outputs = []
        return outputs

    def remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._module = None
        self._handle = None
        self._outputs = []


def per_sample_outputs(forward: Sequence[Any], rows: int) -> list[Tensor]:
    """Tensors (B, ...) among the outputs of the forward passes that are attached to the graph; B is `rows`.

    If one of them was computed from another one, the engine uses that which is closer to the loss.
    """
    attached = [z for output in forward for z in leaves(output) if isinstance(z, Tensor) and z.requires_grad and z.dim()]
    found = [z for z in attached if len(z) == rows]
    if found:
        return found
    shapes = ", ".join(str(tuple(z.shape)) for z in attached[:3])
    raise GraphError(
        f"the model must return an output with one row for each of the {plural(rows, 'sample')} of a batch, such as "
        f"logits; found {f'only shapes {shapes}' if shapes else 'none'}. Return the logits from the model beside the "
        "loss, without packing and without a kernel that fuses logits and loss."
    )
