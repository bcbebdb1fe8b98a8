"""Comparisons of losses that show interacting samples, and entries of a batch that are not per sample: losses of a
sample alone, in another order, with other samples exchanged, and in a slice of the batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from itertools import chain, combinations
from typing import Any

import torch
from torch import Tensor

from samplewise.core.batches import Path, copied, cut, keep_whole, length, name_of, row_counts, take
from samplewise.errors import BatchError

RANDOM = "the losses are random (dropout?)"
EXCHANGES = 3  # each with new random numbers: one alone misses a permutation that leaves the first half in place
ORDERS = 3  # random orders: one alone misses an exchange of labels if the exchanged samples have the same label
COMPARED = 2048  # rows of the largest batch that is computed as a whole for a comparison
COMBINED = 6  # entries of which all combinations are tried as constants


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


def differing(losses: Tensor, second: Tensor, tolerance: float) -> Tensor:
    """Flags (B,) of losses that differ by more than the tolerance, relative to the largest finite loss plus one. Two
    losses that are NaN or infinite do not differ: the finite check of an update handles them.
    """
    largest = losses.abs().nan_to_num(nan=0.0, posinf=0.0).max()
    near = (losses - second).abs() <= tolerance * (largest + 1)
    return ~near & (losses.isfinite() | second.isfinite())


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
    for unmoved, order in halves[: 2 if half > 1 else 1]:
        exchanged = take(batch, order)
        for _ in range(EXCHANGES):
            restore = rewind()
            before = compute(batch).detach()
            if len(before) != total:  # rows are not samples
                return None
            rng_state = torch.get_rng_state()
            restore()
            after = compute(exchanged).detach()
            if not torch.equal(rng_state, torch.get_rng_state()):
                return None  # other random numbers: the data decide how many are drawn
            off = torch.zeros(total, dtype=torch.bool, device=before.device)
            off[unmoved] = differing(before, after, tolerance)[unmoved]
            if off.any():
                i = int(off.nonzero()[0])
                return (
                    f"sample {i} of {total} has loss {before[i].item():.6g}, and {after[i].item():.6g} with the same "
                    "random numbers after other samples have changed places"
                )
    return None


# --- comparison of a slice with the whole ----------------------------------------------------------------------------


class NotPerSampleError(BatchError):
    """Entries of a batch have as many rows as there are samples, and are not per sample."""

    def __init__(self, paths: Sequence[Path], total: int, samples: int):
        keys = ", ".join(repr(path[0] if len(path) == 1 else path) for path in paths)
        self.names = " and ".join(map(name_of, paths))
        self.remedy = f"decorate the loss function with @sw.batch_constants({keys})"
        super().__init__(
            f"an entry of the batch that is not per sample must be kept whole when the batch is sliced; found that "
            f"{self.names} has {total} rows, as many as there are samples, and that losses of {samples} of the samples "
            f"differ from those in the whole batch unless it is kept whole. If it is not per sample, {self.remedy}; if "
            "samples interact through it on purpose, pass interacting='allow' to sw.Step."
        )


def difference_of_slice(
    compute: Callable[[Any], Tensor],
    batch: Any,
    start: int,
    stop: int,
    tolerance: Callable[[Tensor], float] | None = None,
) -> str | None:
    """Description of a sample whose loss in the slice start:stop of a batch differs from that in the whole batch; None
    if there is none, or if losses are random or the whole batch cannot be computed. Raises NotPerSampleError if
    the losses are equal when some entries are kept whole.

    compute: function batch -> losses (B,), without randomness as far as possible
    tolerance: function of losses that returns that of a loss, relative to the largest loss plus one; default: three
    times the square root of the machine epsilon
    """
    counts = row_counts(batch)
    total = next(iter(counts.values()), 0)
    if not stop - start < total <= COMPARED:
        return None
    losses_of_batch = _losses(compute, batch, total)
    if losses_of_batch is None:
        return None
    expected = losses_of_batch[start:stop]
    relative = 3 * torch.finfo(expected.dtype).eps ** 0.5 if tolerance is None else tolerance(expected)
    bound = relative * (expected.abs().nan_to_num(nan=0.0, posinf=0.0).max() + 1)

    def of_slice(paths: Sequence[Path]) -> Tensor | None:
        return _losses(compute, cut(keep_whole(batch, paths), start, stop, total), stop - start)

    def agrees(losses: Tensor | None) -> bool:
        if losses is None:
            return False
        equal = ((losses - expected).abs() <= bound) | ~(losses.isfinite() | expected.isfinite())
        return bool(equal.all())

    losses = of_slice(())
    if agrees(losses):
        return None
    repeated = of_slice(())
    if losses is not None and repeated is not None and not torch.equal(losses, repeated):
        return None
    # Sets of entries that may be constants, small ones first; at least one entry is per sample.
    most = len(counts) - 1 if len(counts) <= COMBINED else 1
    candidates = chain.from_iterable(combinations(counts, size) for size in range(1, most + 1))
    paths = next((paths for paths in candidates if agrees(of_slice(paths))), None)
    if paths is not None:
        raise NotPerSampleError(paths, total, stop - start)
    if losses is None:
        return None  # an error of the loss function, which the caller will get
    row = int(((losses - expected).abs().nan_to_num(nan=torch.inf)).argmax())
    return (
        f"sample {start + row} of {total} has loss {expected[row].item():.6g} in the batch and "
        f"{losses[row].item():.6g} in a microbatch of {stop - start}"
    )


def _losses(compute: Callable[[Any], Tensor], batch: Any, number: int) -> Tensor | None:
    """Losses of a batch; None if they cannot be computed, or are not `number` values."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of shapes that broadcast, in a batch that was cut in another way
            losses = compute(copied(batch)).detach()
    except Exception:  # the caller gets it, unless it comes from this way of slicing, or memory is short
        return None
    return losses if losses.shape == (number,) else None
