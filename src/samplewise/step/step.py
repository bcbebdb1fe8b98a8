"""`sw.Step`: what one update is, as a value."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from math import inf
from typing import Any

import torch
from torch import nn

from samplewise import ranks
from samplewise.engine.replicas import inner
from samplewise.errors import BatchError, DistributedError
from samplewise.losses import as_loss_fn
from samplewise.step.audit import Audit
from samplewise.step.columns import Noted, note
from samplewise.step.compiled.compiling import Compiling
from samplewise.step.evaluation import Evaluation
from samplewise.step.finish import Finish
from samplewise.step.maker import Maker
from samplewise.step.microbatch import Auto, Microbatch
from samplewise.step.options import check_options, check_scheduler
from samplewise.step.parameters import Trained
from samplewise.step.precision import Precision
from samplewise.step.rules import Rule, as_optimizer
from samplewise.step.slices import Slices
from samplewise.step.spread import Strategy
from samplewise.step.team import Team, team_of
from samplewise.step.update import Totals, Update
from samplewise.step.window import Counters, Window
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

    @ranks.telling()
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
        self._trained = Trained(optimizer, modules, None if team is None else team.spread.leaves)
        self.precision = Precision(precision)
        self._microbatch = Microbatch(microbatch, modules, self._trained)
        losses = self.loss_fn if team is None else team.spread.around(self.loss_fn)
        self._evaluation = Evaluation(modules, self._trained, losses, self.precision, self._microbatch.budget)
        self._finish = Finish(
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
        self._maker = Maker(*parts, self.transforms, self.record)
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
        self._rest: Slices | None = None  # of the last batch, while it is not used up
        self._alone = False  # nobody looks in between
        self._made_compiled = False

    @property
    def counters(self) -> Counters:
        """What it has done so far."""
        return self._maker.counters

    @property
    def columns(self) -> dict[str, Hashable]:
        """name -> key of the batch: what `update.columns` holds of it."""
        return self._maker.columns

    @columns.setter
    def columns(self, columns: dict[str, Hashable]) -> None:
        self._maker.columns = columns

    @property
    def _window(self) -> Window:
        """The open one."""
        return self._maker.window

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

    @ranks.telling()
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
            self._team = team_of(self.model, "ddp", self._evaluation.modules, self.settings)
            assert self._team is not None
            self._team.check_alike(self._trained, self.optimizer)
            self._maker.join(self._team)
            self._compiling.mode = False

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
            for number, batch in enumerate(loader):
                self._rest = batch if isinstance(batch, Slices) else Slices(batch, number=number)
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
            self._maker.drop()

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
        rest = Slices(batch)
        try:
            while not rest.empty:
                self._maker.add(*rest.take(self._microbatch.size))
        except BaseException as error:
            self._fail(error)
            self._check_not_empty(rest, error)
            raise

    def apply(self) -> Update:
        """One update from what has been accumulated. Of several ranks all must do so; some may have nothing."""
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
        """Counters, loss scale, the microbatch that was found, and an open window as gradient sums. Samples that have
        not been computed yet are not in it: the first of them is number `counters.samples`. Model, optimizer and
        scheduler have state dicts of their own. window=False leaves the open window out: see `window_state`.
        """
        if window and self._team is not None and self._window.open:
            raise DistributedError(
                "a step of several ranks must be saved between two updates; found an open window, of which each rank "
                "has a part. Save after an update; or what all have, state_dict(window=False), and on each rank its "
                "own window_state()."
            )
        return {
            "counters": asdict(self.counters),
            "precision": self.precision.state_dict(),
            "microbatch": self._microbatch.size,
            "compiling": self._compiling.state_dict(),
            "dealt": [] if self._team is None else [self._team.size, self._team.dealt],
            "window": self._maker.state_dict() if window else Maker.NO_WINDOW,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._give_up()
        self._maker.counters = Counters(**state["counters"])
        self.precision.load_state_dict(state["precision"])
        if self._microbatch.automatic:
            self._microbatch.size = state["microbatch"]
        self._compiling.load_state_dict(state["compiling"])
        self._made_compiled = False
        if self._team is not None:  # others than those before begin to deal where those have left off
            self._team.dealt = dict([state.get("dealt") or (0, 0)]).get(self._team.size, 0)
            self._team.carried = 0
        self._maker.load_state_dict(state["window"])

    def window_state(self) -> dict[str, Any]:
        """Of several ranks: what this one has of the open window, for itself among as many as now."""
        assert self._team is not None
        shares = self._team.state(self._window)
        return {"counters": asdict(self.counters), "shares": shares, "window": self._maker.state_dict()}

    def load_window_state(self, state: dict[str, Any]) -> None:
        """After `load_state_dict`."""
        assert self._team is not None
        self._team.check_own(state["shares"])
        self._maker.counters = Counters(**state["counters"])
        self._maker.load_state_dict(state["window"])
        self._team.load(state["shares"], self._window)

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
        self._maker.check_alone()
        make = self._compiling.blocks if self._alone else self._compiling.updates
        self._trained.follow()
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

    def _noted(self, rest: Slices, start: int) -> list[Noted]:
        """Of the rows that have been taken since."""
        return [note(rest.batch, self.columns, self.counters.epochs, slice(start, rest.taken))]

    def _pause(self) -> bool:
        """Whether the next update is one to look at."""
        return self._audit.due(self.counters.updates)

    def _fill(self) -> Update | None:
        """Takes pieces until an update is complete or the batch is used up."""
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
        """How many samples the window has still to get, here."""
        if self.samples is None:
            return inf
        share = self.samples if self._team is None else self._team.share(self._window, self.samples)
        return share - self._window.samples

    def _add_next(self, rest: Slices) -> None:
        window, limit = self._window, min(self._room(), self._microbatch.size or inf)
        piece, size = rest.take(None if limit == inf else int(limit))
        if size == 0:  # may be left waiting in a window, so that the error would come with a later batch
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
            found = f"a batch that cannot be cut, with which there are {window.samples}"
            raise BatchError(_UNCUT.format(samples=self.samples, found=found))

    def _check_not_empty(self, rest: Slices, error: BaseException | None = None) -> None:
        """Called where something has failed: looking at each batch would cost microseconds."""
        if rest.rows == 0:
            number, epoch = rest.number, self.counters.epochs
            where = "" if number is None else f", batch {number} of epoch {epoch}, both counted from 0"
            raise BatchError(
                f"a batch must have at least one sample; found one without any{where}. See what the data set, sampler "
                "or collate_fn returns there, or leave the batch out."
            ) from error

    def _fail(self, error: BaseException) -> None:
        """Gives up, and tells the other ranks why."""
        self._give_up()
        if self._team is not None and isinstance(error, Exception):
            self._team.tell(error)

    def _give_up(self) -> None:
        """The open window never was, and what is left of the batch is left alone."""
        self._maker.give_up()
        self._rest = None

    # --- with other ranks ------------------------------------------------------------------------------------------

    def _meet(self, team: Team, ended: bool = False) -> Update | None:
        """The update, if the ranks together have its samples."""
        return self._maker.update() if team.meet(self._window, self.samples, self.tail, ended) else None

    def _until_all_have_ended(self, team: Team) -> Iterator[Update]:
        """This rank's loader has; the others may go on, and wait for it at the end of each window."""
        while True:
            update = self._meet(team, ended=True)
            all_ended = team.all_ended
            if all_ended:  # known before the last update is told of: whoever breaks out has ended an epoch
                self.counters.epochs += 1
                if self.tail == "drop":
                    self._maker.drop()
                team.deal_anew(self._window, self.samples)
            if update is not None:
                yield update
            if all_ended:
                return

    def _all_end(self, team: Team) -> Update | None:
        """An update of what all ranks have, which all ask for."""
        try:
            return self._maker.update() if team.meet(self._window, None, "update", ended=True) else None
        except BaseException as error:
            self._fail(error)
            raise


_UNCUT = (
    "samples={samples} must be met exactly; found {found}. Use samples=None, or batches whose tensors have one row per "
    "sample."
)
