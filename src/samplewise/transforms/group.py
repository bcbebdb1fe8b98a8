"""`group`: sum the gradients of samples with the same key."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from samplewise.core.batches import pick
from samplewise.errors import TransformError
from samplewise.transforms.transform import Grouping, function_name


def group(key: Hashable | Callable[[Any], Any]) -> Grouping:
    """Sum the gradients of samples of one group (a user, a document, the augmentations of one image). Transforms after
    it act on groups: chain(group("user"), clip(1.0)) bounds the contribution of each user to an update.

    key: key of the batch under which the group keys are (a name, or the index in a tuple), or a function of the batch
    that returns them; one name or number per sample.
    """

    def keys(batch: Any) -> list[Any]:
        found = key(batch) if callable(key) else pick(batch, key)
        found = found.tolist() if isinstance(found, Tensor) else list(found)
        if found and isinstance(found[0], list):
            raise TransformError(f"group({key!r}) must have one name or number per sample; found a list for a sample.")
        if any(k != k for k in found):
            raise TransformError(f"group({key!r}) must have keys that can be compared; found NaN.")
        return found

    name = function_name(key) if callable(key) else repr(key)
    return Grouping(f"group({name})", keys, frozenset() if callable(key) else frozenset({key}))
