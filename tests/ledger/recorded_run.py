"""A run with a ledger that may be killed at any moment: shuffle, dropout, two workers, accumulation, a column.

python recorded_run.py DIRECTORY [PARTS]: trains to the end, resuming whatever is there. With PARTS: trains until the
ledger has this number of files, then sleeps until it is killed.
"""

import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import samplewise as sw
from samplewise.loop.callbacks import ModelCheckpoint

X, Y = torch.randn(50, 6, generator=torch.Generator().manual_seed(0)), torch.arange(50) % 3


class Sleeps:
    def __init__(self, parts):
        self.parts = parts

    def on_update(self, trainer):
        if len(list(trainer.run.glob("samples/*.parquet"))) >= self.parts:
            time.sleep(600)


def loss_fn(model, batch):
    logits = model(batch[0])
    return F.cross_entropy(logits, batch[1], reduction="none"), {"margin": logits.amax(1)}


def trainer(directory, callbacks=(), every="3up", **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 3))
    step = sw.Step(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.01),
        loss_fn,
        samples=9,
        microbatch=4,
        recheck=False,
        **options,
    )
    callbacks = [sw.Ledger(rows_per_file=20), *callbacks, ModelCheckpoint(every=every)]
    return sw.Trainer(step, directory, callbacks, progress=False, seed=3, device="cpu")


def loader(workers=0):
    return DataLoader(sw.Indexed(TensorDataset(X, Y)), batch_size=8, shuffle=True, num_workers=workers)


if __name__ == "__main__":
    torch.set_num_threads(1)
    trainer(Path(sys.argv[1]), [Sleeps(int(parts)) for parts in sys.argv[2:]]).fit(loader(2), epochs=4, resume=True)
