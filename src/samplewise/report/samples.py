"""Samples and suspects from the ledger of a run. Problems with the ledger become warnings on the page."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from math import inf
from typing import Any, NamedTuple

from samplewise.errors import LedgerError
from samplewise.ledger.aggregate import SCORES, SUMMED, VisitAggregator, recommended_score, suspicion
from samplewise.ledger.files import count_visits, list_parts, parts
from samplewise.report.html import shortened
from samplewise.report.ledger_stats import NormQuantiles, RepeatedIds
from samplewise.report.run_log import Curve, RunLog

NO_LEDGER = "No ledger: train with callbacks=[sw.Ledger()], or with samplewise train --ledger, to see the samples here."
PRIVATE = "Private run: {plan}. Values of single samples are not recorded."
MAX_SUSPECTS = 200
MAX_NAMED = 10  # ids in the warning about samples without finite score
SAMPLES_PER_SUSPECT = 10  # at most one in SHARE samples is suspect,
MIN_SUSPECTS = 12  # but at least this number

TITLES = {"norm": "gradient norm", "el2n": "EL2N", "self_influence": "self-influence"}


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
    aggregator = VisitAggregator()
    repeats = RepeatedIds()
    quantiles = NormQuantiles(count_visits(run.directory))
    try:
        if not list_parts(run.directory):
            plan = (run.metadata.get("settings") or {}).get("privacy")
            return Samples(missing=PRIVATE.format(plan=plan) if plan else NO_LEDGER)
        _read_parts(run, messages, (aggregator, repeats, quantiles))
        table = aggregator.samples()
    except (ImportError, LedgerError, OSError, ValueError, TypeError, KeyError, NotImplementedError) as why:
        return Samples(
            warnings=[*messages, f"The samples cannot be shown: {why}"], missing="The ledger cannot be read."
        )
    quantiles.end()
    if not len(table):
        return Samples(
            norms=quantiles.curves, warnings=messages, missing="The ledger has no sample with a finite loss or norm."
        )
    messages = messages + repeats.warnings() + _unknown_samples_warning(len(table), aggregator.unknown)
    return Samples(table, quantiles.curves, rankings(table), messages)


def _unknown_samples_warning(ranked: int, unknown: Any) -> list[str]:
    """Warning about samples without a finite score, which are in no ranking."""
    if not len(unknown):
        return []
    end = ", …" if len(unknown) > MAX_NAMED else "."
    named = ", ".join(shortened(str(sample_id), 40) for sample_id in unknown.slice(0, MAX_NAMED).to_pylist())
    count = f"{len(unknown):,} of {ranked + len(unknown):,} samples"
    return [f"{count} never had a finite loss or norm and are not shown: {named}{end}"]


def _read_parts(
    run: RunLog, messages: list[str], readers: Sequence[VisitAggregator | RepeatedIds | NormQuantiles]
) -> None:
    """Pass each readable part of the ledger to the readers; add a warning for each part that cannot be read."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for table in parts(run.directory, damaged="skip"):
                for reader in readers:
                    reader.add(table)
        finally:
            messages += [f"Ledger: {warning.message}" for warning in caught]


def rankings(table: Any) -> list[Ranking]:
    """Rankings by each score of the table, the recommended one first."""
    available = [name for name in SCORES if name in table.column_names]
    recommended = recommended_score(available)
    criteria = dict.fromkeys([recommended, *((name,) for name in available)])
    return [
        Ranking(_ranking_title(table, by, by == recommended), by, _most_suspicious(suspicion(table, by)))
        for by in criteria
    ]


def score_title(table: Any, score: str) -> str:
    """Title of a score, with its unit if losses and norms are divided by counts."""
    title = TITLES.get(score, score)
    return f"{title} per count" if score in SUMMED and "count" in table.column_names else title


def _ranking_title(table: Any, by: tuple[str, ...], best: bool) -> str:
    title = " and ".join(score_title(table, name) for name in by)
    return f"{title} (recommended)" if best else title


def _most_suspicious(suspicions: list[float]) -> list[int]:
    known = [row for row, value in enumerate(suspicions) if value > -inf]
    count = min(MAX_SUSPECTS, max(MIN_SUSPECTS, len(suspicions) // SAMPLES_PER_SUSPECT), len(known))
    return nlargest(count, known, key=suspicions.__getitem__)
