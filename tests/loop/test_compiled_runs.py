"""Runs whose updates are compiled: stopped and resumed, they end bit for bit as if they had not been."""

import pytest
import torch
from small import loader, log, loss_fn
from torch import nn

import samplewise as sw
from samplewise.loop.callbacks import ModelCheckpoint


def compiled(run, samples=1):
    """With dropout, momentum and a learning rate that changes with every update."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    step = sw.Step(model, optimizer, loss_fn, samples=samples, scheduler=scheduler, compile=True)
    return sw.Trainer(step, run, [ModelCheckpoint(every="7up")], progress=False, device="cpu", log_every="5up")


def ended(trainer, run):
    kept = trainer.step.optimizer.state_dict()["state"]
    state = {**trainer.model.state_dict(), **{f"momentum {k}": kept[k]["momentum_buffer"] for k in kept}}
    lines = [line for line in log(run) if line["kind"] != "end"]
    return {name: tensor.tolist() for name, tensor in state.items()}, lines


# Before anything was compiled, and in the second epoch, within a batch.
@pytest.mark.parametrize(
    ("stop", "backend"),
    [(36, "interpreted"), *(pytest.param(stop, "inductor", marks=pytest.mark.slow) for stop in (1, 36))],
)
def test_stopped_and_resumed(tmp_path, stop, backend, request):
    if backend == "interpreted":
        request.getfixturevalue("interpreted")
    whole = compiled(tmp_path / "whole")
    whole.fit(loader(shuffle=True), validate=loader(), epochs=2)
    compiled(tmp_path / "parts").fit(loader(shuffle=True), validate=loader(), updates=stop)
    resumed = compiled(tmp_path / "parts")
    resumed.fit(loader(shuffle=True), validate=loader(), epochs=2, resume=True)
    assert whole.step.compiled == resumed.step.compiled == "compiled"
    assert whole.step.counters == resumed.step.counters
    assert [line["update"] for line in log(tmp_path / "whole") if line["kind"] == "note"] == [5]  # no norms of layers
    assert ended(resumed, tmp_path / "parts") == ended(whole, tmp_path / "whole")
