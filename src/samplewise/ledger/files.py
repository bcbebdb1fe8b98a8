"""Files of a ledger: `samples/part-000000.parquet`, `part-000001.parquet`, ... in a run directory.

Each part covers some consecutive updates. It is written outside of `samples` and then renamed, so that the folder holds
complete Parquet files only, which any Parquet reader can open. With several ranks each rank writes its own samples:
`part-000000-rank-0-of-2.parquet` and `part-000000-rank-1-of-2.parquet` cover the same updates.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from samplewise.core.files import atomic_write, check_local
from samplewise.errors import LedgerError, LedgerWarning

if TYPE_CHECKING:
    import pyarrow

FORMAT = "samplewise ledger"
VERSION = 1
FOLDER = "samples"


def load_pyarrow(user: str = "the ledger needs") -> Any:
    """The module pyarrow, with parquet and compute loaded. `user`: the beginning of the error message without it."""
    try:
        import_module("pyarrow.parquet")
        import_module("pyarrow.compute")
        return import_module("pyarrow")
    except ImportError:
        raise ImportError(f"{user} pyarrow: pip install 'samplewise[ledger]'") from None


def read_ledger(run: str | Path, damaged: Literal["raise", "skip"] = "raise") -> pyarrow.Table:
    """Read the ledger of a run directory as a pyarrow table: one row per sample and visit, in the order of training.

        id       int64 or string            loss    float32, as returned by the loss function
        epoch    int32                      norm    float32, of the sample's own gradient, before any transform
        update   int64                      weight  float32, coefficient in the sum; 0 if the update was skipped
                                            count   float32, only if the loss function returns counts other than 1

    followed by the other columns that were recorded. Unknown values are NaN. With counts, loss is a sum over the
    elements of the sample, and loss / count its mean.

    damaged: "raise" an error if a part cannot be read, or "skip" the part with a warning
    """
    table = concat_tables(list(parts(run, damaged)), run)
    if "count" not in table.column_names:
        return table
    counts = load_pyarrow().compute.fill_null(table["count"], 1)  # a part in which all counts are 1 lacks the column
    return table.set_column(table.column_names.index("count"), "count", counts)


def parts(run: str | Path, damaged: Literal["raise", "skip"] = "raise") -> Iterator[pyarrow.Table]:
    """Yield the ledger of a run directory part by part, as pyarrow tables with the columns of `read_ledger`."""
    if damaged not in ("raise", "skip"):
        raise ValueError(f"damaged must be 'raise' or 'skip'; found {damaged!r}.")
    check_local(run)
    if not list_parts(Path(run)):
        remedy = (
            "Train with callbacks=[sw.Ledger()] or samplewise train --ledger; its first part is written with the first "
            "checkpoint."
        )
        if Path(run).name == FOLDER and list_parts(Path(run).parent):
            remedy = f"Pass the run directory, {Path(run).parent}."
        raise LedgerError(
            f"a run must have a ledger, {FOLDER}/part-*.parquet, to read its samples; found none in {run}. {remedy}"
        )
    any_read = False
    for entries in _files_by_part(Path(run)):
        rank_tables = [table for entry in entries for table in _read_or_skip(entry, damaged)]
        if rank_tables:
            any_read = True
            table = rank_tables[0]
            if len(rank_tables) > 1:
                table = concat_tables(rank_tables, run)
                if table.num_rows:  # by update; within an update by rank
                    table = table.take(load_pyarrow().compute.sort_indices(table["update"]))
            yield table
    if not any_read:
        raise LedgerError(
            f"a ledger must have at least one readable part; found none in {run}. Restore the files from a copy."
        )


def _read_or_skip(entry: Path | str, damaged: str) -> list[pyarrow.Table]:
    """The table of a file as a list of one, or an empty list if it is damaged and to be skipped."""
    try:
        if isinstance(entry, str):
            raise LedgerError(
                f"a ledger must have each part once, and the parts must be numbered without a gap; found {entry}."
            )
        return [_read(entry)]
    except LedgerError as why:
        if damaged == "raise":
            raise LedgerError(f"{why} Skip it with damaged='skip'.") from why
        warnings.warn(f"{why} The other parts are read.", LedgerWarning, stacklevel=4)
        return []


class LedgerPart(NamedTuple):
    """Files of one part that are in the folder."""

    number: int
    files: dict[tuple[int, int], Path]  # by (number of ranks that wrote the part, rank)


def list_parts(run: Path) -> list[LedgerPart]:
    """Parts in the folder of a run, sorted by number. Files with other names are ignored."""
    files_by_part: dict[int, dict[tuple[int, int], Path]] = {}
    for path in (run / FOLDER).iterdir() if (run / FOLDER).is_dir() else ():
        match = re.fullmatch(r"part-([0-9]{6,})(?:-rank-([0-9]+)-of-([0-9]+))?\.parquet", path.name)
        if match is None:
            continue
        number = int(match[1])
        rank = int(match[2] or 0)
        size = int(match[3] or 1)
        if rank < size and path.name == part_path(run, number, rank, size).name:
            files_by_part.setdefault(number, {})[size, rank] = path
    return [LedgerPart(number, files) for number, files in sorted(files_by_part.items())]


def _files_by_part(run: Path, end: int | None = None) -> Iterator[list[Path | str]]:
    """Files of each part below number `end`, sorted by rank; a string in place of files describes what is missing.

    A gap is a single entry regardless of its length, because a file name may hold any number.
    """
    expected = 0
    for part in list_parts(run):
        if end is not None and part.number >= end:
            break
        if part.number > expected:
            yield [_missing(part_path(run, expected), part.number - expected)]
        yield _files_of_part(run, part)
        expected = part.number + 1
    if end is not None and expected < end:
        yield [_missing(part_path(run, expected), end - expected)]


def _files_of_part(run: Path, part: LedgerPart) -> list[Path | str]:
    """Files of a part, one per rank; a string in place of files that are missing or contradict each other."""
    size, *further_sizes = sorted({size for size, _ in part.files}, reverse=True)
    if further_sizes:
        return [f"part {part.number} in {run / FOLDER} twice, written by {size} ranks and by {further_sizes[0]}"]
    present = {rank: path for (_, rank), path in sorted(part.files.items())}
    if len(present) == size:
        return list(present.values())
    first = next(rank for rank in range(size) if rank not in present)
    return [*present.values(), _missing(part_path(run, part.number, first, size), size - len(present))]


def _missing(first: Path, count: int) -> str:
    return f"no {first}" if count == 1 else f"no {first} (and {count - 1:,} more after it)"


def count_visits(run: Path) -> int:
    """Number of rows in the ledger of a run, from the Parquet footers; unreadable files are not counted."""
    count = 0
    with suppress(OSError):  # the folder cannot be listed
        for path in (path for part in list_parts(run) for path in part.files.values() if path.is_file()):
            with suppress(Exception):  # reading the part reports the error
                count += load_pyarrow().parquet.read_metadata(path).num_rows
    return count


def part_path(run: Path, number: int, rank: int = 0, size: int = 1) -> Path:
    """Path of the file that rank `rank` of `size` writes for part `number`."""
    rank_suffix = f"-rank-{rank}-of-{size}" if size > 1 else ""
    return run / FOLDER / f"part-{number:06d}{rank_suffix}.parquet"


def _read(path: Path) -> pyarrow.Table:
    pa = load_pyarrow()
    if not path.is_file():  # reading a named pipe would never end
        raise LedgerError(
            f"a part of a ledger must be a complete Parquet file; found {path}, which is not a regular file."
        )
    try:
        file = pa.parquet.ParquetFile(path, page_checksum_verification=True)
        metadata = file.schema_arrow.metadata or {}
        if metadata.get(b"format") != FORMAT.encode() or metadata.get(b"version") != str(VERSION).encode():
            written_format = " ".join(
                metadata.get(key, b"?").decode(errors="replace") for key in (b"format", b"version")
            )
            raise LedgerError(
                f"a part of a ledger must have the format that this version of samplewise reads, {FORMAT} {VERSION}; "
                f"found {written_format} in {path}. Read it with the version of samplewise that wrote it."
            )
        return file.read().replace_schema_metadata(None)
    except (pa.ArrowException, OSError) as why:
        reason = str(why).strip().partition("\n")[0].rstrip(".")
        raise LedgerError(
            f"a part of a ledger must be a complete Parquet file; found {path}, which cannot be read: {reason}."
        ) from why


def unify_schemas(old_schema: pyarrow.Schema, new_schema: pyarrow.Schema) -> pyarrow.Schema:
    """Unified schema of two tables. A column may mix numeric types, but not numbers and strings."""
    pa = load_pyarrow()
    for name in (name for name in new_schema.names if name in old_schema.names):
        old_field, new_field = old_schema.field(name), new_schema.field(name)
        try:
            pa.unify_schemas([pa.schema([old_field]), pa.schema([new_field])], promote_options="permissive")
        except pa.ArrowException as why:
            raise LedgerError(
                f"the column {name!r} must have one type in all batches; found {old_field.type} and then "
                f"{new_field.type}. Return either numbers or strings."
            ) from why
    return pa.unify_schemas([old_schema, new_schema], promote_options="permissive")


def concat_tables(tables: list[pyarrow.Table], run: str | Path) -> pyarrow.Table:
    """Concatenate tables. Integers in a column that has floats elsewhere must be exactly representable as floats."""
    pa = load_pyarrow()
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as why:
        raise LedgerError(
            f"the parts of a ledger must have compatible columns; found that those in {run} do not: {why}"
        ) from why


class LedgerWriter:
    """Writer of the parts of a ledger. `count`: number of parts so far. Each of `size` ranks writes a file per part."""

    def __init__(self, run: Path, count: int, rank: int = 0, size: int = 1):
        self.run = run
        self.count = count
        self.rank = rank
        self.size = size

    def open(self) -> None:
        """Check that the first `count` parts exist, and remove all newer ones. Called on one rank only."""
        entries = (entry for entries in _files_by_part(self.run, self.count) for entry in entries)
        problem = next((entry for entry in entries if isinstance(entry, str)), None)
        if problem is not None:
            raise LedgerError(
                f"a ledger must have all parts it had at the checkpoint to be resumed; found {problem}. Restore the "
                "folder from a copy, or start a new run directory."
            )
        for part in reversed(list_parts(self.run)):  # newest first: if interrupted, no gap is left
            if part.number >= self.count:
                for path in part.files.values():
                    _remove(path)
        (self.run / FOLDER).mkdir(parents=True, exist_ok=True)

    def write(self, table: pyarrow.Table) -> None:
        """Write the next part atomically."""
        path = part_path(self.run, self.count, self.rank, self.size)
        partial = self.run / f".{path.name}.partial"
        try:
            with atomic_write(path, partial) as file:
                write_parquet(table, file, FORMAT, VERSION)
        except OSError as why:
            raise LedgerError(
                f"a part of the ledger must be written to {path}; writing failed: {why}. Free some disk space or "
                "check the permissions, and resume: all earlier parts are complete."
            ) from why
        self.count += 1


def _remove(path: Path) -> None:
    try:
        path.unlink()
    except OSError as why:
        raise LedgerError(
            f"a part that is newer than the checkpoint must be removed when a run is resumed; found {path}, which "
            f"cannot be removed: {why}. Move it out of the folder."
        ) from why


def write_parquet(table: pyarrow.Table, file: Any, format_name: str, version: int) -> None:
    """Write a table as Parquet with encodings that compress well: deltas of integers, byte streams of floats split,
    strings in a dictionary. Name and version of the format are part of the metadata.
    """
    pa = load_pyarrow()
    is_integer, is_float = pa.types.is_integer, pa.types.is_floating
    encodings = {column.name: "DELTA_BINARY_PACKED" for column in table.schema if is_integer(column.type)}
    encodings |= {column.name: "BYTE_STREAM_SPLIT" for column in table.schema if is_float(column.type)}
    pa.parquet.write_table(
        table.replace_schema_metadata({"format": format_name, "version": str(version)}),
        file,
        compression="zstd",
        use_dictionary=[name for name in table.column_names if name not in encodings],
        column_encoding=encodings,
        write_page_checksum=True,
    )
