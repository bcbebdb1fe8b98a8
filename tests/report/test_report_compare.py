"""`write_comparison`: several runs on one page. `watch`: rewriting pages during training."""

import json
from math import nan

import pytest
from pages import ABOUT, WHOLE, Page, picture, train, validation, visits, write_ledger, write_previews, write_run

from samplewise.report import compare
from samplewise.report.compare import write_comparison
from samplewise.report.page import watch, write_report
from samplewise.report.run_log import read_run


def about(name, **settings):
    return {**ABOUT, "name": name, "settings": {**ABOUT["settings"], **settings}}


def compared(tmp_path, *runs):
    return Page(write_comparison(runs, tmp_path / "both.html").read_text(encoding="utf-8"))


@pytest.fixture
def two(tmp_path):
    """Two runs: the second has a larger batch, another loss and one more metric."""
    other = [train(1, loss=4.0), train(6, loss=1.0), validation(6, loss=1.5, accuracy=0.875, extra=1.0)]
    return (
        write_run(tmp_path / "first", WHOLE, about("first")),
        write_run(tmp_path / "second", other, about("second", batch_size=512, warmup=3)),
    )


def test_different_settings_come_first(tmp_path, two):
    shown = compared(tmp_path, *two)
    assert shown.title == "first and second"
    assert shown.tables["Different settings"] == [
        ["", "first", "second"],
        ["settings.batch_size", "256", "512"],
        ["settings.warmup", "–", "3"],
    ]
    same = dict(shown.tables["Equal settings"][1:])
    assert same["settings.augment"] == "true" and same["torch"] == "2.13.0"
    assert list(shown.tables).index("Different settings") == 0


def test_curves_are_overlaid(tmp_path, two):
    shown = compared(tmp_path, *two)
    assert len(shown.charts["Train loss"]) == 2 and len(shown.charts["Validation: gap"]) == 1
    assert list(shown.charts)[:4] == ["Train loss", "Validation: loss", "Validation: accuracy", "Validation: gap"]
    assert "Validation: extra" in shown.charts and shown.text.count("second") > len(shown.charts)
    assert "Ended at update 4: all epochs done" in shown.text and "Not finished: the log ends at update 6" in shown.text


def test_only_the_first_learning_rate_is_drawn(tmp_path, two):
    assert "Only the learning rate" not in compared(tmp_path, *two).text
    write_run(two[0], [train(k, lr=[0.1, 0.2 * k]) for k in (1, 2)], about("first"))
    shown = compared(tmp_path, *two)
    assert len(shown.charts["Learning rate"]) == 2
    assert "Only the learning rate of the first parameter group is drawn." in shown.text


def test_best_values_side_by_side(tmp_path, two):
    rows = compared(tmp_path, *two).tables["Best values"]
    assert rows[:4] == [
        ["", "", "first", "second"],
        ["train loss", "lowest", "1.500", "1.000"],
        ["validation loss", "lowest", "2.000", "1.500"],
        ["validation accuracy", "highest", "0.7500", "0.8750"],
    ]
    assert ["validation extra", "lowest", "–", "1.000"] in rows


def test_suspects_of_both_and_of_one_only(tmp_path, two):
    losses = [float(k) for k in range(200)]
    write_ledger(two[0], visits(list(range(200)), losses))
    losses[199], losses[0] = 0.5, 999.0
    write_ledger(two[1], visits(list(range(200)), losses))
    write_previews(two[1], {"198": {"image": picture(4, 4)}})
    shown = compared(tmp_path, *two)
    assert "19 samples are suspect in both runs, with the rank in each run." in shown.text
    assert "198first2second2" in shown.text and shown.tags.count("img") == 1
    assert "Only in first: 1 of 20, by loss199" in shown.text
    assert "Only in second: 1 of 20, by loss0" in shown.text


def test_suspects_need_two_ledgers(tmp_path, two):
    write_ledger(two[0], visits([1, 2], [1.0, 2.0]))
    assert "Comparing suspects needs two runs with a ledger." in compared(tmp_path, *two).text


def test_long_lists_of_suspects_are_shortened(tmp_path, two, monkeypatch):
    monkeypatch.setattr(compare, "MAX_CARDS", 3)
    for run in two:
        write_ledger(run, visits(list(range(100)), [float(k) for k in range(100)]))
    shown = compared(tmp_path, *two)
    assert "12 samples are suspect in both runs; the first 3 are shown" in shown.text
    assert shown.attributes.count(("class", "card")) == 3


def test_runs_with_equal_names_are_distinguished(tmp_path):
    places = [write_run(tmp_path / name, WHOLE, about("same")) for name in ("a", "b")]
    first, second, third = compare.names([read_run(place) for place in (*places, places[0])])
    assert second == f"same ({places[1]})"
    assert (first, third) == (f"same ({places[0]}) #1", f"same ({places[0]}) #3")


def test_three_runs(tmp_path, two):
    third = write_run(tmp_path / "third", [train(1), train(2)], about("third"))
    shown = compared(tmp_path, *two, third)
    assert shown.title == "3 runs" and len(shown.charts["Train loss"]) == 3


def test_one_common_suspect(tmp_path, two):
    write_ledger(two[0], visits([*range(12)], [1.0] * 12))
    write_ledger(two[1], visits([*range(11, 23)], [1.0] * 12))
    assert "1 sample is suspect in both runs, with the rank in each run." in compared(tmp_path, *two).text


def test_a_dozen_runs_have_a_color_or_a_dash_each(tmp_path):
    runs = [write_run(tmp_path / f"{k}", [train(1, loss=k + 1.0), train(2)], about(f"run {k}")) for k in range(12)]
    shown = compared(tmp_path, *runs)
    styles = {value for name, value in shown.attributes if name == "class" and value.startswith("line-")}
    assert len(shown.charts["Train loss"]) == 12 and len(styles) == 12


def test_warnings_name_their_run(tmp_path, two):
    write_run(two[0], [train(1, loss=nan), train(2)], {**about("first"), "samplewise": "9.9"})
    (two[0] / "previews.json").write_text("no JSON")
    text = compared(tmp_path, *two).text
    assert "first: Train loss: 1 of 2 values are NaN or infinite" in text
    assert "first: The run was written by samplewise 9.9" in text and "first: previews.json cannot be read" in text
    assert "second: " not in text


def test_html_in_names_is_escaped(tmp_path, two):
    evil = "</script><script>alert(1)</script>\"'<b>"
    write_run(two[0], WHOLE, about(evil, **{evil: evil}))
    for run in two:
        write_ledger(run, visits([evil, "b"], [2.0, 1.0]))
        write_previews(run, {evil: {"text": evil}, "b": {"values": {evil: evil}}})
    shown = compared(tmp_path, *two)
    assert "script" not in shown.tags and shown.title == f"{evil} and second"
    assert [f"settings.{evil}", evil, "–"] in shown.tables["Different settings"]


def test_empty_runs(tmp_path):
    runs = [write_run(tmp_path / name, [], about(name)) for name in "ab"]
    assert "No data to draw yet." in compared(tmp_path, *runs).text


def test_default_path_of_a_comparison(tmp_path, two, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(write_comparison(two)) == "comparison.html"
    assert (tmp_path / "comparison.html").exists()


# ------------------------------------------------------------------------------------------- watching


class Clock:
    """Replacement of time.sleep that changes the run instead."""

    def __init__(self, *events):
        self.events, self.waited = list(events), []

    def __call__(self, seconds):
        self.waited.append(seconds)
        self.events.pop(0)()


def append(run, line):
    with (run / "log.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def test_watch_until_a_run_ends(tmp_path):
    run = write_run(tmp_path / "run", WHOLE[:4])
    page, messages, seen = run / "report.html", [], []

    def look_and(line):
        def happens():
            seen.append(Page(page.read_text()))
            if line:
                append(run, line)

        return happens

    clock = Clock(look_and(train(3, epoch=1)), look_and(None), look_and(WHOLE[-1]))
    watch([run], None, messages.append, 2.5, clock)
    assert clock.waited == [2.5] * 3
    assert [dict(shown.tables["Run"])["updates"] for shown in seen] == ["2", "3", "3"]
    assert all(("data-reload", "2.5") in shown.attributes for shown in seen)
    assert messages == [
        f"{page} is updated during training and reloads itself. Stop with Ctrl-C.",
        f"Training has ended: {page} is not updated any more.",
    ]
    last = Page(page.read_text())
    assert "Ended at update 4" in last.text and "script" not in last.tags
    assert [path.name for path in run.iterdir() if "partial" in path.name] == []


def test_watch_writes_only_after_changes(tmp_path):
    run = write_run(tmp_path / "run", WHOLE[:4])
    stamps = []

    def look():
        stamps.append((run / "report.html").stat().st_mtime_ns)

    events = [look, look, lambda: (look(), write_ledger(run, visits([1, 2], [1.0, 2.0]))), look]
    watch([run], None, [].append, 1.0, Clock(*events, lambda: append(run, WHOLE[-1])))
    assert stamps[0] == stamps[1] == stamps[2] < stamps[3]


def test_ctrl_c_writes_a_page_that_does_not_reload(tmp_path):
    run, messages = write_run(tmp_path / "run", WHOLE[:4]), []

    def stop():
        raise KeyboardInterrupt

    watch([run], tmp_path / "page.html", messages.append, 1.0, Clock(stop))
    assert messages[-1] == f"Stopped by Ctrl-C: {tmp_path / 'page.html'} is not updated any more."
    assert "data-reload" not in (tmp_path / "page.html").read_text()


def test_watch_several_runs_until_all_have_ended(tmp_path, two):
    messages = []
    watch(two, tmp_path / "both.html", messages.append, 1.0, Clock(lambda: append(two[1], WHOLE[-1])))
    assert len(messages) == 2 and Page((tmp_path / "both.html").read_text()).title == "first and second"


def test_watch_returns_at_once_if_the_run_has_ended(tmp_path):
    run, messages = write_run(tmp_path / "run"), []
    watch([run], None, messages.append, 1.0, Clock())
    assert messages == [f"Training has ended: {run / 'report.html'} is not updated any more."]


def test_pages_are_written_atomically(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run")
    write_report(run)
    before = (run / "report.html").read_text()
    append(run, train(5, epoch=2))
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("no space")))
    with pytest.raises(OSError, match="no space"):
        write_report(run)
    assert (run / "report.html").read_text() == before and not (run / ".report.html.partial").exists()
