"""Training updates of one network next to each other: time, host waits, peak memory, and the error of the norms."""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from samplewise.bench.networks import Work
from samplewise.core.memory import device_function, peak_bytes
from samplewise.diagnostics.profile import interleaved_times
from samplewise.engine.gradients import gradients
from samplewise.step.step import Step

WARM_UP = 3  # updates before measuring; the first ones with a graph structure verify it
COUNTED = 2  # updates whose host waits are counted
COMPARED = 2  # samples whose norm is compared with a backward pass of the sample
PLAIN = "plain"
SYNC_WARNING = "called a synchronizing"  # of torch's synchronization debug mode

Update = Callable[[], object]


@dataclass(frozen=True)
class Precision:
    """Precision of updates of a float32 model. `mixed` is the argument `precision` of `sw.Step`."""

    name: str
    tolerance: float  # largest accepted relative error of a norm
    mixed: Literal["bf16-mixed", "16-mixed"] | None = None
    tf32: bool = False
    loss_scale: float = 1.0  # of gradients without a GradScaler, which vanish in float16

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        dtypes = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
        return torch.autocast(device.type, dtypes[self.mixed]) if self.mixed else nullcontext()


FLOAT32 = Precision("float32", 1e-3)
TF32 = Precision("TF32", 5e-3, tf32=True)
BFLOAT16 = Precision("bfloat16, mixed", 4e-2, "bf16-mixed")
FLOAT16 = Precision("float16, mixed", 1e-2, "16-mixed", loss_scale=2.0**10)


def make_updates(
    work: Work, chains: Mapping[str, Mapping[str, Any]], device: torch.device, precision: Precision
) -> dict[str, Update]:
    """Updates of the same model by a plain loop, and by `sw.Step` with each of the arguments in `chains`.

    All share one model and one optimizer, so that a device that holds the model once can run them. A small rate keeps
    the model nearly unchanged.
    """
    optimizer = torch.optim.SGD(work.model.parameters(), lr=1e-6, fused=device.type != "cpu")
    scaler = torch.amp.GradScaler(device.type, enabled=precision.mixed == "16-mixed")

    def plain() -> None:
        with precision.autocast(device):
            losses = work.losses()
        scaler.scale(losses.float().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    def without_gradients(update: Update) -> None:
        """Gradients that are left from another update would hide the memory of this one."""
        update()
        optimizer.zero_grad()

    updates: dict[str, Update] = {PLAIN: partial(without_gradients, plain)}
    for name, arguments in chains.items():
        step = Step(work.model, optimizer, work.loss_fn, precision=precision.mixed, **arguments)
        updates[name] = partial(without_gradients, partial(step.run, [work.batch]))
    return updates


def measure_updates(
    updates: Mapping[str, Update], device: torch.device, max_seconds: float, advance: Callable[[int], None]
) -> list[dict[str, Any]]:
    """Time relative to the first update, host waits and peak memory of each update; an error instead, if it fails."""
    results: dict[str, dict[str, Any]] = {}
    for name, update in updates.items():
        result: dict[str, Any] = {
            "update": name,
            "ms": None,
            "ratio": None,
            "waits": None,
            "peak_bytes": None,
            "error": None,
        }
        results[name] = result
        try:
            for _ in range(WARM_UP):
                update()
            result["waits"] = count_waits(update, device)
            result["peak_bytes"] = peak_bytes(update, device)
        except Exception as error:  # the others are still measured
            result["error"] = one_line(error)
        advance(1)
    working = {name: update for name, update in updates.items() if results[name]["error"] is None}
    times = interleaved_times(working, clock_of(device), max_seconds) if working else {}
    base = times.get(next(iter(updates)))
    for name, seconds in times.items():
        results[name]["ms"] = 1e3 * statistics.median(seconds)
        if base is not None:
            results[name]["ratio"] = statistics.median(a / b for a, b in zip(seconds, base, strict=True))
    return list(results.values())


def clock_of(device: torch.device) -> Callable[[], float]:
    """Processor time of one thread, which other processes disturb least; otherwise wall time."""
    return time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


def count_waits(update: Update, device: torch.device) -> float | None:
    """Host waits per update as PyTorch reports them; None if the device has no synchronization debug mode.

    The mode warns of `.item()`, blocking copies, `nonzero` and the like. It does not see waits for events, and copies
    from pageable memory that are asynchronous by name only.
    """
    set_mode = device_function(device, "set_sync_debug_mode")
    if set_mode is None:
        return None
    torch.accelerator.synchronize()
    before = torch.get_device_module(device).get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        set_mode("warn")
        try:
            for _ in range(COUNTED):
                update()
        finally:
            set_mode(before)
    return sum(SYNC_WARNING in str(warning.message) for warning in caught) / COUNTED


def error_of_norms(work: Work, device: torch.device, precision: Precision) -> tuple[float, Tensor]:
    """Largest relative error of the gradient norms of the first samples, compared with a backward pass of each sample,
    infinite for NaN; and the norms of all samples.

    The passes share one forward pass: that of a sample alone would be rounded in another way, which changes the
    gradients of an ordinary ResNet by several percent in TF32 and half precision.
    """
    trained = list(work.model.parameters())
    with precision.autocast(device):
        losses = work.losses() * precision.loss_scale
    expected = []
    for loss in losses[:COMPARED].unbind():
        gradient = torch.autograd.grad(loss, trained, retain_graph=True)
        expected.append(torch.stack([g.norm() for g in gradient]).norm())
    del gradient
    norms = gradients(losses, work.model).norms().detach()
    errors = [abs(float(norm) / float(exact) - 1) for norm, exact in zip(norms, expected, strict=False)]
    error = max(errors) if not any(map(math.isnan, errors)) else math.inf
    return error, norms / precision.loss_scale


def one_line(error: BaseException) -> str:
    """First line of an error with its type, without paths of files, which may contain names of people."""
    lines = str(error).strip().splitlines() or [""]
    return without_paths(f"{type(error).__name__}: {lines[0]}")[:200]


def without_paths(text: str) -> str:
    """Text with "…" in place of each word that looks like the path of a file."""
    words = text.split(" ")
    return " ".join("…" if word.count("/") + word.count("\\") > 1 or word.startswith("~") else word for word in words)
