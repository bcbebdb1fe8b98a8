"""Trains in DIRECTORY, writes the file `training` after the first update, and goes on when the file `go` is there.

python holding.py DIRECTORY [WORKERS]
"""

import sys
import time
from pathlib import Path

import torch
from small import loader, make


class Wait:
    def __init__(self, run):
        self.run = run

    def on_update(self):
        (self.run / "training").touch()
        while not (self.run / "go").exists():
            time.sleep(0.02)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run, workers = Path(sys.argv[1]), int(sys.argv[2])
    make(run, [Wait(run)]).fit(loader(num_workers=workers), epochs=1)
