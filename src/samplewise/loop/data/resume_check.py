"""Properties of the training data that are saved in checkpoints and compared on resume.

A position inside an epoch is a number of batches and a number of samples. With another dataset, batch size or order
the same numbers refer to other samples: some would be lost, others repeated. So these must not change inside an epoch.
Between two epochs they may change.

    dataset length    len(loader.dataset); not if the number of samples of a private run is secret
    batch size        of the loader, of its own batch sampler, or of the first batch of a list
    drop_last
    sampler           class and settings, for example RandomSampler (shuffle=True) or SequentialSampler
    sampler length    samples per epoch
    batch sampler     class and settings, if the loader was given one
    batches           len(loader) of a list, or of another loader without a dataset
    overfit_batches   fit(overfit_batches=...)
    sharded           True with several ranks and sw.already_sharded(loader)

A sampler with a generator draws another order than one without. The seed of the generator does not matter, since it is
seeded for each epoch. Settings that do not affect the order may change at any time: num_workers, collate_fn,
pin_memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from samplewise.core.batches import length

Data = Mapping[str, Any]
OF_FIT = ("overfit_batches", "sharded")  # properties that are known for every loader
SETTINGS = ("batch_size", "drop_last", "replacement", "shuffle")  # of samplers


def describe(loader: Any, overfit_batches: int | None = None, sharded: bool = False) -> dict[str, Any]:
    """Return the properties of a loader that determine the position of each sample in an epoch. None means unknown."""
    dataset = getattr(loader, "dataset", None)
    batch_size = _number(loader, "batch_size")
    by_batches = batch_size is None and getattr(loader, "batch_sampler", None) is not None
    sampler = None if by_batches else getattr(loader, "sampler", None)
    if dataset is None and isinstance(loader, (list, tuple)) and loader:
        batch_size = length(loader[0])
    # The number of samples of a private run is secret; the step compares it.
    hides_length = getattr(getattr(loader, "batch_sampler", None), "hides_length", False)
    return {
        **({} if hides_length else {"dataset length": _length(dataset)}),
        "batch size": batch_size,
        "drop_last": _number(loader, "drop_last"),
        "sampler": _kind(sampler),
        "sampler length": _length(sampler),
        "batch sampler": _kind(loader.batch_sampler) if by_batches else None,
        "batches": _length(loader) if dataset is None else None,
        "overfit_batches": overfit_batches,
        "sharded": sharded or None,
    }


def differences(before: Data, now: Data, ignore: Iterable[str] = ()) -> list[str]:
    """List the properties that differ, with both values. Properties that are missing in `before` are ignored: a
    checkpoint of another version may lack them. A stream without any known property can be compared with nothing.
    """
    unknown = all(value is None for name, value in before.items() if name not in OF_FIT)
    compared = [n for n in now if n in before and n not in ignore and (n in OF_FIT or not unknown)]
    names = [name for name in compared if before[name] != now[name]]
    return [f"{name} {_shown(now[name])} instead of {_shown(before[name])}" for name in names]


def join_words(items: list[str]) -> str:
    """Join items as "a", "a and b" or "a, b and c"."""
    if len(items) == 1:
        return items[0]
    return f"{', '.join(items[:-1])} and {items[-1]}"


def _shown(value: Any) -> str:
    return "unknown" if value is None else str(value)


def _kind(sampler: Any) -> str | None:
    if sampler is None:
        return None
    inner = getattr(sampler, "sampler", None)
    settings = {name: _number(sampler, name) for name in SETTINGS}
    described = [f"{name}={value}" for name, value in settings.items() if value is not None]
    if getattr(sampler, "generator", None) is not None:
        described.append("generator")
    if inner is not None:
        described.append(f"sampler={_kind(inner)}")
    return f"{type(sampler).__name__}({', '.join(described)})" if described else type(sampler).__name__


def _number(owner: Any, name: str) -> int | bool | None:
    value = getattr(owner, name, None)
    return value if isinstance(value, (bool, int)) else None


def _length(thing: Any) -> int | None:
    try:
        return None if thing is None else len(thing)
    except Exception:  # a dataset without a length may raise any error
        return None
