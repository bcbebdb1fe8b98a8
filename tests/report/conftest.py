import pytest
from pages import ABOUT, Page, write_run

from samplewise.report import charts
from samplewise.report.page import write_report

draw = charts._svg


@pytest.fixture(scope="session", autouse=True)
def _each_chart_is_drawn_once():
    """Share the SVG of equal charts among tests: matplotlib takes 50 ms for each."""
    drawn = {}

    def shared(paint, frame, prefix, label, log):
        contents = [repr(cell.cell_contents) for cell in paint.__closure__]  # curves, bands and frame
        key = paint.__code__, *contents, frame, prefix, label, log
        if key not in drawn:
            drawn[key] = draw(paint, frame, prefix, label, log)
        return drawn[key]

    charts._svg = shared
    yield
    charts._svg = draw


@pytest.fixture
def drawn_again(monkeypatch):
    """Draw every chart of the test."""
    monkeypatch.setattr(charts, "_svg", draw)


@pytest.fixture
def report(tmp_path):
    """Function that writes a run directory and returns its report as a Page."""

    def make(lines, about=ABOUT, after=""):
        write_run(tmp_path, lines, about, after)
        return Page(write_report(tmp_path).read_text(encoding="utf-8"))

    return make
