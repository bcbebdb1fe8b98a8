"""Compiled updates: tracing, compilation with Inductor, guards, and verification against the eager update.

Exceptions for updates that are not compiled, which are caught inside the step:

CannotCompile
├── DoesNotPay
└── Undecided
"""

from __future__ import annotations


class CannotCompile(Exception):
    """An update cannot be compiled. The message is a short clause with the reason."""


class DoesNotPay(CannotCompile):
    """Updates of some shape are not faster when compiled. The message is a short clause with the reason."""


class Undecided(CannotCompile):
    """This update cannot be used to compile, because it is not finite; a later one may be."""
