"""What the ledger of a run tells of its samples, and who is suspect. Trouble with it becomes a line on the page."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from math import inf
from typing import Any, NamedTuple

from samplewise.errors import LedgerError
from samplewise.ledger.files import numbered, parts, visits_in
from samplewise.ledger.visits import SCORES, Visits, recommended, suspicion
from samplewise.report.html import shortened
from samplewise.report.reading import Repeats, Spread
from samplewise.report.run import Curve, Run

MOST_SUSPECTS = 200
MOST_NAMED = 10  # of those that are left out
SHARE = 10  # at most one sample in so many is suspect,
FEWEST_SUSPECTS = 12  # unless there are hardly any

TITLES = {"loss": "loss", "norm": "gradient norm", "el2n": "EL2N", "self_influence": "self-influence"}


class Score(NamedTuple):
    """A way to rank samples, and the rows that it finds most suspect, the worst first."""

    title: str
    by: tuple[str, ...]
    order: list[int]


@dataclass
class Samples:
    """`each`: one row per sample. `norms`: curves of their quantiles. Neither without a ledger that can be read."""

    each: Any = None
    norms: list[Curve] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)  # the recommended one first
    warnings: list[str] = field(default_factory=list)
    missing: str = ""  # why there is nothing

    @property
    def count(self) -> int | None:
        return None if self.each is None else len(self.each)

    @property
    def suspects(self) -> list[str]:
        """Ids by the recommended score, the worst first."""
        ids = self.each["id"].take(self.scores[0].order).to_pylist() if self.scores else []
        return [str(one) for one in ids]


def read_samples(run: Run) -> Samples:
    said: list[str] = []
    seen, repeats, spread = Visits(), Repeats(), Spread(visits_in(run.directory))
    try:
        if not numbered(run.directory):
            return Samples(missing="No ledger: train with callbacks=[sw.Ledger()] to see the samples here.")
        _read(run, said, (seen, repeats, spread))
        each = seen.samples()
    except (ImportError, LedgerError, OSError, ValueError, TypeError, KeyError, NotImplementedError) as why:
        return Samples(warnings=[*said, f"The samples cannot be shown: {why}"], missing="The ledger cannot be read.")
    spread.end()
    if not len(each):
        return Samples(
            norms=spread.curves, warnings=said, missing="The ledger holds no sample with a finite loss or norm."
        )
    return Samples(
        each, spread.curves, scores(each), said + repeats.warnings() + _never_finite(len(each), seen.unknown)
    )


def _never_finite(known: int, unknown: Any) -> list[str]:
    """They are in no ranking, and yet something is wrong with them."""
    if not len(unknown):
        return []
    more = ", …" if len(unknown) > MOST_NAMED else "."
    named = ", ".join(shortened(str(one), 40) for one in unknown.slice(0, MOST_NAMED).to_pylist())
    count = f"{len(unknown):,} of {known + len(unknown):,} samples"
    return [f"{count} never had a finite loss or norm, and are not shown: {named}{more}"]


def _read(run: Run, said: list[str], readers: Sequence[Visits | Repeats | Spread]) -> None:
    """As far as the ledger can be read, with one line for each part that cannot."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for table in parts(run.directory, damaged="skip"):
                for reader in readers:
                    reader.add(table)
        finally:
            said += [f"Ledger: {warning.message}" for warning in caught]


def scores(each: Any) -> list[Score]:
    """All that there are, the recommended one or combination first."""
    there = [name for name in SCORES if name in each.column_names]
    best = recommended(there)
    ways = dict.fromkeys([best, *((name,) for name in there)])
    return [Score(_title(by, by == best), by, _most_suspect(suspicion(each, by))) for by in ways]


def _title(by: tuple[str, ...], best: bool) -> str:
    title = " and ".join(TITLES.get(name, name) for name in by)
    return f"{title} (recommended)" if best else title


def _most_suspect(suspicions: list[float]) -> list[int]:
    known = [row for row, value in enumerate(suspicions) if value > -inf]
    count = min(MOST_SUSPECTS, max(FEWEST_SUSPECTS, len(suspicions) // SHARE), len(known))
    return nlargest(count, known, key=suspicions.__getitem__)
