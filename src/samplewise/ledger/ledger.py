"""`sw.Ledger`: records loss, gradient norm and weight of every sample at every visit."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import suppress
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from samplewise.core.files import absolute
from samplewise.core.losses import PREDICTION_COLUMNS, PROBABILITY
from samplewise.core.state import RandomState
from samplewise.core.text import plural
from samplewise.errors import LedgerError, LedgerWarning, SamplewiseError
from samplewise.ledger.aggregate import aggregate_visits
from samplewise.ledger.files import (
    FOLDER,
    LedgerWriter,
    concat_tables,
    list_parts,
    load_pyarrow,
    parts,
    read_ledger,
    unify_schemas,
)
from samplewise.ledger.previews import Names, as_names, dataset_names, indexed_items, write_previews
from samplewise.ledger.rows import RowBlock
from samplewise.parallel import collectives
from samplewise.step.backward import BackwardResult
from samplewise.step.step import Step
from samplewise.step.update import Outcome, Update
from samplewise.step.window import record_columns

if TYPE_CHECKING:
    import pyarrow

CONVERT_EVERY = 512  # updates converted to rows at a time


class TrainerOfLedger(Protocol):
    """What a ledger reads from its trainer, `sw.Trainer`."""

    @property
    def run(self) -> Path | None: ...
    @property
    def loader(self) -> Iterable[Any] | None: ...
    @property
    def fast_dev_run(self) -> bool: ...


class Ledger:
    """Callback that records each sample at each visit: id, epoch, update, loss, gradient norm, weight, and the columns
    that the loss function returns beside the losses. With nn.CrossEntropyLoss and one class index per sample, these are
    label, prediction, margin, confidence and el2n. Read it with `sw.read_ledger(run)` or any Parquet reader.

        trainer = sw.Trainer(step, "runs/first", callbacks=[sw.Ledger()])

        ledger = sw.Ledger("runs/mine")      # or in a custom loop
        ledger.listen(step)
        for update in step.over(loader):
            ledger.add(update)
        ledger.flush()

        stats = sw.backward(...)             # or in a loop without sw.Step
        ledger.record(stats, batch, update=update, epoch=epoch)

    run: run directory; the files are written to its folder "samples". Default: that of the trainer
    id: key of the ids in the batch, a name or the position in a tuple; ids are integers or strings. `sw.Indexed` adds
    the index of each sample under the default key "id". Without it, the ids of batches (x, y, names) are the names
    columns: other entries of the batch to record: keys, or a dict of column names and keys
    norms: False records NaN instead of gradient norms, which saves their cost unless a transform needs them
    probabilities: True also records the probabilities of all classes with nn.CrossEntropyLoss, for cleanlab: columns
    probability/0, probability/1, ...
    rows_per_file: rows of each rank after which a file is written; with a trainer, also at every checkpoint
    show: preview of a sample in the report: a function of the id that returns an image, a text, or a mapping or vector
    of values, alone or in a tuple with a label. None: the item of the dataset inside `sw.Indexed`. False: no previews
    features: names of the values of a vector, for previews; default: the attribute `feature_names` of the dataset
    classes: names of the classes, for labels and predictions in the report; default: the attribute `classes` of the
    dataset
    """

    def __init__(
        self,
        run: str | Path | None = None,
        *,
        id: Hashable = "id",
        columns: Iterable[Hashable] | Mapping[str, Hashable] = (),
        norms: bool = True,
        probabilities: bool = False,
        rows_per_file: int = 100_000,
        show: Callable[[Any], Any] | Literal[False] | None = None,
        features: Iterable[str] | None = None,
        classes: Iterable[str] | None = None,
    ):
        if type(rows_per_file) is not int or rows_per_file < 1:
            raise ValueError(f"rows_per_file must be a positive whole number; found {rows_per_file!r}.")
        if isinstance(columns, str):
            raise TypeError(
                f"columns must be a list of keys, or a dict of names and keys; found the string {columns!r}. Pass "
                f"[{columns!r}]."
            )
        if not (show is None or show is False or callable(show)):
            raise TypeError(
                f"show must be a function of the id, None or False; found {show!r}. Pass, for example, "
                "show=lambda id: texts[id]."
            )
        load_pyarrow()  # raises now, not after an epoch, if pyarrow is missing
        self.run = None if run is None else absolute(run)
        self.norms = norms
        self.probabilities = probabilities
        self.rows_per_file = rows_per_file
        self.show = show
        self._names = Names(_as_names("features", features), _as_names("classes", classes))
        named = columns if isinstance(columns, Mapping) else {str(key): key for key in columns}
        self._keys: dict[str, Hashable] = {**named, "id": id}
        self._resuming = False
        self._dry_run = False
        self._item: Callable[[Any], Any] | None = show if callable(show) else None
        self._parts: LedgerWriter | None = None
        self._loaded_parts = 0  # of parts in the loaded state
        self._schema = load_pyarrow().schema([])
        self._discard_rows()

    def __repr__(self) -> str:
        columns = ", ".join(name if name == key else f"{name}={key!r}" for name, key in self._keys.items())
        run = self.run if self._parts is None else self._parts.run
        where = "the run directory of the trainer" if run is None else repr(str(run))
        return f"Ledger({where}, columns {columns}, {self._rows:,} unwritten rows)"

    def _discard_rows(self) -> None:
        """Discard rows that have not been written."""
        self._updates: list[Update] = []
        self._epochs: list[int | None] = []
        self._tables: list[pyarrow.Table] = []
        self._copying: RowBlock | None = None  # the last block, being copied from the device
        self._rows = 0  # samples since the last part, of all ranks
        self._added = 0  # updates since the last part
        self._convert_after = 1  # convert the first update at once, to raise its errors early; later ones in groups

    def listen(self, step: Step) -> None:
        """Register the columns and norms that the ledger needs with the step. Call it before the first update."""
        if not hasattr(step, "require"):
            raise TypeError(f"listen needs the sw.Step of the training; found {type(step).__name__}. Pass the step.")
        predictions = [name for name in PREDICTION_COLUMNS if name not in self._keys]
        predictions += [PROBABILITY] if self.probabilities else []
        step.require(norms=self.norms, columns=self._keys, predictions=predictions)

    def add(self, update: Update, epoch: int | None = None) -> None:
        """Record an update. `epoch`: default the epoch counted by step.over."""
        if not isinstance(update, Update):
            raise TypeError(
                f"add needs an update; found {type(update).__name__}. Pass what the step yields: for update in "
                "step.over(loader): ledger.add(update)."
            )
        if self._dry_run:
            return
        if self._parts is None or self._resuming:
            self._open(self._run_directory(), clear=False)
        assert self._parts is not None
        # False if all samples are of other ranks.
        has_samples = self._parts.size == 1 or bool(update.local_samples or update._batch_columns)
        if has_samples and not update._has_columns(*self._keys):
            raise LedgerError(
                "an update must have the ids of all its samples to be recorded; found an update without some of them. "
                "Call ledger.listen(step) before the first update, and do not add updates that were started earlier."
            )
        if has_samples:
            self._updates.append(update)
            self._epochs.append(epoch)
        self._rows += update.samples
        self._added += 1
        if len(self._updates) >= self._convert_after:
            self._convert()
        # Equal on all ranks: either all write a part, or none does.
        if self._rows >= self.rows_per_file * self._parts.size:
            self.flush()

    def record(
        self, results: BackwardResult, batch: Any, *, update: int, epoch: int = 0, skipped: bool = False
    ) -> None:
        """Record samples of a loop without `sw.Step`, from the results of `sw.backward` and the batch with their ids.

        update: index of the update that the samples belong to, from 0. Several calls may have the same one. With
        several ranks, each rank must call it.
        skipped: the update was skipped because of NaN or infinity, so that the weights of its samples are 0.
        """
        if not isinstance(results, BackwardResult):
            raise TypeError(f"record needs the results of sw.backward; found {type(results).__name__}.")
        _check_index("update", update)
        _check_index("epoch", epoch)
        samples = int(collectives.all_reduce_scalars(len(results))[0])
        outcome = Outcome(skipped, lr=[], norm=lambda: torch.tensor(torch.nan))
        columns = record_columns(batch, self._keys, epoch)
        self.add(Update(update, samples, outcome, [results.stats], [columns]))

    def flush(self) -> None:
        """Write the rows recorded so far as a new part. Every rank must call it."""
        self._convert()
        self._finish_copy()
        if self._added:
            assert self._parts is not None
            tables = self._tables or [load_pyarrow().table({})]
            self._parts.write(concat_tables(tables, self._parts.run))
            self._tables = []
            self._rows = 0
            self._added = 0

    def read(self) -> pyarrow.Table:
        """Rows recorded so far, of all ranks, as a pyarrow table: see `sw.read_ledger`. Every rank must call it."""
        self.flush()
        collectives.barrier()
        return read_ledger(self._run_directory() if self._parts is None else self._parts.run)

    def _convert(self) -> None:
        """Convert the updates recorded so far to a block of rows. Its copy from the device is read with the next one;
        that of the first update is read at once, to raise its errors early.
        """
        self._finish_copy()
        updates = self._updates
        epochs = self._epochs
        self._updates = []
        self._epochs = []
        if updates:
            self._copying = RowBlock(updates, epochs, self.norms)
            if self._copying.complete or self._convert_after == 1:
                self._finish_copy()
            self._convert_after = CONVERT_EVERY

    def _finish_copy(self) -> None:
        """Add the table of the last block."""
        block = self._copying
        self._copying = None
        if block is not None:
            table = block.table()
            self._schema = unify_schemas(self._schema, table.schema)
            self._tables.append(table)

    # --- run directory ---------------------------------------------------------------------------------------------

    def _run_directory(self, trainer: TrainerOfLedger | None = None) -> Path:
        run = self.run or (None if trainer is None else trainer.run)
        if run is None:
            raise ValueError(
                "a ledger must have a run directory; found none. Pass it to the ledger, Ledger('runs/mine'), or to the "
                "trainer, Trainer(step, 'runs/mine')."
            )
        return run

    def _open(self, run: Path, clear: bool) -> None:
        """Continue after the parts of the loaded state. `clear`: without a loaded state, remove existing parts."""
        self._parts = LedgerWriter(run, self._loaded_parts, collectives.rank(), collectives.size())
        if collectives.rank() == 0:
            existing = len(list_parts(run))
            if existing and not self._resuming and not clear:
                self._parts = None
                raise LedgerError(
                    f"a new ledger must have a run directory without parts; found {plural(existing, 'part')} in "
                    f"{run / FOLDER}. Load the state that belongs to them to continue that ledger, or choose "
                    "another run directory."
                )
            self._parts.open()
        collectives.barrier()
        self._resuming = False

    # --- callback of the trainer -----------------------------------------------------------------------------------

    def on_fit_start(self, trainer: TrainerOfLedger, step: Step) -> None:
        self._dry_run = trainer.fast_dev_run
        if self._dry_run:
            return
        self.listen(step)
        self._use_dataset(trainer.loader)
        if self._parts is None or self._resuming:
            self._open(self._run_directory(trainer), clear=self.run is None)

    def _prepare(self, run: str | Path, loader: Any = None, *, clear: bool = False, dry_run: bool = False) -> None:
        """Open the ledger for the loop of another framework, as a trainer does, before the first update.

        run: run directory, used if the ledger has none of its own
        loader: its dataset has the items for previews, and the names of classes and features
        clear: remove the parts of an earlier training from the run directory, unless a state was loaded. Default: they
        are an error, as always in a run directory of the ledger's own
        dry_run: record nothing
        """
        self._dry_run = dry_run
        self._use_dataset(loader)
        if not dry_run and (self._parts is None or self._resuming):
            self._open(self.run or absolute(run), clear=clear and self.run is None)

    def _reset(self) -> None:
        """Discard rows that have not been written, and a loaded state: the next training starts a new ledger."""
        self._discard_rows()
        self._parts = None
        self._loaded_parts = 0
        self._resuming = False

    def _set_previews(self, item: Callable[[Any], Any] | None, classes: list[str] | None) -> None:
        """Set the function from id to item for previews, and the names of classes, unless the ledger has its own."""
        if self.show is None:
            self._item = item
        self._names = Names(self._names.features, self._names.classes or classes)

    def _use_dataset(self, loader: Any) -> None:
        """Take items for previews, and names of features and classes, from the dataset of a loader."""
        if self.show is None:
            self._item = indexed_items(loader)
        names = dataset_names(loader)
        self._names = Names(self._names.features or names.features, self._names.classes or names.classes)

    def on_update(self, update: Update) -> None:
        self.add(update)

    def on_epoch_end(self, epoch: int) -> None:
        if (epoch + 1) & epoch == 0:  # after epoch 1, 2, 4, 8, ...: the whole ledger is read, and it grows
            self._preview()

    def on_fit_end(self) -> None:
        self.flush()
        self._preview()

    def _preview(self) -> None:
        """Write previews of the most suspicious samples. An error becomes a warning and does not end the training."""
        has_content = self._item is not None or bool(self._names.classes)
        if self._dry_run or not has_content or self._parts is None or not (self._parts.count or self._added):
            return
        self.flush()
        collectives.barrier()
        if collectives.rank() != 0:
            return
        run = self._parts.run
        restore = RandomState().restore  # datasets may draw random numbers
        try:
            write_previews(run, self._item, aggregate_visits(parts(run)), self._names)
        except Exception as why:
            reason = str(why).rstrip(".")
            warnings.warn(
                f"samples must be accessible by id to be shown in the report; found {type(why).__name__}: {reason}. "
                "Pass Ledger(show=function of the id), or show=False.",
                LedgerWarning,
                stacklevel=2,
            )
        finally:
            restore()

    def on_error(self) -> None:
        with suppress(SamplewiseError):  # the first error is the one that is reported
            self.flush()

    def state_dict(self) -> dict[str, Any]:
        """Number of parts written so far; writes the recorded rows first."""
        self.flush()
        if self._parts is None or self._resuming:
            return {"parts": self._loaded_parts}
        return {"parts": self._parts.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the parts of the state. Newer parts are removed when recording continues."""
        parts = state.get("parts")
        if type(parts) is not int or parts < 0:
            raise LedgerError(
                f"the state of a ledger must hold its number of parts, 0 or more; found {parts!r}. Load what "
                "state_dict() returned."
            )
        self._discard_rows()
        self._loaded_parts = parts
        self._resuming = True


def _check_index(name: str, index: Any) -> None:
    if not isinstance(index, Integral) or int(index) < 0:
        raise ValueError(f"{name} must be an integer, counted from 0; found {index!r}.")


def _as_names(argument: str, value: Any) -> list[str] | None:
    """The argument `features` or `classes` as a list of strings."""
    names = as_names(value)
    if value is not None and not names:
        raise TypeError(f"{argument} must be a list of names; found {value!r}. Pass for example {argument}=['a', 'b'].")
    return names
