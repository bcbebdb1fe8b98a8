"""Find mislabelled digits: the samples that pull hardest on the weights are the odd ones."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import samplewise as sw

FLIPPED, EPOCHS, BATCH = 40, 8, 32
torch.manual_seed(0)

# 1797 images of 8×8; forty of them get a wrong label on purpose.
pixels, digits = load_digits(return_X_y=True)
x = torch.tensor(pixels, dtype=torch.float32) / 16
y = torch.tensor(digits)
flipped = torch.zeros(len(y), dtype=torch.bool)
flipped[torch.randperm(len(y))[:FLIPPED]] = True
y[flipped] = (y[flipped] + torch.randint(1, 10, (FLIPPED,))) % 10

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
print(f"Training on {len(y)} digits, {FLIPPED} of them with a wrong label")
for epoch in range(1, EPOCHS + 1):
    total = 0.0
    for rows in torch.randperm(len(y)).split(BATCH):
        losses = F.cross_entropy(model(x[rows]), y[rows], reduction="none")
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
        total += losses.detach().sum().item()
    print(f"  epoch {epoch}  loss {total / len(y):.3f}")

losses = F.cross_entropy(model(x), y, reduction="none")
g = sw.gradients(losses, model)
norms = g.norms()

print("\nGradient norm of each sample")
print("       from        to  samples  flipped")
edges = torch.logspace(norms.min().log10().item(), norms.max().log10().item(), 9)
bins = torch.bucketize(norms, edges[1:-1])
for k in range(8):
    inside = bins == k
    count, wrong = int(inside.sum()), int((inside & flipped).sum())
    bar = "█" * round(50 * count / len(y))
    print(f"{edges[k]:11.4f}{edges[k + 1]:10.4f}{count:9}{wrong or '':>9}  {bar}")

print("\nThe ten most unusual samples")
print("  index  label  flipped   norm   loss")
order = norms.argsort(descending=True)
for i in order[:10].tolist():
    mark = "yes" if flipped[i] else ""
    print(f"{i:7}{int(y[i]):7}{mark:>9}{norms[i].item():7.2f}{losses[i].item():7.2f}")

for k in (10, 20, FLIPPED):
    print(f"of the top {k}: {flipped[order[:k]].float().mean():.0%} have a flipped label")
print(f"by chance: {flipped.float().mean():.0%}\n\nHow it was computed")
print(g.explain())
