"""A small training for the tests of the loop: 30 samples, three updates an epoch."""

import json

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import samplewise as sw

X = torch.randn(30, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(30) % 3


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def loader(batch_size=7, shuffle=False, **options):
    return DataLoader(TensorDataset(X, Y), batch_size=batch_size, shuffle=shuffle, **options)


def make(run=None, callbacks=(), samples=10, progress=False, loss=loss_fn, optimizer=None, scheduler=None, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))
    optimizer = (optimizer or (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)))(model.parameters())
    step = sw.Step(model, optimizer, loss, samples=samples, scheduler=scheduler and scheduler(optimizer))
    return sw.Trainer(step, run, callbacks, progress=progress, device="cpu", **options)


def parameters(trainer):
    return nn.utils.parameters_to_vector(trainer.model.parameters()).detach()


def log(run, times=False):
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    costs = ("seconds", "samples_per_second", "compute_samples_per_second", "phases", "memory")
    return lines if times else [{k: v for k, v in line.items() if k not in costs} for line in lines]
