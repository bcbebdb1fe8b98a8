"""Find the training images behind a wrong prediction: influence functions with EK-FAC curvature.

    python examples/influence_with_curvature.py        # a few seconds

The training set of digits has some wrong labels: most of the images that look like one test image are labeled as
another digit, so that the model predicts that digit for it. `sw.influence` with `curvature=sw.ekfac(...)` ranks all
training images by how much they support the prediction; the wrong labels should come first. Dot products of gradients,
without curvature, are printed beside. Needs scikit-learn, which contains the digits.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import samplewise as sw

WRONG = 12
SHOWN = 7
SHADES = " .:-=+*#%@"


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def with_wrong_labels(x: Tensor, y: Tensor, image: Tensor, wrong_label: int) -> tuple[Tensor, Tensor]:
    """Labels in which the training images nearest to `image` have the wrong label, and their numbers."""
    nearest = (x - image).norm(dim=1).argsort()[:WRONG]
    return y.index_fill(0, nearest, wrong_label), nearest


def trained(x: Tensor, y: Tensor, epochs: int = 40) -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(epochs):
        for batch in DataLoader(TensorDataset(x, y), 64, shuffle=True):
            optimizer.zero_grad()
            loss_fn(model, batch).mean().backward()
            optimizer.step()
    return model


def drawn(images: Tensor) -> str:
    """Images of 8 x 8 pixels beside each other, as text."""
    rows = (images.view(-1, 8, 8) * (len(SHADES) - 1)).round().long().transpose(0, 1)
    return "\n".join("   ".join("".join(SHADES[shade] for shade in part) for part in row) for row in rows.tolist())


def main() -> None:
    torch.set_num_threads(1)  # more threads do not help a network of this size
    torch.manual_seed(0)
    pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
    pixels = pixels.float() / 16
    x, y = pixels[:1500], labels[:1500]
    image, truth = pixels[1600], labels[1600]
    y, wrong = with_wrong_labels(x, y, image, wrong_label=(int(truth) + 3) % 10)
    model = trained(x, y)
    prediction = model(image[None]).argmax(1)
    print(f"a test image of a {truth}, predicted as a {prediction.item()}:\n{drawn(image)}\n")

    train = list(zip(x.split(500), y.split(500), strict=True))
    query = [(image[None], prediction)]  # the loss of the prediction: which images lower it?
    curvature = sw.ekfac(model, loss_fn, train)
    print(f"{curvature}\n")
    methods = {
        "EK-FAC": sw.influence(model, loss_fn, train, query, curvature=curvature)[0],
        "dot product": sw.influence(model, loss_fn, train, query)[0],
    }
    for name, scores in methods.items():
        first = scores.argsort(descending=True)[:WRONG]
        found = int(torch.isin(first, wrong).sum())
        print(f"{name}: {found} of the {WRONG} images that support the prediction most have a wrong label")
        print(f"labels {', '.join(str(label) for label in y[first].tolist())}\n{drawn(x[first[:SHOWN]])}\n")


if __name__ == "__main__":
    main()
