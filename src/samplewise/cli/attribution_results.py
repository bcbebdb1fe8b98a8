"""Files of `samplewise attribute`, each written atomically.

scores.parquet     query, sample, score: one row per query and training sample, for each query in descending order
attribution.html   each query with its training samples of highest and lowest scores
attribution.json   method, checkpoints, queries, and the checksum of scores.parquet; written last
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
import typer
from torch import Tensor

from samplewise.cli.attribution_methods import Method
from samplewise.cli.attribution_subject import Subject
from samplewise.cli.dataset_order import OrderedSamples
from samplewise.cli.queries import Outcomes
from samplewise.cli.recipe import shortened
from samplewise.cli.trained_models import run_settings
from samplewise.core.atomic_io import atomic_write
from samplewise.core.text import plural
from samplewise.ledger.files import load_pyarrow, write_parquet
from samplewise.ledger.previews import dataset_names
from samplewise.ledger.rows import array_from_tensor

FORMAT = "samplewise attribution"
VERSION = 1
MAX_ROWS = 5_000_000  # of scores.parquet
KEPT = 1000  # highest and lowest scores of a query that are written if all of them would be more rows


def require_packages() -> None:
    """Raise ImportError, before anything is computed, if a package is missing."""
    load_pyarrow("scores.parquet needs")
    try:
        import samplewise.report.attribution  # noqa: F401
    except ImportError as why:
        raise ImportError(f"the page needs {why.name}: pip install 'samplewise[report]'") from why


def writable(directory: Path) -> Path:
    """Create the directory of the results; raises typer.BadParameter if that fails."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as why:
        raise typer.BadParameter(
            f"must be a directory that can be written to; found {shortened(directory)}: {why.strerror}.",
            param_hint="--to",
        ) from why
    return directory


class Quality(NamedTuple):
    """Measured quality of scores.

    trust      for the page; None if it was not measured
    place      file that holds it, or should
    warnings   about a file that cannot be read
    """

    trust: Any
    place: Path
    warnings: Sequence[str] = ()


def find_quality(given: Path | None, run: Path) -> Quality:
    """Read lds.json in the folder of --trust, or in evaluate in the run directory if it is there."""
    from samplewise.report.attribution import read_trust

    folder = run / "evaluate" if given is None else given
    place = folder if folder.name == "lds.json" else folder / "lds.json"
    if given is None and not place.is_file():
        return Quality(None, place)
    try:
        return Quality(read_trust(place), place)
    except ValueError as why:
        if given is not None:
            raise typer.BadParameter(str(why), param_hint="--trust") from why
        return Quality(None, place, [str(why)])


def write_results(
    directory: Path,
    subject: Subject,
    method: Method,
    queries: Sequence[int],
    outcomes: Outcomes,
    scores: Tensor,
    top: int,
    quality: Quality,
) -> None:
    """Write scores.parquet, attribution.html and attribution.json.

    queries, outcomes: indices of the queries, and their losses and predictions
    scores: (queries, training samples)
    top: number of highest and of lowest scores on the page
    """
    values, order = scores.sort(dim=1, descending=True, stable=True)
    samples = torch.tensor(subject.train.indices)[order]
    parquet = _parquet(torch.tensor(queries), samples, values)
    settings = _settings(subject, method, queries, scores, quality)
    page = _page(subject, method, queries, outcomes, samples, values, top, quality, settings)
    digest = {"scores.parquet": hashlib.sha256(parquet).hexdigest()}
    content = json.dumps({"format": FORMAT, "format_version": VERSION, **settings, "sha256": digest}, indent=1)
    try:
        _write(directory / "scores.parquet", parquet)
        _write(directory / "attribution.html", page.encode(errors="replace"))  # a name may hold a lone surrogate
        _write(directory / "attribution.json", content.encode())
    except OSError as why:
        typer.echo(f"the results cannot be written: {why}", err=True)
        raise typer.Exit(1) from why


def _write(path: Path, content: bytes) -> None:
    with atomic_write(path, path.with_name(f".{path.name}.partial")) as file:
        file.write(content)


def _parquet(queries: Tensor, samples: Tensor, values: Tensor) -> bytes:
    """scores.parquet: all scores, or the highest and lowest of each query if there are more than MAX_ROWS."""
    count = values.shape[1]
    if values.numel() > MAX_ROWS and count > 2 * KEPT:
        kept = torch.cat([torch.arange(KEPT), torch.arange(count - KEPT, count)])
        samples = samples[:, kept]
        values = values[:, kept]
    columns = {
        "query": queries[:, None].expand_as(samples).flatten(),
        "sample": samples.flatten(),
        "score": values.flatten().to(torch.float64 if values.dtype == torch.float64 else torch.float32),
    }
    table = load_pyarrow().table({name: array_from_tensor(column) for name, column in columns.items()})
    buffer = BytesIO()
    write_parquet(table, buffer, FORMAT, VERSION)
    return buffer.getvalue()


def _settings(
    subject: Subject, method: Method, queries: Sequence[int], scores: Tensor, quality: Quality
) -> dict[str, Any]:
    """Settings in attribution.json."""
    checkpoints = [
        {"path": str(model.path), "weight": weight, "sha256": model.checksum}
        for model, weight in zip(subject.models, subject.weights, strict=True)
    ]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "samplewise": version("samplewise"),
        "torch": torch.__version__,
        "recipe": subject.path,
        "method": method.name,
        **method.options,
        "checkpoints": checkpoints,
        "queries": list(queries),
        "training samples": scores.shape[1],
        "lds": None if quality.trust is None else quality.trust._asdict(),
    }


# --- page -------------------------------------------------------------------------------------------------------------


def _page(
    subject: Subject,
    method: Method,
    queries: Sequence[int],
    outcomes: Outcomes,
    samples: Tensor,
    values: Tensor,
    top: int,
    quality: Quality,
    settings: dict[str, Any],
) -> str:
    """HTML page. samples, values: (queries, training samples) in descending order of the values."""
    from samplewise.report.attribution import MAX_QUERIES, AttributionPage, ShownQuery, ShownSample, attribution_page

    lowest = max(top, values.shape[1] - top)  # a sample is shown once, also if there are few
    places = [*range(min(top, values.shape[1])), *reversed(range(lowest, values.shape[1]))]
    shown_samples = samples[:MAX_QUERIES, places]
    losses = _losses(subject, shown_samples)
    shown = []
    for row, query in enumerate(queries[:MAX_QUERIES]):
        scored = [
            ShownSample(index, losses[index], score)
            for index, score in zip(shown_samples[row].tolist(), values[row, places].tolist(), strict=True)
        ]
        prediction = None if outcomes.predictions is None else int(outcomes.predictions[row])
        own = ShownSample(query, float(outcomes.losses[row]), prediction=prediction)
        shown.append(ShownQuery(own, scored[:top], scored[top:]))
    run = subject.models[-1].run
    models = plural(len(subject.models), "checkpoint")
    return attribution_page(
        AttributionPage(
            title=f"Attribution: {run.name}",
            summary=f"{method.title} at {models} of {', '.join(dict.fromkeys(m.run.name for m in subject.models))}",
            method=method.title,
            effect=method.effect,
            shown=shown,
            count=len(queries),
            samples=values.shape[1],
            train=_previews(subject, subject.train, losses),
            queries=_previews(subject, subject.validation, queries[:MAX_QUERIES]),
            settings=_for_page(settings),
            trust=quality.trust,
            place=str(quality.place),
            warnings=[*quality.warnings, *subject.notes, *_privacy_warning(run)],
        )
    )


def _losses(subject: Subject, samples: Tensor) -> dict[int, float]:
    """Losses of training samples by index."""
    indices = samples.unique().tolist()
    return dict(zip(indices, subject.outcomes(subject.train.batches(indices)).losses.tolist(), strict=True))


def _previews(subject: Subject, samples: OrderedSamples, indices: Iterable[int]) -> Any:
    """Previews of samples, with the names of the classes that the datasets, the ledger or the model have."""
    from samplewise.report.previews import Previews, read_previews

    names = dataset_names(samples.loader)
    entries = {str(index): subject.preview(samples, index, names.features) for index in indices}
    classes = names.classes or dataset_names(subject.train.loader).classes
    return Previews(entries, classes=classes or read_previews(subject.models[-1].run).classes or subject.class_names)


def _for_page(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings in short: counts instead of long lists."""
    checkpoints = [f"{Path(each['path']).name} (weight {each['weight']:g})" for each in settings["checkpoints"]]
    return {
        **{name: value for name, value in settings.items() if name != "lds"},
        "checkpoints": ", ".join(checkpoints),
        "queries": ", ".join(map(str, settings["queries"])),
    }


def _privacy_warning(run: Path) -> list[str]:
    plan = run_settings(run).get("privacy")
    return [f"Private run: {plan}. The scores and samples here are not covered by its guarantee."] if plan else []
