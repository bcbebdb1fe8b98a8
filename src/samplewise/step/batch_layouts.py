"""Structures of the batches of a step: which of them may be sliced into microbatches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samplewise.core.batches import Path, length, name_of, row_counts
from samplewise.errors import BatchError


class BatchLayouts:
    """Structures of the batches of a step, as strings. A batch whose tensors have different numbers of rows is not
    sliced; then no batch of the same structure is, also if all numbers are equal by chance, as those of a (T, T) mask
    and of T samples.
    """

    def __init__(self) -> None:
        self.sliced: set[str] = set()
        self.whole: set[str] = set()
        self._recorded: set[tuple[Any, ...]] = set()  # types and keys of the batches in `sliced`

    def length(self, batch: Any) -> int | None:
        """Number of samples of a batch that may be sliced; None if it may not. Raises BatchError if batches of its
        structure were sliced before and must not be.
        """
        total = length(batch)
        if total is None:
            counts = row_counts(batch)
            if len(set(counts.values())) > 1:
                self._refuse(counts)
        elif self.whole and _structure(row_counts(batch)) in self.whole:
            return None
        return total

    def record_slice(self, batch: Any) -> None:
        """Record that a batch of this structure is sliced."""
        keys = (
            type(batch),
            tuple(batch) if isinstance(batch, Mapping) else len(batch) if isinstance(batch, (tuple, list)) else 0,
        )
        if keys not in self._recorded:  # traversing every batch would cost microseconds
            self._recorded.add(keys)
            self.sliced.add(_structure(row_counts(batch)))

    def _refuse(self, counts: dict[Path, int]) -> None:
        """Record a structure that must not be sliced; raise BatchError if it was."""
        structure = _structure(counts)
        self.whole.add(structure)
        if structure in self.sliced:
            found = ", ".join(f"{rows} in {name_of(path)}" for path, rows in counts.items())
            raise BatchError(
                "all tensors of a batch must have one row per sample if batches are sliced, except for those that the "
                f"loss function declares as constants; found rows: {found}. In earlier batches these numbers were "
                "equal, so that all tensors were sliced, and their updates may be wrong. Decorate the loss function "
                'with @sw.batch_constants("mask"), with the keys of the entries that are not per sample.'
            )

    def state_dict(self) -> dict[str, list[str]]:
        return {"sliced": sorted(self.sliced), "whole": sorted(self.whole)}

    def load_state_dict(self, state: dict[str, list[str]]) -> None:
        self.sliced = set(state["sliced"])
        self.whole = set(state["whole"])
        self._recorded = set()


def _structure(counts: dict[Path, int]) -> str:
    return repr(list(counts))
