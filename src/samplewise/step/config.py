"""Arguments of a step, validated: its settings, and functions in place of a torch.optim optimizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from samplewise.core.microbatch import Auto, as_microbatch
from samplewise.core.validate import accepts, refuse_keras
from samplewise.errors import NonFiniteGradientError, PrivacyError
from samplewise.parallel.launch import ParallelArgument
from samplewise.step.noise import check_noise_is_known
from samplewise.step.policy import OrdinaryUpdate, UpdatePolicy
from samplewise.step.schedules import BySamples, FollowNoise, Ramp, Samples, SampleScheduler
from samplewise.transforms.chain import Chain, as_chain
from samplewise.transforms.sums import Per, as_per

Tail = Literal["update", "drop", "carry"]
Interaction = Literal["refuse", "allow"]
Precision = Literal["32", "bf16-mixed", "16-mixed"]
RECORDABLE = frozenset({"norms"})


@dataclass(frozen=True)
class StepConfig:
    """Settings of a step, as given to `Step`; see there. Raises ValueError for invalid values."""

    samples: Samples = None
    tail: Tail = "update"
    transforms: Chain = field(default_factory=lambda: as_chain(()))
    max_grad_norm: float | None = None
    on_nonfinite: str | None = None
    recheck: int | Literal[False] | None = None
    microbatch: int | Auto | None = None
    precision: Precision | None = None
    compile: bool | Literal["auto"] = False
    parallel: ParallelArgument = None
    record: frozenset[str] = frozenset()
    interacting: Interaction = "refuse"
    policy: UpdatePolicy = field(default_factory=OrdinaryUpdate)
    aggregate: Per | None = None  # None: per token

    def __post_init__(self) -> None:
        self.policy.check_settings(vars(self))
        policies = self.policy.nonfinite_policies
        if self.on_nonfinite is None:
            object.__setattr__(self, "on_nonfinite", policies[0])
        samples = self.samples
        if not (samples is None or isinstance(samples, (Ramp, FollowNoise)) or (type(samples) is int and samples > 0)):
            raise ValueError(
                f"samples must be a positive integer, or None for one update per batch; found {samples!r}. For a "
                "number that changes, pass sw.ramp({0: 32, 20_000: 64}) or sw.follow_noise(at_least=32, at_most=1024)."
            )
        if isinstance(samples, FollowNoise):
            check_noise_is_known(self.transforms, self.aggregate, "Use a number of samples, or sw.ramp.")
        if self.tail not in get_args(Tail):
            raise ValueError(f"tail must be one of {', '.join(get_args(Tail))}; found {self.tail!r}.")
        if self.on_nonfinite not in policies:
            raise ValueError(f"on_nonfinite must be one of {', '.join(policies)}; found {self.on_nonfinite!r}.")
        norm = self.max_grad_norm
        if norm is not None and not (isinstance(norm, (int, float)) and norm > 0):
            raise ValueError(f"max_grad_norm must be positive; found {norm!r}.")
        if not (self.recheck is None or self.recheck is False or (type(self.recheck) is int and self.recheck > 0)):
            raise ValueError(f"recheck must be a positive number of updates, None or False; found {self.recheck!r}.")
        if self.interacting not in get_args(Interaction):
            raise ValueError(f"interacting must be 'refuse' or 'allow'; found {self.interacting!r}.")
        if self.interacting == "allow" and self.recheck:
            raise ValueError(
                f"recheck must be None or False with interacting='allow'; found {self.recheck!r}. A recheck compares a "
                "sample in its batch with the same sample alone, which differ if samples interact."
            )
        as_microbatch(self.microbatch)
        as_per(self.aggregate).check_transforms(self.transforms)
        if self.aggregate == Per("token"):  # the default
            object.__setattr__(self, "aggregate", None)
        if self.precision is not None and self.precision not in get_args(Precision):
            names = ", ".join(map(repr, get_args(Precision)))
            raise ValueError(f"precision must be one of None, {names}; found {self.precision!r}.")
        if self.compile not in (True, False, "auto"):
            raise ValueError(f"compile must be True, False or 'auto'; found {self.compile!r}.")

    @property
    def constant_divisor(self) -> float | None:
        """Divisor of every update; None if it depends on the samples."""
        return None if self.aggregate is None else self.aggregate.constant

    @property
    def hides_samples(self) -> bool:
        """True if losses, norms and numbers of samples must not be shown."""
        return not self.policy.visible

    @property
    def checks_finite(self) -> bool:
        """True if non-finite values are looked for before each update."""
        return self.on_nonfinite != "ignore" or self.precision == "16-mixed"

    def skips(self, problem: Exception) -> bool:
        """True if this problem skips the update instead of raising: with on_nonfinite="skip"; or if gradients overflow
        under a loss scale, which is then halved.
        """
        overflow = self.precision == "16-mixed" and isinstance(problem, NonFiniteGradientError)
        return self.on_nonfinite == "skip" or overflow

    def settings(self) -> dict[str, Any]:
        """Settings that all ranks must share and that run.json shows."""
        return {
            "samples": self.samples,
            "microbatch": self.microbatch,
            "transforms": self.transforms,
            "tail": self.tail,
            "precision": self.precision,
            "max_grad_norm": self.max_grad_norm,
            "on_nonfinite": self.on_nonfinite,
            "compile": self.compile,
            "interacting": self.interacting,
            "aggregate": self.aggregate,
            **self.policy.settings(),
        }


def as_record(names: Any) -> frozenset[str]:
    """The `record` argument, a collection of names or a single name, as a set of names."""
    record = {names} if isinstance(names, str) else names
    if not isinstance(record, Collection) or not RECORDABLE.issuperset(record):
        raise ValueError(f"record must be 'norms', or a collection with this name; found {names!r}.")
    return frozenset(record)


def check_order(model: Any, optimizer: Any, loss_fn: Any) -> None:
    """Raise TypeError if the arguments of `Step` are in another order."""
    refuse_keras(model)
    types = ", ".join(type(argument).__name__ for argument in (model, optimizer, loss_fn))
    swapped = isinstance(loss_fn, (Optimizer, GradientDescent)) and not isinstance(optimizer, Optimizer)
    if not isinstance(model, nn.Module) or swapped:
        raise TypeError(f"arguments must be Step(model, optimizer, loss_fn), with a torch.nn.Module; found {types}.")


def check_scheduler(scheduler: Any, optimizer: Any, hides_samples: bool = False) -> None:
    """Raise TypeError unless the scheduler can step once per update of this optimizer. `hides_samples`: their number is
    private.
    """
    if hides_samples and isinstance(scheduler, (BySamples, SampleScheduler)):
        raise PrivacyError(
            "scheduler must step once per update with privacy=, because the number of samples of a draw is private; "
            f"found {scheduler!r}. Pass the scheduler itself, with a number of updates."
        )
    if scheduler is None or isinstance(scheduler, BySamples):
        return
    if isinstance(scheduler, ReduceLROnPlateau):
        raise TypeError(
            "scheduler must step once per update without a metric; found ReduceLROnPlateau. "
            "Call its step(metric) yourself, after validation."
        )
    if isinstance(scheduler, type) or not hasattr(scheduler, "step"):
        name = f"the class {scheduler.__name__}" if isinstance(scheduler, type) else repr(scheduler)
        raise TypeError(
            f"scheduler must be an object of torch.optim.lr_scheduler; found {name}. Create it with the optimizer: "
            "StepLR(optimizer, step_size=100)."
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise TypeError(
            "scheduler must be created with the optimizer of the step; found that it has another one. "
            "Create it with the optimizer that is passed to Step(...)."
        )


# --- optimizers -------------------------------------------------------------------------------------------------------

Rule = Callable[[list[Tensor], list[Tensor]], None]  # (params, gradients) -> None


@dataclass(frozen=True)
class GradientDescent:
    """Gradient descent without state, p -= lr × g."""

    lr: float

    def __call__(self, params: list[Tensor], gradients: list[Tensor]) -> None:
        torch._foreach_add_(params, gradients, alpha=-self.lr)


def sgd(lr: float) -> Rule:
    """Stateless gradient descent p -= lr × g, for `Step(optimizer=...)`."""
    if not lr >= 0:
        raise ValueError(f"lr must be zero or positive; found {lr!r}.")
    return GradientDescent(lr)


class FunctionalOptimizer:
    """Adapter from a function (params, gradients) -> None to the part of the optimizer interface that a step uses."""

    def __init__(self, params: Iterable[Tensor], rule: Rule):
        self.rule = rule
        self.param_groups: list[dict[str, Any]] = [{"params": list(params), "lr": getattr(rule, "lr", float("nan"))}]

    @torch.no_grad()
    def step(self) -> None:
        """Call the function with the parameters that have a gradient, and their gradients in the same order."""
        params = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        self.rule(params, [p.grad for p in params])

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def as_optimizer(optimizer: Any, params: Iterable[Tensor]) -> Any:
    """Validate the `optimizer` argument of `Step`; a function becomes a `FunctionalOptimizer` for `params`."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(
            "optimizer must update the parameters from the given gradients; found LBFGS, which calls the loss function "
            "itself. Write that loop with sw.gradients."
        )
    if hasattr(optimizer, "param_groups") and hasattr(optimizer, "step"):
        return optimizer
    if callable(optimizer) and not isinstance(optimizer, (type, torch.nn.Module)) and accepts(optimizer, 2):
        return FunctionalOptimizer(params, optimizer)
    description = type(optimizer).__name__
    if hasattr(optimizer, "__name__"):
        description = f"the {'class' if isinstance(optimizer, type) else 'function'} {optimizer.__name__}"
    raise TypeError(
        f"optimizer must be a torch.optim optimizer, or a function (params, gradients) -> None; found {description}. "
        "Write torch.optim.SGD(model.parameters(), lr=0.1), or sw.sgd(0.1)."
    )
