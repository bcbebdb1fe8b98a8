import pytest
from pages import ABOUT, Page, write_run

from samplewise.report.page import write_report


@pytest.fixture
def report(tmp_path):
    """Function that writes a run directory and returns its report as a Page."""

    def make(lines, about=ABOUT, after=""):
        write_run(tmp_path, lines, about, after)
        return Page(write_report(tmp_path).read_text(encoding="utf-8"))

    return make
