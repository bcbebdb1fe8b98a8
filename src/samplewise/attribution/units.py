"""Units of attribution: samples, tokens, or documents of packed rows.

The gradient of a unit is that of the sum of its tokens' losses. As the tokens of a row attend to each other, one
backward pass does not separate them: each unit becomes a sample, a copy of its row in which the losses of other tokens
are masked. This is exact for any model, and costs one row per unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from samplewise.attribution.projected_features import OutputFn
from samplewise.core.batches import cut, keep_whole, length, take
from samplewise.core.losses import LossFn, as_loss_fn, batch_constants, constants_of, per_sample
from samplewise.core.state import eval_mode
from samplewise.errors import BatchError, LossesError

# A function returns the numbers of the units of the tokens of a batch, (B, T), negative for tokens without a unit.
Unit = Literal["sample", "token"] | Callable[[Any], Tensor]


class UnitBatch(NamedTuple):
    """Batch of n units.

    rows: batch in which each row is repeated for each of its units, in the order of their numbers
    mask: (n, T), True for the tokens of the unit
    """

    rows: Any
    mask: Tensor


def check_units(unit: Unit | None, query_unit: Unit | None) -> tuple[Unit | None, Unit | None]:
    """Units of training samples and of queries; None for losses (B,). By default, those of queries are the same."""
    for name, value in (("unit", unit), ("query_unit", query_unit)):
        if value not in (None, "sample", "token") and not callable(value):
            raise ValueError(f"{name} must be 'sample', 'token' or a function (batch) -> numbers; found {value!r}.")
    if query_unit is not None and unit is None:
        unit = "sample"
    return unit, query_unit or unit


def by_unit(
    model: nn.Module, fn: LossFn | OutputFn, loader: Iterable[Any], unit: Unit | None, *, weighted: bool = False
) -> tuple[LossFn, Iterable[Any]]:
    """Loss function and loader whose samples are the units, from a function that returns a value per token, (B, T).

    weighted: `fn` is an output function, which may return weights (B, T), too
    """
    if unit is None:
        return fn, loader
    per_token = _with_weights(fn) if weighted else _losses_of(as_loss_fn(fn))
    if unit == "sample":
        return _declared(lambda model, batch: _sums(per_token(model, batch), None), constants_of(fn)), loader

    def of_units(model: Any, batch: UnitBatch) -> Any:
        return _sums(per_token(model, batch.rows), batch.mask)

    constants = constants_of(fn)
    batches = UnitBatches(loader, unit, lambda batch: per_token(model, batch)[0].shape[1], model, constants)
    return _declared(of_units, [(0, *path) for path in constants]), batches


class UnitBatches:
    """Batches of units, from a loader of rows, which may be iterated as often as the loader.

    tokens: number of tokens of the rows of a batch
    """

    def __init__(
        self,
        loader: Iterable[Any],
        unit: Unit,
        tokens: Callable[[Any], int],
        model: nn.Module,
        constants: Iterable[tuple[Any, ...]],
    ):
        self._loader = loader
        self._unit = unit
        self._tokens = tokens
        self._model = model
        self._constants = list(constants)

    def __getattr__(self, name: str) -> Any:  # samplers, which are checked
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[UnitBatch]:
        expected: int | None = None
        units = 0
        for batch in self._loader:
            batch = keep_whole(batch, self._constants)
            count = length(batch)
            if count is None:
                raise BatchError(
                    "units need batches that can be sliced, to repeat their rows; found a batch of type "
                    f"{type(batch).__name__}. Declare entries that are not per sample with sw.batch_constants."
                )
            if callable(self._unit):
                numbers = _checked_numbers(self._unit(batch), count)
            else:
                with torch.no_grad(), eval_mode(self._model):
                    size = self._tokens(cut(batch, 0, 1))
                if size != (expected or size):
                    raise BatchError(
                        f"unit='token' needs rows of one length, because token t of row i is number i * T + t; found "
                        f"{size} tokens after {expected}. Pad the rows, or pass a function that numbers the tokens."
                    )
                expected = size
                numbers = torch.arange(size).expand(count, size)
            masks = [[row == number for number in row.unique() if number >= 0] for row in numbers]
            places = [place for place, of_row in enumerate(masks) for _ in of_row]
            units += len(places)
            if places:
                yield UnitBatch(take(batch, places), torch.stack([mask for of_row in masks for mask in of_row]))
        if not units:
            raise BatchError(
                "unit must number at least one token, from 0 on; found only negative numbers, or no batch. Check the "
                "function, and that the loader can be iterated again."
            )


def _checked_numbers(numbers: Any, rows: int) -> Tensor:
    if not isinstance(numbers, Tensor) or numbers.is_floating_point() or numbers.dim() != 2 or len(numbers) != rows:
        description = f"{tuple(numbers.shape)} of {numbers.dtype}" if isinstance(numbers, Tensor) else repr(numbers)
        raise BatchError(
            f"unit must return integers ({rows}, T), the number of the unit of each token of the batch; found "
            f"{description}."
        )
    return numbers


def _losses_of(loss_fn: LossFn) -> Callable[[Any, Any], tuple[Tensor, None]]:
    return lambda model, batch: (_checked(per_sample(loss_fn(model, batch))[0], "losses"), None)


def _with_weights(output_fn: OutputFn) -> Callable[[Any, Any], tuple[Tensor, Tensor]]:
    """Outputs (B, T), and their weights as in `outputs_and_weights`."""

    def per_token(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
        result = output_fn(model, batch)
        outputs, weights = result if isinstance(result, tuple) else (result, torch.sigmoid(-result.detach()))
        return _checked(outputs, "outputs"), _checked(weights, "weights").detach()

    return per_token


def _checked(values: Any, name: str) -> Tensor:
    if not isinstance(values, Tensor) or values.dim() != 2:
        description = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise LossesError(
            f"{name} must have one value per token, (B, T), if a unit is given; found {description}. Use "
            "reduction='none', without a sum over the tokens."
        )
    return values


def _sums(values: tuple[Tensor, Tensor | None], mask: Tensor | None) -> Any:
    """Sums (n,) over the tokens of each unit, and their weight, if there are weights."""
    per_token, weights = values
    inside = torch.ones_like(per_token, dtype=torch.bool) if mask is None else mask.to(per_token.device)
    if inside.shape != per_token.shape:
        raise LossesError(
            f"units must number each token with a loss, {tuple(per_token.shape)}; found numbers for "
            f"{tuple(inside.shape)}. Return as many as the loss function returns."
        )
    total = torch.where(inside, per_token, 0).sum(1)
    if weights is None:
        return total
    largest = torch.where(inside, weights, -torch.inf).amax(1)
    if not torch.equal(largest, torch.where(inside, weights, torch.inf).amin(1)):
        raise LossesError(
            "the outputs of a unit can be added up only if their weights are equal; found tokens of one unit with "
            "different weights. Use unit='token', or outputs whose weights are constant, such as minus the losses with "
            "weights of 1."
        )
    return total, largest


def _declared(function: Callable[[Any, Any], Any], constants: Iterable[tuple[Any, ...]]) -> LossFn:
    paths = tuple(constants)
    return batch_constants(*paths)(function) if paths else function
