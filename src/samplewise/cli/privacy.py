"""`samplewise privacy`: noise and epsilon of a differentially private training, without training."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from samplewise.cli.arguments import bad_parameters, check_one_of
from samplewise.cli.stdio import slow_notice
from samplewise.core.text import plural, render
from samplewise.privacy import accounting
from samplewise.privacy.accounting import Releases

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COVERED = """\
Covered: Poisson sampling, in which each update draws each sample with the given rate, independently of the others;
datasets that differ by adding or removing one sample. The number of samples is public.
Not covered: a loader that shuffles. Its epsilon may be several times larger."""
DIVISOR = "sample rate × number of samples"
TABLE_SHARES = 0.1, 0.25, 0.5, 0.75, 1.0  # of the updates
CURVE_SHARES = tuple((k / 12) ** 2 for k in range(1, 13))  # dense at the start, where the curve is steep
COLORS = {"pld": "#2f6f9f", "rdp": "#d9562b"}


@dataclass(frozen=True)
class Plan:
    """Settings of a private training run: its releases, and delta."""

    releases: Releases
    delta: float
    dataset_size: int | None

    @property
    def batch(self) -> str:
        """Expected number of samples per update, as text; empty if the number of samples is not known."""
        if self.dataset_size is None:
            return ""
        return f"{self.releases.sample_rate * self.dataset_size:,.1f}".removesuffix(".0")

    def epsilon(self, accountant: str, updates: int | None = None) -> float:
        """Epsilon after some updates; default: all."""
        releases = self.releases if updates is None else replace(self.releases, updates=updates)
        return accounting.epsilon(releases, self.delta, accountant)

    def updates_at(self, shares: Sequence[float]) -> list[int]:
        """Numbers of updates at these shares of the training, without duplicates."""
        return list(dict.fromkeys(max(1, round(share * self.releases.updates)) for share in shares))


def privacy(
    delta: Annotated[
        float, typer.Option(metavar="D", help="Delta, below 1 / number of samples: 1e-5.", show_default=False)
    ],
    dataset_size: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Number of samples in the dataset; with --batch.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Expected number of samples per update.")
    ] = None,
    sample_rate: Annotated[
        float | None,
        typer.Option(metavar="Q", help="Probability of a sample to be drawn for an update, instead of --batch."),
    ] = None,
    epsilon: Annotated[float | None, typer.Option(metavar="E", help="Find the noise for this epsilon.")] = None,
    noise_multiplier: Annotated[
        float | None, typer.Option(metavar="S", help="Compute epsilon for this noise, instead of --epsilon.")
    ] = None,
    epochs: Annotated[float | None, typer.Option(metavar="N", help="Passes over the dataset.")] = None,
    updates: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Number of updates, instead of --epochs.")
    ] = None,
    accountant: Annotated[
        str, typer.Option(metavar="NAME", help="Accountant that finds the noise: pld (tight) or rdp.")
    ] = "pld",
    to: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw epsilon over updates and over delta, as PNG, PDF or SVG.")
    ] = None,
) -> None:
    """Plan a differentially private training: noise for an epsilon, or epsilon for a noise.

    Prints noise multiplier, sample rate, updates and divisor, epsilon by both accountants of dp-accounting, epsilon
    after a part of the updates, and epsilon for other deltas. Nothing is trained. The settings are those of sw.Privacy
    and of samplewise train --epsilon.
    """
    check_one_of(epsilon=epsilon, noise_multiplier=noise_multiplier)
    check_one_of(batch=batch, sample_rate=sample_rate)
    check_one_of(epochs=epochs, updates=updates)
    if noise_multiplier is not None and not 0 < noise_multiplier < math.inf:
        raise typer.BadParameter(
            f"must be a positive number; found {noise_multiplier}.", param_hint="--noise-multiplier"
        )
    if accountant not in accounting.ACCOUNTANTS:
        raise typer.BadParameter(f"must be pld or rdp; found {accountant!r}.", param_hint="--accountant")
    if batch is not None and dataset_size is None:
        raise typer.BadParameter("--batch needs --dataset-size; found none.", param_hint="--dataset-size")
    if batch is not None and dataset_size is not None and batch > dataset_size:
        raise typer.BadParameter(
            f"must be at most {dataset_size}, the number of samples; found {batch}.", param_hint="--batch"
        )
    figure = None if to is None else _new_figure(to)
    with slow_notice("computing"), bad_parameters():
        rate, total = accounting.sampling_plan(sample_rate, batch, updates, epochs, dataset_size)
        if epsilon is not None:
            noise_multiplier = accounting.calibrate(epsilon, delta, rate, total, accountant)
        assert noise_multiplier is not None
        plan = Plan(Releases(noise_multiplier, rate, total), delta, dataset_size)
        text = _text(plan)
    if dataset_size is not None:
        accounting.warn_of_delta(delta, dataset_size)
    typer.echo(text)
    if figure is not None and to is not None:
        with slow_notice("drawing"):
            _draw(figure, plan)
        try:
            figure.savefig(to, dpi=130)
        except OSError as why:
            typer.echo(f"the curve cannot be written: {why}", err=True)
            raise typer.Exit(1) from why
        typer.echo(f"\ncurve  {to}")


# --- text -------------------------------------------------------------------------------------------------------------


def _text(plan: Plan) -> str:
    releases = plan.releases
    size = "" if plan.dataset_size is None else f" ({plan.batch} of {plural(plan.dataset_size, 'sample')})"
    settings = [
        ["epsilon, PLD", f"{_rounded_up(plan.epsilon('pld'))} (tight)"],
        ["epsilon, RDP", f"{_rounded_up(plan.epsilon('rdp'))} (upper bound)"],
        ["delta", f"{plan.delta:g}"],
        ["noise multiplier", _rounded_up(releases.noise_multiplier)],
        ["sample rate", f"{releases.sample_rate:.6g}{size}"],
        ["updates", f"{releases.updates:,} ({releases.updates * releases.sample_rate:.3g} epochs)"],
        ["public divisor", f"{plan.batch} ({DIVISOR})" if plan.batch else DIVISOR],
    ]
    over_updates = [
        [f"{updates:,}", *(_rounded_up(plan.epsilon(accountant, updates)) for accountant in accounting.ACCOUNTANTS)]
        for updates in plan.updates_at(TABLE_SHARES)
    ]
    curves = [accounting.curve(releases, accountant) for accountant in accounting.ACCOUNTANTS]
    over_delta = [[f"{delta:.0e}", *(_rounded_up(curve[delta]) for curve in curves)] for delta in curves[0]]
    epsilons = ["epsilon, PLD", "epsilon, RDP"]
    tables = [
        render(["setting", "value"], settings),
        render(["updates", *epsilons], over_updates, f"At delta {plan.delta:g}"),
        render(["delta", *epsilons], over_delta, f"After {plural(releases.updates, 'update')}"),
    ]
    return "\n\n".join([*tables, COVERED])


def _rounded_up(value: float) -> str:
    """Four decimals, rounded up: a printed epsilon is an upper bound, and a printed noise is enough."""
    if not math.isfinite(value):
        return str(value)
    return f"{math.ceil(value * 1e4 - 1e-6) / 1e4:.4f}"


# --- figure -----------------------------------------------------------------------------------------------------------


def _new_figure(to: Path) -> Any:
    """Figure for a file; errors that can be known before the computation are raised here."""
    if os.path.isdir(to):
        raise typer.BadParameter(f"must be a file; found a directory, {to}.", param_hint="--to")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("the curve needs matplotlib: pip install 'samplewise[report]'") from None
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    if to.suffix.lstrip(".").lower() not in ("png", "pdf", "svg"):
        raise typer.BadParameter(f"must end in .png, .pdf or .svg; found {to}.", param_hint="--to")
    return figure


def _draw(figure: Any, plan: Plan) -> None:
    releases = plan.releases
    over_updates, over_delta = figure.subplots(1, 2)
    updates = plan.updates_at(CURVE_SHARES)
    for accountant, color in COLORS.items():
        name = accountant.upper()
        after = [plan.epsilon(accountant, count) for count in updates]
        over_updates.plot([0, *updates], [0.0, *after], color=color, label=name)
        curve = accounting.curve(releases, accountant)
        over_delta.plot(list(curve), list(curve.values()), color=color, marker="o", markersize=3.5, label=name)
        over_updates.annotate(
            f"{after[-1]:.2f}", (updates[-1], after[-1]), (4, 0), textcoords="offset points", va="center"
        )
    over_delta.axvline(plan.delta, color="0.6", linestyle=":", linewidth=1)
    over_delta.set_xscale("log")
    _label(over_updates, "updates", f"Epsilon over updates, at delta {plan.delta:g}")
    _label(over_delta, "delta", f"Epsilon over delta, after {plural(releases.updates, 'update')}")
    size = "" if plan.dataset_size is None else f" ({plan.batch} of {plan.dataset_size:,})"
    figure.suptitle(
        f"Noise multiplier {releases.noise_multiplier:.4g}, sample rate {releases.sample_rate:.4g}{size}, "
        "Poisson sampling",
        fontsize=10,
    )


def _label(axes: Axes, horizontal: str, title: str) -> None:
    axes.set_xlabel(horizontal)
    axes.set_ylabel("epsilon")
    axes.set_title(title, fontsize=10, loc="left", fontweight="bold")
    axes.set_ylim(bottom=0)
    axes.grid(color="0.92")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
