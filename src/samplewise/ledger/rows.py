"""Conversion of updates to the columns of a table, one row per sample.

Columns of several updates are concatenated. A column that an update lacks is NaN there. Numbers of different types
become float64, provided that no value changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from samplewise.core.tensor_bytes import tensor_bytes
from samplewise.errors import LedgerError
from samplewise.ledger.files import arrow
from samplewise.step.batch_columns import BatchColumns, Column
from samplewise.step.update import Update

OWN = ("id", "epoch", "update", "loss", "norm", "weight")
WHOLE = (torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.int64)
KEPT = {torch.bool: torch.int8, torch.float64: torch.float64}  # other non-integer columns become float32
Columns = dict[str, Column]


def table_of(updates: Sequence[Update], epochs: Sequence[int | None], norms: bool) -> Any:
    """Pyarrow table of some updates.

    epochs: one per update; None: the epoch recorded in the update
    norms: False records NaN
    """
    rows = [_rows(update) for update in updates]
    pieces = [(piece, epoch) for update, epoch in zip(updates, epochs, strict=True) for piece in update.batch_columns]
    lengths = [len(piece.values["id"]) for piece, _ in pieces]
    of_batches = {name: _joined(name, [p.values.get(name) for p, _ in pieces], lengths) for name in _named(pieces)}
    each = [_numbers(update, n, norms) for update, n in zip(updates, rows, strict=True)]
    names = dict.fromkeys(name for columns in each for name in columns)
    columns: Columns = {
        "id": of_batches.pop("id"),
        "epoch": _repeated([piece.epoch if epoch is None else epoch for piece, epoch in pieces], lengths),
        "update": _indices(updates, rows),
        **{name: _joined(name, [found.get(name) for found in each], rows) for name in names},
    }
    strange = [name for name in of_batches if name in columns or name in OWN]
    if strange:
        raise _taken(strange[0])
    return arrow().table({name: _array(name, values) for name, values in {**columns, **of_batches}.items()})


def _named(pieces: Sequence[tuple[BatchColumns, Any]]) -> list[str]:
    return list(dict.fromkeys(name for piece, _ in pieces for name in piece.values))


def _taken(name: str) -> LedgerError:
    return LedgerError(
        f"a column must not have the name of a standard column ({', '.join(OWN)}); found {name!r}. Rename it."
    )


def _rows(update: Update) -> int:
    """Number of samples of an update, counted by ids. A skipped update may have fewer losses than ids."""
    rows = 0
    for piece in update.batch_columns:
        ids = piece.values["id"]
        if not isinstance(ids, (Tensor, list, tuple)) or getattr(ids, "ndim", 1) != 1:
            found = f"a tensor of shape {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
            raise LedgerError(f"ids must be a tensor (B,) or a list, one per sample; found {found}. {_WHERE}")
        rows += len(ids)
    if rows != update.local_samples and not update.skipped:
        raise LedgerError(
            f"a batch must have one id for each loss; found {rows} ids for {update.local_samples} losses. {_WHERE}"
        )
    return rows


_WHERE = "Pass the key of the ids: Ledger(id=...)."


def _numbers(update: Update, rows: int, norms: bool) -> dict[str, Tensor]:
    """Columns loss, norm and weight of an update, and those of the loss function.

    The weights of a skipped update are 0; values that were not computed are NaN.
    """
    said = update.loss_columns
    unknown = torch.full((rows,), torch.nan) if update.skipped or not norms else torch.empty(0)
    for name in said:
        if name in OWN:
            raise _taken(name)
    if update.skipped and len(update.losses) != rows:  # the batch cannot be sliced, and its losses were not computed
        return {"loss": unknown, "norm": unknown, "weight": torch.zeros(rows)}
    own = {"loss": update.losses, "norm": update.norms if norms else unknown}
    if update.skipped:
        return {**own, "weight": torch.zeros(rows), **said}
    weights = update.weights
    if isinstance(weights, Tensor):
        return {**own, "weight": weights, **said}
    apart = {f"weight/{name}": w for name, w in weights.items()}  # a weight per parameter
    return {**own, "weight": torch.full((rows,), torch.nan), **apart, **said}


def _indices(updates: Sequence[Update], rows: Sequence[int]) -> Tensor:
    """Update index of each row. A group of updates made at once has the same number of samples in each update."""
    firsts = _repeated([update.index for update in updates], rows)
    if all(update.updates == 1 for update in updates):
        return firsts
    return firsts + torch.cat([torch.arange(n) // (n // u.updates) for u, n in zip(updates, rows, strict=True)])


def _repeated(values: Sequence[int], times: Sequence[int]) -> Tensor:
    return torch.cat([torch.full((n,), value) for value, n in zip(values, times, strict=True)])


def _joined(name: str, values: Sequence[Any], rows: Sequence[int]) -> Column:
    """Concatenate the pieces of a column; None stands for `rows` NaN."""
    if all(isinstance(v, (list, tuple)) for v in values):
        return [entry for v in values for entry in v]
    if not all(v is None or isinstance(v, Tensor) for v in values):
        raise LedgerError(
            f"the column {name!r} must be of one kind in all batches; found lists in some batches only. Return a list "
            "in every batch, or a tensor in every batch."
        )
    filled = [torch.full((n,), torch.nan) if v is None else v for v, n in zip(values, rows, strict=True)]
    if len({v.dtype for v in filled}) > 1:
        filled = [_as_double(name, v.cpu()) for v in filled]
    on_device = len({v.device for v in filled}) == 1  # then a single copy to the host is enough
    return filled[0] if len(filled) == 1 else torch.cat(filled if on_device else [v.cpu() for v in filled])


def _as_double(name: str, values: Tensor) -> Tensor:
    double = values.double()
    if values.dtype in WHOLE and not torch.equal(double.to(values.dtype), values):
        raise LedgerError(
            f"the column {name!r} must hold integers in all batches if they are as large as 2**53; found floats, or no "
            "value, in some batches. Return strings, or integers in all batches."
        )
    return double


def _array(name: str, values: Column) -> Any:
    """Pyarrow array of a column."""
    pa = arrow()
    if name in OWN and name != "id":
        dtype = {"epoch": torch.int32, "update": torch.int64}.get(name, torch.float32)
        return _from_memory(torch.as_tensor(values).to(dtype))
    if isinstance(values, Tensor):
        if values.dtype in WHOLE:
            return _from_memory(values.to(torch.int64))
        if name != "id" and not values.is_complex():
            return _from_memory(values.to(KEPT.get(values.dtype, torch.float32)))
    elif all(isinstance(v, str) for v in values):
        return pa.array(list(values), pa.string())
    elif all(isinstance(v, Integral) and not isinstance(v, bool) for v in values):
        return pa.array(_fitting(name, [int(v) for v in values]), pa.int64())
    elif name != "id" and all(isinstance(v, Real) for v in values):
        return pa.array([float(v) for v in values], pa.float64())
    found = values.dtype if isinstance(values, Tensor) else " and ".join(sorted({type(v).__name__ for v in values}))
    wanted = "integers or strings" if name == "id" else "numbers or strings"
    raise LedgerError(f"the column {name!r} must hold {wanted}; found {found}. Convert them in the dataset.")


def _fitting(name: str, values: list[int]) -> list[int]:
    large = [v for v in values if not -(2**63) <= v < 2**63]
    if large:
        raise LedgerError(
            f"the column {name!r} must hold integers from -2**63 to 2**63 - 1; found {large[0]}. Return them as "
            "strings: str(number)."
        )
    return values


def _from_memory(values: Tensor) -> Any:
    """Pyarrow array with a copy of a tensor's memory; avoids a conversion through NumPy or Python numbers."""
    pa = arrow()
    kinds = {torch.int8: pa.int8(), torch.int32: pa.int32(), torch.int64: pa.int64()}
    kinds |= {torch.float32: pa.float32(), torch.float64: pa.float64()}
    data = pa.py_buffer(bytes(tensor_bytes(values)))
    return pa.Array.from_buffers(kinds[values.dtype], len(values), [None, data])
