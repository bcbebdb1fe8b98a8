"""`sw.Privacy`, the plan of a differentially private training run, and `step.privacy`, what is spent of it."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any, Literal, NoReturn

from torch import Tensor
from torch.utils.data import DataLoader

from samplewise.core.text import Table, Tabular, plural
from samplewise.errors import PrivacyError
from samplewise.parallel import collectives
from samplewise.parallel.collectives import on_every_rank
from samplewise.privacy import accounting
from samplewise.privacy.accounting import Releases
from samplewise.privacy.release_log import ReleaseLog, load_secret, remove_secret, save_secret
from samplewise.privacy.rng import Secret
from samplewise.privacy.sampling import DrawState, make_loader
from samplewise.transforms.chain import Divisor
from samplewise.transforms.clip import Clip, clip


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Privacy:
    """Plan of a training run with (epsilon, delta)-differential privacy, for adding or removing one sample.

        privacy = sw.Privacy(epsilon=3.0, delta=1e-5, updates=1172, sample_rate=2048 / 60_000, clip=1.0)
        loader = privacy.loader(dataset)
        step = sw.Step(model, optimizer, loss_fn, privacy=privacy)
        sw.Trainer(step, "runs/private").fit(loader)

    The same plan by batch size and epochs: sw.Privacy(..., batch_size=2048, epochs=40, dataset_size=60_000).

    Each update draws every sample with probability `sample_rate`, independently (Poisson sampling); clips the gradient
    of each sample to norm `clip`; adds Gaussian noise of standard deviation noise_multiplier × sensitivity to the sum;
    and divides by a public constant. Needs `pip install 'samplewise[privacy]'`.

    Guarantee.
    epsilon, noise_multiplier: exactly one of them is given; the other one is computed.
    delta: probability with which the bound epsilon may fail; below 1 / number of samples.
    accountant: "pld" (default, tight) or "rdp", of the package dp-accounting.
    users: user of each sample of the dataset, a list or tensor of ids; sampling, clipping and the guarantee then refer
    to all samples of one user. None (default): they refer to single samples.

    Mechanism.
    updates: number of updates that are paid for; more are refused. Or `epochs`: passes over the dataset, in which
    updates = round(epochs / sample_rate).
    sample_rate: probability with which a sample (or user) is drawn: expected batch size / number of samples. Or
    `batch_size`, the expected number of samples (or users) per update, with `dataset_size`.
    clip: bound of the norm of each sample's gradient, or a `sw.clip` with other settings, such as
    sw.clip(1.0, mode="automatic"). With sw.clip(1.0, by="parameter") the sensitivity is 1.0 × √(number of parameters),
    which the noise takes into account.
    adaptive: None (default), or the share of samples that shall not be clipped, such as 0.5: the bound then follows
    this quantile of the norms, starting from `clip`. A noisy count of unclipped samples pays for it; the noise of the
    gradients is a little larger, so that the guarantee stays the same.
    augmentations: number of random views of each sample, whose gradients are averaged before they are clipped.
    max_batch: largest number of samples (or users) of an update; if more are drawn, a random part of them is used. The
    accountant then needs `dataset_size`.
    divide_by: public constant by which sums are divided; default: sample_rate × number of samples (or users), which
    makes that number public. With `divide_by`, checkpoints do not contain the number, unless `adaptive` or
    `dataset_size` makes it public.
    dataset_size: number of samples (or users) of the dataset, which is public; only needed with `max_batch` and
    `batch_size`.

    Run.
    seed: None (default) takes a key from the operating system. With a number, a run is reproducible, and not private.
    secure: True draws samples and noise from a cryptographic stream, several times slower.
    observe: False (default) hides losses, norms and sizes of batches, which the guarantee does not cover: nothing of
    them is logged, and the ledger is refused. True shows them.

    The arguments, except batch_size and epochs, are attributes of the same names: `epsilon`, `noise_multiplier`,
    `updates` and `sample_rate` are numbers, `clip` is a `sw.clip`.
    """

    epsilon: float
    noise_multiplier: float
    delta: float
    accountant: Literal["pld", "rdp"]
    users: Sequence[Hashable] | Tensor | None
    updates: int
    sample_rate: float
    clip: Clip
    adaptive: float | None
    augmentations: int
    max_batch: int | None
    divide_by: float | None
    dataset_size: int | None
    seed: int | None
    secure: bool
    observe: bool
    # Shared by the loaders and steps of the plan:
    _state: DrawState
    _divisor: Divisor
    _release_log: ReleaseLog

    def __init__(
        self,
        *,
        epsilon: float | None = None,
        noise_multiplier: float | None = None,
        delta: float,
        accountant: Literal["pld", "rdp"] = "pld",
        users: Sequence[Hashable] | Tensor | None = None,
        updates: int | None = None,
        epochs: float | None = None,
        sample_rate: float | None = None,
        batch_size: float | None = None,
        clip: float | Clip,
        adaptive: float | None = None,
        augmentations: int = 1,
        max_batch: int | None = None,
        divide_by: float | None = None,
        dataset_size: int | None = None,
        seed: int | None = None,
        secure: bool = False,
        observe: bool = False,
    ):
        arguments = {name: value for name, value in locals().items() if name not in ("self", "epochs", "batch_size")}
        if (epsilon is None) == (noise_multiplier is None):
            count = "none" if epsilon is None else "both"
            raise ValueError(f"exactly one of epsilon and noise_multiplier must be given; found {count}.")
        sample_rate, updates = accounting.sampling_plan(sample_rate, batch_size, updates, epochs, dataset_size)
        arguments.update(sample_rate=sample_rate, updates=updates, clip=_as_clip(clip))
        vars(self).update(arguments)  # not by assignment: the instance is frozen
        self._check()
        if epsilon is None:
            vars(self).update(epsilon=self.epsilon_after(updates))
        else:
            sampling = (sample_rate, updates, accountant, max_batch, dataset_size)
            vars(self).update(noise_multiplier=accounting.calibrate(epsilon, delta, *sampling))
        if dataset_size is not None:
            accounting.warn_of_delta(delta, dataset_size, self._unit)
        self._begin()

    def _begin(self) -> None:
        """Begin a training run, with a new key unless a seed is given."""
        secret = Secret.new() if self.seed is None else Secret.from_seed(self.seed)
        vars(self).update(
            _state=DrawState(secret, reproducible=self.seed is not None),
            _divisor=Divisor(self.divide_by),
            _release_log=ReleaseLog(),
        )

    def __deepcopy__(self, memo: Any) -> Privacy:
        """New plan with the same settings, as of another training run: with a key of its own, and nothing spent."""
        new = copy.copy(self)
        new._begin()
        return new

    def __getstate__(self) -> dict[str, Any]:
        return {"_state": self._state, **vars(self)}  # the secret first: its error says why a plan cannot be pickled

    def _check(self) -> None:
        for name in ("noise_multiplier", "divide_by"):
            value = getattr(self, name)
            if value is not None:
                _check_positive(name, value)
        is_sequence = isinstance(self.users, Sequence) or hasattr(self.users, "tolist")
        if self.users is not None and (isinstance(self.users, str) or not is_sequence):
            raise ValueError(
                "users must be a list or tensor with the user of each sample of the dataset; found "
                f"{type(self.users).__name__}."
            )
        if type(self.augmentations) is not int or self.augmentations < 1:
            raise ValueError(f"augmentations must be a positive integer; found {self.augmentations!r}.")
        if self.augmentations > 1 and self.users is not None:
            raise ValueError("augmentations must be 1 with users=; found more. Augment in the dataset.")
        if self.seed is not None and type(self.seed) is not int:
            raise ValueError(f"seed must be None or an integer; found {self.seed!r}.")
        if self.adaptive is None:
            return
        if not (isinstance(self.adaptive, float) and 0 < self.adaptive < 1):
            raise ValueError(f"adaptive must be a share between 0 and 1, such as 0.5; found {self.adaptive!r}.")
        if self.users is not None or self.clip.by_parameter or self.clip.sets_norm:
            obstacle = "users=" if self.users is not None else f"{self.clip}"
            raise ValueError(
                "an adaptive bound must be used without users=, and with a clip of the whole norm such as "
                f"sw.clip(1.0); found {obstacle}. Leave adaptive out."
            )

    # --- data ------------------------------------------------------------------------------------------------------

    def loader(self, dataset: Any, **dataloader_arguments: Any) -> DataLoader[Any]:
        """DataLoader whose batches are drawn by Poisson sampling. A pass over it has round(1 / sample_rate) draws.

        dataset: map-style dataset.
        dataloader_arguments: of DataLoader, such as num_workers and collate_fn; batch_size, shuffle and samplers are
        refused.
        """
        loader = make_loader(
            dataset,
            sample_rate=self.sample_rate,
            updates=self.updates,
            state=self._state,
            secure=self.secure,
            max_batch=self.max_batch,
            augmentations=self.augmentations,
            users=self.users,
            **dataloader_arguments,
        )
        self._set_units(loader.batch_sampler.units)  # type: ignore[union-attr]
        return loader

    def _set_units(self, units: int) -> None:
        """Use the number of samples, or users, of a dataset."""
        if self.dataset_size is not None and units != self.dataset_size:
            raise ValueError(
                f"the dataset must have dataset_size={self.dataset_size} {self._unit}s, the number given to the "
                f"accountant; found {units}. Pass the right number to sw.Privacy(dataset_size=...)."
            )
        if self._state.units is not None and units != self._state.units:
            raise ValueError(
                f"all loaders of one Privacy must have the same dataset; found {units} {self._unit}s after "
                f"{self._state.units}. Make a Privacy for each dataset."
            )
        if self._state.units is None and self.dataset_size is None:
            accounting.warn_of_delta(self.delta, units, self._unit)
        self._state.units = units
        self._state.hides_units = self.divide_by is not None and self.dataset_size is None and self.adaptive is None
        if self._divisor.value is None:
            self._divisor.value = self.sample_rate * units

    @property
    def _unit(self) -> str:
        return "sample" if self.users is None else "user"

    # --- accounting ------------------------------------------------------------------------------------------------

    def epsilon_after(self, updates: int) -> float:
        """Epsilon of this number of updates, at `delta`."""
        return accounting.epsilon(self._releases(updates), self.delta, self.accountant)

    def curve(self) -> dict[float, float]:
        """Epsilon of all updates for several values of delta: delta -> epsilon."""
        return accounting.curve(self._releases(self.updates), self.accountant)

    def _releases(self, updates: int) -> Releases:
        return Releases(self.noise_multiplier, self.sample_rate, updates, self.max_batch, self.dataset_size)

    @cached_property
    def _settings(self) -> dict[str, Any]:
        """Settings that a resumed run must share, as plain values."""
        names = ("noise_multiplier", "delta", "accountant", "updates", "sample_rate", "adaptive", "augmentations")
        more = ("max_batch", "divide_by", "dataset_size", "secure")
        settings = {name: getattr(self, name) for name in (*names, *more)}
        return {**settings, "users": self.users is not None, "clip": repr(self.clip)}

    def __repr__(self) -> str:
        """Guarantee, mechanism and what voids the guarantee, on a line each."""
        unit = "one sample" if self.users is None else "all samples of one user"
        at_most = f", at most {self.max_batch}" if self.max_batch else ""
        clipped = f"{self.clip}" if self.adaptive is None else f"clip({self.clip.max_norm}, adaptive={self.adaptive})"
        bound = "bound" if self.adaptive is not None else f"{self.clip.max_norm}"
        bound += " × √parameters" if self.clip.by_parameter else ""
        accountant = f"{self.accountant.upper()} accountant"
        lines = [
            f"({self.epsilon:.6g}, {self.delta:g})-DP for adding or removing {unit}, {accountant}",
            f"{plural(self.updates, 'update')} of Poisson samples, rate {self.sample_rate:.3g}{at_most}; {clipped}; "
            f"Gaussian noise {self.noise_multiplier:.3g} × {bound}",
        ]
        if self.seed is not None:
            lines.append("reproducible, not private: seed given")
        if self.observe:
            lines.append("observed: losses, norms and batch sizes are shown, outside of the guarantee")
        return ";\n".join(lines)


def _check_positive(name: str, value: Any) -> None:
    if not (isinstance(value, (int, float)) and isfinite(value) and value > 0):
        raise ValueError(f"{name} must be a finite, positive number; found {value!r}.")


def _as_clip(value: Any) -> Clip:
    """The `clip` argument; a number becomes a clip of the whole gradient."""
    if isinstance(value, (int, float)):
        _check_positive("clip", value)
        return clip(float(value))
    if not isinstance(value, Clip) or value.max_norm is None:
        raise ValueError(
            f"clip must be a number, or sw.clip(...) with no settings but mode=, by= and gamma=; found {value!r}."
        )
    _check_positive("max_norm of clip", value.max_norm)
    return value


@dataclass(frozen=True)
class Spent(Tabular):
    """Privacy spent so far: (epsilon, delta) after `updates` releases; `left`: updates that are still paid for."""

    epsilon: float
    delta: float
    updates: int
    left: int

    def _table(self) -> Table:
        cells = [f"{self.epsilon:.4g}", f"{self.delta:g}", f"{self.updates:,}", f"{self.left:,}"]
        return Table(["epsilon", "delta", "updates", "updates left"], [cells], "privacy spent")

    def __repr__(self) -> str:
        return f"({self.epsilon:.4g}, {self.delta:g})-DP after {self.updates} updates; {self.left} left"


class PrivacyMeter:
    """Privacy of one step: `step.privacy`. `plan`: its sw.Privacy. `zeroed`: number of samples so far whose loss or
    gradient was not finite, and which contributed nothing; the guarantee does not cover this number.
    """

    def __init__(self, plan: Privacy):
        self.plan = plan
        self.zeroed = 0
        self._state = plan._state  # state and log are shared by all steps of the plan
        self._release_log = plan._release_log
        self._directory: Path | None = None

    def __repr__(self) -> str:
        return f"{self.plan!r};\nspent {self.spent()!r}"

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise PrivacyError(
            "a private step must not be copied, because the copy would use the same noise, and neither would count the "
            "updates of the other; found that it is being copied. Copy its model, and create a new step with a new "
            "sw.Privacy."
        )

    def spent(self) -> Spent:
        """Epsilon and delta of the updates so far, and how many are left."""
        updates = self._release_log.count
        return Spent(self.plan.epsilon_after(updates), self.plan.delta, updates, self.left)

    @property
    def left(self) -> int:
        """Number of updates that are still paid for."""
        return max(0, self.plan.updates - self._release_log.count)

    @property
    def is_spent(self) -> bool:
        """True if no further update is paid for, not even as the repetition of an earlier one."""
        return self._state.update >= self.plan.updates or self.is_exhausted

    @property
    def is_exhausted(self) -> bool:
        """True if repeated updates have used up what is paid for before the last planned update is made."""
        state = self._state
        is_replay = (state.secret.public_id, state.branch, state.update) in self._release_log.releases
        return state.update < self.plan.updates and not (self.left or is_replay)

    # --- files -------------------------------------------------------------------------------------------------------

    def open(self, directory: str | Path) -> None:
        """Record spending in a directory, and continue what is recorded there. Call it before the first update.

        It holds `privacy.jsonl`, and `privacy.key` until `close(done=True)`. A trainer calls it with its run directory.
        """
        directory = Path(directory).resolve()
        state = self._state
        state.check_process()
        if self._directory == directory:
            return
        log = self._release_log
        on_every_rank((lambda: self._open_files(directory)) if collectives.rank() == 0 else lambda: None)
        self._directory = state.directory = directory
        log.releases, log.diverged = collectives.broadcast_object((log.releases, log.diverged))
        state.share_secret()
        state.choose_branch(log.diverged)

    def _open_files(self, directory: Path) -> None:
        state = self._state
        log = self._release_log
        moved = state.directory not in (None, directory)
        if moved and (log.is_open or log.count):
            raise PrivacyError(
                "the updates of one sw.Privacy must be recorded in one directory, because each record counts its own "
                f"updates only; found {directory} after {state.directory}. Create a new sw.Privacy for each run."
            )
        log.open(directory, self.plan._settings)
        if self.plan.seed is not None:
            return
        if not log.inherits:  # a key that is here was copied, or its log is lost: its noise may be used elsewhere
            remove_secret(directory)  # not overwritten: it may be a hard link
        if moved:  # another directory has the key
            state.secret = Secret.new()
        secret = load_secret(directory)
        if secret is None:
            save_secret(directory, state.secret)
        else:
            state.secret = secret

    def close(self, done: bool = False) -> None:
        """Close the log. `done`: the run has ended, so that the key is not needed any more."""
        if self._directory is not None and collectives.rank() == 0:
            self._release_log.close()
            if done or self.is_spent:
                remove_secret(self._directory)
        self._directory = None
