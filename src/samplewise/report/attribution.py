"""`attribution_page`: queries, the training samples with the highest and lowest scores, and how far to trust them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from samplewise.core.text import plural
from samplewise.report import html
from samplewise.report.previews import Preview, Previews, as_html
from samplewise.report.run_log import is_number

MAX_QUERIES = 100  # on the page
BUDGET = 4_000_000  # characters of the previews of queries, and of those of training samples
LIMITS = (
    "Scores are estimates from gradients at the checkpoints, not the result of an experiment: they do not prove that a "
    "sample caused a prediction, nor what the model would predict without it. Samples that are alike share the credit. "
    "Compare scores within one query; their scale depends on the method, the model and the query."
)
NOT_MEASURED = (
    "Not measured. To measure the quality of these scores, train models on random subsets of the training data and "
    "compare: subsets, retrain and lds of samplewise.attribution.evaluate. Write the result with "
    "lds(...).save({place!r}) and run this command again, or pass its directory with --trust."
)
# Class, mark and meaning of a label on the card of a training sample that agrees with the query.
SAME_LABEL = ("same-label", "●", "the label of the query")
SAME_PREDICTION = ("same-prediction", "▲", "the prediction of the query")
TRUST_HEADING = "<h3>How far to trust them</h3>"
LDS = (
    "LDS: rank correlation between predicted and actual outputs of models that were retrained on random subsets of the "
    "training data. 1 is perfect, 0 is chance. The values are those in {place}; they hold for scores of the same "
    "method, model and data."
)


class Trust(NamedTuple):
    """Linear datamodeling score (LDS) of the scores, measured by retraining.

    ceiling    largest LDS that the noise of retraining allows; None if it was not measured
    baselines  LDS of scores that need no gradients, by name
    """

    mean: float
    standard_error: float
    ceiling: float | None
    queries: int
    subsets: int
    baselines: dict[str, float]


@dataclass(frozen=True)
class ShownSample:
    """Sample on the page. score: None for a query; prediction: class index, or None if it is not known."""

    index: int
    loss: float
    score: float | None = None
    prediction: Any = None


@dataclass(frozen=True)
class ShownQuery:
    """Query with its training samples of highest scores, in descending order, and of lowest, in ascending order."""

    sample: ShownSample
    highest: list[ShownSample]
    lowest: list[ShownSample]

    @property
    def scored(self) -> list[ShownSample]:
        return [*self.highest, *self.lowest]


@dataclass
class AttributionPage:
    """Content of the page.

    method, effect   title of the method, and the meaning of a positive score
    shown, count     the first queries, and the number of all
    samples          number of training samples
    train, queries   previews of training samples and of queries, by index
    trust            None: not measured; `place` is where the page expects it
    """

    title: str
    summary: str
    method: str
    effect: str
    shown: list[ShownQuery]
    count: int
    samples: int
    train: Previews
    queries: Previews
    settings: Mapping[str, Any]
    trust: Trust | None
    place: str
    warnings: list[str] = field(default_factory=list)


def read_trust(path: Path) -> Trust:
    """Read lds.json, as written by `LDS.save`; raises ValueError for other content."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        trust = Trust(**{name: content[name] for name in Trust._fields})
        numbers = [trust.mean, trust.standard_error, *trust.baselines.values()]
        numbers += [] if trust.ceiling is None else [trust.ceiling]
        valid = all(is_number(value) and math.isfinite(value) for value in numbers)
        valid = valid and all(type(count) is int for count in (trust.queries, trust.subsets))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        valid = False
    if not valid:
        raise ValueError(
            f"{path} must be the JSON file that LDS.save of samplewise.attribution.evaluate writes, with "
            f"{', '.join(Trust._fields)}; found other content."
        )
    return trust


def attribution_page(content: AttributionPage) -> str:
    """HTML page of an attribution."""
    shown = content.shown
    of_queries = content.queries.shown([str(query.sample.index) for query in shown], BUDGET)
    train_ids = dict.fromkeys(str(sample.index) for query in shown for sample in query.scored)
    of_train = content.train.shown(train_ids, BUDGET)
    sections = [_query(query, content, of_queries, of_train) for query in shown]
    messages = [*content.warnings, *content.queries.warnings, *content.train.warnings]
    if content.count > len(shown):
        messages.append(
            f"The page shows the first {len(shown)} of {plural(content.count, 'query', 'queries')}; the scores of all "
            "are in scores.parquet."
        )
    trust = content.trust
    tiles = [
        ("queries", f"{content.count:,}"),
        ("training samples", f"{content.samples:,}"),
        ("quality (LDS)", "not measured" if trust is None else f"{trust.mean:.2f} ± {trust.standard_error:.2f}"),
    ]
    head = f'<p class="quiet">{html.text(content.summary)}</p>\n{html.headline_tiles(tiles)}'
    settings = html.Section("Configuration", html.columns(html.value_table("Attribution", content.settings)))
    return html.page(content.title, head, [html.warnings_section(messages), _reading(content), *sections, settings])


# --- how to read and trust the scores ---------------------------------------------------------------------------------


def _reading(content: AttributionPage) -> html.Section:
    meaning = (
        f'<p><b class="helps">Positive: helps.</b> By {html.text(content.method)}, {html.text(content.effect)}. '
        '<b class="harms">Negative: harms</b>, the opposite.</p>'
    )
    legend = ""
    if any(content.train.label(str(sample.index)) for query in content.shown for sample in query.scored):
        label, prediction = (
            f'<b class="{kind}">{mark} {what}</b>' for kind, mark, what in (SAME_LABEL, SAME_PREDICTION)
        )
        legend = (
            f"<p>Labels of training samples: {label}; {prediction}, if it is another class. Others have no mark.</p>"
        )
    return html.Section(
        "How to read the scores",
        f"{meaning}\n{legend}\n{html.note_paragraph(LIMITS)}\n{_trust(content.trust, content.place)}",
    )


def _trust(trust: Trust | None, place: str) -> str:
    if trust is None:
        return f"{TRUST_HEADING}<p>{html.text(NOT_MEASURED.format(place=place))}</p>"
    values = {
        "measured scores": f"{trust.mean:.3f} ± {trust.standard_error:.3f}",
        **{name: f"{value:.3f}" for name, value in trust.baselines.items()},
        "noise ceiling": "not measured" if trust.ceiling is None else f"{trust.ceiling:.3f}",
    }
    counts = f"{plural(trust.queries, 'query', 'queries')} and {plural(trust.subsets, 'subset')}"
    measured = html.value_table(f"LDS ± standard error, over {counts}", values)
    explanation = html.note_paragraph(LDS.format(place=place))
    return f"{TRUST_HEADING}<p>{html.text(interpretation(trust))}</p>{html.columns(measured)}{explanation}"


def interpretation(trust: Trust) -> str:
    """One sentence about an LDS: against its error, the best baseline and the ceiling."""
    best = max(trust.baselines, key=trust.baselines.__getitem__, default=None)
    floor = max(0.0, trust.baselines[best]) if best is not None else 0.0
    beaten = f"{best} ({floor:.2f})" if best is not None and floor > 0 else "chance"
    if trust.mean - 2 * trust.standard_error <= floor:
        return (
            f"The scores are not clearly better than {beaten}: do not draw conclusions about single samples from them."
        )
    share = "" if not trust.ceiling else f", {trust.mean / trust.ceiling:.0%} of what the noise of retraining allows"
    return (
        f"The scores are better than {beaten}: they reach an LDS of {trust.mean:.2f}{share}. They rank groups of "
        "samples; a single sample can still be misjudged."
    )


# --- queries ----------------------------------------------------------------------------------------------------------


def _query(
    query: ShownQuery, content: AttributionPage, of_queries: Mapping[str, Preview], of_train: Mapping[str, Preview]
) -> html.Section:
    index = str(query.sample.index)
    label = content.queries.label(index)
    prediction = None if query.sample.prediction is None else str(content.queries.class_name(query.sample.prediction))
    lines = _label_line("label", label, label, prediction) + _label_line("predicted", prediction, label, prediction)
    lines += html.definition_list([("loss", html.number(query.sample.loss))])
    query_card = _card(f"query {index}", of_queries.get(index, {}), lines)
    largest = max((abs(sample.score or 0.0) for sample in query.scored), default=0.0)
    indices = [sample.index for sample in query.scored]
    scores = dict(zip(indices, html.aligned([sample.score for sample in query.scored]), strict=True))

    def train_lines(sample: ShownSample) -> str:
        value = sample.score or 0.0
        share = abs(value) / largest if largest else 0.0
        kind = "harms" if value < 0 else "helps"
        sign = "+" if value > 0 else ""
        score = f'<b class="{kind}">{sign}{html.text(scores[sample.index])}</b>'
        meter = f'<i class="meter {kind}" style="width: {share:.0%}"></i>'
        label_line = _label_line("label", content.train.label(str(sample.index)), label, prediction)
        return score + meter + label_line + html.definition_list([("loss", html.number(sample.loss))])

    def gallery(title: str, samples: Sequence[ShownSample]) -> str:
        cards = (
            f"<li>{_card(f'sample {sample.index}', of_train.get(str(sample.index), {}), train_lines(sample))}</li>"
            for sample in samples
        )
        return f'<h3>{title}</h3><ul class="gallery">{"".join(cards)}</ul>' if samples else ""

    galleries = gallery("Highest scores", query.highest) + gallery("Lowest scores", query.lowest)
    return html.Section(f"Query {index}", f'<div class="query">{query_card}<div>{galleries}</div></div>')


def _card(name: str, preview: Preview, lines: str) -> str:
    title = f"{name} {preview.get('name', '')}".rstrip()
    return f'<div class="card">{as_html(preview)}<strong>{html.text(title)}</strong>{lines}</div>'


def _label_line(name: str, value: str | None, label: str | None, prediction: str | None) -> str:
    """Line of a card with a class, marked if it is the label of the query or its prediction; empty without a class."""
    if value is None:
        return ""
    if value not in (label, prediction):
        return f'<span class="label">{name} {html.breakable(value)}</span>'
    kind, mark, meaning = SAME_LABEL if value == label else SAME_PREDICTION
    return f'<b class="label {kind}" title="{meaning}">{name} {html.breakable(value)} {mark}</b>'
