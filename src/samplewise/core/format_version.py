"""File and format version of run directories, and the error message for files of another version."""

from __future__ import annotations

RUN_FILE = "run.json"  # in every run directory
RUN_VERSION = 1  # "format_version" in that file


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
