"""Metadata of a run, written to `run.json`: settings, package versions and machine."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch

from samplewise.core.devices import device_name
from samplewise.core.version import UNKNOWN, installed_version
from samplewise.loop.checkpoint.resume_settings import loss_name
from samplewise.step.step import Step

# Packages that can change the results of a training. Those that are imported are listed with their versions.
PACKAGES = ("samplewise", "torch", "numpy", "torchvision", "torchdata", "transformers", "datasets", "torchmetrics")


def about(step: Step, loader: Iterable[Any], device: torch.device, **settings: Any) -> dict[str, Any]:
    """Return the metadata of a run as a dict for JSON.

    settings: further settings of the trainer to list.
    """
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "samplewise": installed_version(),
        "torch": torch.__version__,
        "parameters": sum(p.numel() for p in step.model.parameters()),
        "device": device_name(device),
        "settings": {**_plain(settings), **_plain(_of_step(step)), **_plain(_of_loader(loader))},
        "versions": {"python": platform.python_version(), **_versions()},
        "machine": {
            "system": platform.platform(),
            "processors": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        },
    }


def _of_step(step: Step) -> dict[str, Any]:
    return {
        "model": type(step.model).__name__,
        "loss": _loss(step.loss_fn),
        "optimizer": _optimizer(step.optimizer),
        "scheduler": None if step.scheduler is None else type(step.scheduler).__name__,
        **step.config.settings(),
    }


def _loss(loss_fn: Any) -> str:
    """Return the name of the loss function, with its module if it is not a criterion of PyTorch."""
    function = loss_fn.func if isinstance(loss_fn, partial) else loss_fn
    name = loss_name(function)
    return name if hasattr(function, "criterion") else f"{function.__module__}.{name}"


def _optimizer(optimizer: Any) -> str:
    """Return the optimizer as a constructor call with the settings of its first parameter group."""
    groups = getattr(optimizer, "param_groups", None) or [{}]
    given = {name: value for name, value in groups[0].items() if name not in ("params", "param_names")}
    told = {name: value for name, value in given.items() if value not in (None, False) and name != "initial_lr"}
    more = f", and {len(groups) - 1} more groups" if len(groups) > 1 else ""
    return f"{type(optimizer).__name__}({', '.join(f'{name}={value!r}' for name, value in told.items())}){more}"


def _of_loader(loader: Any) -> dict[str, Any]:
    named = {"batch size": "batch_size", "workers": "num_workers"}
    found = {title: getattr(loader, name, None) for title, name in named.items()}
    data = getattr(loader, "dataset", loader)
    inner = getattr(data, "dataset", data)  # the dataset inside sw.Indexed or Subset
    return {"data": type(inner).__name__, **found}


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that are not None; values other than bool, int, float and str as their repr."""
    kept = {name: value for name, value in settings.items() if value is not None}
    plain = (bool, int, float, str)
    return {name: value if isinstance(value, plain) else repr(value) for name, value in kept.items()}


def _versions() -> dict[str, str]:
    """Return the versions of the imported packages; not of those imported from a source tree."""
    found = {name: installed_version(name) for name in PACKAGES if name in sys.modules}
    return {name: version for name, version in found.items() if version != UNKNOWN}
