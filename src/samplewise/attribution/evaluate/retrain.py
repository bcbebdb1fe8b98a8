"""Retraining on subsets of the training data, cached in a directory.

    settings.json       settings of the trainings; a directory with other settings is refused
    00-0007.safetensors repetition 0, subset 7: outputs of the queries, and the state dict with keep_models=True

Each model is written atomically when its training has ended, so that an interrupted call continues where it stopped.
The result does not depend on the interruption: a model depends on its seed only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import islice
from multiprocessing import get_context
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from samplewise.attribution.evaluate.lds import Subsets
from samplewise.attribution.evaluate.training import (
    MakeStep,
    Training,
    can_be_stacked,
    collate_all,
    number_of_samples,
    stack_size,
    threads,
    train_stack,
)
from samplewise.attribution.projected_features import OutputFn, margin
from samplewise.attribution.store_files import read_index
from samplewise.core.batches import leaves
from samplewise.core.files import absolute, read_tensors, require_safetensors, sha256, write_json, write_tensors
from samplewise.core.state import random_state_restored
from samplewise.core.text import progress
from samplewise.errors import StoreError
from samplewise.step.step import Step

Job = tuple[int, int]  # (repetition, subset)
SUFFIX = ".safetensors"
COMPARED = 64  # training samples, at equal distances, whose values are compared with those of an earlier call
STATE = "model."  # prefix of the tensors of the state dict


def retrain(
    make_step: MakeStep,
    dataset: Dataset[Any],
    subsets: Subsets,
    queries: Iterable[Any],
    directory: str | os.PathLike[str],
    *,
    epochs: int,
    batch_size: int = 64,
    output_fn: OutputFn = margin,
    repeats: int = 1,
    seed: int = 0,
    keep_models: bool = False,
    processes: int = 1,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> Tensor:
    """Train a model on each subset and return its outputs for the queries, (count, queries) or, with `repeats` above
    one, (repeats, count, queries).

    Outputs are kept in `directory`: a second call returns them without training, and an interrupted call, even one that
    was killed, continues with the models that are missing. Small models with an elementwise optimizer (SGD, Adam, ...),
    without transforms, buffers and dropout are trained stacked as one batched model, with the same result to rounding.

    make_step: function without arguments that returns a `sw.Step` with a new model; called with a seeded random state
    dataset: map-style dataset of training samples
    subsets: indices of training samples, (count, size) or a list of 1-D tensors
    queries: loader or list of batches
    epochs, batch_size: of each training; the subset is shuffled in each epoch
    output_fn: (model, batch) -> outputs (B,), larger is better; default: the margin of the correct class
    repeats: number of trainings per subset, with different seeds; 2 or more give `lds` the noise ceiling
    keep_models: keep the parameters as well, see `models`
    processes: number of worker processes, with one torch thread each; make_step and dataset must be picklable then
    collate_fn: of a DataLoader; default: that of torch
    """
    for name, number in (
        ("epochs", epochs),
        ("batch_size", batch_size),
        ("repeats", repeats),
        ("processes", processes),
    ):
        if type(number) is not int or number < 1:
            raise ValueError(f"{name} must be an integer, 1 or more; found {number!r}.")
    training = Training(make_step, dataset, queries, output_fn, epochs, batch_size, collate_fn)
    index_sets = _check_subsets(subsets, number_of_samples(dataset))
    directory = absolute(directory)
    require_safetensors("retrained models")
    with random_state_restored():
        step = training.new_step(_seed_of(seed, (0, 0)))
        _check_new_model(step.model, training.new_step(_seed_of(seed, (0, 0))).model)
    query_count = len(training.outputs(step.model))  # also finds errors of output_fn before anything is trained
    _claim(directory, _settings(training, step, index_sets, query_count, seed))
    jobs = [(repeat, subset) for repeat in range(repeats) for subset in range(len(index_sets))]
    missing = []
    for job in jobs:
        path = _file(directory, job)
        if not path.exists() or (keep_models and len(_load(path)) <= 1):  # outputs alone
            missing.append(job)
    if missing:
        _train_all(_Retraining(training, index_sets, directory, seed, keep_models), missing, step, processes)
    outputs = torch.stack([_read(directory, job) for job in jobs]).unflatten(0, (repeats, len(index_sets)))
    return outputs if repeats > 1 else outputs[0]


def models(make_step: MakeStep, directory: str | os.PathLike[str], repeat: int = 0) -> Iterator[nn.Module]:
    """Iterate over the models that `retrain(..., keep_models=True)` has trained, in the order of the subsets."""
    files = sorted(absolute(directory).glob(f"{repeat:02}-*{SUFFIX}"))
    if not files:
        raise FileNotFoundError(
            f"{directory} must hold trained models; found none. Call retrain with keep_models=True."
        )
    with random_state_restored():
        model = make_step().model
    for file in files:
        parameters = {name.removeprefix(STATE): t for name, t in _load(file).items() if name.startswith(STATE)}
        if not parameters:
            raise FileNotFoundError(
                f"{file} must hold parameters; found outputs only. Call retrain with keep_models=True."
            )
        model.load_state_dict(parameters)
        yield model


class _Retraining:
    """Trains models and writes their files. Picklable, for worker processes."""

    def __init__(self, training: Training, subsets: Sequence[Tensor], directory: Path, seed: int, keep_models: bool):
        self.training = training
        self.subsets = subsets
        self.directory = directory
        self.seed = seed
        self.keep_models = keep_models

    def train(self, jobs: Sequence[Job], data: Any = None) -> int:
        """Train the models of some jobs and return their number. With `data`, all samples as one batch:"""
        subsets = [self.subsets[s] for _, s in jobs]
        seeds = [_seed_of(self.seed, job) for job in jobs]
        if data is not None:
            models: Iterable[nn.Module] = train_stack(self.training, data, subsets, seeds)
        else:
            models = map(self.training.train, subsets, seeds)  # one at a time in memory
        for job, model in zip(jobs, models, strict=True):
            state = model.state_dict() if self.keep_models else {}
            parameters = {STATE + name: tensor for name, tensor in state.items()}
            write_tensors(_file(self.directory, job), {"outputs": self.training.outputs(model), **parameters}, None)
        return len(jobs)

    def train_in_worker(self, jobs: Sequence[Job], stack: bool) -> int:
        with threads(1):
            return self.train(jobs, collate_all(self.training) if stack else None)


def _train_all(retraining: _Retraining, jobs: list[Job], step: Step, processes: int) -> None:
    """Train the models of all jobs, stacked if possible."""
    training = retraining.training
    groups = [[job] for job in jobs]
    size = min(stack_size(step), -(-len(jobs) // processes))
    equal = len({len(subset) for subset in retraining.subsets}) == 1
    data = collate_all(training) if size > 1 and equal else None
    if data is not None and can_be_stacked(training, data, retraining.subsets[0], retraining.seed):
        remaining = iter(jobs)
        groups = list(iter(lambda: list(islice(remaining, size)), []))
    else:
        data = None
    with progress(len(jobs), f"training {len(jobs)} models") as advance:
        if processes == 1:
            for group in groups:
                advance(retraining.train(group, data))
        else:
            for done in _in_processes(retraining, groups, data is not None, processes):
                advance(done)


def _in_processes(
    retraining: _Retraining, groups: Sequence[Sequence[Job]], stack: bool, processes: int
) -> Iterator[int]:
    try:
        ForkingPickler.dumps(retraining)
    except Exception as why:
        raise ValueError(
            f"processes={processes} needs make_step, dataset, queries and output_fn that can be pickled; found {why}. "
            "Define them at the top level of a module, or use processes=1."
        ) from why
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(retraining.train_in_worker, group, stack) for group in groups]):
            yield future.result()


def _seed_of(seed: int, job: Job) -> int:
    """Seed of a model: the same for the same subset in any call with this seed."""
    repeat, subset = job
    return (seed * 1_000 + repeat) * 100_000 + subset


def _check_subsets(subsets: Subsets, n: int) -> list[Tensor]:
    index_sets = [torch.as_tensor(subset) for subset in subsets]
    if not index_sets:
        raise ValueError("subsets must have at least one subset; found none.")
    for subset in index_sets:
        if subset.dim() != 1 or not len(subset) or subset.dtype != torch.int64 or not (subset >= 0).all():
            raise ValueError("each subset must be a 1-D tensor of indices, at least one; found another tensor.")
        if int(subset.max()) >= n:
            raise ValueError(
                f"subsets must hold indices below {n}, the size of the dataset; found {int(subset.max())}."
            )
    return index_sets


def _check_new_model(first: nn.Module, second: nn.Module) -> None:
    """Raise if two models that make_step returned for the same seed share trained parameters, or differ in them."""
    pairs = [(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True) if a.requires_grad]
    if any(a.data_ptr() == b.data_ptr() and a.numel() for a, b in pairs):
        raise ValueError(
            "make_step() must return a Step with a new model in each call; found the same parameters in two calls. "
            "Create the model inside make_step."
        )
    if not all(torch.equal(a, b) for a, b in pairs):
        raise ValueError(
            "make_step() must return the same parameters for the same random state of torch; found different ones. "
            "Draw initial parameters from the global generator of torch, which is seeded before the call."
        )


# --- files -----------------------------------------------------------------------------------------------------------


def _settings(training: Training, step: Step, subsets: Sequence[Tensor], queries: int, seed: int) -> dict[str, Any]:
    """Settings that change the outputs; a function is known by what it makes, data by some of their values."""
    optimizer = getattr(step.optimizer, "param_groups", [])
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer]
    samples = number_of_samples(training.dataset)
    stride = -(-samples // COMPARED)
    return {
        "step": repr(step),
        "model": _digest(step.model.parameters()),
        "optimizer": json.loads(json.dumps(groups, default=repr)),
        "samples": samples,
        "dataset": _repeatable(lambda: digest_of_data(training.dataset[i] for i in range(0, samples, stride))),
        "queries": queries,
        "content of queries": _repeatable(lambda: digest_of_data(training.queries)),
        "subsets": _digest(subsets),
        "epochs": training.epochs,
        "batch_size": training.batch_size,
        "output_fn": getattr(training.output_fn, "__qualname__", type(training.output_fn).__name__),
        "seed": seed,
    }


def _digest(tensors: Iterable[Tensor]) -> str:
    return sha256(content for tensor in tensors for content in (str(tuple(tensor.shape)), tensor))


def digest_of_data(items: Iterable[Any]) -> str:
    """Checksum of the tensors and plain values in samples or batches."""
    return sha256(leaf if isinstance(leaf, Tensor) else repr(leaf) for item in items for leaf in leaves(item))


def _repeatable(compute: Callable[[], str]) -> str:
    """Result of a function, or "random" if a second call gives another one, as for data with augmentations."""
    with random_state_restored():
        first = compute()
        return first if compute() == first else "random"


def _claim(directory: Path, settings: dict[str, Any]) -> None:
    """Write the settings, or raise if the directory holds models of other settings."""
    path = directory / "settings.json"
    if path.exists():
        saved = read_index(path, {})
        differing = [name for name in settings if saved.get(name) != settings[name]]
        if differing:
            name = differing[0]
            raise StoreError(
                f"{directory} must hold models of the same settings; found other {name}: {saved.get(name)} there, "
                f"{settings[name]} in this call. Choose another directory, or remove this one."
            )
        return
    directory.mkdir(parents=True, exist_ok=True)
    write_json(path, settings)


def _file(directory: Path, job: Job) -> Path:
    return directory / f"{job[0]:02}-{job[1]:04}{SUFFIX}"


def _read(directory: Path, job: Job) -> Tensor:
    path = _file(directory, job)
    tensors = _load(path)
    if "outputs" not in tensors:
        raise StoreError(
            f"{path} must hold the outputs of a model; found {', '.join(tensors) or 'nothing'}. Remove the file; the "
            "next call trains its model again."
        )
    return tensors["outputs"]


def _load(path: Path) -> dict[str, Tensor]:
    try:
        return read_tensors(path)[0]
    except ValueError as why:
        raise StoreError(f"{why} Remove the file; the next call trains its model again.") from why
