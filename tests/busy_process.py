"""Callbacks of runs that are killed and resumed: what happens in a process besides the training must not change it."""

import torch
from torch import nn
from torch.utils.data import DataLoader

import samplewise as sw


class Hooks:
    """Hooks that come and go: on the model, on another module, and on tensors. With `stays`, one of them stays on the
    model, which then is not compiled.
    """

    def __init__(self, stays=True):
        self.count = 0
        self.stays = stays

    def on_fit_start(self, model):
        if self.stays and self.count >= 6:
            model.register_forward_hook(lambda *_: None)

    def on_update(self, model):
        self.count += 1
        model.register_forward_hook(lambda *_: None).remove()
        if self.count % 3 == 0:
            nn.Linear(2, 2, device="meta").register_full_backward_hook(lambda *_: None)
            torch.zeros(1, requires_grad=True).mul(2).register_hook(lambda gradient: gradient)
        if self.stays and self.count == 6:
            model.register_forward_hook(lambda *_: None)

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Evaluation:
    """Evaluates in mid-epoch."""

    def __init__(self, data):
        self.data = data

    def on_update(self, trainer, update):
        if update.index % 3 == 1:
            trainer.write("middle", **trainer.evaluate(DataLoader(self.data, batch_size=16)))


class SecondModel:
    """Per-sample gradients of another model, which has hooks on its activations."""

    def on_update(self, update):
        if update.index % 4 == 0:
            with torch.random.fork_rng():
                model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
            hidden = model[1](model[0](torch.ones(4, 6)))
            hidden.register_hook(lambda gradient: gradient * 2)
            sw.gradients(model[2](hidden).square().sum(1), model).norms()


def accuracy(outputs, batch):
    return outputs.argmax(-1) == batch[1]
