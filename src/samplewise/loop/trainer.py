"""`sw.Trainer`: training loop with validation, log, checkpoints and exact resume."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from samplewise.core.atomic_io import absolute
from samplewise.core.criteria import Criterion
from samplewise.core.devices import moved
from samplewise.core.losses import per_sample
from samplewise.core.snapshot import modes
from samplewise.distributed.ddp import inner
from samplewise.distributed.group import current_group, errors_on_all_ranks, on_every_rank
from samplewise.distributed.launch import join
from samplewise.errors import BatchError, CheckpointError
from samplewise.loop.callbacks import ModelCheckpoint
from samplewise.loop.checkpoint.state import (
    check_compatible,
    check_savable,
    class_names,
    load_errors,
    load_part,
    load_random_states,
    load_rank_state,
    part_state,
    rank_state,
)
from samplewise.loop.data.loader import DataPosition, ResumableLoader
from samplewise.loop.data.rng import reseed, seed_of, seeded
from samplewise.loop.data.sharding import RankShard
from samplewise.loop.durations import Duration, duration
from samplewise.loop.events import Listeners
from samplewise.loop.meters import LossMeter
from samplewise.loop.metrics import OutputRecorder, WeightedMean, as_metrics, joined, results
from samplewise.loop.nested_fit import only_fit_of
from samplewise.loop.profiling import LayerGradNorms, PhaseTimer, peak_memory
from samplewise.loop.progress import Progress, Silent, make_progress
from samplewise.loop.run_dir import RunDirectory
from samplewise.loop.run_metadata import about
from samplewise.loop.stopping import StopController
from samplewise.step.step import Step
from samplewise.step.update import Update
from samplewise.step.window import BatchCursor


class Trainer:
    """Training loop over a loader, with validation, log, checkpoints and exact resume.

    run: directory for the log and the checkpoints; None (default) to write neither.
    callbacks: see `samplewise.loop.events`. With a run directory and without a ModelCheckpoint among them, a checkpoint
    is saved after every epoch.
    metrics: dict of name -> function (outputs, batch), or object with update, compute and reset.
    device: "auto" (default) for CUDA if available, else MPS, else the CPU; or a torch device.
    seed: seed of the order of samples and their random augmentation, together with the epoch and the sample's index.
    log_every: number of updates between two log lines, 50 by default. The loss is read from the device (host sync) only
    for a log line.
    progress: False for no progress display.
    fast_dev_run: True for a test run: `fit` makes one update with the first batch and validates on one batch. It writes
    no files and does not resume; epochs and updates are ignored.
    overfit: use only the first `overfit` batches of epoch 0 in every epoch, in the same order.
    sharded: True if the loaders of each rank have only its own samples. By default the trainer shards them over ranks.
    timeout: seconds after which the rendezvous and collectives fail, if the trainer initializes the process group.
    """

    @errors_on_all_ranks()
    def __init__(
        self,
        step: Step,
        run: str | Path | None = None,
        callbacks: Iterable[Any] = (),
        *,
        metrics: Mapping[str, Any] | None = None,
        device: str | torch.device = "auto",
        seed: int = 0,
        log_every: int = 50,
        progress: bool = True,
        fast_dev_run: bool = False,
        overfit: int | None = None,
        sharded: bool = False,
        timeout: float | None = None,
    ):
        _check_given(step, callbacks, metrics)
        _check_options(log_every, fast_dev_run, overfit)
        self.fast_dev_run = fast_dev_run
        self.overfit = overfit
        self.step = step
        self.model = inner(step.model)
        self.seed = seed
        self.log_every = log_every
        self.run = None if run is None else absolute(run)
        self.device = join(device, timeout)
        self.model.to(self.device)
        step.attach_process_group()
        if isinstance(step.loss_fn, (nn.Module, Criterion)):
            step.loss_fn.to(self.device)
        self._metrics = as_metrics(metrics or {}, self.device)
        self._wants_progress = progress
        # ModelCheckpoint comes last, so that it saves the other callbacks after they have handled an event.
        callbacks = sorted(callbacks, key=lambda c: isinstance(c, ModelCheckpoint))
        if self.run is not None:
            callbacks = [LayerGradNorms(), *callbacks]
            if not any(isinstance(c, ModelCheckpoint) for c in callbacks):
                callbacks.append(ModelCheckpoint())
        self._listeners = Listeners(callbacks, trainer=self, step=step, model=self.model)
        self._progress: Progress = Silent()
        self._leaving = StopController(step)
        self._share = None if sharded else RankShard(current_group().rank, current_group().size)
        self._files = None if self.run is None or fast_dev_run else RunDirectory(self.run)
        self.loader: Iterable[Any] | None = None  # loader of the last call of fit
        self._feed: ResumableLoader | None = None
        self._validation: ResumableLoader | None = None
        self._epoch = step.counters.epochs
        self._running = LossMeter()
        self._clock = PhaseTimer()

    # --- the loop --------------------------------------------------------------------------------------------------

    def fit(
        self,
        loader: Iterable[Any],
        validate: Iterable[Any] | None = None,
        epochs: int | str | None = None,
        updates: int | None = None,
        resume: bool = False,
    ) -> str:
        """Train up to a total number of epochs or updates, and return the reason for the end.

        loader: training batches.
        validate: validation batches, evaluated after every epoch; None (default) for no validation.
        epochs, updates: exactly one is given. `epochs` may be an int, or a str such as "2ep" or "500up". Epochs and
        updates of a resumed run or of an earlier call count.
        resume: True to continue from the newest checkpoint in the run directory, if there is one.
        """
        with (
            only_fit_of(self.step),
            self._closing(),
            self._rehearsing(),
            self.step.slow_compile_notice(lambda line: self._progress.line(line)),
        ):
            until = duration(epochs, updates)
            feed = self._open(loader, resume)
            if self.fast_dev_run:
                until = Duration(epochs=self._epoch + 1)
            shown = self._wants_progress and current_group().rank == 0
            self._progress = make_progress(shown, self._expected(until), self.step.counters.updates)
            self._listeners.emit("on_fit_start")
            self._clock.start()
            self._leaving.agree()
            while self._goes_on(until):
                epoch = self._epoch
                self._listeners.emit("on_epoch_start", epoch=epoch)
                with self._leaving.windows(feed):
                    for update in self.step.over(self._batches(feed)):
                        self._note(update)
                        self._listeners.emit("on_update", update=update)
                        self._leaving.agree()
                        if not self._goes_on(until):
                            break
                    if self.step.counters.epochs > epoch:  # otherwise the epoch was interrupted
                        metrics = self._end_of_epoch(validate)
                        self._listeners.emit("on_epoch_end", epoch=epoch, metrics=metrics)
                        self._leaving.agree()
            done = "fast_dev_run is done" if self.fast_dev_run else until.done()
            reason = self._leaving.reason or done
            self._end(reason)
        return reason

    def stop(self, reason: str) -> None:
        """End the training after this update, on all ranks. `fit` returns the reason."""
        self._leaving.ask(reason)

    def _goes_on(self, until: Duration) -> bool:
        """Return True if no stop was requested and the duration is not reached."""
        return self._leaving.reason is None and not until.reached(self._epoch, self.step.counters.updates)

    @contextmanager
    def _rehearsing(self) -> Iterator[None]:
        """In a fast_dev_run, make one update of the first batch, independent of its size."""
        samples = self.step.samples
        tail = self.step.tail
        if self.fast_dev_run:
            self.step.samples = None
            self.step.tail = "update"
        try:
            yield
        finally:
            self.step.samples = samples
            self.step.tail = tail

    def _batches(self, feed: ResumableLoader) -> Iterator[Any]:
        """Return the batches of the rest of the epoch. Collective."""
        with self._leaving.fetching():
            feed.look(self._epoch)  # not in the generator: it is collective, and ranks pull batches independently
        return self._slices(feed)

    def _slices(self, feed: ResumableLoader) -> Iterator[Any]:
        batches = self._leaving.until_left(feed.epoch(self._epoch, back=not self.step.has_pending_samples), feed)
        for batch, used in self._clock.waiting(batches):
            yield BatchCursor(moved(batch, self.device), used, feed.number)

    def _expected(self, until: Duration) -> int | None:
        """Number of updates at the end of the training, for the progress bar; None if unknown."""
        assert self._feed is not None
        if until.updates is not None or until.epochs is None:
            return until.updates
        per_epoch = self._feed.updates_of(self.step.samples)
        if per_epoch is None:
            return None
        return self.step.counters.updates + per_epoch * (until.epochs - self._epoch)

    def _next_epoch(self) -> None:
        assert self._feed is not None
        self._epoch += 1
        self._feed.go_to(DataPosition())

    def _note(self, update: Update) -> None:
        """Record an update: data position, meters, timer and, every `log_every` updates, a log line."""
        assert self._feed is not None
        self._feed.mark(self.step.consumed)
        self._running.add(update)
        self._clock.add(update)
        if not update.skipped and self.step.counters.updates % self.log_every == 0:
            self._write_progress()

    def _write_progress(self) -> None:
        done = self.step.counters.updates
        line = self._running.read()
        costs = {"phases": self._clock.read(), "memory": peak_memory(self.device)}
        self.write("train", epoch=self._epoch, update=done, samples=self.step.counters.samples, **line, **costs)
        self._progress.update(self._epoch, done, line["loss"], line["samples_per_second"])

    def _end_of_epoch(self, validate: Iterable[Any] | None) -> dict[str, float]:
        """Validate, write log lines, and return the metrics of the epoch.

        If the training is stopped during validation, a resumed run repeats the validation.
        """
        if self._running.unread:
            self._write_progress()
        if not (self._running.begun or current_group().all_reduce_scalars(self.step.has_pending_samples)[0]):
            raise BatchError(
                f"an epoch must make at least one update; found fewer than samples={self.step.samples} samples in "
                f"epoch {self._epoch}, and tail='drop'. Use a smaller samples=, or tail='update' or tail='carry'."
            )
        found = {} if validate is None else self._validated(validate)
        epoch = self._epoch
        self._next_epoch()
        done = self.step.counters.updates
        trained = self._running.read_epoch()
        self.write("epoch", epoch=epoch, update=done, **trained)
        if validate is not None:
            self.write("validation", epoch=epoch, update=done, **found)
        metrics = {"train_loss": trained["loss"], **found}
        self._progress.epoch(epoch, metrics)
        return {"loss": trained["loss"], **metrics}

    def _validated(self, validate: Iterable[Any]) -> dict[str, float]:
        assert self._feed is not None
        batches = self._validation_batches(validate)
        first = islice(batches, 1) if self.fast_dev_run else batches
        return self._evaluated(self._leaving.until_left(first, self._feed))

    def _end(self, reason: str) -> None:
        """Run on_fit_end, write the last log lines, and wait for the checkpoint and for all ranks."""
        # ModelCheckpoint saves before the last lines are written, so that a resumed log does not contain them.
        self._listeners.emit("on_fit_end", reason=reason)
        if self._running.unread:
            self._write_progress()
        self.write("end", update=self.step.counters.updates, reason=reason)
        if self._files is not None:
            self._files.finish()
        current_group().barrier()  # no rank exits before all are done

    # --- files -----------------------------------------------------------------------------------------------------

    def write(self, kind: str, **fields: Any) -> None:
        """Write a line to the log and call `on_log` of the callbacks."""
        if self._files is not None:
            self._files.write(kind=kind, **fields)
        self._listeners.emit("on_log", kind=kind, fields=fields)

    def save(self) -> Path:
        """Save a checkpoint from which the run can be resumed, and return its path. Call it while `fit` runs."""
        if self.fast_dev_run:
            return Path(os.devnull)
        return self._run_files().save(self._state, self.step.counters.updates)

    def save_model(self, name: str) -> Path:
        """Save the state dict of the model to `name`.ckpt in the run directory, and return its path."""
        if self.fast_dev_run:
            return Path(os.devnull)
        state = {"model": self.model.state_dict(), "update": self.step.counters.updates}
        return self._run_files().save_model(name, state)

    def _run_files(self) -> RunDirectory:
        if self._files is None:
            raise CheckpointError("a checkpoint needs a run directory; found none. Use Trainer(..., run='runs/name').")
        return self._files

    def _state(self, log: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the state for a checkpoint, and that of this rank. Collective.

        log: length of the log in bytes.
        """
        assert self._feed is not None
        check_savable(self.step)
        parts = self._parts()
        states = on_every_rank(lambda: {name: part_state(part) for name, part in parts.items()})
        own = rank_state(self.step)
        position = self._feed.state(self.step.consumed)
        states["trainer"] = {"epoch": self._epoch, **position, "log": log, "seed": self.seed}
        states["classes"] = class_names(parts)
        return states, own

    def _load(self, state: dict[str, Any]) -> int:
        """Load the state of a checkpoint, and return the length in bytes of the log that belongs to it."""
        assert self._feed is not None
        saved = state["trainer"]
        parts = self._parts()
        check_compatible(state, parts, self.seed)
        with load_errors("loader"):
            self._feed.check_data(saved, saved["epoch"])
        for name, part in parts.items():
            with load_errors(name):
                load_part(part, state[name])
        with load_errors("open window"):
            load_rank_state(state["per_rank"], self.step)
        self._epoch = saved["epoch"]
        with load_errors("loader"):
            self._feed.load(saved, self._epoch)
        self.step.counters.epochs = self._epoch  # higher by 1 if the loader was exhausted, which will happen again
        with load_errors("random state"):
            load_random_states(state["per_rank"], self.seed)
        return saved["log"]

    def _parts(self) -> dict[str, Any]:
        """Return the objects with a state dict, by their names in a checkpoint."""
        parts = {
            "model": self.model,
            "optimizer": self.step.optimizer,
            "step": self.step,
            "running": self._running,
            "callbacks": self._listeners,
        }
        if self.step.scheduler is not None:
            parts["scheduler"] = self.step.scheduler
        if isinstance(self.step.loss_fn, nn.Module):
            parts["loss"] = self.step.loss_fn
        return parts

    def _open(self, loader: Iterable[Any], resume: bool) -> ResumableLoader:
        """Open the loader and the run directory, and resume from the newest checkpoint if asked. Collective."""
        if self._feed is None:
            first = 1 if self.fast_dev_run else self.overfit
            self._feed = ResumableLoader(loader, self.seed, first, saved=self._files is not None, share=self._share)
            self._epoch = self.step.counters.epochs
            if current_group().rank:  # random numbers, for example of dropout, must differ from those of rank 0
                reseed(seed_of(self.seed, current_group().rank))
        self.step.counters.epochs = self._epoch  # higher by 1 after a stop in validation, which is repeated
        self.loader = loader
        self._feed.use(loader)
        if self._files is not None:
            self._files.open(resume, self._load)
            self._files.check(*self._state(0))
            self._files.describe(**about(self.step, loader, self.device, seed=self.seed, log_every=self.log_every))
        return self._feed

    @contextmanager
    def _closing(self) -> Iterator[None]:
        """Handle signals and errors; close loaders, files and progress bar on exit."""
        self._leaving = StopController(self.step)
        with self._leaving.at_signals():
            try:
                yield
            except BaseException as error:
                current_group().announce_error(error)
                self._listeners.emit("on_error", error=error)
                raise
            finally:
                with ExitStack() as closing:  # called in reverse order, even if one raises
                    for open_one in (self._files, self._validation, self._feed, self._progress):
                        if open_one is not None:
                            closing.callback(open_one.close)

    # --- evaluation and prediction ---------------------------------------------------------------------------------

    def evaluate(self, loader: Iterable[Any]) -> dict[str, float]:
        """Return the loss, Σ losses / Σ counts over all batches, and the metrics.

        Modules are in eval mode during the call; their modes are restored. With several ranks all must call it: each
        evaluates its shard of the samples, and all get the result.
        """
        with errors_on_all_ranks():
            return self._evaluated(self._validation_batches(loader))

    def _evaluated(self, batches: Iterable[Any]) -> dict[str, float]:
        sums = WeightedMean()
        outputs = OutputRecorder(self.model)
        for metric in self._metrics.values():
            metric.reset()
        with self._looking(), outputs:
            for batch in batches:
                outputs.clear()
                with self.step.precision.autocast(self.device):
                    losses, counts = per_sample(self.step.loss_fn(self.model, batch))
                sums.add(losses, counts)
                for metric in self._metrics.values():
                    metric.update(outputs.last(), batch)
        # Broadcast from rank 0: bit-identical values, so that callbacks on all ranks decide alike.
        return current_group().broadcast_object({"loss": sums.value(), **results(self._metrics)})

    def _validation_batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of epoch 0 of a loader, with the same random numbers in each call."""
        if self._validation is None:
            self._validation = ResumableLoader(loader, self.seed, apart=True, share=self._share)
        self._validation.use(loader)
        self._validation.go_to(DataPosition())
        self._validation.look(0)
        for batch, _ in self._validation.epoch(0):
            yield moved(batch, self.device)

    def predict(self, loader: Iterable[Any]) -> Any:
        """Return the outputs of the model on the CPU, concatenated over all batches.

        The model is called with x for batches (x, y), and with the batch otherwise. Tuples and dicts of tensors keep
        their structure. With several ranks each one predicts all batches of its loader: they are not sharded.
        """
        found = []
        with self._looking():
            for batch in (moved(batch, self.device) for batch in loader):
                with self.step.precision.autocast(self.device):
                    outputs = self.model(batch[0] if isinstance(batch, (tuple, list)) else batch)
                found.append(moved(outputs, torch.device("cpu")))
        if not found:
            raise BatchError(
                "predict needs at least one batch; found none. Pass a list or a DataLoader that is not empty."
            )
        return joined(found)

    @contextmanager
    def _looking(self) -> Iterator[None]:
        """Eval mode, no_grad and seeded random numbers; modes and random state are restored on exit."""
        modules = [self.model]
        if isinstance(self.step.loss_fn, nn.Module):
            modules.append(self.step.loss_fn)
        restore = modes(*modules)
        self.step.unshard()
        try:
            for root in modules:
                for module in root.modules():
                    module.training = False
            with torch.no_grad(), seeded(seed_of(self.seed)):
                yield
        finally:
            restore()


def _check_given(step: Any, callbacks: Any, metrics: Any) -> None:
    if not isinstance(step, Step):
        raise TypeError(
            f"step must be a samplewise Step; found {type(step).__name__}. Use sw.Step(model, optimizer, loss)."
        )
    if not isinstance(callbacks, Iterable):
        raise TypeError(f"callbacks must be a list of objects; found {type(callbacks).__name__}. Pass a list.")
    if metrics is not None and not isinstance(metrics, Mapping):
        raise TypeError(f"metrics must be a dict of names and metrics; found {type(metrics).__name__}. Pass a dict.")


def _check_options(log_every: Any, fast_dev_run: Any, overfit: Any) -> None:
    if type(log_every) is not int or log_every < 1:
        raise ValueError(f"log_every must be a positive number of updates; found {log_every!r}.")
    if not isinstance(fast_dev_run, bool):
        raise ValueError(f"fast_dev_run must be True or False; found {fast_dev_run!r}.")
    if overfit is not None and (type(overfit) is not int or overfit < 1):
        raise ValueError(f"overfit must be a positive number of batches; found {overfit!r}.")
