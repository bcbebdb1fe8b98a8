"""Format version of run directories, and the error message for files of another version."""

from __future__ import annotations

import json
from pathlib import Path

RUN_FILE = "run.json"
RUN_VERSION = 1


def other_version(name: object, found: object, expected: int) -> str:
    """Return one sentence for a file or directory whose format version `found` is not `expected`."""
    if type(found) is int and found > expected:
        remedy = "it was written by a newer one; upgrade with pip install --upgrade samplewise"
    else:
        remedy = "use the version that wrote it, or start a new run directory"
    shown = repr(found)[:40] if found is not None else "none"
    return (
        f"{name} must have format version {expected}; found {shown}, which this version of samplewise does not read: "
        f"{remedy}."
    )


def run_version_error(directory: Path) -> str | None:
    """Return one sentence if run.json of a run directory has another format version; None if it fits or is absent."""
    try:
        about = json.loads((directory / RUN_FILE).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        about = None
    found = about.get("format_version") if isinstance(about, dict) else None
    if type(found) is int and found == RUN_VERSION:
        return None
    return other_version(directory / RUN_FILE, found, RUN_VERSION)
