"""Accelerate: clip the gradient of each sample, and find wrong labels. Lines that are new end with `# +`."""

import tempfile

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import samplewise as sw  # +

SAMPLES, FEATURES, CLASSES, WRONG = 600, 10, 4, 30
BATCH, ACCUMULATE = 32, 2

torch.manual_seed(0)
labels = torch.randint(CLASSES, (SAMPLES,))
x = 2 * torch.randn(CLASSES, FEATURES)[labels] + torch.randn(SAMPLES, FEATURES)
flipped = torch.randperm(SAMPLES)[:WRONG]
labels[flipped] = (labels[flipped] + 1) % CLASSES  # wrong labels
data: Dataset[tuple[Tensor, ...]] = TensorDataset(x, labels)
data = sw.Indexed(data)  # +

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
model = nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, CLASSES))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=BATCH, shuffle=True))

directory = tempfile.TemporaryDirectory()  # in your script: a permanent one
run = directory.name
ledger = sw.Ledger(run)  # +
accelerator.register_for_checkpointing(ledger)  # + accelerator.save_state saves its position, load_state restores it
update = 0
for epoch in range(5):
    for k, batch in enumerate(loader):
        with accelerator.accumulate(model):
            inputs, targets, *_ = batch
            losses = F.cross_entropy(model(inputs), targets, reduction="none")

            # Number of samples of this update. The last update of an epoch has fewer batches, and a smaller last one;
            # Accelerate divides by gradient_accumulation_steps in any case.
            samples = min(BATCH * ACCUMULATE, SAMPLES - k // ACCUMULATE * BATCH * ACCUMULATE)
            mean = samples / ACCUMULATE
            # A plain loop: accelerator.backward(losses.sum() / mean)
            stats = sw.backward(losses, model, transforms=[sw.clip(1.0)], through=accelerator, denominator=mean)  # +
            ledger.record(stats, batch, update=update, epoch=epoch)  # +
            optimizer.step()
            optimizer.zero_grad()
            update += accelerator.sync_gradients

found = sw.suspects(ledger.read()).top(WRONG)  # +
print(f"{torch.isin(found, flipped).sum()} of {WRONG} wrong labels are among the {WRONG} most suspicious samples")  # +
directory.cleanup()
