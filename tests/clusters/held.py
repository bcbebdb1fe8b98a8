"""python held.py SCRIPT: runs a training script, which holds after update HOLD until it receives a signal.

It then appends its process id and that of its parent to the file READY. Without HOLD, the script runs to its end.
"""

import os
import runpy
import sys
import time

import torch

from samplewise.loop.trainer import Trainer

record = Trainer._record_update


def hold(self, update, data):
    record(self, update, data)
    if update.index == int(os.environ.get("HOLD") or -1):
        with open(os.environ["READY"], "a") as ready:
            ready.write(f"{os.getpid()} {os.getppid()}\n")
        while self._stopping._signal is None:
            time.sleep(0.01)


if __name__ == "__main__":
    torch.set_num_threads(1)
    Trainer._record_update = hold
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
