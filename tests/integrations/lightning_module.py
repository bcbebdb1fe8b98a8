"""LightningModule of the small problem, quiet trainers, and a script that trains in a process of its own.

python lightning_module.py <json with arguments of `run`>
"""

import json
import os
import signal
import sys

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from small_problem import LR, dataset, flat, network
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import samplewise as sw
from samplewise.integrations.lightning import PerSample


class Module(L.LightningModule):
    """`returns`: mean, losses, outputs (a scalar with its outputs), counted (losses with counts), nothing else."""

    def __init__(self, returns="losses", dtype=torch.float64, dropout=0.0):
        super().__init__()
        self.net = network(dtype, dropout)
        self.returns = returns

    def training_step(self, batch, batch_idx):
        x, y, counts, *_ = batch
        logits = self.net(x)
        losses = F.cross_entropy(logits, y, reduction="none")
        counts = counts.to(losses.dtype)
        return {
            "mean": lambda: losses.mean(),
            "losses": lambda: losses,
            "outputs": lambda: {"loss": losses.mean(), "outputs": logits, "losses": losses, "labels": y},
            "both": lambda: {"loss": losses, "outputs": logits, "labels": y},
            "counted": lambda: {"loss": losses * counts, "counts": counts},
            "counted outputs": lambda: {
                "loss": (losses * counts).sum() / counts.sum(),
                "outputs": logits,
                "counts": counts,
            },
        }[self.returns]()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), LR)


def trainer(callbacks=(), **settings):
    settings = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, **settings}
    return L.Trainer(
        accelerator="cpu",
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )


def loader(batch_size, dtype=torch.float64, shuffle=False, kind=DataLoader):
    return kind(sw.Indexed(dataset(dtype)), batch_size=batch_size, shuffle=shuffle)


def fitted(batch_size=8, callbacks=(), module=None, fit=None, dtype=torch.float64, **settings):
    """The module after training."""
    module = module or Module(dtype=dtype)
    trainer(callbacks, **settings).fit(module, loader(batch_size, dtype), **(fit or {}))
    return module


class Killed(L.Callback):
    """Kills the process after this many batches."""

    def __init__(self, after):
        self.after = after

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.after -= 1
        if self.after == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def run(
    directory,
    batch_size=4,
    returns="losses",
    clip=True,
    exact=True,
    kill_after=None,
    every=None,
    ckpt=None,
    stateful=False,
    **settings,
):
    """Train with a ledger and checkpoints in the directory; write the parameters."""
    kind = StatefulDataLoader if stateful else DataLoader
    per_sample = PerSample([sw.clip(0.7)] if clip else (), sw.Ledger(f"{directory}/run"), exact_accumulation=exact)
    callbacks = [per_sample]
    if kill_after:
        callbacks.append(Killed(kill_after))
    if settings.get("enable_checkpointing"):
        callbacks.append(ModelCheckpoint(f"{directory}/checkpoints", save_last=True, every_n_train_steps=every))
    module = Module(returns)
    fit = trainer(callbacks, **settings)
    fit.fit(module, loader(batch_size, kind=kind), ckpt_path=ckpt)
    if fit.is_global_zero:
        torch.save(flat(module), f"{directory}/parameters.pt")
        torch.save({name: value.item() for name, value in fit.callback_metrics.items()}, f"{directory}/metrics.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(**json.loads(sys.argv[1]))
