"""Meters of a training run: loss, speed, learning rate, time per phase, peak memory. Only reads wait for the device.
Progress display on stderr: a bar in a terminal, plain lines elsewhere, or nothing. In a notebook, a line per epoch on
stdout.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from samplewise.core.means import Number, WeightedMean
from samplewise.core.memory import device_function
from samplewise.parallel import collectives
from samplewise.step.update import Update

if TYPE_CHECKING:
    from samplewise.loop.trainer import Trainer

MOST_RECENT = 64  # updates that are added to the sums at once
PATIENCE = 2.0  # seconds of waiting for the loader, after which a notice may be given


class LossMeter:
    """Mean loss, samples, times and skipped updates, since the last log line and over the epoch.

    hides_samples: updates are private: losses and numbers of samples are not shown
    """

    def __init__(self, hides_samples: bool = False) -> None:
        self.hides_samples = hides_samples
        self._line = UpdateSums()
        self._epoch = UpdateSums()
        self._recent: list[tuple[Update, float]] = []  # updates that are not in the sums yet, and their wall seconds
        self._last: Update | None = None
        self._lr: Any = None

    def add(self, update: Update, wall_seconds: float) -> None:
        """Add an update. `wall_seconds`: since the update before, with loading and callbacks."""
        self._last = update
        self._recent.append((update, wall_seconds))
        if len(self._recent) == MOST_RECENT:
            self._sum(MOST_RECENT - 1)  # the device may not have decided yet whether the last one is skipped

    def _sum(self, count: int | None = None) -> None:
        """Add the first `count` recent updates to the sums, all by default. Several are added at once: their losses are
        read from the device in one host sync, and this code runs in less time than between the operations of two
        updates.
        """
        recent = self._recent[:count]
        self._recent = self._recent[len(recent) :]
        losses: list[Number] = []
        counts: list[Number] = []
        seconds = 0.0
        wall_seconds = 0.0
        samples = 0
        skipped = 0
        for update, wall in recent:
            seconds += update.seconds
            wall_seconds += wall
            if self.hides_samples:
                continue
            samples += update.samples
            if update.skipped:
                skipped += 1
            else:
                loss, count_sum = update._sums()
                losses.append(loss)
                counts.append(count_sum)
        totals = _as_floats(losses)
        weights = _as_floats(counts)
        for sums in (self._line, self._epoch):
            sums.mean.add_numbers(totals, weights)
            sums.updates += len(recent)
            sums.seconds += seconds
            sums.wall_seconds += wall_seconds
            sums.samples += samples
            sums.skipped += skipped

    def read(self) -> dict[str, Any]:
        """Return the values since the last log line, and reset them."""
        self._sum()
        lr = self._learning_rates()
        sums = self._line
        self._line = UpdateSums()
        line = {"lr": lr, "skipped": sums.skipped, "seconds": sums.seconds}
        if self.hides_samples:
            return line
        speeds = {
            "samples_per_second": sums.samples / sums.wall_seconds if sums.wall_seconds else 0.0,
            "compute_samples_per_second": sums.samples / sums.seconds if sums.seconds else 0.0,
        }
        return {"loss": sums.mean.value(), **line, **speeds}

    def _learning_rates(self) -> Any:
        """Return the learning rates of the last update. They may be on the device, so they are read as late as here."""
        if self._last is not None:
            self._lr = self._last.lr
            self._last = None
        return self._lr

    @property
    def has_unread_updates(self) -> bool:
        """True if there were updates since the last log line."""
        return bool(self._recent or self._line.updates)

    @property
    def has_updates_in_epoch(self) -> bool:
        return bool(self._recent or self._epoch.updates)

    def read_epoch(self) -> dict[str, Any]:
        """Return the values of the epoch, and reset them."""
        self._sum()
        sums = self._epoch
        self._epoch = UpdateSums()
        loss = {} if self.hides_samples else {"loss": sums.mean.value()}
        return {**loss, "skipped": sums.skipped, "seconds": sums.seconds}

    def state_dict(self) -> dict[str, Any]:
        self._sum()
        return {"lines": self._line.state_dict(), "epoch": self._epoch.state_dict(), "lr": self._learning_rates()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._line.load_state_dict(state["lines"])
        self._epoch.load_state_dict(state["epoch"])
        self._lr = state["lr"]
        self._last = None
        self._recent = []


@dataclass
class UpdateSums:
    """Sums over updates of losses, counts, samples, seconds of computation, and seconds with loading and callbacks.

    Losses are added update by update in float64: the order of additions does not depend on interruptions, so a resumed
    run gets the same sums.
    """

    mean: WeightedMean = field(default_factory=partial(WeightedMean, torch.float64))
    updates: int = 0
    samples: int = 0
    skipped: int = 0
    seconds: float = 0.0
    wall_seconds: float = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {
            "loss": _as_tensor(self.mean.total),
            "count": _as_tensor(self.mean.weight),
            "updates": self.updates,
            "samples": self.samples,
            "skipped": self.skipped,
            "seconds": self.seconds,
            "wall_seconds": self.wall_seconds,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = WeightedMean(torch.float64, float(state["loss"]), float(state["count"]))
        self.samples = state["samples"]
        self.updates = state.get("updates", int(self.samples > 0))  # missing in a checkpoint of an earlier version
        self.skipped = state["skipped"]
        self.seconds = state["seconds"]
        self.wall_seconds = float(state.get("wall_seconds", self.seconds))  # missing there, too


def _as_floats(numbers: Sequence[Number]) -> list[float]:
    """The numbers as floats, with one host sync for all tensors among them."""
    tensors = [number for number in numbers if isinstance(number, Tensor)]
    if not tensors:
        return list(map(float, numbers))
    device = tensors[0].device
    values = torch.stack([t if t.device == device else t.to(device) for t in tensors]).tolist()
    if len(tensors) == len(numbers):
        return values
    remaining = iter(values)
    return [next(remaining) if isinstance(number, Tensor) else number for number in numbers]


def _as_tensor(number: Number) -> Tensor:
    return number if isinstance(number, Tensor) else torch.tensor(number, dtype=torch.float64)


class PhaseTimer:
    """Seconds per phase since the last log line: "data" (waiting for the loader), the phases of updates, and "rest"
    (callbacks, checkpoints and validation). The times are not saved in checkpoints.
    """

    def __init__(self) -> None:
        self.wall_seconds = 0.0  # of all updates so far, with loading and callbacks
        self.start()

    def start(self, seconds_waited: float = 0.0) -> None:
        """Restart all phases. `seconds_waited` is the total time spent waiting for the loader so far."""
        self._began = perf_counter()
        self._last_update = self._began
        self._waited_before = seconds_waited
        self._phases = defaultdict[str, float](float)

    def start_epoch(self) -> None:
        """Count the first update of an epoch from here: not the end of the epoch before, with its validation."""
        self._last_update = perf_counter()

    def add(self, update: Update) -> float:
        """Add the phases of an update; returns the seconds since the update before, with loading and callbacks."""
        for phase, seconds in update.phases.items():
            self._phases[phase] += seconds
        now = perf_counter()
        wall_seconds = now - self._last_update
        self._last_update = now
        self.wall_seconds += wall_seconds
        return wall_seconds

    def read(self, seconds_waited: float) -> dict[str, float]:
        """Return seconds per phase since the last call of `start` or `read`, and restart the timer."""
        phases = {"data": seconds_waited - self._waited_before, **self._phases}
        phases["rest"] = max(0.0, perf_counter() - self._began - sum(phases.values()))
        last_update = self._last_update
        self.start(seconds_waited)
        self._last_update = last_update  # the next one includes the time of writing a log line
        return phases


def loading_notice(loader: Any, seconds_waited: float, wall_seconds: float) -> str | None:
    """Notice that most of the time is spent waiting for the loader; None if that is not so, or took only seconds."""
    if seconds_waited <= PATIENCE or seconds_waited <= wall_seconds / 2:
        return None
    remedy = "Prepare batches in other processes, as a DataLoader with num_workers does"
    if isinstance(loader, DataLoader):
        remedy = (
            f"Use more workers, DataLoader(num_workers={loader.num_workers + 2}), and pin_memory=True with an "
            "accelerator"
        )
    return (
        f"Loading takes {seconds_waited / wall_seconds:.0%} of the time: {seconds_waited:.1f} of {wall_seconds:.1f} s "
        f"were spent waiting for batches. {remedy}; or keep prepared samples in memory or in a file."
    )


def peak_memory(device: torch.device) -> int | None:
    """Return the peak memory in bytes: of the device's allocator if it records one, else of this process.

    None on Windows without such a device.
    """
    peak = None if device.type == "cpu" else device_function(device, "max_memory_allocated")
    if peak is not None:
        return peak(device)
    try:
        import resource
    except ImportError:  # Windows
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


# --- progress display ------------------------------------------------------------------------------------------------


class NoDisplay:
    """Display of the progress of a training run that shows nothing. Epochs count from 1, as in the log."""

    def update(self, epoch: int, done: int, values: str) -> None:
        """Show that `done` updates have been made, with a text of current values."""

    def epoch(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """Print a permanent line with the metrics of an epoch."""

    def line(self, text: str) -> None:
        """Print another permanent line. May be called from another thread."""

    def close(self) -> None: ...


class LineDisplay:
    """Plain lines."""

    def update(self, epoch: int, done: int, values: str) -> None:
        self.line(f"epoch {epoch}  update {done}  {values}")

    def epoch(self, epoch: int, metrics: Mapping[str, float]) -> None:
        self.line(f"epoch {epoch}  {format_values(metrics)}")

    def line(self, text: str) -> None:
        with suppress(OSError):  # a closed pipe or a full disk must not stop the training
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None: ...


class NotebookDisplay:
    """One line per epoch on stdout, updated in place by carriage returns. Notebooks show stderr like an error."""

    def __init__(self) -> None:
        self._width = 0  # characters of the line that the next one replaces

    def update(self, epoch: int, done: int, values: str) -> None:
        self._replace(f"epoch {epoch}  update {done}  {values}")

    def epoch(self, epoch: int, metrics: Mapping[str, float]) -> None:
        self.line(f"epoch {epoch}  {format_values(metrics)}")

    def line(self, text: str) -> None:
        self._replace(text)
        self.close()

    def close(self) -> None:
        """End the line, if one is shown: text that is printed later begins below it."""
        if self._width:
            print(flush=True)
        self._width = 0

    def _replace(self, text: str) -> None:
        print(f"\r{text:{self._width}}" if self._width else text, end="", flush=True)
        self._width = len(text)


class BarDisplay:
    """Progress bar of rich: epoch, updates, time left, loss, speed, and the metrics of the last validation."""

    def __init__(self, total: int | None, done: int) -> None:
        from rich import progress
        from rich.console import Console
        from rich.table import Column

        self._bar = progress.Progress(
            progress.TextColumn("epoch {task.fields[epoch]}", table_column=Column(no_wrap=True)),
            progress.BarColumn(bar_width=8),
            progress.MofNCompleteColumn(table_column=Column(no_wrap=True)),
            progress.TimeRemainingColumn(table_column=Column(no_wrap=True)),
            # The column that is truncated in a narrow terminal.
            progress.TextColumn("{task.fields[text]}", markup=False, table_column=Column(no_wrap=True, ratio=1)),
            console=Console(stderr=True),
            expand=True,
        )
        self._metrics = ""
        self._task = self._bar.add_task("", total=total, completed=done, epoch=1, text="")
        self._bar.start()

    def update(self, epoch: int, done: int, values: str) -> None:
        self._bar.update(self._task, completed=done, epoch=epoch, text=f"{values}  {self._metrics}")

    def epoch(self, epoch: int, metrics: Mapping[str, float]) -> None:
        self.line(f"epoch {epoch}  {format_values(metrics)}")
        measured = {name: value for name, value in metrics.items() if name not in ("train_loss", "loss")}
        self._metrics = format_values(measured)

    def line(self, text: str) -> None:
        self._bar.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        self._bar.stop()


Display = NoDisplay | LineDisplay | NotebookDisplay | BarDisplay


def format_value(value: float) -> str:
    return "NaN" if math.isnan(value) else f"{value:.4g}"


def format_values(values: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {format_value(value)}" for name, value in values.items())


def make_display(total: int | None, done: int) -> Display:
    """Return a line per epoch in a notebook, a progress bar if stderr is a terminal and rich is installed, otherwise
    plain lines.

    total: number of updates at the end of the training; None if unknown.
    done: number of updates made so far.
    """
    # True in a Jupyter kernel, whose shell is a ZMQInteractiveShell or, as in Colab, a subclass.
    ipython = sys.modules.get("IPython")  # imported by every kernel
    shell = None if ipython is None else ipython.get_ipython()
    if any(cls.__name__ == "ZMQInteractiveShell" for cls in type(shell).__mro__):
        return NotebookDisplay()
    if sys.stderr is None:  # stderr was closed when Python started
        return NoDisplay()
    if not sys.stderr.isatty():
        return LineDisplay()
    try:
        return BarDisplay(total, done)
    except ImportError:
        return LineDisplay()


class Progress:
    """Callback that shows the progress of a training run, on rank 0. `Trainer(progress=True)` adds it."""

    def __init__(self) -> None:
        self._display: Display = NoDisplay()
        self._has_validation = False

    def on_fit_start(self, trainer: Trainer) -> None:
        if collectives.rank() == 0:
            self._display = make_display(trainer.expected_updates, trainer.step.counters.updates)

    def on_log(self, kind: str, fields: dict[str, Any]) -> None:
        if kind == "train" and "lr" in fields:
            values = "loss not shown (private)"
            if "loss" in fields:
                values = f"loss {format_value(fields['loss'])}  {fields['samples_per_second']:.0f} samples/s"
            self._display.update(fields["epoch"], fields["update"], values)
        if kind == "importance":
            self._display.line(f"epoch {fields['epoch']}  variance ratio {format_value(fields['variance_ratio'])}")
        self._has_validation = kind == "validation" or (self._has_validation and kind != "epoch")

    def on_epoch_end(self, epoch: int, metrics: dict[str, float]) -> None:
        values = {name: value for name, value in metrics.items() if name == "train_loss"}
        if self._has_validation:
            values |= metrics
        if values:
            self._display.epoch(epoch + 1, values)

    def line(self, text: str) -> None:
        """Print a line; does nothing if no training is shown. May be called from another thread."""
        self._display.line(text)

    def close(self) -> None:
        self._display.close()
        self._display = NoDisplay()
