"""Writes docs/reference.md, the reference of all public names, from their docstrings.

    python docs/reference.py        # make docs

tests/test_docs.py compares: whoever changes a docstring or a signature runs this again.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_overloads

import samplewise
from samplewise import diagnostics
from samplewise.engine.rules import conformance
from samplewise.loop import callbacks, events, loggers

TARGET = Path(__file__).with_name("reference.md")

# Every name of samplewise.__all__ that is no error stands in one of these; errors have a section of their own.
SECTIONS = {
    "Per-sample gradients": ["gradients", "Gradients", "input_gradients", "scan", "check"],
    "Updates": ["Step", "Update", "auto", "fsdp", "sgd"],
    "Transforms": ["chain", "clip", "weight", "drop", "normalize", "align", "group", "noise", "check_transform"],
    "Diagnostics": ["noise_scale", "NoiseScale", "signal_to_noise", "fisher", "similarity", "suspects"],
    "Attribution": ["influence", "ProjectedStore"],
    "The loop": ["Trainer"],
    "The ledger": ["Ledger", "Indexed", "samples"],
}
RESULTS = {"Diagnostics": [diagnostics.Noise, diagnostics.Similarity, diagnostics.Suspects]}
RETURNED = (samplewise.Gradients, samplewise.Update, *RESULTS["Diagnostics"])  # which nobody makes by hand
SHOWN = ("__call__", "__getitem__")  # of the methods with underscores


def page() -> str:
    parts = ["# Reference", "Made by `make docs` from the docstrings: change those."]
    for title, names in SECTIONS.items():
        parts += [f"## {title}", *(entry(f"sw.{name}", getattr(samplewise, name)) for name in names)]
        parts += [entry(kind.__name__, kind) for kind in RESULTS.get(title, ())]
    parts += ["## Callbacks", f"In `{callbacks.__name__}`."]
    parts += [entry(name, each) for name, each in classes(callbacks)]
    parts += ["### Events", text(events), "## Loggers", f"In `{loggers.__name__}`. {text(loggers)}"]
    parts += [entry(name, each) for name, each in classes(loggers)]
    parts += ["## Rules", f"In `{conformance.__name__}`.", entry("check_rule", conformance.check_rule)]
    parts += ["## Errors and warnings", text(samplewise.errors)]
    parts += ["\n".join(f"- `sw.{name}`: {getattr(samplewise, name).__doc__}" for name in errors())]
    return "\n\n".join(parts) + "\n"


def errors() -> list[str]:
    """In the order in which they are defined: the family's."""
    return [name for name in vars(samplewise.errors) if name in samplewise.__all__]


def classes(module: ModuleType) -> Iterator[tuple[str, Any]]:
    for name, each in vars(module).items():
        if inspect.isclass(each) and each.__module__ == module.__name__ and not name.startswith("_"):
            yield name, each


def entry(name: str, thing: Any) -> str:
    parts = [f"### {name}"]
    if not inspect.isclass(thing):
        return "\n\n".join([*parts, shown(signatures(name, thing)), text(thing)])
    if thing not in RETURNED:
        parts.append(shown(signatures(name, thing)))
    return "\n\n".join([*parts, text(thing), *members(thing)])


def members(kind: type) -> Iterator[str]:
    """What a class has of its own and says something about."""
    for name, member in vars(kind).items():
        function = member.fget if isinstance(member, property) else inspect.unwrap(member) if callable(member) else None
        if function is None or not function.__doc__ or (name.startswith("_") and name not in SHOWN):
            continue
        label = f".{name}" if isinstance(member, property) else signatures(f".{name}", function)
        yield f"{shown(label.replace('.__call__', kind.__name__.lower()))}\n\n{text(function)}"


# ----------------------------------------------------------------------------------- signatures


def signatures(name: str, function: Any) -> str:
    found = get_overloads(function) if inspect.isfunction(function) else []
    return "\n".join(signature(name, each) for each in found or [function])


def signature(name: str, function: Any) -> str:
    found = inspect.signature(function)
    parameters = [p for p in found.parameters.values() if p.name != "self"]
    starred = next((k for k, p in enumerate(parameters) if p.kind is p.KEYWORD_ONLY), None)
    arguments = [argument(p) for p in parameters]
    if starred is not None and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        arguments.insert(starred, "*")
    given = annotation(found.return_annotation)
    end = f" -> {given}" if given and not inspect.isclass(function) else ""
    line = f"{name}({', '.join(arguments)}){end}"
    return line if len(line) <= 110 else "\n".join([f"{name}(", *(f"    {each}," for each in arguments), f"){end}"])


def argument(parameter: inspect.Parameter) -> str:
    star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    kind = annotation(parameter.annotation)
    kind = f": {kind}" if kind not in ("", "Any") else ""
    if parameter.default is parameter.empty:
        return f"{star}{parameter.name}{kind}"
    return f"{parameter.name}{kind}{' = ' if kind else '='}{parameter.default!r}"


def annotation(value: Any) -> str:
    """As it is written in the source."""
    if value in (inspect.Parameter.empty, None):
        return ""
    return value if isinstance(value, str) else inspect.formatannotation(value)


# ----------------------------------------------------------------------------------- docstrings


def text(thing: Any) -> str:
    """A docstring as Markdown: blocks with columns stay as they are, `option: what it does` becomes a list."""
    document = inspect.cleandoc(thing.__doc__ or "")
    known = set(inspect.signature(thing).parameters) if callable(thing) else set()
    return "\n\n".join(block(part, known) for part in re.split(r"\n\s*\n", document) if part)


def block(part: str, parameters: set[str]) -> str:
    lines = part.split("\n")
    if any(line.startswith("    ") or re.search(r"\S {2,}\S", line) for line in lines):
        return shown(inspect.cleandoc("\n" + part))
    lines = [option(line, parameters) for line in lines]
    lines = [line if "`" in line else line.replace("*", r"\*") for line in lines]
    listed = [f"\n{line}" if line.startswith("- ") and before[:2] != "- " else line for before, line in pairs(lines)]
    return "\n".join(listed).strip("\n")


def option(line: str, parameters: set[str]) -> str:
    found = re.match(r"(\w+)((?:, \w+)*|=\S+): ", line)
    return f"- `{found[0][:-2]}`: {line[found.end() :]}" if found and found[1] in parameters else line


def pairs(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Each line with the one before, where a list goes on through the lines below its first."""
    before = ""
    for line in lines:
        yield before, line
        before = line if line.startswith("- ") or not before.startswith("- ") else before


def shown(code: str) -> str:
    return f"```\n{code}\n```"


if __name__ == "__main__":
    TARGET.write_text(page())
    print(f"{TARGET.name}: {len(page().splitlines())} lines")
