"""The page of samplewise attribute: content, and its look in Chromium."""

import json

import pytest
import torch
from browsing import LAPTOP, PHONE, chromium
from pages import Page, picture

from samplewise.attribution import evaluate
from samplewise.report.attribution import (
    AttributionPage,
    ShownQuery,
    ShownSample,
    Trust,
    attribution_page,
    interpretation,
    read_trust,
)
from samplewise.report.html import write
from samplewise.report.previews import Previews

EVIL = """</style><script>window.hacked=1</script><img src=x onerror="window.hacked=2">"""
TRUST = Trust(0.33, 0.01, 0.8, 30, 50, {"random": 0.0, "nearest pixels": 0.12})
CLASSES = ["cat", "dog", EVIL]


def content(**changes):
    highest = [ShownSample(k, 0.5 + k, 0.25 / (k + 1)) for k in range(5)]
    lowest = [ShownSample(10 + k, 2.0, -0.125) for k in range(5)]
    entries = {str(k): {"label": str(k % 3), "image": picture(8, 8)} for k in range(20)}
    given = {
        "title": f"Attribution: {EVIL}",
        "summary": "TracIn influence at 2 checkpoints of digits",
        "method": "TracIn influence",
        "effect": "training on the sample lowers the loss of the query",
        "shown": [ShownQuery(ShownSample(k, 1.5, prediction=1), highest, lowest) for k in (3, 7)],
        "count": 2,
        "samples": 1437,
        "train": Previews(entries, classes=CLASSES),
        "queries": Previews({"3": {"label": "0", "text": "words " * 60}, "7": {"label": "1"}}, classes=CLASSES),
        "settings": {"method": "influence", "queries": "3, 7"},
        "trust": None,
        "place": "runs/digits/evaluate/lds.json",
    }
    return AttributionPage(**{**given, **changes})


def page(**changes):
    return Page(attribution_page(content(**changes)))


def card(found, name):
    """Text of a card from its name on, up to the next one."""
    return found.text.partition(name)[2].partition("sample")[0]


def test_queries_with_label_prediction_and_loss():
    found = page()
    assert found.title == f"Attribution: {EVIL}"
    assert "Query 3" in found.text and "Query 7" in found.text
    assert "query 3label cat ●predicted dog ▲loss1.500" in found.text
    # The prediction of query 7 is its label.
    assert "query 7label dog ●predicted dog ●loss1.500" in found.text
    assert [value for name, value in found.attributes if name == "id"] == [
        "how-to-read-the-scores",
        "query-3",
        "query-7",
        "configuration",
    ]


def test_training_samples_with_score_label_and_loss():
    found = page()
    assert card(found, "sample 0").startswith("+0.2500label cat ●loss0.5000")
    assert card(found, "sample 1").startswith("+0.1250label dog ▲loss1.500")
    assert card(found, "sample 10").startswith("\N{MINUS SIGN}0.1250label dog ▲loss2.000")
    assert card(found, "sample 2").startswith(f"+0.0833label {EVIL}loss2.500")
    assert found.html.count("data:image/png") == 20


def test_labels_that_agree_with_the_query_have_a_color_and_a_mark():
    """Marks are for readers who do not see the colors."""
    query_3, query_7 = page().html.split('id="query-3"')[1].split('id="query-7"')
    assert query_3.count('<b class="label same-label" title="the label of the query">label cat ●</b>') == 1 + 3
    assert query_3.count('<b class="label same-prediction" title="the prediction of the query">label dog ▲</b>') == 4
    assert query_7.count("label dog ●</b>") == 1 + 4 and "▲" not in query_7


def test_the_legend_of_labels():
    legend = (
        "Labels of training samples: ● the label of the query; ▲ the prediction of the query, if it is another class."
    )
    assert legend in page().text
    assert "Labels of training samples" not in page(train=Previews({}), queries=Previews({})).text


def test_sign_and_limits_are_explained():
    found = page()
    assert "Positive: helps. By TracIn influence, training on the sample lowers the loss of the query." in found.text
    assert "Negative: harms" in found.text
    assert "they do not prove that a sample caused a prediction" in found.text


def test_quality_that_was_not_measured():
    found = page()
    assert "not measured" in found.text
    assert "Write the result with lds(...).save('runs/digits/evaluate/lds.json') and run" in found.text


def test_measured_quality():
    found = page(trust=TRUST)
    assert found.tables["LDS ± standard error, over 30 queries and 50 subsets"] == [
        ["measured scores", "0.330 ± 0.010"],
        ["random", "0.000"],
        ["nearest pixels", "0.120"],
        ["noise ceiling", "0.800"],
    ]
    assert "0.33 ± 0.01" in found.text
    assert interpretation(TRUST) in found.text
    assert "The values are those in runs/digits/evaluate/lds.json; they hold for scores of the same" in found.text


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {},
            "better than nearest pixels (0.12): they reach an LDS of 0.33, 41% of what the noise of retraining allows.",
        ),
        ({"ceiling": None}, "better than nearest pixels (0.12): they reach an LDS of 0.33. They rank groups"),
        ({"baselines": {"random": -0.01}}, "better than chance: they reach an LDS of 0.33, 41%"),
        ({"baselines": {}, "mean": 0.015}, "not clearly better than chance: do not draw conclusions"),
        ({"mean": 0.13}, "not clearly better than nearest pixels (0.12): do not draw conclusions"),
    ],
)
def test_interpretation(changes, sentence):
    assert sentence in interpretation(TRUST._replace(**changes))


def test_more_queries_than_the_page_shows():
    assert "The page shows the first 2 of 500 queries; the scores of all are in scores.parquet." in page(count=500).text


def test_all_scores_zero():
    zero = [ShownQuery(ShownSample(3, 1.5), [ShownSample(0, 1.0, 0.0)], [])]
    assert "width: 0%" in page(shown=zero).html


@pytest.mark.parametrize("repeats", [1, 2])
def test_read_what_lds_has_saved(tmp_path, repeats):
    chosen = evaluate.subsets(6, 10)
    outcomes = torch.randn(repeats, 10, 2)
    found = evaluate.lds(torch.randn(2, 6), chosen, outcomes, baselines={"the loss": torch.randn(2, 6)})
    found.save(tmp_path / "lds.json")
    trust = read_trust(tmp_path / "lds.json")
    assert trust[:5] == (found.mean, found.standard_error, found.ceiling, 2, 10)
    assert trust.baselines == {name: each.mean for name, each in found.baselines.items()}
    assert (trust.ceiling is None) == (repeats == 1)
    assert list(trust.baselines) == ["random", "the loss"]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", *(json.dumps({**TRUST._asdict(), **broken}) for broken in (
        {"mean": "0.3"}, {"mean": float("nan")}, {"subsets": 1.5}, {"baselines": [1]}, {"baselines": {"a": None}},
    ))],
)  # fmt: skip
def test_trust_that_cannot_be_read(tmp_path, text):
    path = tmp_path / "lds.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"lds\.json must be the JSON file that LDS\.save .* writes, with mean"):
        read_trust(path)


@pytest.fixture(scope="module")
def browser():
    with chromium() as session:
        yield session


@pytest.mark.parametrize(
    ("size", "dark"),
    [
        pytest.param(LAPTOP, False, id="laptop, light"),
        pytest.param(LAPTOP, True, id="laptop, dark", marks=pytest.mark.slow),
        pytest.param(PHONE, False, id="phone, light", marks=pytest.mark.slow),
        pytest.param(PHONE, True, id="phone, dark"),
    ],
)
def test_in_a_browser(browser, tmp_path, size, dark):
    browser.show(write(attribution_page(content(trust=TRUST)), tmp_path / "page.html"), size, dark)
    assert browser.run("return document.documentElement.scrollWidth") <= size[0]
    shade = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert (shade == "rgb(16, 20, 25)") == dark
    assert browser.run("return window.hacked") is None
    names = browser.texts("#query-3 li strong")
    assert names == [f"sample {k}" for k in (*range(5), *range(10, 15))]
    # Cards stand side by side, and a picture is visible in each.
    tops = browser.run("return [...document.querySelectorAll('#query-3 li')].map(e => e.getBoundingClientRect().top)")
    assert tops[0] == tops[1]
    assert browser.run("return [...document.images].every(image => image.naturalWidth > 0 && image.clientWidth > 60)")
    browser.click("nav a[href='#query-7']")
    assert browser.run("return document.querySelector('#query-7').getBoundingClientRect().top") < size[1]
    assert browser.complaints() == []
