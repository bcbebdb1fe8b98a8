"""All quantities of per-sample gradients on one small model."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samplewise as sw

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
x, y = torch.randn(5, 6), torch.tensor([0, 1, 2, 0, 1])

# One loss per sample, attached to the autograd graph.
losses = F.cross_entropy(model(x), y, reduction="none")
g = sw.gradients(losses, model)
print(f"{len(g)} samples, parameters {', '.join(g.names)}\n")

print("norms                ", g.norms())
for name, norms in g.norms(by="parameter").items():
    print(f"  of {name:18}", norms)

mean = g.mean()
print("dot with the mean    ", g.dot(mean))
print("Gram matrix          ", tuple(g.gram().shape))
print("norms, from its diag ", g.gram().diagonal().sqrt())
print("projected to 4 dims  ", tuple(g.project(4, seed=0).shape))


def sizes(tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


print("\nmean                 ", sizes(mean))
print("sum of squares       ", sizes(g.sum_of_squares()))
print("variance             ", sizes(g.variance()))
print("all rows, (B, *shape)", sizes(g.full()))
print("one parameter        ", tuple(g["0.weight"].shape))
print("one sample           ", sizes(g[3]))

# Weighted sum: here the second sample has weight zero.
weights = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0])
expected = g.sum(weights)
g.backward(weights, retain_graph=True)  # without retain_graph, the graph is freed, as in torch
weight = model.get_parameter("0.weight")
assert weight.grad is not None
same = torch.allclose(weight.grad, expected["0.weight"])
print("\nbackward(weights) adds sum(weights) into .grad:", same)

# The graph was retained: an ordinary backward pass still works.
model.zero_grad()
losses.mean().backward()
print("losses.mean().backward() gives the mean:       ", end=" ")
print(torch.allclose(weight.grad, mean["0.weight"], atol=1e-6))

x.requires_grad_()
losses = F.cross_entropy(model(x), y, reduction="none")
print("input gradients      ", tuple(sw.input_gradients(losses, x).shape))
