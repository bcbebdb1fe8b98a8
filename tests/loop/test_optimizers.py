"""Every optimizer and schedule of torch, and models that are hard to save, resume bit for bit."""

import pytest
import torch
import torch.nn.functional as F
from small import loader
from torch import nn, optim
from torch.optim import lr_scheduler as lrs

import samplewise as sw
from samplewise.loop.callbacks import ModelCheckpoint

OTHERS = {"Optimizer", "LBFGS", "SparseAdam", "Muon"}  # abstract; calls the loss itself; below; below
OPTIMIZERS = {
    name: kind
    for name, kind in vars(optim).items()
    if isinstance(kind, type) and issubclass(kind, optim.Optimizer) and name not in OTHERS
}
OPTIMIZERS |= {
    "fused": lambda p: optim.AdamW(p, fused=True),
    "foreach": lambda p: optim.AdamW(p, foreach=True),
    "amsgrad": lambda p: optim.AdamW(p, amsgrad=True),
    "rate in a tensor": lambda p: optim.AdamW(p, lr=torch.tensor(0.01)),
    "groups": lambda p: optim.AdamW([{"params": [q], "lr": 0.01 * k} for k, q in enumerate(p)]),
    "a function": lambda p: sw.sgd(0.1),
}
SCHEDULERS = {
    "Sequential": lambda o: lrs.SequentialLR(o, [lrs.LinearLR(o, total_iters=3), lrs.CosineAnnealingLR(o, 9)], [3]),
    "OneCycle": lambda o: lrs.OneCycleLR(o, 0.1, total_steps=50),
    "Lambda": lambda o: lrs.LambdaLR(o, lambda k: 0.9**k),
    "WarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 4),
    "MultiStep": lambda o: lrs.MultiStepLR(o, [2, 5]),
    "Chained": lambda o: lrs.ChainedScheduler([lrs.LinearLR(o), lrs.ExponentialLR(o, 0.9)], optimizer=o),
    "Cyclic": lambda o: lrs.CyclicLR(o, 0.001, 0.1, step_size_up=3, cycle_momentum=False),
}


class Hard(nn.Module):
    """Tied, frozen and not finite parameters, empty and 0-d buffers, one that is not kept, a state of its own."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.b.weight = self.a.weight
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(6, 3)
        self.frozen = nn.Parameter(torch.tensor([torch.nan, torch.inf]), requires_grad=False)
        self.register_buffer("none", torch.empty(0, 3))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mask", torch.ones(6), persistent=False)
        self.own = 0

    def get_extra_state(self):
        return {"own": self.own}

    def set_extra_state(self, state):
        self.own = state["own"]

    def forward(self, x):
        self.own += self.training  # the recheck of the first update looks in eval mode
        return self.head(self.drop(self.b(torch.tanh(self.a(x * self.mask)))))


def trained(run, optimizer, scheduler=None, dtype=torch.float32, model=Hard, **given):
    torch.manual_seed(0)
    net = model().to(dtype)
    made = optimizer([p for p in net.parameters() if p.requires_grad])

    def loss(net, batch):
        return F.cross_entropy(net(batch[0].to(dtype)), batch[1], reduction="none")

    step = sw.Step(net, made, loss, samples=10, scheduler=scheduler and scheduler(made))
    trainer = sw.Trainer(step, run, [ModelCheckpoint(every="1up")], progress=False, device="cpu")
    trainer.fit(loader(shuffle=True), validate=loader(), **given)
    return net.state_dict()


def assert_resumes(tmp_path, *given, **more):
    whole = trained(tmp_path / "whole", *given, epochs=3, **more)
    trained(tmp_path / "run", *given, updates=5, **more)
    again = trained(tmp_path / "run", *given, epochs=3, resume=True, **more)
    torch.testing.assert_close(again, whole, rtol=0, atol=0, equal_nan=True)


@pytest.mark.sweep(1 / 9)
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizers(tmp_path, optimizer):
    assert_resumes(tmp_path, optimizer)


@pytest.mark.sweep(1 / 4)
@pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
def test_schedulers(tmp_path, scheduler):
    assert_resumes(tmp_path, lambda p: optim.SGD(p, lr=0.01, momentum=0.9), scheduler)


@pytest.mark.sweep(1 / 2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes(tmp_path, dtype):
    assert_resumes(tmp_path, optim.AdamW, dtype=dtype)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch 2.8 has no Muon")
def test_muon(tmp_path):
    """For matrices alone."""
    assert_resumes(tmp_path, optim.Muon, model=lambda: nn.Linear(6, 3, bias=False))


def test_sparse_adam(tmp_path):
    def fit(run, **given):
        torch.manual_seed(0)
        model = nn.Embedding(10, 3, sparse=True)
        step = sw.Step(model, optim.SparseAdam(model.parameters()), lambda m, ids: m(ids).square().sum((1, 2)))
        trainer = sw.Trainer(step, run, progress=False, device="cpu")
        trainer.fit([torch.tensor([[1, 2], [3, k]]) for k in range(5)], **given)
        return model.weight.detach()

    whole = fit(tmp_path / "whole", epochs=2)
    fit(tmp_path / "run", updates=3)
    assert torch.equal(fit(tmp_path / "run", epochs=2, resume=True), whole)
