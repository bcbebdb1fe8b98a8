"""What the report finds out of a ledger part by part, because all of it may be more than fits into memory."""

from __future__ import annotations

from itertools import pairwise
from math import ceil, nan
from typing import Any

from samplewise.ledger.files import arrow
from samplewise.report.run import Curve

STRETCHES = 100
QUANTILES = (0.5, 0.05, 0.25, 0.75, 0.95, 1.0)


class Repeats:
    """Whether ids stand more than once in an epoch: drawn with replacement, or several samples with one id.

    The ids of an epoch are kept until the one after the next begins.
    """

    def __init__(self) -> None:
        self._open: dict[int, list[Any]] = {}  # ids by epoch
        self._rows = self._extra = 0
        self._worst: dict[str, Any] = {"counts": 1}

    def add(self, table: Any) -> None:
        pc = arrow().compute
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
            f"Ids repeat within an epoch: {self._extra:,} of {self._rows:,} rows have an id that the epoch had before. "
            f"{one['values']!r}, for example, stands {one['counts']:,} times in epoch {one['epoch']}. Unless samples "
            "are drawn with replacement, several share an id, and are one here: sw.Indexed(dataset) gives each its own."
        ]

    def _close(self, epoch: int) -> None:
        pa, pc = arrow(), arrow().compute
        ids = pa.chunked_array(self._open.pop(epoch))
        if (known := pc.count_distinct(ids).as_py()) == len(ids):
            return
        self._extra += len(ids) - known
        counts = pa.Table.from_struct_array(pc.value_counts(ids))
        most = counts.sort_by([("counts", "descending"), ("values", "ascending")]).slice(0, 1).to_pylist()[0]
        if most["counts"] > self._worst["counts"]:
            self._worst = {**most, "epoch": epoch}


class Spread:
    """Quantiles of the norms as curves, over stretches of `visits` in the order of training. Kept is one stretch."""

    def __init__(self, visits: int) -> None:
        self.curves: list[Curve] = []  # none before there is a norm
        self._visits, self._waiting = visits, 0
        self._tables: list[Any] = []
        self._sizes: list[int] = []  # of the stretches to come

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
        """What is left, if some visits could not be read."""
        if self._waiting:
            self._tell(self._waiting)

    def _begin(self, first: Any) -> None:
        """No more stretches than updates, as far as the first part tells how many there are."""
        updates = ceil(arrow().compute.count_distinct(first["update"]).as_py() * self._visits / len(first))
        stretches = min(STRETCHES, updates)
        edges = [k * self._visits // stretches for k in range(stretches + 1)]
        self._sizes = [end - start for start, end in pairwise(edges)]
        self.curves = [Curve(f"{q:.0%}", []) for q in QUANTILES]

    def _tell(self, size: int) -> None:
        pa, pc = arrow(), arrow().compute
        rows = pa.concat_tables(self._tables, promote_options="permissive")
        part, rest = rows.slice(0, size), rows.slice(size)
        self._tables, self._waiting = [rest], len(rest)
        values = pc.filter(part["norm"], pc.is_finite(part["norm"]))
        found = pc.quantile(values, list(QUANTILES)).to_pylist()
        place = float(pc.mean(part["update"]).as_py())
        for curve, value in zip(self.curves, found, strict=True):
            curve.points.append((place, nan if value is None else value))
