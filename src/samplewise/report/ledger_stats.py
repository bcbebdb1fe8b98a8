"""Incremental statistics of a ledger, computed part by part because the ledger may be larger than memory."""

from __future__ import annotations

from itertools import pairwise
from math import ceil, nan
from typing import Any

from samplewise.ledger.files import load_pyarrow
from samplewise.report.run_log import Curve

INTERVALS = 100  # intervals of the run
QUANTILES = (0.5, 0.05, 0.25, 0.75, 0.95, 1.0)


class RepeatedIds:
    """Detection of ids that occur more than once in an epoch: sampling with replacement, or ids that are not unique.

    The ids of an epoch are kept in memory until the second epoch after it begins.
    """

    def __init__(self) -> None:
        self._ids_of_epoch: dict[int, list[Any]] = {}  # ids by epoch
        self._rows = 0
        self._repeated_rows = 0  # rows whose id occurred before in the epoch
        self._most_repeated: dict[str, Any] = {"counts": 1}

    def add(self, table: Any) -> None:
        pc = load_pyarrow().compute
        if "epoch" not in table.column_names:
            return
        self._rows += len(table)
        epochs = pc.unique(table["epoch"]).to_pylist()
        for epoch in epochs:
            rows = table if len(epochs) == 1 else table.filter(pc.equal(table["epoch"], epoch))
            self._ids_of_epoch.setdefault(epoch, []).extend(rows["id"].chunks)
        for epoch in [epoch for epoch in self._ids_of_epoch if epoch < max(self._ids_of_epoch) - 1]:
            self._count_repeats(epoch)

    def warnings(self) -> list[str]:
        for epoch in sorted(self._ids_of_epoch):
            self._count_repeats(epoch)
        if not self._repeated_rows:
            return []
        example = self._most_repeated
        return [
            f"Ids repeat within an epoch: {self._repeated_rows:,} of {self._rows:,} rows have an id that occurred "
            f"before in the epoch. For example, {example['values']!r} occurs {example['counts']:,} times in epoch "
            f"{example['epoch']}. Unless samples are drawn with replacement, several samples share an id and are "
            "treated as one: sw.Indexed(dataset) gives each sample a unique id."
        ]

    def _count_repeats(self, epoch: int) -> None:
        """Count the repeated ids of a complete epoch."""
        pa, pc = load_pyarrow(), load_pyarrow().compute
        ids = pa.chunked_array(self._ids_of_epoch.pop(epoch))
        distinct = pc.count_distinct(ids).as_py()
        if distinct == len(ids):
            return
        self._repeated_rows += len(ids) - distinct
        counts = pa.Table.from_struct_array(pc.value_counts(ids))
        most = counts.sort_by([("counts", "descending"), ("values", "ascending")]).slice(0, 1).to_pylist()[0]
        if most["counts"] > self._most_repeated["counts"]:
            self._most_repeated = {**most, "epoch": epoch}


class NormQuantiles:
    """Quantiles of gradient norms as curves over training. Keeps the rows of one interval in memory.

    visits: number of rows of the ledger
    """

    def __init__(self, visits: int) -> None:
        self.curves: list[Curve] = []  # empty until the first norm
        self._visits = visits
        self._pending = 0  # rows in `_tables`
        self._tables: list[Any] = []
        self._sizes: list[int] = []  # rows of the remaining intervals

    def add(self, table: Any) -> None:
        if not len(table) or not {"update", "norm"} <= set(table.column_names):
            return
        if not self.curves:
            self._set_intervals(table)
        self._tables.append(table.select(["update", "norm"]))
        self._pending += len(table)
        while self._sizes and self._pending >= self._sizes[0]:
            self._add_quantiles(self._sizes.pop(0))

    def end(self) -> None:
        """Add the last interval, which is incomplete if some rows could not be read."""
        if self._pending:
            self._add_quantiles(self._pending)

    def _set_intervals(self, first: Any) -> None:
        """Divide the rows into intervals, at most one per update; the first part gives the updates per row."""
        updates = ceil(load_pyarrow().compute.count_distinct(first["update"]).as_py() * self._visits / len(first))
        intervals = min(INTERVALS, updates)
        edges = [k * self._visits // intervals for k in range(intervals + 1)]
        self._sizes = [end - start for start, end in pairwise(edges)]
        self.curves = [Curve(f"{q:.0%}", []) for q in QUANTILES]

    def _add_quantiles(self, size: int) -> None:
        """Add the quantiles of the first `size` rows to the curves, and drop these rows."""
        pa, pc = load_pyarrow(), load_pyarrow().compute
        rows = pa.concat_tables(self._tables, promote_options="permissive")
        part = rows.slice(0, size)
        rest = rows.slice(size)
        self._tables = [rest]
        self._pending = len(rest)
        values = pc.filter(part["norm"], pc.is_finite(part["norm"]))
        quantiles = pc.quantile(values, list(QUANTILES)).to_pylist()
        position = float(pc.mean(part["update"]).as_py())
        for curve, value in zip(self.curves, quantiles, strict=True):
            curve.points.append((position, nan if value is None else value))
