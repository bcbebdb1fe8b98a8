"""Compared methods: one class per library, one method per job.

norms()              (B,), norm of each sample's gradient
clipped_sum()        [sum_i min(1, clip / norm_i) g_i], one tensor per parameter
clipped_sum_twice()  the same in two backward passes, if the library supports it
full()               [(B, *shape)], one tensor per parameter

A class without a method does not support the job. Every object has its own model, because most libraries leave hooks or
attributes on it, and imports its library when it is created.
"""

import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor
from workloads import Workload


class Contender(ABC):
    name: str

    def __init__(self, work: Workload):
        self.work, self.clip = work, work.clip
        self.model = copy.deepcopy(work.model)
        self.params = self.trained()
        self.prepare()

    @abstractmethod
    def prepare(self) -> None: ...

    def trained(self) -> list[torch.nn.Parameter]:
        named = [(name.removeprefix("_module."), p) for name, p in self.model.named_parameters()]  # Opacus's prefix
        return [p for name, p in named if p.requires_grad and name not in self.work.unused]

    def losses(self) -> Tensor:
        return self.work.losses(self.model)

    def coefficients(self, norms: Tensor) -> Tensor:
        return (self.clip / norms).clamp(max=1)

    def take_grad(self) -> list[Tensor]:
        return take(self.params, "grad")


class Materialiser(Contender):
    """Base class for methods that compute full rows only; other results are derived from the rows."""

    @abstractmethod
    def full(self) -> list[Tensor]: ...

    def norms(self) -> Tensor:
        return norms_of(self.full())

    def clipped_sum(self) -> list[Tensor]:
        full = self.full()
        weights = self.coefficients(norms_of(full))
        return [torch.tensordot(weights, g, dims=1) for g in full]


def norms_of(full: list[Tensor]) -> Tensor:
    return torch.stack([g.flatten(1).norm(dim=1) for g in full]).norm(dim=0)


def take(params: list[torch.nn.Parameter], field: str) -> list[Tensor]:
    """Read an attribute of every parameter and delete it, so that its memory is freed after the job."""
    missing = sum(not hasattr(p, field) for p in params)
    if missing:
        raise NotImplementedError(f"{missing} of {len(params)} parameters got no {field}")
    values = [getattr(p, field) for p in params]
    for p in params:
        setattr(p, field, None)
    return values


# ------------------------------------------------------------------------------------ without a library


class Plain(Contender):
    """One ordinary step; the unit of all ratios."""

    name = "plain step"

    def prepare(self) -> None: ...

    def step(self) -> list[Tensor]:
        self.losses().mean().backward()
        return self.take_grad()


class Loop(Contender):
    """Forward and backward pass of one sample at a time: the reference for correctness."""

    name = "loop of one"

    def prepare(self) -> None: ...

    def samples(self) -> Iterator[list[Tensor]]:
        for x, y in zip(self.work.inputs.split(1), self.work.targets.split(1), strict=True):
            self.work.loss(self.model(x), y).sum().backward()
            yield self.take_grad()

    def norms(self) -> Tensor:
        return torch.stack([total_norm(g) for g in self.samples()])

    def clipped_sum(self) -> list[Tensor]:
        total = [torch.zeros_like(p) for p in self.params]
        for gradient in self.samples():
            weight = self.coefficients(total_norm(gradient)).item()
            torch._foreach_add_(total, gradient, alpha=weight)
        return total

    def full(self) -> list[Tensor]:
        total = [p.new_empty(len(self.work.inputs), *p.shape) for p in self.params]
        for i, gradient in enumerate(self.samples()):
            torch._foreach_copy_([t[i] for t in total], gradient)
        return total


def total_norm(gradient: list[Tensor]) -> Tensor:
    return torch.nn.utils.get_total_norm(gradient)


# ------------------------------------------------------------------------------------------ samplewise


class Samplewise(Contender):
    name = "samplewise"

    def prepare(self) -> None:
        from samplewise import gradients

        self.gradients = gradients

    def norms(self) -> Tensor:
        return self.gradients(self.losses(), self.model).norms()

    def clipped_sum(self) -> list[Tensor]:
        return self.clipped("fused")

    def clipped_sum_twice(self) -> list[Tensor]:
        return self.clipped("twice")

    def full(self) -> list[Tensor]:
        return list(self.gradients(self.losses(), self.model, strategy="full").full().values())

    def clipped(self, strategy: str) -> list[Tensor]:
        g = self.gradients(self.losses(), self.model, strategy=strategy)
        g.backward(self.coefficients(g.norms()))
        return self.take_grad()

    def walk(self) -> float:
        """Seconds from the losses to the plan: everything before the engine's backward pass."""
        from samplewise.engine.gradients import prepare

        losses = self.losses()
        start = time.perf_counter()
        prepare(self.gradients(losses, self.model))
        return time.perf_counter() - start


# ------------------------------------------------------------------------------------- other libraries


class OpacusHooks(Materialiser):
    name = "Opacus hooks"
    replace = True  # replace unsupported layers by those of Opacus, here nn.LSTM by DPLSTM

    def prepare(self) -> None:
        from opacus import GradSampleModule
        from opacus.validators import ModuleValidator

        fixed = ModuleValidator.fix(self.model) if self.replace else self.model
        self.model = GradSampleModule(fixed, loss_reduction="sum")
        self.params = self.trained()

    def full(self) -> list[Tensor]:
        self.losses().sum().backward()
        self.take_grad()
        return take(self.params, "grad_sample")


class OpacusGhost(Contender):
    name = "Opacus ghost"
    replace = True

    def prepare(self) -> None:
        from opacus.grad_sample import GradSampleModuleFastGradientClipping
        from opacus.validators import ModuleValidator

        fixed = ModuleValidator.fix(self.model) if self.replace else self.model
        self.model = GradSampleModuleFastGradientClipping(fixed, loss_reduction="sum", max_grad_norm=self.clip)
        self.params = self.trained()

    def norms(self) -> Tensor:
        self.losses().sum().backward()
        self.take_grad()
        return self.model.get_norm_sample()

    def clipped_sum(self) -> list[Tensor]:
        losses = self.losses()
        losses.sum().backward(retain_graph=True)
        self.take_grad()
        weights = self.model.get_clipping_coef()
        self.model.disable_hooks()
        (weights * losses).sum().backward()
        self.model.enable_hooks()
        return self.take_grad()


class Backpack(Contender):
    name = "BackPACK"

    def prepare(self) -> None:
        from backpack import backpack, extend
        from backpack.extensions import BatchGrad, BatchL2Grad

        self.model = extend(self.model)
        self.full_gradients = lambda: backpack(BatchGrad())
        self.squared_norms = lambda: backpack(BatchL2Grad())

    def norms(self) -> Tensor:
        with self.squared_norms():
            self.losses().sum().backward()
        self.take_grad()
        return self.take_norms()

    def clipped_sum(self) -> list[Tensor]:
        losses = self.losses()
        with self.squared_norms():
            losses.sum().backward(retain_graph=True)
        self.take_grad()
        (self.coefficients(self.take_norms()) * losses).sum().backward()
        return self.take_grad()

    def full(self) -> list[Tensor]:
        with self.full_gradients():
            self.losses().sum().backward()
        self.take_grad()
        return take(self.params, "grad_batch")

    def take_norms(self) -> Tensor:
        return torch.stack(take(self.params, "batch_l2")).sum(0).sqrt()


class ExpandedWeights(Materialiser):
    name = "ExpandedWeights"

    def prepare(self) -> None:
        from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

        self.call = call_for_per_sample_grads

    def full(self) -> list[Tensor]:
        outputs = self.call(self.model, loss_reduction="sum")(self.work.inputs)
        self.work.loss(outputs, self.work.targets).sum().backward()
        return take(self.params, "grad_sample")


class Vmap(Materialiser):
    name = "vmap(grad)"

    def prepare(self) -> None:
        def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            outputs = torch.func.functional_call(self.model, params, (x[None],))
            return self.work.loss(outputs, y[None]).sum()

        self.per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))

    def full(self) -> list[Tensor]:
        params = {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}
        return list(self.per_sample(params, self.work.inputs, self.work.targets).values())


PEERS: list[type[Contender]] = [OpacusHooks, OpacusGhost, Backpack, ExpandedWeights, Vmap, Loop]
CONTENDERS: dict[str, type[Contender]] = {c.__name__: c for c in [Plain, Samplewise, *PEERS]}
