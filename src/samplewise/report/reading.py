"""Incremental statistics of a ledger, computed part by part because the ledger may be larger than memory."""

from __future__ import annotations

from itertools import pairwise
from math import ceil, nan
from typing import Any

from samplewise.ledger.files import load_pyarrow
from samplewise.report.run import Curve

STRETCHES = 100  # intervals of the run
QUANTILES = (0.5, 0.05, 0.25, 0.75, 0.95, 1.0)


class Repeats:
    """Detection of ids that occur more than once in an epoch: sampling with replacement, or ids that are not unique.

    The ids of an epoch are kept in memory until the second epoch after it begins.
    """

    def __init__(self) -> None:
        self._open: dict[int, list[Any]] = {}  # ids by epoch
        self._rows = 0
        self._extra = 0  # rows whose id occurred before in the epoch
        self._worst: dict[str, Any] = {"counts": 1}

    def add(self, table: Any) -> None:
        pc = load_pyarrow().compute
        if "epoch" not in table.column_names:
            return
        self._rows += len(table)
        epochs = pc.unique(table["epoch"]).to_pylist()
        for epoch in epochs:
            rows = table if len(epochs) == 1 else table.filter(pc.equal(table["epoch"], epoch))
            self._open.setdefault(epoch, []).extend(rows["id"].chunks)
        for epoch in [epoch for epoch in self._open if epoch < max(self._open) - 1]:
            self._close(epoch)

    def warnings(self) -> list[str]:
        for epoch in sorted(self._open):
            self._close(epoch)
        if not self._extra:
            return []
        one = self._worst
        return [
            f"Ids repeat within an epoch: {self._extra:,} of {self._rows:,} rows have an id that occurred before in "
            f"the epoch. For example, {one['values']!r} occurs {one['counts']:,} times in epoch {one['epoch']}. Unless "
            "samples are drawn with replacement, several samples share an id and are treated as one: "
            "sw.Indexed(dataset) gives each sample a unique id."
        ]

    def _close(self, epoch: int) -> None:
        """Count the repeated ids of a complete epoch."""
        pa, pc = load_pyarrow(), load_pyarrow().compute
        ids = pa.chunked_array(self._open.pop(epoch))
        if (known := pc.count_distinct(ids).as_py()) == len(ids):
            return
        self._extra += len(ids) - known
        counts = pa.Table.from_struct_array(pc.value_counts(ids))
        most = counts.sort_by([("counts", "descending"), ("values", "ascending")]).slice(0, 1).to_pylist()[0]
        if most["counts"] > self._worst["counts"]:
            self._worst = {**most, "epoch": epoch}


class Spread:
    """Quantiles of gradient norms as curves over training. Keeps the rows of one interval in memory.

    visits: number of rows of the ledger
    """

    def __init__(self, visits: int) -> None:
        self.curves: list[Curve] = []  # empty until the first norm
        self._visits = visits
        self._waiting = 0  # rows in `_tables`
        self._tables: list[Any] = []
        self._sizes: list[int] = []  # rows of the remaining intervals

    def add(self, table: Any) -> None:
        if not len(table) or not {"update", "norm"} <= set(table.column_names):
            return
        if not self.curves:
            self._begin(table)
        self._tables.append(table.select(["update", "norm"]))
        self._waiting += len(table)
        while self._sizes and self._waiting >= self._sizes[0]:
            self._tell(self._sizes.pop(0))

    def end(self) -> None:
        """Add the last interval, which is incomplete if some rows could not be read."""
        if self._waiting:
            self._tell(self._waiting)

    def _begin(self, first: Any) -> None:
        """Divide the rows into intervals, at most one per update; the first part gives the updates per row."""
        updates = ceil(load_pyarrow().compute.count_distinct(first["update"]).as_py() * self._visits / len(first))
        stretches = min(STRETCHES, updates)
        edges = [k * self._visits // stretches for k in range(stretches + 1)]
        self._sizes = [end - start for start, end in pairwise(edges)]
        self.curves = [Curve(f"{q:.0%}", []) for q in QUANTILES]

    def _tell(self, size: int) -> None:
        """Add the quantiles of the first `size` rows to the curves, and drop these rows."""
        pa, pc = load_pyarrow(), load_pyarrow().compute
        rows = pa.concat_tables(self._tables, promote_options="permissive")
        part = rows.slice(0, size)
        rest = rows.slice(size)
        self._tables = [rest]
        self._waiting = len(rest)
        values = pc.filter(part["norm"], pc.is_finite(part["norm"]))
        found = pc.quantile(values, list(QUANTILES)).to_pylist()
        place = float(pc.mean(part["update"]).as_py())
        for curve, value in zip(self.curves, found, strict=True):
            curve.points.append((place, nan if value is None else value))
