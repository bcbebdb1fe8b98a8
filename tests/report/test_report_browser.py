"""The page in Chromium: all controls are used, and the console must have no warnings or errors."""

import pyarrow as pa
import pytest
from browsing import FIND_SUSPECT, LAPTOP, PHONE, chromium
from pages import ABOUT, WHOLE, picture, train, visits, write_ledger, write_previews, write_run

from samplewise.report import scatter
from samplewise.report.compare import write_comparison
from samplewise.report.page import write_report

N = 400
EVIL = (
    """</script><script>window.hacked=1</script><img src=x onerror="window.hacked=2">'"`${window.hacked=3}\u2028&lt;"""
)


@pytest.fixture(scope="module")
def session():
    with chromium() as browser:
        yield browser


@pytest.fixture
def browser(session):
    session.complaints()
    yield session
    assert session.complaints() == []


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Report with all sections. The last sample is the most suspicious by loss, the first by margin."""
    directory = tmp_path_factory.mktemp("runs") / "digits"
    more = [train(k, phases={"data": 0.1, "forward": 0.2}, memory=2**28) for k in (5, 6)]
    more += [{"kind": "noise", "epoch": 0, "update": k, "scale": 100.0 * k, "batch": 64} for k in (1, 6)]
    more += [{"kind": "layers", "epoch": 0, "update": k, "norms": {"first": 1.0, "last": 0.1 * k}} for k in (1, 6)]
    write_run(directory, [*WHOLE[:-1], *more])
    losses = [*(0.01 * 1.01**k for k in range(N - 2)), 5.0, 20.0]
    columns = {"label": pa.array([k % 10 for k in range(N)]), "margin": pa.array([float(k) for k in range(N)])}
    columns["prediction"] = pa.array([(k + k % 2) % 10 for k in range(N)])  # odd samples are predicted wrongly
    write_ledger(directory, *(visits(list(range(N)), losses, epoch, **columns) for epoch in range(2)))
    texts = {str(k): {"text": f"the words of {k}"} for k in range(360, 399)}
    classes = [f"class {k}" for k in range(10)]
    write_previews(
        directory,
        {"399": {"image": picture(8, 8)}, "0": {"values": {"age": 3}, "name": "0.png"}, **texts},
        classes=classes,
    )
    return directory


@pytest.fixture(scope="module")
def page(run):
    return write_report(run)


def pinned(browser):
    return browser.texts("#pinned h3")


def cards(browser):
    return browser.texts("#gallery strong")


@pytest.mark.parametrize(
    ("size", "dark"),
    [
        pytest.param(LAPTOP, False, id="laptop, light"),
        pytest.param(LAPTOP, True, id="laptop, dark", marks=pytest.mark.slow),
        pytest.param(PHONE, False, id="phone, light", marks=pytest.mark.slow),
        pytest.param(PHONE, True, id="phone, dark"),
    ],
)
def test_choose_a_score_and_pin_a_card(browser, page, size, dark):
    browser.show(page, size, dark)
    assert browser.run("return document.documentElement.scrollWidth") <= size[0]
    shade = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert (shade == "rgb(16, 20, 25)") == dark

    assert cards(browser)[:2] == ["0 0.png", "1"] and len(cards(browser)) == 12  # by margin
    assert browser.texts("#gallery li:nth-child(2) .card > :not(.place)") == [
        "1", "label class 1", "predicted class 2", "margin\n1\nloss\n0.0101\nnorm\n0.0202",
    ]  # fmt: skip
    assert browser.texts("#gallery .wrong") == [f"predicted class {(k + 1) % 10}" for k in range(1, 12, 2)]
    browser.click("[data-score='1']")
    assert cards(browser)[:2] == ["399", "398"]
    assert browser.texts("#gallery li:nth-child(1) dl") == ["loss\n20\nnorm\n40"]
    browser.click("[data-score='3']")
    assert browser.texts("#gallery li:nth-child(1) dl") == ["self-influence\n1,600\nloss\n20\nnorm\n40"]
    browser.click("[data-score='1']")
    assert browser.texts("#scores [aria-pressed='true']") == ["loss"]

    browser.click("[data-sample='399']")
    assert pinned(browser) == ["Sample 399"]
    assert browser.one("#pinned img").get_attribute("naturalWidth") == "8"
    assert browser.texts("#gallery [aria-pressed='true'] strong") == ["399"]

    browser.click("[data-sample='398']")
    assert pinned(browser) == ["Sample 398"] and browser.texts("#pinned blockquote") == ["the words of 398"]

    browser.point(*browser.suspect(), click=True, finger=size == PHONE)
    browser.until(lambda: pinned(browser) == ["Sample 399"])
    browser.click("#to-gallery")
    assert browser.run("return document.activeElement.querySelector('strong').textContent") == "399"
    browser.click("#let-go")
    assert pinned(browser) == [] and "Click a point or a card" in browser.one("#pinned").text


@pytest.mark.parametrize("size", [LAPTOP, PHONE], ids=["laptop", "phone"])
def test_suspects_come_first(browser, page, size):
    """A card is on the first screen; curves and settings are below the plot."""
    browser.show(page, size)
    assert browser.texts("nav a")[:2] == ["Suspects", "Curves"] and browser.texts("nav a")[-1] == "Configuration"
    places = ("#gallery .card", "#plot", "#curves", "#configuration")
    tops = [browser.run("return arguments[0].getBoundingClientRect().top", browser.one(css)) for css in places]
    assert tops[0] < size[1] and tops == sorted(tops)


def test_hovering_shows_the_nearest_sample(browser, page):
    browser.show(page)
    assert not browser.one("#tip").is_displayed()
    browser.point(*browser.suspect())
    names = browser.texts("#tip dt")
    assert browser.one("#tip").is_displayed() and browser.one("#tip strong").text.startswith("Sample ")
    assert names[:5] == ["label", "prediction", "loss", "gradient norm", "margin"] and "visits" in names
    browser.point(70, 15)  # no sample nearby
    assert not browser.one("#tip").is_displayed()


def test_keyboard_navigation(browser, page):
    browser.show(page)
    browser.press("#plot", "ARROW_RIGHT", "ARROW_RIGHT", "ARROW_RIGHT", "ARROW_LEFT", "ENTER")
    assert pinned(browser) == ["Sample 1"]  # the second by margin
    browser.press("#plot", "END", "ENTER")
    assert pinned(browser) == ["Sample 39"]
    browser.press("#plot", "ESCAPE")
    assert pinned(browser) == [] and not browser.one("#tip").is_displayed()
    browser.press("[data-sample='0']", "ENTER")
    assert pinned(browser) == ["Sample 0"] and browser.texts("#pinned dl:first-of-type dt") == ["age"]


def test_show_more_cards(browser, page):
    browser.show(page)
    for left in (28, 16, 4):
        assert browser.one("#more").text == f"Show more ({left} left)"
        browser.click("#more")
    assert len(cards(browser)) == 40 and not browser.one("#more").is_displayed()


def test_every_link_leads_to_its_section(browser, page):
    browser.show(page, PHONE)
    links = [link.get_attribute("href").partition("#")[2] for link in browser.all("nav a")]
    assert len(links) == 10
    for anchor in links:
        browser.run("arguments[0].click()", browser.one(f"nav a[href='#{anchor}']"))
        top = browser.run("return document.getElementById(arguments[0]).getBoundingClientRect().top", anchor)
        end = browser.run("return innerHeight + scrollY >= document.documentElement.scrollHeight - 1")
        assert 0 < top < 200 or end, anchor


def test_colors_follow_the_device_while_the_page_is_open(browser, page):
    browser.show(page)
    light = browser.suspect()
    scheme = {"name": "prefers-color-scheme", "value": "dark"}
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    browser.until(lambda: browser.run(FIND_SUSPECT) == light)  # found by its current color


def test_counts_of_many_samples(browser, run, tmp_path, monkeypatch):
    monkeypatch.setattr(scatter, "MAX_SAMPLES", 100)
    browser.show(write_report(run, tmp_path / "many.html"))
    browser.point(*browser.suspect(), click=True)
    assert pinned(browser)
    middle = browser.run("const c = document.getElementById('plot'); return [c.clientWidth, c.clientHeight]")
    browser.point(middle[0] / 2 + 20, middle[1] / 2 - 15)
    assert browser.texts("#tip dt") == ["samples", "loss", "gradient norm"]
    assert " to " in browser.texts("#tip dd")[1]


def test_reloading_keeps_the_state_of_the_page(browser, run, tmp_path):
    browser.show(write_report(run, tmp_path / "live.html", reload=0.8))
    browser.run("""
        document.querySelector("[data-score='1']").click();
        document.querySelector("[data-sample='398']").click();
        window.old = true;
        scrollTo(0, 700);""")
    left = [700, "Sample 398", "399"]
    seen = """
        if (window.old || document.readyState !== "complete") return null;
        const text = css => document.querySelector(css).innerText;
        return [scrollY, text("#pinned h3"), text("#gallery strong")]"""
    browser.until(lambda: browser.run(seen) == left)


@pytest.mark.parametrize("size", [LAPTOP, PHONE], ids=["laptop", "phone"])
def test_a_comparison(browser, run, tmp_path, size):
    other = write_run(tmp_path / "other", WHOLE, {**ABOUT, "name": "other", "settings": {"batch_size": 1}})
    write_ledger(other, visits(list(range(N)), [1.0 + k for k in range(N)]))
    browser.show(write_comparison([run, other], tmp_path / "both.html"), size)
    assert browser.run("return document.documentElement.scrollWidth") <= size[0]
    assert not browser.one("details table").is_displayed()
    browser.click("summary")
    assert browser.one("details table").is_displayed()
    assert browser.texts("#suspects h2") == ["Suspects"] and len(browser.all("figure svg")) > 5


CUT = """  // facts that a card does not show whole
    return [...document.querySelectorAll(".card dl")].filter(list =>
      !list.nextElementSibling && list.scrollHeight > list.clientHeight + 1).map(list => list.innerText)"""


@pytest.mark.parametrize("size", [LAPTOP, PHONE], ids=["laptop", "phone"])
def test_cards_do_not_cut_numbers(browser, tmp_path, size):
    names = [f"run {k}" for k in range(9)]
    runs = [write_run(tmp_path / name, WHOLE, {**ABOUT, "name": name}) for name in names]
    for run in runs:
        write_ledger(run, visits([1, 2], [0.1234567, 2.0]))
    rows = {"age": -1.534567, "income": -0.549744, "city": "Ulm"}
    write_previews(runs[0], {"1": {"values": rows}, "2": {"values": rows}})
    browser.show(write_comparison(runs, tmp_path / "all.html"), size)
    assert browser.run(CUT) == []
    browser.show(write_report(runs[0]), size)
    assert browser.run(CUT) == []
    write_previews(runs[0], {"1": {"image": picture(8, 8)}})
    browser.show(write_report(runs[0]), size)
    assert browser.run(CUT) == []


BROKEN = """  // words of a card that continue in a second line
    const words = [], range = document.createRange();
    for (const card of document.querySelectorAll(".card")) {
      const texts = document.createTreeWalker(card, NodeFilter.SHOW_TEXT);
      while (texts.nextNode())
        for (const word of texts.currentNode.data.matchAll(/[^\\s\\-/_.]+/g)) {
          range.setStart(texts.currentNode, word.index);
          range.setEnd(texts.currentNode, word.index + word[0].length);
          if (new Set([...range.getClientRects()].map(part => Math.round(part.top))).size > 1) words.push(word[0]);
        }
    }
    return words"""


@pytest.mark.parametrize("size", [LAPTOP, PHONE], ids=["laptop", "phone"])
@pytest.mark.parametrize("preview", ["image", "text", "values", None])
def test_cards_do_not_break_words(browser, tmp_path, size, preview):
    classes = ["Pullover", "Ankle boot", "hippopotamus", "aquarium_fish"]
    labels = {"label": pa.array([0, 1, 2, 3]), "prediction": pa.array([1, 2, 3, 0])}
    ids = ["12345", "images/train/boots_01.png", "n01440764_10026", "caterpillar"]
    run = write_run(tmp_path / "run")
    write_ledger(run, visits(ids, [1234.567, 0.001234, 3.0, 2.5e-7], margin=pa.array([-12.34] * 4), **labels))
    previews = {
        "image": picture(8, 8),
        "text": "A short review of a refrigerator, overwhelmingly positive",
        "values": {"temperature": -1.534567, "hours-per-week": 40, "marital.status": "Married-civ-spouse"},
    }
    if preview:
        write_previews(run, {name: {preview: previews[preview]} for name in ids}, classes=classes)
    browser.show(write_report(run), size)
    for score in range(4):
        browser.click(f"[data-score='{score}']")
        assert browser.run(BROKEN) == []
        assert (
            browser.run("return [...document.querySelectorAll('.card')].some(e => e.scrollWidth > e.clientWidth)")
            is False
        )
    assert browser.run(CUT) == []


def test_data_is_not_executed(browser, tmp_path):
    lines = [train(k, **{EVIL: 1.0}) for k in (1, 2)]
    lines += [{"kind": "layers", "epoch": 0, "update": k, "norms": {EVIL: 1.0, "b": 2.0}} for k in (1, 2)]
    hostile = write_run(tmp_path / "hostile", lines, {**ABOUT, "name": EVIL, "settings": {EVIL: EVIL}})
    write_ledger(
        hostile, visits([EVIL, "b"], [2.0, 1.0], **{EVIL: pa.array([EVIL, EVIL]), "label": pa.array([EVIL] * 2)})
    )
    write_previews(hostile, {EVIL: {"text": EVIL}, "b": {"values": {EVIL: EVIL}}})
    browser.show(write_report(hostile))
    for sample in (0, 1):
        browser.click(f"[data-sample='{sample}']")
    browser.press("#plot", "ARROW_RIGHT")
    shown = " ".join(EVIL.split())
    assert " ".join(browser.driver.title.split()) == shown and shown in " ".join(browser.one("#gallery").text.split())
    other = write_run(tmp_path / "other", lines, ABOUT)
    write_ledger(other, visits([EVIL, "b"], [2.0, 1.0]))
    hacked = browser.run("return window.hacked")
    browser.show(write_comparison([hostile, other], tmp_path / "both.html"))
    assert hacked is None and browser.run("return window.hacked") is None


def test_injected_scripts_are_refused(session, page):
    session.show(page)
    session.run(
        "const s = document.createElement('script'); s.textContent = 'window.hacked = 1'; document.body.append(s)"
    )
    assert session.run("return window.hacked") is None
    (complaint,) = session.complaints()
    assert "Content Security Policy" in complaint["message"]


def test_a_page_without_samples_has_no_script(browser, tmp_path):
    browser.show(write_report(write_run(tmp_path / "plain")))
    assert browser.all("script") == [] and len(browser.all("figure svg")) > 4


@pytest.fixture(scope="module")
def mapped(tmp_path_factory):
    """Run with confidences: sample k has the confidence k / N, and the label k % 10."""
    directory = tmp_path_factory.mktemp("runs") / "map"
    write_run(directory, [])
    columns = {"label": pa.array([k % 10 for k in range(N)]), "margin": pa.array([float(k) for k in range(N)])}
    columns["confidence"] = pa.array([k / N for k in range(N)])
    for_epochs = [
        {**columns, "confidence": pa.array([(k + epoch * (k % 7)) / N for k in range(N)])} for epoch in (0, 1)
    ]
    write_ledger(directory, *(visits(list(range(N)), [1.0] * N, e, **more) for e, more in enumerate(for_epochs)))
    write_previews(directory, {"3": {"text": "the words of 3"}}, classes=[f"class {k}" for k in range(10)])
    return directory


def details(browser):
    return browser.texts("#map-pinned h3")


def typed(browser, css, value):
    script = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input'))"
    browser.run(script, browser.one(css), value)


def test_search_and_filter_of_the_data_map(browser, mapped):
    browser.show(write_report(mapped))
    assert browser.texts("nav a")[:2] == ["Suspects", "Data map"] and details(browser) == []
    typed(browser, "#search", "3")
    assert browser.one("#matches").text == "1 of 400 samples"  # a whole id
    browser.press("#search", "ENTER")
    assert details(browser) == ["Sample 3"] and browser.texts("#map-pinned blockquote") == ["the words of 3"]
    assert pinned(browser) == ["Sample 3"]
    typed(browser, "#search", "")
    typed(browser, "#label", "class 7")
    assert browser.one("#matches").text == "40 of 400 samples"
    browser.press("#map", "ARROW_RIGHT", "ARROW_RIGHT", "ENTER")  # the second one that the filter finds
    assert details(browser) == ["Sample 17"]
    typed(browser, "#label", "")
    assert browser.one("#matches").text == ""
    browser.press("#map", "ESCAPE")
    assert details(browser) == []


def test_a_cell_of_the_data_map_shows_a_sample(browser, mapped, tmp_path, monkeypatch):
    monkeypatch.setattr(scatter, "MAX_SAMPLES", 100)
    browser.show(write_report(mapped, tmp_path / "many.html"))
    browser.run("document.getElementById('map').scrollIntoView({block: 'center'})")
    title = browser.run("""
    const {grid} = JSON.parse(document.getElementById("samples-data").textContent).map;
    const [column, row, , index] = grid.cells.at(-1);  // far from the suspects
    const canvas = document.getElementById("map"), box = canvas.getBoundingClientRect();
    const left = 58 + (column + .5) / grid.size[0] * (canvas.clientWidth - 70);
    const top = canvas.clientHeight - 42 - (row + .5) / grid.size[1] * (canvas.clientHeight - 52);
    canvas.dispatchEvent(new MouseEvent("click", {clientX: box.left + left, clientY: box.top + top, bubbles: true}));
    return `Sample ${JSON.parse(document.getElementById("samples-data").textContent).ids[index]}`;
    """)
    assert details(browser) == [title] and int(title.removeprefix("Sample ")) > 300
