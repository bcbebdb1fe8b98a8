"""Time and memory of an update, and advice derived from them; for samplewise doctor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import nn

from samplewise.core.memory import kept_for_backward
from samplewise.core.text import render

ROUNDS = 30
LONGEST = 5.0  # seconds of measuring, after FEWEST rounds
FEWEST = 3  # rounds
MEGA = 1e6
PLAIN = "plain"

Key = tuple[str, int | None]  # kind of update, microbatch; None: all samples at once
Updates = Mapping[Key, Callable[[], object]]


@dataclass(frozen=True)
class Cost:
    """Time and memory of one update."""

    milliseconds: float
    bytes: int | None  # None: cannot be measured


Costs = dict[Key, Cost]


def measured(updates: Updates, models: Mapping[Key, nn.Module], device: torch.device) -> Costs:
    """Time and memory of each update."""
    seconds = _interleaved(updates)
    return {key: Cost(1000 * seconds[key], _memory(updates[key], models[key], device)) for key in updates}


def microseconds(passes: Updates, updates: int) -> dict[Key, float]:
    """Microseconds of one update; each pass makes `updates` updates."""
    return {key: 1e6 * seconds / updates for key, seconds in _interleaved(passes).items()}


def _interleaved(updates: Updates) -> dict[Key, float]:
    """Minimum seconds of each update over interleaved rounds; other load on the machine can only add time."""
    seconds: dict[Key, list[float]] = {key: [] for key in updates}
    began = perf_counter()
    for done in range(ROUNDS):
        if done >= FEWEST and perf_counter() - began > LONGEST:
            break
        for key, update in updates.items():
            _wait()
            started = perf_counter()
            update()
            _wait()
            seconds[key].append(perf_counter() - started)
    return {key: min(found) for key, found in seconds.items()}


def _wait() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


# --- memory -----------------------------------------------------------------------------------------------------------


def _counts_all(device: torch.device) -> bool:
    """True if the allocator records its peak. On other devices only the tensors saved for backward are counted."""
    return device.type == "cuda"


def _memory(update: Callable[[], object], model: nn.Module, device: torch.device) -> int | None:
    """Peak bytes of an update; None if saved tensors cannot be counted."""
    if _counts_all(device):
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        update()
        return torch.cuda.max_memory_allocated(device) - before
    try:
        with kept_for_backward(model) as kept:
            update()
    except RuntimeError as error:
        if "saved tensor hooks" in str(error):  # torch.func.grad and similar functions forbid saved tensor hooks
            return None
        raise
    return kept.most


def memory_is(device: torch.device) -> str:
    """Description of the memory figure for the title of the table."""
    if _counts_all(device):
        return "peak memory of an update, beyond what was allocated before it"
    return "tensors saved for backward by the forward pass, without weights"


# --- table and advice -------------------------------------------------------------------------------------------------


def table(costs: Costs, keys: list[Key], title: str) -> str:
    """Text table with one line per microbatch size; combinations without a cost are shown as "refused"."""
    kinds, sizes = (list(dict.fromkeys(column)) for column in zip(*keys, strict=True))
    header = ["at a time", *(f"{unit}, {kind}" for kind in kinds for unit in ("ms", "MB"))]
    rows = []
    for size in sizes:
        name = "all at once" if size is None else f"microbatch {size}"
        rows.append([name, *_cells(costs.get((kind, size)) for kind in kinds)])
    return render(header, rows, title)


def _cells(costs: Iterator[Cost | None]) -> Iterator[str]:
    for cost in costs:
        if cost is None:
            yield "refused"
            yield ""
        else:
            yield three_digits(cost.milliseconds)
            yield _mega(cost.bytes)


def _mega(size: float | None) -> str:
    return "?" if size is None else three_digits(size / MEGA)


def three_digits(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def advice(costs: Costs, samples: int | None, of: int | None, free: int) -> list[str]:
    """Sentences of advice. The costs were measured on `samples` samples of a batch of `of`; `free`: free bytes."""
    return [*_about_clipping(costs), *_about_microbatches(costs), *_about_the_batch(costs, samples, of, free)]


def _about_clipping(costs: Costs) -> list[str]:
    at_once = {kind: cost for (kind, size), cost in costs.items() if size is None}
    return [
        f"An update that clips each sample takes {cost.milliseconds / at_once[PLAIN].milliseconds:.1f} times as long "
        "as a plain one."
        for kind, cost in at_once.items()
        if kind != PLAIN and PLAIN in at_once
    ]


def _pieces(costs: Costs) -> dict[int, Cost]:
    return {size: cost for (kind, size), cost in costs.items() if kind == PLAIN and size is not None}


def _about_microbatches(costs: Costs) -> list[str]:
    whole = costs.get((PLAIN, None))
    pieces = _pieces(costs)
    if whole is None or not pieces:
        return []
    size = max(pieces)
    time = pieces[size].milliseconds / whole.milliseconds
    memory = _share(pieces[size], whole)
    found = f"Microbatches of {size} take {time:.1f} times as long as all samples at once"
    if memory is not None:
        found += f" and {memory:.0%} of the memory"
    if memory is not None and memory > 0.95:
        return [f"{found}: do not use --microbatch."]
    if time >= 1.05:
        return [f"{found}: use --microbatch only if memory is short."]
    return [f"{found}."]


def _share(piece: Cost, whole: Cost) -> float | None:
    return None if piece.bytes is None or not whole.bytes else piece.bytes / whole.bytes


def _about_the_batch(costs: Costs, samples: int | None, of: int | None, free: int) -> list[str]:
    """Memory of the whole batch, extrapolated linearly from two sizes."""
    whole = costs.get((PLAIN, None))
    pieces = _pieces(costs)
    if whole is None or not pieces or samples is None or of is None or of == samples:
        return []
    size = max(pieces)
    most = whole.bytes
    fewer = pieces[size].bytes
    if most is None or fewer is None:
        return []
    each = (most - fewer) / (samples - size)
    total = most + each * (of - samples)
    found = f"Each sample adds about {_mega(each)} MB, which makes {_mega(total)} MB for the batch of {of}"
    if total > free / 2:
        return [f"{found}: more than half of the free memory. Use --microbatch auto."]
    return [f"{found}."]
