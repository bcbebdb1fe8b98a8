"""Recording of the samples of a trainer in a ledger, once per update, and its state in the trainer's checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from samplewise.backward import BackwardResult
from samplewise.core.batches import pick
from samplewise.ledger.indexed import Indexed
from samplewise.ledger.ledger import Ledger
from samplewise.ledger.previews import TEXT_KEYS, Names


class Recorder:
    """Results of the accumulated batches, recorded in the ledger when the optimizer has made the update."""

    def __init__(self, ledger: Ledger | None):
        self.ledger = ledger
        self.indexed: Indexed | None = None  # as it was passed to the trainer
        self.parts = 0  # of the ledger at the last checkpoint
        self._results: list[tuple[BackwardResult, Any]] = []
        self._step = 0  # update that the results belong to
        self._restarts = 0  # of the training loop in one call of train()
        self._directory = ""

    @property
    def keys(self) -> list[Hashable]:
        """Keys of the batch that the ledger reads; the id of sw.Indexed without a ledger."""
        return ["id"] if self.ledger is None else list(dict.fromkeys(self.ledger.keys.values()))

    @property
    def id_key(self) -> Hashable:
        return "id" if self.ledger is None else self.ledger.keys["id"]

    @property
    def needs_norms(self) -> bool:
        return self.ledger is not None and self.ledger.norms

    # --- one training ------------------------------------------------------------------------------------------------

    def begin(self, trainer: Any) -> None:
        self._restarts = 0
        self._directory = trainer.args.output_dir
        if self.ledger is not None and self.ledger.show is None and self.indexed is not None:
            self.ledger._item = _preview_items(self.indexed.dataset, trainer.processing_class)
        if self.ledger is not None and self.ledger.names.classes is None:
            self.ledger.names = Names(self.ledger.names.features, _class_names(trainer.model))

    def open(self, state: Any) -> None:
        """Open the ledger at the start of the training loop, after the parts of the checkpoint that it resumes from.

        The loop starts again, from the first update, if the Trainer looks for a batch size that fits the memory.
        """
        if self.ledger is None:
            return
        given = self.ledger.directory
        saved = state.stateful_callbacks.get(LedgerCallback.__name__, {}) if state.global_step else {}
        parts = saved.get("attributes", {}).get("parts")
        if parts is not None or self._restarts:
            self.ledger.load_state_dict({"parts": parts or 0})
        else:
            self.ledger._discard_rows()
        clear = state.global_step == 0 and given is None
        self.ledger._open(Path(given or self._directory), clear=clear)
        self._restarts += 1

    def finish(self) -> None:
        if self.ledger is not None:
            self.ledger.on_fit_end()

    def stop(self) -> None:
        """Write the rows so far, after an error."""
        if self.ledger is not None and self.ledger._parts is not None:
            self.ledger.on_error()

    def save(self) -> None:
        """Write the rows so far, before a checkpoint. Every rank must call it."""
        if self.ledger is not None:
            self.parts = self.ledger.state_dict()["parts"]

    # --- one update --------------------------------------------------------------------------------------------------

    def start_step(self, global_step: int) -> None:
        """Discard results of an update that was not made."""
        if global_step != self._step:
            self._results = []
        self._step = global_step

    def add(self, result: BackwardResult, batch: Any) -> None:
        if self.ledger is None:
            return
        columns = {n: c for n, c in (result.stats.columns or {}).items() if n not in self.ledger.keys}
        kept = {key: pick(batch, key) for key in self.keys}
        self._results.append((BackwardResult(replace(result.stats, columns=columns)), kept))

    def record(self, state: Any, skipped: bool) -> None:
        """Record the samples of an update that was made, or skipped because of non-finite gradients."""
        results = self._results
        self._results = []
        if self.ledger is None or state.global_step != self._step + 1:
            return
        for result, batch in results:
            self.ledger.record(result, batch, update=self._step, epoch=ceil(state.epoch) - 1, skipped=skipped)


class LedgerCallback(TrainerCallback, ExportableState):
    """Callback that opens the ledger, records updates, and puts the ledger's state into trainer_state.json."""

    def __init__(self, recorder: Recorder | None = None):
        self.recorder = recorder

    @property
    def parts(self) -> int:
        return 0 if self.recorder is None else self.recorder.parts

    @parts.setter
    def parts(self, parts: int) -> None:
        """Set by the Trainer with restore_callback_states_from_checkpoint; `Recorder.open` reads it from the state."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.recorder is not None
        self.recorder.open(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.recorder is not None
        skipped = getattr(kwargs.get("optimizer"), "step_was_skipped", False)
        self.recorder.record(state, bool(skipped))

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"parts": self.parts}}


# --- previews of samples in the report -------------------------------------------------------------------------------


def _preview_items(dataset: Any, processing_class: Any) -> Callable[[Any], Any]:
    """Function from id to item of the dataset; token ids are decoded if the trainer has a tokenizer."""
    decode = getattr(processing_class, "decode", None)

    def item(index: Any) -> Any:
        found = dataset[index]
        if decode is None or not hasattr(found, "keys") or "input_ids" not in found:
            return found
        if any(key in found for key in TEXT_KEYS):
            return found
        label = {"label": found["labels"]} if "labels" in found else {}
        return {"text": decode(found["input_ids"], skip_special_tokens=True), **label}

    return item


def _class_names(model: Any) -> list[str] | None:
    """Names of the classes in the model's configuration; None if they are not set."""
    names = getattr(getattr(model, "config", None), "id2label", None) or {}
    ordered = [str(name) for _, name in sorted(names.items())]
    return None if all(name == f"LABEL_{k}" for k, name in enumerate(ordered)) else ordered
