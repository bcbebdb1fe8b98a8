"""Samples and suspects from the ledger of a run. Problems with the ledger become warnings on the page."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from math import inf
from typing import Any, NamedTuple

from samplewise.errors import LedgerError
from samplewise.ledger.aggregate import SCORES, VisitAggregator, recommended_score, suspicion
from samplewise.ledger.files import count_visits, list_parts, parts
from samplewise.report.html import shortened
from samplewise.report.reading import Repeats, Spread
from samplewise.report.run import Curve, RunLog

MOST_SUSPECTS = 200
MOST_NAMED = 10  # ids in the warning about samples without finite score
SHARE = 10  # at most one in SHARE samples is suspect,
FEWEST_SUSPECTS = 12  # but at least this number

TITLES = {"loss": "loss", "norm": "gradient norm", "el2n": "EL2N", "self_influence": "self-influence"}


class Score(NamedTuple):
    """Ranking of samples by some scores: `order` holds the rows of the suspects, the most suspicious first."""

    title: str
    by: tuple[str, ...]
    order: list[int]


@dataclass
class Samples:
    """Samples of a run; empty without a readable ledger."""

    each: Any = None  # pyarrow table with one row per sample
    norms: list[Curve] = field(default_factory=list)  # quantiles of gradient norms
    scores: list[Score] = field(default_factory=list)  # the recommended one first
    warnings: list[str] = field(default_factory=list)
    missing: str = ""  # the reason why there are no samples

    @property
    def count(self) -> int | None:
        return None if self.each is None else len(self.each)

    @property
    def suspects(self) -> list[str]:
        """Ids of the suspects by the recommended score, the most suspicious first."""
        ids = self.each["id"].take(self.scores[0].order).to_pylist() if self.scores else []
        return [str(one) for one in ids]


def read_samples(run: RunLog) -> Samples:
    """Read the ledger of a run; errors become warnings."""
    said: list[str] = []
    seen = VisitAggregator()
    repeats = Repeats()
    spread = Spread(count_visits(run.directory))
    try:
        if not list_parts(run.directory):
            return Samples(missing="No ledger: train with callbacks=[sw.Ledger()] to see the samples here.")
        _read(run, said, (seen, repeats, spread))
        each = seen.samples()
    except (ImportError, LedgerError, OSError, ValueError, TypeError, KeyError, NotImplementedError) as why:
        return Samples(warnings=[*said, f"The samples cannot be shown: {why}"], missing="The ledger cannot be read.")
    spread.end()
    if not len(each):
        return Samples(
            norms=spread.curves, warnings=said, missing="The ledger has no sample with a finite loss or norm."
        )
    said = said + repeats.warnings() + _never_finite(len(each), seen.unknown)
    return Samples(each, spread.curves, scores(each), said)


def _never_finite(known: int, unknown: Any) -> list[str]:
    """Warning about samples without a finite score, which are in no ranking."""
    if not len(unknown):
        return []
    more = ", …" if len(unknown) > MOST_NAMED else "."
    named = ", ".join(shortened(str(one), 40) for one in unknown.slice(0, MOST_NAMED).to_pylist())
    count = f"{len(unknown):,} of {known + len(unknown):,} samples"
    return [f"{count} never had a finite loss or norm and are not shown: {named}{more}"]


def _read(run: RunLog, said: list[str], readers: Sequence[VisitAggregator | Repeats | Spread]) -> None:
    """Pass each readable part of the ledger to the readers; add a warning for each part that cannot be read."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for table in parts(run.directory, damaged="skip"):
                for reader in readers:
                    reader.add(table)
        finally:
            said += [f"Ledger: {warning.message}" for warning in caught]


def scores(each: Any) -> list[Score]:
    """Rankings by each score of the table, the recommended one first."""
    there = [name for name in SCORES if name in each.column_names]
    best = recommended_score(there)
    ways = dict.fromkeys([best, *((name,) for name in there)])
    return [Score(_title(by, by == best), by, _most_suspect(suspicion(each, by))) for by in ways]


def _title(by: tuple[str, ...], best: bool) -> str:
    title = " and ".join(TITLES.get(name, name) for name in by)
    return f"{title} (recommended)" if best else title


def _most_suspect(suspicions: list[float]) -> list[int]:
    known = [row for row, value in enumerate(suspicions) if value > -inf]
    count = min(MOST_SUSPECTS, max(FEWEST_SUSPECTS, len(suspicions) // SHARE), len(known))
    return nlargest(count, known, key=suspicions.__getitem__)
