"""Facts about an exported update that its file stores and that `export_update` returns."""

from __future__ import annotations

import json
from dataclasses import dataclass

from samplewise.export.graph import UpdateProgram


@dataclass(frozen=True)
class Memory:
    """Bytes of tensors in memory; scratch: of intermediate results, None if they are allocated at run time."""

    constant: int
    mutable: int
    scratch: int | None


def metadata(program: UpdateProgram) -> str:
    """Names that a file stores, as JSON."""
    return json.dumps(
        {
            "state": list(program.state),
            "inputs": list(program.update.inputs),
            "predict": None if program.predict is None else list(program.predict.inputs),
            "lr": program.update.inputs["lr"].tolist(),
        }
    )
