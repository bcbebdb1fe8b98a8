"""Window builder: collects microbatches into a window and makes one update from it.

If an exception is raised, the caller must call `give_up`, which discards the window.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from time import perf_counter
from typing import Any, ClassVar

import torch
from torch import Tensor

from samplewise.core.batches import length
from samplewise.core.snapshot import Buffers
from samplewise.distributed.group import current_group
from samplewise.errors import (
    DistributedError,
    LossesError,
    NonFiniteGradientError,
    NonFiniteLossError,
    ParameterError,
)
from samplewise.step.accumulate import Accumulator, PerSampleAccumulator, PlainAccumulator, WeightedAccumulator
from samplewise.step.apply import UpdateApplier
from samplewise.step.audit import Audit
from samplewise.step.batch_columns import BatchColumns, note
from samplewise.step.checks import check_batch_norm, check_modes, check_reached, check_weights
from samplewise.step.distributed_window import DistributedWindow
from samplewise.step.forward import LossEvaluator
from samplewise.step.grouped import Grouped
from samplewise.step.lazy_norms import LazyNorms
from samplewise.step.microbatch import Microbatch
from samplewise.step.microbatch_stats import MicrobatchStats
from samplewise.step.update import Outcome, Update
from samplewise.step.window import Counters, Window, empty, nothing_known, opened
from samplewise.transforms.chain import Chain


class WindowBuilder:
    """Fills the open window with microbatches and makes updates from it. `record` is the same set object as
    `Step.record`, and may change between two windows.
    """

    def __init__(
        self,
        evaluation: LossEvaluator,
        microbatch: Microbatch,
        finish: UpdateApplier,
        audit: Audit,
        chain: Chain,
        record: set[str],
    ):
        self.evaluation = evaluation
        self.microbatch = microbatch
        self.finish = finish
        self.chain = chain
        self.trained = evaluation.trained
        self.record = record
        self.team = finish.team
        self.columns: dict[str, Hashable] = {}  # column name -> key of the batch
        self.counters = Counters()
        self.window = Window()
        self._audit = audit
        self._buffers = Buffers(evaluation.modules)
        self._summing = self._make_summing()
        self._first = True  # no window was begun yet
        self._unseen = True  # no gradients were checked for mistakes yet
        self._recall: LazyNorms | None = None

    def join(self, team: DistributedWindow) -> None:
        """Use these ranks from the next window on."""
        self.team = self.finish.team = team
        self._summing = self._make_summing()

    def check_alone(self) -> None:
        """Raise if a process group was initialized after the step was created: each rank would train its own model."""
        if self.team is None and current_group().distributed:
            raise DistributedError(
                f"the process group must exist before the step is created; found {current_group().size} ranks and a "
                "step that was created for one process. Call init_process_group() before Step(...)."
            )

    @property
    def sees_windows_whole(self) -> bool:
        """True if microbatches are deferred until the window is complete."""
        return self._summing.window

    # --- filling a window ------------------------------------------------------------------------------------------

    def add(self, piece: Any, size: int | None, alone: bool = False) -> None:
        """Add a microbatch of `size` samples (None: unknown) to the window; `alone`: it is the whole window."""
        started = perf_counter()
        window = self.window
        if not window.open:
            self._begin(piece)
        if self._recall is not None:
            self._recall.pieces.append(piece)
        if self.columns and (window.noted or not window.open):  # columns of all samples of a window, or of none
            window.noted.append(note(piece, self.columns, self.counters.epochs))
        if self._summing.window:
            window.waiting.append(piece)
            window.samples += size or length(piece) or 1  # a lower bound until the losses are computed
            window.sized &= size is not None
        else:
            parts = self._sum([piece], alone)
            window.samples += self._counted(parts, size)
            window.parts += parts
        window.seconds += perf_counter() - started

    def _begin(self, piece: Any) -> None:
        self.window.begun = True
        self.evaluation.seconds = 0.0
        if self.team is not None:
            self.team.spread.open()
        self.check_alone()
        self.trained.refresh()
        self.trained.clear()
        self._buffers.remember()
        if "norms" in self.record and not self._summing.knows_norms:
            self._summing = self._make_summing()
        self._summing.begin()
        self._recall = None
        if self._first:
            check_modes(self.evaluation.modules)
            if not self._summing.knows_norms:
                self._recall = LazyNorms(self.evaluation, self.microbatch)
        if piece is not None:
            self._audit.look(piece, self._first, self.counters.updates)
            self._first = False  # not reached if the audit raises, so that the next attempt raises again

    def _sum(self, pieces: Sequence[Any], alone: bool = False) -> list[MicrobatchStats]:
        """Accumulate gradients into `.grad`. A non-finite value that may be skipped marks the window as failed instead
        of raising.
        """
        window = self.window
        summing = self._summing
        if window.failure is not None:
            return [nothing_known(length(piece) or 0, window.parts) for piece in pieces]
        try:
            if alone and isinstance(summing, PlainAccumulator) and not (self.chain.on_sum or self.microbatch.automatic):
                part, window.divided = summing.add_mean(pieces[0])
                return [part]
            if self.team is not None and summing.window:
                assert isinstance(summing, PerSampleAccumulator)
                return summing.add_with_others(pieces, self.microbatch)
            start = 0 if window.waiting else window.samples
            return self.microbatch.attempt(lambda pieces: summing.add(pieces, start), pieces)
        except (NonFiniteLossError, NonFiniteGradientError) as error:
            if not self.finish.may_skip(error):
                raise
            window.failure = error
            return [nothing_known(length(piece) or 0, window.parts) for piece in pieces]

    def _counted(self, parts: Sequence[MicrobatchStats], size: int | None) -> int:
        found = sum(len(part) for part in parts)
        if size is not None and found != size:
            raise LossesError(
                f"loss_fn must return one loss per sample if batches are cut; found {found} losses for {size} samples. "
                "Use samples=None and microbatch=None, or return one loss per sample."
            )
        self.counters.samples += found
        self.counters.microbatches += len(parts)
        return found

    def drop(self) -> None:
        """Discard the open window without an update, but count its samples."""
        window = self.window
        deferred = window.samples if window.waiting else 0
        seen = self.counters.samples + deferred + window.others
        self.give_up()
        self.counters.samples = seen

    def give_up(self) -> None:
        """Discard the open window and restore gradients, buffers and counters."""
        if self.window.begun:
            self.trained.clear()
            self._buffers.restore()
            self.counters.samples -= sum(len(part) for part in self.window.parts)
            self.counters.microbatches -= len(self.window.parts)
        self.window = Window()

    # --- the update ------------------------------------------------------------------------------------------------

    def update(self) -> Update:
        """Make an update from the samples in the window; with several ranks, from the windows of all ranks."""
        started = perf_counter()
        window = self.window
        if self.team is not None:
            self._compute_with_others(self.team)
        elif window.waiting:
            self._compute()
        if self._unseen and window.failure is None:
            self._look_back(window)
            self._unseen = False
        if self._recall is not None:
            self._recall.keep_parameters()
        finishing = perf_counter()
        outcome = self.finish(window)
        if outcome.skipped:
            self.trained.clear()
            self._buffers.restore()
        if outcome.mask is not None:
            self._buffers.restore_unless(outcome.mask.well)
        counters = self.counters
        others = 0 if self.team is None else window.others
        known = outcome, window.parts, self._asked_late, window.noted
        update = Update(counters.updates, window.samples + others, *known, agreed=window.agreed)
        counters.samples += others
        counters.updates += not outcome.skipped
        counters.skipped += outcome.skipped
        self.window = Window()
        ended = perf_counter()
        forward = self.evaluation.seconds
        gradients = window.seconds + finishing - started - forward
        update.phases = {"forward": forward, "gradients": gradients, "optimizer": ended - finishing}
        return update

    def _compute(self) -> None:
        """Compute the deferred microbatches of a complete window."""
        window = self.window
        window.parts = self._sum(window.waiting)
        window.samples = self._counted(window.parts, window.samples if window.sized else None)

    def _compute_with_others(self, team: DistributedWindow) -> None:
        """Compute the window and reduce gradients over all ranks, into `.grad`."""
        window = self.window
        if not window.begun:
            self._begin(None)
        if self._summing.window:
            self._compute()
            team.agree_again(window)
        window.parts = window.parts or [empty(next(iter(self.trained.named.values())))]
        if self.finish.checks or window.failure is not None:
            window.failure = team.problem(window, self.finish.on_nonfinite == "skip")
        if window.failure is None:
            if isinstance(self._summing, PerSampleAccumulator) and self.chain.references:
                team.compare(self._summing.fingerprint())
            team.spread.reduce(self.trained, self._buffers)

    def _look_back(self, window: Window) -> None:
        """Check the first window for common mistakes; warn or raise."""
        pieces = [len(part) for part in window.parts if len(part)]
        if pieces:
            check_batch_norm(self.evaluation.modules, pieces * (1 if self.team is None else self.team.size))
        check_reached(self.trained.owned, noise=bool(self.chain.on_sum))
        check_weights(self.chain, [part.weights for part in window.parts], self.team is not None)

    def tell(
        self,
        part: MicrobatchStats,
        count: int,
        made: int,
        norm: float,
        lr: list[Any],
        seconds: float,
        noted: list[BatchColumns],
    ) -> Update:
        """`Update` for `made` compiled updates of `count` samples; advances the counters."""
        counters = self.counters
        outcome = Outcome(False, lr, lambda: torch.tensor(norm, dtype=torch.float64))
        update = Update(counters.updates, count, outcome, [part], self._asked_late, noted, made)
        update.phases = {"compiled": seconds}
        counters.updates += made
        counters.microbatches += made
        counters.samples += count
        self._recall = None
        return update

    def _asked_late(self, update: Update) -> Tensor:
        """Per-sample gradient norms that were not recorded. Only those of the first update can be recomputed; norms are
        recorded from now on.
        """
        if self._recall is None:
            self.record.add("norms")
            raise ParameterError(
                "update.norms must be requested before the update is made; found no request for update "
                f"{update.index}. Norms are recorded from the next update on; Step(..., record=['norms']) records them "
                "for all updates."
            )
        norms = self._recall.norms()
        self.record.add("norms")
        return norms

    def _make_summing(self) -> Accumulator:
        if not self.chain.weighs and "norms" not in self.record:
            return PlainAccumulator(self.evaluation)
        kind = WeightedAccumulator if self.chain.grouping is None else Grouped
        return kind(self.evaluation, self.chain, "norms" in self.record, self.team)

    # --- state -----------------------------------------------------------------------------------------------------

    NO_WINDOW: ClassVar[dict[str, Any]] = {"parts": {}, "sums": {}, "failure": [], "noted": []}

    def state_dict(self) -> dict[str, Any]:
        """State of the open window, as gradient sums. Samples that are not computed yet are not included."""
        window = self.window
        parts = window.state() if not window.waiting else {}
        sums = {}
        noted = []
        if parts:
            sums = {name: p.grad.clone() for name, p in self.trained.named.items() if p.grad is not None}
            noted = [each.state_dict() for each in window.noted]
        return {"parts": parts, "sums": sums, "failure": window.failure_state(), "noted": noted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore an open window from `state_dict`."""
        self.window = opened(state["parts"], state["failure"], state.get("noted", []))
        if "norms" in state["parts"] and not (state["failure"] or self._summing.knows_norms):
            self.record.add("norms")  # the window was begun with norms, so all of its samples need them
            self._summing = self._make_summing()
        self._buffers.remember()
        for name, total_so_far in state["sums"].items():
            parameter = self.trained.named[name]
            parameter.grad = total_so_far.to(parameter.device, copy=True)
