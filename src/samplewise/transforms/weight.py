"""Weights of samples: given (`weight`), from the agreement of gradients with a reference (`align`), or 0 for
samples of a window that are left out (`drop`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from typing import Any, Literal

import torch
from torch import Tensor

from samplewise.core.batches import pick
from samplewise.core.memory import copy_to_device
from samplewise.engine.deferred_checks import current_checks, read_at_once
from samplewise.errors import BatchError, TransformError
from samplewise.transforms.stats import PerSample, SampleStats
from samplewise.transforms.transform import NEEDS, Direction, Reference, SampleTransform, function_name, quotient


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
    batch_keys: frozenset[Hashable] = frozenset()
    if callable(source):
        name, needs, coefficients = _from_function(source, window)
    elif isinstance(source, Tensor):
        name, needs, coefficients = _from_tensor(source, index)
        if index is not None:
            batch_keys = frozenset({index})
    elif not isinstance(source, Hashable):
        raise TransformError(
            "weights must come from a function, a tensor or a key of the batch; found "
            f"{type(source).__name__}. Pass torch.as_tensor(weights)."
        )
    else:
        name, needs, coefficients = repr(source), frozenset({"batch"}), lambda stats: _column(stats, source)
        batch_keys = frozenset({source})
    if index is not None and not isinstance(source, Tensor):
        raise TransformError("index= must be used with a tensor of weights; found no tensor. Leave it out.")
    if window and not callable(source):
        raise TransformError("window=True must be used with a function; found none. Leave it out.")
    options = (", renormalize=True" if renormalize else "") + (", window=True" if window else "")
    symbols = {"losses": "loss", "counts": "count", "norms": "‖{g}‖", "batch": "batch"}
    arguments = ", ".join(symbol for need, symbol in symbols.items() if need in needs)
    return SampleTransform(
        name=f"weight({name}{options})",
        formula=f"{name}({arguments})" if arguments and needs != {"batch"} else f"w[{name}]",
        coefficients=coefficients,
        needs=needs,
        window=window,
        renormalizes=renormalize,
        positions=len(source) if isinstance(source, Tensor) and index is None else None,
        batch_keys=batch_keys,
    )


def _from_function(
    function: Callable[..., Any], window: bool
) -> tuple[str, frozenset[str], Callable[[SampleStats], PerSample]]:
    """Name, needs and coefficients of a weight function. Its argument names are its needs."""
    parameters = inspect.signature(function).parameters.values()
    needs = [p.name for p in parameters if p.default is p.empty or p.name in NEEDS]  # others keep their defaults
    unknown = [name for name in needs if name not in NEEDS]
    if unknown or not needs:
        problem = f"{unknown[0]!r}" if unknown else "no argument"
        raise TransformError(
            f"the arguments of a weight function must be among {', '.join(NEEDS)}; found {problem}. "
            "Write, for example, def soft(losses): return torch.exp(-losses)."
        )
    if window and "batch" in needs:
        raise TransformError(
            "a weight function with window=True must not use batches; found the argument 'batch'. Use losses, counts "
            "or norms."
        )

    def coefficients(stats: SampleStats) -> PerSample:
        return function(**{need: getattr(stats, need) for need in needs})

    return function_name(function), frozenset(needs), coefficients


def _from_tensor(values: Tensor, index: Hashable) -> tuple[str, frozenset[str], Callable[[SampleStats], PerSample]]:
    """Name, needs and coefficients of a tensor of weights, by position in the window or by sample index."""
    if values.dim() != 1:
        raise TransformError(f"weights must be one number per sample; found a tensor of shape {tuple(values.shape)}.")
    name = f"tensor of {len(values)}" + (f", index={index!r}" if index is not None else "")

    def refusal(problem: object) -> TransformError:
        return TransformError(
            f"batch[{index!r}] must hold sample indices from 0 to {len(values) - 1}; found: {problem}."
        )

    def refuse_outside(outside: Tensor, indices: Tensor) -> None:
        raise refusal(f"{int(indices[outside.isnan()][0])}")

    def by_index(stats: SampleStats) -> PerSample:
        try:
            indices = copy_to_device(torch.as_tensor(pick(stats.batch, index)), values.device)
            checks = current_checks()
            if checks is not None and not read_at_once(indices):
                outside = (indices < 0) | (indices >= len(values))
                checks.add(refuse_outside, torch.where(outside, torch.nan, 0.0), indices)
                # NaN, because the check is not made with on_nonfinite="ignore".
                return torch.where(outside, torch.nan, values[indices.clamp(0, len(values) - 1)])
            if bool((indices < 0).any()):
                raise IndexError("some are negative")
            return copy_to_device(values[indices], stats.losses.device)
        except BatchError:  # the batch has no such entry
            raise
        except (IndexError, TypeError, ValueError) as error:
            raise refusal(error) from None

    def by_position(stats: SampleStats) -> PerSample:
        positions = torch.arange(len(stats)) if stats.positions is None else stats.positions
        if int(positions.max()) >= len(values):
            raise TransformError(
                f"weight({name}) must have one value for each sample of the window; found a window of at least "
                f"{int(positions.max()) + 1}. Set Step(samples=) to the number of values, or look them up with index=."
            )
        return copy_to_device(values[copy_to_device(positions, values.device)], stats.losses.device)

    return (name, frozenset(), by_position) if index is None else (name, frozenset({"batch"}), by_index)


def _column(stats: SampleStats, key: Hashable) -> Tensor:
    column = pick(stats.batch, key)
    try:
        weights = column if isinstance(column, Tensor) else torch.as_tensor(column, dtype=stats.losses.dtype)
        return copy_to_device(weights, stats.losses.device)
    except (TypeError, ValueError, RuntimeError):
        kind = type(column).__name__
        raise TransformError(f"batch[{key!r}] must hold one weight per sample; found {kind}.") from None


def align(
    reference: Direction | Callable[[], Direction],
    *,
    kind: Literal["cosine", "dot"] = "cosine",
    renormalize: bool = False,
) -> SampleTransform:
    """Weight samples by the dot product of their gradient with a reference; a negative product gives weight 0.

    reference: a dict name -> tensor, or a function that returns one and is called once per window, such as
    lambda: sw.gradients(loss_fn(model, clean), model).mean().
    kind: "cosine" (default), the cosine of the angle between both; or "dot", the unnormalized dot product.
    renormalize: divide the update by Σ weight × count instead of Σ counts.
    """
    if kind not in ("cosine", "dot"):
        raise ValueError(f"kind must be 'cosine' or 'dot'; found {kind!r}.")
    towards = Reference(reference, unit=kind == "cosine")

    def coefficients(stats: SampleStats) -> PerSample:
        dots = stats.dots(towards).clamp(min=0)
        return dots if kind == "dot" else quotient(dots, stats.norms)

    options = (f", kind={kind!r}" if kind != "cosine" else "") + (", renormalize=True" if renormalize else "")
    return SampleTransform(
        name=f"align(reference{options})",
        formula="max(0, ⟨{g}, r⟩)" if kind == "dot" else "max(0, ⟨{g}, r⟩/‖{g}‖‖r‖)",
        coefficients=coefficients,
        needs=frozenset() if kind == "dot" else frozenset({"norms"}),
        reference=towards,
        renormalizes=renormalize,
    )


def drop(
    largest: int = 0,
    *,
    smallest: int = 0,
    quantile: float | None = None,
    score: Literal["norms", "losses"] = "norms",
) -> SampleTransform:
    """Drop samples of the window, and average over the rest.

    largest, smallest: number of samples with the largest or smallest values to drop (default 0).
    quantile: drop samples with values above this quantile of the window.
    score: values to compare: "norms" of the gradients (default), or "losses".
    """
    for name, number in (("largest", largest), ("smallest", smallest)):
        if not isinstance(number, int) or number < 0:
            raise ValueError(f"{name} must be an integer number of samples, 0 or more; found {number!r}.")
    if quantile is not None and not 0 < quantile < 1:
        raise ValueError(f"quantile must lie between 0 and 1; found {quantile!r}.")
    if not (largest or smallest or quantile):
        raise ValueError(
            "drop needs one of largest=, smallest= or quantile=; found none. Write, for example, drop(largest=1)."
        )
    if score not in ("norms", "losses"):
        raise ValueError(f"score must be 'norms' or 'losses'; found {score!r}.")

    def coefficients(stats: SampleStats) -> PerSample:
        values = stats.norms if score == "norms" else stats.losses
        keep = torch.ones_like(values)
        if quantile is not None:
            # Linear interpolation, like torch.quantile, which is limited to 16 million values.
            ordered = values.sort().values
            place = quantile * (len(ordered) - 1)
            below = int(place)
            above = min(below + 1, len(ordered) - 1)
            keep.masked_fill_(values > torch.lerp(ordered[below], ordered[above], place - below), 0)
        order = values.argsort(stable=True)
        keep[order[:smallest]] = 0
        keep[order[len(order) - min(largest, len(order)) :]] = 0
        return keep

    limits = {"largest": largest or None, "smallest": smallest or None, "quantile": quantile}
    options = [f"{name}={value}" for name, value in limits.items() if value is not None]
    options += [f"score={score!r}"] if score != "norms" else []
    symbol = "‖{g}‖" if score == "norms" else "loss"
    return SampleTransform(
        name=f"drop({', '.join(options)})",
        formula=f"[{symbol} kept by {', '.join(options)}]",
        coefficients=coefficients,
        needs=frozenset({score}),
        window=True,
        renormalizes=True,
    )
