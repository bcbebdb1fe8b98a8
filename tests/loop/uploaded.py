"""A training run with `Upload` that is killed in the middle of the upload of a file.

python uploaded.py DIRECTORY URL OPTIONS STOP: trains to the end, resuming what is in DIRECTORY or at URL ("": no
upload), and writes the parameters. OPTIONS: of the store, as JSON. STOP: number of the file, counted from 1, in the
middle of whose upload the process kills itself; 0: never.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import samplewise as sw
from samplewise.loop.mirror import Store

SAMPLES = 40


class Augmented(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        own = torch.Generator().manual_seed(i)
        return torch.randn(6, generator=own) + 0.1 * torch.randn(6), i % 3


def kill_in(stop):
    """Kill this process when half of file number `stop` is sent."""
    copy = Store._copy
    files = 0

    def counted(store, source, size, target):
        nonlocal files
        files += 1
        if files == stop:
            with open(source, "rb") as content, store._files.open(target, "wb") as file:
                file.write(content.read(size // 2))
                file.flush()
                os.kill(os.getpid(), signal.SIGKILL)
        copy(store, source, size, target)

    Store._copy = counted


def main(directory: Path, url: str, options: dict, stop: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 3))
    model.register_buffer("large", torch.rand(3 * 2**20))  # 12 MB: sent in several parts
    step = sw.Step(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.01),
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"),
        samples=9,
        microbatch=4,
    )
    kill_in(stop)
    callbacks = [sw.Ledger(), sw.callbacks.ModelCheckpoint(every="2up")]
    callbacks += [sw.callbacks.Upload(url, **options)] if url else []
    trainer = sw.Trainer(step, directory, callbacks, exists="resume", log_every="1up", progress=False, device="cpu")
    trainer.fit(DataLoader(sw.Indexed(Augmented()), batch_size=8, shuffle=True, num_workers=1), epochs=2)
    torch.save([p.detach() for p in model.parameters()], directory / "parameters.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4]))
