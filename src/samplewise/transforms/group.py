"""Samples of one group taken together."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from samplewise.batches import pick
from samplewise.errors import TransformError
from samplewise.transforms.transform import Grouping, function_name


def group(key: Hashable | Callable[[Any], Any]) -> Grouping:
    """Sums the gradients of samples of one group (a user, a document, the augmentations of one image); the transforms
    after it see groups: chain(group("user"), clip(1.0)) bounds what each user contributes to an update.

    key: where in the batch the groups' names or numbers are (a name, or the place in a tuple), or a function of the
    batch that returns them, one per sample.
    """

    def keys(batch: Any) -> list[Any]:
        found = key(batch) if callable(key) else pick(batch, key)
        found = found.tolist() if isinstance(found, Tensor) else list(found)
        if found and isinstance(found[0], list):
            raise TransformError(f"group({key!r}) needs one name or number per sample; found a table.")
        if any(k != k for k in found):
            raise TransformError(f"group({key!r}) needs names or numbers that equal themselves; found NaN.")
        return found

    name = function_name(key) if callable(key) else repr(key)
    return Grouping(f"group({name})", keys)
