"""Behavior of training loops with a short last window, after an interruption, and with a NaN.

    python benchmarks/loops.py        # or `make comparison`

Prints the table of docs/comparison.md:

short window  24 samples in batches of 4; an update is 4 batches, so that the last update has 2 batches. Are the
              parameters equal to those of updates with 16 and 8 samples at once?
short batch   the same with 30 samples: the last update has 4 batches, of which the last has 2 samples.
resumed       12 batches per epoch, shuffled, Adam. The run is interrupted after update 16, at which there is a
              checkpoint, and restarted. Is every sample of that epoch used once, in the order of an uninterrupted run?
in order      the same without shuffling.
bit for bit   are the final parameters (of the shuffled run) exactly those of an uninterrupted run? Without dropout, and
              with dropout, which also needs the RNG state.
NaN           one sample contains a NaN. Is there an error, and are the parameters finite?
"""

from __future__ import annotations

import random
import tempfile
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, DIES_AFTER = 3, 16
Factory = Callable[..., Any]


class Died(Exception): ...


@dataclass
class Job:
    """One training script: seeds the RNGs, creates data and model, and trains. `seen`: indices of the used samples."""

    samples: int
    directory: Path
    epochs: int = EPOCHS
    accumulate: int = 1
    shuffle: bool = False
    dropout: float = 0.0
    adam: bool = False
    dies_after: int | None = None
    resume: bool = False
    loader_type: Factory = DataLoader
    poison: bool = False
    seen: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        random.seed(0)
        torch.manual_seed(0)
        data = torch.Generator().manual_seed(1)
        x = torch.randn(self.samples, 6, generator=data)
        y = torch.randint(0, 3, (self.samples,), generator=data)
        if self.poison:
            x[5] = torch.nan
        self.dataset = TensorDataset(x, y, torch.arange(self.samples))
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(self.dropout), nn.Linear(8, 3))
        self.optimizer = (torch.optim.Adam if self.adam else torch.optim.SGD)(self.model.parameters(), lr=0.1)
        self.loader = self.loader_type(self.dataset, batch_size=4, shuffle=self.shuffle)

    def look(self, index: Tensor) -> None:
        self.seen += index.tolist()

    def maybe_die(self, updates: int) -> None:
        if updates == self.dies_after:
            raise Died

    def parameters(self) -> Tensor:
        return nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()


class Library(ABC):
    name: str
    stateful = False  # True: use torchdata's StatefulDataLoader

    def loader(self) -> Factory:
        if not self.stateful:
            return DataLoader
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader

    @abstractmethod
    def train(self, job: Job) -> None: ...


# -------------------------------------------------------------------------------------- samplewise


class Samplewise(Library):
    name = "samplewise"

    def train(self, job: Job) -> None:
        import samplewise as sw
        from samplewise.loop.callbacks import ModelCheckpoint

        def loss_fn(model: nn.Module, batch: Any) -> Tensor:
            # At the start of the next update, because the checkpoint is written after all other callbacks.
            job.maybe_die(step.counters.updates)
            x, y, index = batch
            job.look(index)
            return F.cross_entropy(model(x), y, reduction="none")

        step = sw.Step(job.model, job.optimizer, loss_fn, samples=4 * job.accumulate, recheck=False)
        trainer = sw.Trainer(step, job.directory, [ModelCheckpoint(every="1up")], progress=False)
        trainer.fit(job.loader, epochs=job.epochs, resume=job.resume)


class SamplewiseStateful(Samplewise):
    name = "samplewise, StatefulDataLoader"
    stateful = True


# --------------------------------------------------------------------------------------- Lightning


class Lightning(Library):
    name = "Lightning"

    def train(self, job: Job) -> None:
        import lightning as L
        from lightning.pytorch.callbacks import ModelCheckpoint

        class Module(L.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model = job.model

            def training_step(self, batch: Any, _: int) -> Tensor:
                x, y, index = batch
                job.look(index)
                return F.cross_entropy(self.model(x), y)

            def configure_optimizers(self) -> Any:
                return job.optimizer

        class Dies(L.Callback):
            def on_train_batch_start(
                self, trainer: Any, *_: Any
            ) -> None:  # checkpoints are written after all other callbacks
                job.maybe_die(trainer.global_step)

        saved = ModelCheckpoint(job.directory, "{step}", every_n_train_steps=1, save_top_k=-1)
        trainer = L.Trainer(
            max_epochs=job.epochs,
            accumulate_grad_batches=job.accumulate,
            callbacks=[saved, Dies()],
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        path = str(job.directory / f"step={DIES_AFTER}.ckpt") if job.resume else None
        trainer.fit(Module(), job.loader, ckpt_path=path)


class LightningStateful(Lightning):
    name = "Lightning, StatefulDataLoader"
    stateful = True


# -------------------------------------------------------------------------------------- Accelerate


class Accelerate(Library):
    """The loop in its guides on gradient accumulation and checkpointing, with `skip_first_batches`."""

    name = "Accelerate"
    options: dict[str, Any] = {}  # noqa: RUF012

    def train(self, job: Job) -> None:
        from accelerate import Accelerator, DataLoaderConfiguration
        from accelerate.state import AcceleratorState, GradientState, PartialState

        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()  # as in a new process
        accelerator = Accelerator(
            gradient_accumulation_steps=job.accumulate,
            cpu=True,
            dataloader_config=DataLoaderConfiguration(**self.options),
        )
        model, optimizer, loader = accelerator.prepare(job.model, job.optimizer, job.loader)
        first, skip, updates = 0, 0, 0
        if job.resume:
            accelerator.load_state(str(job.directory / "state"))
            first, skip, updates = DIES_AFTER // len(loader), DIES_AFTER % len(loader), DIES_AFTER
        for epoch in range(first, job.epochs):
            if hasattr(loader, "set_epoch"):
                loader.set_epoch(epoch)
            rest = self.rest(accelerator, loader, skip if epoch == first else 0)
            for x, y, index in rest:
                job.look(index)
                with accelerator.accumulate(model):
                    accelerator.backward(F.cross_entropy(model(x), y))
                    optimizer.step()
                    optimizer.zero_grad()
                updates += accelerator.sync_gradients
                if updates == DIES_AFTER and job.dies_after is not None:
                    accelerator.save_state(str(job.directory / "state"))
                    job.maybe_die(updates)

    def rest(self, accelerator: Any, loader: Any, skip: int) -> Any:
        return accelerator.skip_first_batches(loader, skip) if skip else loader


class AccelerateSeedable(Accelerate):
    name = "Accelerate, use_seedable_sampler"
    options = {"use_seedable_sampler": True}  # noqa: RUF012


class AccelerateStateful(Accelerate):
    """With this option the loader restores its position, and no batches are skipped."""

    name = "Accelerate, StatefulDataLoader"
    stateful = True
    options = {"use_stateful_dataloader": True}  # noqa: RUF012

    def rest(self, accelerator: Any, loader: Any, skip: int) -> Any:
        return loader


LIBRARIES: list[Library] = [
    Samplewise(),
    SamplewiseStateful(),
    Lightning(),
    LightningStateful(),
    Accelerate(),
    AccelerateSeedable(),
    AccelerateStateful(),
]


# ------------------------------------------------------------------------------------------- facts


def accumulated(library: Library, samples: int) -> str:
    """Distance to the result of whole-window updates, relative to the distance covered by training."""
    with tempfile.TemporaryDirectory() as directory:
        job = Job(samples, Path(directory), epochs=1, accumulate=4, loader_type=library.loader())
        start = job.parameters()
        library.train(job)
    wanted = Job(samples, Path(directory))
    for rows in (slice(0, 16), slice(16, samples)):
        x, y, _ = wanted.dataset[rows]
        wanted.optimizer.zero_grad()
        F.cross_entropy(wanted.model(x), y).backward()
        wanted.optimizer.step()
    way = (wanted.parameters() - start).norm()
    off = ((job.parameters() - wanted.parameters()).norm() / way).item()
    return "equal" if off < 1e-12 else f"off by {off:.0%}"


@dataclass(frozen=True)
class Resumed:
    samples: str
    identical: bool


@cache
def resumed(library: Library, shuffle: bool = True, dropout: float = 0.0) -> Resumed:
    shape: dict[str, Any] = dict(samples=48, shuffle=shuffle, dropout=dropout, adam=True, loader_type=library.loader())
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        whole = Job(directory=Path(one), **shape)
        library.train(whole)
        first = Job(directory=Path(other), dies_after=DIES_AFTER, **shape)
        with suppress(Died):
            library.train(first)
        assert len(first.seen) == 4 * DIES_AFTER
        second = Job(directory=Path(other), resume=True, **shape)
        library.train(second)
    seen = [*first.seen, *second.seen]
    found = "same samples, same order" if seen == whole.seen else f"{len(set(seen[48:96]))} of 48 samples seen"
    return Resumed(found, torch.equal(second.parameters(), whole.parameters()))


def bit_for_bit(library: Library) -> str:
    without, with_dropout = resumed(library).identical, resumed(library, dropout=0.5).identical
    return f"{'yes' if without else 'no'}, with dropout {'yes' if with_dropout else 'no'}"


def poisoned(library: Library) -> str:
    with tempfile.TemporaryDirectory() as directory:
        job = Job(30, Path(directory), epochs=1, poison=True, loader_type=library.loader())
        try:
            library.train(job)
        except Exception as error:
            kept = "parameters finite" if job.parameters().isfinite().all() else "parameters NaN"
            return f"{type(error).__name__}, {kept}"
    return "finite" if job.parameters().isfinite().all() else "no error, parameters NaN"


FACTS: dict[str, Callable[[Library], str]] = {
    "short window": lambda library: accumulated(library, samples=24),
    "short batch": lambda library: accumulated(library, samples=30),
    "resumed": lambda library: resumed(library).samples,
    "in order": lambda library: resumed(library, shuffle=False).samples,
    "bit for bit": bit_for_bit,
    "NaN": poisoned,
}


def main() -> None:
    import logging

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    print(", ".join(f"{name} {version(name)}" for name in ("torch", "lightning", "accelerate", "torchdata")), "\n")
    print("| | " + " | ".join(FACTS) + " |\n|---|" + "---|" * len(FACTS))
    for library in LIBRARIES:
        print(f"| {library.name} | " + " | ".join(fact(library) for fact in FACTS.values()) + " |", flush=True)


if __name__ == "__main__":
    main()
