"""Previews of the most suspicious samples, written beside the ledger so that a report needs no access to the data.

`previews.json`: {"version": 1, "samples": {id: {"label": ..., and one of
    "image":  {"width", "height", "channels", "data"}   bytes, row by row, in base64
    "text":   the first 400 characters
    "values": {name: number or string}, at most 32}}}
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from samplewise.core.atomic_io import atomic_write
from samplewise.ledger.indexed import Indexed
from samplewise.ledger.visits import SCORES, recommended, suspicion

FILE = "previews.json"
VERSION = 1
MOST = 300  # samples
LARGEST = 64  # pixels per side
LETTERS = 400  # characters of a text
VALUES = 32  # values of a mapping or vector
LABELS = ("label", "labels", "y", "target")
TEXTS = ("text", "sentence", "content", "document", "prompt", "question")
IMAGES = ("image", "img", "picture", "pixels", "pixel_values")

Preview = dict[str, Any]


def items_within(loader: Any) -> Callable[[Any], Any] | None:
    """Function from id to item of the dataset wrapped by `sw.Indexed` inside a loader or subsets; None without one."""
    found = getattr(loader, "dataset", None)
    while found is not None and not isinstance(found, Indexed):
        found = getattr(found, "dataset", None)
    return None if found is None else found.dataset.__getitem__


def write_previews(run: Path, item: Callable[[Any], Any], samples: Any) -> None:
    """Write previews of the most suspicious samples, by any score, to previews.json.

    item: function of an id; if it fails, the other previews are written before its first error is raised
    samples: table of `visited`
    """
    found: dict[str, Preview] = {}
    failed: list[Exception] = []
    for each in islice(_most_suspicious(samples), MOST):
        try:
            found[str(each)] = preview(item(each))
        except Exception as why:
            failed.append(why)
    if found:
        _write(run, found)
    if failed:
        raise failed[0]


def _write(run: Path, found: dict[str, Preview]) -> None:
    with atomic_write(run / FILE, run / f".{FILE}.partial") as file:
        file.write(json.dumps({"version": VERSION, "samples": found}).encode())


def _most_suspicious(samples: Any) -> Iterable[Any]:
    """Ids without duplicates: the first of every ranking, then the second of every ranking, and so on."""
    ids = samples["id"].to_pylist()
    scores = [name for name in samples.column_names if name in SCORES]
    rankings = []
    for by in (recommended(scores), *((name,) for name in scores)):
        score = suspicion(samples, by)
        rankings.append(sorted(range(len(ids)), key=lambda k: -score[k])[:MOST])
    return dict.fromkeys(ids[k] for k in chain.from_iterable(zip(*rankings, strict=True)))


# --- preview of one sample -------------------------------------------------------------------------------------------


def preview(item: Any) -> Preview:
    """Preview of an image, a text, or a vector or mapping of values; or of a tuple of one of these and a label."""
    content, label = _parts(item)
    if label is None:
        return _seen(content)
    said = f"{label:.6g}" if isinstance(label, float) else str(label)
    return {"label": said, **_seen(content)}


def _parts(item: Any) -> tuple[Any, Any]:
    """Content of a sample, and its label or None."""
    if isinstance(item, Mapping):
        label = next((item[name] for name in LABELS if name in item), None)
        rest = {name: value for name, value in item.items() if name not in LABELS}
        telling = [rest[name] for name in TEXTS if isinstance(rest.get(name), str)]
        telling += [value for name, value in rest.items() if len(rest) == 1 or _pictures(name, value)]
        return next(iter(telling), rest), _single(label)
    if isinstance(item, (tuple, list)) and item:
        return item[0], _single(item[1]) if len(item) > 1 else None
    return item, None


def _pictures(name: Any, value: Any) -> bool:
    """True if an entry of a sample is an image: 3-D arrays of image shape, and matrices under a name in IMAGES."""
    shape = getattr(value, "shape", ())
    if _is_pillow(value):
        return True
    return (len(shape) == 3 or (len(shape) == 2 and name in IMAGES)) and _as_image(torch.as_tensor(value)) is not None


def _single(label: Any) -> Any:
    """A label as a Python number or string; None if it is something else."""
    if isinstance(label, Tensor):
        return label.item() if label.numel() == 1 else None
    if hasattr(label, "item"):  # a NumPy array or scalar
        return label.item() if label.size == 1 else None
    return label if isinstance(label, (int, float, str)) else None


def _seen(content: Any) -> Preview:
    if isinstance(content, str):
        return {"text": content[:LETTERS]}
    if isinstance(content, Mapping):
        return {"values": {str(name): _value(value) for name, value in islice(content.items(), VALUES)}}
    array = _tensor(content)
    if array is None:
        return {"text": repr(content)[:LETTERS]}
    image = _as_image(array)
    if image is not None:
        height, width, channels = image.shape
        data = base64.b64encode(bytes(image.flatten().tolist())).decode()
        return {"image": {"width": width, "height": height, "channels": channels, "data": data}}
    numbers = array.flatten()
    return {"values": {str(k): _value(v) for k, v in enumerate(numbers[:VALUES].tolist())}}


def _value(value: Any) -> int | float | str:
    single = _single(value)
    return single if isinstance(single, (int, float, str)) else repr(value)[:LETTERS]


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


def _as_image(array: Tensor) -> Tensor | None:
    """Thumbnail (height, width, channels), uint8, at most 64 pixels per side; None if the shape is not an image's."""
    if array.dim() == 2:
        array = array[None]
    elif array.dim() == 3 and array.shape[-1] in (1, 3, 4) and array.shape[0] not in (1, 3, 4):
        array = array.permute(2, 0, 1)
    if array.dim() != 3 or array.shape[0] not in (1, 3, 4) or min(array.shape[1:]) < 4 or array.is_complex():
        return None
    pixels = _brightness(array)
    shrink = max(array.shape[1:]) / LARGEST
    if shrink > 1:
        size = [max(1, round(side / shrink)) for side in array.shape[1:]]
        pixels = F.interpolate(pixels[None], size=size, mode="area")[0]
    return pixels.round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0)


def _brightness(array: Tensor) -> Tensor:
    """Pixels scaled to 0..255: uint8 unchanged, values in [0, 1] times 255, others from their minimum to maximum."""
    pixels = array.float().nan_to_num(0, 0, 0)
    if array.dtype == torch.uint8:
        return pixels
    low, high = pixels.amin(), pixels.amax()
    if low >= 0 and high <= 1:
        return 255 * pixels
    return 255 * (pixels - low) / (high - low).clamp(min=1e-12)
