"""From pieces of data to an update: the window that is being filled, and what becomes of it.

If anything raises, whoever drives this gives the window up: then it never was.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from time import perf_counter
from typing import Any, ClassVar

import torch
from torch import Tensor

from samplewise import ranks
from samplewise.batches import length
from samplewise.errors import (
    DistributedError,
    LossesError,
    NonFiniteGradientError,
    NonFiniteLossError,
    ParameterError,
)
from samplewise.replay import Buffers
from samplewise.step.audit import Audit
from samplewise.step.columns import Noted, note
from samplewise.step.evaluation import Evaluation
from samplewise.step.finish import Finish
from samplewise.step.grouping import Grouped
from samplewise.step.microbatch import Microbatch
from samplewise.step.mistakes import look_at_batch_norm, look_at_modes, look_at_reach, look_at_weights
from samplewise.step.parts import Part
from samplewise.step.recall import Recall
from samplewise.step.summing import OfNumbers, Plain, Summing, Weighted
from samplewise.step.team import Team
from samplewise.step.update import Outcome, Update
from samplewise.step.window import Counters, Window, empty, nothing_known, opened
from samplewise.transforms.chain import Chain


class Maker:
    """Makes updates. `record` is the step's own, and may change between two windows."""

    def __init__(
        self,
        evaluation: Evaluation,
        microbatch: Microbatch,
        finish: Finish,
        audit: Audit,
        chain: Chain,
        record: set[str],
    ):
        self.evaluation, self.microbatch, self.finish, self.chain = evaluation, microbatch, finish, chain
        self.trained, self.record, self.team = evaluation.trained, record, finish.team
        self.columns: dict[str, Hashable] = {}  # name -> key of the batch: what is noted of it
        self.counters, self.window = Counters(), Window()
        self._audit, self._buffers = audit, Buffers(evaluation.modules)
        self._summing = self._make_summing()
        self._first = self._unseen = True  # window, gradients
        self._recall: Recall | None = None

    def join(self, team: Team) -> None:
        """Others take part from now on."""
        self.team = self.finish.team = team
        self._summing = self._make_summing()

    def check_alone(self) -> None:
        """Ranks that came after the step was made would train models of their own."""
        if self.team is None and ranks.active():
            raise DistributedError(
                f"a step must know of all ranks when it is made; found {ranks.size()} ranks, and a step that was made "
                "for one process. Call init_process_group first."
            )

    @property
    def sees_windows_whole(self) -> bool:
        """Whether pieces wait until all are there."""
        return self._summing.window

    # --- filling a window ------------------------------------------------------------------------------------------

    def add(self, piece: Any, size: int | None, alone: bool = False) -> None:
        """Adds a piece of `size` samples, if that is known, to the window; `alone` if it will be all of it."""
        started, window = perf_counter(), self.window
        if not window.open:
            self._begin(piece)
        if self._recall is not None:
            self._recall.pieces.append(piece)
        if self.columns and (window.noted or not window.open):  # of all its samples, or of none
            window.noted.append(note(piece, self.columns, self.counters.epochs))
        if self._summing.window:
            window.waiting.append(piece)
            window.samples += size or length(piece) or 1  # at least, until it is computed
            window.sized &= size is not None
        else:
            parts = self._sum([piece], alone)
            window.samples += self._counted(parts, size)
            window.parts += parts
        window.seconds += perf_counter() - started

    def _begin(self, piece: Any) -> None:
        self.window.begun, self.evaluation.seconds = True, 0.0
        if self.team is not None:
            self.team.spread.open()
        self.check_alone()
        self.trained.follow()
        self.trained.clear()
        self._buffers.remember()
        if "norms" in self.record and not self._summing.knows_norms:
            self._summing = self._make_summing()
        self._summing.begin()
        self._recall = None
        if self._first:
            look_at_modes(self.evaluation.modules)
            if not self._summing.knows_norms:
                self._recall = Recall(self.evaluation, self.microbatch)
        if piece is not None:
            self._audit.look(piece, self._first, self.counters.updates)
            self._first = False  # an error is told again to whoever tries again

    def _sum(self, pieces: Sequence[Any], alone: bool = False) -> list[Part]:
        """Gradients into `.grad`. What is not finite and may be skipped spoils the window, and is no error."""
        window, summing = self.window, self._summing
        if window.failure is not None:
            return [nothing_known(length(piece) or 0, window.parts) for piece in pieces]
        try:
            if alone and isinstance(summing, Plain) and not (self.chain.on_sum or self.microbatch.automatic):
                part, window.divided = summing.add_mean(pieces[0])
                return [part]
            if self.team is not None and summing.window:
                assert isinstance(summing, OfNumbers)
                return summing.add_with_others(pieces, self.microbatch)
            start = 0 if window.waiting else window.samples
            return self.microbatch.attempt(lambda pieces: summing.add(pieces, start), pieces)
        except (NonFiniteLossError, NonFiniteGradientError) as error:
            if not self.finish.may_skip(error):
                raise
            window.failure = error
            return [nothing_known(length(piece) or 0, window.parts) for piece in pieces]

    def _counted(self, parts: Sequence[Part], size: int | None) -> int:
        found = sum(len(part) for part in parts)
        if size is not None and found != size:
            raise LossesError(
                f"loss_fn must return one loss for each sample where batches are cut; found {found} losses for {size} "
                "samples. Use samples=None and microbatch=None, or return one loss per sample."
            )
        self.counters.samples += found
        self.counters.microbatches += len(parts)
        return found

    def drop(self) -> None:
        """The samples of the open window have been seen, and that is all."""
        window = self.window
        seen = self.counters.samples + (window.samples if window.waiting else 0) + window.others
        self.give_up()
        self.counters.samples = seen

    def give_up(self) -> None:
        """The open window never was."""
        if self.window.begun:
            self.trained.clear()
            self._buffers.restore()
            self.counters.samples -= sum(len(part) for part in self.window.parts)
            self.counters.microbatches -= len(self.window.parts)
        self.window = Window()

    # --- the update ------------------------------------------------------------------------------------------------

    def update(self) -> Update:
        """Out of what is in the window. With other ranks: of all of theirs."""
        started, window = perf_counter(), self.window
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
        counters, others = self.counters, 0 if self.team is None else window.others
        known = outcome, window.parts, self._asked_late, window.noted
        update = Update(counters.updates, window.samples + others, *known, agreed=window.agreed)
        counters.samples += others
        counters.updates += not outcome.skipped
        counters.skipped += outcome.skipped
        self.window = Window()
        ended, forward = perf_counter(), self.evaluation.seconds
        gradients = window.seconds + finishing - started - forward
        update.phases = {"forward": forward, "gradients": gradients, "optimizer": ended - finishing}
        return update

    def _compute(self) -> None:
        """What has waited for the window to be complete."""
        window = self.window
        window.parts = self._sum(window.waiting)
        window.samples = self._counted(window.parts, window.samples if window.sized else None)

    def _compute_with_others(self, team: Team) -> None:
        """The sums of all ranks, in `.grad`."""
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
            if isinstance(self._summing, OfNumbers) and self.chain.references:
                team.compare(self._summing.fingerprint())
            team.spread.reduce(self.trained, self._buffers)

    def _look_back(self, window: Window) -> None:
        """What the first window tells of mistakes."""
        pieces = [len(part) for part in window.parts if len(part)]
        if pieces:
            look_at_batch_norm(self.evaluation.modules, pieces * (1 if self.team is None else self.team.size))
        look_at_reach(self.trained.owned, noise=bool(self.chain.on_sum))
        look_at_weights(self.chain, [part.weights for part in window.parts], self.team is not None)

    def tell(
        self, part: Part, count: int, made: int, norm: float, lr: list[Any], seconds: float, noted: list[Noted]
    ) -> Update:
        """What compiled code has made."""
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
        """Norms that nobody had asked for when they were at hand. The first update can be recalled; from now on they
        are recorded.
        """
        if self._recall is None:
            self.record.add("norms")
            raise ParameterError(
                f"update.norms must be asked for before the update is made; found that nothing had asked for those of "
                f"update {update.index}. They are known from the next update on; Step(..., record=['norms']) knows all."
            )
        norms = self._recall.norms()
        self.record.add("norms")
        return norms

    def _make_summing(self) -> Summing:
        if not self.chain.weighs and "norms" not in self.record:
            return Plain(self.evaluation)
        kind = Weighted if self.chain.grouping is None else Grouped
        return kind(self.evaluation, self.chain, "norms" in self.record, self.team)

    # --- state -----------------------------------------------------------------------------------------------------

    NO_WINDOW: ClassVar[dict[str, Any]] = {"parts": {}, "sums": {}, "failure": [], "noted": []}

    def state_dict(self) -> dict[str, Any]:
        """The open window, as gradient sums. Samples that have not been computed yet are not in it."""
        window = self.window
        parts = window.state() if not window.waiting else {}
        sums = {name: p.grad.clone() for name, p in self.trained.named.items() if p.grad is not None} if parts else {}
        noted = [each.state_dict() for each in window.noted] if parts else []
        return {"parts": parts, "sums": sums, "failure": window.failure_state(), "noted": noted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.window = opened(state["parts"], state["failure"], state.get("noted", []))
        if "norms" in state["parts"] and not (state["failure"] or self._summing.knows_norms):
            self.record.add("norms")  # it goes on as it was begun
            self._summing = self._make_summing()
        self._buffers.remember()
        for name, total_so_far in state["sums"].items():
            parameter = self.trained.named[name]
            parameter.grad = total_so_far.to(parameter.device, copy=True)
