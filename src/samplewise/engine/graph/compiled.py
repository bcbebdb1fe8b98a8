"""Functions made by torch.compile: how they are recognized, and how their backward is run more than once.

The compiled backward may overwrite tensors that the forward pass has saved ("donated buffers"): torch then refuses
passes that retain the graph. Here each pass gets copies of these tensors, so that it can be repeated.
"""

from __future__ import annotations

from contextlib import suppress

import torch

from samplewise.engine.graph.structure import Node, is_python_function


def is_compiled(node: Node) -> bool:
    """True for the node of a function made by torch.compile."""
    return is_python_function(node) and type(node)._forward_cls.__module__.startswith("torch._functorch.")


class _Donated(list[int]):
    """Positions of the saved tensors that a compiled backward overwrites. torch reads the saved tensors, and then
    compares this list with []: equal in a pass that was given copies, so that torch does not refuse it.
    """

    copied = False

    def __ne__(self, other: object) -> bool:
        copied = self.copied
        self.copied = False
        return not copied and list.__ne__(self, other)


def make_repeatable(node: Node) -> None:
    """Let each later pass through the node of a compiled function get copies of the tensors that it overwrites."""
    metadata = getattr(type(node)._forward_cls, "metadata", None)
    donated = getattr(metadata, "bw_donated_idxs", None)
    if metadata is None or not donated:
        return
    if not isinstance(donated, _Donated):
        donated = metadata.bw_donated_idxs = _Donated(donated)

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        donated.copied = True
        return tensor.clone()

    first = metadata.num_symints_saved_for_bw or 0
    saved = node._raw_saved_tensors
    # Others than ordinary saved tensors, and those with hooks of an activation checkpoint, stay as they are: torch
    # refuses to repeat such a pass.
    with suppress(RuntimeError):
        if max(donated) - first < len(saved):
            for position in donated:
                saved[position - first].register_hooks(lambda tensor: tensor, copy)
