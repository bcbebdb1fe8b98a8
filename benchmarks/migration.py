"""Run the code of the migration pages against both libraries, compare the results, and measure one number per page.

    python benchmarks/migration.py [page ...] [--write]        # make migration [WRITE=1]

A page has blocks of code for both libraries, and pairs of blocks between markers:

    <!-- columns: Opacus | samplewise -->      two blocks, one for each library
    <!-- /columns: norms, epsilon ~ 0.02 -->   variables that must be equal afterwards; 0.02 is a relative tolerance

The blocks of each library run in order in a namespace of their own. `<!-- measured: name -->` names a function, whose
time is compared, or a number. --write replaces the text below this marker. A page whose library is not installed is
reported as not run, and the command fails.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import re
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

PAGES = Path(__file__).parents[1] / "docs" / "migration"
TOLERANCE = 1e-4  # relative to the largest element; the pages use float32
ROUNDS = 25

BLOCK = r"^```python$\n(.*?)^```$"
PART = re.compile(
    rf"^<!-- columns: (?P<left>.+?) \| .+? -->$\s*{BLOCK}\s*{BLOCK}\s*^<!-- /columns(?:: (?P<same>.+?))? -->$|{BLOCK}",
    re.M | re.S,
)
MEASURED = re.compile(r"(?P<head>^<!-- measured: (?P<name>\w+) -->$\n).*?(?P<end>^<!-- /measured -->$)", re.M | re.S)

Namespace = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """Code of both libraries, and the variables to compare after it with their tolerances."""

    left: str
    right: str
    same: Mapping[str, float]


def parts(text: str) -> Iterator[Part]:
    for found in PART.finditer(text):
        line = "\n" * text.count("\n", 0, found.start())
        _, one, two, same, both = found.groups()
        if both is not None:
            yield Part(line + both, line + both, {})
        else:
            yield Part(line + one, line + two, dict(map(tolerance, same.split(", "))) if same else {})


def tolerance(text: str) -> tuple[str, float]:
    name, _, value = text.partition(" ~ ")
    return name, float(value) if value else TOLERANCE


def run(page: Path) -> tuple[Namespace, Namespace]:
    """Run both sides of a page; raise ValueError where their results differ."""
    left, right = {"__name__": page.stem}, {"__name__": page.stem}
    for part in parts(page.read_text(encoding="utf-8")):
        for code, namespace in ((part.left, left), (part.right, right)):
            with quiet():
                exec(compile(code, str(page), "exec"), namespace)
        for name, allowed in part.same.items():
            compare(name, left[name], right[name], allowed)
    return left, right


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide what the libraries print and log, and their warnings; work in a directory that is removed."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield


def compare(name: str, left: Any, right: Any, allowed: float) -> None:
    one, two = as_tensor(left), as_tensor(right)
    if one.shape != two.shape:
        raise ValueError(f"{name} must have one shape; found {tuple(one.shape)} and {tuple(two.shape)}.")
    error = ((one - two).abs().max() / one.abs().max()).item()
    if not error <= allowed:
        raise ValueError(f"{name} must be equal within {allowed:g}; found a relative difference of {error:.2g}.")
    print(f"    {name}: equal within {max(error, 1e-16):.0e}")


def as_tensor(value: Any) -> torch.Tensor:
    """Numbers, tensors, and lists or dicts of tensors as one vector in float64."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return torch.cat([as_tensor(each).flatten() for each in value])
    return torch.as_tensor(value).detach().double()


def measure(name: str, left: Namespace, right: Namespace, library: str) -> str:
    """Sentence about the measured number of a page."""
    one, two = left[name], right[name]
    if not callable(one):
        return f"`{name}`: **{as_tensor(one).item():.2g}** with {library}, **{as_tensor(two).item():.2g}** with samplewise."
    with quiet():
        ratio = time_ratio(one, two)
    return f"`{name}()` takes **{ratio:.2f}** times as long with samplewise as with {library}."


def time_ratio(one: Callable[[], Any], two: Callable[[], Any]) -> float:
    """Median of the ratios of CPU times two / one, measured in turn."""
    ratios = []
    for k in range(ROUNDS + 3):
        seconds = []
        for call in (one, two):
            start = time.process_time()
            call()
            seconds.append(time.process_time() - start)
        if k >= 3:  # the first calls warm up
            ratios.append(seconds[1] / seconds[0])
    return statistics.median(ratios)


def check(page: Path, write: bool) -> None:
    text = page.read_text(encoding="utf-8")
    found = MEASURED.search(text)
    library = PART.search(text[text.index("<!-- columns") :])
    assert found and library, "a page has columns and a measured number"
    left, right = run(page)
    sentence = measure(found["name"], left, right, library["left"])
    print(f"    {sentence}")
    if write:
        how = f"torch {torch.__version__}, float32, one thread; `python benchmarks/migration.py {page.stem}`"
        page.write_text(MEASURED.sub(rf"\g<head>\n{sentence} ({how}.)\n\n\g<end>", text), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    names = sorted(path.stem for path in PAGES.glob("*.md"))
    parser.add_argument("pages", nargs="*", choices=[[], *names], help="default: all")
    parser.add_argument("--write", action="store_true", help="replace the measured numbers in the pages")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    failed = 0
    for name in arguments.pages or names:
        print(name)
        try:
            check(PAGES / f"{name}.md", arguments.write)
        except (ValueError, ImportError) as why:
            print(f"    {type(why).__name__}: {why}")
            failed += 1
    return failed


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
