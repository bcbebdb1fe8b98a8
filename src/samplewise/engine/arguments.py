"""Validation of arguments: losses, parameters, weights, directions, rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samplewise.core.validate import refuse_keras
from samplewise.engine.deferred_checks import finite_losses, finite_weights
from samplewise.errors import LossesError, ParameterError
from samplewise.parallel.ddp import inner
from samplewise.parallel.sharded_parameters import graph_parameters

Parameters = nn.Module | Mapping[str, Tensor] | Iterable[Tensor] | Iterable[tuple[str, Tensor]]
Weights = Tensor | float | Mapping[str, Tensor | float]


class WantedParameters(NamedTuple):
    """Parameters to differentiate, by name, and the model that they belong to, if it is known."""

    named: dict[str, Tensor]
    modules: list[nn.Module]
    sharded: bool  # whole parameters of a model sharded with `fully_shard`


def wanted_parameters(parameters: Parameters) -> WantedParameters:
    """Parameters as passed to `sw.gradients`. Those of a wrapped model have its own names; frozen ones are left out.

    Tensors from an iterable without names are named by their position: "0", "1", ...
    """
    if isinstance(parameters, nn.Module):
        model = inner(parameters)
        all_parameters, sharded = graph_parameters(model)
        named = {name: p for name, p in all_parameters.items() if p.requires_grad}
        if not named:
            raise ParameterError("the model must have a parameter with requires_grad=True; found none. Unfreeze one.")
        resolved = WantedParameters(named, [model], sharded)
    else:
        resolved = WantedParameters(_named_tensors(parameters), [], sharded=False)
    first: dict[int, str] = {}
    for name, p in resolved.named.items():
        # The attributes of an ordinary parameter are read here: a call for each parameter takes longer.
        if not (isinstance(p, nn.Parameter) and p.requires_grad and p.is_floating_point() and p.is_leaf):
            _check_parameter(name, p)
        if first.setdefault(id(p), name) != name:
            raise ParameterError(
                f"each parameter must be given once; found the same tensor as {first[id(p)]!r} and {name!r}. Keep one."
            )
    return resolved


def _named_tensors(parameters: Any) -> dict[str, Tensor]:
    """Parameters from a dict, or from an iterable of tensors or of (name, tensor) pairs."""
    if isinstance(parameters, Mapping):
        pairs = list(parameters.items())
    elif isinstance(parameters, Iterable) and not isinstance(parameters, (Tensor, str)):
        items = list(parameters)
        are_pairs = all(isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) for item in items)
        pairs = items if are_pairs else [(str(i), item) for i, item in enumerate(items)]
    else:
        refuse_keras(parameters)
        advice = "Pass the model."
        if isinstance(parameters, Tensor):
            advice = "Wrap it in a list."
        elif isinstance(parameters, Optimizer):
            advice = "Pass the model; or, for the parameters of the optimizer only, a list of its tensors."
        raise ParameterError(
            "parameters must be a module, a dict of named tensors, or an iterable of tensors or of (name, tensor) "
            f"pairs; found {_kind(parameters)}. {advice}"
        )
    named = dict(pairs)
    if not named:
        raise ParameterError(
            "parameters must contain at least one tensor; found none. An iterator such as model.parameters() is empty "
            "after its first use: call it again, or pass the model."
        )
    if len(named) < len(pairs):
        raise ParameterError("each parameter must have its own name; found a name twice. Rename one of the two.")
    return named


def _kind(thing: object) -> str:
    """Description of an argument for messages."""
    if isinstance(thing, Tensor):
        return "one tensor"
    if callable(thing) and hasattr(thing, "__name__"):
        return f"the function {thing.__name__}"
    return type(thing).__name__


def check_is_tensor(losses: object, usage: str) -> None:
    """Check that the first argument is a tensor, and not a model. `usage`: the call as it should be written."""
    if isinstance(losses, Tensor):
        return
    refuse_keras(losses)
    if isinstance(losses, nn.Module):
        raise LossesError(
            f"losses must be the first argument; found a module ({type(losses).__name__}) in its place. Write {usage}."
        )


def check_model(model: object, usage: str) -> None:
    """Check that the first argument is a module. `usage`: the call as it should be written."""
    if not isinstance(model, nn.Module):
        refuse_keras(model)
        raise TypeError(
            f"model must be a torch.nn.Module and the first argument; found {_kind(model)} in its place. Write {usage}."
        )


def _check_parameter(name: str, p: Tensor) -> None:
    if not isinstance(p, Tensor):
        raise ParameterError(
            f"parameter {name!r} must be a tensor; found {type(p).__name__}. Pass the model, or only tensors."
        )
    if not (p.is_floating_point() or p.is_complex()):
        raise ParameterError(
            f"parameter {name!r} must be floating-point to have a gradient; found {p.dtype}. Leave it out."
        )
    if p.grad_fn is not None:
        raise ParameterError(
            f"parameter {name!r} must be a leaf of the graph; found the result of {p.grad_fn.name()}. "
            "Pass the tensor it was computed from, or use sw.input_gradients for activations."
        )
    if not p.requires_grad:
        raise ParameterError(
            f"parameter {name!r} must have requires_grad=True; found False. Leave it out or unfreeze it."
        )


def check_losses(losses: Tensor) -> None:
    """Check that `losses` is a finite 1-D float tensor attached to the graph. Reads the values: causes a host sync."""
    check_attached(losses)
    finite_losses(losses)


def check_attached(losses: object) -> None:
    """Check type, shape, dtype and graph of `losses`, but not the values, so there is no host sync."""
    if not isinstance(losses, Tensor):
        advice = "Use torch.stack for a list with one tensor per sample, or add up several losses of each sample."
        if hasattr(losses, "logits"):  # output of a Hugging Face model
            advice = "Pass its loss, and outputs=its logits: sw.gradients(out.loss, model, outputs=out.logits)."
        elif losses is None:
            advice = "Return the losses from the loss function."
        raise LossesError(f"losses must be a tensor with one value per sample; found {type(losses).__name__}. {advice}")
    if losses.dim() != 1:
        if losses.dim() == 0:
            advice = "Use reduction='none' and do not average over the batch."
        elif losses.dim() == 2 and losses.shape[0] == losses.shape[1]:
            advice = "A prediction (B, 1) against a target (B,) gives (B, B): use squeeze(1)."
        else:
            advice = "Reduce each sample to one value, e.g. losses.flatten(1).mean(1)."
        raise LossesError(f"losses must be 1-D, one value per sample; found shape {tuple(losses.shape)}. {advice}")
    if losses.numel() == 0:
        raise LossesError("losses must contain at least one sample; found an empty tensor.")
    if not losses.is_floating_point():
        raise LossesError(f"losses must be real floating-point; found {losses.dtype}.")
    if not losses.requires_grad:
        raise LossesError(
            "losses must be attached to the autograd graph; found requires_grad=False. "
            "Compute them outside torch.no_grad(), without .detach(), from parameters that require gradients."
        )


def weights_by_name(
    weights: Weights | None, names: list[str], losses: Tensor, check: Callable[..., object] | None
) -> Mapping[str, Tensor | None]:
    """Return the weights of each parameter, like the losses (B,), or None for weights of one. A number is the weight of
    all samples. Checks shapes; calls check(finite_weights, weights, description), which checks the values, unless they
    are known to be finite.

    The tensors are new objects in each call, so that what is computed once for a tensor of weights is not used after
    its values have changed.
    """
    if weights is None:
        return dict.fromkeys(names)
    if not isinstance(weights, Mapping):
        return dict.fromkeys(names, _as_weights(weights, losses, "weights", check))
    _check_names(weights, names, "weights")
    return {name: _as_weights(w, losses, f"weights[{name!r}]", check) for name, w in weights.items()}


def _as_weights(weights: object, losses: Tensor, what: str, check: Callable[..., object] | None) -> Tensor:
    if type(weights) is not bool and isinstance(weights, Real):
        weights = torch.full_like(losses, float(weights), dtype=wide_dtype(losses.dtype), requires_grad=False)
    if not isinstance(weights, Tensor) or weights.shape != losses.shape:
        raise ParameterError(
            f"{what} must be a tensor of shape ({len(losses)},), one value per sample, or a number for all samples; "
            f"found {_shape_or_type(weights)}. Use torch.as_tensor for arrays and lists."
        )
    _check_device(weights, losses.device, what, "losses")
    if check is not None:
        check(finite_weights, weights, what)
    return weights.view_as(weights) if weights.requires_grad else weights.detach()


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype for sums of values of this dtype: float32 for half precision."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def check_direction(direction: Any, parameters: Mapping[str, Tensor]) -> None:
    """Check that `direction` maps each parameter's name to a tensor of the parameter's shape."""
    if not isinstance(direction, Mapping):
        kind = type(direction).__name__
        raise ParameterError(
            f"direction must be a dict name -> tensor, like g.sum(), or another Gradients; found {kind}."
        )
    _check_names(direction, list(parameters), "direction")
    for name, p in parameters.items():
        shape = tuple(p.shape)
        tensor = direction[name]
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != shape:
            raise ParameterError(
                f"direction[{name!r}] must be a tensor of the parameter's shape {shape}; found "
                f"{_shape_or_type(tensor)}."
            )
        _check_device(tensor, p.device, f"direction[{name!r}]", "parameter")


def check_rows(rows: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> int:
    """Check that `rows` maps each parameter's name to a tensor (n, *shape), with one n; return n."""
    _check_names(rows, list(parameters), "rows")
    first = rows[next(iter(parameters))]
    count = len(first) if isinstance(first, Tensor) and first.dim() else 0
    for name, p in parameters.items():
        shape = (count, *p.shape)
        tensor = rows[name]
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != shape:
            raise ParameterError(
                f"rows[{name!r}] must be a tensor (n, *shape) like g.full(), here {shape}; found "
                f"{_shape_or_type(tensor)}."
            )
        _check_device(tensor, p.device, f"rows[{name!r}]", "parameter")
    return count


def _shape_or_type(thing: object) -> str:
    return f"shape {tuple(thing.shape)}" if isinstance(thing, Tensor) else type(thing).__name__


def _check_device(tensor: Tensor, device: torch.device, what: str, like: str) -> None:
    if tensor.device != device:
        raise ParameterError(
            f"{what} must be on the device of the {like}, {device}; found {tensor.device}. "
            f"Move it with .to({like}.device)."
        )


def _check_names(entries: Mapping[str, object], names: list[str], what: str) -> None:
    expected = set(names)
    unknown = [n for n in entries if n not in expected]
    missing = [n for n in names if n not in entries]
    if unknown or missing:
        difference = f"unknown {unknown[0]!r}" if unknown else f"no entry for {missing[0]!r}"
        raise ParameterError(f"{what} must have the names of the parameters as keys (see g.names); found {difference}.")
