"""The ledger of a trainer: ids in its batches, rows once per update, its state in checkpoints, and previews."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from importlib import import_module
from inspect import signature
from math import ceil
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from samplewise.integrations.adapter import Adapter
from samplewise.ledger.previews import TEXT_KEYS
from samplewise.ledger.sample_ids import Columns, Indexed


class TrainerLedger:
    """The ledger of a trainer: opened for each training, with rows once per update, and saved with its checkpoints."""

    def __init__(self, adapter: Adapter, indexed: Indexed | None):
        self.parts = 0  # of the ledger at the last checkpoint
        self._adapter = adapter
        self.chain = adapter.chain
        self._ledger = adapter.ledger
        self._indexed = indexed  # as it was passed to the trainer
        self._trainer: Any = None
        self._step = 0  # update that the passes of the adapter belong to
        self._restarts = 0  # of the training loop in one call of train()

    # --- one training ------------------------------------------------------------------------------------------------

    def begin(self, trainer: Any) -> None:
        self._restarts = 0
        self._trainer = trainer

    def open(self, state: Any) -> None:
        """Open the ledger at the start of the training loop, after the parts of the checkpoint that it resumes from.

        The loop starts again, from the first update, if the Trainer looks for a batch size that fits the memory.
        """
        self._adapter.take_passes()  # batches of an update that was not made
        saved = state.stateful_callbacks.get(LedgerCallback.__name__, {}) if state.global_step else {}
        self._adapter.chain.load_state_dict(saved.get("attributes", {}).get("transforms"))
        if self._ledger is None:
            return
        parts = saved.get("attributes", {}).get("parts")
        if parts is not None or self._restarts:
            self._ledger.load_state_dict({"parts": parts or 0})
        else:
            self._ledger._reset()
        self._restarts += 1
        self._ledger._prepare(self._trainer.args.output_dir, clear=state.global_step == 0)
        items = None
        if self._indexed is not None:
            items = _preview_items(self._indexed.dataset, self._trainer.processing_class)
        names = getattr(getattr(self._trainer.model, "config", None), "id2label", None) or {}
        classes = [str(name) for _, name in sorted(names.items())]
        are_set = any(name != f"LABEL_{k}" for k, name in enumerate(classes))  # otherwise those of transformers
        self._ledger._set_previews(items, classes if are_set else None)

    def save(self) -> None:
        """Write the rows so far, before a checkpoint. Every rank must call it."""
        if self._ledger is not None:
            self.parts = self._ledger.state_dict()["parts"]

    # --- one update --------------------------------------------------------------------------------------------------

    def start_step(self, global_step: int) -> None:
        """Discard passes of an update that was not made."""
        if global_step != self._step:
            self._adapter.take_passes()
        self._step = global_step

    def record(self, state: Any, skipped: bool) -> None:
        """Record the samples of an update that was made, or skipped because of non-finite gradients."""
        passes = self._adapter.take_passes()
        if state.global_step == self._step + 1:
            self._adapter.record(passes, self._step, skipped=skipped, epoch=ceil(state.epoch) - 1)


class LedgerCallback(TrainerCallback, ExportableState):
    """Callback that opens the ledger, records updates, and puts the ledger's state into trainer_state.json."""

    def __init__(self, ledger: TrainerLedger | None = None):
        self.ledger = ledger

    @property
    def parts(self) -> int:
        return 0 if self.ledger is None else self.ledger.parts

    @parts.setter
    def parts(self, parts: int) -> None:
        """Called by the Trainer with restore_callback_states_from_checkpoint. `TrainerLedger.open` reads the state."""

    @property
    def transforms(self) -> Any:
        return None if self.ledger is None else self.ledger.chain.state_dict()

    @transforms.setter
    def transforms(self, transforms: Any) -> None:
        """As for `parts`."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.ledger is not None
        self.ledger.open(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.ledger is not None
        skipped = getattr(kwargs.get("optimizer"), "step_was_skipped", False)
        self.ledger.record(state, bool(skipped))

    def state(self) -> dict[str, Any]:
        attributes: dict[str, Any] = {"parts": self.parts}
        if self.ledger is not None and self.ledger.chain.states:
            attributes["transforms"] = self.ledger.chain.state_dict()
        return {"args": {}, "attributes": attributes}


# --- ids in the batches -----------------------------------------------------------------------------------------------


def with_id_column(argument: Any) -> Any:
    """An argument of the trainer; a `datasets.Dataset` inside sw.Indexed becomes a dataset with the column "id".

    TRL tokenizes, filters and shuffles a dataset with methods that only a `datasets.Dataset` has.
    """
    if not isinstance(argument, Indexed):
        return argument
    dataset = argument.dataset
    try:
        import datasets
    except ImportError:
        return argument
    if not isinstance(dataset, datasets.Dataset) or dataset.format["type"] == "custom":
        return argument  # a function computes the items of the format "custom", and may leave out the ids
    if "id" in dataset.column_names:
        raise TypeError(
            "Indexed must be able to add the column 'id' to a dataset; found one that has it. Pass the dataset without "
            "sw.Indexed: sw.Ledger() reads its column 'id'."
        )
    return dataset.add_column("id", list(range(len(dataset))))


def with_packed_ids(
    prepare: Callable[..., Any], dataset: Any, keys: Sequence[Hashable], *args: Any, **kwargs: Any
) -> Any:
    """A dataset that TRL has prepared with `prepare`. If it packs documents, the columns `keys` of a row are lists, one
    value per document.

    TRL packs tokens and labels only. Here the columns are packed with them, repeated for each token.
    """
    options = signature(prepare).bind(dataset, *args, **kwargs).arguments
    config: Any = options.get("args")
    columns = [key for key in keys if key in (getattr(dataset, "column_names", None) or ())]
    if not (options.get("packing") and columns and config.max_length) or config.packing_strategy == "wrapped":
        return prepare(**options)
    pack_dataset = import_module("trl").pack_dataset
    # The steps of TRL before packing, of which truncation is a part, and after it.
    documents = prepare(**{**options, "packing": False, "args": _untruncated(config)})
    documents = documents.select_columns(["input_ids", "labels", *columns])
    documents = documents.map(lambda row: {key: [row[key]] * len(row["input_ids"]) for key in columns})
    # As in TRL: processes pack parts of the dataset. An iterable dataset has none.
    processes = {"num_proc": config.dataset_num_proc} if hasattr(documents, "__len__") else {}
    packed = pack_dataset(documents, config.max_length, config.packing_strategy, processes)

    def of_documents(row: Any) -> dict[Hashable, Any]:
        firsts = [sum(row["seq_lengths"][:k]) for k in range(len(row["seq_lengths"]))]
        return {key: [row[key][first] for first in firsts] for key in columns}

    packed = packed.map(of_documents)
    return packed.shuffle(seed=config.seed) if config.shuffle_dataset else packed


def _untruncated(config: Any) -> Any:
    """A copy of the settings of TRL in which documents have any length."""
    config = copy.copy(config)
    config.max_length = None
    return config


def with_columns(batch: Any, columns: Columns) -> Any:
    """The batch of the trainer's collator, which does not get the columns of the ledger."""
    for key, values in columns.items():
        batch[key] = values
    return batch


# --- previews of samples in the report --------------------------------------------------------------------------------


def _preview_items(dataset: Any, processing_class: Any) -> Callable[[Any], Any]:
    """Function from id to item of the dataset; token ids are decoded if the trainer has a tokenizer."""
    decode = getattr(processing_class, "decode", None)

    def item(index: Any) -> Any:
        entries = dataset[index]
        if decode is None or not hasattr(entries, "keys") or "input_ids" not in entries:
            return entries
        if any(key in entries for key in TEXT_KEYS):
            return entries
        label = {"label": entries["labels"]} if "labels" in entries else {}
        return {"text": decode(entries["input_ids"], skip_special_tokens=True), **label}

    return item
