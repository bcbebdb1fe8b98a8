"""Conversion of updates to the columns of a table, one row per sample.

Columns of several updates are concatenated. A column that an update lacks is NaN there. Numbers of different types
become float64, provided that no value changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import nan
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from samplewise.core.files import tensor_bytes
from samplewise.core.memory import HostCopy
from samplewise.core.text import plural
from samplewise.errors import LedgerError
from samplewise.ledger.files import load_pyarrow
from samplewise.step.update import Update, has_counts, has_weights
from samplewise.step.window import BatchColumns, Column

STANDARD_COLUMNS = ("id", "epoch", "update", "loss", "norm", "weight", "count")
INTEGER_DTYPES = (torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.int64)
STORED_DTYPES = {torch.bool: torch.int8, torch.float64: torch.float64}  # other non-integer columns become float32
Columns = dict[str, Column]
NO_WEIGHT = 0.0  # of each sample of a skipped update
ONE = 1.0  # weight or count of each sample of an update


class RowBlock:
    """Rows of some updates. Values on an accelerator are copied to the host while the training goes on.

    epochs: one per update; None: the epoch recorded in the update
    norms: False records NaN
    """

    def __init__(self, updates: Sequence[Update], epochs: Sequence[int | None], norms: bool):
        self._columns = _updates_to_columns(updates, epochs, norms)
        tensors = {name: values for name, values in self._columns.items() if isinstance(values, Tensor)}
        self._names = list(tensors)
        self.complete = all(values.device.type == "cpu" for values in tensors.values())  # nothing is left to be copied
        self._copy = HostCopy(list(tensors.values()))

    def table(self) -> Any:
        """Pyarrow table; waits for copies that are not complete."""
        self._columns.update(zip(self._names, self._copy.read(), strict=True))
        # Each count is 1, or NaN in a skipped update: then the losses are not sums over elements.
        counts = torch.as_tensor(self._columns["count"])
        if bool(((counts == 1) | counts.isnan()).all()):
            del self._columns["count"]
        return load_pyarrow().table({name: _to_array(name, values) for name, values in self._columns.items()})


def _updates_to_columns(updates: Sequence[Update], epochs: Sequence[int | None], norms: bool) -> Columns:
    rows = [_count_rows(update) for update in updates]
    batches: list[BatchColumns] = []
    batch_epochs: list[int] = []
    for update, epoch in zip(updates, epochs, strict=True):
        for batch in update._batch_columns:
            batches.append(batch)
            batch_epochs.append(batch.epoch if epoch is None else epoch)
    batch_rows = [len(batch.values["id"]) for batch in batches]
    batch_columns = _concat_columns([batch.values for batch in batches], batch_rows)
    update_columns = [_update_columns(update, n, norms) for update, n in zip(updates, rows, strict=True)]
    columns: Columns = {
        "id": batch_columns.pop("id"),
        "epoch": _repeated(batch_epochs, batch_rows),
        "update": _update_indices(updates, rows),
        **_concat_columns(update_columns, rows),
    }
    for name, values in batch_columns.items():
        if name in columns or name in STANDARD_COLUMNS:
            raise _reserved_name_error(name)
        if len(values) != sum(batch_rows) or getattr(values, "ndim", 1) != 1:
            shape = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else plural(len(values), "value")
            raise LedgerError(
                f"the column {name!r} must have one number or string per sample, ({sum(batch_rows)},); found {shape}. "
                "Leave it out of columns=, or return one value per sample from the dataset."
            )
    return columns | batch_columns


def _concat_columns(parts: Sequence[Mapping[str, Any]], rows: Sequence[int]) -> Columns:
    """Concatenate all columns that any part has; a part that lacks a column gets `rows` NaN."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: _concat_column(name, [part.get(name, nan) for part in parts], rows) for name in names}


def _reserved_name_error(name: str) -> LedgerError:
    return LedgerError(
        f"a column must not have the name of a standard column ({', '.join(STANDARD_COLUMNS)}); found {name!r}. "
        "Rename it."
    )


def _count_rows(update: Update) -> int:
    """Number of samples of an update, counted by ids. A skipped update may have fewer losses than ids."""
    rows = 0
    for batch in update._batch_columns:
        ids = batch.values["id"]
        if not isinstance(ids, (Tensor, list, tuple)) or getattr(ids, "ndim", 1) != 1:
            description = f"a tensor of shape {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
            raise LedgerError(f"ids must be a tensor (B,) or a list, one per sample; found {description}. {_ID_HINT}")
        rows += len(ids)
    if rows != update.local_samples and not update.skipped:
        raise LedgerError(
            f"a batch must have one id for each loss; found {plural(rows, 'id')} for "
            f"{plural(update.local_samples, 'loss', 'losses')}. {_ID_HINT}"
        )
    return rows


_ID_HINT = "Pass the key of the ids: Ledger(id=...)."


def _update_columns(update: Update, rows: int, norms: bool) -> dict[str, Tensor | float]:
    """Columns loss, norm, weight and count of an update, and those of the loss function. A number is that of all rows:
    tensors for each update would take microseconds.

    The weights of a skipped update are 0; values that were not computed are NaN.
    """
    extra = update._loss_columns
    for name in extra:
        if name in STANDARD_COLUMNS:
            raise _reserved_name_error(name)
    losses = update.losses
    skipped = update.skipped
    if skipped and len(losses) != rows:  # the batch cannot be sliced, and its losses were not computed
        return {"loss": nan, "norm": nan, "weight": NO_WEIGHT, "count": nan}
    weights: Any = NO_WEIGHT
    if not skipped:
        weights = update.weights if has_weights(update) else ONE
    by_parameter: dict[str, Tensor] = {}
    if isinstance(weights, dict):
        by_parameter = {f"weight/{name}": values for name, values in weights.items()}
        weights = nan
    norm = update.norms if norms else nan
    counts = update.counts if has_counts(update) else ONE
    return {"loss": losses, "norm": norm, "weight": weights, "count": counts, **by_parameter, **extra}


def _update_indices(updates: Sequence[Update], rows: Sequence[int]) -> Tensor:
    """Update index of each row. A group of updates made at once has the same number of samples in each update."""
    firsts = _repeated([update.index for update in updates], rows)
    if all(update._updates == 1 for update in updates):
        return firsts
    offsets = []
    for update, count in zip(updates, rows, strict=True):
        samples_per_update = count // update._updates
        offsets.append(torch.arange(count) // samples_per_update)
    return firsts + torch.cat(offsets)


def _repeated(values: Sequence[int], times: Sequence[int]) -> Tensor:
    return torch.tensor(values).repeat_interleave(torch.tensor(times))


def _concat_column(name: str, values: Sequence[Any], rows: Sequence[int]) -> Column:
    """Concatenate the parts of a column; a number is that of all `rows` of its part."""
    if all(isinstance(v, (list, tuple)) for v in values):
        return [entry for v in values for entry in v]
    if all(v is values[0] for v in values) and isinstance(values[0], float):
        return torch.full((sum(rows),), values[0])
    if not all(isinstance(v, (float, Tensor)) for v in values):
        raise LedgerError(
            f"the column {name!r} must have one type in all batches; found lists in some batches only. Return a list "
            "in every batch, or a tensor in every batch."
        )
    device = next((v.device for v in values if isinstance(v, Tensor)), None)
    filled = [
        v if isinstance(v, Tensor) else torch.full((n,), v, device=device) for v, n in zip(values, rows, strict=True)
    ]
    if len({v.dtype for v in filled}) > 1:
        filled = [_as_double(name, v.cpu()) for v in filled]
    on_device = len({v.device for v in filled}) == 1  # then a single copy to the host is enough
    return filled[0] if len(filled) == 1 else torch.cat(filled if on_device else [v.cpu() for v in filled])


def _as_double(name: str, values: Tensor) -> Tensor:
    double = values.double()
    if values.dtype in INTEGER_DTYPES and not torch.equal(double.to(values.dtype), values):
        raise LedgerError(
            f"the column {name!r} must hold integers in all batches if they are as large as 2**53; found floats, or no "
            "value, in some batches. Return strings, or integers in all batches."
        )
    return double


def _to_array(name: str, values: Column) -> Any:
    """Pyarrow array of a column."""
    pa = load_pyarrow()
    if name in STANDARD_COLUMNS and name != "id":
        dtype = {"epoch": torch.int32, "update": torch.int64}.get(name, torch.float32)
        return array_from_tensor(torch.as_tensor(values).to(dtype))
    if isinstance(values, Tensor):
        if values.dtype in INTEGER_DTYPES:
            return array_from_tensor(values.to(torch.int64))
        if name != "id" and not values.is_complex():
            return array_from_tensor(values.to(STORED_DTYPES.get(values.dtype, torch.float32)))
    elif all(isinstance(v, str) for v in values):
        return pa.array(list(values), pa.string())
    elif all(isinstance(v, Integral) and not isinstance(v, bool) for v in values):
        numbers = [int(v) for v in values]
        large = [number for number in numbers if not -(2**63) <= number < 2**63]
        if large:
            raise LedgerError(
                f"the column {name!r} must hold integers from -2**63 to 2**63 - 1; found {large[0]}. Return them as "
                "strings: str(number)."
            )
        return pa.array(numbers, pa.int64())
    elif name != "id" and all(isinstance(v, Real) for v in values):
        return pa.array([float(v) for v in values], pa.float64())
    if isinstance(values, Tensor):
        types = str(values.dtype)
    else:
        types = " and ".join(sorted({type(v).__name__ for v in values}))
    kinds = "integers or strings" if name == "id" else "numbers or strings"
    raise LedgerError(f"the column {name!r} must hold {kinds}; found {types}. Convert them in the dataset.")


def array_from_tensor(values: Tensor) -> Any:
    """Pyarrow array with a copy of a tensor's memory; avoids a conversion through NumPy or Python numbers."""
    pa = load_pyarrow()
    types = {torch.int8: pa.int8(), torch.int32: pa.int32(), torch.int64: pa.int64()}
    types |= {torch.float32: pa.float32(), torch.float64: pa.float64()}
    data = pa.py_buffer(bytes(tensor_bytes(values)))
    return pa.Array.from_buffers(types[values.dtype], len(values), [None, data])
