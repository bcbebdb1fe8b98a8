"""Create docs/picture.png: a small network trained on digits with 10 % wrong labels, as in `make demo`.

    python docs/picture.py        # make docs

All values in the picture are measured in this run: norms, wrong labels and cost.
"""

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import samplewise as sw
from samplewise.cli.demo import BATCH, EPOCHS, digits, loss_fn

TARGET = Path(__file__).with_name("picture.png")
INK, FAINT, RIGHT, WRONG, PAPER = "#2b2b33", "#8a8a94", "#5b8db8", "#d9562b", "#fcfcfa"
ROUNDS = 60
LOOP_ROUNDS = 3  # of the slow loop over samples


def trained(x: Tensor, y: Tensor) -> nn.Module:
    model = net(128, 1)
    step = sw.Step(model, torch.optim.Adam(model.parameters(), lr=1e-3), loss_fn, samples=BATCH)
    loader = DataLoader(TensorDataset(x, y), batch_size=BATCH, shuffle=True)
    sw.Trainer(step, progress=False).fit(loader, epochs=EPOCHS)
    return model.eval()


def net(width: int, layers: int) -> nn.Module:
    hidden = [layer for _ in range(layers - 1) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), *hidden, nn.Dropout(0.2), nn.Linear(width, 10))


def measured(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and gradient norm of each sample."""
    losses = loss_fn(model, (x, y))
    return losses.detach(), sw.gradients(losses, model).norms()


def relative_times(x: Tensor, y: Tensor) -> dict[str, float]:
    """CPU times of updates of 512 samples on one thread, as multiples of a plain update of the same network.

    Interleaved; the minimum is used, because other load can only add time. The small network shows the overhead.
    """
    batch = (x[:512], y[:512])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    small = net(128, 1)
    large = net(1024, 2)

    def update(model: nn.Module, **options: Any) -> Callable[[], Any]:
        step = sw.Step(copy.deepcopy(model), sw.sgd(1e-3), loss_fn, recheck=False, **options)
        return lambda: step(batch)

    updates = {
        "small": update(small),
        "small, clipped": update(small, transforms=[sw.clip(1.0)]),
        "large": update(large),
        "large, clipped": update(large, transforms=[sw.clip(1.0)]),
        "large, loop": lambda: norms_in_a_loop(large, batch),
    }
    seconds: dict[str, list[float]] = {name: [] for name in updates}
    for round_ in range(ROUNDS):
        for name, run in updates.items():
            if round_ < LOOP_ROUNDS or not name.endswith("loop"):
                start = time.process_time()
                run()
                seconds[name].append(time.process_time() - start)
    torch.set_num_threads(threads)
    fastest = {name: min(times) for name, times in seconds.items()}
    print({name: f"{1e3 * t:.1f} ms" for name, t in fastest.items()})
    return {
        "plain update": 1.0,
        "clipped, 1.1 M weights": fastest["large, clipped"] / fastest["large"],
        "clipped, 10 k weights": fastest["small, clipped"] / fastest["small"],
        "loop, 1.1 M weights": fastest["large, loop"] / fastest["large"],
    }


def norms_in_a_loop(model: nn.Module, batch: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Gradient norms with one backward pass per sample."""
    params = list(model.parameters())
    losses = (loss_fn(model, sample) for sample in zip(*(part.split(1) for part in batch), strict=True))
    return [nn.utils.get_total_norm(torch.autograd.grad(loss.sum(), params)) for loss in losses]


def scatter(axes: Axes, losses: Tensor, norms: Tensor, wrong: Tensor) -> None:
    for mask, color, label in ((~wrong, RIGHT, "correct label"), (wrong, WRONG, "wrong label")):
        axes.scatter(
            losses[mask], norms[mask], s=11, color=color, alpha=0.55, lw=0, label=f"{label}: {int(mask.sum())}"
        )
    axes.set(xscale="log", yscale="log", xlabel="loss of the sample", ylabel="norm of its gradient")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.set_title("Loss and gradient norm of each sample")
    axes.legend(loc="lower right", frameon=False, handletextpad=0.1, markerscale=1.8)


def largest_norms(cells: list[Axes], x: Tensor, y: Tensor, norms: Tensor, wrong: Tensor) -> None:
    for axes, i in zip(cells, norms.argsort(descending=True).tolist(), strict=False):
        axes.imshow(x[i].view(8, 8), cmap="Greys", vmin=0, vmax=1)
        axes.set(xticks=[], yticks=[])
        axes.set_title(f"“{int(y[i])}”", fontsize=10, color=WRONG if wrong[i] else RIGHT, pad=3, fontweight="bold")
        for spine in axes.spines.values():
            spine.set(visible=True, color=WRONG if wrong[i] else RIGHT)


def bars(axes: Axes, ratios: dict[str, float]) -> None:
    """Horizontal bars; one that is longer than the axes ends in an arrow."""
    names = list(ratios)
    edge = 2.4
    for position, (name, ratio) in enumerate(ratios.items()):
        color = RIGHT if name.startswith("clipped") else FAINT
        axes.barh(position, min(ratio, edge), color=color, height=0.62)
        text = f"{ratio:.0f}  →" if ratio > edge else f"{ratio:.2f}"
        axes.text(min(ratio, edge) - 0.04, position, text, ha="right", va="center", color=PAPER, fontweight="bold")
    axes.set(yticks=range(len(names)), yticklabels=names, xticks=[], xlim=(0, edge), ylim=(len(names) - 0.5, -0.5))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def main() -> None:
    torch.manual_seed(0)
    x, y, wrong, _ = digits()
    x = x.flatten(1)
    model = trained(x, y)
    losses, norms = measured(model, x, y)
    first = int(wrong.sum())
    share = wrong[norms.argsort(descending=True)[:first]].float().mean()

    mpl.rcParams.update(dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK))
    mpl.rcParams.update({"axes.edgecolor": FAINT, "font.size": 10})
    mpl.rcParams.update({"axes.titlesize": 11.5, "axes.titlelocation": "left", "axes.titleweight": "bold"})
    figure = plt.figure(figsize=(10, 4.6), facecolor=PAPER)
    left = figure.add_axes((0.075, 0.125, 0.43, 0.78), facecolor=PAPER)
    left.spines[["top", "right"]].set_visible(False)
    scatter(left, losses, norms, wrong)

    figure.text(0.56, 0.928, "Largest gradient norms, with their labels", fontsize=11.5, fontweight="bold")
    cells = [figure.add_axes((0.56 + 0.0705 * (k % 6), 0.72 - 0.215 * (k // 6), 0.062, 0.135)) for k in range(12)]
    largest_norms(cells, x, y, norms, wrong)
    figure.text(0.56, 0.445, f"Wrong labels: {share:.0%} of the {first} largest, 10% of all samples.")

    figure.text(0.56, 0.355, "CPU time per update, relative to a plain update", fontsize=11.5, fontweight="bold")
    bars(figure.add_axes((0.745, 0.04, 0.235, 0.295), facecolor=PAPER), relative_times(x, y))
    figure.savefig(TARGET, dpi=130)
    print(f"{TARGET.name}: {TARGET.stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
    main()
