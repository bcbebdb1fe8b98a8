"""Draw the pictures of docs/pictures.md: ownership, sizes of an update, transforms, and the annotated report.

    python docs/drawings.py        # make docs

The picture of the report is docs/report.png with numbers on it. Sizes and coefficients in the other pictures are
computed by the library while they are drawn.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import samplewise as sw

HERE = Path(__file__).parent
INK, FAINT, PAPER = "#2b2b33", "#8a8a94", "#fcfcfa"
SAMPLES = ("#4878a8", "#d9562b", "#4f9d69", "#8d6bb0")  # one color per sample
MIXED = "#d6d6da"


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """Empty axes in which one unit is an inch."""
    figure = plt.figure(figsize=(width, height), facecolor=PAPER)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def save(figure: Figure, name: str) -> None:
    figure.savefig(HERE / name, dpi=130)
    plt.close(figure)
    print(f"{name}: {(HERE / name).stat().st_size / 1024:.0f} KB")


def box(axes: Axes, x: float, y: float, width: float, height: float, text: str, color: str = PAPER) -> None:
    """Rounded box with its center at (x, y)."""
    corner = (x - width / 2, y - height / 2)
    shape = FancyBboxPatch(corner, width, height, boxstyle="round,pad=0.02,rounding_size=0.08", fc=color, ec=INK, lw=1)
    axes.add_patch(shape)
    axes.text(x, y, text, ha="center", va="center", fontsize=9.5)


def arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str = INK, dashed: bool = False
) -> None:
    style = "--" if dashed else "-"
    axes.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=11, color=color, lw=1.2, linestyle=style, shrinkB=2
        )
    )


# ------------------------------------------------------------------------------------- ownership


def owners() -> tuple[list[int], list[int]]:
    """Owner of each row of two hidden tensors, found as the engine does, with weights that are powers of two."""
    torch.manual_seed(0)
    order = torch.tensor([2, 0, 3, 1])
    before = nn.Linear(3, 5)(torch.randn(4, 3))
    after = before[order]
    losses = nn.Linear(5, 2)(after).square().sum(1)
    found = []
    for hidden in (before, after):
        plain = torch.autograd.grad(losses.sum(), hidden, retain_graph=True)[0]
        coded = torch.autograd.grad((losses * 2.0 ** torch.arange(4)).sum(), hidden, retain_graph=True)[0]
        found.append((coded / plain).log2().mean(1).round().int().tolist())
    return found[0], found[1]


def rows(axes: Axes, x: float, y: float, colors: list[str], texts: list[str], width: float = 0.9) -> None:
    """Tensor with four rows, centered at (x, y)."""
    height = 0.3
    for k, (color, text) in enumerate(zip(colors, texts, strict=True)):
        bottom = y + (1 - k) * height
        axes.add_patch(Rectangle((x - width / 2, bottom), width, height, fc=color, ec=PAPER, lw=1.5))
        axes.text(x, bottom + height / 2, text, ha="center", va="center", fontsize=9, color="white", fontweight="bold")


def ownership() -> None:
    figure, axes = canvas(10, 4.5)
    before, after = owners()
    top = 2.95
    places = {"x": 0.9, "first": 2.35, "before": 3.75, "permute": 5.1, "after": 6.4, "second": 7.7, "losses": 9.15}
    for name, text in (("first", "Linear"), ("permute", "permute\nrows"), ("second", "Linear")):
        box(axes, places[name], top, 0.95, 0.7, text)
    rows(axes, places["before"], top, [SAMPLES[k] for k in before], [f"sample {k}" for k in before])
    rows(axes, places["after"], top, [SAMPLES[k] for k in after], [f"sample {k}" for k in after])
    rows(axes, places["losses"], top, list(SAMPLES), [f"loss {k}  × {2**k}" for k in range(4)], width=1.15)
    rows(axes, places["x"], top, [FAINT] * 4, ["row"] * 4, width=0.7)
    names = list(places)
    half = {"x": 0.35, "before": 0.45, "after": 0.45, "losses": 0.58}
    for left, right in itertools.pairwise(names):
        start = places[left] + half.get(left, 0.5)
        end = places[right] - half.get(right, 0.5)
        arrow(axes, (end, top), (start, top), dashed=right == "first")
    axes.text(places["before"], top + 0.72, "gradient of the activations", ha="center", fontsize=9.5)
    axes.text(places["after"], top + 0.72, "each row has one owner", ha="center", fontsize=9.5)
    axes.text(places["losses"], top + 0.72, "weights 1, 2, 4, 8", ha="center", fontsize=9.5)
    axes.text(
        0.3, 4.2, "Backward pass: weights of the losses show whose gradient each row is", fontsize=12, fontweight="bold"
    )

    axes.plot([0.4, 9.7], [1.95, 1.95], color=INK, lw=1.2, linestyle=(0, (5, 3)))
    axes.text(9.7, 2.02, "cut", ha="right", fontsize=10, fontweight="bold")
    axes.text(0.4, 2.02, "above: one owner", fontsize=9, color=FAINT)
    axes.text(0.4, 1.7, "below: sums over samples", fontsize=9, color=FAINT)
    for name in ("first", "second"):
        x = places[name]
        arrow(axes, (x, top - 0.38), (x, 1.42))
        for k, color in enumerate(reversed(SAMPLES)):
            axes.add_patch(Rectangle((x - 0.42 + 0.09 * k, 0.74 + 0.09 * k), 0.6, 0.4, fc=color, ec=PAPER, lw=1.2))
        axes.text(x + 0.02, 0.5, "4 gradients of one weight", ha="center", fontsize=9.5)
    box(axes, 5.05, 0.95, 1.7, 0.62, "plain backward:\ntheir sum", MIXED)
    arrow(axes, (3.05, 0.95), (4.15, 0.95))
    arrow(axes, (7.1, 0.95), (5.95, 0.95))
    axes.text(
        5.05,
        0.18,
        "norms, dot products and weighted sums are computed from what arrives at the cut",
        ha="center",
        fontsize=9.5,
    )
    save(figure, "ownership.png")


# ---------------------------------------------------------------------------------------- update


def pieces() -> tuple[list[int], list[int], list[int]]:
    """Sizes of the batches, windows and microbatches of 50 samples."""
    batches, windows, micro = [], [], []
    loader = DataLoader(TensorDataset(torch.randn(50, 3), torch.zeros(50)), batch_size=16)

    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
        micro.append(len(batch[0]))
        return model(batch[0]).sum(1)

    step = sw.Step(nn.Linear(3, 1), sw.sgd(0.1), loss_fn, samples=20, microbatch=8, recheck=False)
    windows = [update.samples for update in step.over(loader)]
    batches = [len(x) for x, _ in loader]
    assert sum(batches) == sum(windows) == sum(micro) == 50
    return batches, windows, micro


def update() -> None:
    figure, axes = canvas(10, 3.7)
    axes.text(
        0.3,
        3.38,
        "50 samples, DataLoader(batch_size=16), Step(samples=20, microbatch=8)",
        fontsize=12,
        fontweight="bold",
    )
    batches, windows, micro = pieces()
    lines = (
        ("batch", "what the loader yields", batches, 2.6, "#b9c6d3"),
        ("microbatch", "computed at a time: bounds memory", micro, 1.65, "#d8d1e3"),
        ("window", "one update", windows, 0.7, "#bcd8c5"),
    )
    left, unit = 2.75, 6.95 / 50
    for name, meaning, sizes, y, color in lines:
        axes.text(0.3, y + 0.06, name, fontsize=11, fontweight="bold", va="bottom")
        axes.text(0.3, y - 0.02, meaning, fontsize=9, va="top")
        position = left
        for size in sizes:
            axes.add_patch(Rectangle((position, y - 0.26), size * unit, 0.55, fc=color, ec=PAPER, lw=2.5))
            label = {"fc": color, "ec": color, "pad": 2}
            axes.text(position + size * unit / 2, y, str(size), ha="center", va="center", fontsize=10, bbox=label)
            position += size * unit
    position = left
    for k, size in enumerate(windows):
        center = position + size * unit / 2
        axes.text(center, 0.3, f"θ ← θ - lr · Σ g / {size}", ha="center", va="top", fontsize=10)
        position += size * unit
        if k < len(windows) - 1:
            axes.plot([position, position], [0.42, 2.95], color=INK, lw=1, linestyle=(0, (4, 3)))
    save(figure, "update.png")


# ------------------------------------------------------------------------------------ transforms


def transform() -> None:
    figure, axes = canvas(10, 4.6)
    axes.text(
        0.3,
        4.28,
        "A transform acts when a sample's gradient is known, before the gradients are summed",
        fontsize=12,
        fontweight="bold",
    )
    steps = (
        ("losses", "(B,)"),
        ("gradients", "g₁ … g_B"),
        ("transforms", "c₁ … c_B"),
        ("sum", "Σ c·g"),
        ("noise", "once"),
        ("divide", "/ Σ count"),
        ("max_grad_\nnorm", "of the update"),
        ("optimizer", "θ"),
    )
    for k, (name, below) in enumerate(steps):
        x = 0.82 + k * 1.2
        box(axes, x, 3.6, 1.0, 0.5, name, "#f6d9cd" if name == "transforms" else PAPER)
        axes.text(x, 3.18, below, ha="center", fontsize=9, color=FAINT)
        if k:
            arrow(axes, (x - 0.7, 3.6), (x - 0.5, 3.6))
    torch.manual_seed(4)
    g = torch.tensor([[0.55, 0.25], [0.35, 0.6], [0.7, 0.5], [1.9, -0.75], [0.15, 0.4]])
    norms = g.norm(dim=1)
    c = (0.8 / norms).clamp(max=1)
    panels = (
        ("gradients of five samples", g, None),
        ("after sw.clip(0.8)", c[:, None] * g, 0.8),
        ("their mean, enlarged: before and after", torch.stack([g.mean(0), (c[:, None] * g).mean(0)]), None),
    )
    for k, (title, vectors, radius) in enumerate(panels):
        panel = figure.add_axes((0.03 + 0.33 * k, 0.03, 0.3, 0.56), facecolor=PAPER)
        zoom = 1.6 if k == 2 else 1
        panel.set(xlim=(-0.85 / zoom, 2.15 / zoom), ylim=(-1 / zoom, 1 / zoom), xticks=[], yticks=[], aspect="equal")
        panel.spines[:].set_visible(False)
        panel.set_title(title, fontsize=10.5, pad=2)
        if radius:
            angles = torch.linspace(0, 6.2832, 100)
            panel.plot(radius * angles.cos(), radius * angles.sin(), color=FAINT, lw=1, linestyle=":")
        colors = [FAINT, SAMPLES[1]] if k == 2 else [SAMPLES[1] if i == 3 else SAMPLES[0] for i in range(len(vectors))]
        for vector, color in zip(vectors.tolist(), colors, strict=True):
            arrow(panel, (0, 0), (vector[0], vector[1]), color)
        if k == 0:
            panel.text(1.5, -0.9, f"norm {norms[3]:.1f}", color=SAMPLES[1], fontsize=9.5)
        if k == 1:
            panel.text(0.75, -0.62, f"c = {c[3]:.2f}", color=SAMPLES[1], fontsize=9.5)
        if k == 2:
            panel.text(*(vectors[0] + torch.tensor([0.05, -0.12])).tolist(), "before", color=FAINT, fontsize=9.5)
            panel.text(*(vectors[1] + torch.tensor([-0.1, 0.1])).tolist(), "after", color=SAMPLES[1], fontsize=9.5)
    save(figure, "transform.png")


# ---------------------------------------------------------------------------------------- report


def report() -> None:
    """Numbers on the picture of the report; docs/pictures.md says what they mean."""
    picture = plt.imread(HERE / "report.png")
    height, width = picture.shape[:2]
    figure = plt.figure(figsize=(width / 130, height / 130))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.imshow(picture)
    axes.axis("off")
    places = ((180, 36), (710, 141), (178, 363), (180, 1083), (794, 946), (1155, 962))
    for number, (x, y) in enumerate(places, start=1):
        axes.scatter([x], [y], s=430, color=SAMPLES[1], edgecolors="white", linewidths=1.5, zorder=3)
        axes.text(
            x,
            y,
            str(number),
            color="white",
            ha="center",
            va="center_baseline",
            fontsize=12,
            fontweight="bold",
            zorder=4,
        )
    save(figure, "report-annotated.png")


def main() -> None:
    mpl.rcParams.update({"text.color": INK, "font.size": 10})
    ownership()
    update()
    transform()
    report()


if __name__ == "__main__":
    main()
