"""Files of `samplewise attribute`, each written atomically.

scores.parquet     query, sample, score: one row per query and training sample, for each query in descending order
attribution.html   each query with its training samples of highest and lowest scores
attribution.json   method, checkpoints, queries, and the checksum of scores.parquet; written last
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
import typer
from torch import Tensor

from samplewise.cli.attribution_methods import Scores
from samplewise.cli.attribution_options import Method
from samplewise.cli.attribution_subject import Subject
from samplewise.cli.dataset_order import OrderedSamples
from samplewise.cli.queries import Outcomes
from samplewise.cli.recipe_file import shortened
from samplewise.core.files import sha256, write_bytes, write_json
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


def shown_path(path: Path, here: Path) -> str:
    """A path for people: relative to a directory if it is inside."""
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


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
    """Read lds.json: that in the directory of --trust, or that in evaluate in the run directory, if there is one."""
    from samplewise.report.attribution import read_trust

    directory = run / "evaluate" if given is None else given
    place = directory if directory.name == "lds.json" else directory / "lds.json"
    if given is None and not place.is_file():
        return Quality(None, place)
    try:
        return Quality(read_trust(place), place)
    except ValueError as why:
        if given is not None:
            raise typer.BadParameter(str(why), param_hint="--trust") from why
        return Quality(None, place, [str(why)])


@dataclass(frozen=True)
class Results:
    """Results of an attribution.

    queries    indices of the queries
    outcomes   their losses and predictions
    top        number of highest and of lowest scores on the page
    here       directory that paths on the page are relative to
    """

    subject: Subject
    method: Method
    queries: Sequence[int]
    outcomes: Outcomes
    scores: Scores
    top: int
    quality: Quality
    here: Path

    def write(self, directory: Path) -> None:
        """Write scores.parquet, attribution.html and attribution.json."""
        values, order = self.scores.values.cpu().sort(dim=1, descending=True, stable=True)
        samples = torch.tensor(self.subject.train.indices)[order]
        parquet = _parquet(torch.tensor(self.queries), samples, values)
        page = self._page(samples, values).encode(errors="replace")  # a name may hold a lone surrogate
        digest = {"scores.parquet": sha256([parquet])}
        content = {"format": FORMAT, "format_version": VERSION, **self._settings(), "sha256": digest}
        try:
            write_bytes(directory / "scores.parquet", parquet)
            write_bytes(directory / "attribution.html", page)
            write_json(directory / "attribution.json", content)
        except OSError as why:
            typer.echo(f"the results cannot be written: {why}", err=True)
            raise typer.Exit(1) from why

    def _settings(self) -> dict[str, Any]:
        """Settings in attribution.json."""
        models = self.subject.models
        return {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "samplewise": version("samplewise"),
            "torch": torch.__version__,
            "recipe": self.subject.path,
            "method": self.method.name,
            **self.scores.details,
            "checkpoints": [{"path": str(model.path), "sha256": model.checksum} for model in models],
            "queries": list(self.queries),
            "training samples": len(self.subject.train),
            "lds": None if self.quality.trust is None else self.quality.trust._asdict(),
        }

    # --- page ---------------------------------------------------------------------------------------------------------

    def _page(self, samples: Tensor, values: Tensor) -> str:
        """HTML page. samples, values: (queries, training samples) in descending order of the values."""
        from samplewise.report.attribution import MAX_QUERIES, AttributionPage, attribution_page

        count = values.shape[1]
        lowest = reversed(range(max(self.top, count - self.top), count))  # a sample is shown once, also if few exist
        places = [*range(min(self.top, count)), *lowest]
        shown = samples[:MAX_QUERIES, places].tolist()
        losses = self._training_losses(shown)
        runs = dict.fromkeys(model.run.name for model in self.subject.models)
        models = plural(len(self.subject.models), "checkpoint")
        return attribution_page(
            AttributionPage(
                title=f"Attribution: {self.subject.run.name}",
                summary=f"{self.method.title} at {models} of {', '.join(runs)}",
                method=self.method.title,
                effect=self.scores.effect,
                shown=self._shown(shown, values[:, places].tolist(), losses),
                count=len(self.queries),
                samples=count,
                train=self._previews(self.subject.train, losses),
                queries=self._previews(self.subject.validation, self.queries[:MAX_QUERIES]),
                settings=self._short_settings(),
                trust=self.quality.trust,
                place=shown_path(self.quality.place, self.here),
                warnings=[*self.quality.warnings, *self.subject.notes],
            )
        )

    def _shown(self, samples: list[list[int]], values: list[list[float]], losses: dict[int, float]) -> list[Any]:
        """Queries of the page, from the indices and scores of their training samples, highest first, then lowest."""
        from samplewise.report.attribution import ShownQuery, ShownSample

        shown = []
        for row, indices in enumerate(samples):
            predictions = self.outcomes.predictions
            prediction = None if predictions is None else int(predictions[row])
            query = ShownSample(self.queries[row], float(self.outcomes.losses[row]), prediction=prediction)
            scored = [
                ShownSample(index, losses[index], score) for index, score in zip(indices, values[row], strict=True)
            ]
            shown.append(ShownQuery(query, scored[: self.top], scored[self.top :]))
        return shown

    def _training_losses(self, shown: list[list[int]]) -> dict[int, float]:
        """Losses of training samples by index."""
        indices = sorted({index for row in shown for index in row})
        losses = self.subject.outcomes(self.subject.train.batches(indices)).losses
        return dict(zip(indices, losses.tolist(), strict=True))

    def _previews(self, samples: OrderedSamples, indices: Iterable[int]) -> Any:
        """Previews of samples, with the names of the classes that the datasets, the ledger or the model have."""
        from samplewise.report.previews import Previews, read_previews

        names = dataset_names(samples.loader)
        classes = (
            names.classes
            or dataset_names(self.subject.train.loader).classes
            or read_previews(self.subject.run).classes
            or self.subject.class_names
        )
        entries = {str(index): self.subject.preview(samples, index, names.features) for index in indices}
        return Previews(entries, classes=classes)

    def _short_settings(self) -> dict[str, Any]:
        """Settings for the page."""
        settings = self._settings()
        del settings["lds"]
        checkpoints = (shown_path(model.path, self.here) for model in self.subject.models)
        queries = ", ".join(map(str, self.queries))
        return {**settings, "checkpoints": ", ".join(checkpoints), "queries": queries}


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
