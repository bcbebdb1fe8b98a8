"""Previews of samples (images, texts or values), read from previews.json in the run directory."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

from samplewise.report.html import definition_list, shortened, text

VERSION = 1
MODES = {1: "L", 3: "RGB", 4: "RGBA"}
MAX_PIXELS = 112  # pixels per side
MAX_LOSSLESS_PIXELS = 48  # pixels per side; images up to this size are saved without loss
MAX_CHARACTERS = 600  # characters
MAX_VALUES = 24
MAX_CLASS_NAME = 40  # characters
BUDGET = 500_000  # characters of all previews of a page
Preview = dict[str, Any]


@dataclass
class Previews:
    """Content of previews.json, and warnings about it."""

    entries: dict[str, Any] = field(default_factory=dict)  # entries of the file by id
    warnings: list[str] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)  # names of the classes; empty if they are not known

    def label(self, sample_id: str) -> str | None:
        entry = self.entries.get(sample_id)
        label = entry.get("label") if isinstance(entry, dict) else None
        return None if label is None else str(self.class_name(label))[:MAX_CHARACTERS]

    def class_name(self, value: Any) -> Any:
        """Name of the class with index `value`; `value` itself if it is not the index of a class with a name."""
        try:
            index = int(value)
        except (TypeError, ValueError, OverflowError):  # a text, None, NaN or infinity
            return value
        is_index = str(index) == str(value) or value == index
        return self.classes[index] if is_index and 0 <= index < len(self.classes) else value

    def shown(self, ids: Iterable[str], budget: int = BUDGET) -> dict[str, Preview]:
        """Previews of samples, within a budget of characters. Broken and left out previews are added to `warnings`."""
        previews: dict[str, Preview] = {}
        broken = []
        left_out = 0
        for sample_id in ids:
            if sample_id not in self.entries:
                continue
            try:
                preview = page_preview(self.entries[sample_id])
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
                broken.append(sample_id)
                continue
            budget -= len(json.dumps(preview))
            if budget < 0:
                left_out += 1
            elif preview:
                previews[sample_id] = preview
        if broken:
            self.warnings.append(f"Previews that cannot be shown: {len(broken):,}, for example of {broken[0]!r}.")
        if left_out:
            self.warnings.append(f"Previews left out to limit the size of the page: {left_out:,}.")
        return previews


def read_previews(run: Path) -> Previews:
    """Previews of a run directory; empty without previews.json, and with a warning if it cannot be read."""
    path = run / "previews.json"
    if not path.exists():
        return Previews()
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["version"] != VERSION:
            version = content["version"]
            return Previews(warnings=[f"previews.json has version {version!r}; this report reads version {VERSION}."])
        classes = [shortened(str(name), MAX_CLASS_NAME) for name in content.get("classes", [])]
        return Previews(dict(content["samples"]), classes=classes)
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as why:
        reason = str(why).partition("\n")[0].rstrip(".")
        reason = f"there is no {reason}" if isinstance(why, KeyError) else reason
        return Previews(warnings=[f"previews.json cannot be read; samples are shown without it: {reason}."])


def page_preview(entry: Preview) -> Preview:
    """An entry of the file as used by the page: data URL of an image, shortened text, or list of values."""
    name = {"name": shortened(str(entry["name"]))} if "name" in entry else {}
    if "image" in entry:
        return {"image": image_url(**entry["image"]), **name}
    if "text" in entry:
        return {"text": shortened(str(entry["text"]), MAX_CHARACTERS), **name}
    values = entry.get("values")
    if values is None:
        return {}
    rows = [
        [shortened(str(name)), f"{value:.6g}" if isinstance(value, float) else shortened(str(value))]
        for name, value in list(values.items())[:MAX_VALUES]
    ]
    return {"values": rows, **name}


def as_html(preview: Preview) -> str:
    """HTML of a preview, for a page without samples.js."""
    if "image" in preview:
        return f'<img src="{preview["image"]}" alt="" />'
    if "text" in preview:
        return f"<blockquote>{text(preview['text'])}</blockquote>"
    return definition_list(preview["values"]) if "values" in preview else ""


def image_url(width: int, height: int, channels: int, data: str) -> str:
    """Data URL of an image from base64 bytes; small images are lossless, large ones become thumbnails."""
    from PIL import Image

    try:
        pixels = base64.b64decode(data, validate=True)
    except binascii.Error as why:
        raise ValueError(str(why)) from None
    if channels not in MODES or len(pixels) != width * height * channels:
        raise ValueError(f"{len(pixels)} bytes are not an image of {height}×{width}×{channels}.")
    image = Image.frombytes(MODES[channels], (width, height), pixels)
    small = max(width, height) <= MAX_LOSSLESS_PIXELS
    image.thumbnail((MAX_PIXELS, MAX_PIXELS))
    image_format = "png" if small or channels == 4 else "jpeg"
    buffer = BytesIO()
    image.save(buffer, image_format)
    return f"data:image/{image_format};base64,{base64.b64encode(buffer.getvalue()).decode()}"
