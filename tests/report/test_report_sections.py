"""Sections of the report: noise scale, layers, cost, configuration."""

from importlib.metadata import version
from math import inf, nan

import pytest
from pages import ABOUT, WHOLE, train

from samplewise.report import training
from samplewise.report.gradients import select_layers
from samplewise.report.run_log import Curve

# --------------------------------------------------------------------------------------- noise scale


def noise(update, scale, batch=64):
    return {"kind": "noise", "epoch": 0, "update": update, "scale": scale, "trace": 1.0, "signal": 1.0, "batch": batch}


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        (640.5, "about 640 samples (median of the second half of the run). The batch size 64 is far below it:"),
        (100.0, "about 100 samples (median of the second half of the run). The batch size 64 is near it"),
        (20.0, "about 20 samples (median of the second half of the run). The batch size 64 is near it"),
        (3.25, "about 3.2 samples (median of the second half of the run). The batch size 64 is far above it:"),
    ],
)
def test_the_batch_size_is_compared_with_the_second_half_of_the_run(report, scale, expected):
    shown = report([noise(k, 1e6) for k in (1, 2)] + [noise(k, scale) for k in (3, 4)])
    assert expected in shown.text
    assert len(shown.charts["Noise scale, in samples"]) == 2  # and the batch size
    assert "could not be estimated" not in shown.text


def test_invalid_noise_scales_are_gaps_and_counted(report):
    shown = report([noise(k, scale) for k, scale in enumerate([200.0, nan, -5.0, inf, 300.0])])
    assert "At 3 of 5 log lines it could not be estimated." in shown.text
    assert shown.charts["Noise scale, in samples"][0].count("M") == 2
    assert "Infinity" not in shown.text


def test_no_valid_noise_scale(report):
    shown = report([noise(1, nan), noise(2, -1.0)])
    assert "The noise scale is not known. At 2 of 2 log lines it could not be estimated." in shown.text


def test_variance_ratio_of_importance_sampling(report):
    ratios = [1.0, 0.5, nan, 0.4, 0.3]
    shown = report([{"kind": "importance", "epoch": k, "update": k, "variance_ratio": r} for k, r in enumerate(ratios)])
    assert shown.charts["Variance relative to uniform sampling"][0].count("M") == 2  # NaN is a gap
    assert "unknown kind" not in shown.text
    assert "Variance relative" not in report([noise(1, 100.0)]).text


def test_unknown_batch_size(report):
    shown = report([noise(1, 100.0, batch=None)])
    assert "about 100 samples (median of the second half of the run). The batch size is not known." in shown.text


def test_no_section_without_log_lines(report):
    shown = report(WHOLE)
    assert not {"Noise scale", "Layers"} & {text.strip() for text in shown.text.split("\n")}


# -------------------------------------------------------------------------------------------- layers


def layers(update, **norms):
    return {"kind": "layers", "epoch": 0, "update": update, "norms": norms}


def test_every_layer_has_a_curve_and_a_row(report):
    shown = report([layers(1, a=1.0, b=2.0), layers(2, a=0.5, b=8.0), layers(3, a=0.75, b=4.0)])
    assert len(shown.charts["Gradient norm of each layer"]) == 2
    assert shown.tables["Layers"] == [
        ["layer", "first", "last", "lowest", "highest"],
        ["a", "1.000", "0.750", "0.500", "1.000"],
        ["b", "2.000", "4.000", "2.000", "8.000"],
    ]
    assert "left out" not in shown.text


def test_twelve_layers_are_selected(report):
    norms = {f"layer{k:02}": 1.0 for k in range(30)}
    shown = report([layers(1, **norms), layers(2, **{**norms, "layer07": 1e-6, "layer20": 50.0})])
    rows = [row[0] for row in shown.tables["Layers"][1:]]
    assert len(rows) == 12 and {"layer07", "layer20"} < set(rows) and rows == sorted(rows)
    assert "18 of 30 layers are left out" in shown.text


def test_a_layer_with_non_finite_norms_is_selected():
    steady = [Curve(f"steady{k}", [(1.0, 5.0), (2.0, 5.0)]) for k in range(20)]
    broken = Curve("broken", [(1.0, 0.1), (2.0, nan)])
    assert broken in select_layers([*steady, broken], 3)


@pytest.mark.parametrize("norms", [None, [], {"a": "b"}, {"a": None}])
def test_invalid_lines_of_layers(report, norms):
    shown = report([{**layers(1), "norms": norms}, *WHOLE])
    assert "Layers" not in shown.tables


def test_layers_without_finite_norms(report):
    assert "No layer has a finite gradient norm." in report([layers(1, a=nan, b=inf)]).text


# ------------------------------------------------------------------------------------ time and memory


def test_time_by_phase(report):
    lines = [train(k, phases={"data": 0.1, "forward": 0.3}) for k in (10, 20)]
    shown = report(lines)
    assert "Share of time by phase" in shown.charts
    assert shown.tables["Time and memory"] == [
        ["phase", "ms per update", "share", "total seconds"],
        ["data", "10.00", "25.0 %", "0.2000"],
        ["forward", "30.00", "75.0 %", "0.6000"],
        ["all", "40.00", "100.0 %", "0.8000"],
    ]


def test_phases_of_one_line_only(report):
    shown = report([train(1), train(2, phases={"data": 0.5, "strange": "x", "bad": nan}), train(3)])
    assert [row[0] for row in shown.tables["Time and memory"][1:]] == ["data", "all"]
    assert shown.tables["Time and memory"][-1] == ["all", "500.0", "100.0 %", "0.5000"]


def test_phases_that_took_no_time(report):
    shown = report([train(1, phases={"data": 0.0}), train(2, phases={"data": 0.0})])
    assert shown.tables["Time and memory"][-1] == ["all", "0.000", "0.0 %", "0.000"]


def test_time_per_update_without_phases(report):
    shown = report(WHOLE)
    assert "Milliseconds per update" in shown.charts
    assert "Share of time by phase" not in shown.charts and "Peak memory so far, MiB" not in shown.charts


@pytest.mark.parametrize(("size", "unit"), [(3 * 2**30, "GiB"), (5 * 2**20, "MiB"), (700, "KiB")])
def test_memory_has_a_chart_in_its_unit(report, size, unit):
    shown = report([train(1, memory=size), train(2, memory=size)])
    assert f"Peak memory so far, {unit}" in shown.charts and "memory" not in shown.charts


# -------------------------------------------------------------------------------------- configuration


def test_nested_objects_of_run_json_are_tables(report):
    about = {**ABOUT, "versions": {"torch": "2.13.0"}, "machine": {"cores": 2}, "seed": 7, "odd": {"a": [1, {"b": 2}]}}
    shown = report(WHOLE, about)
    assert dict(shown.tables["Versions"]) == {"torch": "2.13.0"} and dict(shown.tables["Machine"]) == {"cores": "2"}
    assert dict(shown.tables["Run"])["seed"] == "7" and dict(shown.tables["Odd"]) == {"a": '[1, {"b": 2}]'}


def test_a_run_of_another_version_is_a_warning(report):
    shown = report(WHOLE, {**ABOUT, "samplewise": "9.9"})
    assert f"The run was written by samplewise 9.9 and is read by {version('samplewise')}" in shown.text
    assert "Train loss" in shown.charts


@pytest.mark.parametrize("wrote", [version("samplewise"), None, 3])
def test_no_warning_for_this_version_or_an_unknown_one(report, wrote):
    assert "was made by" not in report(WHOLE, {**ABOUT, "samplewise": wrote}).text


def test_headline_figures(report):
    text = report(WHOLE).text
    assert "updates4epochs2highest validation accuracy0.7500lowest validation loss2.000lowest train loss1.500" in text


# ------------------------------------------------------------------------------------------- the page


def test_every_section_is_linked(report):
    shown = report(WHOLE)
    links = [value for name, value in shown.attributes if name == "href" and value.startswith("#")]
    ids = [value for name, value in shown.attributes if name == "id"]
    assert links[:2] == ["#curves", "#samples"]  # without a ledger
    assert {"#configuration", "#time-and-memory"} < set(links)
    assert {link[1:] for link in links} <= set(ids)


# --------------------------------------------------------------------------------------- too much of it


def test_number_of_charts_is_limited(report, monkeypatch):
    monkeypatch.setattr(training, "MAX_CHARTS", 10)  # 60 take seconds
    numbers = {f"number{k:03}": [0.1 * k, 0.2] for k in range(50)}
    lines = [train(k, **{name: value[k % 2] for name, value in numbers.items()}) for k in range(1, 4)]
    shown = report(lines)
    assert [name for name in shown.charts if name.startswith("number")][-1] == "number006"
    assert "43 more numbers of the log are left out: at most 10 are drawn." in shown.text


def test_many_charts_have_fewer_points_each(report, monkeypatch):
    monkeypatch.setattr(training, "MAX_FULL_CHARTS", 5)
    lines = [train(k, **{f"number{n:02}": (k * 7919 % 101) / n for n in range(1, 13)}) for k in range(3000)]
    shown = report(lines)
    assert max(path.count("L") for path in shown.charts["number01"]) < 500
    assert len(shown.html) < 1_000_000


def test_number_of_epochs_in_the_table_is_limited(report):
    shown = report([train(k, epoch=k) for k in range(1, 2001)])
    rows = [row[0] for row in shown.tables["Epochs"][1:]]
    assert len(rows) == 200 and rows[0] == "1" and rows[-1] == "2,000" and len(set(rows)) == 200
    assert "200 of 2,000 epochs are shown." in shown.text


def test_number_of_warnings_is_limited(report):
    shown = report([train(k, **{f"number{n}": nan for n in range(50)}) for k in (1, 2)])
    assert shown.text.count("values are NaN or infinite") == 30
    assert "… and 20 more." in shown.text


def test_a_long_setting_is_shortened(report):
    shown = report(WHOLE, {**ABOUT, "settings": {"words": "a" * 10**6, "numbers": list(range(10**5))}})
    assert len(shown.html) < 300_000 and dict(shown.tables["Settings"])["words"] == "a" * 1000 + "…"
