"""State dicts of a checkpoint, for use without the Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from samplewise.errors import CheckpointError
from samplewise.loop.checkpoint import store


def load_checkpoint(path: str | Path, device: str | torch.device = "cpu") -> dict[str, Any]:
    """Return the state dicts of a checkpoint, by name: "model", "optimizer", ...

        model.load_state_dict(sw.load_checkpoint("runs/digits")["model"])

    `path` is a checkpoint or a run directory, of which the newest readable checkpoint is used. Tensors are on `device`.
    Nothing is unpickled, so a checkpoint from an untrusted source cannot run code, and no file is changed.
    """
    path = Path(path)
    checkpoints = path / "checkpoints"
    if not checkpoints.is_dir():
        return store.read(path, device)
    state = store.newest(checkpoints, lambda found: store.read(found, device))
    if state is None:
        raise CheckpointError(
            f"{path} must have a checkpoint that can be read; found none in {checkpoints}. "
            "Give another run directory, or train with Trainer(..., run=...) first."
        )
    return state[0]
