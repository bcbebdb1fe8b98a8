"""Protocol of loss functions: `loss_fn(model, batch)` returns losses (B,), or (losses, counts).

The last element of a tuple may be a dict of columns, name -> (B,): further values to record per sample.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from samplewise.core.batches import cut, length, take
from samplewise.core.criteria import as_criterion
from samplewise.errors import LossesError

LossFn = Callable[[Any, Any], Any]  # (model, batch); Any: functions may be annotated with the user's own model class
RANDOM = "the losses are random (dropout?)"
EXCHANGES = 3  # each with new random numbers: one alone misses a permutation that leaves the first half in place
ORDERS = 3  # random orders: one alone misses an exchange of labels if the exchanged samples have the same label


# Names of a first argument that is the output of a model, as in a criterion (prediction, target).
OUTPUT_NAMES = frozenset(
    "input inputs input1 output outputs pred preds prediction predictions logits log_probs y_pred y_hat yhat".split()
)


def as_loss_fn(loss_fn: Any) -> LossFn:
    """Return loss_fn unchanged, or a torch criterion as a function that returns losses or (losses, counts)."""
    criterion = as_criterion(loss_fn)
    if criterion is not None:
        return criterion
    if isinstance(loss_fn, type) and issubclass(loss_fn, nn.Module):
        raise TypeError(f"loss_fn must be an object; found the class {loss_fn.__name__}. Write {loss_fn.__name__}().")
    first = _first_argument(loss_fn)
    module = isinstance(loss_fn, nn.Module)
    if not callable(loss_fn) or first in OUTPUT_NAMES or (module and first != "model"):
        found = _name(loss_fn)
        if first in OUTPUT_NAMES:
            found += f", whose first argument is {first!r}"
        raise TypeError(
            "loss_fn must be a function (model, batch) -> losses, one per sample, or a supported criterion of torch.nn "
            f"or torch.nn.functional; found {found}. Write for example lambda model, batch: "
            "F.cross_entropy(model(batch[0]), batch[1], reduction='none'); a loss module with its own weights takes "
            "(model, batch) in forward."
        )
    return loss_fn


def _first_argument(function: Any) -> str | None:
    """Name of the first of at least two arguments; None if there are fewer, or if the signature is not known."""
    try:
        names = list(inspect.signature(function.forward if isinstance(function, nn.Module) else function).parameters)
    except (TypeError, ValueError):
        return None
    return names[0] if len(names) >= 2 else None


def _name(thing: Any) -> str:
    """Name of a function, or of an object's class."""
    return getattr(thing, "__name__", type(thing).__name__)


def per_sample(result: Any) -> tuple[Tensor, Tensor | None]:
    """Split the result of a loss function into losses (B,) and counts (B,); counts are None if not returned."""
    if not isinstance(result, tuple):
        return result, None
    first = result[:-1] if _has_columns(result) else result
    if len(first) == 1 and first is not result:
        return first[0], None
    if len(first) != 2:
        raise LossesError(
            "loss_fn must return losses or (losses, counts), optionally followed by a dict of columns; found "
            f"a tuple of {len(result)}. Write, for example, return losses, counts, {{'margin': margin}}."
        )
    losses, counts = first
    if isinstance(losses, Tensor) and losses.dim() != 1:
        return losses, None  # the caller checks losses and raises for this shape
    if not isinstance(counts, Tensor) or not isinstance(losses, Tensor) or counts.shape != losses.shape:
        found = f"shape {tuple(counts.shape)}" if isinstance(counts, Tensor) else type(counts).__name__
        wanted = tuple(losses.shape) if isinstance(losses, Tensor) else "(B,)"
        raise LossesError(f"counts must be a tensor like the losses, {wanted}, one per sample; found {found}.")
    wide = losses.dtype if losses.dtype == torch.float64 else torch.float32  # integers would be divided in float32
    return losses, counts.detach().to(wide)


def why_not_alone(compute: Callable[[Any], Tensor], batch: Any, losses: Tensor) -> str | None:
    """Reason why `loss_alone` cannot be compared with the losses of a batch; None if it can.

    compute: function batch -> losses (B,), which gave `losses` for this batch
    """
    if not torch.equal(compute(batch).detach(), losses.detach()):
        return RANDOM
    if length(batch) != len(losses):
        return "the batch cannot be sliced into samples"
    return None


def loss_alone(compute: Callable[[Any], Tensor], batch: Any, index: int) -> Tensor:
    """Losses of a batch that consists of one sample of the given batch: shape (1,) unless samples interact."""
    return compute(cut(batch, index, index + 1))


def changed_by_order(
    compute: Callable[[Any], Tensor], batch: Any, losses: Tensor, tolerance: float, seed: int = 0, orders: int = ORDERS
) -> str | None:
    """Description of a sample whose loss changes if the samples of the batch change places; None if there is none.

    Shows losses that depend on the position of a sample, such as those of permuted labels. Batch statistics do not
    depend on it: see `loss_alone`. The arguments are those of `changed_by_exchange`; `losses`: those of the batch;
    `seed`: of the random orders.
    """
    total = len(losses)
    before = losses.detach()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(orders):
        order = torch.randperm(total, generator=generator)
        after = compute(take(batch, order.tolist())).detach()
        if len(after) != total:
            return f"{len(after)} losses are returned instead of {total} after the samples have changed places"
        places = order.argsort().to(after.device)
        off = differing(before, after[places], tolerance)
        if off.any():
            i = int(off.nonzero()[0])
            return (
                f"sample {i} of {total} has loss {before[i].item():.6g}, and {after[places[i]].item():.6g} after the "
                "samples of the batch have changed places"
            )
    return None


def differing(losses: Tensor, others: Tensor, tolerance: float) -> Tensor:
    """Flags (B,) of losses that differ by more than the tolerance, relative to the largest finite loss plus one. Two
    losses that are NaN or infinite do not differ: the finite check of an update handles them.
    """
    largest = losses.abs().nan_to_num(nan=0.0, posinf=0.0).max()
    near = (losses - others).abs() <= tolerance * (largest + 1)
    return ~near & (losses.isfinite() | others.isfinite())


def broadcast_cause(operation: str, samples: int) -> str:
    """Description of an operation that combines shapes (B, 1) and (B,), and its remedy."""
    return (
        f"In {operation}, tensors of shapes ({samples}, 1) and ({samples},) broadcast to ({samples}, {samples}), which "
        "compares every prediction with every target. Use squeeze(1) or unsqueeze(1)."
    )


def changed_by_exchange(
    compute: Callable[[Any], Tensor], batch: Any, rewind: Callable[[], Callable[[], Any]], tolerance: float
) -> str | None:
    """Description of a sample whose loss changes if other samples of the batch change places; None if there is none.

    For random losses, which cannot be compared with those of a sample alone: random numbers depend on the batch size.
    compute: function batch -> losses (B,)
    rewind: saves the state that calls change, and returns a function that restores it
    tolerance: of a loss, relative to the largest loss plus one
    """
    total = length(batch)
    if total is None or total < 3:
        return None
    # One half changes places among itself, so that the other gets the same random numbers, in most cases also if their
    # number depends on the data. Each half in turn, because all samples of one may be alike.
    half = total // 2
    halves = [
        (slice(0, half), [*range(half), *range(half + 1, total), half]),
        (slice(half, total), [*range(1, half), 0, *range(half, total)]),
    ]
    for kept, order in halves[: 2 if half > 1 else 1]:
        exchanged = take(batch, order)
        for _ in range(EXCHANGES):
            restore = rewind()
            before = compute(batch).detach()
            if len(before) != total:  # rows are not samples
                return None
            drawn = torch.get_rng_state()
            restore()
            after = compute(exchanged).detach()
            if not torch.equal(drawn, torch.get_rng_state()):
                return None  # other random numbers: the data decide how many are drawn
            off = torch.zeros(total, dtype=torch.bool, device=before.device)
            off[kept] = differing(before, after, tolerance)[kept]
            if off.any():
                i = int(off.nonzero()[0])
                return (
                    f"sample {i} of {total} has loss {before[i].item():.6g}, and {after[i].item():.6g} with the same "
                    "random numbers after other samples have changed places"
                )
    return None


def columns_of(result: Any, losses: Tensor) -> dict[str, Tensor] | None:
    """Return the columns of a loss function's result, detached; None if it has no columns."""
    if not _has_columns(result):
        return None
    for name, values in result[-1].items():
        if not isinstance(name, str) or not isinstance(values, Tensor) or values.shape != losses.shape:
            found = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
            raise LossesError(
                f"a column must have a name and be a tensor like the losses, {tuple(losses.shape)}, one value per "
                f"sample; found {found} for {name!r}. Return a tensor with one number per sample."
            )
    return {name: values.detach() for name, values in result[-1].items()}


def _has_columns(result: Any) -> bool:
    return isinstance(result, tuple) and len(result) > 1 and isinstance(result[-1], dict)
