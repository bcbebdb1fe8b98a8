"""`sw.input_gradients`: the gradient of each sample's loss with respect to its own input."""

from __future__ import annotations

import torch
from torch import Tensor

from samplewise.core.memory import is_plain, stored_values
from samplewise.engine.arguments import check_is_tensor, check_losses
from samplewise.engine.backward import gradients_at
from samplewise.engine.graph.graph import Graph, edge_of
from samplewise.engine.graph.saved import graph_alive
from samplewise.engine.ownership.independence import refuse_broadcast
from samplewise.engine.ownership.ownership import owners
from samplewise.engine.ownership.probe import MIXED, probe
from samplewise.engine.ownership.verify import verify
from samplewise.engine.ownership.weighted_passes import check_linear
from samplewise.errors import GraphError, LossesError, ParameterError, SamplesInteractError

NO_PATH = (
    "the losses must depend on x; found no path to it in the graph. Pass the same tensor object that the model was "
    "called with."
)
SHARED = (
    "each element of x must affect the loss of one sample only; found elements shared by several samples. Call "
    "sw.freeze_batchnorm(model) if the model has BatchNorm layers, remove operations that combine samples, or pass a "
    "tensor that is not shared."
)


def input_gradients(losses: Tensor, x: Tensor, *, create_graph: bool = False) -> Tensor:
    """Gradient of each sample's loss with respect to its own input, d losses_i / d x_i, in the shape of x.

    `losses` is 1-D, one value per sample. `x` is a leaf with requires_grad=True or an activation. With
    create_graph=True (default False) the result can be differentiated.

    Raises SamplesInteractError if an element of x affects the losses of several samples, because its gradient would be
    a sum over samples.
    """
    check_is_tensor(losses, "sw.input_gradients(losses, x)")
    if not isinstance(x, Tensor):
        raise ParameterError(
            f"x must be the tensor that the model was called with; found {type(x).__name__}. "
            "Write sw.input_gradients(losses, x); for the gradients of parameters, use sw.gradients(losses, model)."
        )
    if isinstance(losses, Tensor) and losses.dim() != 1 and x.dim() == 1 and x.grad_fn is not None:
        raise LossesError(
            f"losses must be the first argument and x the second; found shapes {tuple(losses.shape)} and "
            f"{tuple(x.shape)}. Write sw.input_gradients(losses, x)."
        )
    check_losses(losses)
    if not x.requires_grad:
        raise ParameterError(
            "x must require a gradient; found requires_grad=False. Call x.requires_grad_() before the forward pass."
        )
    if not is_plain(x):
        return _by_loop(losses, x, create_graph)
    edge = edge_of(x)
    graph = Graph(losses, {"x": x}) if x.is_leaf else Graph(losses, {}, goal=edge.node)
    if edge.node not in graph.relevant:
        raise GraphError(NO_PATH)
    if create_graph:
        graph.check_twice_differentiable()
    if graph.sizes.nested:
        return _by_loop(losses, x, create_graph)
    with graph_alive(), torch.set_grad_enabled(create_graph):
        refuse_broadcast(graph)
        if graph.samples > 1:
            ownership = owners(graph, probes=False)
            owner_map = ownership.owner_maps.get(graph.key(edge))
            # A gradient that is zero cannot verify the ownership: its edge is returned, and probed below.
            if owner_map is None or verify(graph, {edge: owner_map}, ownership.derivation) != set():
                (gradient,), (owner,) = probe(graph, [edge])
                if (owner == MIXED).any():
                    check_linear(graph, [edge], [gradient])
                    raise SamplesInteractError(SHARED)
        (gradient,) = gradients_at(graph, [edge], create_graph=create_graph)
    return gradient


def _by_loop(losses: Tensor, x: Tensor, create_graph: bool) -> Tensor:
    """As `input_gradients`, from one backward pass per sample: ownership is found for strided tensors only."""
    with graph_alive():
        samples: Tensor | None = None  # number of samples that depend on each element
        for weights in torch.eye(len(losses), dtype=losses.dtype, device=losses.device):
            (gradient,) = torch.autograd.grad(losses, x, weights, retain_graph=True, allow_unused=True)
            if gradient is None:
                raise GraphError(NO_PATH)
            values = stored_values(gradient) if gradient.is_nested else gradient.to_dense()
            samples = (values != 0).long() + (0 if samples is None else samples)
        if samples is not None and (samples > 1).any():
            raise SamplesInteractError(SHARED)
        weights = torch.ones_like(losses)
        return torch.autograd.grad(losses, x, weights, retain_graph=True, create_graph=create_graph)[0]
