"""A user's own script, which knows nothing of ranks: python script.py DIRECTORY [KILLED [HANGS]], or under torchrun.

Rank 1 kills itself after update number KILLED, the first time; or sleeps there for so long that the others give up.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import samplewise as sw
from samplewise.loop.callbacks import ModelCheckpoint

TIMEOUT = 30.0  # seconds; the start of the ranks must not take longer


class Dies:
    def __init__(self, after, hangs):
        self.after, self.hangs = after, hangs

    def on_update(self, trainer, update):
        rank, starts = os.environ.get("RANK"), os.environ.get("TORCHELASTIC_RESTART_COUNT")
        if (rank, starts) == ("1", "0") and update.index == self.after:
            if self.hangs:
                time.sleep(10 * TIMEOUT)
            (trainer.run / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)


def main(directory, killed=None, hangs=False):
    torch.manual_seed(0)
    x = torch.randn(40, 5, dtype=torch.float64)
    loader = DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=4, shuffle=True)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    step = sw.Step(model, optimizer, nn.CrossEntropyLoss(), samples=6)
    callbacks = [Dies(killed, hangs), ModelCheckpoint(every="2up")]
    sw.parallel.join("cpu", timeout=TIMEOUT if hangs else None)
    trainer = sw.Trainer(step, directory, callbacks, progress=False, device="cpu")
    trainer.fit(loader, epochs=3, resume=True)
    return model


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
