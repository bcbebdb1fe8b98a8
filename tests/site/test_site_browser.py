"""The documentation site in a browser, opened from files as a reader without a network does."""

from importlib.metadata import version
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import url2pathname

import pytest
from browsing import LAPTOP, PHONE, chromium

SITE = Path(__file__).parents[2] / "build" / "site"
PAGES = sorted(SITE.rglob("*.html"))
WIDER_THAN_THE_SCREEN = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
VERSION = "return document.querySelector('.sidebar-brand-text').innerText"

pytestmark = pytest.mark.site


@pytest.fixture(scope="module")
def browser():
    with chromium() as opened:
        yield opened


def found(browser, word):
    """Titles and addresses of what the search finds."""
    browser.show(SITE / "search.html")
    browser.run("document.querySelector('.sidebar-search').value = arguments[0]", word)
    browser.run("document.querySelector('.sidebar-search-container').submit()")
    browser.until(lambda: "found" in (browser.texts(".search-summary") or [""])[0])
    return browser.run("return [...document.querySelectorAll('#search-results .search li a')].map(a => a.href)")


def test_there_are_pages():
    assert {SITE / "index.html", SITE / "quick-start.html", SITE / "reference" / "transforms.html"} <= set(PAGES)


def test_the_search_finds_clip(browser):
    addresses = found(browser, "clip")
    assert any("reference/transforms.html#samplewise.clip" in address for address in addresses)
    assert any("/questions.html" in address for address in addresses)
    assert browser.complaints() == []


@pytest.mark.parametrize(
    ("query", "page"),
    [
        ("one sample at a time", "tutorials/one-sample"),
        ("minibatch", "snippets"),
        ("per-example gradients", "gradients"),
        ("per-instance gradients", "gradients"),
        ("online learning", "online"),
        ("class imbalance", "how-to"),
        ("noisy labels", "tutorials/wrong-labels"),
        ("tabular", "quick-start"),
        ("notebook", "tutorials/first-hour"),
        ("GradientTape", "snippets"),
        ("Catalyst", "trainer"),
        ("functorch", "migration/vmap"),
        ("saliency", "how-to"),
        ("NumPy", "snippets"),
        ("train on a single sample", "snippets"),
        ("a flexible training loop", "snippets"),
    ],
)
def test_words_that_people_use_lead_to_their_page(browser, query, page):
    assert any(f"/{page}.html" in address for address in found(browser, query)[:3])
    assert browser.texts("#search-results .context")[0]


def test_anchors_of_the_search_exist(browser):
    browser.show(SITE / "search.html")
    entries = browser.run("return window.SEARCH_INDEX.map(entry => [entry.page, entry.anchor])")
    texts = {page: (SITE / page).read_text(encoding="utf-8") for page, _ in entries}
    assert [(page, anchor) for page, anchor in entries if anchor and f'id="{anchor}"' not in texts[page]] == []


def test_the_search_finds_a_word_of_the_text(browser):
    assert any("/privacy.html" in address for address in found(browser, "Poisson"))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [LAPTOP, PHONE], ids=["laptop", "phone"])
def test_pages_fit_the_screen_and_print_no_message(browser, size, dark):
    wide, noisy = [], []
    for path in PAGES:
        browser.show(path, size, dark)
        if browser.run(WIDER_THAN_THE_SCREEN) > 0:
            wide.append(path.name)
        if browser.complaints():
            noisy.append(path.name)
    assert (wide, noisy) == ([], [])


def test_no_code_is_cut_off_on_a_laptop(browser):
    """Scripts and sources have lines of 120 characters, and signatures wrap."""
    cut = []
    for path in PAGES:
        if path.relative_to(SITE).parts[0] not in ("scripts", "_modules"):
            browser.show(path)
            wide = "return [...document.querySelectorAll('article pre')].some(e => e.scrollWidth > e.clientWidth)"
            cut += [path.name] * browser.run(wide)
    assert cut == []


def test_the_sidebar_is_folded_into_groups(browser):
    browser.show(SITE / "step.html")
    is_open = browser.run("return [...document.querySelectorAll('.sidebar-tree details')].map(e => e.open)")
    captions = browser.run("return [...document.querySelectorAll('.sidebar-tree summary')].map(e => e.textContent)")
    assert [caption for caption, shown in zip(captions, is_open, strict=True) if shown] == ["Start", "How-to"]
    assert len(captions) == 8


def test_the_start_page_shows_how_to_install_and_where_to_start(browser):
    """On the first screen of a laptop."""
    browser.show(SITE / "index.html")
    bottom = "return arguments[0].getBoundingClientRect().bottom"
    assert browser.run(bottom, browser.one(".buttons a[href='quick-start.html']")) < LAPTOP[1]
    assert browser.run(bottom, browser.one("article pre")) < LAPTOP[1]
    assert "pip install" in browser.texts("article pre")[0]


def test_the_theme_follows_the_system(browser):
    colors = []
    for dark in (False, True):
        browser.show(SITE / "index.html", dark=dark)
        colors.append(browser.run("return getComputedStyle(document.body).backgroundColor"))
    assert len(set(colors)) == 2


def test_the_header_has_the_version(browser):
    browser.show(SITE / "index.html")
    assert browser.run(VERSION) == f"samplewise {version('samplewise')}"


def test_names_link_to_their_entry_and_entries_to_their_source(browser):
    browser.show(SITE / "step.html")
    assert browser.all("a[href='reference/training-steps.html#samplewise.Step']")
    browser.show(SITE / "reference" / "training-steps.html")
    assert browser.all("a[href='../_modules/samplewise/step/step.html#Step']")


def test_code_of_two_libraries_is_side_by_side_on_a_laptop_and_stacked_on_a_phone(browser):
    tops = {}
    for size in (LAPTOP, PHONE):
        browser.show(SITE / "migration" / "opacus.html", size)
        script = "return [...document.querySelectorAll('.columns')[0].children].map(e => e.getBoundingClientRect().top)"
        tops[size] = browser.run(script)
    assert tops[LAPTOP][0] == tops[LAPTOP][1]
    assert tops[PHONE][0] < tops[PHONE][1]


def test_the_notebook_can_be_downloaded(browser):
    browser.show(SITE / "tutorials" / "first-hour.html")
    (address,) = browser.run("return [...document.querySelectorAll('article a.download')].map(a => a.href)")
    notebook = Path(__file__).parents[2] / "docs" / "tutorials" / "first-hour.ipynb"
    assert Path(url2pathname(urlparse(address).path)).read_bytes() == notebook.read_bytes()


def test_pictures_are_loaded(browser):
    """A picture that is missing has no width."""
    for path in PAGES:
        browser.show(path)
        assert browser.run("return [...document.images].filter(i => !i.naturalWidth).map(i => i.src)") == [], path
