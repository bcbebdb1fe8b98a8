"""Entries of a batch that are not per sample: declared by the user, or found by comparing a slice with the whole."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from itertools import chain, combinations
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from samplewise.core.batches import Path, copied, cut, keep_whole, name_of, row_counts
from samplewise.errors import BatchError

F = TypeVar("F", bound=Callable[..., Any])

COMPARED = 2048  # rows of the largest batch that is computed as a whole for a comparison
COMBINED = 6  # entries of which all combinations are tried as constants


def batch_constants(*keys: Hashable | Path) -> Callable[[F], F]:
    """Decorator of a loss function: declare entries of the batch that are not per sample, such as a mask (T, T), class
    weights or position ids.

        @sw.batch_constants("mask")
        def loss_fn(model, batch):
            ...

    Whatever slices batches (`Step`, `Trainer`, `scan`, `check` and attribution) then keeps these entries whole, also if
    their first size is the number of samples. keys: keys of a dict, positions in a tuple, or names of fields; a tuple
    of keys leads to a nested entry, such as ("inputs", "mask"). It is an error if a batch does not have them.

    Without the decorator, entries with as many rows as there are samples are sliced, and a batch whose tensors have
    different numbers of rows is used whole.
    """
    paths = tuple(key if isinstance(key, tuple) else (key,) for key in keys)

    def declare(loss_fn: F) -> F:
        declared: Any = loss_fn
        if not isinstance(loss_fn, nn.Module):  # a module stays one, because its parameters are trained

            @wraps(loss_fn)
            def declared(model: Any, batch: Any) -> Any:
                return loss_fn(model, batch)

        declared.batch_constants = (*constants_of(loss_fn), *paths)
        return declared

    return declare


def constants_of(loss_fn: Any) -> tuple[Path, ...]:
    """Paths that `batch_constants` has declared for a loss function."""
    return getattr(loss_fn, "batch_constants", ())


def same_constants(wrapper: F, loss_fn: Any) -> F:
    """A function that wraps a loss function, with the constants of that."""
    paths = constants_of(loss_fn)
    return batch_constants(*paths)(wrapper) if paths else wrapper


def with_constants(loader: Iterable[Any], loss_fn: Any) -> Iterable[Any]:
    """Batches of a loader, with the constants of a loss function marked; the loader itself if there are none."""
    paths = constants_of(loss_fn)
    return (keep_whole(batch, paths) for batch in loader) if paths else loader


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
    whole = _losses(compute, batch, total)
    if whole is None:
        return None
    wanted = whole[start:stop]
    relative = 3 * torch.finfo(wanted.dtype).eps ** 0.5 if tolerance is None else tolerance(wanted)
    bound = relative * (wanted.abs().nan_to_num(nan=0.0, posinf=0.0).max() + 1)

    def of_slice(paths: Sequence[Path]) -> Tensor | None:
        return _losses(compute, cut(keep_whole(batch, paths), start, stop, total), stop - start)

    def agrees(losses: Tensor | None) -> bool:
        if losses is None:
            return False
        equal = ((losses - wanted).abs() <= bound) | ~(losses.isfinite() | wanted.isfinite())
        return bool(equal.all())

    losses = of_slice(())
    if agrees(losses):
        return None
    again = of_slice(())
    if losses is not None and again is not None and not torch.equal(losses, again):
        return None
    paths = next((paths for paths in _combinations(counts) if agrees(of_slice(paths))), None)
    if paths is not None:
        raise NotPerSampleError(paths, total, stop - start)
    if losses is None:
        return None  # an error of the loss function, which the caller will get
    row = int(((losses - wanted).abs().nan_to_num(nan=torch.inf)).argmax())
    return (
        f"sample {start + row} of {total} has loss {wanted[row].item():.6g} in the batch and {losses[row].item():.6g} "
        f"in a microbatch of {stop - start}"
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


def _combinations(counts: Mapping[Path, int]) -> Iterator[tuple[Path, ...]]:
    """Sets of entries that may be constants, small ones first; at least one entry is per sample."""
    most = len(counts) - 1 if len(counts) <= COMBINED else 1
    return chain.from_iterable(combinations(counts, size) for size in range(1, most + 1))
