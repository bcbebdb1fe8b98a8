"""A ledger on disk: `samples/part-000000.parquet`, `part-000001.parquet`, ... in the directory of a run.

Each part covers some updates, in their order. It is written beside `samples`, then renamed: what stands there is whole,
and the folder holds nothing else. Anything that reads Parquet reads the folder. Of several ranks each writes what it
has seen: `part-000000-rank-0-of-2.parquet` and `part-000000-rank-1-of-2.parquet` cover the same updates.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from samplewise.errors import LedgerError, LedgerWarning
from samplewise.files import whole

FORMAT, VERSION = "samplewise ledger", 1
FOLDER = "samples"


def arrow() -> Any:
    try:
        import_module("pyarrow.parquet")
        import_module("pyarrow.compute")
        return import_module("pyarrow")
    except ImportError:
        raise ImportError("the ledger needs pyarrow: pip install 'samplewise[ledger]'") from None


def samples(run: str | Path, damaged: str = "raise") -> Any:
    """What a ledger has recorded in the directory of a run, as a pyarrow table: one row per sample and visit, in the
    order of training.

        id       int64, or text             loss    float32, as returned by the loss function
        epoch    int32                      norm    float32, of the sample's own gradient, before any transform
        update   int64                      weight  float32, that it was summed with; 0 where the update was skipped

    and whatever else was recorded. What is not known is NaN.

    damaged: "raise" if a part cannot be read, or "skip" it with a warning.
    """
    return together(list(parts(run, damaged)), run)


def parts(run: str | Path, damaged: str = "raise") -> Iterator[Any]:
    """The same, one table after the other, for who need not have all of it at once."""
    if damaged not in ("raise", "skip"):
        raise ValueError(f"damaged must be 'raise' or 'skip'; found {damaged!r}.")
    if not numbered(Path(run)):
        raise LedgerError(
            f"a run must have a ledger, {FOLDER}/part-*.parquet, to tell of its samples; found none in {run}. Train "
            "with callbacks=[sw.Ledger()]; its first part is written with the first checkpoint."
        )
    found = False
    for entries in _in_order(Path(run)):
        of_ranks = [table for entry in entries for table in _if_whole(entry, damaged)]
        if of_ranks:
            found = True
            yield of_ranks[0] if len(of_ranks) == 1 else _in_turn(together(of_ranks, run))
    if not found:
        raise LedgerError(f"a ledger must have a part that can be read; found none in {run}.")


def _if_whole(entry: Path | str, damaged: str) -> list[Any]:
    try:
        if isinstance(entry, str):
            raise LedgerError(
                f"a ledger must have each part once, and the parts must be numbered without a gap; found {entry}."
            )
        return [_read(entry)]
    except LedgerError as why:
        if damaged == "raise":
            raise LedgerError(f"{why} Leave it out with damaged='skip'.") from why
        warnings.warn(f"{why} The rest is there.", LedgerWarning, stacklevel=4)
        return []


class Part(NamedTuple):
    """The files of one part that are in the folder."""

    number: int
    files: dict[tuple[int, int], Path]  # by (number of ranks that wrote the part, rank)


def numbered(run: Path) -> list[Part]:
    """The parts in the folder of a run, by number. Other files are ignored, names that no ledger writes included."""
    found: dict[int, dict[tuple[int, int], Path]] = {}
    for path in (run / FOLDER).iterdir() if (run / FOLDER).is_dir() else ():
        match = re.fullmatch(r"part-([0-9]{6,})(?:-rank-([0-9]+)-of-([0-9]+))?\.parquet", path.name)
        if match is None:
            continue
        number, rank, size = int(match[1]), int(match[2] or 0), int(match[3] or 1)
        if rank < size and path.name == path_of(run, number, rank, size).name:
            found.setdefault(number, {})[size, rank] = path
    return [Part(number, files) for number, files in sorted(found.items())]


def _in_order(run: Path, end: int | None = None) -> Iterator[list[Path | str]]:
    """The files of each part up to number `end`, rank by rank, and as text what was found in place of others.

    A gap is one entry, whatever its length: a file name may hold any number.
    """
    expected = 0
    for part in numbered(run):
        if end is not None and part.number >= end:
            break
        if part.number > expected:
            yield [_none(path_of(run, expected), part.number - expected)]
        yield _of_ranks(run, part)
        expected = part.number + 1
    if end is not None and expected < end:
        yield [_none(path_of(run, expected), end - expected)]


def _of_ranks(run: Path, part: Part) -> list[Path | str]:
    """One file for each of the ranks that the names speak of."""
    size, *others = sorted({size for size, _ in part.files}, reverse=True)
    if others:
        return [f"part {part.number} in {run / FOLDER} twice, of {size} ranks and of {others[0]}"]
    there = {rank: path for (_, rank), path in sorted(part.files.items())}
    if len(there) == size:
        return list(there.values())
    first = next(rank for rank in range(size) if rank not in there)
    return [*there.values(), _none(path_of(run, part.number, first, size), size - len(there))]


def _none(first: Path, count: int) -> str:
    return f"no {first}" if count == 1 else f"no {first}, nor {count - 1:,} more that belong after it"


def visits_in(run: Path) -> int:
    """How many, as far as the ends of the parts can be read, which say it."""
    count = 0
    with suppress(OSError):  # of a folder that may not be listed
        for path in (path for part in numbered(run) for path in part.files.values() if path.is_file()):
            with suppress(Exception):  # whatever is wrong with it is told by who reads it
                count += arrow().parquet.read_metadata(path).num_rows
    return count


def path_of(run: Path, number: int, rank: int = 0, size: int = 1) -> Path:
    of_rank = f"-rank-{rank}-of-{size}" if size > 1 else ""
    return run / FOLDER / f"part-{number:06d}{of_rank}.parquet"


def _in_turn(table: Any) -> Any:
    """Update by update, and within one rank by rank."""
    return table.take(arrow().compute.sort_indices(table["update"])) if table.num_rows else table


def _read(path: Path) -> Any:
    pa = arrow()
    if not path.is_file():  # a named pipe would never end
        raise LedgerError(f"a part of a ledger must be a whole Parquet file; found that {path} is no regular file.")
    try:
        file = pa.parquet.ParquetFile(path, page_checksum_verification=True)
        about = file.schema_arrow.metadata or {}
        if about.get(b"format") != FORMAT.encode() or about.get(b"version") != str(VERSION).encode():
            found = " ".join(about.get(key, b"?").decode(errors="replace") for key in (b"format", b"version"))
            raise LedgerError(
                f"a part of a ledger must be of the version that is read here, {FORMAT} {VERSION}; found {found} in "
                f"{path}. Read it with the samplewise that wrote it."
            )
        return file.read().replace_schema_metadata(None)
    except (pa.ArrowException, OSError) as why:
        said = str(why).strip().partition("\n")[0].rstrip(".")
        raise LedgerError(
            f"a part of a ledger must be a whole Parquet file; found that {path} cannot be read: {said}."
        ) from why


def agreed(before: Any, now: Any) -> Any:
    """The columns of two tables: numbers may be of two types, but no column of numbers and of texts."""
    pa = arrow()
    for name in (name for name in now.names if name in before.names):
        old, new = before.field(name), now.field(name)
        try:
            pa.unify_schemas([pa.schema([old]), pa.schema([new])], promote_options="permissive")
        except pa.ArrowException as why:
            raise LedgerError(
                f"the column {name!r} must be of one kind in all batches; found {old.type} and then {new.type}. Return "
                "either numbers or texts."
            ) from why
    return pa.unify_schemas([before, now], promote_options="permissive")


def together(tables: list[Any], run: str | Path) -> Any:
    """As one. A whole number that has to stand beside floats must be one that they know."""
    pa = arrow()
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as why:
        raise LedgerError(
            f"the parts of a ledger must agree about their columns; found that those in {run} do not: {why}"
        ) from why


class Parts:
    """Writes part after part into the directory of a run. `count`: how many there are. Of `size` ranks each writes a
    file of every part.
    """

    def __init__(self, run: Path, count: int, rank: int = 0, size: int = 1):
        self.run, self.count, self.rank, self.size = run, count, rank, size

    def open(self) -> None:
        """Removes what is newer than the first `count` parts. For one rank to do."""
        entries = (entry for entries in _in_order(self.run, self.count) for entry in entries)
        wrong = next((entry for entry in entries if isinstance(entry, str)), None)
        if wrong is not None:
            raise LedgerError(
                f"a ledger is resumed with the parts it had; found {wrong}. Restore the folder from a copy, or start "
                "a new run directory."
            )
        for part in reversed(numbered(self.run)):  # the newest first: whenever that ends, there is no gap
            if part.number >= self.count:
                for path in part.files.values():
                    _remove(path)
        (self.run / FOLDER).mkdir(parents=True, exist_ok=True)

    def write(self, table: Any) -> None:
        """All of it, or nothing."""
        path = path_of(self.run, self.count, self.rank, self.size)
        aside = self.run / f".{path.name}.partial"
        try:
            with whole(path, aside) as file:
                _write(table, file)
        except OSError as why:
            raise LedgerError(
                f"a part of the ledger must be written to {path}, which failed: {why}. Free some space or see to the "
                "permissions, and resume: the parts before it are whole."
            ) from why
        self.count += 1


def _remove(path: Path) -> None:
    try:
        path.unlink()
    except OSError as why:
        raise LedgerError(
            f"a part that is newer than the checkpoint must be removed when a run is resumed; found that {path} cannot "
            f"be: {why}. Move it out of the folder."
        ) from why


def _write(table: Any, file: Any) -> None:
    """Whole numbers as small differences, texts once each, and the bytes of floats apart, exponents together: so they
    compress.
    """
    pa = arrow()
    is_whole, is_float = pa.types.is_integer, pa.types.is_floating
    encodings = {f.name: "DELTA_BINARY_PACKED" for f in table.schema if is_whole(f.type)}
    encodings |= {f.name: "BYTE_STREAM_SPLIT" for f in table.schema if is_float(f.type)}
    pa.parquet.write_table(
        table.replace_schema_metadata({"format": FORMAT, "version": str(VERSION)}),
        file,
        compression="zstd",
        use_dictionary=[name for name in table.column_names if name not in encodings],
        column_encoding=encodings,
        write_page_checksum=True,
    )
