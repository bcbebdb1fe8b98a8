"""Schedules for the number of samples per update: `sw.ramp` by samples seen, `sw.follow_noise` by the noise scale; and
`sw.by_samples`, a learning rate schedule by samples seen, whatever the number of samples per update.

One step of the learning rate's formula is one sample. Its value is computed at the position itself, not step by step:
an update of 256 samples has one evaluation, and the learning rate at the end has no error of the updates before.
"""

from __future__ import annotations

import inspect
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, LRScheduler, OneCycleLR, SequentialLR

from samplewise.step.noise import check_decay
from samplewise.transforms.transform import function_name


@dataclass(frozen=True, repr=False)
class Ramp:
    """Sizes by the number of samples seen, made by `ramp`."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    def size(self, samples: int) -> int:
        """Size of a window that begins after this number of samples."""
        return self.sizes[bisect_right(self.starts, samples) - 1]

    def __repr__(self) -> str:
        return f"ramp({dict(zip(self.starts, self.sizes, strict=True))})"


def ramp(sizes: Mapping[int, int]) -> Ramp:
    """Schedule for `Step(samples=...)`: number of samples per update, by the number of samples seen.

    `sw.ramp({0: 32, 20_000: 64, 100_000: 256})`: updates of 32 samples, of 64 once 20,000 samples were seen, of 256
    once 100,000 were. A size is chosen when a window is opened, so that a window that crosses a start keeps its size.
    Samples of skipped updates count, and those that tail="drop" leaves out; with several ranks those of all ranks.
    """
    if not isinstance(sizes, Mapping) or not all(_is_whole(number, 0) for number in (*sizes, *sizes.values())):
        raise ValueError(
            "a ramp must map whole numbers of samples seen to whole numbers of samples per update; found "
            f"{sizes!r}. Write sw.ramp({{0: 32, 20_000: 64}})."
        )
    starts = tuple(sizes)
    if starts[:1] != (0,) or list(starts) != sorted(starts):
        raise ValueError(
            f"the starts of a ramp must begin with 0 and increase; found {', '.join(map(str, starts)) or 'none'}. "
            "Write sw.ramp({0: 32, 20_000: 64})."
        )
    if min(sizes.values()) < 1:
        raise ValueError(f"the sizes of a ramp must be positive; found {min(sizes.values())}.")
    return Ramp(starts, tuple(sizes.values()))


@dataclass(frozen=True, repr=False)
class FollowNoise:
    """Sizes that follow the noise scale, made by `follow_noise`."""

    at_least: int
    at_most: int
    ratio: float
    decay: float
    patience: int

    @property
    def sizes(self) -> list[int]:
        """`at_least` times powers of two, and `at_most`."""
        doublings = range((self.at_most // self.at_least).bit_length())
        sizes = [self.at_least << k for k in doublings]
        return sizes if sizes[-1] == self.at_most else [*sizes, self.at_most]

    def __repr__(self) -> str:
        return f"follow_noise({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


def follow_noise(
    at_least: int, at_most: int, *, ratio: float = 0.5, decay: float = 0.98, patience: int = 10
) -> FollowNoise:
    """Schedule for `Step(samples=...)`: number of samples per update by the gradient noise scale, tr Σ / |G|².

    Sizes are `at_least` times powers of two, up to `at_most`; the first is `at_least`. The size grows to the next one
    after `patience` updates in a row whose target is not below that, and shrinks to the previous one after as many
    whose target is not above that. In theory, updates of `ratio` times the noise scale need 1 + ratio times the fewest
    samples, and 1 + 1/ratio times the fewest updates.

    ratio: target, in noise scales.
    decay: factor per update of the moving averages of trace and signal. A signal that is not positive (noise hides it)
    counts as an infinite noise scale; updates that are skipped, or have one sample, are left out.

    The step records the norms of the samples. On an accelerator, each update has a host sync.
    """
    for name, value in {"at_least": at_least, "at_most": at_most, "patience": patience}.items():
        if not _is_whole(value, 1):
            raise ValueError(f"{name} must be a positive whole number; found {value!r}.")
    if not 2 <= at_least <= at_most:
        raise ValueError(
            "at_least must be 2 or more, because one sample shows no noise, and at_most not smaller; found "
            f"at_least={at_least} and at_most={at_most}."
        )
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 < ratio < inf:
        raise ValueError(f"ratio must be positive and finite; found {ratio!r}.")
    check_decay(decay)
    return FollowNoise(at_least, at_most, float(ratio), decay, patience)


def _is_whole(value: Any, least: int) -> bool:
    return type(value) is int and value >= least


Samples = int | None | Ramp | FollowNoise


# --- learning rates ---------------------------------------------------------------------------------------------------


# Arguments for the length of a schedule, and what is added to `total`: OneCycleLR ends one step before total_steps.
LENGTHS = {"T_max": 0, "total_iters": 0, "num_training_steps": 0, "total_steps": 1}
DIRECT = (LambdaLR, OneCycleLR, CyclicLR)  # their get_lr depends on the position only
SUPPORTED = "CosineAnnealingLR, LinearLR, PolynomialLR, OneCycleLR, LambdaLR, or a SequentialLR of these"


@dataclass(frozen=True, repr=False)
class BySamples:
    """Schedule by samples that has no optimizer yet, made by `by_samples`. Call it with the optimizer."""

    scheduler: Callable[..., Any]
    total: int
    options: Mapping[str, Any]

    def __call__(self, optimizer: Any) -> SampleScheduler:
        """Scheduler of this optimizer, at sample 0."""
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"by_samples needs an optimizer of torch.optim, whose learning rate it sets; found {optimizer!r}. "
                "Write torch.optim.SGD(model.parameters(), lr=0.1)."
            )
        return SampleScheduler(optimizer, self)

    def __repr__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"by_samples({function_name(self.scheduler)}, total={self.total}{options})"


def by_samples(scheduler: Callable[..., Any], total: int, **options: Any) -> BySamples:
    """Learning rate schedule by samples seen, for `Step(scheduler=...)`: the same for any number of samples per update.

        sw.Step(..., samples=sw.ramp({0: 32, 20_000: 256}), scheduler=sw.by_samples(CosineAnnealingLR, total=1_000_000))

    The learning rate of an update is that of the number of samples seen before it, and stays the last one after `total`
    samples. Samples of skipped updates count, and with several ranks those of all ranks. In a loop without a step:

        scheduler = sw.by_samples(CosineAnnealingLR, total=1_000_000)(optimizer)
        scheduler.step(len(x))   # after each optimizer.step()

    scheduler: a class of torch.optim.lr_scheduler, or a function (optimizer, ...) that returns a LambdaLR, such as
    get_cosine_schedule_with_warmup of transformers. Supported are classes with a formula of the position:
    CosineAnnealingLR, LinearLR, ConstantLR, PolynomialLR, ExponentialLR, StepLR, MultiStepLR, LambdaLR, OneCycleLR,
    CyclicLR; and SequentialLR, whose `schedulers` are results of by_samples.
    total: number of samples of the schedule; its T_max, total_iters, total_steps or num_training_steps by default.
    options: further arguments of the scheduler, in samples in place of steps.
    """
    if type(total) is not int or total < 1:
        raise ValueError(f"total must be a positive whole number of samples; found {total!r}.")
    if isinstance(scheduler, LRScheduler) or not callable(scheduler):
        raise TypeError(
            f"by_samples needs the class of a scheduler; found {type(scheduler).__name__}. Write "
            "sw.by_samples(CosineAnnealingLR, total=1_000_000)."
        )
    if scheduler is SequentialLR:
        _check_sequence(**options)
    elif isinstance(scheduler, type):
        _check_formula(scheduler)
    return BySamples(scheduler, total, options)


def _check_formula(kind: type) -> None:
    """Raise TypeError unless the learning rates of a scheduler are a function of its position."""
    definition = next((cls for cls in kind.__mro__ if "get_lr" in vars(cls)), object)
    if not ("_get_closed_form_lr" in vars(definition) or definition in DIRECT):
        raise TypeError(
            "by_samples needs a scheduler whose learning rate is a formula of the number of steps; found "
            f"{kind.__name__}, which computes it from the one before. Use {SUPPORTED}."
        )


def _check_sequence(schedulers: Any = (), milestones: Any = (), **options: Any) -> None:
    milestones = list(milestones)
    increasing = all(type(m) is int and m > before for m, before in zip(milestones, [0, *milestones], strict=False))
    schedules = all(isinstance(part, BySamples) and part.scheduler is not SequentialLR for part in schedulers)
    if options or not schedules or not increasing or len(milestones) + 1 != len(schedulers):
        raise ValueError(
            "a SequentialLR by samples needs schedulers=[...], each a by_samples(...) of another class, and "
            "milestones=[...], the number of samples before each one but the first; found "
            f"schedulers={schedulers!r}, milestones={milestones!r}"
            f"{''.join(f', {name}={value!r}' for name, value in options.items())}."
        )


class SampleScheduler:
    """Learning rate by samples seen, of one optimizer, made by `by_samples(...)(optimizer)`."""

    def __init__(self, optimizer: Optimizer, schedule: BySamples):
        self.optimizer = optimizer
        self.samples = 0
        self.schedule = schedule
        is_sequence = schedule.scheduler is SequentialLR
        schedules: Sequence[BySamples] = schedule.options["schedulers"] if is_sequence else [schedule]
        self._starts = [0, *schedule.options["milestones"]] if is_sequence else [0]
        self._totals = [part.total for part in schedules]
        self._parts: list[Any] = [_bind(part, optimizer) for part in schedules]
        self.seek(0)

    def __repr__(self) -> str:
        return f"{self.schedule!r} at sample {self.samples}"

    def step(self, samples: int) -> None:
        """Count the samples of an update and set the learning rate of the next one; call it after optimizer.step().
        A `Step` does this by itself.
        """
        self.seek(self.samples + samples)

    def seek(self, samples: int) -> None:
        """Set the learning rate for an update after this number of samples."""
        self.samples = samples
        position = min(samples, self.schedule.total)
        k = bisect_right(self._starts, position) - 1
        # Set the learning rates to those at a position, in samples.
        scheduler = self._parts[k]
        scheduler.last_epoch = min(position - self._starts[k], self._totals[k])
        scheduler._get_lr_called_within_step = True  # get_lr warns otherwise
        formula = getattr(scheduler, "_get_closed_form_lr", scheduler.get_lr)
        for group, rate in zip(scheduler.optimizer.param_groups, formula(), strict=True):
            set_rate(group, "lr", rate)

    def get_last_lr(self) -> list[Any]:
        """Learning rates of the next update, one for each parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        parts = [part.state_dict() for part in self._parts]
        lengths = {"_totals": list(self._totals), "_milestones": self._starts[1:], "total": self.schedule.total}
        return {"kind": self._kind, "_samples": self.samples, **lengths, "_schedulers": parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore position and settings, as schedulers of torch do."""
        if state["kind"] != self._kind:
            raise ValueError(
                f"the state of a schedule by samples must be of the same scheduler, {self._kind}; found "
                f"{state['kind']}. Use the saved one."
            )
        self.samples = state["_samples"]
        self.schedule = replace(self.schedule, total=state["total"])
        self._totals = list(state["_totals"])
        self._starts = [0, *state["_milestones"]]
        for part, saved in zip(self._parts, state["_schedulers"], strict=True):
            part.load_state_dict(saved)

    @property
    def _kind(self) -> str:
        return ", ".join(type(part).__name__ for part in self._parts)


def set_rate(group: dict[str, Any], name: str, rate: Any) -> None:
    """Set a rate of a parameter group. A tensor keeps its identity, which a compiled optimizer depends on."""
    if isinstance(group[name], Tensor):
        group[name].fill_(rate)
    else:
        group[name] = rate


def _bind(schedule: BySamples, optimizer: Optimizer) -> LRScheduler:
    """The scheduler of torch. Its length is `total` unless the options have one."""
    options = dict(schedule.options)
    names = inspect.signature(schedule.scheduler).parameters
    if not options.keys() & LENGTHS:
        options |= {name: schedule.total + more for name, more in LENGTHS.items() if name in names}
    scheduler = schedule.scheduler(optimizer, **options)
    _check_formula(type(scheduler))
    scheduler.last_epoch = -1  # not begun: sw.audit reports schedulers that stay at their first step
    return scheduler
