"""Samples in the report: ledger, suspects, previews, and warnings about them."""

import base64
import hashlib
import json
import sys
from io import BytesIO
from math import inf, nan
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pages import ABOUT, WHOLE, Page, picture, train, visits, write_ledger, write_previews, write_run
from PIL import Image

from samplewise.ledger import aggregate, files
from samplewise.ledger.aggregate import suspicion
from samplewise.report import previews, samples, scatter
from samplewise.report.page import write_report
from samplewise.report.run_log import read_run
from samplewise.report.samples import NormQuantiles

N = 40
NO_LINES = []  # empty log
LOSSES = [0.1 + 0.01 * k for k in range(N)]


def page_of(directory):
    return Page(write_report(directory).read_text(encoding="utf-8"))


@pytest.fixture
def run(tmp_path):
    """Run with a ledger of two epochs; samples 7 and 3 have the largest losses."""
    write_run(tmp_path, NO_LINES)
    losses = LOSSES.copy()
    losses[7], losses[3] = 9.0, 5.0
    labels = pa.array([k % 3 for k in range(N)])
    write_ledger(tmp_path, *(visits(list(range(N)), losses, epoch, label=labels) for epoch in range(2)))
    return tmp_path


def column(shown, key):
    return next(found for found in shown.samples["columns"] if found["key"] == key)


# ------------------------------------------------------------------------------------ what is shown


def test_samples_have_means_over_their_visits(tmp_path):
    write_run(tmp_path, NO_LINES)
    write_ledger(tmp_path, visits([5, 6], [1.0, 2.0]), visits([6, 5], [4.0, 2.0], epoch=1))
    shown = page_of(tmp_path)
    assert shown.samples["ids"] == ["5", "6"] and shown.samples["total"] == 2
    assert column(shown, "loss")["values"] == [1.5, 3.0] and column(shown, "norm")["values"] == [3.0, 6.0]
    assert column(shown, "visits")["same"] == 2
    assert shown.samples["grid"] is None


def test_the_suspects_are_those_of_the_scores(run):
    shown, each = page_of(run), samples.read_samples(read_run(run)).table
    titles = [score["title"] for score in shown.samples["scores"]]
    assert titles == ["loss (recommended)", "gradient norm", "self-influence"]
    for score, by in zip(shown.samples["scores"], [("loss",), ("norm",), ("self_influence",)], strict=True):
        found = suspicion(each, by)
        assert score["order"] == sorted(range(N), key=lambda k, of=found: -of[k])[: samples.MIN_SUSPECTS]
        assert score["order"][:2] == [7, 3]


def test_the_margin_is_suspect_where_it_is_small(tmp_path):
    write_run(tmp_path, NO_LINES)
    write_ledger(tmp_path, visits(list("abc"), [1.0, 1.0, 1.0], margin=pa.array([2.0, -3.0, 1.0], pa.float32())))
    scores = page_of(tmp_path).samples["scores"]
    assert scores[0] == {"title": "margin (recommended)", "by": ["margin"], "order": [1, 2, 0]}


def test_number_of_suspects(tmp_path):
    write_run(tmp_path, NO_LINES)
    write_ledger(tmp_path, visits(list(range(3000)), [float(k) for k in range(3000)]))
    assert len(page_of(tmp_path).samples["scores"][0]["order"]) == samples.MAX_SUSPECTS
    write_ledger(tmp_path, visits(list(range(300)), [float(k) for k in range(300)]))
    assert len(page_of(tmp_path).samples["scores"][0]["order"]) == 30


def test_a_button_for_each_score(run):
    pressed = [value for name, value in page_of(run).attributes if name == "aria-pressed"]
    assert pressed == ["true", "false", "false"]


def test_other_columns_are_shown_without_epoch_and_update(run):
    keys = [found["key"] for found in page_of(run).samples["columns"]]
    assert keys == ["label", "loss", "norm", "self_influence", "visits", "weight"]


def test_unknown_values_are_null(tmp_path):
    write_run(tmp_path, NO_LINES)
    part = visits([1, 2, 3], [1.0, nan, inf])
    write_ledger(tmp_path, {**part, "norm": pa.array([nan, 2.0, 3.0], pa.float32())})
    shown = page_of(tmp_path)
    assert column(shown, "loss")["values"] == [1.0, None, None]
    assert column(shown, "norm")["values"] == [None, 2.0, 3.0]


def test_a_ledger_without_norms_has_a_gallery_and_no_plot(tmp_path):
    write_run(tmp_path, NO_LINES)
    write_ledger(tmp_path, {**visits([1, 2], [1.0, 2.0]), "norm": pa.array([nan, nan], pa.float32())})
    shown = page_of(tmp_path)
    assert shown.samples["axes"] is None and "canvas" not in shown.tags
    assert "Loss or gradient norm is not known, so there is no plot." in shown.text
    assert "The ledger has no finite norms: it was recorded with norms=False." in shown.text


def test_ids_are_text_because_scripts_round_large_numbers(tmp_path):
    write_run(tmp_path, NO_LINES)
    write_ledger(tmp_path, visits([2**62 + 1, 5], [1.0, 2.0]))
    assert page_of(tmp_path).samples["ids"] == [str(2**62 + 1), "5"]


@pytest.mark.parametrize(
    ("values", "log"),
    [
        ([1.0, 2.0, 3.0], False),
        ([0.001, 0.1, 10.0], True),
        ([0.0, 0.001, 10.0], True),
        ([-1.0, 0.001, 1e6], False),  # no logarithm
        ([0.0, 0.0], False),
        ([5.0], False),
        ([None, 1.0, 1e6], True),
    ],
)
def test_an_axis_is_logarithmic_where_values_span_decades(values, log):
    axis = scatter.axis("loss", values)
    assert axis.log == log and axis.low < axis.high
    known = [value for value in values if value]
    assert all(axis.low <= value <= axis.high for value in known)
    assert not log or axis.low > 0


def test_no_axis_without_values():
    assert scatter.axis("loss", [None, nan]) is None


# --------------------------------------------------------------------------------------- too many


def test_many_samples_are_counted_on_a_grid(run, monkeypatch):
    monkeypatch.setattr(scatter, "MAX_SAMPLES", N - 1)
    shown = page_of(run)
    grid, width, height = shown.samples["grid"]["cells"], *scatter.GRID
    assert sum(count for _, _, count in grid) == N
    assert all(0 <= column < width and 0 <= row < height for column, row, _ in grid)
    assert max(grid) == [max(c for c, _, _ in grid), max(r for _, r, _ in grid), 1]  # sample 7, in the corner
    assert len(shown.samples["ids"]) == samples.MIN_SUSPECTS and shown.samples["total"] == N
    assert "40 samples are too many to draw individually" in shown.text
    order = shown.samples["scores"][0]["order"]
    assert [shown.samples["ids"][k] for k in order[:2]] == ["7", "3"]


def test_samples_with_many_columns_are_drawn_on_a_grid(run, monkeypatch):
    monkeypatch.setattr(scatter, "BUDGET", 100)
    assert page_of(run).samples["grid"]


def test_a_million_visits_of_many_samples_make_a_small_page(tmp_path):
    write_run(tmp_path, NO_LINES)
    n = 25_000
    ids = [f"a/rather/long/name/of/a/sample/{k:08d}" for k in range(n)]
    write_ledger(tmp_path, *(visits(ids, [1.0 + k % 997 for k in range(n)], epoch) for epoch in range(2)))
    assert write_report(tmp_path).stat().st_size < 500_000


def test_long_texts_are_shortened(tmp_path):
    write_run(tmp_path, NO_LINES)
    write_ledger(tmp_path, visits(["x" * 5000, "y"], [1.0, 2.0], text=pa.array(["z" * 5000, "w"])))
    shown = page_of(tmp_path)
    assert shown.samples["ids"][0] == "x" * 200 + "…" and column(shown, "text")["values"][0] == "z" * 200 + "…"


# ------------------------------------------------------------------------------------ norms over time


def quantiles(*tables, visits=None):
    spread = NormQuantiles(sum(map(len, tables)) if visits is None else visits)
    for table in tables:
        spread.add(table)
    spread.end()
    return spread.curves


@pytest.mark.parametrize("part", [7, 50, 300])
def test_quantiles_do_not_depend_on_the_parts(part):
    norms = np.random.default_rng(0).random(1000)
    rows = pa.table({"update": np.arange(1000) // 4, "norm": norms})
    whole = quantiles(rows)
    assert quantiles(*(rows.slice(start, part) for start in range(0, 1000, part))) == whole
    assert [y for _, y in whole[0].points] == pytest.approx(np.median(norms.reshape(100, 10), axis=1).tolist())


def test_quantiles_if_some_visits_cannot_be_read():
    rows = pa.table({"update": [1, 1, 2, 2], "norm": [1.0, 1.0, 2.0, 4.0]})
    middle, *_ = quantiles(rows, visits=6)
    assert middle.points == [(1.0, 1.0), (2.0, 3.0)]


def test_quantiles_of_the_norms_over_intervals():
    rows = pa.table({"update": [1] * 101 + [2] * 101, "norm": [*map(float, range(101)), *[7.0] * 101]})
    middle, lowest, low, high, highest, maximum = quantiles(rows)
    assert [curve.points[0] for curve in (middle, lowest, low)] == [(1.0, 50.0), (1.0, 5.0), (1.0, 25.0)]
    assert [curve.points[0][1] for curve in (high, highest, maximum)] == [75.0, 95.0, 100.0]
    assert {curve.points[1] for curve in (middle, lowest, maximum)} == {(2.0, 7.0)}


def test_not_all_visits_are_in_memory_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(aggregate, "AGGREGATE_EVERY", 20_000)
    ids = list(range(10_000))
    write_run(tmp_path, NO_LINES)
    write_ledger(tmp_path, *(visits(ids, [0.5 + epoch] * len(ids), epoch) for epoch in range(40)))
    held, read, before = [], files._read, pa.total_allocated_bytes()

    def reading(path):
        held.append(pa.total_allocated_bytes() - before)
        return read(path)

    monkeypatch.setattr(files, "_read", reading)
    found = samples.read_samples(read_run(tmp_path))
    assert len(held) == 40 and max(held) < files.read_ledger(tmp_path).nbytes / 4
    assert found.table["visits"].to_pylist() == [40] * 10_000 and found.table["loss"][0].as_py() == 20.0


def test_norms_that_are_not_finite_are_left_out_of_the_quantiles():
    rows = pa.table({"update": [1, 1, 1, 2], "norm": [1.0, nan, inf, nan]})
    middle, *_ = quantiles(rows)
    assert middle.points[0] == (1.0, 1.0) and middle.finite == middle.points[:1]


def test_the_norms_have_a_chart(run):
    shown = page_of(run)
    assert "Per-sample gradient norms" in shown.charts
    assert "in each of 80 intervals" in shown.text


# --------------------------------------------------------------------------------------- previews


def test_a_small_image_is_lossless(run):
    write_previews(run, {"7": {"label": "9", "image": picture(8, 6, shade=200)}})
    address = page_of(run).samples["previews"]["7"]["image"]
    kind, _, content = address.partition(",")
    image = Image.open(BytesIO(base64.b64decode(content)))
    assert kind == "data:image/png;base64" and image.size == (8, 6) and set(image.tobytes()) == {200}


@pytest.mark.parametrize(("channels", "kind"), [(1, "jpeg"), (3, "jpeg"), (4, "png")])
def test_a_large_image_becomes_a_thumbnail(channels, kind):
    address = previews.image_url(**picture(300, 150, channels))
    image = Image.open(BytesIO(base64.b64decode(address.partition(",")[2])))
    assert address.startswith(f"data:image/{kind};") and image.size == (112, 56)


def test_texts_and_values(run):
    write_previews(run, {"7": {"text": "a" * 1000}, "3": {"values": {"age": 81234.5678, "who": "b"}}})
    shown = page_of(run).samples["previews"]
    assert shown["7"] == {"text": "a" * 600 + "…"}
    assert shown["3"] == {"values": [["age", "81234.6"], ["who", "b"]]}


def test_names_of_previews(run):
    write_previews(
        run, {"7": {"text": "a", "name": "b" * 300}, "3": {"values": {}, "name": "c.png"}, "5": {"name": "d"}}
    )
    shown = page_of(run).samples["previews"]
    assert shown["7"] == {"text": "a", "name": "b" * 200 + "…"}
    assert shown["3"] == {"values": [], "name": "c.png"}
    assert "5" not in shown


def test_labels_of_previews_if_the_ledger_has_none(tmp_path):
    write_run(tmp_path, NO_LINES)
    write_ledger(tmp_path, visits([1, 2], [1.0, 2.0]))
    write_previews(tmp_path, {"2": {"label": "cat", "text": "miaow"}})
    assert column(page_of(tmp_path), "label")["values"] == [None, "cat"]


def test_labels_and_predictions_have_the_names_of_classes(tmp_path):
    write_run(tmp_path, NO_LINES)
    label, prediction = pa.array([0, 1, 7]), pa.array([1.0, nan, 2.0])
    write_ledger(tmp_path, visits([1, 2, 3], [1.0, 2.0, 3.0], prediction=prediction, label=label))
    write_previews(tmp_path, {"2": {"label": "1", "text": "a"}, "3": {"label": "heron", "text": "b"}})
    shown = page_of(tmp_path)
    assert [each["key"] for each in shown.samples["columns"]][:2] == ["label", "prediction"]
    assert column(shown, "label")["values"] == [0, 1, "heron"]  # the name that the preview has
    write_previews(tmp_path, {"2": {"label": "1", "text": "a"}}, classes=["cat", "dog", "cow"])
    shown = page_of(tmp_path)
    assert column(shown, "label")["values"] == ["cat", "dog", 7]
    assert column(shown, "prediction")["values"] == ["dog", None, "cow"]
    assert "A prediction is that of the last visit." in shown.text


def test_losses_and_norms_per_count(tmp_path):
    write_run(tmp_path, NO_LINES)
    write_ledger(tmp_path, visits([1, 2], [6.0, 4.0], count=pa.array([3.0, 1.0])), visits([1, 2], [6.0, 4.0], epoch=1))
    shown = page_of(tmp_path)
    assert column(shown, "loss") == {
        "key": "loss",
        "name": "loss per count",
        "same": 4.0,
    }  # (2 + 6) / 2 and (4 + 4) / 2
    assert [axis["name"] for axis in shown.samples["axes"]] == ["loss per count", "gradient norm per count"]
    assert [score["title"] for score in shown.samples["scores"]][:1] == ["loss per count (recommended)"]
    assert "Loss and gradient norm are divided by the count" in shown.text
    assert "they are not divided by its count" in shown.text  # the norms over time


def test_only_suspects_have_previews_in_the_page(run):
    write_previews(run, {"0": {"text": "not suspect"}, "7": {"text": "suspect"}})
    assert list(page_of(run).samples["previews"]) == ["7"]


def test_previews_are_limited_to_a_budget(run, monkeypatch):
    monkeypatch.setattr(previews.Previews.shown, "__defaults__", (100,))
    write_previews(run, {str(k): {"text": "a" * 60} for k in range(N)})
    shown = page_of(run)
    assert list(shown.samples["previews"]) == ["7"]
    assert f"Previews left out to limit the size of the page: {samples.MIN_SUSPECTS - 1}." in shown.text


@pytest.mark.parametrize(
    "entry",
    [
        {"image": {"width": 9, "height": 6, "channels": 1, "data": "AAAA"}},
        {"image": {"width": 1, "height": 1, "channels": 2, "data": "AAA="}},
        {"image": {"width": 1, "height": 1, "channels": 1, "data": "?"}},
        {"image": {"width": 1}},
        {"image": "no picture"},
        {"values": [1, 2]},
        ["neither"],
    ],
)
def test_a_preview_that_is_broken_is_counted(run, entry):
    write_previews(run, {"7": entry, "3": {"text": "whole"}})
    shown = page_of(run)
    assert "Previews that cannot be shown: 1, for example of '7'." in shown.text
    assert list(shown.samples["previews"]) == ["3"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"version": 1, "samples": {"7"', "previews.json cannot be read; samples are shown without it: Expecting"),
        ("[]", "previews.json cannot be read"),
        ('{"version": 1}', "previews.json cannot be read; samples are shown without it: there is no 'samples'."),
        ('{"version": 2, "samples": {}}', "previews.json has version 2; this report reads version 1."),
    ],
)
def test_previews_that_cannot_be_read_are_one_line(run, content, expected):
    (run / "previews.json").write_text(content)
    shown = page_of(run)
    assert expected in shown.text and shown.samples["previews"] == {}


# ---------------------------------------------------------------------------------------- trouble


def test_columns_of_any_type(tmp_path):
    large, when = pa.array([2**62 + 1, 5]), pa.array([0, 86400], pa.timestamp("s"))
    write_run(tmp_path, NO_LINES)
    write_ledger(tmp_path, visits([1, 2], [1.0, 2.0], large=large, when=when, raw=pa.array([b"a", b"b"])))
    shown = page_of(tmp_path)
    assert column(shown, "large")["values"] == ["4611686018427387905", 5]  # not representable in JavaScript
    assert column(shown, "when")["values"] == ["1970-01-01 00:00:00", "1970-01-02 00:00:00"]
    assert column(shown, "raw")["values"] == ["b'a'", "b'b'"]


def test_a_note_if_there_is_no_ledger(report):
    shown = report(WHOLE)
    assert (
        "No ledger: train with callbacks=[sw.Ledger()], or with samplewise train --ledger, to see the samples here."
        in shown.text
    )
    assert "Warnings" not in shown.text and "script" not in shown.tags


def test_the_plan_of_a_private_run(report):
    about = {**ABOUT, "settings": {**ABOUT["settings"], "privacy": "(3, 1e-05)-DP for adding or removing one sample"}}
    hidden = [{k: v for k, v in line.items() if k not in ("loss", "samples")} for line in WHOLE]
    shown = report(hidden, about)
    assert (
        "Private run: (3, 1e-05)-DP for adding or removing one sample. Values of single samples are not" in shown.text
    )
    assert "Train loss" not in shown.charts and "Warnings" not in shown.text


def test_files_without_read_permission(run, monkeypatch):
    """The error is simulated, because the tests may run as root."""
    write_run(run)
    open_folder, read_bytes = Path.iterdir, Path.read_bytes

    def refused(way, name):
        def of(path):
            if path.name == name:
                raise PermissionError(13, "Permission denied", str(path))
            return way(path)

        return of

    monkeypatch.setattr(Path, "iterdir", refused(open_folder, "samples"))
    monkeypatch.setattr(Path, "read_bytes", refused(read_bytes, "run.json"))
    shown = page_of(run)
    assert f"The samples cannot be shown: [Errno 13] Permission denied: '{run / 'samples'}'" in shown.text
    assert "run.json cannot be read: name, versions and settings are not known." in shown.text
    assert "No ledger" not in shown.text and "Train loss" in shown.charts


def test_a_ledger_without_a_log_is_shown(run):
    """Ledger of a custom loop."""
    for name in ("log.jsonl", "run.json"):
        (run / name).unlink(missing_ok=True)
    shown = page_of(run)
    assert "Ledger of a training loop without a log of samplewise: curves, times and settings" in shown.text
    assert "Warnings" not in shown.text
    assert shown.samples["total"] == len(shown.samples["ids"]) > 0 and "Per-sample gradient norms" in shown.charts


def test_a_truncated_part_is_a_warning_and_the_rest_is_shown(run):
    broken = run / "samples" / "part-000001.parquet"
    broken.write_bytes(broken.read_bytes()[:-100])
    write_run(run)
    shown = page_of(run)
    assert "Ledger: a part of a ledger must be a complete Parquet file; found" in shown.text
    assert "damaged=" not in shown.text  # the part is skipped already
    assert "Train loss" in shown.charts and column(shown, "visits")["same"] == 1


def test_a_part_of_another_version_is_a_warning(run):
    path = run / "samples" / "part-000001.parquet"
    table = pa.parquet.read_table(path)
    pa.parquet.write_table(table.replace_schema_metadata({"format": "samplewise ledger", "version": "99"}), path)
    shown = page_of(run)
    assert "samplewise ledger 1; found samplewise ledger 99" in shown.text
    assert column(shown, "visits")["same"] == 1


def test_no_readable_part(run):
    for part in (run / "samples").iterdir():
        part.write_bytes(b"no Parquet")
    write_run(run)
    shown = page_of(run)
    assert shown.text.count("Ledger: a part of a ledger must be a complete Parquet file") == 2
    assert "The samples cannot be shown: a ledger must have at least one readable part" in shown.text
    assert "The ledger cannot be read." in shown.text and "Train loss" in shown.charts


def test_parts_with_incompatible_columns(tmp_path):
    write_run(tmp_path, NO_LINES)
    write_ledger(tmp_path, visits([1], [1.0]), visits(["one"], [1.0]))
    assert "The samples cannot be shown: the parts of a ledger must have compatible columns" in page_of(tmp_path).text


def test_a_ledger_without_finite_values(tmp_path):
    write_run(tmp_path, NO_LINES)
    write_ledger(tmp_path, visits([1, 2], [nan, nan]))
    assert "The ledger has no sample with a finite loss or norm." in page_of(tmp_path).text


def test_samples_without_a_finite_value_are_named(tmp_path):
    write_run(tmp_path, NO_LINES)
    losses = [nan if k in (7, 9) else 1.0 for k in range(20)]
    write_ledger(tmp_path, visits(list(range(20)), losses), visits(list(range(20)), losses, 1))
    shown = page_of(tmp_path)
    assert "2 of 20 samples never had a finite loss or norm and are not shown: 7, 9." in shown.text
    write_ledger(tmp_path / "many", visits([f"<{k}>" for k in range(30)], [nan] * 29 + [1.0]))
    write_run(tmp_path / "many", NO_LINES)
    assert "are not shown: <0>, <1>, <2>, <3>, <4>, <5>, <6>, <7>, <8>, <9>, …" in page_of(tmp_path / "many").text


def test_ids_that_repeat_within_an_epoch(tmp_path):
    write_run(tmp_path, NO_LINES)
    write_ledger(tmp_path, visits(["a", "b", "b", "b", "c", "c"], [1.0] * 6), visits(["a", "b", "c"], [1.0] * 3, 1))
    assert (
        "Ids repeat within an epoch: 3 of 9 rows have an id that occurred before in the epoch. For example, 'b' "
        "occurs 3 times in epoch 1. Unless samples are drawn with replacement, several samples share an id"
        in page_of(tmp_path).text
    )


def test_ids_that_repeat_in_earlier_epochs(tmp_path):
    """Their ids are no longer in memory; the warning names the id with most repetitions."""
    parts = [visits(["a", "b", "c"], [1.0] * 3, epoch) for epoch in (0, 3, 4, 5)]
    parts.insert(1, visits(["a", "b", "b"], [1.0] * 3, 1))
    parts.insert(2, visits(["z", "c", "c", "c"], [1.0] * 4, 2))
    write_run(tmp_path, NO_LINES)
    write_ledger(tmp_path, *parts)
    text = page_of(tmp_path).text
    assert "Ids repeat within an epoch: 3 of 19 rows" in text and "For example, 'c' occurs 3 times in epoch 3" in text


def test_ids_that_repeat_in_different_epochs_are_valid(run):
    assert "repeat" not in page_of(run).text


def test_no_pyarrow(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    write_run(run)
    shown = page_of(run)
    assert "The samples cannot be shown: the ledger needs pyarrow: pip install 'samplewise[ledger]'" in shown.text
    assert "Train loss" in shown.charts


# --------------------------------------------------------------------------------------- escaping

EVIL = "</script><script>alert(1)</script><!-- \u2028\u2029 ' \" & <img src=x onerror=alert(2)> \x00"


def test_html_in_strings_is_escaped(tmp_path):
    write_run(tmp_path, [train(1, **{EVIL: 1.0})], {**ABOUT, "name": EVIL})
    write_ledger(tmp_path, visits([EVIL, "b"], [2.0, 1.0], **{EVIL: pa.array([EVIL, "c"])}))
    write_previews(tmp_path, {EVIL: {"label": EVIL, "values": {EVIL: EVIL}}})
    shown = page_of(tmp_path)
    assert shown.tags.count("script") == 2  # the data, and the code
    assert shown.samples["ids"][0] == EVIL and column(shown, EVIL)["values"][0] == EVIL
    assert shown.samples["previews"]["0"]["values"] == [[EVIL, EVIL]]
    assert "img" not in shown.tags
    assert not [name for name, _ in shown.attributes if name.startswith("on")]


def test_the_data_is_json(run):
    written = next(text for text in page_of(run).scripts if text.startswith("{"))
    assert not set("<>&\u2028\u2029") & set(written)
    json.loads(written, parse_constant=lambda name: pytest.fail(name))


def test_content_security_policy_allows_only_the_script_of_the_page(run):
    shown = page_of(run)
    (policy,) = [value for name, value in shown.attributes if value and value.startswith("default-src 'none'")]
    digest = base64.b64encode(hashlib.sha256(shown.scripts[-1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in policy and "connect-src" not in policy


def test_too_many_columns_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(scatter, "BUDGET", 3000)
    write_run(tmp_path, NO_LINES)
    extra = {f"column{k:02}": pa.array([f"{k} {one} " * 10 for one in range(N)]) for k in range(20)}
    write_ledger(tmp_path, visits(list(range(N)), LOSSES, **extra))
    shown = page_of(tmp_path)
    keys = [found["key"] for found in shown.samples["columns"]]
    assert keys[:5] == ["loss", "norm", "self_influence", "visits", "weight"] and 5 < len(keys) < 20
    assert f"The page leaves out {25 - len(keys)} columns of the ledger." in shown.text


# ------------------------------------------------------------------------------------ data map


def write_map(directory):
    """Ledger of two epochs; sample k has the confidences k / 64 and (k + 1) / 64."""
    write_run(directory, NO_LINES)
    confidences = [pa.array([(k + epoch) / 64 for k in range(N)]) for epoch in range(2)]
    labels = pa.array([k % 3 for k in range(N)])
    parts = [visits(list(range(N)), LOSSES, e, label=labels, confidence=c) for e, c in enumerate(confidences)]
    write_ledger(directory, *parts)


def test_the_data_map_has_variability_and_confidence(tmp_path):
    write_map(tmp_path)
    shown = page_of(tmp_path)
    assert [axis["name"] for axis in shown.samples["map"]["axes"]] == ["variability", "confidence"]
    assert shown.samples["map"]["grid"] is None
    assert column(shown, "confidence")["values"] == pytest.approx([(k + 0.5) / 64 for k in range(N)], abs=1e-4)
    assert column(shown, "variability") == {"name": "variability", "key": "variability", "same": 0.007812}
    assert "ambiguous ones on the right" in shown.text
    keys = [entry["key"] for entry in shown.samples["columns"]]
    assert keys == ["label", "loss", "norm", "self_influence", "visits", "confidence", "variability", "weight"]


def test_without_confidences_there_is_no_data_map(run):
    shown = page_of(run)
    assert shown.samples["map"] == {"axes": None, "grid": None}
    assert "Data map" not in shown.text and 'id="map"' not in shown.html


def test_cells_of_the_data_map_have_a_sample(tmp_path, monkeypatch):
    write_map(tmp_path)
    monkeypatch.setattr(scatter, "MAX_SAMPLES", N - 1)
    shown = page_of(tmp_path)
    cells = shown.samples["map"]["grid"]["cells"]
    assert sum(count for _, _, count, _ in cells) == N
    ids = [int(shown.samples["ids"][k]) for *_, k in cells]
    assert ids == sorted(ids) and ids[0] == 0  # the confidence increases with the id
    for (_, _, count, _), first, following in zip(cells, ids, [*ids[1:], N], strict=True):
        assert following - first == count
    assert all(len(cell) == 3 for cell in shown.samples["grid"]["cells"])
    assert "Of a cell of the map, the page has the sample that was visited first" in shown.text
