"""A training run that may be killed at any moment: shuffle, dropout, random augmentation, two workers, accumulation,
validation with metrics, also in mid-epoch, hooks that come and go, and a second model in the process.

python killed.py DIRECTORY KIND PAUSE KILL: trains to the end, resuming whatever is there; writes the parameters. PAUSE:
seconds after each update. KILL: index of the update after which the process kills itself; -1: never.
"""

import os
import signal
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.nn.functional as F
from busy_process import Evaluation, Hooks, SecondModel, accuracy
from torch import nn
from torch.utils.data import DataLoader, Dataset

import samplewise as sw
from samplewise.loop.callbacks import ModelCheckpoint
from samplewise.loop.trainer import Trainer


def stateful(*args, **options):
    from torchdata.stateful_dataloader import StatefulDataLoader

    with warnings.catch_warnings(action="ignore"):  # it calls what torch has deprecated
        return StatefulDataLoader(*args, **options)


LOADERS = {"plain": DataLoader, "stateful": stateful, "compiled": DataLoader}


class Augmented(Dataset):
    def __len__(self):
        return 50

    def __getitem__(self, i):
        own = torch.Generator().manual_seed(i)
        x = torch.randn(6, generator=own) + 0.1 * torch.randn(6)  # the second is the augmentation
        return x, i % 3, i


class Order:
    """Notes which samples every update was made of: they end up in the log.

    Its state holds the samples of an open window: a signal may stop the training there.
    """

    def __init__(self, pause, kill):
        self.seen = []
        self.pause = pause
        self.kill = kill

    def on_update(self, trainer, update):
        trainer.write("order", update=update.index, ids=self.seen[: update.samples], losses=update.losses.tolist())
        del self.seen[: update.samples]
        time.sleep(self.pause)
        if update.index == self.kill:
            os.kill(os.getpid(), signal.SIGKILL)

    def state_dict(self):
        return {"seen": list(self.seen)}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def main(directory: Path, kind: str, pause: float, kill: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    order = Order(pause, kill)

    def loss_fn(model, batch):
        x, y, ids = batch
        if model.training and torch.is_grad_enabled():
            order.seen += ids.tolist()
        return F.cross_entropy(model(x), y, reduction="none")

    def uncounted(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    if kind == "compiled":
        from samplewise.step.compiled import inductor, program_cache

        program_cache.refuse_library_bound = program_cache.refuse_slower = lambda *_: None
        inductor.compile_graph = lambda graph, inputs, threads: lambda flat: graph(*flat)  # Inductor takes seconds
    step = sw.Step(
        model,
        optimizer,
        uncounted if kind == "compiled" else loss_fn,
        samples=9,
        microbatch=4,
        scheduler=scheduler,
        transforms=[sw.clip(1.0)],
        recheck=False,
        compile=kind == "compiled",
    )
    others = [SecondModel(), Evaluation(Augmented()), Hooks(stays=kind != "compiled")]
    loader = LOADERS[kind](Augmented(), batch_size=8, shuffle=True, num_workers=2)
    trainer = Trainer(
        step,
        run=directory,
        callbacks=[order, *others, ModelCheckpoint(every="2up")],
        metrics={"accuracy": accuracy},
        log_every="3up",
        progress=False,
        seed=3,
    )
    trainer.fit(loader, validate=DataLoader(Augmented(), batch_size=16), epochs=4, resume=True)
    assert (step.compiled == "compiled") == (kind == "compiled"), step.compiled
    torch.save([p.detach() for p in model.parameters()], directory / "parameters.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), int(sys.argv[4]))
