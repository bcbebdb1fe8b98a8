"""`sw.Trainer`: training loop with validation, log, checkpoints and exact resume."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from samplewise.core.batches import to_device
from samplewise.core.files import absolute
from samplewise.core.losses import Criterion, constants_of
from samplewise.core.state import reseed
from samplewise.core.text import plural
from samplewise.core.validate import CheckedAttributes
from samplewise.errors import BatchError, CheckpointError, TrainingWarning
from samplewise.loop import arguments
from samplewise.loop.callbacks import LayerGradNorms, ModelCheckpoint, Upload
from samplewise.loop.checkpoint.state import RunState, savable
from samplewise.loop.data.loader import DataPosition, ResumableLoader
from samplewise.loop.data.rng import derive_seed
from samplewise.loop.evaluation import Evaluator, MetricFunction, StatefulMetric
from samplewise.loop.events import Listeners
from samplewise.loop.meters import LossMeter, PhaseTimer, Progress, format_values, loading_notice, peak_memory
from samplewise.loop.mirror import Mirror
from samplewise.loop.run_dir import RunDirectory, run_metadata, run_path
from samplewise.loop.stopping import Duration, FitResult, StopRequest, end_of_training, interval, stop_controller
from samplewise.parallel import collectives, launch
from samplewise.parallel.collectives import errors_on_all_ranks
from samplewise.parallel.ddp import inner
from samplewise.step.step import Step
from samplewise.step.update import Update
from samplewise.step.window import BatchCursor


class Trainer(CheckedAttributes):
    """Training loop over a loader, with validation, log, checkpoints and exact resume.

    run: directory for the log and the checkpoints; None (default) to write neither.
    exists: what to do if the run directory has checkpoints of another training. "error" (default): refuse, unless `fit`
    is called with resume=True. "resume": continue that run. "overwrite": remove its files; other files in the directory
    stay, and a private run is refused. "new": take the next free name, runs/a-2 for runs/a; it is in `trainer.run`.
    callbacks: see `samplewise.loop.events`. With a run directory and without a ModelCheckpoint among them, a checkpoint
    is saved after every epoch.
    metrics: dict of name -> function (outputs, batch) or (outputs, y), or object with update, compute and reset. A
    function gets the target if its second argument is named y, target, targets, label or labels, else the batch.
    device: "auto" (default) for CUDA if available, else MPS, else the CPU; or a torch device.
    seed: seed of the order of samples and their random augmentation, together with the epoch and the sample's index.
    log_every: interval between two log lines, in updates ("50up", the default, or 50) or samples ("1000samples"). The
    loss is read from the device (host sync) only for a log line.
    progress: False for no progress display.
    save: "all" (default); "trained" leaves frozen parameters out of checkpoints and saved models, for example the base
    of a LoRA model. Resuming then needs the same base model, which is compared by checksums.

    If torchrun has started several processes, the trainer initializes the process group: see `sw.parallel.join`.
    """

    _fixed: ClassVar = dict.fromkeys(
        ("step", "model", "run", "callbacks", "metrics", "device", "seed", "log_every", "progress", "save", "exists"),
        "",
    )

    @errors_on_all_ranks()
    def __init__(
        self,
        step: Step,
        run: str | Path | None = None,
        callbacks: Iterable[object] = (),
        *,
        metrics: Mapping[str, MetricFunction | StatefulMetric] | None = None,
        device: str | torch.device = "auto",
        seed: int = 0,
        log_every: str | int = "50up",
        progress: bool = True,
        save: Literal["all", "trained"] = "all",
        exists: Literal["error", "resume", "overwrite", "new"] = "error",
    ):
        arguments.check_trainer(step, run, callbacks, metrics, seed, exists)
        self.step = step
        self.model = inner(step.model)
        self.seed = seed
        self.log_every = interval("log_every", log_every, ("up", "samples"))
        self.device = launch.join(device)
        self.run = None if run is None else run_path(absolute(run), exists)
        self.model.to(self.device)
        step._attach_process_group()
        if isinstance(step.loss_fn, (nn.Module, Criterion)):
            step.loss_fn.to(self.device)
        self.loader: Iterable[Any] | None = None  # loader of the last call of fit
        self.fast_dev_run = False  # True while fit(fast_dev_run=True) runs
        self.expected_updates: int | None = None  # total number of updates at the end of fit; None if unknown
        self._progress = Progress()
        ordered = [*([self._progress] if progress else []), *_complete(callbacks, self.run)]
        self._callbacks = Listeners(ordered, trainer=self, step=step, model=self.model)
        self._evaluator = Evaluator(step, self.model, metrics or {}, self.device, seed)
        self._run_directory = None if self.run is None else RunDirectory(self.run, exists, _mirror(ordered))
        self._stopping = stop_controller(step)
        self._loader: ResumableLoader | None = None
        self._epoch = step.counters.epochs
        self._loss_meter = LossMeter(step.config.hides_samples)
        self._run_state = RunState(step, self.model, self._loss_meter, self._callbacks, seed, save)
        self._timer = PhaseTimer()
        self._end_validated: int | None = None  # updates of the last validation at an end inside an epoch
        self._noted_loading = False  # the note about slow loading was written
        self._complete = True  # from now on, attributes are checked when they are assigned

    def __repr__(self) -> str:
        done = self.step.counters
        run = "no run directory" if self.run is None else f"run {str(self.run)!r}"
        return f"Trainer({self.step!r}, {run}, {plural(done.epochs, 'epoch')}, {plural(done.updates, 'update')})"

    # --- the loop --------------------------------------------------------------------------------------------------

    def fit(
        self,
        loader: Iterable[Any],
        validate: Iterable[Any] | None = None,
        *,
        epochs: int | None = None,
        updates: int | None = None,
        resume: bool = False,
        overfit_batches: int | None = None,
        fast_dev_run: bool = False,
    ) -> FitResult:
        """Train up to a total number of epochs or updates, and return the reason for the end, the counters and the
        metrics of the last epoch, or of the validation at the end.

        A first Ctrl-C (SIGINT) saves a checkpoint and returns, and the script goes on after `fit`. A script that is to
        end then, with the usual exit code:

            if trainer.fit(loader, epochs=10, resume=True).signal == "SIGINT":
                sys.exit(130)

        loader: training batches. With several ranks, each takes its shard of the samples, unless the loader is marked
        by `sw.already_sharded`.
        validate: validation batches, evaluated after every epoch, and at the end of a run that ends inside an
        epoch, unless a signal or the loader stops it; None (default) for no validation.
        epochs, updates: exactly one is given. Epochs and updates of a resumed run or of an earlier call count.
        resume: True to continue from the newest checkpoint in the run directory, if there is one.
        overfit_batches: use only this number of batches, those of the first epoch, in every epoch, in the same order.
        fast_dev_run: True for a test run: an epoch that has only the samples of its first update, and a validation with
        one batch. It writes no files and does not resume; epochs and updates are ignored. The update is a real one: it
        changes the parameters and counts, so make a new step for the training.
        """
        with (
            _only_fit_of(self.step),
            self._session(fast_dev_run),
            self.step._slow_compile_notice(self._progress.line),
        ):
            # Check the arguments, before files are opened and privacy is spent.
            privacy = self.step.privacy
            if privacy is not None and epochs is None and updates is None:
                updates = privacy.plan.updates  # those that are paid for
            until = end_of_training(epochs, updates)
            callbacks = self._callbacks.callbacks
            options = {"overfit_batches": overfit_batches is not None, "fast_dev_run": fast_dev_run}
            arguments.check_private(self.step, self.log_every, callbacks, validate, options)
            arguments.check_resume(resume, self.run)
            arguments.check_sampler(loader, callbacks, validate)

            # Open loader and run directory, and load the newest checkpoint. Callbacks may change the settings then.
            data = self._open(loader, overfit_batches, resume)
            if self.fast_dev_run:
                until = Duration(self._epoch + 1, "ep")
            self.expected_updates = self._expected_updates(data, until)
            arguments.check_paid(self.step, self.expected_updates)
            self._callbacks.emit("on_fit_start")
            self._run_state.settings.fit_started()
            self._timer.start(data.seconds_waited)

            self._stopping.synchronize()
            metrics: dict[str, float] = {}
            while not self._stopping.is_over(until, self._epoch):
                epoch = self._epoch
                self._callbacks.emit("on_epoch_start", epoch=epoch)
                self._note_changed_settings()
                self._timer.start_epoch()
                with self._stopping.epoch(data):
                    for update in self.step.over(self._batches(data)):
                        self._record_update(update, data)
                        self._callbacks.emit("on_update", update=update)
                        self._stopping.synchronize()
                        if self._stopping.is_over(until, self._epoch):
                            break
                    if self.step.counters.epochs > epoch:  # otherwise the epoch was interrupted
                        metrics = self._end_epoch(data, validate)
                        self._callbacks.emit("on_epoch_end", epoch=epoch, metrics=metrics)
                        self._stopping.synchronize()

            if validate is not None and self._ends_unvalidated():
                if not metrics and self._files is not None and savable(self.step):
                    self.save()  # an error in the first validation, as in a metric, must not cost the updates
                with self._stopping.epoch(data):
                    metrics = self._validate_end(data, validate)
                    self._stopping.synchronize()
            done = "fast_dev_run is done" if self.fast_dev_run else until.done()
            stop = self._stopping.stop or StopRequest(done)
            self._end(stop.reason, data)
            counters = self.step.counters
            return FitResult(stop.reason, stop.signal, self._epoch, counters.updates, metrics)

    def stop(self, reason: str) -> None:
        """End the training after this update, on all ranks. `FitResult.reason` is the text. Call it while `fit` runs.

        The next call of `fit`, also with resume=True, continues the training.
        """
        if not isinstance(reason, str) or not reason:
            raise ValueError(f"the reason for a stop must be a text that is not empty; found {reason!r}.")
        self._stopping.request(reason)

    def _batches(self, data: ResumableLoader) -> Iterator[BatchCursor]:
        """Return the batches of the rest of the epoch, on the device. Collective."""
        with self._stopping.watch(data):
            data.prefetch(self._epoch)  # not in the generator: it is collective, and ranks pull batches independently
        return self._rest_of_epoch(data)

    def _rest_of_epoch(self, data: ResumableLoader) -> Iterator[BatchCursor]:
        if self.fast_dev_run:
            done = self.step.counters.updates
            batches = data.first_update(self._epoch, self.step.samples, lambda: self.step.counters.updates > done)
        else:
            batches = data.epoch(self._epoch, rewind=not self.step._has_pending_samples)
        for batch, position in self._stopping.batches(batches, data):
            yield BatchCursor(to_device(batch, self.device), position.batch_offset, position.batches)

    def _record_update(self, update: Update, data: ResumableLoader) -> None:
        """Record an update: data position, meters, timer and, at the end of an interval `log_every`, a log line."""
        data.commit(self.step._consumed)
        self._loss_meter.add(update, self._timer.add(update))
        if self.log_every.ends_with(update, self.step):
            self._write_train_line(data)

    def _write_train_line(self, data: ResumableLoader) -> None:
        """Write a line of kind "train" with the values since the last one."""
        counters = self.step.counters
        line = self._loss_meter.read()
        costs = {"phases": self._timer.read(data.seconds_waited), "memory": peak_memory(self.device)}
        if not self._loss_meter.hides_samples:
            line = {"samples": counters.samples, **line}
        sizes = self.step._windows.sizes
        if not sizes.is_fixed:
            line["samples_per_update"] = self.step.samples
        if sizes.follower is not None and sizes.follower.average.weight:
            noise = sizes.follower.average.value._numbers()
            self.write("noise", update=counters.updates, batch=self.step.samples, **noise)
        self.write("train", epoch=self._epoch + 1, update=counters.updates, **line, **costs)
        if self._noted_loading:
            return
        # One note if most of the time is spent waiting for the loader; not for the first batch, when workers start.
        first = data.first_wait
        text = loading_notice(data.loader, data.seconds_waited - first, self._timer.wall_seconds - first)
        if text is not None:
            self._noted_loading = True
            self.write("note", update=counters.updates, text=text)
            self._progress.line(text)

    def _end_epoch(self, data: ResumableLoader, validate: Iterable[Any] | None) -> dict[str, float]:
        """Validate, write log lines, go to the next epoch, and return the metrics of this one.

        If the training is stopped during validation, a resumed run repeats the validation.
        """
        if self._loss_meter.has_unread_updates:
            self._write_train_line(data)
        if not self._loss_meter.has_updates_in_epoch:
            # Raise BatchError for an epoch without updates, unless its samples are carried into the next epoch.
            carried = collectives.all_reduce_scalars(self.step._has_pending_samples)[0]
            if self.fast_dev_run or not carried:
                raise BatchError(
                    f"an epoch must make at least one update; found fewer than samples={self.step.samples} samples in "
                    f"epoch {self._epoch + 1}, and tail={self.step.tail!r}. Use a smaller samples=, or tail='update' "
                    "or tail='carry'."
                )
        metrics = {} if validate is None else self._validate(data, validate)
        self._epoch += 1  # its number in the log, where epochs count from 1
        data.seek(DataPosition())
        done = self.step.counters.updates
        trained = self._loss_meter.read_epoch()
        self.write("epoch", epoch=self._epoch, update=done, **trained)
        if validate is not None:
            self.write("validation", epoch=self._epoch, update=done, **metrics)
        losses = {"loss": trained["loss"], "train_loss": trained["loss"]} if "loss" in trained else {}
        return {**losses, **metrics}

    def _validate(self, data: ResumableLoader, validate: Iterable[Any]) -> dict[str, float]:
        batches = self._evaluator.batches(validate)
        if self.fast_dev_run:
            batches = islice(batches, 1)
        return self._evaluator.evaluate(self._stopping.batches(batches, data))

    def _ends_unvalidated(self) -> bool:
        """True if the training ends inside an epoch, with updates that no validation has seen.

        After a signal, or if the loader has stopped it, the resumed run validates at its end.
        """
        stop = self._stopping.stop
        if stop is not None and stop.is_interruption:
            return False
        return self._loss_meter.has_updates_in_epoch and self._end_validated != self.step.counters.updates

    def _validate_end(self, data: ResumableLoader, validate: Iterable[Any]) -> dict[str, float]:
        """Validate inside an epoch, write a log line and return the metrics."""
        metrics = self._validate(data, validate)
        self._end_validated = self.step.counters.updates
        # A longer training has no validation here, so that a resumed log must not contain this line. It is written
        # before the checkpoint nevertheless, because loggers are closed at the end.
        if self._files is not None:
            self._files.exclude_from_checkpoints()
        self.write("validation", epoch=self._epoch + 1, update=self._end_validated, **metrics)
        self._progress.line(f"validation after update {self._end_validated}  {format_values(metrics)}")
        return metrics

    def _end(self, reason: str, data: ResumableLoader) -> None:
        """Run on_fit_end, write the last log lines, and wait for the checkpoint and for all ranks."""
        # ModelCheckpoint saves before the last lines are written, so that a resumed log does not contain them.
        self._callbacks.emit("on_fit_end", reason=reason)
        if self._loss_meter.has_unread_updates:
            self._write_train_line(data)
        self.write("end", update=self.step.counters.updates, reason=reason)
        if self._files is not None:
            self._files.finish()
        collectives.barrier()  # no rank exits before all are done

    # --- start and end of fit --------------------------------------------------------------------------------------

    def _open(self, loader: Iterable[Any], overfit_batches: int | None, resume: bool) -> ResumableLoader:
        """Open the loader and the run directory, and resume from the newest checkpoint if asked. Collective."""
        arguments.check_overfit_batches(overfit_batches)
        if self._loader is None:
            constants = () if self.step.privacy is not None else constants_of(self.step.loss_fn)
            checkpointed = self._files is not None
            self._loader = ResumableLoader(
                loader, self.seed, overfit_batches, checkpointed=checkpointed, constants=constants
            )
            self._epoch = self.step.counters.epochs
            if collectives.rank():  # random numbers, for example of dropout, must differ from those of rank 0
                reseed(derive_seed(self.seed, collectives.rank()))
        self.step.counters.epochs = self._epoch  # higher by 1 after a stop in validation, which is repeated
        self._loader.set_loader(loader, overfit_batches)
        self.loader = self._loader.loader
        if self._files is not None:
            self._run_state.start()
            self._files.open(resume, self._load)
            if self.step.privacy is not None:
                self.step.privacy.open(self._files.directory)  # after a resume it is open
            self._files.check(*self._state(0))
            settings = {"seed": self.seed, "log_every": str(self.log_every)}
            self._files.describe(**run_metadata(self.step, self.loader, self.device, **settings))
        return self._loader

    def _resume_from(self, state: dict[str, Any], loader: Iterable[Any]) -> None:
        """Continue from the state of a checkpoint, without a run directory. Call it before `fit`."""
        self._open(loader, None, resume=False)
        self._run_state.start()
        self._load(state)

    def _note_changed_settings(self) -> None:
        """After a resume, write a line of kind "note" if settings differ from those of the checkpoint, and warn unless
        they were set by a callback.
        """
        differences = self._run_state.settings.differences()
        if any(differences):
            self.write("note", update=self.step.counters.updates, text=str(differences))
        if (differences.restored or differences.changed) and collectives.rank() == 0:
            warnings.warn(str(differences), TrainingWarning, stacklevel=3)

    def _expected_updates(self, data: ResumableLoader, until: Duration) -> int | None:
        """Number of updates at the end of the training; None if unknown."""
        if until.unit == "up":
            return until.number
        per_epoch = 1 if self.fast_dev_run else data.updates_per_epoch(self.step.samples)
        if per_epoch is None or not (self.fast_dev_run or self.step._windows.sizes.is_fixed):
            return None
        if self.step.privacy is not None:  # a pass ends at a multiple of its draws, also if it is resumed inside
            return per_epoch * until.number
        return self.step.counters.updates + per_epoch * (until.number - self._epoch)

    @contextmanager
    def _session(self, fast_dev_run: bool) -> Iterator[None]:
        """Handle signals and errors of `fit`; close loaders, files and progress bar on exit."""
        self._stopping = stop_controller(self.step)
        with self._stopping.handle_signals():
            try:
                position = DataPosition() if self._loader is None else self._loader.committed
                interrupted = self.step._has_pending_samples or position.is_inside_epoch
                arguments.check_fast_dev_run(fast_dev_run, interrupted)
                self.fast_dev_run = fast_dev_run
                yield
            except BaseException as error:
                collectives.announce_error(error)
                self._callbacks.emit("on_error", error=error)
                raise
            finally:
                with ExitStack() as closing:  # called in reverse order, even if one raises
                    for opened in (self._files, self._evaluator, self._loader, self._progress, self.step.privacy):
                        if opened is not None:
                            closing.callback(opened.close)
                if self.fast_dev_run:
                    self._loader = None  # the next call of fit starts at the beginning of an epoch
                self.fast_dev_run = False

    # --- files -----------------------------------------------------------------------------------------------------

    @property
    def _files(self) -> RunDirectory | None:
        """The run directory; None if there is none, and in a fast_dev_run, which writes no files."""
        return None if self.fast_dev_run else self._run_directory

    def write(self, kind: str, **fields: Any) -> None:
        """Write a line to the log and call `on_log` of the callbacks and loggers. Callbacks may write their own lines.

        kind: the trainer writes the kinds "train", "epoch", "validation", "layers", "note" and "end".
        fields: numbers, texts, or lists or dicts of these. `update` is the position of the line on the axis of loggers;
        default: the number of updates so far.
        """
        if self._run_directory is not None and not self.fast_dev_run:
            self._run_directory.write(kind=kind, **fields)
        self._callbacks.emit("on_log", kind=kind, fields=fields)

    def save(self) -> Path:
        """Save a checkpoint from which the run can be resumed, and return its path. Call it while `fit` runs."""
        if self.fast_dev_run:
            return Path(os.devnull)
        return self._run_files().save(self._state, self.step.counters.updates)

    def save_model(self, name: str) -> Path:
        """Save the state dict of the model to `name`.ckpt in the run directory, and return its path.

        `sw.load_checkpoint(path)["model"]` is the state dict; other tools read model.safetensors in it.
        """
        if self.fast_dev_run:
            return Path(os.devnull)
        state = {**self._run_state.model_state(), "update": self.step.counters.updates}
        return self._run_files().save_model(name, state)

    def _run_files(self) -> RunDirectory:
        if self._files is None:
            raise CheckpointError("a checkpoint needs a run directory; found none. Use Trainer(..., run='runs/name').")
        return self._files

    def _state(self, log_bytes: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the state for a checkpoint, and that of this rank. Collective.

        log_bytes: length of the log.
        """
        assert self._loader is not None
        return self._run_state.collect(self._loader, self._epoch, log_bytes)

    def _load(self, state: dict[str, Any]) -> int:
        """Load the state of a checkpoint, and return the length in bytes of the log that belongs to it."""
        assert self._loader is not None
        if self.step.privacy is not None:
            self.step.privacy.open(self._run_files().directory)  # before the state, which may be older than the log
        self._run_state.load(state, self._loader)
        self._end_validated = None  # its line is cut off the log
        self._epoch = state["trainer"]["epoch"]
        return state["trainer"]["log_bytes"]

    # --- evaluation and prediction ---------------------------------------------------------------------------------

    def evaluate(self, loader: Iterable[Any]) -> dict[str, float]:
        """Return the loss, Σ losses / Σ counts over all batches, and the metrics.

        Modules are in eval mode during the call; their modes are restored. With several ranks all must call it: each
        evaluates its shard of the samples, and all get the result.
        """
        with errors_on_all_ranks():
            return self._evaluator.evaluate(self._evaluator.batches(loader))

    def predict(
        self, loader: Iterable[Any], forward: Callable[[nn.Module, Any], Any] | None = None
    ) -> Tensor | Any:  # Any: outputs that are not a tensor
        """Return the outputs of the model on the CPU, concatenated along the first dimension over all batches.

        forward: function (model, batch) -> outputs. Default: model(x) for batches x and (x,), and for batches
        (x, y, ...) if the loss is a criterion such as nn.CrossEntropyLoss(); for other batches the call of the model
        that the loss function makes, the last one if there are several.

        Tuples, dicts and outputs of transformers keep their structure. Scalars are stacked, one for each batch; objects
        other than tensors become a list. With several ranks each one predicts all batches of its loader: they are not
        sharded.
        """
        return self._evaluator.predict(loader, forward)


def _complete(callbacks: Iterable[object], run: Path | None) -> list[object]:
    """Return the callbacks in the order in which they are called, with those that a run directory adds."""
    # ModelCheckpoint comes last, so that it saves the other callbacks after they have handled an event.
    ordered = sorted(callbacks, key=lambda callback: isinstance(callback, ModelCheckpoint))
    if run is None:
        return ordered
    saves = any(isinstance(callback, ModelCheckpoint) for callback in ordered)
    return [LayerGradNorms(), *ordered, *([] if saves else [ModelCheckpoint()])]


def _mirror(callbacks: Iterable[object]) -> Mirror | None:
    """Mirror of the `Upload` among the callbacks; None without one."""
    uploads = [callback for callback in callbacks if isinstance(callback, Upload)]
    if len(uploads) > 1:
        raise ValueError(
            f"a run must be uploaded to one store at most; found {len(uploads)} Upload callbacks. Pass one."
        )
    return uploads[0]._mirror() if uploads else None


_steps_in_fit: weakref.WeakSet[Step] = weakref.WeakSet()


@contextmanager
def _only_fit_of(step: Step) -> Iterator[None]:
    """Mark the step as being trained; raise RuntimeError if it is: two loops would share its window and counters."""
    if step in _steps_in_fit:
        raise RuntimeError(
            "fit must have returned before the same step is trained again; found a call of fit inside fit: from a "
            "callback, a loss function, a loader or another thread. Call trainer.stop(reason), and call fit again "
            "after it has returned. evaluate, predict and save may be called from callbacks."
        )
    _steps_in_fit.add(step)
    try:
        yield
    finally:
        _steps_in_fit.discard(step)
