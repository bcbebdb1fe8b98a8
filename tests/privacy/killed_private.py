"""A private training that kills itself: python killed_private.py DIRECTORY UPDATE [WHEN].

It resumes what is in the directory, and evaluates metrics after each pass and in between. UPDATE: index of the update
in which it is killed with SIGKILL; -1: never. WHEN: "before" the parameters change, after the release is recorded; or
"after" the update.
"""

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from busy_process import Evaluation, Hooks, SecondModel, accuracy
from torch import nn
from torch.utils.data import DataLoader, Dataset

import samplewise as sw
from samplewise.loop.callbacks import ModelCheckpoint

UPDATES = 24


class Augmented(Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, i):
        own = torch.Generator().manual_seed(int(i))
        return torch.randn(6, generator=own) + 0.1 * torch.randn(6), int(i) % 3  # the second is the augmentation


class Killed:
    def __init__(self, update):
        self.update = update

    def on_update(self, trainer, update):
        if update.index == self.update:
            os.kill(os.getpid(), signal.SIGKILL)


def make(lr=0.2, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 3))
    settings = {"noise_multiplier": 1.0, "delta": 1e-3, "updates": UPDATES, "sample_rate": 0.1, "clip": 0.5}
    privacy = sw.Privacy(**{**settings, "accountant": "rdp", **options})
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    step = sw.Step(model, optimizer, nn.CrossEntropyLoss(), privacy=privacy, microbatch=3)
    return model, privacy.loader(Augmented()), step


def trainer(step, directory, *callbacks, **options):
    settings = {"log_every": "2up", "progress": False, "seed": 3, **options}
    return sw.Trainer(step, directory, [ModelCheckpoint(every="5up"), *callbacks], **settings)


def main(directory, update, when):
    model, loader, step = make()
    callbacks = [Killed(update)] if when == "after" else []
    if when == "before":
        original = step.optimizer.step

        def killed(*args, **kwargs):
            if step.privacy.plan._state.update == update:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        step.optimizer.step = killed
    busy = (Hooks(), Evaluation(Augmented()), SecondModel())
    training = trainer(step, directory, *busy, *callbacks, metrics={"accuracy": accuracy})
    training.fit(loader, validate=DataLoader(Augmented(), batch_size=16), resume=True)
    torch.save([p.detach() for p in model.parameters()], directory / "parameters.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "after")
