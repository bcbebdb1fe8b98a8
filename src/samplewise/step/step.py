"""`sw.Step`: what one update is, as a value."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from math import inf
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from samplewise import ranks
from samplewise.batches import length
from samplewise.engine.replicas import inner
from samplewise.errors import (
    BatchError,
    DistributedError,
    LossesError,
    NonFiniteGradientError,
    NonFiniteLossError,
    ParameterError,
)
from samplewise.losses import as_loss_fn
from samplewise.replay import Buffers
from samplewise.step.audit import Audit
from samplewise.step.columns import Noted, note
from samplewise.step.compiled.compiling import Compiling
from samplewise.step.evaluation import Evaluation
from samplewise.step.finish import Finish
from samplewise.step.grouping import Grouped
from samplewise.step.microbatch import Auto, Microbatch
from samplewise.step.mistakes import look_at_batch_norm, look_at_modes, look_at_reach, look_at_weights
from samplewise.step.options import check_options, check_scheduler
from samplewise.step.parameters import Trained
from samplewise.step.parts import Part
from samplewise.step.precision import Precision
from samplewise.step.recall import Recall
from samplewise.step.rules import Rule, as_optimizer
from samplewise.step.slices import Slices
from samplewise.step.spread import Strategy
from samplewise.step.summing import OfNumbers, Plain, Summing, Weighted
from samplewise.step.team import Team, team_of
from samplewise.step.update import Outcome, Totals, Update
from samplewise.step.window import Counters, Window, empty, nothing_known, opened
from samplewise.transforms.chain import as_chain


class Step:
    """Turns batches into updates of the parameters.

        for update in step.over(loader):   # exactly one update per iteration
            ...
        step.run(loader)                   # the same to the end, returning the totals
        step(batch)                        # by hand: the updates that this batch completed
        step.flush()                       # ... and the one that is still open
        step.accumulate(batch)             # all by hand
        step.apply()

    model, optimizer, loss_fn: `loss_fn(model, batch)` returns losses (B,), or (losses, counts) where each sample has
    its own denominator, and as the last of the tuple, if you like, a dict of columns (B,) for `update.columns`; or a
    criterion such as nn.CrossEntropyLoss() for batches (x, y). The optimizer may be a
    function (params, gradients) -> None, such as sw.sgd(0.1).

    Three numbers that do not depend on each other: the loader's batch; `samples` per update (None: as they arrive);
    `microbatch`, how many are computed at a time (None: as they arrive; "auto" or sw.auto(memory): as many as fit).
    The gradient of an update is Σ c·g / Σ counts over its samples, however they came and were cut.

    transforms: what happens to each sample's gradient before the sum: see `chain`.
    tail: what becomes of samples that are too few for an update at the end of a loader: "update" with what is there,
    "drop" them, or "carry" them into the next.
    precision: None (leave it to the caller), "32", "bf16-mixed", or "16-mixed" with a loss scale.
    max_grad_norm: bound on the norm of the update's gradient.
    scheduler: steps once per update.
    on_nonfinite: "raise" before the update, "skip" it, or "ignore".
    audit: every so many updates one sample is computed alone and compared. None: at the first update. False: never.
    compile: True makes forward pass, backward pass, transforms and the optimizer's rule one compiled graph, from the
    second update on; "auto" does so where updates have one sample, after a thousand of them. Where that cannot be done
    the step goes on as it is, and `step.compiled` tells why.
    record: {"norms"} to know `update.norms` where no transform needs them.
    strategy: how several processes share the model. "ddp": each has all of it, that of rank 0 at the start; so has a
    DistributedDataParallel, which needs no saying. "fsdp": each keeps a part of every parameter; see sw.fsdp, and give
    nothing for a model that is sharded. `samples` are those of all ranks together, who exchange gradients once per
    update.

    If anything raises, the open window is given up, and parameters, optimizer and buffers are as before it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Rule,
        loss_fn: Any,
        samples: int | None = None,
        microbatch: int | str | Auto | None = None,
        transforms: Any = (),
        tail: str = "update",
        precision: str | None = None,
        max_grad_norm: float | None = None,
        scheduler: Any = None,
        *,
        on_nonfinite: str = "raise",
        audit: int | bool | None = None,
        compile: bool | str = "auto",
        record: Collection[str] = (),
        strategy: Strategy = None,
    ):
        check_options(samples, tail, on_nonfinite, max_grad_norm, record)
        check_scheduler(scheduler, optimizer)
        self.model, self.loss_fn = model, as_loss_fn(loss_fn)
        self.samples, self.tail = samples, tail
        self.transforms, self.record = as_chain(transforms), set(record)
        self.columns: dict[str, Hashable] = {}  # name -> key of the batch: what `update.columns` holds of it
        self.counters = Counters()
        self.settings = {
            "samples": samples,
            "microbatch": microbatch,
            "transforms": self.transforms,
            "tail": tail,
            "precision": precision,
            "max_grad_norm": max_grad_norm,
            "on_nonfinite": on_nonfinite,
            "compile": compile,
        }

        modules = [inner(model), *([self.loss_fn] if isinstance(self.loss_fn, nn.Module) else [])]
        self._strategy = strategy
        self._team = team_of(model, strategy, modules, self.settings, optimizer)
        everything = dict.fromkeys(p for module in modules for p in module.parameters())
        optimizer = as_optimizer(optimizer, everything if self._team is None else self._team.spread.owned(everything))
        self._trained = Trained(optimizer, modules, None if self._team is None else self._team.spread.leaves)
        self.precision = Precision(precision)
        self._microbatch = Microbatch(microbatch, modules, self._trained)
        losses = self.loss_fn if self._team is None else self._team.spread.around(self.loss_fn)
        self._evaluation = Evaluation(modules, self._trained, losses, self.precision, self._microbatch.budget)
        self._finish = Finish(
            self._trained,
            optimizer,
            scheduler,
            self.precision,
            self.transforms.on_sum,
            max_grad_norm,
            on_nonfinite,
            self._team,
        )
        self._audit = Audit(self._evaluation, audit, self.transforms.measures)
        self._compiling = Compiling(
            compile if self._team is None else False,
            self._evaluation,
            self._finish,
            self._microbatch,
            self.transforms,
            self.record,
            self._pause,
            bool(audit),
        )
        self._buffers = Buffers(modules)
        self._summing = self._make_summing()
        self._window = Window()
        self._rest: Slices | None = None  # of the last batch, while it is not used up
        self._first = self._unseen = True  # window, gradients
        self._recall: Recall | None = None
        self._alone = False  # nobody looks in between
        self._made_compiled = False

    @property
    def optimizer(self) -> Any:
        return self._finish.optimizer

    @property
    def scheduler(self) -> Any:
        return self._finish.scheduler

    @property
    def compiled(self) -> str:
        """Whether updates are: "compiled", or why they are not."""
        if self._team is not None and self.settings["compile"]:
            return f"updates of several ranks are not compiled; found {self._team.size}"
        compiling, problem = self._compiling, self._compiling.state_dict()["given_up"]
        if problem is not None:
            return problem
        if self._made_compiled:
            return "compiled"
        if compiling.mode is False:
            return "compile=False"
        if compiling.mode == "auto" and self.samples != 1:
            return "compile='auto' is for samples=1"
        return f"none of {self.counters.updates} updates so far"

    @property
    def open(self) -> bool:
        """Whether some samples have been taken, and are in no update yet."""
        return self._window.open

    @property
    def waiting(self) -> bool:
        """Whether samples of the open window have not been computed yet: those are in no state."""
        return bool(self._window.waiting)

    @property
    def taken(self) -> int:
        """How many samples of the last batch have been taken, while it is not used up; then 0."""
        return 0 if self._rest is None else self._rest.taken

    def join(self) -> None:
        """Takes the ranks in that were not there when the step was made, which shares the model with them as with
        strategy="ddp". Before the first update.
        """
        if self._team is None and ranks.active():
            if self._strategy not in (None, "ddp"):
                raise DistributedError(
                    f"ranks must be there when a step with strategy={self._strategy!r} is made; found that they came "
                    "later. Call torch.distributed.init_process_group() before it."
                )
            self._team = self._finish.team = team_of(self.model, "ddp", self._evaluation.modules, self.settings)
            self._compiling.mode = False
            self._summing = self._make_summing()

    def gather(self) -> None:
        """Has the whole model at hand on every rank, for forward passes that belong to no update."""
        if self._team is not None:
            self._team.spread.open()

    @contextmanager
    def telling(self, tell: Callable[[str], None]) -> Iterator[None]:
        """Meanwhile `tell` is called with a line where compiling takes long, instead of printing it. From a thread."""
        before, self._compiling.tell = self._compiling.tell, tell
        try:
            yield
        finally:
            self._compiling.tell = before

    # --- driving it ------------------------------------------------------------------------------------------------

    def over(self, loader: Iterable[Any]) -> Iterator[Update]:
        """One update per iteration. Whoever breaks out finds the unused samples of the last batch in the next call."""
        yield from self._use_up()
        try:
            for batch in loader:
                self._rest = batch if isinstance(batch, Slices) else Slices(batch)
                yield from self._use_up()
            if self._team is not None:
                yield from self._until_all_have_ended(self._team)
                return
        except Exception as error:  # the loader's, too
            self._fail(error)
            raise
        self.counters.epochs += 1
        if self._window.open and self.tail == "update":
            yield self.apply()
        elif self.tail == "drop":
            self._drop()

    def run(self, loader: Iterable[Any]) -> Totals:
        """All updates of `over(loader)`, added up."""
        totals, self._alone = Totals(), True
        try:
            for update in self.over(loader):
                totals.add(update)
        finally:
            self._alone = False
        return totals

    def __call__(self, batch: Any) -> list[Update]:
        """The updates that this batch completes; the rest of its samples wait for the next batch, or for `flush`."""
        updates = list(self._use_up())
        self._rest = Slices(batch)
        return updates + list(self._use_up())

    def flush(self) -> Update | None:
        """Ends the window with the samples that are there. Of several ranks all must do so."""
        if self._team is None:
            return self.apply() if self._window.open else None
        update = self._all_end(self._team)
        self._team.deal_anew(self._window, self.samples)
        return update

    def accumulate(self, batch: Any) -> None:
        """Adds a batch to the window, whatever its size."""
        try:
            rest = Slices(batch)
            while not rest.empty:
                self._add(*rest.take(self._microbatch.size))
        except BaseException as error:
            self._fail(error)
            raise

    def apply(self) -> Update:
        """One update from what has been accumulated. Of several ranks all must do so; some may have nothing."""
        update = None
        if self._team is not None:
            update = self._all_end(self._team)
        elif self._window.open:
            try:
                update = self._apply()
            except BaseException:
                self._give_up()
                raise
        if update is None:
            raise BatchError("an update must have samples; found none accumulated. Call accumulate(batch) first.")
        return update

    # --- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Counters, loss scale, the microbatch that was found, and an open window as gradient sums. Samples that have
        not been computed yet are not in it: the first of them is number `counters.samples`. Model, optimizer and
        scheduler have state dicts of their own.
        """
        if self._team is not None and self._window.open:
            raise DistributedError(
                "a step of several ranks must be saved between two updates; found an open window, of which each rank "
                "has a part. Save after an update; tail='carry' leaves a window open at the end of a loader."
            )
        parts = self._window.state() if not self._window.waiting else {}
        sums = {name: p.grad.clone() for name, p in self._trained.named.items() if p.grad is not None} if parts else {}
        return {
            "counters": asdict(self.counters),
            "precision": self.precision.state_dict(),
            "microbatch": self._microbatch.size,
            "compiling": self._compiling.state_dict(),
            "dealt": [] if self._team is None else [self._team.size, self._team.dealt],
            "window": {
                "parts": parts,
                "sums": sums,
                "failure": self._window.failure_state(),
                "noted": [each.state_dict() for each in self._window.noted] if parts else [],
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._give_up()
        self.counters = Counters(**state["counters"])
        self.precision.load_state_dict(state["precision"])
        if self._microbatch.automatic:
            self._microbatch.size = state["microbatch"]
        self._compiling.load_state_dict(state["compiling"])
        self._made_compiled = False
        if self._team is not None:  # others than those before begin to deal where those have left off
            self._team.dealt = dict([state.get("dealt") or (0, 0)]).get(self._team.size, 0)
        window = state["window"]
        self._window = opened(window["parts"], window["failure"], window.get("noted", []))
        if "norms" in window["parts"] and not (window["failure"] or self._summing.knows_norms):
            self.record.add("norms")  # it goes on as it was begun
            self._summing = self._make_summing()
        self._buffers.remember()
        for name, total_so_far in window["sums"].items():
            parameter = self._trained.named[name]
            parameter.grad = total_so_far.to(parameter.device, copy=True)

    # --- filling a window ------------------------------------------------------------------------------------------

    def _use_up(self) -> Iterator[Update]:
        """The updates that what is left of the last batch completes."""
        while self._rest is not None:
            if not self._window.open and self._compiling.due(self.counters.updates, self.samples):
                yield from self._compiled(self._rest)
            update = self._fill()
            if update is not None:
                yield update

    def _compiled(self, rest: Slices) -> Iterator[Update]:
        """As many as can be made by compiled code. In blocks, they are told of as one."""
        make = self._compiling.blocks if self._alone else self._compiling.updates
        self._trained.follow()
        self._trained.clear()
        start = rest.taken
        for made in make(rest, self.samples):
            update = self._told(*made, self._noted(rest, start) if self.columns else [])
            if rest.empty:
                self._rest = None
            start = rest.taken
            yield update
            if self._rest is not rest or self._window.open:
                return

    def _noted(self, rest: Slices, start: int) -> list[Noted]:
        """Of the rows that have been taken since."""
        return [note(rest.batch, self.columns, self.counters.epochs, slice(start, rest.taken))]

    def _pause(self) -> bool:
        """Whether the next update is one to look at."""
        return self._audit.due(self.counters.updates)

    def _told(
        self, part: Part, count: int, made: int, norm: float, lr: list[Any], seconds: float, noted: list[Noted]
    ) -> Update:
        counters = self.counters
        outcome = Outcome(False, lr, lambda: torch.tensor(norm, dtype=torch.float64))
        update = Update(counters.updates, count, outcome, [part], self._asked_late, noted, made)
        update.phases = {"compiled": seconds}
        self._made_compiled = True
        counters.updates += made
        counters.microbatches += made
        counters.samples += count
        self._recall = None
        return update

    def _fill(self) -> Update | None:
        """Takes pieces until an update is complete or the batch is used up."""
        try:
            while (rest := self._rest) is not None:
                if self._room() > 0:
                    self._add_next(rest)
                if self._room() <= 0 or (rest.empty and self.samples is None):
                    update = self._apply() if self._team is None else self._meet(self._team)
                    if update is not None:
                        return update
        except BaseException as error:
            self._fail(error)
            raise
        return None

    def _room(self) -> float:
        """How many samples the window has still to get, here."""
        if self.samples is None:
            return inf
        share = self.samples if self._team is None else self._team.share(self._window, self.samples)
        return share - self._window.samples

    def _add_next(self, rest: Slices) -> None:
        window, limit = self._window, min(self._room(), self._microbatch.size or inf)
        piece, size = rest.take(None if limit == inf else int(limit))
        if rest.empty:
            self._rest = None
        if self.samples is not None and size is None and self._summing.window:
            raise BatchError(_UNCUT.format(samples=self.samples, found="batches that cannot be cut"))
        whole = not window.open and (rest.empty if self.samples is None else size == self.samples)
        self._add(piece, size, alone=whole and self._team is None)
        if self._room() < 0:
            found = f"a batch that cannot be cut, with which there are {window.samples}"
            raise BatchError(_UNCUT.format(samples=self.samples, found=found))

    def _add(self, piece: Any, size: int | None, alone: bool = False) -> None:
        """Adds a piece of `size` samples, if that is known, to the window; `alone` if it will be all of it."""
        started, window = perf_counter(), self._window
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
        self._window.begun, self._evaluation.seconds = True, 0.0
        if self._team is not None:
            self._team.spread.open()
        elif ranks.active():
            raise DistributedError(
                f"a step must know of all ranks when it is made; found {ranks.size()} ranks, and a step that was made "
                "for one process. Call init_process_group first."
            )
        self._trained.follow()
        self._trained.clear()
        self._buffers.remember()
        if "norms" in self.record and not self._summing.knows_norms:
            self._summing = self._make_summing()
        self._summing.begin()
        self._recall = None
        if self._first:
            look_at_modes(self._evaluation.modules)
            if not self._summing.knows_norms:
                self._recall = Recall(self._evaluation, self._microbatch)
        if piece is not None:
            self._audit.look(piece, self._first, self.counters.updates)
            self._first = False  # an error is told again to whoever tries again

    def _sum(self, pieces: Sequence[Any], alone: bool = False) -> list[Part]:
        """Gradients into `.grad`. What is not finite and may be skipped spoils the window, and is no error."""
        window, summing = self._window, self._summing
        if window.failure is not None:
            return [nothing_known(length(piece) or 0, window.parts) for piece in pieces]
        try:
            if alone and isinstance(summing, Plain) and not (self.transforms.on_sum or self._microbatch.automatic):
                part, window.divided = summing.add_mean(pieces[0])
                return [part]
            if self._team is not None and summing.window:
                assert isinstance(summing, OfNumbers)
                return summing.add_with_others(pieces, self._microbatch)
            start = 0 if window.waiting else window.samples
            return self._microbatch.attempt(lambda pieces: summing.add(pieces, start), pieces)
        except (NonFiniteLossError, NonFiniteGradientError) as error:
            if not self._finish.may_skip(error):
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

    def _drop(self) -> None:
        """The samples of the open window have been seen, and that is all."""
        window = self._window
        seen = self.counters.samples + (window.samples if window.waiting else 0) + window.others
        self._give_up()
        self.counters.samples = seen

    def _fail(self, error: BaseException) -> None:
        """Gives up, and tells the other ranks why."""
        self._give_up()
        if self._team is not None and isinstance(error, Exception):
            self._team.tell(error)

    def _give_up(self) -> None:
        """The open window never was, and what is left of the batch is left alone."""
        if self._window.begun:
            self._trained.clear()
            self._buffers.restore()
            self.counters.samples -= sum(len(part) for part in self._window.parts)
            self.counters.microbatches -= len(self._window.parts)
        self._window, self._rest = Window(), None

    # --- with other ranks ------------------------------------------------------------------------------------------

    def _meet(self, team: Team, ended: bool = False) -> Update | None:
        """The update, if the ranks together have its samples."""
        return self._apply() if team.meet(self._window, self.samples, self.tail, ended) else None

    def _until_all_have_ended(self, team: Team) -> Iterator[Update]:
        """This rank's loader has; the others may go on, and wait for it at the end of each window."""
        while True:
            update = self._meet(team, ended=True)
            all_ended = team.all_ended
            if all_ended:  # known before the last update is told of: whoever breaks out has ended an epoch
                self.counters.epochs += 1
                if self.tail == "drop":
                    self._drop()
                team.deal_anew(self._window, self.samples)
            if update is not None:
                yield update
            if all_ended:
                return

    def _all_end(self, team: Team) -> Update | None:
        """An update of what all ranks have, which all ask for."""
        try:
            return self._apply() if team.meet(self._window, None, "update", ended=True) else None
        except BaseException as error:
            self._fail(error)
            raise

    def _compute_with_others(self, team: Team) -> None:
        """The sums of all ranks, in `.grad`."""
        window = self._window
        if not window.begun:
            self._begin(None)
        if self._summing.window:
            self._compute()
            team.agree_again(window)
        window.parts = window.parts or [empty(next(iter(self._trained.named.values())))]
        if self._finish.checks or window.failure is not None:
            window.failure = team.problem(window, self._finish.on_nonfinite == "skip")
        if window.failure is None:
            if isinstance(self._summing, OfNumbers) and self.transforms.references:
                team.compare(self._summing.fingerprint())
            team.spread.reduce(self._trained, self._buffers)

    # --- the update ------------------------------------------------------------------------------------------------

    def _compute(self) -> None:
        """What has waited for the window to be complete."""
        window = self._window
        window.parts = self._sum(window.waiting)
        window.samples = self._counted(window.parts, window.samples if window.sized else None)

    def _apply(self) -> Update:
        started, window = perf_counter(), self._window
        if self._team is not None:
            self._compute_with_others(self._team)
        elif window.waiting:
            self._compute()
        if self._unseen and window.failure is None:
            self._look_back(window)
            self._unseen = False
        if self._recall is not None:
            self._recall.keep_parameters()
        finishing = perf_counter()
        outcome = self._finish(window)
        if outcome.skipped:
            self._trained.clear()
            self._buffers.restore()
        elif self._team is not None:
            self._team.spread.gather()
        if outcome.mask is not None:
            self._buffers.restore_unless(outcome.mask.well)
        update = Update(
            self.counters.updates,
            window.samples + window.others,
            outcome,
            window.parts,
            self._asked_late,
            window.noted,
            agreed=window.agreed,
        )
        self.counters.samples += window.others
        self.counters.updates += not outcome.skipped
        self.counters.skipped += outcome.skipped
        self._window = Window()
        ended, forward = perf_counter(), self._evaluation.seconds
        gradients = window.seconds + finishing - started - forward
        update.phases = {"forward": forward, "gradients": gradients, "optimizer": ended - finishing}
        return update

    def _look_back(self, window: Window) -> None:
        """What the first window tells of mistakes."""
        pieces = [len(part) for part in window.parts if len(part)]
        look_at_batch_norm(self._evaluation.modules, pieces * (1 if self._team is None else 2))
        look_at_reach(self._trained.owned, noise=bool(self.transforms.on_sum))
        look_at_weights(self.transforms, [part.weights for part in window.parts], self._team is not None)

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
        if not self.transforms.weighs and "norms" not in self.record:
            return Plain(self._evaluation)
        kind = Weighted if self.transforms.grouping is None else Grouped
        return kind(self._evaluation, self.transforms, "norms" in self.record, self._team)


_UNCUT = (
    "samples={samples} must be met exactly; found {found}. Use samples=None, or batches whose tensors have one row per "
    "sample."
)
