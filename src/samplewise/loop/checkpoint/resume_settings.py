"""Settings and frozen parameters of a run, saved in checkpoints and compared with those of the script on resume.

    step         samples, microbatch, transforms, loss, ...: on resume those of the script are used, also if a callback
                 had changed them since
    optimizer    settings of each parameter group: on resume those of the checkpoint are used, as PyTorch does
    scheduler    the same

A scheduler changes the learning rate during the training. So a checkpoint contains two kinds of optimizer settings:
those at the time of saving, in the state dicts of optimizer and scheduler, and those that the run was created with.
A script that has the latter is unchanged.

With save="trained", a parameter is left out of checkpoints while it is frozen (requires_grad=False) and has the values
that it had when `fit` started. All others are saved, for example those of a teacher that is a moving average of the
student. A checkpoint contains the checksums of the parameters that it leaves out, so that it is only resumed with the
same base model.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from samplewise.core.files import sha256
from samplewise.core.state import checksum
from samplewise.errors import CheckpointError
from samplewise.parallel import collectives
from samplewise.parallel.sharded_parameters import is_dtensor
from samplewise.step.config import FunctionalOptimizer
from samplewise.step.step import Step

PLAIN = (bool, int, float, str, type(None))
LABELS = {"lr": "learning rate", "initial_lr": "initial learning rate"}
NOT_SETTINGS = ("params", "param_names")  # entries of a parameter group
POSITIONS = ("last_epoch", "base_lrs")  # entries of a scheduler that are its state, or known from the parameter groups
REMEDY = " To change a learning rate on resume, pass callbacks=[sw.callbacks.SetLR(...)]."

Settings = dict[str, Any]


class Differences(NamedTuple):
    """Sentences about settings that differ from those of the checkpoint, with both values."""

    restored: list[str]  # the script has others, which are not used
    set_by_callback: list[str]
    changed: list[str]  # the script has others, which are used

    def __str__(self) -> str:
        remedy = REMEDY if any("learning rate" in line for line in self.restored) else ""
        lines = "; ".join([*self.restored, *self.changed, *self.set_by_callback])
        return f"The run is resumed with settings that differ from those of the checkpoint: {lines}.{remedy}"


class RunSettings:
    """Settings of the script, and those of the checkpoint from which the run is resumed."""

    def __init__(self, step: Step):
        self._step = step
        self._script: Settings = {}  # of the step, as the script has made it
        self._made: Settings | None = None  # of the optimizer and the scheduler, as the script has made them
        self._created: Settings = {}  # of the optimizer and the scheduler, when the run was created
        self._now: Settings = {}  # of the optimizer and the scheduler, after on_fit_start
        self._saved: dict[str, Settings] | None = None  # all of the checkpoint; None if none was loaded

    def start(self) -> None:
        """Record the settings of the script, before a checkpoint is loaded."""
        self._saved = None
        self._script = step_settings(self._step)
        # A scheduler may have changed them in an earlier fit.
        if self._made is None or self._step.scheduler is None:
            self._made = _of_optimizer(self._step)
        self._created = self._created or self._made

    def state_dict(self) -> dict[str, Any]:
        return {"step": step_settings(self._step), "script": self._script, "created": self._created}

    def load(self, state: Mapping[str, Any]) -> None:
        """Record the settings in the state of a checkpoint, which has been loaded."""
        settings = state["settings"]
        self._created = settings["created"]
        groups = state["optimizer"].get("param_groups", [])
        optimizer = {**self._created, **_of_groups(groups), **_of_scheduler(state.get("scheduler", {}))}
        self._saved = {"step": settings["step"], "script": settings["script"], "optimizer": optimizer}

    def fit_started(self) -> None:
        """Record the settings of optimizer and scheduler after on_fit_start, in which callbacks may change them."""
        if self._saved is not None:
            self._now = _of_optimizer(self._step)

    def differences(self) -> Differences:
        """Compare with the checkpoint, once, after the first on_epoch_start, in which callbacks may change the step."""
        saved = self._saved
        self._saved = None
        if saved is None:
            return Differences([], [], [])
        return Differences(*self._compare_optimizer(saved["optimizer"]), self._compare_step(saved))

    def _compare_step(self, saved: Mapping[str, Settings]) -> list[str]:
        """Compare settings of the step with those of the run's script, and with those at the time of saving."""
        script = saved["script"]
        last = saved["step"]
        now = step_settings(self._step)
        changed = []
        for name in _common(script, last, self._script, now):
            value = self._script[name]
            if not _same(value, script[name]):
                changed.append(f"{name}: {value} from now on, the run had {script[name]}")
            elif not _same(value, last[name]) and _same(value, now[name]):
                changed.append(f"{name}: {value} from now on, a callback had changed it to {last[name]}")
        return changed

    def _compare_optimizer(self, saved: Settings) -> tuple[list[str], list[str]]:
        """Compare settings of optimizer and scheduler; returns those that are kept, and those that a callback set."""
        assert self._made is not None
        now = self._now
        restored: list[str] = []
        set_by_callback: list[str] = []
        initial: set[str] = set()  # groups whose initial learning rate is listed: the current one follows from it
        for name in _common(self._created, self._made, saved, now):
            label, _, group = name.partition(" of ")
            if label == LABELS["lr"] and group in initial:
                continue
            script = self._made[name]
            if not _same(now[name], saved[name]):
                set_by_callback.append(
                    f"{name}: {now[name]} from now on, set by a callback; the checkpoint has {saved[name]}"
                )
            elif not _same(script, self._created[name]) and not _same(script, saved[name]):
                restored.append(f"{name}: the checkpoint's {saved[name]} is kept, the script has {script}")
            else:
                continue
            if label == LABELS["initial_lr"]:
                initial.add(group)
        return restored, set_by_callback


def step_settings(step: Step) -> Settings:
    """Return the settings of a step that the script determines."""
    rate = step.optimizer.param_groups[0]["lr"] if isinstance(step.optimizer, FunctionalOptimizer) else None
    settings = {**step.config.settings(), "loss": loss_name(step.loss_fn), "learning rate": rate}
    settings["threads"] = torch.get_num_threads()  # sums are rounded differently with another number
    return {name: _plain(value) for name, value in settings.items()}


def loss_name(loss_fn: Any) -> str:
    """Return the name of a loss function: "CrossEntropyLoss(label_smoothing=0.1)", or that of a function or class."""
    function = getattr(loss_fn, "criterion", loss_fn)
    if function is not loss_fn and isinstance(function, nn.Module):
        return f"{type(function).__name__}({', '.join(_arguments(function))})"
    if isinstance(function, partial):
        function = function.func
    return getattr(function, "__qualname__", None) or type(function).__name__


def _arguments(criterion: nn.Module) -> Iterator[str]:
    """Arguments of the constructor of a criterion that are not the defaults."""
    for name, parameter in inspect.signature(type(criterion)).parameters.items():
        value = _plain(getattr(criterion, name, parameter.default))
        if value != parameter.default:
            yield f"{name}={value}"


def _of_optimizer(step: Step) -> Settings:
    if isinstance(step.optimizer, FunctionalOptimizer):
        return {}
    state = {} if step.scheduler is None else step.scheduler.state_dict()
    return {**_of_groups(step.optimizer.param_groups), **_of_scheduler(state)}


def _of_groups(groups: Sequence[Mapping[str, Any]]) -> Settings:
    """Return the settings of all parameter groups, by names such as "learning rate of parameter group 1"."""
    settings: Settings = {}
    for k, group in enumerate(groups):
        where = "" if len(groups) == 1 else f" of parameter group {k}"
        names = sorted(set(group) - set(NOT_SETTINGS), key=lambda name: (name not in LABELS, name))
        settings |= {f"{LABELS.get(name, name)}{where}": _plain(group[name]) for name in names}
    return settings


def _of_scheduler(state: Mapping[str, Any], title: str = "scheduler") -> Settings:
    """Return the settings in the state dict of a scheduler, and of those that it contains."""
    settings = {
        f"{name} of the {title}": _plain(value)
        for name, value in state.items()
        if name == "_milestones" or not (str(name).startswith("_") or name in POSITIONS)
    }
    for k, inner in enumerate(state.get("_schedulers", ())):
        settings |= _of_scheduler(inner, f"{title}'s part {k}")
    return settings


def _common(*settings: Settings) -> list[str]:
    """Names that occur in all: optimizers of another version of PyTorch may have others."""
    return [name for name in settings[0] if all(name in mapping for mapping in settings)]


def _same(a: Any, b: Any) -> bool:
    return a == b or repr(a) == repr(b)  # NaN is the rate of a function without one


def _plain(value: Any) -> Any:
    """Return numbers and texts as they are, a tensor of one element as its number, and other values as their repr."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else f"tensor of shape {tuple(value.shape)}"
    return value if type(value) in PLAIN else repr(value)


# --- frozen parameters that are left out with save="trained" ---------------------------------------------------------


class FrozenParams:
    """Frozen parameters of a model and their checksums. With save="all" none are recorded."""

    def __init__(self, model: nn.Module, save: str):
        if save not in ("all", "trained"):
            raise ValueError(f"save must be 'all' or 'trained'; found {save!r}.")
        self._model = model
        self._save = save
        self._recorded = False
        self._digests: dict[str, str] = {}
        self._sums: dict[str, Tensor] = {}  # to notice changes: faster than digests, but not equal on all devices

    def record(self) -> None:
        """Record the values of the frozen parameters at the first call, before a checkpoint is loaded. Collective."""
        if self._recorded or self._save == "all":
            return
        frozen = _frozen(self._model)
        self._digests = {name: _digest(p) for name, p in frozen.items()}
        self._sums = {name: _sum(p) for name, p in frozen.items()}
        self._recorded = True

    def unchanged(self) -> dict[str, str]:
        """Return the checksums of the frozen parameters that have the recorded values, by name. Collective."""
        if self._digests:
            frozen = _frozen(self._model)
            equal = {name for name in self._sums if name in frozen and _sum(frozen[name]).equal(self._sums[name])}
            on_all_ranks = set.intersection(*collectives.all_gather_object(equal))
            self._digests = {name: digest for name, digest in self._digests.items() if name in on_all_ranks}
            self._sums = {name: self._sums[name] for name in self._digests}
        return self._digests

    def model_state(self) -> dict[str, Any]:
        """Return {"model": state dict without the recorded parameters, "frozen": checksums of these}. Collective."""
        frozen = self.unchanged()
        state = self._model.state_dict()
        for name in frozen:
            del state[name]
        return {"model": state, "frozen": dict(frozen)}


def check_frozen(frozen: Mapping[str, str], model: nn.Module) -> None:
    """Raise CheckpointError unless the model has the parameters that a checkpoint leaves out. Collective."""
    state = model.state_dict()
    for name, digest in frozen.items():
        actual = _digest(state[name]) if name in state else None
        if actual != digest:
            values = "is not in this model" if actual is None else "has other values in this model"
            raise CheckpointError(
                "a checkpoint without frozen parameters (save='trained') must be resumed with the base model that the "
                f"run was started with; found that {name!r} {values}. Load that base model before fit, or start a new "
                "run directory."
            )


def _frozen(model: nn.Module) -> dict[str, Tensor]:
    """Return the frozen parameters by name, including all names of tied ones."""
    saved = model.state_dict().keys()  # a model may rename or leave out some
    return {n: p for n, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad and n in saved}


def _digest(tensor: Tensor) -> str:
    """Return the SHA-256 of dtype, shape and values of a tensor. Collective for a sharded tensor."""
    values: Any = tensor.detach()
    if is_dtensor(values):
        values = values.full_tensor()
    return sha256([f"{values.dtype} {tuple(values.shape)}", values])


def _sum(tensor: Tensor) -> Tensor:
    """Return a checksum of this rank's part of a tensor. NaN is equal to nothing, so it counts as changed."""
    local: Any = tensor.detach()
    return checksum(local.to_local() if is_dtensor(local) else local)


def with_frozen(state: Mapping[str, Any], frozen: Iterable[str], model: nn.Module) -> dict[str, Any]:
    """Return a state dict completed by the parameters of the model that it leaves out."""
    current = model.state_dict()
    return {**state, **{name: current[name] for name in frozen}}
