"""`sw.audit`: audit of a training loop, and its results."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from math import inf, isnan, nan
from os import PathLike
from textwrap import fill
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import nn

from samplewise.audit.comparison import Comparison, compare
from samplewise.audit.findings import Evidence, Finding, notes_of
from samplewise.audit.observer import Observer
from samplewise.audit.reader import Losses
from samplewise.audit.records import RowWeights
from samplewise.audit.rules import CODES, find
from samplewise.audit.totals import Per, UpdateTotal, update_totals
from samplewise.audit.weights import is_criterion
from samplewise.core.files import absolute, write_bytes
from samplewise.core.text import Table, Tabular, did_you_mean, plural

FORMAT = 1  # "format_version" of a saved audit
SHOWN = 12  # updates in the printed table
WIDTH = 110  # of printed sentences
UNITS = ("token", "sample")


def audit(
    model: nn.Module | None = None,
    *,
    per: Per = None,
    losses: Losses | nn.Module | None = None,
    labels: Any = None,
    ids: Any = None,
    norms: bool = False,
    allow: Collection[str] = (),
) -> Audit:
    """Audit a training loop: the weight of every sample and target in each update, and faults of the loop.

        with sw.audit(model, per="token") as audit:
            trainer.train()
        print(audit)
        assert audit.ok

    Works in any loop that has a model, a backward pass and an optimizer; nothing is changed, and the parameters are the
    same with and without an audit. For a loss that is a cross entropy (also with ignore_index, label smoothing or class
    weights), or a criterion of torch.nn that is called with the outputs, the weights are exact; for other losses,
    `losses` says what they are. Otherwise only the share of each sample in the gradient is known, and faults of the
    loop that do not depend on weights.

    model: the audited model; None: all models that are called and trained.
    per: what the weights should be: "token" (equal for all targets of an update, and 1 in sum), "sample" (the same for
        the sums over the targets of a sample), a number (each target has weight 1 / number). None: per token or per
        sample.
    losses: function (outputs, labels) -> losses (B,) or (B, ...), or a criterion of torch.nn with reduction="none".
    labels: for `losses`, the name of the argument of the model that holds the labels (default "labels", or the second
        positional argument), or a function (args, kwargs) -> labels.
    ids: name of the argument of the model that holds the ids of the samples, or a function (args, kwargs) -> ids (B,).
        Default: samples are known by their content, so that augmented ones count as different.
    norms: record the norm of each update's gradient, for `audit.compare` where weights cannot be seen.
    allow: codes of findings that are intended, such as ["eval-mode"].
    """
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module, or None for all models; found {type(model).__name__}. Pass the model "
            "itself, for example sw.audit(trainer.model)."
        )
    is_number = isinstance(per, (int, float)) and not isinstance(per, bool) and 0 < per < inf
    if not (per is None or is_number or per in UNITS):
        raise ValueError(f"per must be 'token', 'sample', a positive number or None; found {per!r}.")
    if not isinstance(allow, Collection):
        raise TypeError(f"allow must be a list of codes of findings; found {type(allow).__name__}.")
    for code in [allow] if isinstance(allow, str) else allow:
        if code not in CODES:
            raise ValueError(f"allow must hold codes of findings; found {code!r}. {did_you_mean(code, CODES)}".rstrip())
    if losses is not None and not callable(losses):
        raise TypeError(f"losses must be a function (outputs, labels) -> losses; found {type(losses).__name__}.")
    if isinstance(losses, nn.Module) and is_criterion(losses) and losses.reduction != "none":
        raise ValueError(
            f"losses must return one loss per sample; found {type(losses).__name__} with reduction="
            f"{losses.reduction!r}. Pass reduction='none'."
        )
    return Audit(Observer(model, losses, labels, ids, norms), per, {allow} if isinstance(allow, str) else set(allow))


@dataclass
class Results:
    """Results of an audit, computed at the end of its block."""

    totals: list[UpdateTotal] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    deviation: float = nan


class Audit(Tabular):
    """Result of `sw.audit`: a context manager, whose block is audited. Printed, it is a verdict and a table.

    ok         True if nothing was found
    verdict    the result in one line
    findings   faults, each with `code`, `message`, `where` and `updates`
    updates    one dict per update, microbatch and sample, as for pandas.DataFrame(audit.updates)
    sums       sum of the weights of each update; NaN if they cannot be seen
    deviation  largest relative deviation of a weight from what `per` demands; NaN if no weights can be seen
    """

    def __init__(self, observer: Observer, per: Per, allow: set[str]):
        self.per = per
        self._observer = observer
        self._allow = allow
        self._of_ranks: list[list[RowWeights]] = []
        self._complete = False
        self._state = "new"
        self._results = Results()

    # --- the block ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> Audit:
        if self._state != "new":
            raise RuntimeError("an audit can be used for one block; found that it was used. Create another one.")
        self._state = "running"
        self._observer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(complete=kind is None)

    def stop(self, complete: bool = True) -> None:
        """End the audit and remove its hooks. complete: the loop has ended by itself. With several ranks whose
        gradients are averaged, this is a collective, unless the loop has failed.
        """
        if self._state != "running":
            return
        self._state = "over"
        self._complete = complete
        self._observer.stop()
        if complete and self._observer.calls.averages_ranks:
            self._observer.guard(self._gather)
        self._observer.guard(self._evaluate)
        self._observer.release()

    def _gather(self) -> None:
        """Exchange the weights of each update with the other ranks."""
        rank = dist.get_rank()
        for weights in (weights for p in self._observer.updates.passes for weights in p.weights):
            weights.rank = rank
        totals = update_totals(self._observer.updates.steps, self._observer.updates.passes)
        parts_of_rank = [[part for slot in total.slots.values() for part in slot.parts] for total in totals]
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, parts_of_rank)
        others = [rows for r, rows in enumerate(gathered) if r != rank]
        self._of_ranks = [[part for rows in others for part in rows[k]] for k in range(min(map(len, gathered)))]
        self._of_ranks += [[]] * (len(parts_of_rank) - len(self._of_ranks))

    # --- results -----------------------------------------------------------------------------------------------------

    def _evaluate(self) -> None:
        observer = self._observer
        self._results.totals = update_totals(observer.updates.steps, observer.updates.passes, self._of_ranks)
        evidence = Evidence(observer, self._results.totals, self.per, self._complete)
        findings = [finding for finding in find(evidence) if finding.code not in self._allow]
        self._results.findings = findings
        self._results.deviation = evidence.deviation()
        self._results.notes = notes_of(evidence, findings)

    def _evaluated(self) -> Results:
        if self._state != "over":
            raise RuntimeError(
                f"the results of an audit must be read after its block; found that it is {self._state}. Write `with "
                "sw.audit(model) as audit:` around the training, and read the results below."
            )
        return self._results

    @property
    def _totals(self) -> list[UpdateTotal]:
        return self._evaluated().totals

    @property
    def _failure(self) -> str | None:
        return self._observer.failure

    @property
    def findings(self) -> list[Finding]:
        return self._evaluated().findings

    @property
    def ok(self) -> bool:
        """True if updates of observed backward passes were seen, and nothing was found."""
        has_passes = any(total.passes for total in self._totals)
        return not self.findings and has_passes and self._failure is None

    @property
    def sums(self) -> list[float]:
        return [total.total for total in self._totals]

    @property
    def deviation(self) -> float:
        return self._evaluated().deviation

    @property
    def notes(self) -> list[str]:
        """What could not be seen."""
        notes = self._evaluated().notes
        if self._failure is None:
            return notes
        return [f"the audit has ended early; the training was not disturbed: {self._failure}", *notes]

    @property
    def verdict(self) -> str:
        if self._failure is not None:
            return "the audit has failed"
        if not self._totals:
            return "no update seen"
        if self.findings:
            return f"{plural(len(self.findings), 'fault')}: {', '.join(dict.fromkeys(f.code for f in self.findings))}"
        if not any(total.passes for total in self._totals):
            return "no backward pass seen"
        unknown = sum(isnan(total) for total in self.sums)
        if unknown:
            which = "" if unknown == len(self.sums) else f" of {unknown} of {len(self.sums)} updates"
            return f"no fault found; weights{which} cannot be seen"
        slots = [slot for total in self._totals for slot in total.known]
        units = {"target": "token", "sample": "sample"}
        equal = next((noun for noun, unit in units.items() if all(slot.equal(unit) for slot in slots)), None)
        if equal is None or any(len(total.known) > 1 for total in self._totals):
            return "no fault found"
        return f"no fault found: every {equal} has the same weight"

    @property
    def updates(self) -> list[dict[str, Any]]:
        """One dict per update, microbatch and sample. Updates and microbatches are counted from 1; "sample" is a number
        for each content or id, in the order of their first appearance; "known" is False if the weight is only the
        sample's share in the gradient of its microbatch.
        """
        numbers: dict[int, int] = {}
        rows = []
        for total in self._totals:
            for part in (part for slot in total.slots.values() for part in slot.parts):
                for row, (weight, targets) in enumerate(zip(part.sums, part.counts, strict=True)):
                    sample = part.samples[row] if part.samples else None
                    rows.append(
                        {
                            "update": total.step.number + 1,
                            "optimizer": total.step.optimizer,
                            "rank": part.rank,
                            "microbatch": part.microbatch + 1,
                            "row": row,
                            "sample": None if sample is None else numbers.setdefault(sample, len(numbers)),
                            "loss": part.kind,
                            "output": part.slot.name,
                            "targets": targets,
                            "weight": weight,
                            "known": not part.relative and not total.step.is_unknown,
                        }
                    )
        return rows

    def _table(self) -> Table:
        totals = self._totals
        head = ("update", "microbatches", "samples", "targets", "sum of weights", "weight of a target", "")
        marks: dict[int, list[str]] = {}
        for finding in self.findings:
            for update in finding.updates:
                marks.setdefault(update, []).append(finding.code)
        rows = [_cells(total, marks.get(total.step.number + 1, [])) for total in _chosen(totals, marks)]
        title = f"audit of {plural(len(totals), 'update')}: {self.verdict}"
        hidden = len(totals) - len(rows)
        notes = [f"… {plural(hidden, 'other update')}"] if hidden else []
        columns = len(head) if any(row[-1] for row in rows) else len(head) - 1
        rows = [row[:columns] for row in rows]
        lines = [*notes, *map(str, self.findings), *(f"Note: {n}." for n in self.notes)]
        return Table(
            head[:columns],
            rows,
            title,
            [fill(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False) for line in lines],
        )

    # --- files and comparison ----------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Everything that `save` writes."""
        return {
            "format_version": FORMAT,
            "per": self.per,
            "ok": self.ok,
            "verdict": self.verdict,
            "findings": [asdict(finding) for finding in self.findings],
            "notes": self.notes,
            "summary": [
                {
                    "update": t.step.number + 1,
                    "optimizer": t.step.optimizer,
                    "microbatches": len(t.passes),
                    "samples": t.samples,
                    "targets": t.targets,
                    "sum": _finite(t.total),
                    "low": _finite(min((s.low for s in t.known), default=nan)),
                    "high": _finite(max((s.high for s in t.known), default=nan)),
                    "rates": list(t.step.rates),
                    "norm": t.step.norm,
                    "ids": [sample for p in t.passes for sample in p.samples],
                    "weights": [w for slot in t.known for part in slot.parts for w in part.sums],
                }
                for t in self._totals
            ],
            "updates": self.updates,
        }

    def save(self, path: str | PathLike[str]) -> None:
        """Write the audit to a file: a page if its name ends with .html, otherwise JSON for `audit.compare`."""
        to = absolute(path)
        if to.suffix in (".html", ".htm"):
            from samplewise.report.audit import audit_page
            from samplewise.report.html import write

            write(audit_page(self.to_dict()), to)
        else:
            to.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(to, json.dumps(self.to_dict(), allow_nan=False).encode())

    def compare(self, *others: Audit | str | PathLike[str]) -> Comparison:
        """Compare the updates with those of other audits, or of their files, which continue each other: samples and
        their order, weights, learning rates, norms.

            whole.compare("until-the-kill.json", "resumed.json")     # a run that was interrupted and resumed
            audit.compare(other)                                      # one batch, cut in two ways
        """
        if not others:
            raise TypeError("compare needs another audit, or its file; found none.")
        saved = [other.to_dict() if isinstance(other, Audit) else read_audit(other) for other in others]
        return compare(self.to_dict()["summary"], [update for audit in saved for update in audit["summary"]])


def read_audit(path: str | PathLike[str]) -> dict[str, Any]:
    """Content of a file written by `audit.save`."""
    try:
        content = json.loads(absolute(path).read_text())
        if content["format_version"] != FORMAT:
            raise ValueError
        return content
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"an audit must be read from a file that audit.save('….json') has written; found {path}, which is none of "
            f"format {FORMAT}."
        ) from error


def _chosen(totals: list[UpdateTotal], marks: dict[int, list[str]]) -> list[UpdateTotal]:
    """The first and last updates, and of the others those with findings."""
    if len(totals) <= SHOWN:
        return totals
    half = SHOWN // 3
    middle = [t for t in totals[half:-half] if t.step.number + 1 in marks][:half]
    return [*totals[:half], *middle, *totals[-half:]]


def _cells(total: UpdateTotal, marks: list[str]) -> tuple[str, ...]:
    slots = total.known
    # With factors of classes, the weights of a class whose factor is the mean one.
    low = min((slot.low * slot.size / max(slot.targets, 1) for slot in slots), default=nan)
    high = max((slot.high * slot.size / max(slot.targets, 1) for slot in slots), default=nan)
    spread = f"{low:.4g}" if abs(low - high) <= 1e-5 * abs(high) else f"{low:.4g} to {high:.4g}"
    return (
        str(total.step.number + 1),
        str(len(total.passes)),
        str(total.samples),
        str(total.targets) if slots else "?",
        f"{total.total:.6g}" if slots else "?",
        spread if slots else "?",
        ", ".join(dict.fromkeys(marks)),
    )


def _finite(value: float) -> float | None:
    """The number, or None for NaN, which JSON does not have."""
    return None if isnan(value) else value
