"""Options of `samplewise train` for differentially private training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from samplewise.cli.arguments import bad_parameters

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from samplewise.privacy.privacy import Privacy


@dataclass(frozen=True)
class PrivateOptions:
    """Values of --epsilon, --delta, --batch and --clip, and the duration of the training."""

    epsilon: float
    delta: float | None
    batch: int | None
    clip: float | None
    epochs: int
    updates: int | None

    def __post_init__(self) -> None:
        for name in ("delta", "batch", "clip"):
            if getattr(self, name) is None:
                raise typer.BadParameter(
                    f"--epsilon needs --delta, --batch and --clip; found no --{name}.", param_hint="--epsilon"
                )
        assert self.delta is not None and self.clip is not None
        for name, value, limit in (
            ("epsilon", self.epsilon, math.inf),
            ("delta", self.delta, 1.0),
            ("clip", self.clip, math.inf),
        ):
            if not 0 < value < limit:
                wanted = "a finite number above 0" if limit == math.inf else f"a number between 0 and {limit:g}"
                raise typer.BadParameter(f"must be {wanted}; found {value}.", param_hint=f"--{name}")

    def plan(self, loader: Any) -> tuple[Privacy, DataLoader[Any]]:
        """Plan for the dataset of a loader, and a loader that draws from it as the accountant assumes."""
        from torch.utils.data import DataLoader, IterableDataset

        from samplewise.privacy.privacy import Privacy

        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            raise typer.BadParameter(
                "the recipe must return a DataLoader with a map-style dataset, from which samples are drawn; found "
                f"{type(loader).__name__}.",
                param_hint="--epsilon",
            )
        samples = len(loader.dataset)  # type: ignore[arg-type]
        assert self.batch is not None and self.delta is not None and self.clip is not None
        if self.batch > samples:
            raise typer.BadParameter(f"must be at most {samples}, the number of samples.", param_hint="--batch")
        with bad_parameters("epsilon", ("delta", "batch", "clip", "updates")):
            privacy = Privacy(
                epsilon=self.epsilon,
                delta=self.delta,
                updates=self.updates or max(1, round(self.epochs * samples / self.batch)),
                sample_rate=self.batch / samples,
                clip=self.clip,
            )
        kept = ("num_workers", "collate_fn", "pin_memory", "worker_init_fn", "timeout")
        arguments = {name: getattr(loader, name) for name in kept}
        return privacy, privacy.loader(loader.dataset, **arguments)
