"""Built-in callbacks: EarlyStopping, ModelCheckpoint, Upload, LRMonitor, SetLR, MaxTime, Quarantine, LayerGradNorms."""

from __future__ import annotations

import math
import time
import warnings
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from samplewise.core.files import QUARANTINE_FILE, read_json_lines
from samplewise.core.state import RandomState
from samplewise.core.text import plural
from samplewise.errors import CheckpointError, TrainingWarning
from samplewise.ledger.previews import MAX_PREVIEWS, indexed_items, preview
from samplewise.loop.checkpoint.encoding import COUNT, NUMBER, TEXT, Kind, check
from samplewise.loop.checkpoint.io import remove_checkpoint
from samplewise.loop.checkpoint.state import savable
from samplewise.loop.mirror import Mirror
from samplewise.loop.quarantine import dropped_samples, finite_json
from samplewise.loop.run_dir import Log
from samplewise.loop.stopping import interval
from samplewise.parallel import collectives
from samplewise.step.config import FunctionalOptimizer
from samplewise.step.schedules import set_rate
from samplewise.step.step import Step
from samplewise.step.update import Update, has_dropped

if TYPE_CHECKING:
    from samplewise.loop.trainer import Trainer

Mode = Literal["min", "max"]
MOST_LAYERS = 64  # maximum number of layers in a log line
MODEL_FILE = Kind(
    "the name of a checkpoint best-*.ckpt",
    lambda value: type(value) is str and Path(value).name == value and Path(value).match("best-*.ckpt"),
)


def _better(mode: str) -> int:
    if mode not in ("min", "max"):
        raise ValueError(f"mode must be 'min' or 'max'; found {mode!r}.")
    return -1 if mode == "max" else 1


def _monitored(metrics: dict[str, float], name: str) -> float:
    if name not in metrics:
        raise ValueError(
            f"monitor must be one of {', '.join(metrics)}; found {name!r}. 'loss' is that of validation if there is "
            "one; other metrics need Trainer(metrics=...) and fit(validate=...)."
        )
    return metrics[name]


class EarlyStopping:
    """Stop the training when a metric has not improved for `patience` epochs.

    monitor: name of a metric in `on_epoch_end`, "loss" by default.
    patience: epochs without improvement before the training stops.
    mode: "min" if smaller values are better, "max" if larger ones are.
    min_delta: a value counts as an improvement if it is better than the best one by more than this.

    NaN never counts as an improvement. A later or resumed `fit` goes on counting: it returns at once if the training
    was stopped by this callback, and trains if `patience` is larger now. Another `monitor` or `mode` starts again.
    """

    def __init__(self, monitor: str = "loss", patience: int = 3, mode: Mode = "min", min_delta: float = 0.0):
        if type(patience) is not int or patience < 1:
            raise ValueError(f"patience must be a positive number of epochs; found {patience!r}.")
        if not isinstance(min_delta, (int, float)) or not 0 <= min_delta < math.inf:
            raise ValueError(f"min_delta must be a number, 0 or more; found {min_delta!r}.")
        self.monitor = monitor
        self.patience = patience
        self.mode = mode
        self.min_delta = min_delta
        self._sign = _better(mode)
        self._best = math.inf
        self._waited = 0

    def on_fit_start(self, trainer: Trainer) -> None:
        self._stop_if_over(trainer)

    def on_epoch_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        value = self._sign * _monitored(metrics, self.monitor)
        if trainer.fast_dev_run:
            return
        if value < self._best - self.min_delta:
            self._best = value
            self._waited = 0
            return
        self._waited += 1
        self._stop_if_over(trainer)

    def _stop_if_over(self, trainer: Trainer) -> None:
        if self._waited >= self.patience and not trainer.fast_dev_run:
            trainer.stop(f"{self.monitor} has not improved for {plural(self.patience, 'epoch')}")

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "waited": self._waited, "monitor": self.monitor, "mode": self.mode}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check(state, {"best": NUMBER, "waited": COUNT, "monitor": TEXT, "mode": TEXT})
        is_same = (state["monitor"], state["mode"]) == (self.monitor, self.mode)
        self._best = state["best"] if is_same else math.inf
        self._waited = state["waited"] if is_same else 0


class ModelCheckpoint:
    """Save a checkpoint at a fixed interval and at the end of `fit`, and keep the best models by a metric.

    every: interval between checkpoints, in epochs ("1ep"), updates ("500up") or samples ("10000samples").
    best: number of best models to keep, 0 by default.
    monitor: name of the metric that ranks the models.
    mode: "min" if smaller values are better, "max" if larger ones are.

    Best models are saved in the run directory, next to the log; `best_models` lists their paths, best first. If a run
    is resumed with another `monitor` or `mode`, the list starts empty and the earlier files are kept.
    """

    def __init__(self, every: str | int = "1ep", best: int = 0, monitor: str = "loss", mode: Mode = "min"):
        if type(best) is not int or best < 0:
            raise ValueError(f"best must be the number of models to keep, an int of 0 or more; found {best!r}.")
        self.every = interval("every", every)
        self.best = best
        self.monitor = monitor
        self.mode = mode
        self._sign = _better(mode)
        self._saved = False
        self._directory = Path()
        self._names: list[str] = []  # names of the best models, best first
        self._values: list[float] = []  # monitored values of these models, times the sign

    @property
    def best_models(self) -> list[Path]:
        return [self._directory / name for name in self._names]

    def on_fit_start(self, trainer: Trainer) -> None:
        if trainer.run is None and not trainer.fast_dev_run:
            raise CheckpointError(
                "ModelCheckpoint needs a run directory; found none. Use Trainer(..., run='runs/name')."
            )
        self._directory = trainer.run or Path()

    def on_update(self, trainer: Trainer, update: Update) -> None:
        self._saved = self.every.ends_with(update, trainer.step)
        if self._saved:
            trainer.save()

    def on_epoch_end(self, trainer: Trainer, epoch: int, metrics: dict[str, float]) -> None:
        if self.best and not trainer.fast_dev_run:
            self._keep_if_good(trainer, self._sign * _monitored(metrics, self.monitor))
        self._saved = self.every.ends_with_epoch(epoch)
        if self._saved:
            trainer.save()

    def on_fit_end(self, trainer: Trainer) -> None:
        # Collective, so all ranks ask first. Deferred samples cannot be saved.
        if savable(trainer.step) and not self._saved:
            trainer.save()

    def _keep_if_good(self, trainer: Trainer, value: float) -> None:
        rank = bisect_right(self._values, value)
        if rank >= self.best or math.isnan(value):
            return
        file = trainer.save_model(f"best-{self.monitor.replace('/', '-')}-{trainer.step.counters.updates:09d}")
        self._values.insert(rank, value)
        self._names.insert(rank, file.name)
        for dropped in self.best_models[self.best :]:
            if collectives.rank() == 0:
                remove_checkpoint(dropped)
        del self._values[self.best :], self._names[self.best :]

    def state_dict(self) -> dict[str, Any]:
        return {"values": self._values, "names": self._names, "monitor": self.monitor, "mode": self.mode}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # Names are checked, since these files are deleted later.
        check(state, {"values": [NUMBER], "names": [MODEL_FILE], "monitor": TEXT, "mode": TEXT})
        is_same = (state["monitor"], state["mode"]) == (self.monitor, self.mode)
        self._values = state["values"] if is_same else []
        self._names = state["names"] if is_same else []


class Upload:
    """Copy the run directory to an object store after each checkpoint and at the end of `fit`, and from there to an
    empty run directory when `fit` resumes: a job that is preempted continues on another machine, bit for bit.

        upload = sw.callbacks.Upload("s3://bucket/runs/digits")
        sw.Trainer(step, "runs/digits", [upload], exists="resume").fit(loader, epochs=10)

    url: directory of the run in the store, of any protocol of fsspec: "s3://..." needs s3fs (the extra `remote`),
    "gs://..." gcsfs, "az://..." adlfs.
    options: of the file system of fsspec, such as `key` and `endpoint_url` of s3fs.

    Files keep their names, and all files of the run directory are copied, except hidden ones and locks. Of two runs,
    the local one and that in the store, the one with the newer checkpoint is resumed. If the store fails while the
    training runs, there is a CheckpointWarning, and the next checkpoint is uploaded with all that is missing; when
    `fit` starts or ends, it is a CheckpointError.
    """

    def __init__(self, url: str, **options: Any):
        self.url = url
        self._options = options
        self._mirror()  # raises errors of the arguments

    def _mirror(self) -> Mirror:
        return Mirror(self.url, self._options)

    def on_fit_start(self, trainer: Trainer) -> None:
        if trainer.run is None and not trainer.fast_dev_run:
            raise CheckpointError("Upload needs a run directory; found none. Use Trainer(..., run='runs/name').")


class LRMonitor:
    """Write the learning rates of all parameter groups to the log at an interval, in lines of kind "lr".

    every: interval in updates ("50up", the default), samples ("1000samples") or epochs ("1ep")
    """

    def __init__(self, every: str | int = "50up"):
        self.every = interval("every", every)
        self._rates: list[float] = []  # of the last update

    def on_update(self, trainer: Trainer, update: Update) -> None:
        ends = self.every.ends_with(update, trainer.step)
        if ends or self.every.unit == "ep":  # any update may be the last of its epoch; reading may wait for the device
            self._rates = list(update.lr) if isinstance(update.lr, tuple) else [update.lr]
        if ends:
            self._write(trainer)

    def on_epoch_end(self, trainer: Trainer, epoch: int) -> None:
        if self.every.ends_with_epoch(epoch):
            self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        trainer.write("lr", update=trainer.step.counters.updates, rates=self._rates)

    def state_dict(self) -> dict[str, Any]:
        return {"rates": self._rates}  # needed by a run that is resumed between the last update and the end of an epoch

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check(state, {"rates": [NUMBER]})
        self._rates = state["rates"]


class SetLR:
    """Set the learning rate when `fit` starts, also of a resumed run, whose optimizer has the rate of the checkpoint.

    lr: the rate for all parameter groups, or a list with one for each group. With a scheduler it is the initial rate:
    the current rate and those of the schedule are multiplied by lr / initial rate. With OneCycleLR, which has no other
    argument for rates, it is max_lr. Absolute bounds of a schedule, such as eta_min, are not changed.

    Setting the same rate again changes nothing, so the callback may stay in the script.
    """

    def __init__(self, lr: float | Sequence[float]):
        self.lr = lr
        for rate in lr if isinstance(lr, Sequence) else [lr]:
            if not isinstance(rate, (int, float)) or not 0 <= rate < math.inf:
                raise ValueError(f"lr must be zero or a positive number, or a list of such numbers; found {lr!r}.")

    def on_fit_start(self, step: Step) -> None:
        if isinstance(step.optimizer, FunctionalOptimizer):
            raise TypeError(
                "SetLR must have an optimizer of torch.optim; found a function. Its rate is that of the script: write "
                "for example sw.sgd(0.01)."
            )
        if step.scheduler is not None and not isinstance(step.scheduler, LRScheduler):
            raise TypeError(
                f"SetLR must have a scheduler of torch.optim.lr_scheduler; found {type(step.scheduler).__name__}. "
                "Change its rates in on_fit_start of a callback."
            )
        groups = step.optimizer.param_groups
        rates = list(self.lr) if isinstance(self.lr, Sequence) else [self.lr] * len(groups)
        if len(rates) != len(groups):
            raise ValueError(
                f"lr must be one rate, or one for each of the {len(groups)} parameter groups; found {len(rates)} rates."
            )
        for k, (group, rate) in enumerate(zip(groups, rates, strict=True)):
            if step.scheduler is None:
                set_rate(group, "lr", float(rate))
            else:
                _scale_schedule(step.scheduler, k, group, rate)


def _scale_schedule(scheduler: LRScheduler, k: int, group: dict[str, Any], rate: float) -> None:
    """Multiply all rates of parameter group `k`, in the group and in the scheduler, so that the initial one is `rate`.

    Schedules are multiples of the initial rate, so this gives the rates of a schedule that was created with it.
    """
    base = "max_lr" if isinstance(scheduler, OneCycleLR) else "initial_lr"
    initial = float(group[base])
    if initial == rate:
        return
    if initial == 0:
        raise ValueError(
            "the initial learning rate of a schedule must not be 0 to be changed by SetLR; found 0 in parameter group "
            f"{k}. Start a new run directory."
        )
    for name in ("lr", "initial_lr", "max_lr", "min_lr"):
        if name in group:
            set_rate(group, name, float(rate) if name == base else group[name] * (rate / initial))
    for part in _parts(scheduler):
        for name in ("base_lrs", "max_lrs", "_last_lr"):
            if hasattr(part, name):
                rates = list(getattr(part, name))
                rates[k] = rates[k] * (rate / initial)
                setattr(part, name, rates)


def _parts(scheduler: LRScheduler) -> Iterator[LRScheduler]:
    """Yield a scheduler and those that it contains, as SequentialLR does."""
    yield scheduler
    for part in getattr(scheduler, "_schedulers", ()):
        yield from _parts(part)


class MaxTime:
    """Stop the training after `seconds` seconds of `fit`. The next `fit`, resumed or not, starts again from 0."""

    def __init__(self, seconds: float):
        if not isinstance(seconds, (int, float)) or not seconds >= 0:
            raise ValueError(f"seconds must be a number, 0 or more; found {seconds!r}.")
        self.seconds = seconds
        self._started = 0.0

    def on_fit_start(self) -> None:
        self._started = time.monotonic()

    def on_update(self, trainer: Trainer) -> None:
        if time.monotonic() - self._started > self.seconds:
            trainer.stop(f"time limit of {self.seconds} s reached")


class Quarantine:
    """Write the samples that `sw.guard` drops to quarantine.jsonl in the run directory, one JSON object per line, and
    show them in the report.

    id: key of the batch under which the sample ids are. None: "id" if the dataset is inside `sw.Indexed`, else the
    samples have no ids.
    show: preview of a sample, as in `Ledger`: a function of the id; None: the item of the dataset inside `sw.Indexed`;
    False: no previews. The first line of each sample has the preview.

    update    index of the update, from 0
    rank, position
              process and place of the sample in its part of the update, from 0
    id        id of the sample; null without ids
    reason    "loss" or "gradient" if that is not finite, else "norm"
    loss, norm
              null if not finite; norm is that of the whole gradient, before any transform
    layer     parameter with the largest part of the norm, or the first whose gradient is not finite; null if the loss
              is not finite
    preview   as in previews.json

    A resumed run removes the lines that are newer than its checkpoint.
    """

    def __init__(self, id: Hashable = None, show: Callable[[Any], Any] | Literal[False] | None = None):
        if not (show is None or show is False or callable(show)):
            raise TypeError(f"show must be a function of the id, None or False; found {show!r}.")
        self.id = id
        self.show = show
        self._log: Log | None = None  # on rank 0, while fit runs
        self._bytes = 0  # length of the file when fit started or ended
        self._item: Callable[[Any], Any] | None = None
        self._shown: set[str] = set()  # samples with previews

    def on_fit_start(self, trainer: Trainer, step: Step) -> None:
        if not step.transforms.drops:
            raise ValueError(
                f"Quarantine needs a step with sw.guard; found transforms={step.transforms!r}. Pass "
                "Step(transforms=[sw.guard()])."
            )
        items = indexed_items(trainer.loader)
        key = "id" if self.id is None and items is not None else self.id
        if key is not None:
            step.require(columns={"id": key})
        self._item = items if self.show is None else self.show or None
        if trainer.fast_dev_run:
            return
        if trainer.run is None:
            raise CheckpointError("Quarantine needs a run directory; found none. Use Trainer(..., run='runs/name').")
        if collectives.rank() == 0:
            path = trainer.run / QUARANTINE_FILE
            self._log = Log(path, self._bytes)
            self._shown = {str(line["id"]) for line in read_json_lines(path) if line.get("preview")}

    def on_update(self, step: Step, update: Update) -> None:
        dropped = has_dropped(update)
        if not collectives.all_reduce_scalars(dropped)[0]:
            return
        lines = dropped_samples(update, list(step._evaluator.trained.named)) if dropped else []
        for line in chain.from_iterable(collectives.all_gather_object(lines)):
            if self._log is not None:
                self._log.write(**line, preview=self._preview(line["id"]))

    def _preview(self, sample_id: Any) -> Any:
        """Preview of a sample that has none yet; None if it fails, with a warning."""
        if self._item is None or sample_id is None or str(sample_id) in self._shown or len(self._shown) >= MAX_PREVIEWS:
            return None
        self._shown.add(str(sample_id))
        random_state = RandomState()  # datasets may draw random numbers
        try:
            return finite_json(preview(self._item(sample_id)))
        except Exception as why:
            self._item = None
            warnings.warn(
                f"samples must be accessible by id to be shown; found {type(why).__name__}: {why}. Pass "
                "Quarantine(show=function of the id), or show=False.",
                TrainingWarning,
                stacklevel=2,
            )
            return None
        finally:
            random_state.restore()

    def on_fit_end(self) -> None:
        if self._log is not None:
            self._bytes = self._log.position()
            self._log.close()
            self._log = None

    on_error = on_fit_end

    def state_dict(self) -> dict[str, Any]:
        return {"bytes": self._bytes if self._log is None else self._log.position()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check(state, {"bytes": COUNT})
        self._bytes = state["bytes"]


NO_GRADIENTS = (
    "Gradient norms of layers are not logged, because parameters have no .grad after the update. Compiled updates "
    "leave none; use compile=False to log them."
)


class LayerGradNorms:
    """Write the gradient norm of each layer to the log at the interval `log_every`, in lines of kind "layers".

    A Trainer with a run directory adds this callback. Compiled updates leave no `.grad`: then one line of kind "note"
    gives the reason.
    """

    def __init__(self) -> None:
        self._note_written = False

    def state_dict(self) -> dict[str, Any]:
        return {"note_written": self._note_written}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._note_written = state["note_written"]

    def on_update(self, trainer: Trainer, update: Update) -> None:
        if not trainer.log_every.ends_with(update, trainer.step) or update.skipped:
            return
        done = update.index + 1
        norms: dict[str, torch.Tensor] = {}
        for name, parameter in trainer.model.named_parameters():
            gradient = parameter.grad
            if gradient is not None:
                norm = torch.linalg.vector_norm(gradient.coalesce().values() if gradient.is_sparse else gradient)
                if hasattr(norm, "full_tensor"):  # a DTensor, if the parameter is sharded
                    norm = norm.full_tensor()
                norms[name] = norm.float().to(trainer.device)
        if norms:
            values = torch.stack(list(norms.values())).tolist()
            trainer.write("layers", update=done, norms=_by_layer(dict(zip(norms, values, strict=True))))
        elif not self._note_written:
            self._note_written = True
            trainer.write("note", update=done, text=NO_GRADIENTS)


def _by_layer(norms: dict[str, float]) -> dict[str, float]:
    """Return the joint norm of the parameters of each module.

    If there are more than MOST_LAYERS modules, they are merged into the modules that contain them.
    """
    modules = {name: name.split(".")[:-1] for name in norms}
    depth = max(map(len, modules.values()))
    while depth > 1 and len({tuple(path[:depth]) for path in modules.values()}) > MOST_LAYERS:
        depth -= 1
    squares: dict[str, float] = defaultdict(float)
    for name, path in modules.items():
        squares[".".join(path[:depth]) or name] += norms[name] ** 2
    return {layer: total**0.5 for layer, total in squares.items()}
