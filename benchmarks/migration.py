"""Run the code of the migration pages against both libraries, compare the results, and measure one number per page.

    python benchmarks/migration.py [page ...] [--write]        # make migration [WRITE=1]

A page has blocks of code for both libraries, and pairs of blocks between markers:

    <!-- columns: Opacus | samplewise -->      two blocks, one for each library
    <!-- /columns: norms, epsilon ~ 0.02 -->   variables that must be equal afterwards; 0.02 is a relative tolerance
    <!-- /columns: correlation of scores > 0.95 -->   variables that depend on random numbers of the libraries

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

PAGES = Path(__file__).resolve().parents[1] / "docs" / "migration"
TOLERANCE = 1e-4  # relative to the largest element; the pages use float32
ROUNDS = 15
CALLS = 5  # per round

BLOCK = r"^```python$\n(.*?)^```$"
PART = re.compile(
    rf"^<!-- columns: (?P<left>.+?) \| .+? -->$\s*{BLOCK}\s*{BLOCK}\s*^<!-- /columns(?:: (?P<same>.+?))? -->$|{BLOCK}",
    re.M | re.S,
)
MEASURED = re.compile(r"(?P<head>^<!-- measured: (?P<name>\w+) -->$\n).*?(?P<end>^<!-- /measured -->$)", re.M | re.S)

Namespace = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """Code of both libraries, and what is compared after it, as written in the marker."""

    left: str
    right: str
    claims: Sequence[str] = ()


def parts(text: str) -> Iterator[Part]:
    for found in PART.finditer(text):
        line = "\n" * text.count("\n", 0, found.start())
        _, one, two, same, both = found.groups()
        if both is not None:
            yield Part(line + both, line + both)
        else:
            yield Part(line + one, line + two, same.split(", ") if same else ())


def run(page: Path) -> tuple[Namespace, Namespace]:
    """Run both sides of a page; raise ValueError where their results differ."""
    left: Namespace = {"__name__": page.stem}
    right: Namespace = {"__name__": page.stem}
    for part in parts(page.read_text(encoding="utf-8")):
        with quiet():
            exec(compile(part.left, str(page), "exec"), left)
            exec(compile(part.right, str(page), "exec"), right)
        for claim in part.claims:
            compare(claim, left, right)
    return left, right


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide what the libraries print, and their warnings."""
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def compare(claim: str, left: Namespace, right: Namespace) -> None:
    """Check `name`, `name ~ tolerance` or `correlation of name > bound`."""
    correlated = re.fullmatch(r"correlation of (\w+) > (\S+)", claim)
    name, _, allowed = claim.partition(" ~ ")
    name = correlated[1] if correlated else name
    one, two = as_tensor(left[name]), as_tensor(right[name])
    if one.shape != two.shape:
        raise ValueError(f"{name} must have one shape; found {tuple(one.shape)} and {tuple(two.shape)}.")
    if correlated:
        found = torch.corrcoef(torch.stack([one.flatten(), two.flatten()]))[0, 1].item()
        holds = found > float(correlated[2])
    else:
        found = ((one - two).abs().max() / one.abs().max()).item()
        holds = found <= float(allowed or TOLERANCE)
    if not holds:
        raise ValueError(f"the page claims: {claim}; found {found:.2g}. Correct the code or the claim.")
    print(f"    {claim}: {found:.2g}")


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
        theirs, ours = as_tensor(one).item(), as_tensor(two).item()
        return f"`{name}`: **{theirs:.2g}** with {library}, **{ours:.2g}** with samplewise."
    with quiet():
        ratio = time_ratio(one, two)
    return f"`{name}()` takes **{ratio:.2f}** times as long with samplewise as with {library}."


def time_ratio(one: Callable[[], Any], two: Callable[[], Any]) -> float:
    """Median of the ratios of CPU times two / one, measured in turn, each of several calls."""
    ratios = []
    for _ in range(ROUNDS):
        first, second = seconds(one), seconds(two)
        ratios.append(second / first)
    return statistics.median(ratios[2:])  # the first rounds warm up


def seconds(call: Callable[[], Any]) -> float:
    start = time.process_time()
    for _ in range(CALLS):
        call()
    return time.process_time() - start


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
            with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
                check(PAGES / f"{name}.md", arguments.write)
        except (ValueError, ImportError) as why:
            print(f"    {type(why).__name__}: {why}")
            failed += 1
    return failed


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
