"""Files of named tensors and a description in JSON, in the format of safetensors: reading them runs no code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samplewise.core.atomic_io import atomic_write

KEY = "samplewise"  # of the description in the metadata


def require_safetensors(what: str = "checkpoints") -> Any:
    """Import safetensors, or raise ImportError with the command to install it."""
    try:
        import safetensors
        import safetensors.torch
    except ImportError:
        raise ImportError(f"{what} need safetensors: pip install 'samplewise[train]'") from None
    return safetensors


def write_tensors(path: Path, tensors: Mapping[str, Tensor], description: Any) -> None:
    """Write a file atomically. Tensors may share memory; they are written separately."""
    safetensors = require_safetensors("files of tensors")
    separate = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    with atomic_write(path, path.with_name(f"{path.name}.partial")) as file:
        file.write(safetensors.torch.save(separate, {KEY: json.dumps(description)}))


def read_tensors(path: Path, device: str | torch.device = "cpu") -> tuple[dict[str, Tensor], Any]:
    """Tensors and description of a file. Raises ValueError for a file that `write_tensors` has not written."""
    safetensors = require_safetensors("files of tensors")
    try:
        with safetensors.safe_open(path, "pt", str(device)) as file:
            description = json.loads(file.metadata()[KEY])
            return {name: file.get_tensor(name) for name in file.keys()}, description  # noqa: SIM118
    except FileNotFoundError:
        raise
    except (safetensors.SafetensorError, OSError, KeyError, TypeError, ValueError, RecursionError) as why:
        raise ValueError(f"{path} must be a file of tensors; found other content: {why}") from why
