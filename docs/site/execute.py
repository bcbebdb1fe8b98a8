"""Run the Python blocks of a Markdown page in order; keep what each prints and the figures it draws.

python docs/site/execute.py docs/tutorials/accumulation.md build/site-outputs/accumulation
"""

import contextlib
import io
import json
import re
import sys
import time
import warnings
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt

BLOCK = re.compile(r"^```python$\n(.*?)^```$", re.M | re.S)
NEEDS = re.compile(r"<!-- needs: \w+ -->\s+\Z")  # before a block that tests/integrations runs
FIGURES = {
    "figure.facecolor": "white",  # the figures stay on white paper in the dark theme
    "figure.dpi": 100,
    "savefig.dpi": 144,
    "savefig.bbox": "tight",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 10,
}


def run(text: str, path: Path, target: Path) -> dict[str, object]:
    """Run the blocks in one namespace, in which warnings are errors."""
    namespace = {"__name__": "__main__"}
    found = []
    start = time.process_time()
    for number, block in enumerate(BLOCK.finditer(text)):
        if NEEDS.search(text, 0, block.start()):
            found.append({"text": "", "figures": []})
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            # Leading newlines make a traceback point at the line of the page.
            code = "\n" * text.count("\n", 0, block.start(1)) + block[1]
            exec(compile(code, str(path), "exec"), namespace)
        found.append({"text": printed.getvalue(), "figures": figures(target, number)})
    return {"blocks": found, "seconds": time.process_time() - start}


def figures(target: Path, number: int) -> list[str]:
    """Save and close the open figures."""
    names = []
    for k in plt.get_fignums():
        name = f"{number}-{k}.png"
        plt.figure(k).savefig(target / name)
        names.append(name)
    plt.close("all")
    return names


def main() -> None:
    path, target = map(Path, sys.argv[1:])
    mpl.use("agg")
    mpl.rcParams.update(FIGURES)
    warnings.simplefilter("error")
    warnings.filterwarnings("default", "updates stay uncompiled")  # on a machine without a C++ compiler
    # transformers 5.23 has renamed what peft 0.21, the latest release, calls.
    warnings.filterwarnings("default", "`is_gradient_checkpointing` is deprecated", FutureWarning)
    target.mkdir(parents=True, exist_ok=True)
    result = run(path.read_text(encoding="utf-8"), path, target)
    (target / "outputs.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
