"""Situations: hooks, modes, numbers that change in each step, parametrizations."""

import weakref

import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.flop_counter import FlopCounterMode

from everyday_zoo.situation import Situation, situation


@situation
class FullBackwardHook(Situation):
    """Full backward hook on one module that reads gradients."""

    def __init__(self, sizes):
        super().__init__(sizes)
        self.blocks[0].register_full_backward_hook(lambda module, inputs, outputs: None)


@situation
class ReadingHook(Situation):
    """`h.register_hook` on one activation that reads the gradient."""

    def pool(self, h):
        h.register_hook(lambda gradient: None)
        return super().pool(h)


@situation
class ScalingHook(Situation):
    """`h.register_hook` on one activation that scales the gradient."""

    def pool(self, h):
        h.register_hook(lambda gradient: 0.5 * gradient)
        return super().pool(h)


class HookOfEachStep(Situation):
    """Base class: in each step a new hook takes the place of the hook of the step before."""

    def __init__(self, sizes):
        super().__init__(sizes)
        self.other = [nn.Linear(2, 2)]  # in a list: not a submodule
        self.handle = None

    def prepare(self, step):
        if self.handle is not None:
            self.handle.remove()
        self.handle = self.register(self.other[0])
        weakref.finalize(self, self.handle.remove)  # a hook for all modules must not outlive the situation
        return super().prepare(step)

    def register(self, other):
        raise NotImplementedError


@situation
class ForwardHookElsewhere(HookOfEachStep):
    """Forward hook registered on another module in each step."""

    def register(self, other):
        return other.register_forward_hook(lambda *_: None)


@situation
class OptimizerHook(HookOfEachStep):
    """Hook registered on an optimizer's step in each step."""

    def register(self, other):
        return torch.optim.SGD(other.parameters(), lr=0.1).register_step_post_hook(lambda *_: None)


@situation
class StateDictHook(HookOfEachStep):
    """Hook registered on a module's state_dict in each step."""

    def register(self, other):
        return other.register_state_dict_post_hook(lambda *_: None)


@situation
class GlobalForwardHook(HookOfEachStep):
    """Forward hook for all modules registered in each step."""

    def register(self, other):
        return nn.modules.module.register_module_forward_hook(lambda *_: None)


@situation
class ForwardHook(HookOfEachStep):
    """Forward hook that records an activation, registered on a block in each step."""

    def register(self, other):
        self.record = [None]
        return self.blocks[0].register_forward_hook(
            lambda module, inputs, output: self.record.__setitem__(0, output.detach())
        )


@situation
class FlopCounter(Situation):
    """`FlopCounterMode` around forward and backward pass."""

    def around(self):
        return FlopCounterMode(display=False)


@situation
class ChangingClamp(Situation):
    """A number that changes in each step: `h.clamp(max=c_t)`."""

    def activate(self, h):
        return h.clamp(max=1 + 0.01 * self.step)


@situation
class ChangingSlope(Situation):
    """A number that changes in each step: `leaky_relu(h, slope_t)`."""

    def activate(self, h):
        return nn.functional.leaky_relu(h, 0.1 + 0.001 * self.step)


@situation
class WeightNorm(Situation):
    """`weight_norm` on all linear layers."""

    def __init__(self, sizes):
        super().__init__(sizes)
        for module in [m for m in self.modules() if isinstance(m, nn.Linear)]:
            parametrizations.weight_norm(module)


@situation
class Orthogonal(Situation):
    """Orthogonal parametrization of one square linear layer in each block."""

    def __init__(self, sizes):
        super().__init__(sizes)
        for block in self.blocks:
            parametrizations.orthogonal(block.attention.leave)
