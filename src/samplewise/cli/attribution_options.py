"""Values of --queries and --method of `samplewise attribute`. Does not import torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

import typer

from samplewise.core.text import did_you_mean

QUERIES = "--queries"
RULES = ("wrong", "worst")
INDICES = re.compile(r"([0-9]+)(?:-([0-9]+))?")  # a part of "0,5,10-20"


def check_queries(wanted: str) -> None:
    """Raise typer.BadParameter unless the text has the form of queries."""
    if wanted in RULES or all(INDICES.fullmatch(part.strip()) for part in wanted.split(",")):
        return
    raise typer.BadParameter(
        f"must be indices of validation samples such as 0,5,10-20, or wrong, or worst; found {wanted!r}.",
        param_hint=QUERIES,
    )


@dataclass(frozen=True)
class Method:
    """Attribution method; `attribution_methods.COMPUTATIONS` has the functions.

    accepts   names of options
    models    largest number of checkpoints that it can use; None: any number
    options   values of options
    """

    name: str
    title: str
    accepts: tuple[str, ...] = ()
    models: int | None = None
    options: dict[str, Any] = field(default_factory=dict)


METHODS = {
    method.name: method
    for method in (
        Method("influence", "TracIn influence"),
        Method("trak", "TRAK", accepts=("dim", "damping")),
        Method("ekfac", "EK-FAC influence", accepts=("damping",), models=1),
    )
}


def method_named(name: str, **options: Any) -> Method:
    """Method of this name with the options that are not None; raises typer.BadParameter for one it does not accept."""
    if name not in METHODS:
        raise typer.BadParameter(
            f"must be one of {', '.join(METHODS)}; found {name!r}. {did_you_mean(name, METHODS)}".rstrip(),
            param_hint="--method",
        )
    method = METHODS[name]
    options = {option: value for option, value in options.items() if value is not None}
    for option in options:
        if option not in method.accepts:
            others = " or ".join(other.name for other in METHODS.values() if option in other.accepts)
            raise typer.BadParameter(f"must be used with --method {others}; found {name}.", param_hint=f"--{option}")
    return replace(method, options=options)
