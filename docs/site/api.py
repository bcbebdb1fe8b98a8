"""Pages of the API reference for the site, from the docstrings: one per section of docs/reference.py.

Sphinx's Python domain makes the links to names and to the source. The text of docstrings is Markdown, converted by
docs/reference.py.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, get_overloads

import reference

import samplewise
from samplewise.attribution import evaluate
from samplewise.loop import callbacks, events, loggers
from samplewise.testing import check_rule


def pages() -> dict[str, str]:
    """Path of each page -> its Markdown."""
    found = {f"reference/{slug(title)}.md": section(title) for title in reference.SECTIONS}
    found["reference/evaluate.md"] = evaluate_page()
    found["reference/callbacks.md"] = callbacks_page()
    found["reference/loggers.md"] = loggers_page()
    found["reference/testing.md"] = testing_page()
    found["reference/errors.md"] = errors_page()
    return found | {"reference.md": overview(list(found))}


def known() -> set[str]:
    """Names that have an entry: samplewise.Step, samplewise.Step.run, ..."""
    entries = re.findall(r"^`{4,}\{py:\w+\} (\S+?)(?:\(.*)?$\n:module: (\S+)", "\n".join(pages().values()), re.M)
    return {f"{module}.{name}" for name, module in entries}


def slug(title: str) -> str:
    return title.lower().replace(" ", "-")


def overview(paths: list[str]) -> str:
    """Table of all public names with the first line of each docstring, and the events of callbacks."""
    parts = ["# API reference", "All public names, as `import samplewise as sw` makes them available."]
    for title, names in reference.SECTIONS.items():
        rows = [f"| {link(f'samplewise.{name}', f'sw.{name}')} | {summary(name)} |" for name in names]
        parts += [f"## {title}", "\n".join(["| name | |", "|---|---|", *rows])]
    parts += [
        "## More",
        "- [Quality of attribution](reference/evaluate.md), in `samplewise.attribution.evaluate`\n"
        "- [Callbacks](reference/callbacks.md), in `sw.callbacks`\n"
        "- [Loggers](reference/loggers.md), in `sw.loggers`\n"
        "- [Gradient rules](reference/testing.md), in `samplewise.testing`\n"
        "- [Errors and warnings](reference/errors.md)",
        "## Events",
        reference.text(events),
        toctree(paths),
    ]
    return "\n\n".join(parts) + "\n"


def toctree(paths: list[str]) -> str:
    return "\n".join(["```{toctree}", ":hidden:", "", *(path.removesuffix(".md") for path in paths), "```"])


def link(target: str, text: str) -> str:
    return f"{{py:obj}}`{text} <{target}>`"


def summary(name: str) -> str:
    """First sentence of a docstring, for a cell of a table."""
    first = inspect.cleandoc(attrgetter(name)(samplewise).__doc__).split("\n\n")[0].replace("\n", " ")
    return re.split(r"(?<=\.)\s", first)[0].rstrip(":").replace("|", r"\|").replace("*", r"\*")


def section(title: str) -> str:
    parts = [f"# {title}"]
    parts += [entry(name, attrgetter(name)(samplewise), "samplewise") for name in reference.SECTIONS[title]]
    parts += [entry(kind.__name__, kind, kind.__module__) for kind in reference.RESULTS.get(title, ())]
    return "\n\n".join(parts) + "\n"


def evaluate_page() -> str:
    entries = [entry(name, getattr(evaluate, name), evaluate.__name__) for name in reference.EVALUATE]
    return "\n\n".join(["# Quality of attribution", reference.text(evaluate), *entries]) + "\n"


def callbacks_page() -> str:
    entries = [entry(name, each, callbacks.__name__) for name, each in reference.classes(callbacks)]
    return "\n\n".join(["# Callbacks", "In `sw.callbacks`.", *entries]) + "\n"


def loggers_page() -> str:
    entries = [entry(name, each, loggers.__name__) for name, each in reference.classes(loggers)]
    return "\n\n".join(["# Loggers", f"In `sw.loggers`. {reference.text(loggers)}", *entries]) + "\n"


def testing_page() -> str:
    found = entry("check_rule", check_rule, "samplewise.testing")
    return f"# Gradient rules\n\nIn `samplewise.testing`.\n\n{found}\n"


def errors_page() -> str:
    parts = ["# Errors and warnings", reference.text(samplewise.errors)]
    for name in reference.errors():
        parts.append(directive("exception", [name], "samplewise", getattr(samplewise, name).__doc__))
    return "\n\n".join(parts) + "\n"


# -------------------------------------------------------------------------------------- entries


def entry(name: str, thing: Any, module: str) -> str:
    if not inspect.isclass(thing):
        return directive("function", signatures(name, thing), module, reference.text(thing))
    heads = [name] if thing in reference.RETURNED else signatures(name, thing)
    body = "\n\n".join([reference.text(thing), *members(name, thing, module)])
    return directive("class", heads, module, body, ticks=5)


def members(owner: str, kind: type, module: str) -> Iterator[str]:
    """Methods and properties that are defined in the class and have a docstring."""
    for name, member in vars(kind).items():
        function = member.fget if isinstance(member, property) else inspect.unwrap(member) if callable(member) else None
        if function is None or not function.__doc__ or (name.startswith("_") and name not in reference.SHOWN):
            continue
        path = f"{owner}.{name}"
        heads = [path] if isinstance(member, property) else signatures(path, function)
        yield directive(
            "property" if isinstance(member, property) else "method", heads, module, reference.text(function)
        )


def directive(kind: str, heads: list[str], module: str, body: str, ticks: int = 4) -> str:
    fence = "`" * ticks
    first, *others = heads
    head = "\n".join([f"{fence}{{py:{kind}}} {first}", f":module: {module}"])
    if others:  # overloads: all but the first are signatures without an anchor
        overloads = "\n".join(others)
        body = f"```\n{overloads}\n```\n\n{body}"
    return f"{head}\n\n{body}\n{fence}"


def signatures(name: str, function: Any) -> list[str]:
    overloads = get_overloads(function) if inspect.isfunction(function) else []
    lines = [reference.signature(name, each) for each in overloads or [function]]
    return [
        " ".join(part.strip() for part in line.split("\n")).replace("( ", "(").replace(", )", ")") for line in lines
    ]
