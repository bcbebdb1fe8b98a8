"""Trained parameters: those of the optimizer, by name; and the guard of the gradient sums in their `.grad` while a
window is open and code of the caller runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from samplewise.engine.backward import without_grads
from samplewise.errors import ParameterError
from samplewise.parallel.sharded_parameters import local_gradient, sharded_gradient


class TrainedParameters:
    """The optimizer's parameters, with their names in the modules: `owned` as the optimizer holds them, `named` as the
    autograd graph contains them. Both are equal unless the optimizer holds shards. `leaves`: id of a shard -> name and
    whole parameter.
    """

    def __init__(self, optimizer: Any, modules: Sequence[nn.Module], leaves: Mapping[int, tuple[str, Tensor]]):
        self._optimizer = optimizer
        self._modules = modules
        self._leaves = leaves
        self._count = -1
        self.cleared = 0  # number of calls of clear(): shows whether `.grad` still belongs to an update
        self.named: dict[str, Tensor] = {}
        self.owned: dict[str, Tensor] = {}
        self.refresh()

    def refresh(self) -> None:
        """Update `owned` and `named` if the number of the optimizer's parameters has changed."""
        if self.has_changed:
            self.owned = self._name()
            self._count = sum(len(group["params"]) for group in self._optimizer.param_groups)
            wholes = dict(self._leaves.values())
            self.named = {name: wholes.get(name, p) for name, p in self.owned.items()}

    @property
    def has_changed(self) -> bool:
        """True if the optimizer has another number of parameters than at the last `refresh`."""
        count = 0
        for group in self._optimizer.param_groups:
            count += len(group["params"])
        return count != self._count

    @property
    def sharded(self) -> bool:
        """True if the optimizer holds shards."""
        return bool(self._leaves)

    @property
    def device(self) -> torch.device:
        """Current device of the parameters: a model may be moved after the step was created."""
        return next(iter(self.named.values())).device

    def trainable(self) -> dict[str, Tensor]:
        """Parameters that currently require gradients."""
        return {name: p for name, p in self.named.items() if p.requires_grad}

    def gradients(self) -> list[Tensor]:
        """All gradients in `.grad`: the values of sparse gradients, this rank's shard of sharded ones."""
        gradients = []
        for p in self.owned.values():
            gradient = p.grad
            if gradient is not None:
                usual = gradient.layout is torch.strided and not self._leaves
                gradients.append(gradient if usual else self._dense(p))
        return gradients

    def named_gradients(self) -> dict[str, Tensor]:
        """As `gradients`, by name."""
        return {name: self._dense(p) for name, p in self.owned.items() if p.grad is not None}

    def _dense(self, p: Tensor) -> Tensor:
        assert p.grad is not None
        if id(p) in self._leaves:
            return local_gradient(p)
        if p.grad.layout is torch.strided:
            return p.grad
        p.grad = p.grad.coalesce()  # sums the values of rows that occur several times
        return p.grad._values()

    def local_gradients(self) -> dict[str, Tensor]:
        """All gradients in `.grad` by name: this rank's shard of sharded ones."""
        return {
            name: local_gradient(p) if id(p) in self._leaves else p.grad
            for name, p in self.owned.items()
            if p.grad is not None
        }

    def set_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Set `.grad` to these tensors, as `local_gradients` returns them."""
        for name, gradient in gradients.items():
            p = self.owned[name]
            p.grad = sharded_gradient(p, gradient) if id(p) in self._leaves else gradient

    def fill(self) -> None:
        """Make gradients dense: zeros for trainable parameters without a gradient, and for missing sparse rows."""
        for p in self.owned.values():
            if p.grad is None and p.requires_grad:
                p.grad = torch.zeros_like(p)
            elif p.grad is not None and p.grad.layout is not torch.strided:
                p.grad = p.grad.to_dense()

    def coalesce(self) -> None:
        """Sum the rows of sparse gradients that occur several times."""
        for p in self.owned.values():
            if p.grad is not None and p.grad.layout is torch.sparse_coo:
                p.grad = p.grad.coalesce()

    def without_grads(self) -> AbstractContextManager[None]:
        """Context manager: `.grad` is None inside and is restored on exit, for backward passes of other code."""
        return without_grads(dict.fromkeys([*self.named.values(), *self.owned.values()]))

    def clear(self) -> None:
        """Set `.grad` of all parameters to None."""
        self.cleared += 1
        for p in self.named.values():
            p.grad = None
        for p in self.owned.values() if self._leaves else ():
            p.grad = None

    def untracked_parameters(self) -> dict[str, Tensor]:
        """Parameters of the modules that require gradients and that the optimizer does not have."""
        trained = {id(p) for p in self.named.values()}
        parameters = {name: self._leaves.get(id(p), (name, p))[1] for name, p in _named_parameters(self._modules)}
        return {name: p for name, p in parameters.items() if p.requires_grad and id(p) not in trained}

    def _name(self) -> dict[str, Tensor]:
        """The optimizer's parameters by their names in the modules."""
        names = {id(p): name for name, p in reversed(list(_named_parameters(self._modules)))}
        for shard, (name, parameter) in self._leaves.items():
            names[shard] = names.pop(id(parameter), name)
        params = [p for group in self._optimizer.param_groups for p in group["params"]]
        if not params:
            raise ParameterError(
                "the optimizer must have at least one parameter; found none. Create it with model.parameters()."
            )
        if self._leaves and any(id(p) not in self._leaves for p in params):
            raise ParameterError(
                "the optimizer of a sharded model must hold sharded parameters of this model only; found whole ones, "
                "or others. Create it with model.parameters(), after fully_shard and before any forward pass."
            )
        return {names.get(id(p), f"optimizer.{k}"): p for k, p in enumerate(params)}


def _named_parameters(modules: Iterable[nn.Module]) -> Iterable[tuple[str, Tensor]]:
    """Names and parameters of the model; those of a loss module have the prefix "loss."."""
    for k, module in enumerate(modules):
        yield from ((name if k == 0 else f"loss.{name}", p) for name, p in module.named_parameters())


# --- open windows -----------------------------------------------------------------------------------------------------

REMEDY = (
    "Call step.flush() or step.apply() first, which makes the update and closes the window, and leave out "
    "optimizer.zero_grad() and optimizer.step(), which the step does itself."
)


class OpenWindowGuard:
    """Notices what code of the caller does to the sums of an open window: `leave` before it runs, `enter` after it.

    A change of a gradient increments its version counter, or replaces the tensor; the tensors are held, so that a new
    one cannot have the same id. A change of a parameter increments its version counter, too: model.load_state_dict()
    does, whose values the sums do not belong to.
    """

    def __init__(self, trained: TrainedParameters, optimizer: Any):
        self._trained = trained
        self._optimizer = optimizer
        self.active = False  # True between `leave` and `enter`
        self._sums: list[tuple[Tensor | None, int]] = []  # gradients with their versions
        self._versions: list[int] | None = None  # of the parameters; None: they may change
        reference = weakref.ref(self)  # the optimizer may be used further when the step is deleted

        def refuse_step(*_: object) -> None:
            guard = reference()
            if guard is not None:
                guard.refuse_step()

        self._hook = refuse_step

    def leave(self, parameters: bool = True) -> None:
        """Record the gradients, and let optimizer.step() raise until `enter`. parameters=False: parameters may change,
        as those of a restored window, whose model may be loaded after the step.
        """
        sums: list[tuple[Tensor | None, int]] = []
        for p in self._trained.owned.values():
            gradient = p.grad
            sums.append((gradient, -1 if gradient is None else gradient._version))
        self._sums = sums
        self.active = True
        watched = parameters and not self._trained.sharded  # shards are written when they are gathered
        self._versions = [p._version for p in self._trained.owned.values()] if watched else None
        # Not registered by register_step_pre_hook, whose handles count as new hooks for the engine, and for this time
        # only, because updates of optimizers with hooks are not compiled.
        self._hooks()[id(self)] = self._hook

    def enter(self) -> None:
        """Raise ParameterError if the gradients, or the parameters of the optimizer, have changed since `leave`."""
        if not self.active:
            return
        if self._trained.has_changed:
            raise ParameterError(
                "the parameters of the optimizer must stay the same while a window is open; found that some were added "
                f"or removed after its first samples. {REMEDY}"
            )
        for (name, p), (before, version) in zip(self._trained.owned.items(), self._sums, strict=True):
            after = p.grad
            if after is not before or (after is not None and after._version != version):
                raise ParameterError(
                    "`.grad` holds the sums of an open window and must not be changed by other code, nor by the loss "
                    f"function; found that the gradient of {name!r} was {_change(before, after)}, for example by "
                    "optimizer.zero_grad(), by a backward pass, or by another step on the same model. The samples of "
                    f"the window are discarded. {REMEDY}"
                )
        for (name, p), version in zip(self._trained.owned.items(), self._versions or (), strict=False):
            if p._version != version:
                raise ParameterError(
                    "parameters must not change while a window is open, because the gradients of its samples belong to "
                    f"their values; found that {name!r} was changed in place, for example by model.load_state_dict(). "
                    f"The samples of the window are discarded. Call step.flush() before, or step.load_state_dict() "
                    "after it, which discards the window and restores that of the checkpoint."
                )
        self.forget()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context manager: `leave` before the block, and `enter` after it unless it raises. Layers may change their
        parameters in a forward pass, as nn.Embedding(max_norm=) does.
        """
        self.leave(parameters=False)
        try:
            yield
        except BaseException:
            self.forget()
            raise
        self.enter()

    def refuse_step(self) -> None:
        """Raise ParameterError if a gradient is still a sum of the window. After zero_grad() they are others."""
        sums = {id(gradient) for gradient, _ in self._sums if gradient is not None}
        if any(id(p.grad) in sums for p in self._trained.owned.values()):
            raise ParameterError(
                "optimizer.step() must not be called while a window of the step is open, because `.grad` holds a sum "
                f"that is not divided yet; found samples that are in no update. {REMEDY}"
            )

    def forget(self) -> None:
        """Stop watching: the window is continued or discarded."""
        if self.active:
            self.active = False
            self._sums = []
            self._hooks().pop(id(self), None)

    def _hooks(self) -> dict[int, Any]:
        """Pre-hooks of optimizer.step(); a function in place of an optimizer has none."""
        return getattr(self._optimizer, "_optimizer_step_pre_hooks", {})


def _change(before: Tensor | None, after: Tensor | None) -> str:
    if before is after:
        return "changed in place"
    if after is None:
        return "removed"
    return "added" if before is None else "replaced"
