"""`sw.Ledger`: records every sample at every visit."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from samplewise import ranks
from samplewise.errors import LedgerError, LedgerWarning, SamplewiseError
from samplewise.files import absolute
from samplewise.ledger.files import FOLDER, Parts, agreed, arrow, numbered, parts, samples, together
from samplewise.ledger.previews import items_within, write_previews
from samplewise.ledger.rows import table_of
from samplewise.ledger.visits import visited
from samplewise.replay import random_state
from samplewise.step.update import Update

TOGETHER = 512  # updates are made rows at a time: until then they are kept as they are


class Ledger:
    """Records, for each sample at each visit, its id, epoch, update, loss, gradient norm and weight, and what the loss
    function returned beside the losses. `sw.samples(run)` reads it back; so does whatever reads Parquet.

        trainer = sw.Trainer(step, "runs/first", callbacks=[sw.Ledger()])

        ledger = sw.Ledger("runs/mine")      # or in a loop of your own
        ledger.listen(step)
        for update in step.over(loader):
            ledger.add(update)
        ledger.flush()

    directory: the files go into its folder "samples". None: the trainer's own.
    id: the key of the batch where the ids are (a name, or the place in a tuple): whole numbers or texts. `sw.Indexed`
    puts the sample's index there.
    columns: what else of the batch is recorded: keys, or a dict of names and keys.
    norms: False spares their cost, if no transform needs them; they are NaN then.
    every: so many rows are written at a time; and, with a trainer, what there is at every checkpoint.
    show: what the report shows of a sample, a function of its id that returns an image, a text, or a mapping or vector
    of values, alone or in a tuple with a label. None: the item of the data set that `sw.Indexed` numbers. False: none.
    """

    def __init__(
        self,
        directory: str | Path | None = None,
        *,
        id: Hashable = "id",
        columns: Iterable[Hashable] | Mapping[str, Hashable] = (),
        norms: bool = True,
        every: int = 100_000,
        show: Callable[[Any], Any] | Literal[False] | None = None,
    ):
        if type(every) is not int or every < 1:
            raise ValueError(f"every must be a positive number of rows; found {every!r}.")
        if isinstance(columns, str):
            raise TypeError(f"columns must be several keys, or a dict of names and keys; found the text {columns!r}.")
        arrow()  # now, not after an epoch
        self.directory = None if directory is None else absolute(directory)
        self.norms, self.every, self.show = norms, every, show
        named = columns if isinstance(columns, Mapping) else {str(key): key for key in columns}
        self.keys: dict[str, Hashable] = {**named, "id": id}
        self._resumes = self._rehearses = False
        self._item: Callable[[Any], Any] | None = show if callable(show) else None
        self._parts: Parts | None = None
        self._count = 0  # of parts, as a state says
        self._schema = arrow().schema([])
        self._forget()

    def _forget(self) -> None:
        self._updates: list[Update] = []
        self._epochs: list[int | None] = []
        self._tables: list[Any] = []
        self._rows, self._added = 0, 0  # samples and updates since the last part, of all ranks
        self._patience = 1  # the first update is looked at, and then many together

    def listen(self, step: Any) -> None:
        """From now on the updates of this step tell what has to be known."""
        step.columns.update(self.keys)
        if self.norms:
            step.record.add("norms")

    def add(self, update: Update, epoch: int | None = None) -> None:
        """Records an update. `epoch`: if you do not use step.over, which counts them."""
        if self._rehearses:
            return
        if self._parts is None or self._resumes:
            self._open(self._place(), clear=False)
        assert self._parts is not None
        ours = self._parts.size == 1 or bool(update.own or update.noted)  # else it was made of others' samples
        if ours and not update.knows(*self.keys):
            raise LedgerError(
                "a ledger must be told of an update from its first sample on; found one that does not know the ids of "
                "all its samples. Call ledger.listen(step) before; add no update that was begun earlier."
            )
        if ours:
            self._updates.append(update)
            self._epochs.append(epoch)
        self._rows, self._added = self._rows + update.samples, self._added + 1
        if len(self._updates) >= self._patience:
            self._gather()
        if self._rows >= self.every * self._parts.size:  # the same everywhere: all ranks write a part, or none does
            self.flush()

    def flush(self) -> None:
        """Writes what has been recorded so far. Of several ranks all must do so."""
        self._gather()
        if self._added:
            assert self._parts is not None
            tables = self._tables or [arrow().table({})]
            self._parts.write(together(tables, self._parts.run))
            self._tables, self._rows, self._added = [], 0, 0

    def samples(self) -> Any:
        """What has been recorded so far: see `sw.samples`. Of several ranks all must ask."""
        self.flush()
        ranks.together()
        return samples(self._place() if self._parts is None else self._parts.run)

    def _gather(self) -> None:
        updates, epochs = self._updates, self._epochs
        self._updates, self._epochs = [], []
        if updates:
            table = table_of(updates, epochs, self.norms)
            self._schema = agreed(self._schema, table.schema)
            self._tables.append(table)
            self._patience = TOGETHER

    # --- where -----------------------------------------------------------------------------------------------------

    def _place(self, trainer: Any = None) -> Path:
        place = self.directory or getattr(trainer, "run", None)
        if place is None:
            raise ValueError("Ledger needs a directory; found none. Use Ledger('some/place'), or a trainer with run=.")
        return Path(place)

    def _open(self, place: Path, clear: bool) -> None:
        """Goes on after the parts that the state knows of. `clear`: without one, what is there may go."""
        self._parts = Parts(place, self._count, ranks.rank(), ranks.size())
        if ranks.rank() == 0:
            self._clean(self._parts, clear)
        ranks.together()
        self._resumes = False

    def _clean(self, parts: Parts, clear: bool) -> None:
        there = len(numbered(parts.run))
        if there and not self._resumes and not clear:
            self._parts = None
            raise LedgerError(
                f"a ledger must have a directory of its own; found {there} parts in {parts.run / FOLDER}. Load the "
                "state that belongs to them to go on, or choose another."
            )
        parts.open()

    # --- of a trainer ----------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Any, step: Any) -> None:
        self._rehearses = trainer.fast_dev_run
        if self._rehearses:
            return
        self.listen(step)
        if self.show is None:
            self._item = items_within(getattr(trainer, "loader", None))
        if self._parts is None or self._resumes:
            self._open(self._place(trainer), clear=self.directory is None)

    def on_update(self, update: Update) -> None:
        self.add(update)

    def on_epoch_end(self, epoch: int) -> None:
        if (epoch + 1) & epoch == 0:  # 1, 2, 4, 8, ...: all that is there is read, and later there is more of it
            self._preview()

    def on_fit_end(self) -> None:
        self.flush()
        self._preview()

    def _preview(self) -> None:
        """Keeps what the most suspicious samples look like. No reason to end a training if that fails."""
        if self._rehearses or self._item is None or self._parts is None or not (self._parts.count or self._added):
            return
        self.flush()
        ranks.together()
        if ranks.rank() == 0:
            self._write_previews(self._parts.run, self._item)

    def _write_previews(self, run: Path, item: Callable[[Any], Any]) -> None:
        restore = random_state()  # data sets may draw
        try:
            write_previews(run, item, visited(parts(run)))
        except Exception as why:
            warnings.warn(
                f"samples can be shown in the report if they can be looked up; found {type(why).__name__}: {why} "
                "Use Ledger(show=a function of the id), or show=False.",
                LedgerWarning,
                stacklevel=2,
            )
        finally:
            restore()

    def on_error(self) -> None:
        with suppress(SamplewiseError):  # the one that is told of is the first
            self.flush()

    def state_dict(self) -> dict[str, Any]:
        """How much of the ledger belongs to now; all of that is on disk."""
        self.flush()
        return {"parts": self._count if self._parts is None or self._resumes else self._parts.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What is newer will be removed when the ledger goes on."""
        parts = state.get("parts")
        if type(parts) is not int or parts < 0:
            raise LedgerError(
                f"the state of a ledger must say how many parts it has, 0 or more; found {parts!r}. Load what "
                "state_dict() returned."
            )
        self._forget()
        self._count = parts
        self._resumes = True
