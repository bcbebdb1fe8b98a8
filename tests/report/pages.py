"""Run directories for the tests, and the visible content of a page."""

import base64
import json
from html.parser import HTMLParser

import pyarrow as pa

import samplewise
from samplewise.ledger.files import LedgerWriter

ABOUT = {
    "format_version": 2,
    "name": "digits",
    "started": "2026-11-16T01:20:33+00:00",
    "samplewise": samplewise.__version__,
    "torch": "2.13.0",
    "parameters": 21704164,
    "device": "cpu",
    "settings": {"batch_size": 256, "betas": [0.9, 0.999], "augment": True},
}


def train(update, epoch=0, loss=1.0, **more):
    line = dict(kind="train", epoch=epoch, update=update, samples=32 * update, loss=loss, lr=0.1)
    return {**line, "samples_per_second": 100.0, "seconds": 0.5, "skipped": 0, **more}


def validation(update, epoch=0, **metrics):
    return {"kind": "validation", "epoch": epoch, "update": update, "seconds": 0.1, **metrics}


WHOLE = [
    train(1, loss=3.0),
    train(2, loss=2.0),
    validation(2, loss=2.5, accuracy=0.25, gap=4.0),
    dict(kind="epoch", epoch=0, update=2, loss=2.75, seconds=12.5),
    train(3, epoch=1, loss=1.5),
    train(4, epoch=1, loss=1.75),
    validation(4, epoch=1, loss=2.0, accuracy=0.75, gap=3.0),
    dict(kind="epoch", epoch=1, update=4, loss=1.625, seconds=11.5),
    dict(kind="end", update=4, reason="all epochs done"),
]


def write_run(directory, lines=WHOLE, about=ABOUT, after=""):
    directory.mkdir(parents=True, exist_ok=True)
    if about is not None:
        (directory / "run.json").write_text(json.dumps(about))
    (directory / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + after)
    return directory


def write_ledger(directory, *parts):
    """Write a ledger; each part is a dict of columns."""
    to = LedgerWriter(directory, 0)
    to.open()
    for columns in parts:
        to.write(pa.table(columns))


def visits(ids, losses, epoch=0, **more):
    """Part with one visit of each sample; the norm is twice the loss."""
    n = len(ids)
    return {
        "id": pa.array(ids),
        "epoch": pa.array([epoch] * n, pa.int32()),
        "update": pa.array([epoch * n + k + 1 for k in range(n)], pa.int64()),
        "loss": pa.array(losses, pa.float32()),
        "norm": pa.array([None if x is None else 2 * x for x in losses], pa.float32()),
        "weight": pa.array([1.0] * n, pa.float32()),
        **more,
    }


def picture(width, height, channels=1, shade=128):
    pixels = bytes([shade]) * (width * height * channels)
    return {"width": width, "height": height, "channels": channels, "data": base64.b64encode(pixels).decode()}


def write_previews(directory, samples, version=1, **more):
    (directory / "previews.json").write_text(json.dumps({"version": version, "samples": samples, **more}))


class Page(HTMLParser):
    """Visible content of a page: text, tables by heading, charts by caption."""

    VOID = ("meta", "img")

    def __init__(self, html):
        super().__init__()
        self.html, self.open, self.tags, self.attributes, self.text = html, [], [], [], ""
        self.tables, self.charts, self.title, self.caption, self.section, self.scripts = {}, {}, "", "", "", []
        self.feed(html)
        self.close()
        assert self.open == []

    @property
    def samples(self):
        """Data of the page's script."""
        return json.loads(next(text for text in self.scripts if text.startswith("{")))

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)
        if tag in ("h2", "caption"):
            self.section = ""
        elif tag == "figcaption":
            self.caption = ""
        elif tag == "tr":
            self.tables.setdefault(self.section, []).append([])
        elif tag in ("td", "th"):
            self.tables[self.section][-1].append("")
        elif tag == "svg":
            self.charts[self.caption] = []
        elif tag == "path" and "clip-path" in dict(attrs) and "var(--line" in dict(attrs)["style"]:
            self.charts[self.caption].append(dict(attrs)["d"])  # curves, not the grid

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        inside = self.open[-1] if self.open else ""
        if inside in ("style", "script"):
            self.scripts += [data] if inside == "script" else []
            return
        self.text += data
        if inside == "title":
            self.title += data
        elif inside in ("h2", "caption"):
            self.section += data
        elif inside == "figcaption":
            self.caption += data
        elif inside in ("td", "th"):
            self.tables[self.section][-1][-1] += data
