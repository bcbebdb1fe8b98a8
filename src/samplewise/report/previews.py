"""Previews of samples (images, texts or values), read from previews.json in the run directory."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

from samplewise.report.html import pairs, shortened, text
from samplewise.report.run import RunLog

VERSION = 1
MODES = {1: "L", 3: "RGB", 4: "RGBA"}
LARGEST = 112  # pixels per side
LOSSLESS = 48  # pixels per side; images up to this size are saved without loss
LONGEST_TEXT = 600  # characters
MOST_VALUES = 24
BUDGET = 500_000  # characters of all previews of a page
Preview = dict[str, Any]


@dataclass
class Previews:
    """Content of previews.json, and warnings about it."""

    found: dict[str, Any] = field(default_factory=dict)  # entries of the file by id
    warnings: list[str] = field(default_factory=list)

    def label(self, one: str) -> str | None:
        entry = self.found.get(one)
        label = entry.get("label") if isinstance(entry, dict) else None
        return None if label is None else str(label)[:LONGEST_TEXT]

    def shown(self, ids: Iterable[str], budget: int = BUDGET) -> dict[str, Preview]:
        """Previews of samples, within a budget of characters. Broken and left out previews are added to `warnings`."""
        shown: dict[str, Preview] = {}
        broken = []
        left = 0
        for one in ids:
            if one not in self.found:
                continue
            try:
                preview = prepared(self.found[one])
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
                broken.append(one)
                continue
            budget -= len(json.dumps(preview))
            if budget < 0:
                left += 1
            elif preview:
                shown[one] = preview
        if broken:
            self.warnings.append(f"Previews that cannot be shown: {len(broken):,}, for example of {broken[0]!r}.")
        if left:
            self.warnings.append(f"Previews left out to limit the size of the page: {left:,}.")
        return shown


def read_previews(run: RunLog) -> Previews:
    """Previews of a run; empty without previews.json, and with a warning if it cannot be read."""
    path = run.directory / "previews.json"
    if not path.exists():
        return Previews()
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["version"] != VERSION:
            found = content["version"]
            return Previews(warnings=[f"previews.json has version {found!r}; this report reads version {VERSION}."])
        return Previews(dict(content["samples"]))
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as why:
        return Previews(warnings=[f"previews.json cannot be read; samples are shown without it: {_reason(why)}."])


def _reason(why: Exception) -> str:
    said = str(why).partition("\n")[0].rstrip(".")
    return f"there is no {said}" if isinstance(why, KeyError) else said


def prepared(entry: Preview) -> Preview:
    """An entry of the file as used by the page: data URL of an image, shortened text, or list of values."""
    if "image" in entry:
        return {"image": picture(**entry["image"])}
    if "text" in entry:
        return {"text": shortened(str(entry["text"]), LONGEST_TEXT)}
    values = entry.get("values")
    if values is None:
        return {}
    return {"values": [[shortened(str(name)), _written(value)] for name, value in list(values.items())[:MOST_VALUES]]}


def as_html(preview: Preview) -> str:
    """HTML of a preview, for a page without samples.js."""
    if "image" in preview:
        return f'<img src="{preview["image"]}" alt="" />'
    if "text" in preview:
        return f"<blockquote>{text(preview['text'])}</blockquote>"
    return pairs(preview["values"]) if "values" in preview else ""


def _written(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else shortened(str(value))


def picture(width: int, height: int, channels: int, data: str) -> str:
    """Data URL of an image from base64 bytes; small images are lossless, large ones become thumbnails."""
    from PIL import Image

    try:
        pixels = base64.b64decode(data, validate=True)
    except binascii.Error as why:
        raise ValueError(str(why)) from None
    if channels not in MODES or len(pixels) != width * height * channels:
        raise ValueError(f"{len(pixels)} bytes are not an image of {height}×{width}×{channels}.")
    image = Image.frombytes(MODES[channels], (width, height), pixels)
    small = max(width, height) <= LOSSLESS
    image.thumbnail((LARGEST, LARGEST))
    kind = "png" if small or channels == 4 else "jpeg"
    out = BytesIO()
    image.save(out, kind)
    return f"data:image/{kind};base64,{base64.b64encode(out.getvalue()).decode()}"
