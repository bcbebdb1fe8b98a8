"""Comparison of two audits, update by update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from samplewise.core.text import Table, Tabular, plural

ROUNDING = 1e-6  # relative difference of weights that are shown as equal
TOLERANCE = 1e-4  # relative distance of equal weights and norms


@dataclass(frozen=True, repr=False)
class Comparison(Tabular):
    """Result of `audit.compare`. differences: sentences, the first one about the first update that differs."""

    updates: int
    rows: list[tuple[str, ...]]
    differences: list[str]

    @property
    def ok(self) -> bool:
        return not self.differences and self.updates > 0

    @property
    def verdict(self) -> str:
        if not self.updates:
            return "no update in common"
        return f"{plural(len(self.differences), 'difference')} found" if self.differences else "equal"

    def _table(self) -> Table:
        head = ("update", "samples", "sum of weights", "largest difference of a weight", "norm", "")
        return Table(
            head, self.rows, f"comparison of {plural(self.updates, 'update')}: {self.verdict}", self.differences
        )


Summary = Sequence[Mapping[str, Any]]  # of updates, as `Audit.to_dict` returns it


def compare(first: Summary, second: Summary) -> Comparison:
    """Compare updates in their order. The order of samples within an update has no influence on it, and is not
    compared.
    """
    pairs = list(zip(first, second, strict=False))
    kinds: Counter[str] = Counter()
    first_of: dict[str, str] = {}  # sentence about the first update that differs in this way
    rows = []
    for a, b in pairs:
        cells, differences_of_update = _compare_updates(a, b)
        rows.append(cells)
        for kind, sentence in differences_of_update:
            kinds[kind] += 1
            first_of.setdefault(kind, sentence)
    differences = [f"{sentence} ({plural(kinds[kind], 'update')} of this kind)" for kind, sentence in first_of.items()]
    if len(first) != len(second):
        differences.append(
            f"the number of updates differs: {len(first)} and {len(second)}. Look at the last "
            "window of each epoch, and at what is repeated after a resume."
        )
    return Comparison(len(pairs), [row for row in rows if row[-1]] or rows[:3], differences)


def _compare_updates(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, str]]]:
    """Cells of the table, and (kind, sentence) of each difference."""
    differences: list[tuple[str, str]] = []
    number = a["update"]
    samples = Counter(a["ids"]), Counter(b["ids"])
    if samples[0] != samples[1]:
        missing = sum((samples[0] - samples[1]).values())
        more = sum((samples[1] - samples[0]).values())
        differences.append(
            (
                "samples",
                f"update {number} has other samples in the second run: {missing} of the first are missing there, and "
                f"{more} are new. After a resume, samples were repeated, left out or put in another order.",
            )
        )
    largest = _weight_difference(a, b)
    if largest is not None and largest > TOLERANCE:
        differences.append(
            ("weights", f"in update {number}, a sample's weight differs by {largest:.3g} of the largest weight.")
        )
    if a["rates"] != b["rates"]:
        differences.append(("learning rate", f"update {number} has learning rates {a['rates']} and {b['rates']}."))
    norms = a["norm"], b["norm"]
    if None not in norms and abs(norms[0] - norms[1]) > TOLERANCE * max(map(abs, norms)):
        differences.append(("norm", f"the gradient of update {number} has norm {norms[0]:.6g} and {norms[1]:.6g}."))
    sums = [f"{total['sum']:.6g}" if total["sum"] is not None else "?" for total in (a, b)]
    cells = (
        str(number),
        _both(str(len(a["ids"])), str(len(b["ids"]))),
        _both(*sums),
        "?" if largest is None else "0" if largest < ROUNDING else f"{largest:.2g}",
        _both(*("?" if norm is None else f"{norm:.5g}" for norm in norms)),
        ", ".join(kind for kind, _ in differences),
    )
    return cells, differences


def _weight_difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> float | None:
    """Largest difference between the weights of a sample, relative to the largest weight; None if they are not known,
    or belong to other samples.
    """
    by_sample = []
    for total in (a, b):
        if not total["weights"] or len(total["weights"]) != len(total["ids"]):
            return None
        weights: Counter[int] = Counter()
        for sample, weight in zip(total["ids"], total["weights"], strict=True):
            weights[sample] += weight
        by_sample.append(weights)
    if by_sample[0].keys() != by_sample[1].keys():
        return None
    largest = max(abs(w) for weights in by_sample for w in weights.values())
    return max(abs(by_sample[0][s] - by_sample[1][s]) for s in by_sample[0]) / max(largest, 1e-300)


def _both(first: str, second: str) -> str:
    return first if first == second else f"{first} / {second}"
