"""Previews of the most suspicious samples, written beside the ledger so that a report needs no access to the data.

`previews.json`: {"version": 1, "classes": names of the classes, if known, "samples": {id: {"label": ..., "name": ...,
and one of
    "image":  {"width", "height", "channels", "data"}   bytes, row by row, in base64
    "text":   the first 400 characters
    "values": {name: number or string}, at most 32}}}
"""

from __future__ import annotations

import base64
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from samplewise.core.files import write_json
from samplewise.core.text import plural
from samplewise.errors import LedgerWarning
from samplewise.ledger.aggregate import SCORES, recommended_score, suspicion
from samplewise.ledger.sample_ids import Indexed

FILE = "previews.json"
VERSION = 1
MAX_PREVIEWS = 300  # samples
MAX_PIXELS = 64  # pixels per side
MAX_CHARACTERS = 400  # characters of a text
MAX_VALUES = 32  # values of a mapping or vector
LABEL_KEYS = ("label", "labels", "y", "target")
TEXT_KEYS = ("text", "sentence", "content", "document", "prompt", "question")
IMAGE_KEYS = ("image", "img", "picture", "pixels", "pixel_values")

Preview = dict[str, Any]


class Names(NamedTuple):
    """Names of the features of a sample and of the classes; None if they are not known."""

    features: list[str] | None = None
    classes: list[str] | None = None


NO_NAMES = Names()


def indexed_items(loader: Any) -> Callable[[Any], Any] | None:
    """Function from id to item of the dataset wrapped by `sw.Indexed` inside a loader or subsets; None without one."""
    indexed = next((dataset for dataset in _datasets(loader) if isinstance(dataset, Indexed)), None)
    return None if indexed is None else indexed.dataset.__getitem__


def dataset_names(loader: Any) -> Names:
    """Names from the attributes `feature_names` and `classes` of the dataset of a loader, or of one that it wraps."""
    names = {}
    for field, attribute in (("features", "feature_names"), ("classes", "classes")):
        candidates = (as_names(getattr(dataset, attribute, None)) for dataset in _datasets(loader))
        names[field] = next((candidate for candidate in candidates if candidate is not None), None)
    return Names(**names)


def as_names(value: Any) -> list[str] | None:
    """A list, tuple, array or pandas index of names as a list of strings; None for anything else."""
    values = value.tolist() if hasattr(value, "tolist") else value
    return list(map(str, values)) if isinstance(values, (list, tuple)) else None


def _datasets(loader: Any) -> Iterator[Any]:
    """The dataset of a loader, and the datasets that it wraps, from outside to inside."""
    dataset = getattr(loader, "dataset", None)
    while dataset is not None:
        yield dataset
        dataset = getattr(dataset, "dataset", None)


def write_previews(run: Path, item: Callable[[Any], Any] | None, samples: Any, names: Names = NO_NAMES) -> None:
    """Write previews of the most suspicious samples, by any score, to previews.json.

    item: function of an id; if it fails, the other previews are written before its first error is raised. None: only
    the names of the classes are written
    samples: table of `aggregate_visits`
    """
    previews: dict[str, Preview] = {}
    errors: list[Exception] = []
    if item is not None:
        for sample_id in islice(_most_suspicious(samples), MAX_PREVIEWS):
            try:
                previews[str(sample_id)] = preview(item(sample_id), names.features)
            except Exception as error:
                errors.append(error)
    if previews or names.classes:
        classes = {"classes": names.classes} if names.classes else {}
        write_json(run / FILE, {"version": VERSION, **classes, "samples": previews}, indent=None)
    if errors:
        raise errors[0]


def _most_suspicious(samples: Any) -> Iterable[Any]:
    """Ids without duplicates: the first of every ranking, then the second of every ranking, and so on. None if no
    losses and norms are known.
    """
    ids = samples["id"].to_pylist()
    scores = [name for name in samples.column_names if name in SCORES]
    if not scores:
        return []
    rankings = []
    for by in (recommended_score(scores), *((name,) for name in scores)):
        score = suspicion(samples, by)
        rankings.append(sorted(range(len(ids)), key=lambda k: -score[k])[:MAX_PREVIEWS])
    return dict.fromkeys(ids[k] for k in chain.from_iterable(zip(*rankings, strict=True)))


# --- preview of one sample -------------------------------------------------------------------------------------------


def preview(item: Any, features: Sequence[str] | None = None) -> Preview:
    """Preview of an image, a text, or a vector or mapping of values; or of a tuple of one of these, a label
    and names, such as a file name.

    features: names of the values of a vector; default: they are numbered
    """
    content, label = _split_label(item)
    label_text = f"{label:.6g}" if isinstance(label, float) else str(label)
    # File names and other strings after (x, y) are no part of the content.
    names = [entry for entry in item[2:] if isinstance(entry, str)] if isinstance(item, (tuple, list)) else []
    return {
        **({} if label is None else {"label": label_text}),
        **({"name": ", ".join(names)[:MAX_CHARACTERS]} if names else {}),
        **_preview_content(content, features),
    }


def _split_label(item: Any) -> tuple[Any, Any]:
    """Content of a sample, and its label or None."""
    if isinstance(item, Mapping):
        label = next((item[name] for name in LABEL_KEYS if name in item), None)
        entries = {name: value for name, value in item.items() if name not in LABEL_KEYS}
        candidates = [entries[name] for name in TEXT_KEYS if isinstance(entries.get(name), str)]
        candidates += [value for name, value in entries.items() if len(entries) == 1 or _is_image(name, value)]
        return next(iter(candidates), entries), _as_scalar(label)
    if isinstance(item, (tuple, list)) and item:
        return item[0], _as_scalar(item[1]) if len(item) > 1 else None
    return item, None


def _is_image(name: Any, value: Any) -> bool:
    """True if an entry of a sample is an image: 3-D arrays of image shape, and matrices under a name in IMAGE_KEYS."""
    shape = getattr(value, "shape", ())
    if _is_pillow(value):
        return True
    return (len(shape) == 3 or (len(shape) == 2 and name in IMAGE_KEYS)) and _as_image(
        torch.as_tensor(value)
    ) is not None


def _as_scalar(label: Any) -> Any:
    """A label as a Python number or string; None if it is something else."""
    if isinstance(label, Tensor):
        return label.item() if label.numel() == 1 else None
    if hasattr(label, "item"):  # a NumPy array or scalar
        return label.item() if label.size == 1 else None
    return label if isinstance(label, (int, float, str)) else None


def _preview_content(content: Any, features: Sequence[str] | None) -> Preview:
    if isinstance(content, str):
        return {"text": content[:MAX_CHARACTERS]}
    if isinstance(content, Mapping):
        return {"values": {str(name): _value(value) for name, value in islice(content.items(), MAX_VALUES)}}
    array = _tensor(content)
    if array is None:
        return {"text": repr(content)[:MAX_CHARACTERS]}
    image = _as_image(array)
    if image is not None:
        height, width, channels = image.shape
        data = base64.b64encode(bytes(image.flatten().tolist())).decode()
        return {"image": {"width": width, "height": height, "channels": channels, "data": data}}
    numbers = array.flatten()
    names = _value_names(len(numbers), features)
    return {"values": {name: _value(v) for name, v in zip(names, numbers[:MAX_VALUES].tolist(), strict=False)}}


def _value_names(count: int, features: Sequence[str] | None) -> Sequence[str]:
    """Names of `count` values: the features, or numbers, with a warning, if there is another number of features."""
    if features is not None and len(features) == count:
        return features
    if features is not None:
        warnings.warn(
            f"features must have one name for each value of a sample; found {plural(len(features), 'name')} for "
            f"{plural(count, 'value')}, which are numbered in the report. Pass Ledger(features=[...]) with all "
            "names, in the order of the values.",
            LedgerWarning,
            stacklevel=2,
        )
    return [str(k) for k in range(count)]


def _value(value: Any) -> int | float | str:
    single = _as_scalar(value)
    return single if isinstance(single, (int, float, str)) else repr(value)[:MAX_CHARACTERS]


def _tensor(content: Any) -> Tensor | None:
    if isinstance(content, Tensor):
        return content.detach().cpu()
    if _is_pillow(content):
        content = content.convert("RGB")
        flat = torch.frombuffer(bytearray(content.tobytes()), dtype=torch.uint8)
        return flat.view(content.height, content.width, 3)
    try:
        return torch.as_tensor(content)
    except (TypeError, ValueError, RuntimeError):
        return None


def _is_pillow(content: Any) -> bool:
    return hasattr(content, "convert") and hasattr(content, "getbands")


def _as_image(image: Tensor) -> Tensor | None:
    """Thumbnail (height, width, channels), uint8, at most 64 pixels per side; None if the shape is not an image's."""
    if image.dim() == 2:
        image = image[None]
    elif image.dim() == 3 and image.shape[-1] in (1, 3, 4) and image.shape[0] not in (1, 3, 4):
        image = image.permute(2, 0, 1)
    if image.dim() != 3 or image.shape[0] not in (1, 3, 4) or min(image.shape[1:]) < 4 or image.is_complex():
        return None
    # Scaled to 0..255: uint8 unchanged, values in [0, 1] times 255, others from their minimum to maximum.
    pixels = image.float().nan_to_num(0, 0, 0)
    if image.dtype != torch.uint8:
        low, high = pixels.amin(), pixels.amax()
        in_unit = low >= 0 and high <= 1
        pixels = 255 * pixels if in_unit else 255 * (pixels - low) / (high - low).clamp(min=1e-12)
    shrink = max(image.shape[1:]) / MAX_PIXELS
    if shrink > 1:
        size = [max(1, round(side / shrink)) for side in image.shape[1:]]
        pixels = F.interpolate(pixels[None], size=size, mode="area")[0]
    return pixels.round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0)
