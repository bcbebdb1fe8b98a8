"""Checks of the arguments of `Trainer` and of `Trainer.fit`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from samplewise.errors import PrivacyError
from samplewise.loop.callbacks import EarlyStopping, LRMonitor, ModelCheckpoint, Upload
from samplewise.loop.data.importance import ImportanceSampler
from samplewise.loop.data.sharding import ShardedLoader
from samplewise.loop.stopping import Duration
from samplewise.privacy.sampling import PoissonSampler
from samplewise.step.step import Step

EXISTS = ("error", "resume", "overwrite", "new")


def check_trainer(step: Any, run: Any, callbacks: Any, metrics: Any, seed: Any, exists: Any) -> None:
    """Raise TypeError or ValueError for arguments of `Trainer` of another type."""
    if not isinstance(step, Step):
        raise TypeError(
            f"step must be a samplewise Step; found {type(step).__name__}. Use sw.Step(model, optimizer, loss)."
        )
    if run is not None and (not isinstance(run, (str, Path)) or not str(run)):
        raise ValueError(f"run must be the path of a directory, or None; found {run!r}. Pass for example 'runs/name'.")
    if exists not in EXISTS:
        raise ValueError(f"exists must be one of {', '.join(map(repr, EXISTS))}; found {exists!r}.")
    if run is None and exists != "error":
        raise ValueError(f"exists={exists!r} needs a run directory; found none. Use Trainer(..., run='runs/name').")
    if type(seed) is not int:
        raise ValueError(f"seed must be an int; found {seed!r}.")
    if not isinstance(callbacks, Iterable):
        raise TypeError(f"callbacks must be a list of objects; found {type(callbacks).__name__}. Pass a list.")
    if metrics is not None and not isinstance(metrics, Mapping):
        raise TypeError(f"metrics must be a dict of names and metrics; found {type(metrics).__name__}. Pass a dict.")


def check_overfit_batches(overfit_batches: Any) -> None:
    if overfit_batches is not None and (type(overfit_batches) is not int or overfit_batches < 1):
        raise ValueError(f"overfit_batches must be a positive number of batches; found {overfit_batches!r}.")


def check_fast_dev_run(fast_dev_run: Any, interrupted: bool) -> None:
    """interrupted: an earlier call of `fit` has stopped inside an epoch."""
    if not isinstance(fast_dev_run, bool):
        raise ValueError(f"fast_dev_run must be True or False; found {fast_dev_run!r}.")
    if fast_dev_run and interrupted:
        raise ValueError(
            "a fast_dev_run must start at the beginning of an epoch; found that an earlier call of fit has stopped "
            "inside one. Make a new step and trainer for it."
        )


def check_resume(resume: Any, run: Path | None) -> None:
    if not isinstance(resume, bool):
        raise ValueError(
            f"resume must be True or False; found {resume!r}. The run to continue is that of Trainer(..., run=...)."
        )
    if resume and run is None:
        raise ValueError("resume=True needs a run directory; found none. Use Trainer(..., run='runs/name').")


def check_sampler(loader: Any, callbacks: Iterable[Any], validate: Any) -> None:
    """Raise TypeError if an ImportanceSampler would get no scores, the same draws on every rank, or draws of a
    validation.
    """
    if isinstance(getattr(validate, "batch_sampler", None), ImportanceSampler):
        raise TypeError(
            "validate must be a plain loader, because draws of an ImportanceSampler have another distribution than the "
            "dataset; found a loader with such a sampler. Pass DataLoader(dataset, batch_size=...)."
        )
    sharded = isinstance(loader, ShardedLoader)
    sampler = getattr(loader.loader if sharded else loader, "batch_sampler", None)
    if isinstance(sampler, ImportanceSampler) and (sharded or all(callback is not sampler for callback in callbacks)):
        problem = "a loader marked by sw.already_sharded. Pass the loader" if sharded else "a sampler that is not. Use"
        raise TypeError(
            "the ImportanceSampler of a loader must be among the callbacks, which update its scores, and the trainer "
            f"shares its batches among ranks; found {problem} with Trainer(step, run, callbacks=[sampler])."
        )


def check_private(
    step: Step,
    log_every: Duration,
    callbacks: Iterable[Any],
    validate: Iterable[Any] | None,
    options: Mapping[str, bool],
) -> None:
    """Raise PrivacyError for arguments that a private training run cannot have, before anything is spent.

    options: whether `overfit_batches` and `fast_dev_run` are used
    """
    if step.privacy is None:
        return
    if isinstance(getattr(validate, "batch_sampler", None), PoissonSampler):
        raise PrivacyError(
            "validate must be a plain loader, because only updates use draws; found one of privacy.loader. Pass a "
            "DataLoader of the validation data."
        )
    intervals = {"log_every": log_every}
    for callback in callbacks:
        if isinstance(callback, Upload):
            raise PrivacyError(
                "Upload must not be used with privacy=, because updates after the last upload would be forgotten when "
                "the run continues elsewhere, and their privacy with them; found it. Use a run directory on a file "
                "system that all machines share."
            )
        if isinstance(callback, (ModelCheckpoint, LRMonitor)):
            intervals[f"every of {type(callback).__name__}"] = callback.every
        monitors = isinstance(callback, EarlyStopping) or (isinstance(callback, ModelCheckpoint) and callback.best)
        if monitors and step.config.hides_samples and (validate is None or callback.monitor == "train_loss"):
            raise PrivacyError(
                f"{type(callback).__name__} must monitor a value of the validation with privacy=, because training "
                f"losses are hidden; found {callback.monitor!r} and "
                f"{'no validation loader' if validate is None else 'a validation loader'}. Pass validate=, and "
                "monitor 'loss' or a metric."
            )
    for name, every in intervals.items():
        if every.unit == "samples" and step.config.hides_samples:
            raise PrivacyError(
                f"{name} must be a number of updates with privacy=, because numbers of samples are hidden; found "
                f"{str(every)!r}. Write for example '50up'."
            )
    reasons = {
        "overfit_batches": "it would use the same draws again",
        "fast_dev_run": "it writes no files, so that its update would not be recorded",
    }
    for name, reason in reasons.items():
        if options[name]:
            raise PrivacyError(f"{name} must not be used with privacy=, because {reason}; found it. Leave it out.")


def check_paid(step: Step, updates: int | None) -> None:
    """Raise PrivacyError if a training run would make more updates than are paid for; None: the number is unknown."""
    privacy = step.privacy
    if privacy is not None and (updates or 0) > privacy.plan.updates:
        raise PrivacyError(
            f"a private training run must make at most the {privacy.plan.updates} updates that are paid for; found "
            f"{updates}. Train for fewer, or plan more with sw.Privacy(updates=...)."
        )
