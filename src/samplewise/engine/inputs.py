"""`sw.input_gradients`: the gradient of each sample's loss with respect to its own input."""

from __future__ import annotations

import torch
from torch import Tensor

from samplewise.engine.backward import gradients_at
from samplewise.engine.checks import check_is_tensor, check_losses
from samplewise.engine.graph import Edge, Graph, edge_of, graph_alive
from samplewise.engine.layouts import proofs
from samplewise.engine.probe import MIXED, probe
from samplewise.engine.tags import Regular
from samplewise.engine.verify import verify
from samplewise.errors import GraphError, LossesError, ParameterError, SamplesInteractError


def input_gradients(losses: Tensor, x: Tensor, create_graph: bool = False) -> Tensor:
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
    edge = edge_of(x)
    graph = Graph(losses, {"x": x}) if x.is_leaf else Graph(losses, {}, goal=edge.node)
    if edge.node not in graph.relevant:
        raise GraphError(
            "the losses must depend on x; found no path to it in the graph. "
            "Pass the same tensor object that the model was called with."
        )
    if create_graph:
        graph.check_twice_differentiable()
    with graph_alive(), torch.set_grad_enabled(create_graph):
        if graph.samples > 1 and not _proven(graph, edge):
            _refuse_mixed(graph, edge)
        (gradient,) = gradients_at(graph, [edge], create_graph=create_graph)
    return gradient


def _proven(graph: Graph, edge: Edge) -> bool:
    """True if ownership of x is proven and verified. False if its gradient is zero, which cannot verify the proof."""
    inner = proofs(graph).get(edge)
    return inner is not None and verify(graph, {edge: Regular(graph.samples, inner)}) == set()


def _refuse_mixed(graph: Graph, edge: Edge) -> None:
    (owner,) = probe(graph, [edge]).owners
    if (owner == MIXED).any():
        raise SamplesInteractError(
            "each element of x must affect the loss of one sample only; found elements shared by several samples. "
            "Call sw.freeze_batchnorm(model) if the model has BatchNorm layers, remove operations that combine "
            "samples, or pass a tensor that is not shared."
        )
