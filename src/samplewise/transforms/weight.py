"""`weight`: sample weights from a function, a tensor, or a column of the batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from samplewise.core.batches import pick
from samplewise.core.memory import copy_to_device
from samplewise.engine.deferred_checks import current_checks, read_at_once
from samplewise.errors import TransformError
from samplewise.transforms.stats import PerSample, SampleStats
from samplewise.transforms.transform import NEEDS, SampleTransform, function_name


def weight(
    source: Callable[..., Tensor] | Tensor | Hashable,
    *,
    index: Hashable = None,
    renormalize: bool = False,
    window: bool = False,
) -> SampleTransform:
    """Multiply each sample's gradient by a weight.

    source: a function that returns weights (B,), whose argument names select its inputs from losses, counts, norms and
    batch; or a tensor with one value for each sample of the window, in order (a window of another size is an error); or
    the key of the batch under which the weights are (a name, or the index in a tuple).
    index: with a tensor: key of the batch under which the sample indices are; the weight of a sample is that at its
    index. A tensor on the CPU and indices on an accelerator cost a host sync per microbatch: move the tensor there.
    renormalize: divide the update by Σ weight × count instead of Σ counts.
    window: call the function with the values of the whole window at once (for ranks or quantiles).
    """
    if callable(source):
        name, needs, answer = _asking(source, window)
    elif isinstance(source, Tensor):
        name, needs, answer = _listed(source, index)
    elif not isinstance(source, Hashable):
        raise TransformError(
            "weights must come from a function, a tensor or a key of the batch; found "
            f"{type(source).__name__}. Pass torch.as_tensor(weights)."
        )
    else:
        name, needs, answer = repr(source), frozenset({"batch"}), lambda stats: _as_weights(stats, source)
    if index is not None and not isinstance(source, Tensor):
        raise TransformError("index= must be used with a tensor of weights; found no tensor. Leave it out.")
    if window and not callable(source):
        raise TransformError("window=True must be used with a function; found none. Leave it out.")
    options = (", renormalize=True" if renormalize else "") + (", window=True" if window else "")
    return SampleTransform(
        name=f"weight({name}{options})",
        formula=_formula(name, needs),
        answer=answer,
        needs=needs,
        window=window,
        renormalizes=renormalize,
        positions=len(source) if isinstance(source, Tensor) and index is None else None,
        batch_keys=_batch_keys(source, index),
    )


def _batch_keys(source: Any, index: Hashable) -> frozenset[Hashable]:
    """Keys of the batch that `weight(source, index=index)` reads."""
    if isinstance(source, Tensor):
        return frozenset() if index is None else frozenset({index})
    return frozenset() if callable(source) else frozenset({source})


def _formula(name: str, needs: frozenset[str]) -> str:
    symbols = {"losses": "loss", "counts": "count", "norms": "‖{g}‖", "batch": "batch"}
    seen = ", ".join(symbol for need, symbol in symbols.items() if need in needs)
    return f"{name}({seen})" if seen and needs != {"batch"} else f"w[{name}]"


def _asking(
    function: Callable[..., Any], window: bool
) -> tuple[str, frozenset[str], Callable[[SampleStats], PerSample]]:
    """Name, needs and answer of a weight function. Its argument names are its needs."""
    parameters = inspect.signature(function).parameters.values()
    asked = [p.name for p in parameters if p.default is p.empty or p.name in NEEDS]  # others keep their defaults
    unknown = [name for name in asked if name not in NEEDS]
    if unknown or not asked:
        found = f"{unknown[0]!r}" if unknown else "no argument"
        raise TransformError(
            f"the arguments of a weight function must be among {', '.join(NEEDS)}; found {found}. "
            "Write, for example, def soft(losses): return torch.exp(-losses)."
        )
    if window and "batch" in asked:
        raise TransformError(
            "a weight function with window=True must not use batches; found the argument 'batch'. Use losses, counts "
            "or norms."
        )

    def answer(stats: SampleStats) -> PerSample:
        return function(**{need: getattr(stats, need) for need in asked})

    return function_name(function), frozenset(asked), answer


def _listed(values: Tensor, index: Hashable) -> tuple[str, frozenset[str], Callable[[SampleStats], PerSample]]:
    """Name, needs and answer of a tensor of weights, by position in the window or by sample index."""
    if values.dim() != 1:
        raise TransformError(f"weights must be one number per sample; found a tensor of shape {tuple(values.shape)}.")
    name = f"tensor of {len(values)}" + (f", index={index!r}" if index is not None else "")

    def refused(found: object) -> TransformError:
        return TransformError(f"batch[{index!r}] must hold sample indices from 0 to {len(values) - 1}; found: {found}.")

    def refuse_outside(outside: Tensor, indices: Tensor) -> None:
        raise refused(f"{int(indices[outside.isnan()][0])}")

    def looked_up(stats: SampleStats) -> PerSample:
        try:
            indices = copy_to_device(torch.as_tensor(pick(stats.batch, index)), values.device)
            checks = current_checks()
            if checks is not None and not read_at_once(indices):
                outside = (indices < 0) | (indices >= len(values))
                checks.add(refuse_outside, torch.where(outside, torch.nan, 0.0), indices)
                found = values[indices.clamp(0, len(values) - 1)]
                return torch.where(outside, torch.nan, found)  # the check is not made with on_nonfinite="ignore"
            if bool((indices < 0).any()):
                raise IndexError("some are negative")
            return copy_to_device(values[indices], stats.losses.device)
        except (IndexError, TypeError, ValueError) as error:
            raise refused(error) from None

    def in_order(stats: SampleStats) -> PerSample:
        positions = torch.arange(len(stats)) if stats.positions is None else stats.positions
        if int(positions.max()) >= len(values):
            raise TransformError(
                f"weight({name}) must have one value for each sample of the window; found a window of at least "
                f"{int(positions.max()) + 1}. Set Step(samples=) to the number of values, or look them up with index=."
            )
        return copy_to_device(values[copy_to_device(positions, values.device)], stats.losses.device)

    return (name, frozenset(), in_order) if index is None else (name, frozenset({"batch"}), looked_up)


def _as_weights(stats: SampleStats, key: Hashable) -> Tensor:
    found = pick(stats.batch, key)
    try:
        given = found if isinstance(found, Tensor) else torch.as_tensor(found, dtype=stats.losses.dtype)
        return copy_to_device(given, stats.losses.device)
    except (TypeError, ValueError, RuntimeError):
        raise TransformError(f"batch[{key!r}] must hold one weight per sample; found {type(found).__name__}.") from None
