"""Fabric: clip the gradient of each sample, and find wrong labels. Lines that are new end with `# +`."""

import tempfile

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import samplewise as sw  # +

SAMPLES, FEATURES, CLASSES, WRONG = 600, 10, 4, 30

torch.manual_seed(0)
labels = torch.randint(CLASSES, (SAMPLES,))
x = 2 * torch.randn(CLASSES, FEATURES)[labels] + torch.randn(SAMPLES, FEATURES)
flipped = torch.randperm(SAMPLES)[:WRONG]
labels[flipped] = (labels[flipped] + 1) % CLASSES  # wrong labels
data: Dataset[tuple[Tensor, ...]] = TensorDataset(x, labels)
data = sw.Indexed(data)  # +

fabric = Fabric(accelerator="cpu", devices=1)
model = nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, CLASSES))
model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=0.01))
loader = fabric.setup_dataloaders(DataLoader(data, batch_size=32, shuffle=True))

directory = tempfile.TemporaryDirectory()  # in your script: a permanent one
run = directory.name
ledger = sw.Ledger(run)  # +
state = {"model": model, "optimizer": optimizer, "update": 0}
state["ledger"] = ledger  # + fabric.save saves its position, fabric.load restores it
for epoch in range(5):
    for batch in loader:
        inputs, targets, *_ = batch
        logits = model(inputs)
        loss = F.cross_entropy(logits, targets)
        # A plain loop: fabric.backward(loss)
        stats = sw.backward(loss, model, logits, [sw.clip(1.0)], through=fabric, denominator=len(targets))  # +
        ledger.record(stats, batch, update=state["update"], epoch=epoch)  # +
        optimizer.step()
        optimizer.zero_grad()
        state["update"] += 1
    fabric.save(f"{run}/last.ckpt", state)

found = sw.suspects(ledger.read()).top(WRONG)  # +
print(f"{torch.isin(found, flipped).sum()} of {WRONG} wrong labels are among the {WRONG} most suspicious samples")  # +
directory.cleanup()
