"""Names of ledger parts are untrusted: any number in a file name is read, or refused, in time that depends on the
number of files alone.
"""

import os
import shutil
import sys
import warnings

import forks
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from recorded_run import loader, trainer

import samplewise as sw
from samplewise.ledger.files import LedgerWriter, count_visits, list_parts, part_path

GAP = "a ledger must have each part once, and the parts must be numbered without a gap; found "
SKIPPED = "The other parts are read."
ROWS = 3


def write_part(run, number, rank=0, size=1):
    parts = LedgerWriter(run, number, rank, size)
    part_path(run, number, rank, size).parent.mkdir(parents=True, exist_ok=True)
    first = 100 * number + 10 * rank
    parts.write(pa.table({"id": range(first, first + ROWS), "update": [number] * ROWS, "loss": [1.0] * ROWS}))
    return part_path(run, number, rank, size)


@pytest.fixture
def run(tmp_path):
    for number in range(2):
        write_part(tmp_path, number)
    return tmp_path


def skipped(run):
    """Rows of the readable parts, and the warnings about the others."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        table = sw.read_ledger(run, damaged="skip")
    return table.num_rows, [str(warning.message) for warning in caught]


def test_a_huge_part_number_is_one_gap(run):
    write_part(run, 99_999_999)
    message = f"{GAP}no {part_path(run, 2)} (and 99,999,996 more after it)."
    with pytest.raises(sw.LedgerError) as error:
        sw.read_ledger(run)
    assert str(error.value) == f"{message} Skip it with damaged='skip'."
    assert skipped(run) == (3 * ROWS, [f"{message} {SKIPPED}"])


def test_a_report_of_a_run_with_a_huge_part_number_ends(run):
    write_part(run, 99_999_999)
    script = "import sys; from samplewise.cli.main import main; sys.argv = sys.argv[1:]; main()"
    command = [sys.executable, "-c", script, "samplewise", "report", str(run)]
    done = forks.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    page = next(run.glob("*.html")).read_text()
    assert page.count("numbered without a gap") == 1


@pytest.mark.parametrize("number", [10**12, 10**18, 10**200])
def test_part_numbers_of_any_size(run, number):
    shutil.copy(part_path(run, 0), part_path(run, number))
    rows, messages = skipped(run)
    assert rows == 3 * ROWS and len(messages) == 1 and f"{number - 3:,} more after it)" in messages[0]


def test_gaps_are_reported_separately(run):
    for number in (5, 6, 9):
        write_part(run, number)
    rows, messages = skipped(run)
    assert rows == 5 * ROWS
    assert messages == [
        f"{GAP}no {part_path(run, 2)} (and 2 more after it). {SKIPPED}",
        f"{GAP}no {part_path(run, 7)} (and 1 more after it). {SKIPPED}",
    ]


def test_one_missing_part_is_named(run):
    write_part(run, 3)
    with pytest.raises(sw.LedgerError, match=f"^{GAP}no {part_path(run, 2)}\\. Skip it with damaged='skip'\\.$"):
        sw.read_ledger(run)


def test_a_huge_number_of_ranks_is_one_gap(run):
    path = write_part(run, 2, 1, 10**9)
    message = f"{GAP}no {part_path(run, 2, 0, 10**9)} (and 999,999,998 more after it)."
    assert skipped(run) == (3 * ROWS, [f"{message} {SKIPPED}"])
    path.unlink()
    assert skipped(run) == (2 * ROWS, [])


def test_a_missing_rank_among_several(run):
    for rank in (0, 2, 3):
        write_part(run, 2, rank, 4)
    assert skipped(run) == (5 * ROWS, [f"{GAP}no {part_path(run, 2, 1, 4)}. {SKIPPED}"])


def test_one_part_of_two_numbers_of_ranks_is_refused(run):
    for rank in range(2):
        write_part(run, 1, rank, 2)
    message = f"{GAP}part 1 in {run / 'samples'} twice, written by 2 ranks and by 1."
    with pytest.raises(sw.LedgerError) as error:
        sw.read_ledger(run)
    assert str(error.value) == f"{message} Skip it with damaged='skip'."
    assert skipped(run) == (ROWS, [f"{message} {SKIPPED}"])


STRANGE = [
    "part--00001.parquet",
    "part-00002.parquet",
    "part-0000002.parquet",
    "part-٠٠٠٠٠٢.parquet",
    "part-000002²5.parquet",
    "part-1e9999.parquet",
    "part-000002-rank-2-of-2.parquet",
    "part-000002-rank-0-of-0.parquet",
    "part-000002-rank-0-of-1.parquet",
    "part-000002-rank-00-of-2.parquet",
    "part-000002.parquet.partial",
    "part-000002.parquet\n",
]


@pytest.mark.parametrize("name", STRANGE, ids=ascii)
def test_other_file_names_are_ignored(run, name):
    shutil.copy(part_path(run, 0), run / "samples" / name)
    assert [part.number for part in list_parts(run)] == [0, 1]
    assert skipped(run) == (2 * ROWS, []) and count_visits(run) == 2 * ROWS
    LedgerWriter(run, 1).open()
    assert (run / "samples" / name).exists() and not part_path(run, 1).exists()


def directory(path):
    path.mkdir()


def pipe(path):
    os.mkfifo(path)


def broken_link(path):
    path.symlink_to("nowhere")


@pytest.mark.parametrize("make", [directory, *([pipe] if hasattr(os, "mkfifo") else []), broken_link])
def test_directories_and_pipes_named_like_a_part(run, make):
    make(part_path(run, 2))
    message = (
        f"a part of a ledger must be a complete Parquet file; found {part_path(run, 2)}, which is not a regular file."
    )
    with pytest.raises(sw.LedgerError, match=f"^{message} Skip it with damaged='skip'.$"):
        sw.read_ledger(run)
    assert skipped(run) == (2 * ROWS, [f"{message} {SKIPPED}"])
    assert count_visits(run) == 2 * ROWS


def test_a_directory_named_like_a_part_is_not_removed(run):
    part_path(run, 2).mkdir()
    (part_path(run, 2) / "notes.txt").write_text("mine")
    message = (
        f"^a part that is newer than the checkpoint must be removed when a run is resumed; found "
        f"{part_path(run, 2)}, which cannot be removed: .*\\. Move it out of the folder\\.$"
    )
    with pytest.raises(sw.LedgerError, match=message):
        LedgerWriter(run, 1).open()
    assert (part_path(run, 2) / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("count", [3, 10**12, 10**30])
def test_resuming_with_more_parts_than_there_are(run, count):
    more = "" if count == 3 else f" (and {count - 3:,} more after it)"
    with pytest.raises(sw.LedgerError) as error:
        LedgerWriter(run, count).open()
    assert str(error.value) == (
        f"a ledger must have all parts it had at the checkpoint to be resumed; found no {part_path(run, 2)}{more}. "
        "Restore the folder from a copy, or start a new run directory."
    )
    assert skipped(run) == (2 * ROWS, [])


@pytest.mark.parametrize("parts", [-1, 1.0, float("nan"), True, "1", None, [1]])
def test_an_invalid_state_is_refused(run, parts):
    ledger = sw.Ledger(run)
    with pytest.raises(sw.LedgerError) as error:
        ledger.load_state_dict({"parts": parts})
    assert str(error.value) == (
        f"the state of a ledger must hold its number of parts, 0 or more; found {parts!r}. Load what state_dict() "
        "returned."
    )
    assert skipped(run) == (2 * ROWS, [])


def test_resuming_a_run_removes_a_part_with_a_huge_number(tmp_path):
    trainer(tmp_path).fit(loader(), epochs=1)
    before = sw.read_ledger(tmp_path)
    shutil.copy(part_path(tmp_path, 0), part_path(tmp_path, 99_999_999))
    trainer(tmp_path).fit(loader(), epochs=1, resume=True)
    assert sw.read_ledger(tmp_path).equals(before) and not part_path(tmp_path, 99_999_999).exists()


class Bomb:
    def __reduce__(self):
        return (open, ("exploded", "w"))


def test_reading_a_part_runs_no_code(run, monkeypatch):
    """Arrow once unpickled the extension type that a schema names: CVE-2023-47248."""
    import pickle

    monkeypatch.chdir(run)
    forged = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": pickle.dumps(Bomb())}
    schema = pa.schema([pa.field("id", pa.int64(), metadata=forged)], {"format": "samplewise ledger", "version": "1"})
    pq.write_table(pa.table([[1, 2]], schema=schema), part_path(run, 2))
    assert skipped(run) == (2 * ROWS + 2, [])
    assert not (run / "exploded").exists()
