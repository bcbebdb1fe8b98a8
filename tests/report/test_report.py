"""`write_report`: content of the page, for complete, interrupted, diverged and empty runs."""

import ast
import json
import sys
from math import inf, isfinite, nan
from pathlib import Path
from xml.etree import ElementTree

import pytest
from pages import ABOUT, WHOLE, train, validation

from samplewise import errors
from samplewise.core import files, package
from samplewise.core import text as plain_text
from samplewise.ledger import aggregate, history
from samplewise.ledger import files as ledger
from samplewise.report import charts, page
from samplewise.report.page import write_report
from samplewise.report.run_log import read_run


def finite_points(path):
    return path.count("M") + path.count("L")


# ------------------------------------------------------------------------------- a whole run


def test_name_and_state_come_first(report):
    shown = report(WHOLE)
    assert shown.title == "digits"
    assert "Ended at update 4: all epochs done" in shown.text
    assert "Warnings" not in shown.text


def test_the_summary_shows_run_json_and_counters(report):
    shown = report(WHOLE)
    run = dict(shown.tables["Run"])
    assert run["parameters"] == "21,704,164" and run["torch"] == "2.13.0" and run["device"] == "cpu"
    assert run["epochs"] == "2" and run["updates"] == "4" and run["samples logged"] == "128"
    assert dict(shown.tables["Settings"]) == {"batch_size": "256", "betas": "[0.9, 0.999]", "augment": "true"}


def test_every_number_has_its_chart(report):
    shown = report([*WHOLE[:-1], train(5, epoch=2, grad_norm=1.0), train(6, epoch=2, grad_norm=2.0)])
    names = ["loss", "accuracy", "gap"]
    expected = ["Train loss", *(f"Validation: {name}" for name in names), "Learning rate", "Samples per second"]
    assert list(shown.charts) == [*expected, "grad_norm", "Milliseconds per update"]


def test_samples_per_second_with_and_without_loading(report):
    shown = report([train(update, compute_samples_per_second=900.0) for update in (1, 2)])
    assert list(shown.charts)[2:4] == ["Samples per second", "Samples per second, computing only"]


def test_the_epochs_in_a_table(report):
    head, *rows = report(WHOLE).tables["Epochs"]
    metrics = ["validation loss", "validation accuracy", "validation gap"]
    assert head == ["epoch", "last train loss", "epoch loss", *metrics, "seconds", "train seconds"]
    assert rows == [
        ["0", "2.000", "2.750", "2.500", "0.2500", "4.000", "12.50", "1.000"],
        ["1", "1.750", "1.625", "2.000", "0.7500", "3.000", "11.50", "1.000"],
    ]


def test_best_is_lowest_or_highest_by_name_or_both(report):
    _, *rows = report(WHOLE).tables["Best values"]
    assert rows == [
        ["train loss", "lowest", "1.500", "3", "1.750"],
        ["validation loss", "lowest", "2.000", "4", "2.000"],
        ["validation accuracy", "highest", "0.7500", "4", "0.7500"],
        ["validation gap", "lowest", "3.000", "4", "3.000"],
        ["validation gap", "highest", "4.000", "2", "3.000"],
    ]


def test_skipped_updates_are_added_up_with_first_and_last(report):
    counts = [0, 1, 0, 3, 0]  # each since the previous line
    shown = report([train(update, skipped=count) for update, count in enumerate(counts)])
    assert "4 skipped because of NaN or infinity, 4 made. " in shown.text
    assert "First logged at update 1, last at update 3." in shown.text


def test_a_resumed_run_has_not_ended(report):
    assert "Not finished: the log ends at update 5" in report([*WHOLE, train(5, epoch=2)]).text


def test_a_point_between_gaps_is_drawn_as_a_dot(report):
    smooth = [1.0] * 100
    with_dot = report([train(k, loss=loss) for k, loss in enumerate([*smooth, nan, 2.0, nan, *smooth])])
    without = report([train(k, loss=loss) for k, loss in enumerate([*smooth, nan, 2.0, 2.0, *smooth])])
    assert with_dot.tags.count("use") == without.tags.count("use") + 1


def test_each_parameter_group_has_its_learning_rate(report):
    shown = report([train(update, lr=[0.1 / update, 0.01]) for update in range(1, 50)])
    assert len(shown.charts["Learning rate"]) == 2
    assert "group 0" in shown.text and "group 1" in shown.text


def test_the_axis_of_a_constant_curve_includes_zero(report):
    shown = report([train(update, lr=[0.001]) for update in range(1, 5)])
    assert "update 0 0.0005 0.001 0.0015 0.002" in " ".join(shown.text.split())


def test_lines_of_the_learning_rate_monitor_are_known(report):
    rates = [dict(kind="lr", update=update, rates=[0.1, 0.2 / update]) for update in range(1, 5)]
    shown = report([*rates, train(4)])
    assert len(shown.charts["Learning rate"]) == 2
    assert "does not know" not in shown.text


def test_path_of_the_report(tmp_path):
    (tmp_path / "log.jsonl").touch()
    assert write_report(tmp_path) == tmp_path / "report.html"
    assert write_report(tmp_path, tmp_path / "other.html").read_text() == (tmp_path / "report.html").read_text()


@pytest.mark.usefixtures("drawn_again")
def test_the_same_run_gives_the_same_file(report):
    assert report(WHOLE).html == report(WHOLE).html


# ---------------------------------------------------------- runs that broke off or went wrong


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_last_line_that_is_cut_off_is_left_out(report, cut):
    shown = report(WHOLE[:4], after=json.dumps(train(3, loss=0.125))[:-cut])
    assert "Not finished: the log ends at update 2 without an end line" in shown.text
    assert "The last line of the log is incomplete" in shown.text
    assert "0.1250" not in shown.text and "cannot be read" not in shown.text


def test_a_line_cut_off_within_a_character(tmp_path):
    line = json.dumps({"kind": "end", "update": 1, "reason": "é"}, ensure_ascii=False).encode()
    (tmp_path / "log.jsonl").write_bytes(line[: line.index("é".encode()) + 1])
    assert "The last line of the log is incomplete" in " ".join(read_run(tmp_path).warnings)


def test_a_complete_last_line_without_newline_is_read(report):
    shown = report(WHOLE[:-1], after=json.dumps(WHOLE[-1]))
    assert "Ended at update 4" in shown.text and "is incomplete" not in shown.text


def test_unreadable_lines_are_counted(report):
    lines = [train(1), "no object", dict(kind="weather"), dict(kind=["train"]), train(2)]
    shown = report(lines)
    assert "Unreadable lines of the log, left out: 1." in shown.text
    assert "Lines of the log of an unknown kind, left out: 2." in shown.text
    assert dict(shown.tables["Run"])["updates"] == "2"


def test_an_empty_log(report):
    shown = report([])
    assert shown.title == "digits"
    assert "Nothing logged yet" in shown.text and "No data to draw yet" in shown.text
    assert "svg" not in shown.tags


def test_without_run_json_the_directory_gives_the_name(report, tmp_path):
    shown = report(WHOLE, about=None)
    assert shown.title == tmp_path.name
    assert "There is no run.json" in shown.text


@pytest.mark.parametrize("about", [[], {"name": None, "settings": None}, {"settings": {"a": {"b": nan}}}])
def test_a_run_json_of_another_form(report, tmp_path, about):
    assert report(WHOLE, about=about).title == tmp_path.name


@pytest.mark.parametrize("version", [3, 1, "2", None])
def test_a_run_json_of_another_version_is_not_read(report, tmp_path, version):
    shown = report(WHOLE, about={**ABOUT, "format_version": version})
    assert shown.title == tmp_path.name and "Train loss" in shown.charts
    assert "run.json must have format version 2; found" in shown.text


def test_no_validation(report):
    shown = report([train(1), train(2)])
    assert "This run has no validation." in shown.text
    assert list(shown.charts) == ["Train loss", "Learning rate", "Samples per second", "Milliseconds per update"]


def test_non_finite_values_are_gaps_and_counted(report):
    losses = [3.0, 2.0, nan, 1.0, inf, -inf, 0.5, 0.25]
    shown = report([train(update, loss=loss) for update, loss in enumerate(losses)])
    assert "Train loss: 3 of 8 values are NaN or infinite and left out of the curve." in shown.text
    assert shown.charts["Train loss"][0].count("M") == 3  # intervals between the gaps
    assert ["train loss", "lowest", "0.2500", "7", "0.2500"] in shown.tables["Best values"]


def test_a_table_says_nan_and_infinity(report):
    shown = report([train(1, loss=nan), validation(1, accuracy=inf, gap=-inf), train(2, 1), validation(2, 1)])
    assert shown.tables["Epochs"][1:] == [["0", "NaN", "∞", "−∞", "0.5000"], ["1", "1.000", "–", "–", "0.5000"]]


def test_no_finite_values(report):
    shown = report([train(1, loss=nan), train(2, loss=inf)])
    assert "No finite values." in shown.text and "Train loss" not in shown.charts


@pytest.mark.parametrize("loss", [1.7e308, -1.7e308, 5e-324, 10**400, 0, 2**70])
def test_huge_numbers(report, loss):
    report([train(1, loss=loss), train(2)])


@pytest.mark.parametrize("key", ["loss", "lr", "update", "epoch", "skipped", "samples", "samples_per_second"])
def test_values_that_are_not_numbers_are_left_out(report, key):
    odd = [None, "1.0", True, [], [None], {}]
    shown = report([train(1), *({**train(2), key: value} for value in odd), train(3)])
    assert shown.charts["Train loss"] and dict(shown.tables["Run"])["updates"] == "3"


# ------------------------------------------------------------------------------- many points


def test_thousands_of_lines_are_thinned_and_a_spike_stays(report):
    losses = [1.0 + update % 7 for update in range(20_000)]
    losses[12_345] = 99.0
    shown = report([train(update, loss=loss) for update, loss in enumerate(losses)])
    assert all(finite_points(path) <= charts.MAX_POINTS for chart in shown.charts.values() for path in chart)
    assert dict(shown.tables["Run"])["updates"] == "19,999"
    assert len(shown.html) < 400_000


def test_thinning_keeps_extremes_gaps_and_the_end():
    points = [(float(k), float(k % 100)) for k in range(10_000)]
    points[5_000], points[7_777], points[-1] = (5_000.0, nan), (7_777.0, -1e6), (9_999.0, 90.5)
    kept = charts.thin(points)
    assert len(kept) <= charts.MAX_POINTS and kept == sorted(kept)
    assert (7_777.0, -1e6) in kept and points[-1] in kept
    assert [x for x, y in kept if not isfinite(y)] == [5_000.0]


def test_few_points_are_not_thinned():
    points = [(float(k), 0.0) for k in range(charts.MAX_POINTS)]
    assert charts.thin(points) is points


# -------------------------------------------------------------------------- names, and the file

EVIL = """</td><script src="https://x.example/a.js">alert('1')</script>&amp; $\\frac{ #010203 \\1 \x00"""


def evil_run(report):
    lines = [train(1, **{EVIL: 1.0}), train(2, **{EVIL: 2.0}), validation(2, **{EVIL: 1.0})]
    about = {"name": EVIL, EVIL: EVIL, "settings": {EVIL: {EVIL: EVIL}}}
    return report([*lines, dict(kind="end", update=2, reason=EVIL)], about)


def test_names_are_escaped(report):
    shown = evil_run(report)
    escaped = EVIL.replace("\x00", "\N{REPLACEMENT CHARACTER}")
    assert "script" not in shown.tags
    assert shown.title == escaped and f"Validation: {escaped}" in shown.charts and escaped in shown.charts
    assert dict(shown.tables["Run"])[escaped] == escaped


def test_half_a_surrogate_pair_in_a_name(report):
    assert report(WHOLE, about={"name": "a\ud800b"}).title == "a?b"


@pytest.mark.parametrize("make", [evil_run, lambda report: report(WHOLE), lambda report: report([])])
def test_well_formed_and_self_contained(report, make):
    shown = make(report)
    ElementTree.fromstring(shown.html.removeprefix("<!DOCTYPE html>"))
    ids = [value for name, value in shown.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    addresses = [value for name, value in shown.attributes if name in ("src", "href", "xlink:href", "srcset", "data")]
    assert all(address.startswith("#") and address[1:] in ids for address in addresses)
    styles = "".join(part.split("</style>")[0] for part in shown.html.split("<style")[1:])
    assert "@import" not in styles and "url(" not in styles
    assert not {"script", "link", "iframe", "object", "embed", "img"} & set(shown.tags)
    assert not [name for name, _ in shown.attributes if name.startswith("on")]
    referred = [value for _, value in shown.attributes if value and value.startswith("url(")]
    assert all(value.removeprefix("url(#").removesuffix(")") in ids for value in referred)


def test_colors_come_from_the_page(report):
    html = report(WHOLE).html
    assert not [drawn for drawn in charts.CSS if drawn in html]
    assert "prefers-color-scheme: dark" in html and "@media print" in html
    assert all(html.count(meant.removeprefix("var(").removesuffix(")") + ":") == 2 for meant in charts.CSS.values())


# ------------------------------------------------------------------------- errors and imports


def test_no_directory(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"needs a run directory; found none at .*nowhere\. Pass the directory"):
        write_report(tmp_path / "nowhere")


def test_no_log(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"must contain log\.jsonl; found none in .*\. Pass the directory of one run"
    ):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("drawn_again")
def test_no_matplotlib(report, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"^the report needs matplotlib: pip install 'samplewise\[report\]'$"):
        report(WHOLE)


@pytest.mark.usefixtures("drawn_again")
def test_matplotlib_settings_of_the_user_are_ignored(report):
    import matplotlib

    expected = report(WHOLE).html
    with matplotlib.rc_context({"xtick.labelsize": 30, "svg.fonttype": "path", "lines.linewidth": 9}):
        assert report(WHOLE).html == expected
        assert matplotlib.rcParams["lines.linewidth"] == 9


def imported(path):
    """Names of the modules that a file imports at run time."""
    tree = ast.parse(path.read_text())
    typing_only = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
    }
    for node in set(ast.walk(tree)) - typing_only:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            yield node.module


OURS = (ledger, aggregate, history, errors, files, package, plain_text)


@pytest.mark.parametrize(
    "path",
    [*sorted(Path(page.__file__).parent.glob("*.py")), *(Path(module.__file__) for module in OURS)],
    ids=lambda path: path.name,
)
def test_the_report_does_not_import_torch(path):
    # Checked in the source, because `import samplewise` itself imports torch.
    allowed = {*sys.stdlib_module_names, "matplotlib", "numpy", "PIL"}  # numpy and PIL come with matplotlib
    others = [name for name in imported(path) if name.split(".")[0] not in allowed]
    ours = [module.__name__ for module in OURS]
    assert [name for name in others if not name.startswith("samplewise.report") and name not in ours] == []


def test_numbers_at_the_axes_keep_their_digits(report):
    assert "0.502" in report([train(1, loss=0.501), train(2, loss=0.5035)]).text


def test_drawings_have_no_metadata(report):
    html = report(WHOLE).html
    assert "font-family: '" not in html and '<g id="' not in html
