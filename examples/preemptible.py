"""A training job that may be stopped at any time: it saves a checkpoint on SIGTERM, and continues at the next start.

    RUN=runs/digits python examples/preemptible.py     # stop it with Ctrl-C or kill, and start it again
    RUN=runs/digits UPLOAD=s3://bucket/runs/digits python examples/preemptible.py

Environment variables:

    RUN      run directory (default: a temporary one); on a cluster, on a file system that survives the job, unless
             there is an UPLOAD
    UPLOAD   URL of a copy in an object store, from which a job on another machine continues
    EPOCHS   total number of epochs, over all starts

It exits with 0 if the training is complete, and with 143 (SIGTERM) or 130 (Ctrl-C) if it is to be started again: a
signal that comes before or after `fit` ends Python with these codes, too. docs/clusters.md has job scripts for SLURM
and Kubernetes. With torchrun, the same script trains on several ranks.
"""

import os
import signal
import sys
import tempfile

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import samplewise as sw

torch.manual_seed(0)  # also the same data on every rank
x = torch.randn(300, 20)
y = (x[:, :3].sum(1) > 0).long()
loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)

model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
step = sw.Step(model, optimizer, nn.CrossEntropyLoss(), samples=32, transforms=[sw.clip(1.0)])

callbacks = [sw.callbacks.ModelCheckpoint(every="1ep")]
if url := os.environ.get("UPLOAD"):
    callbacks.append(sw.callbacks.Upload(url))

with tempfile.TemporaryDirectory() as temporary:
    trainer = sw.Trainer(step, os.environ.get("RUN", temporary), callbacks, exists="resume")
    result = trainer.fit(loader, epochs=int(os.environ.get("EPOCHS", "5")))
print(result.reason)
if result.signal is not None:
    sys.exit(128 + signal.Signals[result.signal])
