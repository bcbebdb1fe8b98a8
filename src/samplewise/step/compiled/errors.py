"""Exception for updates that cannot be compiled."""

from __future__ import annotations


class CannotCompile(Exception):
    """An update cannot be compiled. The message is a short clause with the reason; caught inside the step."""
