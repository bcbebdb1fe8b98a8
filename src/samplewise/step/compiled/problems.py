"""Why an update stays uncompiled."""

from __future__ import annotations


class CannotCompile(Exception):
    """Says why, in half a sentence. Never leaves the step."""
