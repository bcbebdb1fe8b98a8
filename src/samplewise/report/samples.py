"""Samples, suspects and statistics from the ledger of a run. Problems with the ledger become warnings on the page.

The ledger may be larger than memory: it is read part by part, once, by `RepeatedIds`, `NormQuantiles` and the
aggregator of the ledger.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import pairwise
from math import ceil, inf, nan
from typing import Any, NamedTuple

from samplewise.errors import LedgerError
from samplewise.ledger.aggregate import SCORES, SUMMED, VisitAggregator, recommended_score, suspicion
from samplewise.ledger.files import count_visits, list_parts, load_pyarrow, parts
from samplewise.ledger.history import EARLY_EPOCHS, NEEDS
from samplewise.report.html import shortened
from samplewise.report.run_log import Curve, RunLog

NO_LEDGER = "No ledger: train with callbacks=[sw.Ledger()], or with samplewise train --ledger, to see the samples here."
PRIVATE = "Private run: {plan}. Values of single samples are not recorded."
MAX_SUSPECTS = 200
MAX_NAMED = 10  # ids in the warning about samples without finite score
SAMPLES_PER_SUSPECT = 10  # at most one in this number of samples is suspect,
MIN_SUSPECTS = 12  # but at least this number
INTERVALS = 100  # of the run, for the quantiles of norms
QUANTILES = (0.5, 0.05, 0.25, 0.75, 0.95, 1.0)

TITLES = {"norm": "gradient norm", "el2n": "EL2N", "self_influence": "self-influence"}
TITLES["forgetting_events"] = "forgetting events"
HISTORY = ("confidence", "variability", "correctness", "forgetting_events")  # shown of the training dynamics


class Ranking(NamedTuple):
    """Ranking of samples by some scores: `order` holds the rows of the suspects, the most suspicious first."""

    title: str
    by: tuple[str, ...]
    order: list[int]


@dataclass
class Samples:
    """Samples of a run; empty without a readable ledger."""

    table: Any = None  # pyarrow table with one row per sample
    norms: list[Curve] = field(default_factory=list)  # quantiles of gradient norms
    rankings: list[Ranking] = field(default_factory=list)  # the recommended one first
    warnings: list[str] = field(default_factory=list)
    missing: str = ""  # the reason why there are no samples

    @property
    def count(self) -> int | None:
        return None if self.table is None else len(self.table)

    @property
    def suspects(self) -> list[str]:
        """Ids of the suspects by the recommended score, the most suspicious first."""
        ids = self.table["id"].take(self.rankings[0].order).to_pylist() if self.rankings else []
        return [str(sample_id) for sample_id in ids]


def read_samples(run: RunLog) -> Samples:
    """Read the ledger of a run; errors become warnings."""
    messages: list[str] = []
    aggregator = VisitAggregator(EARLY_EPOCHS)
    repeats = RepeatedIds()
    quantiles = NormQuantiles(count_visits(run.directory))
    try:
        if not list_parts(run.directory):
            plan = (run.metadata.get("settings") or {}).get("privacy")
            return Samples(missing=PRIVATE.format(plan=plan) if plan else NO_LEDGER)
        with warnings.catch_warnings(record=True) as skipped_parts:
            warnings.simplefilter("always")
            try:
                for part in parts(run.directory, damaged="skip"):
                    aggregator.add(part)
                    repeats.add(part)
                    quantiles.add(part)
            finally:
                messages += [f"Ledger: {warning.message}" for warning in skipped_parts]
        table = aggregator.samples()
        table = table.drop_columns([name for name in table.column_names if not _is_shown(name)])
    except (ImportError, LedgerError, OSError, ValueError, TypeError, KeyError, NotImplementedError) as why:
        return Samples(
            warnings=[*messages, f"The samples cannot be shown: {why}"], missing="The ledger cannot be read."
        )
    quantiles.end()
    if not len(table):
        return Samples(
            norms=quantiles.curves, warnings=messages, missing="The ledger has no sample with a finite loss or norm."
        )
    messages += repeats.warnings()
    unknown = aggregator.unknown
    if len(unknown):  # they are in no ranking
        end = ", …" if len(unknown) > MAX_NAMED else "."
        names = ", ".join(shortened(str(sample_id), 40) for sample_id in unknown.slice(0, MAX_NAMED).to_pylist())
        count = f"{len(unknown):,} of {len(table) + len(unknown):,} samples"
        messages.append(f"{count} never had a finite loss or norm and are not shown: {names}{end}")
    return Samples(table, quantiles.curves, rankings(table), messages)


def _is_shown(name: str) -> bool:
    """False for training dynamics that `sw.dynamics` has and the page has not."""
    return name in (*HISTORY, *SCORES) or not (name in (*NEEDS, "suspicion") or name.startswith("probability/"))


def rankings(table: Any) -> list[Ranking]:
    """Rankings by each score of the table, the recommended one first."""
    available = [name for name in SCORES if name in table.column_names]
    recommended = recommended_score(available)
    result = []
    for by in dict.fromkeys([recommended, *((name,) for name in available)]):
        title = " and ".join(score_title(table, name) for name in by)
        suspicions = suspicion(table, by)
        ranked_rows = [row for row, value in enumerate(suspicions) if value > -inf]
        count = min(MAX_SUSPECTS, max(MIN_SUSPECTS, len(suspicions) // SAMPLES_PER_SUSPECT), len(ranked_rows))
        order = nlargest(count, ranked_rows, key=suspicions.__getitem__)
        result.append(Ranking(f"{title} (recommended)" if by == recommended else title, by, order))
    return result


def score_title(table: Any, score: str) -> str:
    """Title of a score, with its unit if losses and norms are divided by counts."""
    title = TITLES.get(score, score)
    return f"{title} per count" if score in SUMMED and "count" in table.column_names else title


# --- statistics of the ledger -----------------------------------------------------------------------------------------


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
            f"{example['epoch'] + 1}. Unless samples are drawn with replacement, several samples share an id and are "
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
            # At most one interval per update; the first part gives the updates per row.
            updates = load_pyarrow().compute.count_distinct(table["update"]).as_py()
            intervals = min(INTERVALS, ceil(updates * self._visits / len(table)))
            edges = [k * self._visits // intervals for k in range(intervals + 1)]
            self._sizes = [end - start for start, end in pairwise(edges)]
            self.curves = [Curve(f"{q:.0%}", []) for q in QUANTILES]
        self._tables.append(table.select(["update", "norm"]))
        self._pending += len(table)
        while self._sizes and self._pending >= self._sizes[0]:
            self._add_quantiles(self._sizes.pop(0))

    def end(self) -> None:
        """Add the last interval, which is incomplete if some rows could not be read."""
        if self._pending:
            self._add_quantiles(self._pending)

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
