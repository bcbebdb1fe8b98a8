"""Hashes of results, in a process in which other things have happened before: python history.py PAST..."""

import contextlib
import hashlib
import sys

import torch
import torch.nn.functional as F
from torch import nn

import samplewise as sw
from samplewise.engine.graph.hook_registry import foreign_hooks
from samplewise.errors import SamplewiseError


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(6, 6)
        self.layers = nn.LSTM(2, 5, num_layers=2, bidirectional=True, batch_first=True)

    def forward(self, x):
        return self.layers(self.enter(x).view(-1, 3, 2))[0].flatten(1)


class Tied(nn.Module):
    """Tokens with an embedding that is tied to the head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 6)
        self.layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)

    def forward(self, x):
        hidden = self.layer(self.embedding(x.mul(2).round().long().clamp(-4, 3) + 4))
        return F.linear(hidden.mean(1), self.embedding.weight)


class Routed(nn.Module):
    """The first entry of a sample chooses its expert, so that ownership is probed."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(6, 6)
        self.experts = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])

    def forward(self, x):
        first = x[:, 0] > 0
        hidden = self.enter(x)
        chosen = [expert(hidden[rows]) for expert, rows in zip(self.experts, (first, ~first), strict=True)]
        return torch.cat(chosen)[torch.cat([first.nonzero(), first.logical_not().nonzero()]).flatten().argsort()]


MODELS = {
    "small": lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.PReLU(), nn.Linear(8, 3)),
    "lstm": Lstm,
    "tied": Tied,
    "routed": Routed,
}


def inputs(samples=5):
    x = torch.linspace(-2, 2, 6 * samples).sin().view(samples, 6)
    x[:, 0] = -1
    x[0, 0] = 1  # one sample has an expert of its own
    return x


def losses_of(model, x):
    return model(x).tanh().square().sum(1)


def results(name):
    """Quantities of a new model, by name."""
    torch.manual_seed(0)
    model = MODELS[name]()
    found = {}
    for strategy in ("fused", "twice"):
        g = sw.gradients(losses_of(model, inputs()), model, strategy=strategy)
        weights = torch.linspace(0.1, 1, 5)
        found[name, strategy, "norms"] = g.norms()
        found[name, strategy, "sums"] = g.sum(weights)
        found[name, strategy, "squares"] = g.sum_of_squares()
    step = sw.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), losses_of, transforms=[sw.clip(0.5)])
    for _ in range(2):
        step(inputs())
    found[name, "step"] = dict(model.named_parameters())
    return found


def digest(value):
    found = hashlib.sha256()
    for tensor in value.values() if isinstance(value, dict) else [value]:
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


# --- what may have happened before -----------------------------------------------------------------------------------


def removed_forward_hook():
    nn.Linear(2, 2).register_forward_hook(lambda *_: None).remove()


def metrics():
    model = nn.Linear(6, 3)
    step = sw.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss())
    trainer = sw.Trainer(step, progress=False, metrics={"accuracy": lambda outputs, y: outputs.argmax(-1) == y})
    trainer.evaluate([(inputs(), torch.zeros(5).long())])


def hooks_of_another_model():
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    model[0].register_full_backward_hook(lambda module, inputs, outputs: None)
    hidden = model[1](model[0](inputs()))
    hidden.register_hook(lambda gradient: gradient * 2)
    sw.gradients(model[2](hidden).square().sum(1), model).norms()


def hooks_of_equal_models():
    """Models of the same structure, with hooks that mix samples, so that ownership is probed or refused."""
    for make in MODELS.values():
        model = make()
        outputs = model(inputs())
        outputs.register_hook(lambda gradient: gradient + gradient.flip(0))
        with contextlib.suppress(SamplewiseError):
            sw.gradients(outputs.tanh().square().sum(1), model).norms()


def other_data():
    """The same models with more samples, of which several have each expert, and with gradients that are zero."""
    for make in MODELS.values():
        for x in (inputs(9).roll(1, 0), inputs().neg(), inputs(9)):
            x[::2, 0] *= -1
            model = make()
            sw.gradients(losses_of(model, x), model).norms()
            sw.gradients(0 * losses_of(model, x), model).norms()


def other_quantities():
    for make in MODELS.values():
        model = make()
        g = sw.gradients(losses_of(model, inputs()), model, interacting="allow")
        g.full()
        g.norms(by="parameter")
        g.gram()
        g.project(8)
        next(model.parameters()).requires_grad_(False)
        sw.gradients(losses_of(model, inputs()), [p for p in model.parameters() if p.requires_grad]).norms()


PASTS = (removed_forward_hook, metrics, hooks_of_another_model, hooks_of_equal_models, other_data, other_quantities)


def main(names):
    for past in PASTS:
        if past.__name__ in names:
            past()
    assert names or not foreign_hooks()
    for model in MODELS:
        for name, value in results(model).items():
            print(*name, digest(value))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
