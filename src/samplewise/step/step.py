"""`sw.Step`: a training step, which turns batches into parameter updates."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from math import inf
from typing import Any

import torch
from torch import nn

from samplewise.core.losses import as_loss_fn
from samplewise.distributed.ddp import inner
from samplewise.distributed.group import current_group, errors_on_all_ranks
from samplewise.errors import BatchError, DistributedError, LoaderStopped
from samplewise.step.amp import MixedPrecision
from samplewise.step.apply import UpdateApplier
from samplewise.step.arguments import check_options, check_scheduler
from samplewise.step.audit import Audit
from samplewise.step.batch_columns import BatchColumns, note
from samplewise.step.batch_cursor import BatchCursor
from samplewise.step.compiled.compiling import Compiling
from samplewise.step.distributed_window import DistributedWindow, team_of
from samplewise.step.forward import LossEvaluator
from samplewise.step.functional_optim import Rule, as_optimizer
from samplewise.step.microbatch import Auto, Microbatch
from samplewise.step.parameters import TrainedParameters
from samplewise.step.strategy import Strategy
from samplewise.step.update import Totals, Update
from samplewise.step.window import Counters, Window
from samplewise.step.window_builder import WindowBuilder
from samplewise.transforms.chain import as_chain


class Step:
    """Training step: accumulates gradients over `samples` samples and updates the parameters.

        for update in step.over(loader):   # exactly one update per iteration
            ...
        step.run(loader)                   # all updates of the loader; returns their totals
        step(batch)                        # one batch: returns the updates that this batch completes
        step.flush()                       # ... and one update from the samples that remain
        step.accumulate(batch)             # manual accumulation: no update is made
        step.apply()                       # ... until this call

    model, optimizer, loss_fn: `loss_fn(model, batch)` returns losses (B,), or (losses, counts) if each sample has its
    own denominator. The last element of the tuple may be a dict of columns (B,) for `update.columns`. For batches
    (x, y), loss_fn may be a criterion such as nn.CrossEntropyLoss(). The optimizer may be a function
    (params, gradients) -> None, such as sw.sgd(0.1).

    Three sizes are independent of each other: the loader's batch; `samples` per update (None: one update per batch);
    `microbatch`, the number of samples per forward and backward pass (None: as they arrive; "auto" or sw.auto(memory):
    as many as fit into memory). The gradient of an update is Σ c·g / Σ counts over its samples, for any batch and
    microbatch size.

    transforms: coefficients for each sample's gradient before the sum, and noise on the sum: see `chain`.
    tail: handling of samples at the end of a loader that are too few for an update: "update" with the samples
    available (default), "drop" them, or "carry" them into the next pass.
    precision: None (no autocast by the step), "32", "bf16-mixed", or "16-mixed" with a loss scale.
    max_grad_norm: upper bound on the norm of the update's gradient.
    scheduler: learning rate scheduler, stepped once per update.
    on_nonfinite: "raise" before the update (default), "skip" the update, or "ignore".
    audit: number of updates between two audits, in which one sample is computed alone and compared with its result in
    the batch. None: only at the first update. False: never.
    compile: False (default); True compiles forward pass, backward pass, transforms and the optimizer's update into one
    graph, from the second update on; "auto" does so only if updates have one sample, after 1,000 updates. If
    compilation is not possible, the step continues uncompiled, and `step.compiled` gives the reason.
    record: {"norms"} records `update.norms` if no transform needs them.
    strategy: how several processes share the model. "ddp": each rank has the whole model, initialized from rank 0;
    a DistributedDataParallel is recognised without `strategy`. "fsdp": each rank keeps a shard of every parameter, see
    sw.fsdp; leave `strategy` out for a model that is already sharded. `samples` counts the samples of all ranks, and
    gradients are reduced once per update.

    If an exception is raised, the open window is discarded, and parameters, optimizer and buffers are as before it.
    """

    @errors_on_all_ranks()
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Rule,
        loss_fn: Any,
        samples: int | None = None,
        microbatch: int | str | Auto | None = None,
        transforms: Any = (),
        *,
        tail: str = "update",
        scheduler: Any = None,
        max_grad_norm: float | None = None,
        on_nonfinite: str = "raise",
        audit: int | bool | None = None,
        precision: str | None = None,
        compile: bool | str = False,
        strategy: Strategy = None,
        record: Collection[str] = (),
    ):
        check_options(samples, tail, on_nonfinite, max_grad_norm, record)
        check_scheduler(scheduler, optimizer)
        self.model = model
        self.loss_fn = as_loss_fn(loss_fn)
        self.samples = samples
        self.tail = tail
        self.transforms = as_chain(transforms)
        self.record = set(record)
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
        self._team = team = team_of(model, strategy, modules, self.settings, optimizer)
        everything = dict.fromkeys(p for module in modules for p in module.parameters())
        optimizer = as_optimizer(optimizer, everything if team is None else team.spread.owned(everything))
        self._trained = TrainedParameters(optimizer, modules, None if team is None else team.spread.leaves)
        self.precision = MixedPrecision(precision)
        self._microbatch = Microbatch(microbatch, modules, self._trained)
        losses = self.loss_fn if team is None else team.spread.around(self.loss_fn)
        self._evaluation = LossEvaluator(modules, self._trained, losses, self.precision, self._microbatch.budget)
        self._finish = UpdateApplier(
            self._trained,
            optimizer,
            scheduler,
            self.precision,
            self.transforms.on_sum,
            max_grad_norm,
            on_nonfinite,
            team,
        )
        self._audit = Audit(self._evaluation, audit, self.transforms.measures)
        parts = self._evaluation, self._microbatch, self._finish, self._audit
        self._maker = WindowBuilder(*parts, self.transforms, self.record)
        self._compiling = Compiling(
            compile if team is None else False,
            self._evaluation,
            self._finish,
            self._microbatch,
            self.transforms,
            self.record,
            self._pause,
            bool(audit),
        )
        if team is not None:
            team.check_alike(self._trained, optimizer)
        self._rest: BatchCursor | None = None  # the current batch, until all of its samples are used
        self._alone = False  # inside run(): the caller does not see single updates, so compiled code may run in blocks
        self._made_compiled = False

    @property
    def counters(self) -> Counters:
        """Counters of samples, microbatches, updates, skipped updates and epochs."""
        return self._maker.counters

    @property
    def columns(self) -> dict[str, Hashable]:
        """Batch columns to record in `update.columns`: a dict from column name to key of the batch."""
        return self._maker.columns

    @columns.setter
    def columns(self, columns: dict[str, Hashable]) -> None:
        self._maker.columns = columns

    @property
    def _window(self) -> Window:
        """The open window."""
        return self._maker.window

    @property
    def optimizer(self) -> Any:
        return self._finish.optimizer

    @property
    def scheduler(self) -> Any:
        return self._finish.scheduler

    @property
    def compiled(self) -> str:
        """State of compilation: "compiled", or the reason why updates are not compiled."""
        if self._team is not None and self.settings["compile"]:
            return f"updates are compiled only in a single process; found {self._team.size} ranks"
        compiling = self._compiling
        problem = compiling.state_dict()["given_up"]
        if problem is not None:
            return problem
        if self._made_compiled:
            return "compiled"
        if compiling.mode is False:
            return "compile=False"
        if compiling.mode == "auto" and self.samples != 1:
            return "compile='auto' compiles only steps with samples=1"
        return f"not compiled yet, after {self.counters.updates} updates"

    @property
    def has_pending_samples(self) -> bool:
        """True if the window holds samples that are not part of an update yet."""
        return self._window.open

    @property
    def has_deferred_samples(self) -> bool:
        """True if the open window holds samples that are not computed yet; `state_dict` does not contain them."""
        return bool(self._window.waiting)

    @property
    def consumed(self) -> int:
        """Number of samples consumed from the current batch; 0 if no partly used batch is left."""
        return 0 if self._rest is None else self._rest.taken

    @errors_on_all_ranks()
    def attach_process_group(self) -> None:
        """Attach a process group that was initialized after this step was created, as with strategy="ddp". Call it
        before the first update. No effect with one process or if the step already has a group.
        """
        if self._team is None and current_group().distributed:
            if self._strategy not in (None, "ddp"):
                raise DistributedError(
                    f"the process group must exist before a step with strategy={self._strategy!r} is created; found "
                    "that it was initialized later. Call torch.distributed.init_process_group() before Step(...)."
                )
            self._team = team_of(self.model, "ddp", self._evaluation.modules, self.settings)
            assert self._team is not None
            self._team.check_alike(self._trained, self.optimizer)
            self._maker.join(self._team)
            self._compiling.mode = False

    def unshard(self) -> None:
        """Unshard the model on every rank, for forward passes outside of an update such as validation."""
        if self._team is not None:
            self._team.spread.open()

    @contextmanager
    def slow_compile_notice(self, tell: Callable[[str], None]) -> Iterator[None]:
        """Context manager that passes notices about slow compilation to `tell(line)` instead of printing them. `tell`
        is called from another thread.
        """
        before = self._compiling.tell
        self._compiling.tell = tell
        try:
            yield
        finally:
            self._compiling.tell = before

    # --- updates ---------------------------------------------------------------------------------------------------

    def over(self, loader: Iterable[Any]) -> Iterator[Update]:
        """Iterate over the updates of a loader. After `break`, unused samples of the current batch are kept for the
        next call.
        """
        yield from self._use_up()
        try:
            for number, batch in enumerate(loader):
                self._rest = batch if isinstance(batch, BatchCursor) else BatchCursor(batch, number=number)
                yield from self._use_up()
            if self._team is not None:
                yield from self._until_all_have_ended(self._team)
                return
        except LoaderStopped:
            return  # the open window is kept
        except Exception as error:  # includes exceptions of the loader
            self._fail(error)
            raise
        self.counters.epochs += 1
        if self._window.open and self.tail == "update":
            yield self.apply()
        elif self.tail == "drop":
            self._maker.drop()

    def run(self, loader: Iterable[Any]) -> Totals:
        """Make all updates of `over(loader)` and return their totals."""
        totals = Totals()
        self._alone = True
        try:
            for update in self.over(loader):
                totals.add(update)
        finally:
            self._alone = False
        return totals

    def __call__(self, batch: Any) -> list[Update]:
        """Make and return the updates that this batch completes. Remaining samples stay in the window until the next
        batch or `flush`.
        """
        updates = list(self._use_up())
        self._rest = BatchCursor(batch)
        return updates + list(self._use_up())

    def flush(self) -> Update | None:
        """Make one update from the samples in the open window; None if there are none. With several ranks, every rank
        must call it.
        """
        if self._team is None:
            return self.apply() if self._window.open else None
        update = self._all_end(self._team)
        self._team.deal_anew(self._window, self.samples)
        return update

    def accumulate(self, batch: Any) -> None:
        """Add a batch of any size to the window without making an update."""
        rest = BatchCursor(batch)
        try:
            while not rest.empty:
                self._maker.add(*rest.take(self._microbatch.size))
        except BaseException as error:
            self._fail(error)
            self._check_not_empty(rest, error)
            raise

    def apply(self) -> Update:
        """Make one update from the accumulated samples. With several ranks, every rank must call it; some ranks may
        have no samples.
        """
        update = None
        if self._team is not None:
            update = self._all_end(self._team)
        elif self._window.open:
            try:
                update = self._maker.update()
            except BaseException:
                self._give_up()
                raise
        if update is None:
            raise BatchError("an update must have samples; found none accumulated. Call accumulate(batch) first.")
        return update

    # --- state -----------------------------------------------------------------------------------------------------

    def state_dict(self, window: bool = True) -> dict[str, Any]:
        """State of the step: counters, loss scale, the microbatch size found by "auto", and the open window as gradient
        sums. Samples that are not computed yet are not included: the first of them is number `counters.samples`. Model,
        optimizer and scheduler have their own state dicts. window=False leaves out the open window: see `window_state`.
        """
        if window and self._team is not None and self._window.open:
            raise DistributedError(
                "a step with several ranks must be saved between two updates; found an open window, of which each rank "
                "holds a part. Save after an update; or save state_dict(window=False), which is equal on all ranks, "
                "and window_state() on each rank."
            )
        return {
            "counters": asdict(self.counters),
            "precision": self.precision.state_dict(),
            "microbatch": self._microbatch.size,
            "compiling": self._compiling.state_dict(),
            "dealt": [] if self._team is None else [self._team.size, self._team.dealt],
            "window": self._maker.state_dict() if window else WindowBuilder.NO_WINDOW,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Discard the open window and restore what `state_dict` returned."""
        self._give_up()
        self._maker.counters = Counters(**state["counters"])
        self.precision.load_state_dict(state["precision"])
        if self._microbatch.automatic:
            self._microbatch.size = state["microbatch"]
        self._compiling.load_state_dict(state["compiling"])
        self._made_compiled = False
        if self._team is not None:  # the position in the round over ranks is valid only for the same number of ranks
            self._team.dealt = dict([state.get("dealt") or (0, 0)]).get(self._team.size, 0)
            self._team.carried = 0
        self._maker.load_state_dict(state["window"])

    def window_state(self) -> dict[str, Any]:
        """State of this rank's part of the open window; only the same rank of as many ranks can load it."""
        assert self._team is not None
        shares = self._team.state(self._window)
        return {"counters": asdict(self.counters), "shares": shares, "window": self._maker.state_dict()}

    def load_window_state(self, state: dict[str, Any]) -> None:
        """Restore this rank's part of the open window. Call it after `load_state_dict`."""
        assert self._team is not None
        self._team.check_own(state["shares"])
        self._maker.counters = Counters(**state["counters"])
        self._maker.load_state_dict(state["window"])
        self._team.load(state["shares"], self._window)

    # --- filling a window ------------------------------------------------------------------------------------------

    def _use_up(self) -> Iterator[Update]:
        """Make the updates that the remaining samples of the current batch complete."""
        while self._rest is not None:
            if not self._window.open and self._compiling.due(self.counters.updates, self.samples):
                yield from self._compiled(self._rest)
            update = self._fill()
            if update is not None:
                yield update

    def _compiled(self, rest: BatchCursor) -> Iterator[Update]:
        """Make as many updates as possible with compiled code. Inside run(), a block of updates is one `Update`."""
        self._maker.check_alone()
        make = self._compiling.blocks if self._alone else self._compiling.updates
        self._trained.refresh()
        self._trained.clear()
        start = rest.taken
        for made in make(rest, self.samples):
            update = self._maker.tell(*made, self._noted(rest, start) if self.columns else [])
            self._made_compiled = True
            if rest.empty:
                self._rest = None
            start = rest.taken
            yield update
            if self._rest is not rest or self._window.open:
                return

    def _noted(self, rest: BatchCursor, start: int) -> list[BatchColumns]:
        """Batch columns of the rows consumed since row `start`."""
        return [note(rest.batch, self.columns, self.counters.epochs, slice(start, rest.taken))]

    def _pause(self) -> bool:
        """True if the next update is audited, which compiled code cannot do."""
        return self._audit.due(self.counters.updates)

    def _fill(self) -> Update | None:
        """Add microbatches to the window until an update is complete (returned) or the batch is used up (None)."""
        try:
            while (rest := self._rest) is not None:
                if self._room() > 0:
                    self._add_next(rest)
                if self._room() <= 0 or (rest.empty and self.samples is None):
                    update = self._maker.update() if self._team is None else self._meet(self._team)
                    if update is not None:
                        return update
        except BaseException as error:
            self._fail(error)
            raise
        return None

    def _room(self) -> float:
        """Number of samples that this rank must still add to the window; inf for samples=None."""
        if self.samples is None:
            return inf
        share = self.samples if self._team is None else self._team.share(self._window, self.samples)
        return share - self._window.samples

    def _add_next(self, rest: BatchCursor) -> None:
        window = self._window
        limit = min(self._room(), self._microbatch.size or inf)
        piece, size = rest.take(None if limit == inf else int(limit))
        if size == 0:  # an empty microbatch may be deferred, and would then fail only with a later batch
            self._check_not_empty(rest)
        if rest.empty:
            self._rest = None
        if self.samples is not None and size is None and self._maker.sees_windows_whole:
            raise BatchError(_UNCUT.format(samples=self.samples, found="batches that cannot be cut"))
        whole = not window.open and (rest.empty if self.samples is None else size == self.samples)
        try:
            self._maker.add(piece, size, alone=whole and self._team is None)
        except Exception as error:
            self._check_not_empty(rest, error)
            raise
        if self._room() < 0:
            found = f"{window.samples} samples after a batch that cannot be cut"
            raise BatchError(_UNCUT.format(samples=self.samples, found=found))

    def _check_not_empty(self, rest: BatchCursor, error: BaseException | None = None) -> None:
        """Raise BatchError if the batch has no samples. Called only after a failure: checking each batch would cost
        microseconds.
        """
        if rest.rows == 0:
            number = rest.number
            where = ""
            if number is not None:
                where = f", batch {number} of epoch {self.counters.epochs}, both counted from 0"
            raise BatchError(
                f"a batch must have at least one sample; found an empty batch{where}. Check what the dataset, sampler "
                "or collate_fn returns there, or leave the batch out."
            ) from error

    def _fail(self, error: BaseException) -> None:
        """Discard the open window, and send the error to the other ranks."""
        self._give_up()
        if self._team is not None and isinstance(error, Exception):
            self._team.tell(error)

    def _give_up(self) -> None:
        """Discard the open window and the remaining samples of the current batch."""
        self._maker.give_up()
        self._rest = None

    # --- several ranks ---------------------------------------------------------------------------------------------

    def _meet(self, team: DistributedWindow, ended: bool = False) -> Update | None:
        """Make the update if all ranks together have its samples; otherwise return None."""
        return self._maker.update() if team.meet(self._window, self.samples, self.tail, ended) else None

    def _until_all_have_ended(self, team: DistributedWindow) -> Iterator[Update]:
        """Take part in the collectives of each window after this rank's loader has ended, until all loaders have."""
        while True:
            update = self._meet(team, ended=True)
            all_ended = team.all_ended
            if all_ended:  # before the last update is yielded, so that a `break` there still ends the epoch
                self.counters.epochs += 1
                if self.tail == "drop":
                    self._maker.drop()
                team.deal_anew(self._window, self.samples)
            if update is not None:
                yield update
            if all_ended:
                return

    def _all_end(self, team: DistributedWindow) -> Update | None:
        """Make an update from the samples of all ranks; None if no rank has any. Every rank must call it."""
        try:
            return self._maker.update() if team.meet(self._window, None, "update", ended=True) else None
        except BaseException as error:
            self._fail(error)
            raise


_UNCUT = (
    "each update must have exactly samples={samples} samples; found {found}. Use samples=None, or batches whose "
    "tensors have one row per sample."
)
